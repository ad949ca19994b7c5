"""Records `tests/data/vllm_exchange.json` from a real vLLM server: `python tests/support/record_vllm.py`.

The server's Python is found as `vllm_server` tells.
"""

import asyncio
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tiny_models import save_tiny_models, save_tiny_tokenizer
from vllm_exchange import FILE, PLAIN_SCENES, SCENES, Scene, record
from vllm_server import AS_DOCUMENTED, PLAIN, SHAPE, open_vllm


async def _record_all(scenes: Mapping[str, Scene], url: str, models: Path) -> dict[str, Any]:
    return {name: await record(scene, url, models) for name, scene in scenes.items()}


def _recorded(scenes: Mapping[str, Scene], models: Path, flags: Sequence[str]) -> dict[str, Any]:
    with open_vllm(models / "0", log=models / "log", flags=flags) as server:
        return asyncio.run(_record_all(scenes, server.url, models))


def main() -> None:
    """Starts two servers, one after the other, and writes the file."""
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        save_tiny_models(models, count=2, **SHAPE)
        save_tiny_tokenizer(models / "0")
        exchange = {
            "spans": _recorded(SCENES, models, AS_DOCUMENTED),
            "plain": _recorded(PLAIN_SCENES, models, PLAIN),
        }
    FILE.write_text(json.dumps(exchange, indent=1) + "\n")


if __name__ == "__main__":
    main()

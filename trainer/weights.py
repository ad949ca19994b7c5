"""Publishing weights: a folder that transformers and SGLang can load, whole or not there."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from driftgym.trainer.checkpoint import file_checksum
from driftgym.trainer.models import TOKENIZER_FILES
from driftgym.types import WeightUpdate

WEIGHTS_FILE = "model.safetensors"
_PARTIAL = ".partial-"
_NUM_KEPT = 2


def publish_weights(
    tensors: Iterable[tuple[str, Tensor]],
    *,
    root: Path,
    policy_version: int,
    incarnation: int,
    config: dict[str, Any],
    tokenizer_folder: Path,
) -> WeightUpdate:
    """Writes one publication into `root/INCARNATION-VERSION`, then removes all but the two newest.

    Everything is written under another name and renamed last: a reader finds the folder complete or not at all, and
    the one before stays when the writer is killed. The same version published again replaces the earlier folder.

    Args:
        tensors: names and tensors, each tensor once.
        root: holds one folder per publication.
        policy_version: the number of optimizer steps that the weights have had.
        incarnation: the life of the run.
        config: what config.json says.
        tokenizer_folder: where the tokenizer's files are copied from.
    """
    target = root / f"{incarnation}-{policy_version}"
    partial = root / (_PARTIAL + target.name)
    _remove_partial(root)
    partial.mkdir(parents=True)
    (partial / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
    for name in TOKENIZER_FILES:
        if (tokenizer_folder / name).is_file():
            shutil.copyfile(tokenizer_folder / name, partial / name)
    safetensors.torch.save_file(
        {name: tensor.to("cpu").contiguous() for name, tensor in tensors},
        partial / WEIGHTS_FILE,
        metadata={"format": "pt"},
    )
    checksum = file_checksum(partial / WEIGHTS_FILE)
    if target.exists():
        target.rename(root / (_PARTIAL + "replaced"))
    partial.rename(target)
    _remove_partial(root)
    _remove_old(root)
    return WeightUpdate(policy_version=policy_version, incarnation=incarnation, location=str(target), checksum=checksum)


def _remove_partial(root: Path) -> None:
    """Removes what a writer that was killed left behind."""
    for leftover in root.glob(_PARTIAL + "*"):
        shutil.rmtree(leftover)


def _remove_old(root: Path) -> None:
    publications = [path for path in root.iterdir() if path.is_dir() and path.name.count("-") == 1]
    numbered = [path for path in publications if all(part.isdigit() for part in path.name.split("-"))]
    for path in sorted(numbered, key=lambda path: [int(part) for part in path.name.split("-")])[:-_NUM_KEPT]:
        shutil.rmtree(path)

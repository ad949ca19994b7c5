"""Publishing weights: as whole models, as the tensors that changed, or as LoRA adapters, whichever is smallest."""

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from driftgym.trainer.adapters import Adapters, copied, on_top_of, peft_config, peft_tensors
from driftgym.trainer.checkpoint import file_checksum
from driftgym.trainer.models import TOKENIZER_FILES
from driftgym.trainer.publications import new_publication, publication_folder, remove_unused, write_record
from driftgym.types import WeightKind, WeightUpdate

WEIGHTS_FILE = "model.safetensors"
DELTA_FILE = "delta.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
_MAX_DELTAS = 16
_MAX_DELTA_SHARE = 0.5


class WeightPublisher:
    """Writes the weights of one life of a run, publication after publication. What each folder holds:

    - `full`: a model that transformers and SGLang load (`config.json`, the tokenizer, `model.safetensors`).
    - `delta`: the tensors that changed since the publication before, on which they are put (`delta.safetensors`).
      Published where these are at most half of all bytes, and, with the deltas before them, no more than all: whoever
      joins reads the newest full publication and the deltas after it, which is then never more than twice a model.
    - `lora`: a peft adapter (`adapter_config.json`, `adapter_model.safetensors`) that is put on the newest full
      publication, in the place of any adapter before.

    Every generator must have been brought to a publication before the next: deltas follow one another.
    """

    def __init__(
        self,
        root: Path,
        *,
        config: Mapping[str, Any],
        tokenizer_folder: Path,
        incarnation: int,
        kinds: tuple[WeightKind, ...] = ("full",),
    ) -> None:
        """Writes nothing yet.

        Args:
            root: holds a folder for each publication; made when it is not there.
            config: what config.json says.
            tokenizer_folder: where the tokenizer's files are copied from.
            incarnation: the life of the run.
            kinds: those that the generators take; full ones they always do.
        """
        self.root = root
        self._config = config
        self._tokenizer_folder = tokenizer_folder
        self._incarnation = incarnation
        self._kinds = frozenset(kinds)
        self._newest: WeightUpdate | None = None
        self._digests: Mapping[str, bytes] = {}
        self._num_deltas = 0
        self._delta_bytes = 0
        self._full: WeightUpdate | None = None
        self._merged: Adapters | None = None

    def publish(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        policy_version: int,
        *,
        adapters: Adapters | None = None,
        is_last: bool = False,
    ) -> WeightUpdate:
        """Writes one publication into `root/INCARNATION-VERSION`, then removes what no generator needs any more.

        A reader finds the folder complete or not at all, and the ones before stay when the writer is killed. The same
        version published again replaces the earlier folder, with a full publication.

        Args:
            tensors: names and tensors, each tensor once, adapters merged in. Not read when adapters are published.
            policy_version: the number of optimizer steps that the weights have had.
            adapters: those that are merged in, where the weights below them stay as they are.
            is_last: the last of the run, which people go on with: full, and on the disk when this returns.

        Raises:
            OSError: it cannot be written.
        """
        is_next = self._newest is not None and policy_version > self._newest.policy_version and not is_last
        if is_next and adapters is not None and self._merged is not None and "lora" in self._kinds:
            update = self._publish_adapters(on_top_of(adapters, self._merged), policy_version)
        else:
            on_cpu = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors}
            update = self._publish_tensors(on_cpu, policy_version, may_be_delta=is_next, is_durable=is_last)
            if update.kind == "full":
                self._merged = None if adapters is None else copied(adapters)
        self._newest = update
        remove_unused(self.root)
        return update

    def _publish_adapters(self, adapters: Adapters, policy_version: int) -> WeightUpdate:
        assert self._full is not None
        config = peft_config(adapters, base_folder=self._full.location)
        return self._write(
            policy_version,
            peft_tensors(adapters),
            file_name=ADAPTER_FILE,
            base=self._full,
            kind="lora",
            texts={ADAPTER_CONFIG_FILE: json.dumps(config, indent=2)},
        )

    def _publish_tensors(
        self, tensors: Mapping[str, Tensor], policy_version: int, *, may_be_delta: bool, is_durable: bool
    ) -> WeightUpdate:
        digests = {name: _digest(tensor) for name, tensor in tensors.items()} if "delta" in self._kinds else {}
        changed = {name: tensor for name, tensor in tensors.items() if self._digests.get(name) != digests.get(name)}
        is_delta = may_be_delta and self._digests.keys() == digests.keys() and self._is_cheaper(changed, tensors)
        if is_delta:
            update = self._write(policy_version, changed, file_name=DELTA_FILE, base=self._newest, kind="delta")
            self._num_deltas += 1
            self._delta_bytes += _num_bytes(changed)
        else:
            texts = {"config.json": json.dumps(self._config, indent=2, sort_keys=True)}
            update = self._full = self._write(
                policy_version, tensors, file_name=WEIGHTS_FILE, kind="full", texts=texts, is_durable=is_durable
            )
            self._num_deltas = self._delta_bytes = 0
        self._digests = digests
        return update

    def _is_cheaper(self, changed: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> bool:
        """True when `changed` is better published alone: see the class."""
        follows = self._newest is not None and self._newest.kind != "lora" and self._num_deltas < _MAX_DELTAS
        if "delta" not in self._kinds or not follows:
            return False
        num_changed, num_all = _num_bytes(changed), _num_bytes(tensors)
        return num_changed <= _MAX_DELTA_SHARE * num_all and self._delta_bytes + num_changed <= num_all

    def _write(
        self,
        policy_version: int,
        tensors: Mapping[str, Tensor],
        *,
        file_name: str,
        kind: WeightKind,
        base: WeightUpdate | None = None,
        texts: Mapping[str, str] | None = None,
        is_durable: bool = False,
    ) -> WeightUpdate:
        """The folder of one publication, with `texts` by file name."""
        target = publication_folder(self.root, incarnation=self._incarnation, policy_version=policy_version)
        with new_publication(target, is_durable=is_durable) as folder:
            for name, text in (texts or {}).items():
                (folder / name).write_text(text, encoding="utf-8")
            if kind == "full":
                self._copy_tokenizer(folder)
            safetensors.torch.save_file(dict(tensors), folder / file_name, metadata={"format": "pt"})
            update = WeightUpdate(
                policy_version=policy_version,
                incarnation=self._incarnation,
                location=str(target),
                checksum=file_checksum(folder / file_name),
                base_policy_version=None if base is None else base.policy_version,
                kind=kind,
            )
            write_record(folder, update)
        return update

    def _copy_tokenizer(self, folder: Path) -> None:
        for name in TOKENIZER_FILES:
            if (self._tokenizer_folder / name).is_file():
                shutil.copyfile(self._tokenizer_folder / name, folder / name)


def _num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _digest(tensor: Tensor) -> bytes:
    """Of the shape, the type and the bytes."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()

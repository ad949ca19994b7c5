"""The weights of a served model: read and checked aside, then put in place between two tokens.

Shapes: r the rank of an adapter.
"""

import collections
import hashlib
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from driftgym.agents.generators.embedded.requests import WeightsOrder

_ADAPTER = "default"
_ADAPTER_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PARTS = re.compile(r"\.(lora_(?:embedding_)?[AB])\b")


class WeightsRefusedError(Exception):
    """The weights in the folder are not those of this model, or not for those that it has; the model is as it was."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NewWeights:
    """Weights that were read, and are not in place yet.

    >>> order = WeightsOrder(folder=Path("weights/1-4"), version="1:4")
    >>> NewWeights(order=order, tensors={"lm_head.weight": torch.zeros(8, 4)}).order.kind
    'full'
    """

    order: WeightsOrder
    """What was asked for."""
    tensors: Mapping[str, torch.Tensor]
    """By the name of the weight that each replaces; for `lora`, what is added to that of the base."""


class ModelWeights:
    """The weights of one model, and the names of all that it has had.

    What an adapter is put on is kept beside the model, so that the next adapter replaces the former.
    """

    def __init__(self, model: Any, *, version: str) -> None:
        """`version` names the weights that the model has."""
        self._model = model
        self._versions = [version]
        self._base_version = version
        self._base: dict[str, torch.Tensor] = {}

    @property
    def version(self) -> str:
        """The name of the weights that the model has."""
        return self._versions[-1]

    @property
    def base_version(self) -> str:
        """The name of the weights that an adapter is put on: the newest ones that were no adapter."""
        return self._base_version

    @property
    def kinds(self) -> list[str]:
        """The kinds of weights that it takes from folders."""
        return kinds_of_weights()

    @property
    def transports(self) -> list[str]:
        """How weights come here, as `WeightUpdate.transport` names it."""
        return ["disk"]

    @property
    def versions(self) -> list[str]:
        """The names of all that it has had, by epoch."""
        return self._versions

    @property
    def epoch(self) -> int:
        """How many weights it had before these."""
        return len(self._versions) - 1

    def check(self, order: WeightsOrder) -> None:
        """Raises WeightsRefusedError when the model does not have what the weights of `order` are put on."""
        have = {"full": order.base_version, "delta": self.version, "lora": self._base_version}[order.kind]
        if order.base_version != have:
            raise WeightsRefusedError(
                f"{order.kind} weights {order.version} are put on {order.base_version}, here are {have}: "
                f"send full weights first"
            )

    def read(self, order: WeightsOrder) -> NewWeights:
        """The weights in the folder of `order`, all checked but for what they are put on. Safe in any thread.

        Raises:
            WeightsRefusedError: a file cannot be read, or is another than its checksum says; a name is missing or
                unknown, or a shape is another; an adapter is of a kind that is not merged here.
        """
        own = self._model.state_dict(keep_vars=True)
        if order.kind == "lora":
            tensors = self._adapter_sums(order)
            _check_not_shared(own, tensors, order.folder)
        else:
            tensors = _read_tensors(order)
        _check_names(own, tensors, order)
        return NewWeights(order=order, tensors=tensors)

    @torch.no_grad()
    def take(self, new: NewWeights) -> None:
        """Puts `new` in place, whole or not at all.

        Raises:
            WeightsRefusedError: as `check`.
        """
        self.check(new.order)
        own = self._model.state_dict(keep_vars=True)
        if new.order.kind == "lora":
            self._merge(own, new.tensors)
        else:
            for name, tensor in new.tensors.items():
                own[name].copy_(tensor)
            self._base.clear()
            self._base_version = new.order.version
        self._versions.append(new.order.version)

    def _merge(self, own: Mapping[str, torch.Tensor], sums: Mapping[str, torch.Tensor]) -> None:
        for name in self._base.keys() - sums.keys():
            own[name].copy_(self._base[name])
        for name, added in sums.items():
            if name not in self._base:
                self._base[name] = own[name].detach().clone()
            own[name].copy_(self._base[name] + added.to(self._base[name]))

    @torch.no_grad()
    def _adapter_sums(self, order: WeightsOrder) -> dict[str, torch.Tensor]:
        """What the peft adapter in the folder adds to each weight, as peft computes it."""
        if importlib.util.find_spec("peft") is None:
            raise WeightsRefusedError(
                "lora: the package peft is not installed where the server runs; run `pip install driftgym[lora]` there"
            )
        import peft  # an extra, needed by adapters alone

        tensors = _read_tensors(order, file_name=_ADAPTER_FILE)
        try:
            # A likeness without memory: the model itself is never touched, so that it can go on decoding.
            with torch.device("meta"):
                skeleton = type(self._model)(self._model.config)
            config = peft.PeftConfig.from_pretrained(os.fspath(order.folder))
            _check_adapter(config, order.folder)
            skeleton = peft.inject_adapter_in_model(config, skeleton, _ADAPTER, low_cpu_mem_usage=True)
            # peft's own loading would leave the tensors where the likeness is: without memory.
            loaded = skeleton.load_state_dict(_with_adapter_names(tensors), strict=False, assign=True)
        except WeightsRefusedError:
            raise
        except Exception as error:  # peft has many; whatever it raises, the folder is what is wrong
            raise WeightsRefusedError(f"{order.folder}: no adapter for this model: {_first_line(error)}") from error
        if loaded.unexpected_keys:
            raise WeightsRefusedError(f"{order.folder}: unknown tensors, the first is {loaded.unexpected_keys[0]}")
        if missing := [name for name in loaded.missing_keys if ".lora_" in name]:
            raise WeightsRefusedError(f"{order.folder}: {len(missing)} tensors are missing, the first is {missing[0]}")
        return _sums(skeleton, order.folder)


def kinds_of_weights() -> list[str]:
    """Those that can be taken here."""
    return ["full", "delta", *(["lora"] if importlib.util.find_spec("peft") else [])]


def _check_adapter(config: Any, folder: Path) -> None:
    """Raises WeightsRefusedError for an adapter that is more than a product added to weights."""
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA":
        raise WeightsRefusedError(f"{folder}: an adapter of kind {kind}; LORA is merged here")
    for key in ("use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "target_parameters"):
        if getattr(config, key, None):
            raise WeightsRefusedError(f"{folder}: adapter_config.json sets {key}, which is not merged here")
    if config.bias != "none":
        raise WeightsRefusedError(f"{folder}: adapter_config.json sets bias {config.bias!r}, which is not merged here")


def _with_adapter_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Names as peft writes them become those of a model with one adapter in it."""
    return {_PARTS.sub(rf".\1.{_ADAPTER}", name.removeprefix(_PREFIX)): each for name, each in tensors.items()}


def _sums(skeleton: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Name of the weight to what its adapter adds. Raises WeightsRefusedError for a variant of LoRA."""
    sums: dict[str, torch.Tensor] = {}
    for name, module in skeleton.named_modules():
        if not hasattr(module, "get_delta_weight"):
            continue
        if getattr(module, "lora_variant", None):
            raise WeightsRefusedError(f"{folder}: {name}: a variant of LoRA, which is not merged here")
        sums[f"{name}.weight"] = module.get_delta_weight(_ADAPTER)
    return sums


def _check_not_shared(own: Mapping[str, torch.Tensor], sums: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Raises WeightsRefusedError for an adapter on one of several layers that have the same weight."""
    num_uses = collections.Counter(tensor.data_ptr() for tensor in own.values())
    for name in sums:
        if name in own and num_uses[own[name].data_ptr()] > 1:
            raise WeightsRefusedError(f"{folder}: {name}: adapted, and another layer shares that weight")


def _read_tensors(order: WeightsOrder, *, file_name: str = "*.safetensors") -> dict[str, torch.Tensor]:
    files = sorted(order.folder.glob(file_name))
    if not files:
        raise WeightsRefusedError(f"{order.folder}: no file {file_name}")
    if order.checksum is not None:
        _check_sum(files, order.checksum)
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors.update(load_file(os.fspath(file)))
        except Exception as error:  # the library has error types of its own for damaged files
            raise WeightsRefusedError(f"{file}: cannot be read: {error}") from error
    return tensors


def _check_sum(files: list[Path], checksum: str) -> None:
    if len(files) > 1:
        raise WeightsRefusedError(f"{files[0].parent}: a checksum names one file, here are {len(files)}")
    try:
        with files[0].open("rb") as file:
            found = "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise WeightsRefusedError(f"{files[0]}: cannot be read: {error.strerror}") from error
    if found != checksum:
        raise WeightsRefusedError(f"{files[0]}: is {found}, its checksum says {checksum}")


def _check_names(own: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor], order: WeightsOrder) -> None:
    if unknown := sorted(given.keys() - own.keys()):
        raise WeightsRefusedError(f"{order.folder}: {len(unknown)} unknown tensors, the first is {unknown[0]}")
    for name, tensor in given.items():
        if tensor.shape != own[name].shape:
            raise WeightsRefusedError(
                f"{order.folder}: {name} is of shape {tuple(tensor.shape)}, here it is {tuple(own[name].shape)}"
            )
    if order.kind != "full":
        return
    # A tensor that shares its memory with a given one (tied embeddings) is given too.
    covered = {own[name].data_ptr() for name in given}
    if missing := sorted(name for name, tensor in own.items() if tensor.data_ptr() not in covered):
        raise WeightsRefusedError(f"{order.folder}: {len(missing)} tensors are missing, the first is {missing[0]}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

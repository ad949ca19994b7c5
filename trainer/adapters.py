"""LoRA adapters as peft writes them: what generators take in the place of whole weights.

Shapes: r the rank, I inputs and O outputs of a linear layer. The adapted weight is W + scaling · up @ down.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ADAPTER_NAME = "default"
_PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """What is put on one linear layer.

    >>> Adapter(down=torch.zeros(2, 8), up=torch.zeros(4, 2), scaling=2.0).rank
    2
    """

    down: Tensor
    """[r, I]."""
    up: Tensor
    """[O, r]."""
    scaling: float
    """Multiplies their product."""

    @property
    def rank(self) -> int:
        """r."""
        return self.down.shape[0]


Adapters = Mapping[str, Adapter]
"""By the name of the layer. All have the same rank and scaling."""


def adapters_of(model: nn.Module) -> Adapters | None:
    """The adapters of a model, not copied; None when it has none, or some that are not plain ones on linear layers."""
    layers: dict[str, Any] = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    if not layers or not all(_is_plain(layer) for layer in layers.values()):
        return None
    adapters = {
        name: Adapter(
            down=layer.lora_A[ADAPTER_NAME].weight.detach(),
            up=layer.lora_B[ADAPTER_NAME].weight.detach(),
            scaling=float(layer.scaling[ADAPTER_NAME]),
        )
        for name, layer in layers.items()
    }
    return adapters if len({(each.rank, each.scaling) for each in adapters.values()}) == 1 else None


def _is_plain(layer: Any) -> bool:
    is_transposed = getattr(layer, "fan_in_fan_out", False)
    return ADAPTER_NAME in layer.lora_A and isinstance(layer.get_base_layer(), nn.Linear) and not is_transposed


def copied(adapters: Adapters) -> Adapters:
    """`adapters` as they are now, on the CPU."""
    return {
        name: Adapter(down=each.down.cpu().clone(), up=each.up.cpu().clone(), scaling=each.scaling)
        for name, each in adapters.items()
    }


def on_top_of(adapters: Adapters, merged: Adapters) -> Adapters:
    """What leads from weights with `merged` merged in to those with `adapters` merged in instead.

    The difference of two products of rank r is one of rank 2r: up @ down - up' @ down' = [up, -up'] @ [down; down'].
    Where `merged` is nothing yet (adapters begin at zero), that is `adapters` alone.
    """
    if not any(bool(each.up.any()) for each in merged.values()):
        return adapters
    return {
        name: Adapter(
            down=torch.cat([each.down.cpu(), merged[name].down]),
            up=torch.cat([each.up.cpu(), -merged[name].up], dim=1),
            scaling=each.scaling,
        )
        for name, each in adapters.items()
    }


def peft_tensors(adapters: Adapters) -> dict[str, Tensor]:
    """The tensors of `adapter_model.safetensors`."""
    return {
        f"{_PEFT_PREFIX}{name}.{part}.weight": tensor.to("cpu").contiguous()
        for name, each in adapters.items()
        for part, tensor in (("lora_A", each.down), ("lora_B", each.up))
    }


def peft_config(adapters: Adapters, *, base_folder: str) -> dict[str, Any]:
    """The content of `adapter_config.json`. `base_folder` holds the weights that they are put on."""
    first = next(iter(adapters.values()))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_folder,
        "r": first.rank,
        "lora_alpha": first.scaling * first.rank,
        "target_modules": sorted(adapters),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }

"""The output head in float32, whatever the model's own type.

Log-probs are differences of large logits: in bfloat16 they would be off by a hundredth of a nat, which is more than a
policy moves in a step.
"""

from typing import Any

import torch
from torch import Tensor, nn


def head_logits(head: Any, hidden: Tensor) -> Tensor:
    """[N, V] the head's output for [N, H], in float32 at least; weights that are of that type are not copied.

    A linear layer, with or without LoRA on it, is computed in that type; another head is called as it is, and its
    output converted.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    if type(head) is nn.Linear:
        bias = head.bias.to(dtype) if head.bias is not None else None
        return nn.functional.linear(hidden.to(dtype), head.weight.to(dtype), bias)
    if hasattr(head, "base_layer") and hasattr(head, "lora_A"):
        return _adapted_logits(head, hidden.to(dtype))
    return head(hidden).to(dtype)


def _adapted_logits(head: Any, hidden: Tensor) -> Tensor:
    """[N, V] what peft's layer gives: the linear layer, and each active adapter's up · down · scaling on top."""
    logits = head_logits(head.base_layer, hidden)
    names = () if head.disable_adapters else head.active_adapters
    for name in names:
        down, up = (part[name].weight.to(hidden.dtype) for part in (head.lora_A, head.lora_B))
        logits = logits + nn.functional.linear(nn.functional.linear(hidden, down), up) * head.scaling[name]
    return logits

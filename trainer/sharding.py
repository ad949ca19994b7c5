"""A model over several processes: each holds a part of every parameter, gradient and moment (FSDP2).

Parameters are whole while a layer computes, and parts else. Gradients are the sums over all processes: the weights of
tokens are those in the whole batch, so that nothing is left to be divided. The functions work on plain tensors too,
and then do nothing. What makes something whole, and `grad_norm`, meet the other processes (see `ranks`).
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from driftgym.trainer.batching import TokenScorer
from driftgym.trainer.precision import body_dtype
from driftgym.trainer.ranks import Ranks


def sharded(scorer: TokenScorer, ranks: Ranks) -> TokenScorer:
    """`scorer`, its model cut into parts, of which this process keeps its own; as it is for one process alone.

    The decoder's layers are gathered one at a time; the rest (embeddings, last norm, head) for a whole pass, since tied
    weights are read at its beginning and at its end. So is everything where a decoder is computed with copies of its
    weights, which are made all at once (see `precision`).
    """
    if ranks.size == 1:
        return scorer
    layers = None if _computes_with_copies(scorer.model) else getattr(scorer.get_decoder(), "layers", None)
    # Whole weights are dropped after every pass, also after one without gradients: they would be out of date after the
    # next step, and taken for the new ones.
    for module in [*(layers if isinstance(layers, nn.ModuleList) else ()), scorer]:
        fully_shard(module, mesh=ranks.mesh, reshard_after_forward=True)
    for part in scorer.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    return scorer


def _computes_with_copies(model: nn.Module) -> bool:
    return body_dtype(model) != next(model.parameters()).dtype


@torch.no_grad()
def copy_parameters(source: nn.Module, target: nn.Module) -> None:
    """Makes the parameters of `target` those of `source`, a model cut in the same way. Meets nobody."""
    parameters = dict(source.named_parameters())
    for name, parameter in target.named_parameters():
        parameter.copy_(parameters[name])


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, of which this process has a part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_of(tensor: Tensor, *, like: Tensor) -> Tensor:
    """Of a whole tensor the part that this process keeps of `like`, which has the same shape."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def gathered(tensors: Mapping[str, Tensor], *, keeps: bool) -> dict[str, Tensor]:
    """All of each tensor, on the CPU; one after another, and nothing where this process `keeps` none."""
    kept: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        full = whole(tensor.detach())
        if keeps:
            kept[name] = full.to("cpu").contiguous()
    return kept


def optimizer_state(optimizer: torch.optim.Optimizer, *, keeps: bool) -> dict[str, Any]:
    """The state of `optimizer` as that of one over whole parameters; without moments where this process keeps none."""
    state = optimizer.state_dict()
    moments = {index: gathered(each, keeps=keeps) for index, each in state["state"].items()}
    return {**state, "state": moments if keeps else {}}


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Puts what `optimizer_state` gave into `optimizer`, of which this process keeps its part. Meets nobody."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moments = {
        index: {name: _moment(value, parameters[index]) for name, value in each.items()}
        for index, each in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": moments})


def _moment(value: Tensor, parameter: Tensor) -> Tensor:
    return part_of(value, like=parameter) if value.shape == parameter.shape else value  # the other is a counter


def grad_norm(parameters: Iterable[nn.Parameter], ranks: Ranks) -> Tensor:
    """[] the norm of all gradients, those of every process."""
    gradients = [_own_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    return ranks.root_of_squares(torch.nn.utils.get_total_norm(gradients))


def _own_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

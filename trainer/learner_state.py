"""What a checkpoint keeps of a learner: the trained weights, the optimizer, and the random state."""

import json
from collections.abc import Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import nn

from driftgym.errors import TrainingError
from driftgym.trainer.checkpoint import check_sealed, sealed_folder
from driftgym.trainer.sharding import gathered, load_optimizer_state, optimizer_state, part_of

_WEIGHTS = "weights.safetensors"
_OPTIMIZER = "optimizer.pt"
_STATE = "state.json"
_REFERENCE = "reference.safetensors"


def save_state(
    folder: Path,
    *,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    policy_version: int,
    reference: Mapping[str, nn.Parameter] | None = None,
    writes: bool = True,
) -> None:
    """Writes the state into `folder`, sealed (see checkpoint). Raises OSError when it cannot be written.

    Of a learner of several processes all must call it: it gathers whole tensors, so that any number of processes can
    go on with them.

    Args:
        folder: takes the files.
        parameters: that are trained.
        optimizer: of these.
        policy_version: of these.
        reference: the same parameters of the reference policy, where there is one.
        writes: false in the processes that only give their parts.
    """
    weights = gathered(parameters, keeps=writes)
    reference_weights = None if reference is None else gathered(reference, keeps=writes)
    moments = optimizer_state(optimizer, keeps=writes)
    if not writes:
        return
    with sealed_folder(folder) as partial:
        safetensors.torch.save_file(weights, partial / _WEIGHTS)
        if reference_weights is not None:
            safetensors.torch.save_file(reference_weights, partial / _REFERENCE)
        torch.save({"optimizer": moments, "torch_rng": torch.get_rng_state()}, partial / _OPTIMIZER)
        (partial / _STATE).write_text(json.dumps({"policy_version": policy_version}), encoding="utf-8")


def load_state(
    folder: Path,
    *,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    policy_version: int,
    reference: Mapping[str, nn.Parameter] | None = None,
) -> None:
    """Puts what `save_state` wrote into the parameters, the optimizer and the random state; of each its part.

    What the optimizer was told when it was made (betas, weight decay) stays.

    Raises:
        TrainingError: a file is missing or damaged, or the state is of another version or of another model; nothing
            has been taken up.
    """
    check_sealed(folder)
    saved_version = json.loads((folder / _STATE).read_text(encoding="utf-8"))["policy_version"]
    if saved_version != policy_version:
        raise TrainingError(f"checkpoint {folder}: is of policy version {saved_version}, not {policy_version}")
    tensors = _read(folder, _WEIGHTS, parameters)
    reference_tensors = {} if reference is None else _read(folder, _REFERENCE, reference)
    state = torch.load(folder / _OPTIMIZER, map_location="cpu", weights_only=True)
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    load_optimizer_state(optimizer, state["optimizer"])
    for group, of_config in zip(optimizer.param_groups, settings, strict=True):
        group.update(of_config)  # which may have changed since
    torch.set_rng_state(state["torch_rng"])
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(part_of(tensors[name], like=parameter))
        for name, tensor in reference_tensors.items():
            kept = (reference or {})[name]
            kept.copy_(part_of(tensor, like=kept))


def has_reference(folder: Path) -> bool:
    """True when `save_state` was given a reference policy to write to `folder`."""
    return (folder / _REFERENCE).is_file()


def _read(folder: Path, file_name: str, parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """The tensors of a file of the checkpoint. Raises TrainingError when they are not there, or of another model."""
    if not (folder / file_name).is_file():
        raise TrainingError(f"checkpoint {folder}: has no {file_name}; it was written without a reference policy")
    tensors = safetensors.torch.load_file(folder / file_name)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if shapes != {name: tuple(parameter.shape) for name, parameter in parameters.items()}:
        raise TrainingError(f"checkpoint {folder}: is of another model than the one that is configured")
    return tensors

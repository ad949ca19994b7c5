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
) -> None:
    """Writes the state into `folder`, sealed (see checkpoint). Raises OSError when it cannot be written.

    `reference`: the same parameters of the reference policy, where there is one.
    """
    with sealed_folder(folder) as partial:
        safetensors.torch.save_file(_on_cpu(parameters), partial / _WEIGHTS)
        if reference is not None:
            safetensors.torch.save_file(_on_cpu(reference), partial / _REFERENCE)
        torch.save({"optimizer": optimizer.state_dict(), "torch_rng": torch.get_rng_state()}, partial / _OPTIMIZER)
        (partial / _STATE).write_text(json.dumps({"policy_version": policy_version}), encoding="utf-8")


def load_state(
    folder: Path,
    *,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    policy_version: int,
    reference: Mapping[str, nn.Parameter] | None = None,
) -> None:
    """Puts what `save_state` wrote into the parameters, the optimizer and the random state.

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
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["torch_rng"])
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
        for name, tensor in reference_tensors.items():
            (reference or {})[name].copy_(tensor)


def has_reference(folder: Path) -> bool:
    """True when `save_state` was given a reference policy to write to `folder`."""
    return (folder / _REFERENCE).is_file()


def _on_cpu(parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().to("cpu").contiguous() for name, parameter in parameters.items()}


def _read(folder: Path, file_name: str, parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """The tensors of a file of the checkpoint. Raises TrainingError when they are not there, or of another model."""
    if not (folder / file_name).is_file():
        raise TrainingError(f"checkpoint {folder}: has no {file_name}; it was written without a reference policy")
    tensors = safetensors.torch.load_file(folder / file_name)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if shapes != {name: tuple(parameter.shape) for name, parameter in parameters.items()}:
        raise TrainingError(f"checkpoint {folder}: is of another model than the one that is configured")
    return tensors

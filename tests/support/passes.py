"""Passes over segments, compared: the same loss, gradients and metrics, however the segments are cut and split."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from driftgym.trainer.batching import Row
from driftgym.trainer.gradients import PassReport, PassSettings, accumulate_gradients
from driftgym.trainer.model_loading import load_model, trained_parameters
from driftgym.trainer.models import ModelConfig
from driftgym.trainer.objectives import LossSpec

CPU = torch.device("cpu")
Models: TypeAlias = tuple[Any, Any]
"""A policy and a reference."""
Passed: TypeAlias = tuple[PassReport, dict[str, torch.Tensor]]
"""What a pass reports, and the gradients by the names of the parameters."""


def policy_and_reference(folder: Path) -> Models:
    """Models of the configuration in `folder`, in float64."""
    config = ModelConfig(path="m", init="random")
    policy, reference = (load_model(config, folder, seed=seed, device=CPU).double() for seed in (3, 4))
    return policy, reference


def run_pass(models: Models, rows: Sequence[Row], loss: LossSpec, *, max_tokens: int) -> Passed:
    """One pass at version 3, from no gradients on."""
    model, reference = models
    model.zero_grad()
    settings = PassSettings(
        loss=loss,
        temperature=1.0,
        max_tokens=max_tokens,
        device=CPU,
        reference=reference if loss.needs_reference else None,
    )
    report = accumulate_gradients(model, rows, policy_version=3, settings=settings)
    return report, {name: p.grad.clone() for name, p in trained_parameters(model).items() if p.grad is not None}


def check_same(one: Passed, other: Passed) -> None:
    """The two differ by rounding alone."""
    assert other[0].loss == pytest.approx(one[0].loss, rel=1e-6, abs=1e-9)
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        # Norms of transformers' layers are computed in float32, whatever the model's type.
        torch.testing.assert_close(other[1][name], gradient, rtol=1e-5, atol=1e-6 * float(gradient.abs().max()))
    plain, split = one[0].metrics(), other[0].metrics()
    for name in plain.keys() - {"num_micro_batches", "padding_fraction"}:
        assert split[name] == pytest.approx(plain[name], rel=1e-5, abs=1e-6), name

"""A step is taken with finite numbers only: where one is not, the trajectories that made it so are named."""

import math
from collections.abc import Hashable, Mapping, Sequence

from torch import Tensor, nn

from driftgym.errors import TrainingError
from driftgym.trainer.batch_shape import sequence_names
from driftgym.trainer.batching import Row
from driftgym.trainer.gradients import PassReport, PassSettings, accumulate_gradients
from driftgym.trainer.segments import not_finite
from driftgym.trainer.sharding import grad_norm
from driftgym.types import Segment

_MAX_NAMED = 8


def check_finite(segments: Sequence[Segment], *, step: int) -> None:
    """Raises TrainingError where a loss could only be right by chance, whatever the objective reads or bounds.

    Args:
        segments: of a pass.
        step: the policy version that its step leads to.
    """
    if named := not_finite(segments):
        more = ["..."] if len(named) > _MAX_NAMED else []
        raise TrainingError(
            f"step {step}: the loss is not finite, since log-probs or advantages are not; the weights are as before. "
            f"Trajectories: {', '.join(named[:_MAX_NAMED] + more)}"
        )


def checked_grad_norm(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    report: PassReport,
    rows: Sequence[Row],
    *,
    settings: PassSettings,
    step: int,
) -> Tensor:
    """[] the norm of the gradients that there are.

    Args:
        model: that a pass went through.
        parameters: of it, those that are trained.
        report: of the pass.
        rows: of the pass.
        settings: of the pass.
        step: the policy version that the step leads to.

    Raises:
        TrainingError: the loss or a gradient is not finite; names the trajectories that make it so.
    """
    norm = grad_norm(parameters.values(), settings.ranks)
    if _are_finite(report, norm):
        return norm
    what = "a gradient" if math.isfinite(report.loss) else "the loss"
    culprits = _culprits(model, parameters, rows, policy_version=step - 1, settings=settings)
    raise TrainingError(
        f"step {step}: {what} is not finite; the weights are as before. "
        f"Trajectories: {', '.join(culprits) or 'none on its own'}"
    )


def _are_finite(report: PassReport, norm: Tensor) -> bool:
    """Of a pass its loss, and the [] norm of its gradients, which may overflow where each of them is finite."""
    return math.isfinite(report.loss) and math.isfinite(float(norm))


def _culprits(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    rows: Sequence[Row],
    *,
    policy_version: int,
    settings: PassSettings,
) -> list[str]:
    """The trajectories whose own loss or gradient norm is not finite; at most eight, then an ellipsis."""
    by_trajectory: dict[Hashable, list[Row]] = {}
    for row, name in zip(rows, sequence_names([row.segment for row in rows]), strict=True):
        by_trajectory.setdefault(name, []).append(row)
    named: list[str] = []
    for of_one in by_trajectory.values():
        for parameter in parameters.values():
            parameter.grad = None
        report = accumulate_gradients(model, of_one, policy_version=policy_version, settings=settings)
        if _are_finite(report, grad_norm(parameters.values(), settings.ranks)):
            continue
        if len(named) == _MAX_NAMED:
            return [*named, "..."]
        named.append(of_one[0].segment.trajectory_id)
    return named

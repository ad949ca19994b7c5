"""The learner, seen from the trainer: no tensor crosses this line, and neither side waits for the other's Python."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from driftgym.types import Segment, WeightUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one optimizer step did.

    >>> StepReport(policy_version=1, metrics={"loss": 0.1}, num_lag0_tokens=0, lag0_ratio_sum=0.0).policy_version
    1
    """

    policy_version: int
    """The version of the weights after the step."""
    metrics: Mapping[str, float]
    """Figures of the step, all finite; `docs/metrics.md` defines each."""
    num_lag0_tokens: int
    """Trained tokens of lag 0 whose log-probs re-scoring can reproduce."""
    lag0_ratio_sum: float
    """Sum of their ratios, trainer over behaviour; a mean of 1 says that both compute the same probabilities."""


class TrainingClient(Protocol):
    """Runs the compute of training. Every method raises TrainingError when the learner is gone."""

    async def train_step(self, segments: Sequence[Segment]) -> StepReport:
        """One optimizer step on `segments`. An empty or fully masked batch changes no weights, but is a step.

        Raises:
            TrainingError: the loss or a gradient is not finite; the weights are as before.
        """
        ...

    async def publish(self, folder: Path) -> WeightUpdate:
        """Writes the current weights to `folder`, whole or not at all."""
        ...

    async def save(self, folder: Path) -> None:
        """Writes weights, optimizer and random state to `folder`."""
        ...

    async def load(self, folder: Path, *, policy_version: int) -> None:
        """Takes up what `save` wrote. Raises TrainingError when it is damaged."""
        ...

    async def warm_up(self, segments: Sequence[Segment]) -> Mapping[str, float]:
        """Supervised training on demonstrations, as configured; the policy version stays 0."""
        ...

    async def close(self) -> None:
        """Ends the learner."""
        ...

"""The learner, seen from the trainer: no tensor crosses this line, and neither side waits for the other's Python."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from driftgym.config import Limits
from driftgym.errors import TrainingError
from driftgym.processes import ChildCallError, ChildDiedError, ChildProcess
from driftgym.trainer.learner_config import (
    LearnerConfig,
    LearnerSpec,
    OptimizerConfig,
    WarmupConfig,
)
from driftgym.trainer.models import LoraConfig, ModelConfig
from driftgym.trainer.objective_config import KlConfig, ObjectiveConfig
from driftgym.types import Segment, WeightUpdate

__all__ = [
    "KlConfig",
    "LearnerConfig",
    "LearnerSpec",
    "LoraConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "ProcessTrainingClient",
    "StepReport",
    "TrainingClient",
    "WarmupConfig",
]


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

    async def publish(self, folder: Path, *, is_last: bool = False) -> WeightUpdate:
        """Writes the current weights into a new folder below `folder`, whole or not at all.

        The update's location is that new folder: one per publication, named after incarnation and policy version.
        The two newest publications and those that they build on are kept below `folder`, older ones are removed.

        Args:
            folder: where publications go.
            is_last: the last of the run: a whole model, whatever the kinds that the generators take.
        """
        ...

    async def save(self, folder: Path) -> None:
        """Writes weights, optimizer and random state to `folder`, whole or not at all.

        `folder` does not exist yet, or is empty. It gets a manifest of its own (see `checkpoint`).
        """
        ...

    async def load(self, folder: Path, *, policy_version: int) -> None:
        """Takes up what `save` wrote to `folder`. Raises TrainingError when it is damaged, or of another version."""
        ...

    async def warm_up(self, segments: Sequence[Segment]) -> Mapping[str, float]:
        """Supervised training on demonstrations, as configured; the policy version stays 0."""
        ...

    async def close(self) -> None:
        """Ends the learner."""
        ...


class ProcessTrainingClient:
    """A learner in a process of its own. Made by `start`; a call that fails for good leaves no process behind."""

    def __init__(self, process: ChildProcess, limits: Limits) -> None:
        self._process = process
        self._limits = limits

    @classmethod
    async def start(cls, spec: LearnerSpec, *, limits: Limits) -> "ProcessTrainingClient":
        """Starts the process and loads the model.

        Raises:
            ConfigError: the model cannot be loaded, or cannot be trained by this learner.
            TrainingError: the process ended, or was not ready within `limits.learner_s`.
        """
        # One pool of threads, of the size asked for, that sleeps when idle: the generator works on the same cores.
        num_threads = str(spec.config.num_threads)
        environment = {"OMP_NUM_THREADS": num_threads, "MKL_NUM_THREADS": num_threads, "OMP_WAIT_POLICY": "PASSIVE"}
        process = await ChildProcess.start("driftgym.trainer.learner", name="learner", env=environment)
        client = cls(process, limits)
        try:
            await client._call("start", spec)
        except BaseException:
            await process.close(timeout_s=limits.close_s)
            raise
        return client

    @property
    def pid(self) -> int:
        """The learner's process id."""
        return self._process.pid

    async def train_step(self, segments: Sequence[Segment]) -> StepReport:
        """See TrainingClient."""
        report: StepReport = await self._call("train_step", list(segments))
        return report

    async def publish(self, folder: Path, *, is_last: bool = False) -> WeightUpdate:
        """See TrainingClient."""
        update: WeightUpdate = await self._call("publish", folder, is_last=is_last)
        return update

    async def save(self, folder: Path) -> None:
        """See TrainingClient."""
        await self._call("save", folder)

    async def load(self, folder: Path, *, policy_version: int) -> None:
        """See TrainingClient."""
        await self._call("load", folder, policy_version=policy_version)

    async def warm_up(self, segments: Sequence[Segment]) -> Mapping[str, float]:
        """See TrainingClient."""
        figures: Mapping[str, float] = await self._call("warm_up", list(segments))
        return figures

    async def close(self) -> None:
        """See TrainingClient. Waits `limits.close_s` for a running call, then kills."""
        await self._process.close(timeout_s=self._limits.close_s)

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """One call of the learner; what goes wrong with its process is a TrainingError."""
        timeout_s = self._limits.learner_s
        try:
            return await self._process.call(method, *args, timeout_s=timeout_s, **kwargs)
        except ChildDiedError as error:
            raise TrainingError(f"the learner is gone: {error}") from None
        except ChildCallError as error:
            raise TrainingError(str(error)) from None
        except TimeoutError:
            raise TrainingError(
                f"the learner did not finish {method} within limits.learner_s = {timeout_s:g} s; it was killed"
            ) from None

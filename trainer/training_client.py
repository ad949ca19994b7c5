"""The learner, seen from the trainer: no tensor crosses this line, and neither side waits for the other's Python.

Whoever writes the loop submits what the learner is to do, and need not wait in between: every call returns a future at
once, and what was submitted runs in that order. A step is what was given to `forward_backward` since the step before,
and ends with `optim_step`. It is taken whole or not at all: once a pass of it failed, its gradients are dropped, its
other passes and its `optim_step` fail with that cause, the weights are as before, and the next step begins anew.
"""

import asyncio
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from driftgym.config import Limits
from driftgym.errors import NotDoneError, TrainingError
from driftgym.processes import ChildCallError, ChildDiedError, ChildProcess
from driftgym.trainer.batch_shape import BatchShape
from driftgym.trainer.call_order import CallOrder
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
    "BatchShape",
    "KlConfig",
    "LearnerConfig",
    "LearnerSpec",
    "LoraConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "PassFigures",
    "ProcessTrainingClient",
    "StepReport",
    "TrainingClient",
    "WarmupConfig",
    "train_step",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassFigures:
    """What one forward and backward pass gave, gradients apart.

    >>> PassFigures(metrics={"loss": 0.1}, num_lag0_tokens=0, lag0_ratio_sum=0.0).metrics["loss"]
    0.1
    """

    metrics: Mapping[str, float]
    """Figures of its tokens, all finite: those of a step that do not come from the optimizer (docs/metrics.md). Of a
    part of a batch, `loss` is its part of the batch's."""
    num_lag0_tokens: int
    """As in StepReport."""
    lag0_ratio_sum: float
    """As in StepReport."""


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
    """Runs the compute of training. Each call's future raises TrainingError when the learner is gone; see the module
    for the order of calls, and for what becomes of those after one that failed."""

    def forward_backward(
        self,
        segments: Sequence[Segment],
        *,
        objective: ObjectiveConfig | None = None,
        batch: BatchShape | None = None,
    ) -> asyncio.Future[PassFigures]:
        """Adds the gradient of the loss of `segments` to that of the passes before it in this step.

        Args:
            segments: training rows.
            objective: of this pass alone; None: the configured one.
            batch: the shape of the whole batch, where `segments` are a part of it: the parts then have together the
                loss and the gradient that the batch has in one pass. None: `segments` are a batch of their own, and
                the gradients of two of them are those of the sum of two losses.

        Raises:
            TrainingError: the loss or a gradient is not finite (names the trajectories), `segments` cannot be a part
                of `batch`, or the objective needs a whole batch in one pass and got a part. The step is spoiled.
            NotDoneError: a pass of this step failed before.
        """
        ...

    def optim_step(self) -> asyncio.Future[StepReport]:
        """One optimizer step with the gradients of the passes since the last one; its figures are of all of them.

        Without any gradient (no pass, nothing that is trained) weights and optimizer stay, but the version counts on.

        Raises:
            NotDoneError: a pass of this step failed; weights, optimizer and policy version are as before.
        """
        ...

    def publish(self, folder: Path, *, is_last: bool = False) -> asyncio.Future[WeightUpdate]:
        """Writes the current weights into a new folder below `folder`, whole or not at all.

        The update's location is that new folder: one per publication, named after incarnation and policy version.
        The two newest publications and those that they build on are kept below `folder`, older ones are removed.
        Gradients of a step that has not been taken do not matter.

        Args:
            folder: where publications go.
            is_last: the last of the run: a whole model, whatever the kinds that the generators take.

        Raises:
            TrainingError: they cannot be written; the learner is as before.
        """
        ...

    def save(self, folder: Path) -> asyncio.Future[None]:
        """Writes weights, optimizer and random state to `folder`, whole or not at all.

        `folder` does not exist yet, or is empty. It gets a manifest of its own (see `checkpoint`). Gradients of a step
        that has not been taken are not in it.

        Raises:
            TrainingError: they cannot be written; the learner is as before.
        """
        ...

    def load(self, folder: Path, *, policy_version: int) -> asyncio.Future[None]:
        """Takes up what `save` wrote to `folder`; the next step begins anew.

        Raises:
            TrainingError: it is damaged, or of another version; everything is as before.
        """
        ...

    async def close(self) -> None:
        """Ends the learner. A call that runs may end, those after it are not done."""
        ...


async def train_step(client: TrainingClient, segments: Sequence[Segment]) -> StepReport:
    """One optimizer step on a whole batch. An empty or fully masked batch changes no weights, but is a step.

    Raises:
        TrainingError: the loss or a gradient is not finite, or the learner is gone; the weights are as before.
    """
    passed, step = client.forward_backward(segments), client.optim_step()
    await passed  # where it fails, it says more than the step does
    return await step


class ProcessTrainingClient:
    """A learner in a process of its own. Made by `start`; a call that fails for good leaves no process behind."""

    module = "driftgym.trainer.learner_process"
    """What the process runs."""

    def __init__(self, process: ChildProcess, limits: Limits) -> None:
        self._process = process
        self._limits = limits
        self._calls = CallOrder()
        self._lost: str | None = None
        self.computation = ""
        """What the learner computes in, and how it attends to rows, for people to read."""

    @classmethod
    async def start(cls, spec: LearnerSpec, *, limits: Limits) -> Self:
        """Starts the process and loads the model.

        Raises:
            ConfigError: the model cannot be loaded, or cannot be trained by this learner.
            TrainingError: the process ended, or was not ready within `limits.learner_s`.
        """
        # One pool of threads, of the size asked for, that sleeps when idle: the generator works on the same cores.
        num_threads = str(spec.config.num_threads)
        environment = {"OMP_NUM_THREADS": num_threads, "MKL_NUM_THREADS": num_threads, "OMP_WAIT_POLICY": "PASSIVE"}
        process = await ChildProcess.start(cls.module, name="learner", env=environment)
        client = cls(process, limits)
        try:
            client.computation = await client._call("start", spec)
        except BaseException:
            await process.close(timeout_s=limits.close_s)
            raise
        return client

    @property
    def pid(self) -> int:
        """The learner's process id."""
        return self._process.pid

    def forward_backward(
        self,
        segments: Sequence[Segment],
        *,
        objective: ObjectiveConfig | None = None,
        batch: BatchShape | None = None,
    ) -> asyncio.Future[PassFigures]:
        """See TrainingClient."""
        # What goes wrong in it is said again by optim_step, which need not be waited for first.
        return self._submit("forward_backward", list(segments), is_repeated=True, objective=objective, batch=batch)

    def optim_step(self) -> asyncio.Future[StepReport]:
        """See TrainingClient."""
        return self._submit("optim_step")

    def publish(self, folder: Path, *, is_last: bool = False) -> asyncio.Future[WeightUpdate]:
        """See TrainingClient."""
        return self._submit("publish", folder, is_last=is_last)

    def save(self, folder: Path) -> asyncio.Future[None]:
        """See TrainingClient."""
        return self._submit("save", folder)

    def load(self, folder: Path, *, policy_version: int) -> asyncio.Future[None]:
        """See TrainingClient."""
        return self._submit("load", folder, policy_version=policy_version)

    def warm_up(self, segments: Sequence[Segment]) -> asyncio.Future[Mapping[str, float]]:
        """Supervised training on demonstrations, as configured; the policy version stays 0.

        Raises:
            TrainingError: the loss or a gradient is not finite, or there are gradients of a step not yet taken.
        """
        return self._submit("warm_up", list(segments))

    async def close(self) -> None:
        """See TrainingClient. Waits `limits.close_s` for a running call, then kills."""
        self._calls.stop()
        await self._process.close(timeout_s=self._limits.close_s)
        await self._calls.settle()

    def _submit(self, method: str, *args: Any, is_repeated: bool = False, **kwargs: Any) -> asyncio.Future[Any]:
        call = functools.partial(self._call, method, *args, **kwargs)
        return self._calls.submit(call, name=method, is_repeated=is_repeated)

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """One call of the learner; what goes wrong with its process is a TrainingError."""
        if self._lost is not None:
            raise NotDoneError(f"{method} was not done: {self._lost}")
        timeout_s = self._limits.learner_s
        try:
            return await self._process.call(method, *args, timeout_s=timeout_s, **kwargs)
        except ChildCallError as error:
            raise TrainingError(str(error)) from None
        except ChildDiedError as error:
            self._lost = f"the learner is gone: {error}"
            self._process.kill()  # it may be one of its further processes that died
        except TimeoutError:
            self._lost = f"the learner did not finish {method} within limits.learner_s = {timeout_s:g} s; it was killed"
        raise TrainingError(self._lost)

"""Fake twins of what a run is made of: a learner without tensors, engines without a model, and rollouts that wait.

They keep every contract that the loop rests on (versions, publications, checkpoints that are whole or not there),
so that the loop, the producer and the journal are tried in milliseconds. Nothing here learns anything.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from driftgym.agents.generators.base import GeneratorHealth, WeightUpdateMode, WeightVersion
from driftgym.errors import NotDoneError, TrainingError
from driftgym.trainer.batch_shape import BatchShape
from driftgym.trainer.call_order import CallOrder
from driftgym.trainer.checkpoint import check_sealed, sealed_folder
from driftgym.trainer.objective_config import ObjectiveConfig
from driftgym.trainer.publications import new_publication, write_record
from driftgym.trainer.segments import not_finite
from driftgym.trainer.training_client import PassFigures, StepReport
from driftgym.types import (
    Completion,
    Message,
    Segment,
    Task,
    Trajectory,
    TrajectoryGroup,
    TrajectoryStatus,
    Turn,
    WeightUpdate,
    float32_array,
    int32_array,
)


class ScriptedTrainingClient:
    """A learner that counts steps, and remembers which trajectories each of them trained."""

    def __init__(
        self,
        *,
        incarnation: int = 1,
        step_s: float | Callable[[int], float] = 0.0,
        fail_at_step: int | None = None,
    ) -> None:
        """At version 0.

        Args:
            incarnation: the life of the run.
            step_s: how long a step takes; or a function of the version at which it is done.
            fail_at_step: this step raises TrainingError, as a dead learner does.
        """
        self._incarnation = incarnation
        self._step_s = step_s
        self._fail_at_step = fail_at_step
        self._version = 0
        self._calls = CallOrder()
        self._open: list[Segment] = []
        self._first_cause: str | None = None
        self._closing = asyncio.Event()
        self.trained: list[tuple[str, ...]] = []
        """The trajectories of each step since the start or the last `load`."""
        self.segments: list[tuple[Segment, ...]] = []
        """The rows of each step, likewise: every token that was trained, with its version, is in them."""
        self.is_closed = False
        """True after `close`."""

    def forward_backward(
        self,
        segments: Sequence[Segment],
        *,
        objective: ObjectiveConfig | None = None,
        batch: BatchShape | None = None,
    ) -> asyncio.Future[PassFigures]:
        """See TrainingClient. What is not finite is an advantage or a log-prob of a trained token."""
        del objective

        async def call() -> PassFigures:
            return self._pass(segments, batch)

        return self._calls.submit(call, name="forward_backward", is_repeated=True)

    def _pass(self, segments: Sequence[Segment], batch: BatchShape | None) -> PassFigures:
        self._check_step("forward_backward")
        try:
            _check_finite(segments)
            if batch is not None and not batch.holds(BatchShape.of(segments)):
                raise TrainingError("the segments are no part of the batch")
        except TrainingError as error:
            self._first_cause, self._open = str(error), []
            raise
        self._open += segments
        return self._figures(segments)

    def _check_step(self, method: str) -> None:
        if self._first_cause is not None:
            raise NotDoneError(f"{method} was not done: a forward_backward failed: {self._first_cause}")

    def _figures(self, segments: Sequence[Segment]) -> PassFigures:
        fresh = sum(int((s.train_mask & s.exact_mask & (s.policy_versions == self._version)).sum()) for s in segments)
        return PassFigures(metrics={"loss": 0.0}, num_lag0_tokens=fresh, lag0_ratio_sum=float(fresh))

    def optim_step(self) -> asyncio.Future[StepReport]:
        """See TrainingClient. Takes `step_s`."""
        return self._calls.submit(self._step, name="optim_step")

    async def _step(self) -> StepReport:
        try:
            self._check_step("optim_step")
            await self._work()
            if self._version + 1 == self._fail_at_step:
                raise TrainingError("the learner is gone")
        except TrainingError:
            self._first_cause, self._open = None, []
            raise
        segments, self._open = tuple(self._open), []
        figures = self._figures(segments)
        self.trained.append(tuple(segment.trajectory_id for segment in segments))
        self.segments.append(segments)
        self._version += 1
        return StepReport(
            policy_version=self._version,
            metrics=figures.metrics,
            num_lag0_tokens=figures.num_lag0_tokens,
            lag0_ratio_sum=figures.lag0_ratio_sum,
        )

    async def _work(self) -> None:
        """As long as a step takes, or until it is closed."""
        try:
            async with asyncio.timeout(self._step_s(self._version) if callable(self._step_s) else self._step_s):
                await self._closing.wait()
        except TimeoutError:
            return
        raise TrainingError("the learner is gone: it was closed")

    def publish(self, folder: Path, *, is_last: bool = False) -> asyncio.Future[WeightUpdate]:
        """See TrainingClient. Every publication is full."""
        del is_last

        async def call() -> WeightUpdate:
            try:
                return self._publish(folder)
            except OSError as error:
                raise TrainingError(f"{folder}: cannot be written ({error.strerror})") from None

        return self._calls.submit(call, name="publish")

    def _publish(self, folder: Path) -> WeightUpdate:
        location = folder / f"{self._incarnation}-{self._version:08d}"
        digest = hashlib.sha256(location.name.encode()).hexdigest()
        update = WeightUpdate(
            policy_version=self._version,
            incarnation=self._incarnation,
            location=str(location),
            checksum=f"sha256:{digest}",
        )
        if not location.exists():
            with new_publication(location, is_durable=False) as partial:
                (partial / "config.json").write_text("{}", encoding="utf-8")
                write_record(partial, update)
        return update

    def save(self, folder: Path) -> asyncio.Future[None]:
        """See TrainingClient."""

        async def call() -> None:
            try:
                with sealed_folder(folder) as partial:
                    (partial / "state.json").write_text(json.dumps({"version": self._version}), encoding="utf-8")
            except OSError as error:
                raise TrainingError(f"{folder}: cannot be written ({error.strerror})") from None

        return self._calls.submit(call, name="save")

    def load(self, folder: Path, *, policy_version: int) -> asyncio.Future[None]:
        """See TrainingClient."""

        async def call() -> None:
            self._load(folder, policy_version)

        return self._calls.submit(call, name="load")

    def _load(self, folder: Path, policy_version: int) -> None:
        check_sealed(folder)
        version = json.loads((folder / "state.json").read_text(encoding="utf-8"))["version"]
        if version != policy_version:
            raise TrainingError(f"{folder}: holds version {version}, not {policy_version}")
        self._version = version
        self._first_cause, self._open = None, []
        self.trained, self.segments = [], []

    async def close(self) -> None:
        """See TrainingClient."""
        self._calls.stop()
        self._closing.set()
        await self._calls.settle()
        self.is_closed = True


def _check_finite(segments: Sequence[Segment]) -> None:
    """Raises TrainingError that names the trajectories whose trained tokens have numbers that are not finite."""
    if named := not_finite(segments):
        raise TrainingError(f"the loss is not finite; the weights are as before. Trajectories: {', '.join(named)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenUpdate:
    """Weights that scripted engines took.

    >>> TakenUpdate(policy_version=4, mode="drain", keep_kv=False).mode
    'drain'
    """

    policy_version: int
    """Which."""
    mode: WeightUpdateMode
    """What became of running requests."""
    keep_kv: bool
    """Whether the KV cache was kept."""


class ScriptedEngines:
    """Engines that take weights after a while, and are always busy."""

    def __init__(self, *, policy_version: int = 0, incarnation: int = 1, update_s: float = 0.0) -> None:
        """All at `policy_version`; each update takes `update_s`."""
        self._update_s = update_s
        self._started = time.monotonic()
        self.version = WeightVersion(incarnation=incarnation, policy_version=policy_version)
        """The weights that requests are answered with now."""
        self.updates: list[TakenUpdate] = []
        """What was taken, in order."""
        self.num_iterations = 0
        """How often an iteration was begun."""

    @property
    def min_version(self) -> int:
        """See Engines."""
        return self.version.policy_version

    async def update_weights(
        self, update: WeightUpdate, *, mode: WeightUpdateMode, keep_kv: bool = False, timeout_s: float
    ) -> None:
        """See Engines."""
        async with asyncio.timeout(timeout_s):
            await asyncio.sleep(self._update_s)
        self.version = WeightVersion(incarnation=update.incarnation, policy_version=update.policy_version)
        self.updates.append(TakenUpdate(policy_version=update.policy_version, mode=mode, keep_kv=keep_kv))

    def next_iteration(self) -> None:
        """See Engines."""
        self.num_iterations += 1

    async def health(self) -> GeneratorHealth:
        """See Engines."""
        busy_s = time.monotonic() - self._started
        return GeneratorHealth(version=self.version, num_running=1, num_queued=0, busy_s=busy_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """How one scripted episode goes.

    >>> Play(duration_s=0.5).reward
    1.0
    """

    duration_s: float = 0.0
    """How long it takes; each half of it writes one turn, with the version of that moment."""
    reward: float = 1.0
    """Its grade."""
    turn_rewards: tuple[float, float] = (0.0, 0.0)
    """The rewards of its two turns."""
    num_tokens: int = 4
    """Sampled tokens per turn."""
    status: TrajectoryStatus = TrajectoryStatus.COMPLETED
    """How it ends."""
    raises: Exception | None = None
    """Raised in the place of the group, as a fault of the runner's own would be."""


class ScriptedRollouts:
    """Plays groups as `script(task index, member)` says, against the version that the engines have at each turn."""

    def __init__(
        self, engines: ScriptedEngines, *, group_size: int, script: Callable[[int, int], Play] = lambda *_: Play()
    ) -> None:
        self._engines = engines
        self._group_size = group_size
        self._script = script
        self.played: list[str] = []
        """Every group that was begun, in order."""

    async def __call__(self, task: Task, *, group_id: str, min_policy_version: int) -> TrajectoryGroup:
        """See `producer.PlayGroup`."""
        self.played.append(group_id)
        members = [self._play(task, group_id, member) for member in range(self._group_size)]
        return TrajectoryGroup(group_id=group_id, task=task, trajectories=tuple(await asyncio.gather(*members)))

    async def _play(self, task: Task, group_id: str, member: int) -> Trajectory:
        play = self._script(task.seed, member)
        started_at = time.time()
        turns = []
        for index in range(2):
            await asyncio.sleep(play.duration_s / 2)
            turns.append(self._turn(play, f"{group_id}-{member}-{index}", reward=play.turn_rewards[index]))
        if play.raises is not None:
            raise play.raises
        return Trajectory(
            trajectory_id=f"{group_id}-{member}-0",
            group_id=group_id,
            member=member,
            attempt=0,
            task_id=task.task_id,
            turns=tuple(turns),
            status=play.status,
            reward=play.reward if play.status.is_scored else None,
            error=None if play.status.is_scored else f"scripted {play.status}",
            started_at=started_at,
            ended_at=time.time(),
        )

    def _turn(self, play: Play, request_id: str, *, reward: float) -> Turn:
        version = self._engines.version.policy_version
        completion = Completion(
            request_id=request_id,
            token_ids=int32_array(range(play.num_tokens)),
            logprobs=float32_array([-0.5] * play.num_tokens),
            policy_versions=int32_array([version] * play.num_tokens),
            finish_reason="stop",
        )
        action = Message(role="assistant", content="scripted")
        return Turn(new_prompt_token_ids=int32_array([1, 2]), completion=completion, action=action, reward=reward)


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberedTasks:
    """Tasks whose seed is their index; `num_tasks` of them, or without end.

    >>> NumberedTasks().task(3).seed
    3
    """

    num_tasks: int | None = None
    """How many there are; None: without end."""

    def task(self, index: int) -> Task:
        """See `producer.TaskSource`."""
        if self.num_tasks is not None and index >= self.num_tasks:
            raise IndexError(index)
        return Task(task_id=f"scripted-{index}", env_id="scripted", seed=index)

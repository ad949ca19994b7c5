"""`Trainer`: the loop that takes batches, trains them, publishes weights and writes checkpoints. It only wires.

Consumes batches of the buffer, which the producer fills; waits for a batch, then for the learner's step, and for
a weight update only before the next one; produces policy versions, rows of metrics and checkpoints. A dead
learner, generators that are gone, and a lag above the bound end it with an error; everything written stays.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from driftgym.agents.generators.base import GeneratorHealth, WeightUpdateMode
from driftgym.agents.tool_meter import ToolMeter
from driftgym.config import Limits
from driftgym.errors import GeneratorError, TrainingError
from driftgym.metrics import Metrics
from driftgym.trainer.buffer import Batch, GroupBuffer
from driftgym.trainer.curriculum import Curriculum, TaskSource
from driftgym.trainer.journal import Journal, leave_out
from driftgym.trainer.left_out import LeftOut
from driftgym.trainer.lineage import Lineage, write_checkpoint
from driftgym.trainer.producer import PlayGroup, Producer, Supply
from driftgym.trainer.segments import batch_segments, mask_stale, without_zero_variance
from driftgym.trainer.staleness import LagHistogram, LagRule
from driftgym.trainer.stop import RunInterruptedError, Stop
from driftgym.trainer.summary import LengthRatio, RunClock, batch_figures
from driftgym.trainer.trainer_config import TrainerConfig
from driftgym.trainer.training_client import StepReport, TrainingClient, train_step
from driftgym.types import Segment, TrajectoryGroup, WeightUpdate


class Engines(Protocol):
    """The generators, seen from the loop: `agents.generators.pool.GeneratorPool`."""

    @property
    def min_version(self) -> int:
        """The lowest policy version that a request made now may be answered with."""
        ...

    async def update_weights(
        self, update: WeightUpdate, *, mode: WeightUpdateMode, keep_kv: bool = False, timeout_s: float
    ) -> None:
        """Brings every generator to `update`. Raises GeneratorError when none is left."""
        ...

    def next_iteration(self) -> None:
        """Lets answers go on that have had their share of an iteration."""
        ...

    async def health(self) -> GeneratorHealth:
        """How they stand. Raises GeneratorError when none answers."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a run is made of, started and at the same policy version.

    >>> Parts.__slots__
    ('client', 'engines', 'play', 'tasks', 'tools', 'keep_kv')
    """

    client: TrainingClient
    """The learner."""
    engines: Engines
    """The generators."""
    play: PlayGroup
    """Plays a group against them."""
    tasks: TaskSource
    """What is played."""
    tools: ToolMeter | None = None
    """Measures tools, where `play` does; None where nobody does."""
    keep_kv: bool = False
    """Updates in flight keep the KV cache, instead of computing it anew."""


class Trainer:
    """One life of a run, from its parts to `max_steps`. Use `run` once."""

    def __init__(
        self,
        *,
        config: TrainerConfig,
        parts: Parts,
        run_dir: Path,
        lineage: Lineage,
        journal: Journal,
        metrics: Metrics,
        clock: RunClock,
        stop: Stop,
        limits: Limits,
    ) -> None:
        """Nothing is started yet.

        Args:
            config: how rollouts and steps go together.
            parts: what does the work; the caller starts and closes it.
            run_dir: the run's folder.
            lineage: where this life begins.
            journal: rolled back to there.
            metrics: takes a row a step.
            clock: where the time goes.
            stop: the user's wish to stop.
            limits: deadlines.
        """
        self._config = config
        self._parts = parts
        self._run_dir = run_dir
        self._lineage = lineage
        self._journal = journal
        self._metrics = metrics
        self._clock = clock
        self._stop = stop
        self._limits = limits
        self._rule: LagRule = config.lag_rule
        self._version = lineage.policy_version
        self._checkpointed = lineage.policy_version if lineage.checkpoint else None
        rows = journal.step_rows()
        self._lengths = LengthRatio(rows[-1] if rows else {})
        self._update: asyncio.Task[None] | None = None
        self._health: asyncio.Task[None] | None = None
        self._buffer = GroupBuffer(self._rule, policy_version=self._version)
        self._tasks = _curriculum(parts.tasks, config, journal)
        self._left_out = LeftOut.of(journal, self._tasks, self._rule)

    async def run(self) -> None:
        """Trains until `max_steps`, or until every task is solved, and publishes the last weights. Checkpoints are
        written at the beginning, as configured, and at the end.

        Raises:
            RunInterruptedError: the user stopped it; the checkpoint of the last step is there.
            TrainingError: a step failed, the learner is gone, or nothing can be played any more.
            GeneratorError: no generator is left.
        """
        if self._checkpointed is None:
            await self._write_checkpoint()
        self._clock.start_loop(tools=self._parts.tools)
        self._look_at_engines()
        async with self._producing():
            try:
                while self._version < self._config.max_steps and await self._step():
                    pass
            except RunInterruptedError:
                await self._write_checkpoint()
                raise
            finally:
                self._clock.end_loop()
        await self._write_checkpoint()
        await self._parts.client.publish(self._run_dir / "weights", is_last=True)

    async def _step(self) -> bool:
        """Waits for a batch and trains it. False when none is left, every task being solved."""
        waited = time.monotonic()
        batch = await self._stop.or_stop(self._next_batch())
        if not batch.groups:
            self._end_early(batch)
            return False
        wait_s = time.monotonic() - waited
        await self._train(batch, wait_s=wait_s)
        if self._version % self._config.publish_every_steps == 0 and self._version < self._config.max_steps:
            await self._publish()
        if self._version % self._config.checkpoint_every_steps == 0:
            await self._write_checkpoint()
        return True

    def _end_early(self, batch: Batch) -> None:
        """No group is left to train; those that `drop` has left out since the last step are consumed with it."""
        if batch.dropped:
            self._count_left_out(batch)
            leave_out(self._journal, batch.dropped, step=self._version, figures=self._left_out_row())
        when = f"after step {self._version} of {self._config.max_steps}"
        if not self._tasks.is_solved:
            raise TrainingError(f"the tasks ran out {when}")
        self._metrics.say(f"all {self._tasks.num_solved} tasks are solved: the run ends {when}")

    async def _next_batch(self) -> Batch:
        """The next batch. What it waits for is said whenever that takes as long as a generation request may."""
        waiting = asyncio.create_task(self._buffer.next_batch(on_wait=self._metrics.show))
        try:
            while not (await asyncio.wait((waiting,), timeout=self._limits.generation_s))[0]:
                self._metrics.say(self._buffer.waiting_for())
            return await waiting
        finally:
            waiting.cancel()

    async def _train(self, batch: Batch, *, wait_s: float) -> None:
        config = self._config
        batch = without_zero_variance(batch, zero_variance=config.zero_variance, credit=config.credit)
        segments = _segments(batch.groups, config, now=self._version)
        lags = _lags_of(segments, now=self._version, max_lag=self._rule.max_lag)
        self._metrics.show(f"training step {self._version + 1} on {len(segments)} segments")
        self._look_at_engines()
        started = time.monotonic()
        report = await train_step(self._parts.client, segments)
        step_s = time.monotonic() - started
        if report.policy_version != self._version + 1:
            raise TrainingError(f"the learner is at version {report.policy_version}, not {self._version + 1}")
        self._clock.step_s += step_s
        self._count_left_out(batch)
        row = self._row(batch, report, lags, step_s=step_s, wait_s=wait_s)
        self._version = report.policy_version
        self._metrics.log(row)  # first: a kill in between leaves a row of a lost step, never a step without its row
        self._journal.consume(
            step=self._version,
            trained=[group.group_id for group in batch.groups],
            dropped=[group.group_id for group in batch.dropped],
            filtered=[group.group_id for group in batch.filtered],
            row=row,
            lags=lags,
        )

    def _count_left_out(self, batch: Batch) -> None:
        self._lengths.add(batch)
        if news := self._left_out.add(batch, now=self._version, rule=self._rule):
            self._metrics.say(news)

    def _left_out_row(self) -> dict[str, Any]:
        return {**self._lengths.row(), "tasks_left_out": self._left_out.num_tasks}

    def _row(
        self, batch: Batch, report: StepReport, lags: LagHistogram, *, step_s: float, wait_s: float
    ) -> dict[str, Any]:
        figures = batch_figures(batch, lags, now=self._version, max_lag=self._rule.max_lag, credit=self._config.credit)
        counts = self._journal.counts()  # of before this step
        num_trained = sum(t.status.is_scored for group in batch.groups for t in group.trajectories)
        num_tokens = sum(t.num_sampled_tokens for group in batch.groups + batch.filtered for t in group.trajectories)
        return {
            "step": report.policy_version,
            "policy_version": report.policy_version,
            "incarnation": self._journal.incarnation,
            **figures,
            "step_s": step_s,
            "wait_s": wait_s,
            "tokens_per_s": num_tokens / max(step_s + wait_s, 1e-9),
            "episodes_started": counts.started,
            "episodes_finished": counts.finished,
            "episodes_trained": counts.trained + num_trained,
            "groups_failed": counts.groups_failed,
            "num_lag0_tokens": report.num_lag0_tokens,
            "lag0_ratio_sum": report.lag0_ratio_sum,
            "generator_idle_fraction": self._clock.generator_idle_fraction,
            "trainer_idle_fraction": self._clock.trainer_idle_fraction,
            "tool_busy_fraction": self._clock.tool_busy_fraction,
            "tools_running_mean": self._clock.tools_running_mean,
            **self._journal.tally.row(),
            **self._left_out_row(),
            **self._clock.row(),
            **{f"learner/{name}": value for name, value in report.metrics.items()},
        }

    async def _publish(self) -> None:
        """Publishes the current weights and lets the generators take them; the update before must be through."""
        await self._stop.or_stop(self._update_taken())
        update = await self._parts.client.publish(self._run_dir / "weights")
        self._update = asyncio.create_task(self._take(update), name=f"weights {update.policy_version}")
        if self._config.weight_update == "drain":
            await self._stop.or_stop(self._update_taken())

    async def _take(self, update: WeightUpdate) -> None:
        try:
            await self._parts.engines.update_weights(
                update,
                mode=self._config.weight_update,
                keep_kv=self._parts.keep_kv,
                timeout_s=self._limits.weight_update_s,
            )
        except Exception as error:  # whatever it is: without new weights, groups may be waited for without end
            self._buffer.abort(error)
            raise
        self._parts.engines.next_iteration()
        self._buffer.notify()

    async def _update_taken(self) -> None:
        if self._update is not None:
            update, self._update = self._update, None
            await update

    def _look_at_engines(self) -> None:
        """Asks how busy the generators were, beside the step: the answer is counted when it comes."""
        if self._health is None or self._health.done():
            self._health = asyncio.create_task(self._count_busy())

    async def _count_busy(self) -> None:
        with contextlib.suppress(GeneratorError, TimeoutError):
            async with asyncio.timeout(self._limits.generation_s):
                health = await self._parts.engines.health()
            self._clock.saw_busy(health.busy_s, at=time.monotonic())

    async def _write_checkpoint(self) -> None:
        if self._checkpointed == self._version:
            return
        self._metrics.show(f"writing the checkpoint of step {self._version}")
        await write_checkpoint(self._run_dir, self._parts.client, self._journal, policy_version=self._version)
        self._checkpointed = self._version

    @contextlib.asynccontextmanager
    async def _producing(self) -> AsyncIterator[None]:
        """Within the block, groups are being played."""
        for restored in self._lineage.restored:
            row = restored.row
            due = self._rule.due(row.min_policy_version)
            self._buffer.admit(row.group_id, order=row.task_index, due=due, group=restored.group)
        producer = Producer(
            play=self._parts.play,
            tasks=self._tasks,
            rule=self._rule,
            supply=Supply(
                group_size=self._config.group_size,
                max_in_flight_groups=self._config.max_in_flight_groups,
                max_steps=self._config.max_steps,
            ),
            buffer=self._buffer,
            journal=self._journal,
            min_policy_version=lambda: self._parts.engines.min_version,
            again=self._lineage.again,
        )
        running = asyncio.create_task(producer.run(), name="producer")
        try:
            yield
        finally:
            tasks = [task for task in (running, self._update, self._health) if task is not None]
            for task in tasks:
                task.cancel()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.close_s):
                    await asyncio.gather(producer.close(), *tasks, return_exceptions=True)


def _curriculum(tasks: TaskSource, config: TrainerConfig, journal: Journal) -> Curriculum:
    """What is played, less what the lineage that stands has solved."""
    history = journal.rewards_by_group() if config.solved_above is not None else ()
    return Curriculum(tasks, num_tasks=config.num_tasks, solved_above=config.solved_above, history=history)


def _segments(groups: Sequence[TrajectoryGroup], config: TrainerConfig, *, now: int) -> list[Segment]:
    """The training rows of a step at version `now`."""
    segments = batch_segments(groups, method=config.advantage, credit=config.credit)
    if config.on_lag == "mask":
        return [mask_stale(segment, now=now, max_lag=config.max_lag) for segment in segments]
    return segments


def _lags_of(segments: Sequence[Segment], *, now: int, max_lag: int) -> LagHistogram:
    """The lags of the tokens to be trained. Raises TrainingError when one is above the bound, or below 0."""
    versions = [segment.policy_versions[segment.train_mask] for segment in segments]
    lags = now - np.concatenate(versions) if versions else np.empty(0, dtype=np.int32)
    if lags.size and (lags.max() > max_lag or lags.min() < 0):
        raise TrainingError(
            f"step {now + 1} would train tokens of lag {lags.min()} to {lags.max()}; allowed is 0 to {max_lag}"
        )
    return LagHistogram.of(lags)

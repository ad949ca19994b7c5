"""Producer and buffer: what is started when, what a failure costs, and who is woken by what."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from driftgym.errors import TrainingError
from driftgym.trainer.buffer import Batch, GroupBuffer
from driftgym.trainer.curriculum import Curriculum, TaskSource
from driftgym.trainer.journal import Journal
from driftgym.trainer.producer import Producer, Supply
from driftgym.trainer.scripted import NumberedTasks, Play, ScriptedEngines, ScriptedRollouts
from driftgym.trainer.staleness import LagRule, OnLag
from driftgym.types import Task, TrajectoryStatus


class Rig:
    """A producer over scripted rollouts, with the parts that a test looks at."""

    def __init__(
        self,
        folder: Path,
        script: Any,
        *,
        max_lag: int,
        on_lag: OnLag,
        tasks: TaskSource,
        options: dict[str, Any],
        rollouts: type[ScriptedRollouts],
    ) -> None:
        rule = LagRule(max_lag=max_lag, groups_per_step=2, on_lag=on_lag)
        self.engines = ScriptedEngines()
        self.rollouts = rollouts(self.engines, group_size=2, script=script)
        self.buffer = GroupBuffer(rule)
        self.journal = Journal.open(folder)
        self.journal.begin_life()
        self.producer = Producer(
            play=self.rollouts,
            tasks=Curriculum(tasks, **options),
            rule=rule,
            supply=Supply(group_size=2, max_in_flight_groups=6, max_steps=20),
            buffer=self.buffer,
            journal=self.journal,
            min_policy_version=lambda: self.engines.min_version,
        )

    async def batch(self) -> Batch:
        async with asyncio.timeout(5):
            return await self.buffer.next_batch()


@contextlib.asynccontextmanager
async def rig(
    folder: Path,
    script: Any = lambda *_: Play(),
    *,
    max_lag: int = 4,
    on_lag: OnLag = "wait",
    tasks: TaskSource | None = None,
    rollouts: type[ScriptedRollouts] = ScriptedRollouts,
    **options: Any,
) -> AsyncIterator[Rig]:
    tasks = tasks or NumberedTasks()
    made = Rig(folder, script, max_lag=max_lag, on_lag=on_lag, tasks=tasks, options=options, rollouts=rollouts)
    running = asyncio.create_task(made.producer.run())
    await asyncio.sleep(0)
    try:
        yield made
    finally:
        running.cancel()
        await asyncio.gather(running, made.producer.close(), return_exceptions=True)
        made.journal.close()


async def until_idle(the_rig: Rig) -> None:
    async with asyncio.timeout(5):
        while the_rig.buffer.num_running:
            await the_rig.buffer.wait_change()


async def test_no_more_is_started_than_is_in_flight_at_most(tmp_path: Path) -> None:
    async with rig(tmp_path, lambda *_: Play(duration_s=60)) as the_rig:
        assert the_rig.buffer.num_running == the_rig.buffer.num_pending == 6
        assert "6 being played" in the_rig.buffer.waiting_for()


async def test_the_lag_rule_bounds_what_is_started_and_new_weights_make_room(tmp_path: Path) -> None:
    async with rig(tmp_path, max_lag=0) as the_rig:
        await until_idle(the_rig)
        assert the_rig.buffer.num_pending == 2
        batch = await the_rig.batch()
        assert [group.group_id for group in batch.groups] == ["g000000", "g000001"]
        await asyncio.sleep(0.02)
        assert the_rig.buffer.num_pending == 0, "the weights are those of before the step"
        the_rig.engines.version = type(the_rig.engines.version)(incarnation=1, policy_version=1)
        the_rig.buffer.notify()
        assert len((await the_rig.batch()).groups) == 2


async def test_a_group_that_raises_costs_nothing_but_itself(tmp_path: Path) -> None:
    def boom(index: int, member: int) -> Play:
        return Play(raises=RuntimeError("boom") if index == 0 else None)

    async with rig(tmp_path, boom) as the_rig:
        await until_idle(the_rig)
        assert [g.group_id for g in (await the_rig.batch()).groups] == ["g000001", "g000002"]
        assert [row.group_id for row in the_rig.journal.groups("failed")] == ["g000000"]
        assert the_rig.journal.tally.errors == {"env": 0, "infra": 2, "policy": 0}
        assert the_rig.journal.counts().finished >= 6
        record = the_rig.journal.load_group("g000000")
        assert all("RuntimeError: boom" in (trajectory.error or "") for trajectory in record.trajectories)
        assert [trajectory.member for trajectory in record.trajectories] == [0, 1]


class Unwritable(ScriptedRollouts):
    """Gives groups that cannot be written."""

    async def __call__(self, task: Task, *, group_id: str, min_policy_version: int) -> Any:
        return None


async def test_a_group_that_cannot_be_recorded_ends_the_run_instead_of_being_waited_for(tmp_path: Path) -> None:
    async with rig(tmp_path, rollouts=Unwritable) as the_rig:
        with pytest.raises(TrainingError, match=r"group g\d+ cannot be recorded: AttributeError"):
            await the_rig.batch()


async def test_failures_in_a_row_end_the_run_and_a_success_starts_the_count_anew(tmp_path: Path) -> None:
    def mostly_dead(index: int, member: int) -> Play:
        is_alive = index < 30 and index % 5 == 0
        return Play(status=TrajectoryStatus.COMPLETED if is_alive else TrajectoryStatus.ENV_ERROR)

    async with rig(tmp_path, mostly_dead) as the_rig:
        for _ in range(3):
            assert len((await the_rig.batch()).groups) == 2
        with pytest.raises(TrainingError, match=r"the last 1[2-9] groups gave no scored episode"):
            await the_rig.batch()


async def test_the_last_groups_make_a_short_batch(tmp_path: Path) -> None:
    async with rig(tmp_path, tasks=NumberedTasks(num_tasks=3)) as the_rig:
        assert [len((await the_rig.batch()).groups) for _ in range(3)] == [2, 1, 0]


class BrokenTasks(NumberedTasks):
    """Has a bug."""

    def task(self, index: int) -> Task:
        raise KeyError("a bug in the tasks")


async def test_a_task_source_that_breaks_is_raised_in_the_consumer(tmp_path: Path) -> None:
    async with rig(tmp_path, tasks=BrokenTasks()) as the_rig:
        with pytest.raises(KeyError, match="a bug in the tasks"):
            await the_rig.batch()


async def test_trajectories_that_cannot_be_written_end_the_run(tmp_path: Path) -> None:
    async with rig(tmp_path, lambda *_: Play(duration_s=0.05)) as the_rig:
        (tmp_path / "trajectories").rename(tmp_path / "elsewhere")
        with pytest.raises(TrainingError, match="cannot be written"):
            await the_rig.batch()


async def test_closing_leaves_what_was_being_played_issued(tmp_path: Path) -> None:
    async with rig(tmp_path, lambda *_: Play(duration_s=60)) as the_rig:
        await the_rig.producer.close()
        assert len(the_rig.journal.groups("issued")) == 6


async def test_dropping_makes_room_at_once(tmp_path: Path) -> None:
    """All that waits is too old: it is dropped and others are started in its place, without a step in between."""
    async with rig(tmp_path, max_lag=1, on_lag="drop") as the_rig:
        await until_idle(the_rig)
        the_rig.engines.version = type(the_rig.engines.version)(incarnation=1, policy_version=3)
        for _ in range(2):
            await the_rig.batch()
        await until_idle(the_rig)
        batch = await the_rig.batch()
        assert len(batch.groups) == 2
        assert {group.group_id for group in batch.dropped} >= {"g000004", "g000005"}


async def test_solved_tasks_are_not_played_again_and_the_supply_ends_with_the_last(tmp_path: Path) -> None:
    """Tasks 0 and 1 are solved at once, task 2 never before its fourth group."""
    num_played = 0

    def score(index: int, member: int) -> Play:
        nonlocal num_played
        num_played += index == 2
        return Play(reward=float(index != 2 or num_played > 6))

    async with rig(tmp_path, score, max_lag=0, num_tasks=3, solved_above=1.0) as the_rig:
        taken = []
        for version in range(1, 20):
            batch = await the_rig.batch()
            if not batch.groups:
                break
            taken += [group.task.seed for group in batch.groups]
            the_rig.engines.version = type(the_rig.engines.version)(incarnation=1, policy_version=version)
            the_rig.buffer.notify()
        assert not batch.groups, "all are solved, and nothing is left to take"
        assert taken[:3] == [0, 1, 2]
        assert set(taken[3:]) == {2}
        assert len(taken) >= 6

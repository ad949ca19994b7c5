"""The producer: keeps groups being played, as many as the lag rule and the bound on what is in flight allow.

Consumes tasks; waits for room (a batch was taken, a group failed, the generators took new weights: each calls
`GroupBuffer.notify`); produces finished groups into the buffer and the journal. One group's failure is that
group's alone; only a run of failures without a single scored episode in between ends the run.
"""

import asyncio
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from driftgym.errors import DriftgymError, TrainingError
from driftgym.trainer.buffer import GroupBuffer
from driftgym.trainer.curriculum import Curriculum
from driftgym.trainer.journal import GroupRow, Journal
from driftgym.trainer.staleness import LagRule
from driftgym.types import Task, Trajectory, TrajectoryGroup, TrajectoryStatus

_MIN_FAILED_IN_A_ROW = 8  # fewer may be bad luck: with nothing scored for longer, nothing will be


class PlayGroup(Protocol):
    """Plays one group; what `agents.rollout.run_group` does once its agent and its slots are given."""

    async def __call__(self, task: Task, *, group_id: str, min_policy_version: int) -> TrajectoryGroup:
        """The group's trajectories, one per member; errors of episodes are data.

        Raises:
            TrainingError: nothing can be played any more: the run ends.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """How many groups are wanted, and at once.

    >>> Supply(group_size=8, max_in_flight_groups=16, max_steps=100).group_size
    8
    """

    group_size: int
    """Episodes per group."""
    max_in_flight_groups: int
    """Groups that were admitted and not taken by a step: being played, or finished and waiting."""
    max_steps: int
    """The run ends with this policy version: no group is started that no step will take."""


class Producer:
    """Starts groups while `run` runs; `close` ends those that are being played."""

    def __init__(
        self,
        *,
        play: PlayGroup,
        tasks: Curriculum,
        rule: LagRule,
        supply: Supply,
        buffer: GroupBuffer,
        journal: Journal,
        min_policy_version: Callable[[], int],
        again: Iterable[GroupRow] = (),
    ) -> None:
        """Nothing is started yet.

        Args:
            play: plays one group.
            tasks: what is played; told what each group came to.
            rule: the lag rule.
            supply: how much is wanted.
            buffer: takes what is admitted and what has finished.
            journal: records both.
            min_policy_version: the lowest version that a request made now may be answered with.
            again: groups that were issued in an earlier life of the run and did not finish; they come first.
        """
        self._play = play
        self._tasks = tasks
        self._rule = rule
        self._supply = supply
        self._buffer = buffer
        self._journal = journal
        self._min_policy_version = min_policy_version
        self._again = deque(row.task_index for row in again)
        self._next_index = journal.next_task_index()
        self._num_failed_in_a_row = 0
        self._playing: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Admits groups until the tasks run out, or are all solved. What goes wrong here is raised in the consumer,
        by the buffer."""
        try:
            while self._admit_what_fits():
                await self._buffer.wait_change()
            self._buffer.end_supply()
        except Exception as error:
            self._buffer.abort(error)

    async def close(self) -> None:
        """Ends the groups that are being played; they stay issued, to be played again whole."""
        for task in self._playing:
            task.cancel()
        await asyncio.gather(*self._playing, return_exceptions=True)

    def _admit_what_fits(self) -> bool:
        """Starts as many groups as may start now. False when no task is left."""
        while self._is_wanted():
            index = self._again[0] if self._again else self._tasks.next_index(self._next_index)
            if index is None:
                return False
            min_policy_version = self._min_policy_version()
            due = self._rule.due(min_policy_version)
            if not self._buffer.may_admit(due=due):
                return True
            try:
                task = self._tasks.task(index)
            except IndexError:
                return False
            if self._again:
                self._again.popleft()
            else:
                self._next_index = index + 1
            self._start(task, index=index, min_policy_version=min_policy_version, due=due)
        return True

    def _is_wanted(self) -> bool:
        steps_left = self._supply.max_steps - self._buffer.next_version
        wanted = min(self._supply.max_in_flight_groups, self._rule.groups_per_step * steps_left)
        return self._buffer.num_pending < wanted

    def _start(self, task: Task, *, index: int, min_policy_version: int, due: int) -> None:
        group_id = f"g{index:06d}"
        self._journal.issue(
            group_id=group_id,
            task_index=index,
            group_size=self._supply.group_size,
            min_policy_version=min_policy_version,
        )
        self._buffer.admit(group_id, order=index, due=due)
        play = self._play_one(task, group_id, index=index, min_policy_version=min_policy_version)
        playing = asyncio.create_task(play, name=f"group {group_id}")
        self._playing.add(playing)
        playing.add_done_callback(self._playing.discard)

    async def _play_one(self, task: Task, group_id: str, *, index: int, min_policy_version: int) -> None:
        started_at = time.time()
        try:
            group = await self._play(task, group_id=group_id, min_policy_version=min_policy_version)
        except TrainingError as error:
            self._buffer.abort(error)
            return
        except Exception as error:  # this group's alone, whatever it is; recorded with its traceback
            group = lost_group(
                task, group_id=group_id, group_size=self._supply.group_size, error=error, started_at=started_at
            )
        try:
            await asyncio.to_thread(self._journal.write_trajectories, group)
            self._tasks.saw(index, [t.reward for t in group.trajectories if t.reward is not None])
            self._finish(group)
        except DriftgymError as error:
            self._buffer.abort(error)
        except Exception as error:  # nothing may be lost: what cannot be recorded ends the run
            self._buffer.abort(TrainingError(f"group {group_id} cannot be recorded: {type(error).__name__}: {error}"))

    def _finish(self, group: TrajectoryGroup) -> None:
        is_failed = not any(trajectory.status.is_scored for trajectory in group.trajectories)
        self._journal.finish(group, failed=is_failed, step=self._buffer.next_version + 1)
        if is_failed:
            self._buffer.discard(group.group_id)
            self._count_failure(group)
        else:
            self._num_failed_in_a_row = 0
            self._buffer.finish(group)

    def _count_failure(self, group: TrajectoryGroup) -> None:
        self._num_failed_in_a_row += 1
        if self._num_failed_in_a_row < max(_MIN_FAILED_IN_A_ROW, 2 * self._supply.max_in_flight_groups):
            return
        errors = [trajectory.error for trajectory in group.trajectories if trajectory.error]
        last_line = (errors or ["no reason given"])[-1].strip().splitlines()[-1]
        raise TrainingError(
            f"the last {self._num_failed_in_a_row} groups gave no scored episode; the last error: {last_line}"
        )


def lost_group(
    task: Task, *, group_id: str, group_size: int, error: BaseException, started_at: float
) -> TrajectoryGroup:
    """The record of a group that raised as a whole: each of its members failed by the infrastructure.

    What members meet is theirs to record, so this is a fault of the runner: nobody's score, and counted.
    """
    text = "".join(traceback.format_exception(error))
    members = tuple(
        Trajectory(
            trajectory_id=f"{group_id}-{member}-0",
            group_id=group_id,
            member=member,
            attempt=0,
            task_id=task.task_id,
            turns=(),
            status=TrajectoryStatus.INFRA_ERROR,
            error=text,
            started_at=started_at,
            ended_at=time.time(),
        )
        for member in range(group_size)
    )
    return TrajectoryGroup(group_id=group_id, task=task, trajectories=members)

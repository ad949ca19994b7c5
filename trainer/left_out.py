"""Tasks that the lag rule `drop` has left out and that no step has taken: counted, and said.

A task whose episodes take longer than the bound allows would otherwise be missing from training without a word, since
those that are trained look as they always do.
"""

import itertools
from collections.abc import Iterable

from driftgym.trainer.buffer import Batch
from driftgym.trainer.curriculum import TaskSource
from driftgym.trainer.journal import GroupState, Journal
from driftgym.trainer.staleness import LagRule, oldest_version
from driftgym.types import TrajectoryGroup

_CONSUMED: tuple[GroupState, ...] = ("dropped", "trained", "filtered")


class LeftOut:
    """Which tasks of a run were dropped and never had their turn. A group that a step took and filtered had it.

    >>> LeftOut(dropped=["a", "b"], taken=["b"]).num_tasks
    1
    """

    def __init__(self, *, dropped: Iterable[str] = (), taken: Iterable[str] = ()) -> None:
        """Takes up what earlier lives of the run did: the ids of the tasks that they dropped, and that steps took."""
        self._taken = set(taken)
        self._left_out = set(dropped) - self._taken
        self._num_said = len(self._left_out)

    @classmethod
    def of(cls, journal: Journal, tasks: TaskSource, rule: LagRule) -> "LeftOut":
        """What the journal says; nothing where `rule` drops nothing."""
        if rule.on_lag != "drop":
            return cls()
        dropped, *taken = ([tasks.task(row.task_index).task_id for row in journal.groups(s)] for s in _CONSUMED)
        return cls(dropped=dropped, taken=itertools.chain(*taken))

    @property
    def num_tasks(self) -> int:
        """How many they are."""
        return len(self._left_out)

    def add(self, batch: Batch, *, now: int, rule: LagRule) -> str | None:
        """Counts what the step at version `now` took and dropped.

        Returns:
            A line for people, with the first task that is left out and each time that there are twice as many.
        """
        if rule.on_lag != "drop":
            return None
        taken = {group.task.task_id for group in batch.groups + batch.filtered}
        self._taken |= taken
        self._left_out -= taken
        new = [group for group in batch.dropped if group.task.task_id not in self._taken]
        self._left_out.update(group.task.task_id for group in new)
        if not new or self.num_tasks < max(1, 2 * self._num_said):
            return None
        self._num_said = self.num_tasks
        return self._line(new[0], now=now, rule=rule)

    def _line(self, group: TrajectoryGroup, *, now: int, rule: LagRule) -> str:
        age = now - (oldest_version(group) or 0)
        longest_s = max(t.ended_at - t.started_at for t in group.trajectories)
        return (
            f"on_lag drop: {self.num_tasks} tasks were left out so far, each time that they were played; the last is "
            f"{group.task.task_id}, whose episodes took up to {longest_s:.1f} s and hold tokens {age} versions old, "
            f"{rule.max_lag} being allowed. Raise max_lag, or take on_lag wait or mask, which leave no task out"
        )

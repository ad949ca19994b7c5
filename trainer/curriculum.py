"""Which task is played next: a list of tasks, or its first ones over and over without those that are solved.

A task that the policy solves teaches nothing more: without it, later passes spend their episodes where there is
something to learn (no positive resampling, ScaleRL, arXiv:2510.13786).
"""

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

from driftgym.types import Task


class TaskSource(Protocol):
    """Where tasks come from."""

    def task(self, index: int) -> Task:
        """The task at `index`, from 0, always the same. Raises IndexError when there are no more."""
        ...


class Curriculum:
    """The tasks of a run, by the order of their groups. What is solved is known from the groups that were played.

    >>> from driftgym.envs.tasks import SeededTasks
    >>> curriculum = Curriculum(SeededTasks(env_id="e", seed=1), num_tasks=3, solved_above=0.9)
    >>> curriculum.task(4) == curriculum.task(1)
    True
    >>> curriculum.saw(1, [1.0, 1.0])
    >>> curriculum.next_index(3), curriculum.next_index(4)
    (3, 5)
    """

    def __init__(
        self,
        tasks: TaskSource,
        *,
        num_tasks: int | None = None,
        solved_above: float | None = None,
        history: Iterable[tuple[int, Sequence[float]]] = (),
    ) -> None:
        """Takes up what was played.

        Args:
            tasks: the list.
            num_tasks: only its first so many, over and over: group `index` plays task `index % num_tasks`.
            solved_above: a task is solved once the mean reward of the scored members of one of its groups was at
                least this; None: never. Needs `num_tasks`.
            history: of the groups that were played, on the lineage that stands: index and scored rewards.
        """
        self._tasks = tasks
        self._num_tasks = num_tasks
        self._solved_above = solved_above
        self._solved: set[int] = set()
        for index, rewards in history:
            self.saw(index, rewards)

    @property
    def num_solved(self) -> int:
        """How many tasks are solved."""
        return len(self._solved)

    @property
    def is_solved(self) -> bool:
        """True when every task is."""
        return self._num_tasks is not None and self.num_solved == self._num_tasks

    def task(self, index: int) -> Task:
        """The task that the group at `index` plays. Raises IndexError when there are no more."""
        return self._tasks.task(self._place(index))

    def next_index(self, index: int) -> int | None:
        """The first index from `index` on whose task is not solved; None when every task is."""
        if self.is_solved:
            return None
        while self._place(index) in self._solved:
            index += 1
        return index

    def saw(self, index: int, rewards: Sequence[float]) -> None:
        """The group at `index` was played; `rewards` are those of its scored members."""
        if self._num_tasks is None or self._solved_above is None or not rewards:
            return
        if math.fsum(rewards) / len(rewards) >= self._solved_above:
            self._solved.add(self._place(index))

    def _place(self, index: int) -> int:
        return index if self._num_tasks is None else index % self._num_tasks

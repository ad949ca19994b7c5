"""The buffer: groups from their admission until a step takes them.

The producer adds to it, the loop takes batches out of it; both sleep until something changed.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from driftgym.trainer.staleness import Choice, LagRule, PendingGroup, oldest_version
from driftgym.types import TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """What one step trains.

    >>> Batch(groups=(), dropped=()).groups
    ()
    """

    groups: tuple[TrajectoryGroup, ...]
    """The groups to train, in the order they are due; empty when nothing is left to train."""
    dropped: tuple[TrajectoryGroup, ...]
    """Groups that were too old and are left out."""
    filtered: tuple[TrajectoryGroup, ...] = ()
    """Groups that tell nothing, their advantages being all 0, and are left out; none as the buffer gives it."""


@dataclass(slots=True, kw_only=True)
class _Entry:
    """A pending group; `group` is None while it runs.

    >>> _Entry(order=0, due=3).group is None
    True
    """

    order: int
    due: int
    group: TrajectoryGroup | None = None
    oldest_version: int | None = None


class GroupBuffer:
    """Groups that were admitted and not consumed. One producer, one consumer, one event loop."""

    def __init__(self, rule: LagRule, *, policy_version: int = 0) -> None:
        self._rule = rule
        self._entries: dict[str, _Entry] = {}
        self._next_version = policy_version
        self._has_more = True
        self._error: BaseException | None = None
        self._dropped: list[TrajectoryGroup] = []
        self._change = asyncio.Event()

    @property
    def next_version(self) -> int:
        """The policy version at which the next batch is trained: that of the trainer, or one more from the moment a
        batch is taken, since the step in progress is then that batch's."""
        return self._next_version

    @property
    def num_pending(self) -> int:
        """Groups that were admitted and not taken by a step."""
        return len(self._entries)

    @property
    def num_running(self) -> int:
        """Groups that are being played."""
        return sum(entry.group is None for entry in self._entries.values())

    def may_admit(self, *, due: int) -> bool:
        """True when the lag rule lets one more group start that is due at `due`."""
        return self._rule.may_admit((e.due for e in self._entries.values()), due=due, now=self._next_version)

    def admit(self, group_id: str, *, order: int, due: int, group: TrajectoryGroup | None = None) -> None:
        """A group starts, or with `group`, which is finished, is restored."""
        entry = _Entry(order=order, due=due)
        self._entries[group_id] = entry
        if group is not None:
            self.finish(group)

    def finish(self, group: TrajectoryGroup) -> None:
        """A running group's episodes have ended."""
        entry = self._entries[group.group_id]
        entry.group, entry.oldest_version = group, oldest_version(group)
        self.notify()

    def discard(self, group_id: str) -> None:
        """A running group failed: it counts as consumed."""
        del self._entries[group_id]
        self.notify()

    def end_supply(self) -> None:
        """No further group will be admitted: what is there makes the last batches, the very last may be short."""
        self._has_more = False
        self.notify()

    def abort(self, error: BaseException) -> None:
        """`next_batch` raises `error` from now on: the producer cannot go on."""
        self._error = error
        self.notify()

    def notify(self) -> None:
        """Wakes whoever waits in `wait_change` or `next_batch`."""
        self._change.set()
        self._change = asyncio.Event()

    async def wait_change(self) -> None:
        """Waits for the next `notify`."""
        await self._change.wait()

    def waiting_for(self) -> str:
        """What the next batch lacks, in a few words for people."""
        return self._lack_of(self._choose())

    def _lack_of(self, choice: Choice) -> str:
        if choice.waits_for:
            return f"waiting for {', '.join(choice.waits_for[:3])}, due by the lag bound"
        num_finished = self.num_pending - self.num_running
        wanted = self._rule.groups_per_step
        return f"waiting for groups: {num_finished}/{wanted} finished, {self.num_running} being played"

    async def next_batch(self, *, on_wait: Callable[[str], None] = lambda text: None) -> Batch:
        """The batch of the next step. Waits for groups to finish; unblocked by each change of the buffer.

        From here on `next_version` is one higher. A batch without groups means that nothing is left to train.
        Whenever it goes on to wait, `on_wait` is told what for, in a few words for people.

        Raises:
            TrainingError: the lag rule cannot be kept; whatever `abort` was given.
        """
        while True:
            if self._error is not None:
                raise self._error
            choice = self._choose()
            if choice.drop:  # at once, so that others can start in their place; reported with the next batch
                self._dropped += [self._pop(group_id) for group_id in choice.drop]
                self.notify()
            if choice.is_ready or choice.is_last:
                return self._batch(choice)
            on_wait(self._lack_of(choice))
            await self.wait_change()

    def _batch(self, choice: Choice) -> Batch:
        groups = tuple(self._pop(group_id) for group_id in choice.take)
        dropped, self._dropped = tuple(self._dropped), []
        if groups:
            self._next_version += 1
            self.notify()
        return Batch(groups=groups, dropped=dropped)

    def _pop(self, group_id: str) -> TrajectoryGroup:
        group = self._entries.pop(group_id).group
        assert group is not None
        return group

    def _choose(self) -> Choice:
        return self._rule.choose(self._pending(), now=self._next_version, more_to_come=self._has_more)

    def _pending(self) -> list[PendingGroup]:
        return [
            PendingGroup(
                group_id=group_id,
                order=entry.order,
                due=entry.due,
                is_finished=entry.group is not None,
                oldest_version=entry.oldest_version,
            )
            for group_id, entry in self._entries.items()
        ]

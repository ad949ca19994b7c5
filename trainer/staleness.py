"""The lag rule: when a group may start, which finished ones a step takes, what becomes of tokens that are too old.

Pure functions and frozen values; nothing here waits. Words: *now* is the trainer's policy version, the version at
which the next batch is trained; a group is *due* at the lowest version that its requests may be answered with
plus `max_lag`, since its oldest token is then at the bound; B is `groups_per_step`.

A set of groups is *feasible* at `now` when for every version t those due by t number at most B·(t − now + 1): the
steps at now, now+1, ..., t take B each, so that taking them in the order they are due trains all in time (earliest
deadline first). While a batch is in training it fills the step at `now`, and the others must be feasible from
now + 1: that is the same rule with the batch counted as due now.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from driftgym.errors import TrainingError
from driftgym.types import Int32Array, TrajectoryGroup

OnLag = Literal["wait", "mask", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingGroup:
    """A group that was admitted and not yet consumed, as the rule sees it.

    >>> PendingGroup(group_id="g4", order=4, due=9, is_finished=False, oldest_version=None).due
    9
    """

    group_id: str
    """Which group."""
    order: int
    """Its place in the order of admission; decides between groups that are due together."""
    due: int
    """The last policy version at which every one of its tokens may be trained."""
    is_finished: bool
    """True when all its episodes have ended."""
    oldest_version: int | None
    """The oldest version that wrote one of its tokens; None while it runs, or when it has no token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the next step does with the pending groups.

    >>> Choice(take=(), drop=(), waits_for=("g4",)).is_ready
    False
    """

    take: tuple[str, ...]
    """The groups to train, in the order they are due; empty when the step has to wait."""
    drop: tuple[str, ...]
    """Finished groups that are too old and are left out (`drop` alone)."""
    waits_for: tuple[str, ...]
    """Running groups without which the step cannot go on; empty when any would do."""
    is_last: bool = False
    """True when no group will come after these; with an empty `take`, there is nothing left to train."""

    @property
    def is_ready(self) -> bool:
        """True when the step can go on with `take`."""
        return bool(self.take)


@dataclass(frozen=True, slots=True, kw_only=True)
class LagRule:
    """The bound and what happens at it.

    >>> rule = LagRule(max_lag=1, groups_per_step=2, on_lag="wait")
    >>> rule.may_admit([5, 5], due=5, now=5), rule.may_admit([5], due=5, now=5)
    (False, True)
    """

    max_lag: int
    """D: no token is trained with a lag above it."""
    groups_per_step: int
    """B: the fewest groups that a step takes, the last one excepted."""
    on_lag: OnLag
    """`wait` for the group that is due, `mask` tokens that are too old, or `drop` groups that hold one."""

    def due(self, min_policy_version: int) -> int:
        """When a group is due whose requests are answered with `min_policy_version` or later."""
        return min_policy_version + self.max_lag

    def is_feasible(self, dues: Iterable[int], *, now: int) -> bool:
        """True when groups with these due versions can all be trained in time, the next batch being that at `now`."""
        return all(count <= self.groups_per_step * (due - now + 1) for count, due in enumerate(sorted(dues), start=1))

    def may_admit(self, dues: Iterable[int], *, due: int, now: int) -> bool:
        """True when one more group, due at `due`, may start beside pending ones that are due at `dues`.

        Only `wait` bounds admission; the other two bound what is in flight by `max_in_flight_groups` alone.
        """
        return self.on_lag != "wait" or self.is_feasible([*dues, due], now=now)

    def choose(self, pending: Sequence[PendingGroup], *, now: int, more_to_come: bool) -> Choice:
        """Which finished groups the step at `now` takes: oldest first, while the rest stays feasible.

        Args:
            pending: every group that was admitted and not consumed.
            now: the trainer's policy version.
            more_to_come: False when no further group will be admitted: then a short last batch is taken.

        Raises:
            TrainingError: more finished groups are due than the coming steps can take: the rule was broken before.
        """
        drop = tuple(g.group_id for g in pending if self._is_dropped(g, now))
        live = sorted((g for g in pending if g.group_id not in drop), key=lambda g: (g.due, g.order))
        finished = [g for g in live if g.is_finished]
        size = self.groups_per_step if more_to_come else min(self.groups_per_step, len(live))
        take = finished[:size]
        taken = {g.group_id for g in take}
        rest = [g for g in live if g.group_id not in taken]
        if self.on_lag == "wait" and (overdue := self._overdue(rest, now=now + 1)):
            return Choice(take=(), drop=drop, waits_for=self._running_among(overdue))
        if len(take) < size:
            waits_for = () if more_to_come else tuple(g.group_id for g in rest)
            return Choice(take=(), drop=drop, waits_for=waits_for)
        is_last = not more_to_come and not rest
        return Choice(take=tuple(g.group_id for g in take), drop=drop, waits_for=(), is_last=is_last)

    def feasible_part(self, pending: Sequence[PendingGroup], *, now: int) -> tuple[str, ...]:
        """The groups of `pending` that can be kept at `now`, the earliest due first; the others are to be played anew.

        Only `wait` leaves any out.
        """
        kept: list[PendingGroup] = []
        for group in sorted(pending, key=lambda g: (g.due, g.order)):
            if self.may_admit([g.due for g in kept], due=group.due, now=now):
                kept.append(group)
        return tuple(g.group_id for g in kept)

    def _is_dropped(self, group: PendingGroup, now: int) -> bool:
        if self.on_lag != "drop" or not group.is_finished or group.oldest_version is None:
            return False
        return now - group.oldest_version > self.max_lag

    def _overdue(self, rest: Sequence[PendingGroup], *, now: int) -> Sequence[PendingGroup]:
        """The groups due by the first version by which too many of `rest` are due; empty when it is feasible."""
        for count, group in enumerate(rest, start=1):
            if count > self.groups_per_step * (group.due - now + 1):
                return rest[:count]
        return ()

    def _running_among(self, overdue: Sequence[PendingGroup]) -> tuple[str, ...]:
        running = tuple(g.group_id for g in overdue if not g.is_finished)
        if not running:
            raise TrainingError(
                f"the lag bound of {self.max_lag} cannot be kept: too many finished groups are due by version "
                f"{overdue[-1].due}"
            )
        return running


def oldest_version(group: TrajectoryGroup) -> int | None:
    """The oldest version that wrote a token of a scored member of `group`; None when there is none."""
    versions = [t.min_policy_version for t in group.trajectories if t.status.is_scored]
    return min((v for v in versions if v is not None), default=None)


def newest_version(group: TrajectoryGroup) -> int | None:
    """The newest version that wrote a token of any member of `group`; None when there is none."""
    spans = [turn.completion.policy_versions for t in group.trajectories for turn in t.turns]
    return max((int(span.max()) for span in spans if len(span)), default=None)


def stale_by_turn(groups: Iterable[TrajectoryGroup], *, now: int, max_lag: int) -> tuple[tuple[int, int], ...]:
    """For each turn, the sampled tokens that are too old to train and all sampled tokens, over scored members."""
    counts: list[list[int]] = []
    for trajectory in (t for group in groups for t in group.trajectories if t.status.is_scored):
        index = 0
        for turn in trajectory.turns:
            while len(counts) <= index:
                counts.append([0, 0])
            versions = turn.completion.policy_versions
            counts[index][0] += int(np.count_nonzero(now - versions > max_lag))
            counts[index][1] += len(versions)
            index += not turn.is_interrupted  # what follows an interruption is of the same turn
    return tuple((stale, total) for stale, total in counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class LagHistogram:
    """How many trained tokens had which lag.

    >>> LagHistogram.of([0, 0, 3]).p99
    3
    """

    counts: tuple[int, ...] = ()
    """[max lag + 1] tokens by lag, from 0."""

    @classmethod
    def of(cls, lags: Int32Array | Sequence[int]) -> "LagHistogram":
        """The histogram of these lags. Raises ValueError when one is negative: a token of a version to come."""
        array = np.asarray(lags, dtype=np.int64)
        if array.size and array.min() < 0:
            raise ValueError(f"a lag below 0: {int(array.min())}")
        return cls(counts=tuple(int(n) for n in np.bincount(array)) if array.size else ())

    def __add__(self, other: "LagHistogram") -> "LagHistogram":
        size = max(len(self.counts), len(other.counts))
        padded = (counts + (0,) * (size - len(counts)) for counts in (self.counts, other.counts))
        return LagHistogram(counts=tuple(a + b for a, b in zip(*padded, strict=True)))

    @property
    def num_tokens(self) -> int:
        """How many tokens."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """The mean lag; 0 when there is no token."""
        return sum(lag * n for lag, n in enumerate(self.counts)) / max(self.num_tokens, 1)

    @property
    def max(self) -> int:
        """The largest lag; 0 when there is no token."""
        return max((lag for lag, n in enumerate(self.counts) if n), default=0)

    @property
    def p99(self) -> int:
        """The smallest lag that at least 99 % of the tokens do not exceed; 0 when there is no token."""
        seen = 0
        for lag, n in enumerate(self.counts):
            seen += n
            if n and seen >= 0.99 * self.num_tokens:
                return lag
        return 0

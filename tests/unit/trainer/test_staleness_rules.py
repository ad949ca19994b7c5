"""The three lag rules against independent models: one choice, and whole runs by a clock of ticks with retries."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driftgym.trainer.segments import mask_stale
from driftgym.trainer.staleness import LagHistogram, LagRule, OnLag, PendingGroup
from driftgym.types import Segment, float32_array, int32_array

RULES: tuple[OnLag, ...] = ("wait", "mask", "drop")


def trainable_in_time(dues: list[int], *, now: int, groups_per_step: int) -> bool:
    """Plays the steps from `now` on, the earliest due first: does each group find a place by the time it is due?"""
    left = sorted(dues)
    for version in range(now, now + len(left) + 1):
        if left and left[0] < version:
            return False
        left = left[groups_per_step:]
    return True


@given(
    dues=st.lists(st.integers(0, 9), max_size=8),
    due=st.integers(0, 9),
    now=st.integers(0, 4),
    groups_per_step=st.integers(1, 3),
)
def test_admission_counts_the_batch_in_training_as_due_now(
    dues: list[int], due: int, now: int, groups_per_step: int
) -> None:
    """While a batch is in training, the rule at now + 1 says what it says at now with that batch to be trained."""
    rule = LagRule(max_lag=3, groups_per_step=groups_per_step, on_lag="wait")
    in_training = [now] * groups_per_step
    with_batch = trainable_in_time([*in_training, *dues, due], now=now, groups_per_step=groups_per_step)
    assert rule.may_admit(dues, due=due, now=now + 1) == with_batch


@given(
    groups=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.booleans()), max_size=10),
    now=st.integers(0, 9),
    max_lag=st.integers(0, 4),
    groups_per_step=st.integers(1, 3),
    on_lag=st.sampled_from(["mask", "drop"]),
    more_to_come=st.booleans(),
)
def test_mask_and_drop_choose_by_age_alone(
    groups: list[tuple[int, int, bool]],
    now: int,
    max_lag: int,
    groups_per_step: int,
    on_lag: OnLag,
    more_to_come: bool,
) -> None:
    """Each group is (least version, how much newer its oldest token is, is it finished)."""
    rule = LagRule(max_lag=max_lag, groups_per_step=groups_per_step, on_lag=on_lag)
    pending = [
        PendingGroup(
            group_id=f"g{order}",
            order=order,
            due=rule.due(least),
            is_finished=finished,
            oldest_version=least + newer if finished else None,
        )
        for order, (least, newer, finished) in enumerate(groups)
    ]
    too_old = [f"g{i}" for i, (least, newer, done) in enumerate(groups) if done and least + newer + max_lag < now]
    dropped = too_old if on_lag == "drop" else []
    finished = [i for i, (_, _, done) in enumerate(groups) if done and f"g{i}" not in dropped]
    in_order = [f"g{i}" for i in sorted(finished, key=lambda i: (groups[i][0], i))]
    num_left = len(groups) - len(dropped)
    size = groups_per_step if more_to_come else min(groups_per_step, num_left)
    choice = rule.choose(pending, now=now, more_to_come=more_to_come)
    assert list(choice.drop) == dropped
    assert list(choice.take) == (in_order[:size] if len(in_order) >= size else [])
    assert choice.is_last == (not more_to_come and num_left <= len(choice.take))


@pytest.mark.parametrize("on_lag", RULES)
@pytest.mark.parametrize(("version", "is_in_time"), [(5, True), (4, False)])
def test_each_rule_at_the_bound_and_one_beyond(on_lag: OnLag, version: int, is_in_time: bool) -> None:
    """A bound of 2, the trainer at 7: a group whose oldest token is of version 5 is in time, one of 4 is not."""
    rule = LagRule(max_lag=2, groups_per_step=1, on_lag=on_lag)
    group = PendingGroup(group_id="g", order=0, due=rule.due(version), is_finished=True, oldest_version=version)
    choice = rule.choose([group], now=7, more_to_come=True)
    assert choice.drop == (("g",) if on_lag == "drop" and not is_in_time else ())
    assert rule.may_admit([], due=group.due, now=7) == (is_in_time or on_lag != "wait")
    assert rule.feasible_part([group], now=7) == (("g",) if is_in_time or on_lag != "wait" else ())
    kept = mask_stale(segment_of([version, 7]), now=7, max_lag=2).train_mask
    assert kept.tolist() == [is_in_time, True]


@pytest.mark.parametrize("on_lag", RULES)
def test_a_bound_of_0_is_the_version_of_the_step_alone(on_lag: OnLag) -> None:
    rule = LagRule(max_lag=0, groups_per_step=1, on_lag=on_lag)
    group = PendingGroup(group_id="g", order=0, due=3, is_finished=True, oldest_version=3)
    assert rule.choose([group], now=3, more_to_come=True).take == ("g",)
    assert mask_stale(segment_of([2, 3]), now=3, max_lag=0).train_mask.tolist() == [False, True]
    if on_lag == "drop":
        assert rule.choose([group], now=4, more_to_come=True).drop == ("g",)


def segment_of(versions: list[int]) -> Segment:
    size = len(versions)
    return Segment(
        trajectory_id="t",
        segment_index=0,
        token_ids=int32_array(range(size)),
        loss_mask=np.ones(size, dtype=np.bool_),
        behaviour_logprobs=float32_array([-1.0] * size),
        policy_versions=int32_array(versions),
        advantages=float32_array([1.0] * size),
    )


def test_the_worked_example_of_versions() -> None:
    """A token of version 3 that is trained at version 5 has lag 2: in time with a bound of 2, too old with one of 1."""
    segment = segment_of([3])
    assert [mask_stale(segment, now=5, max_lag=bound).train_mask.any() for bound in (2, 1)] == [True, False]
    assert LagHistogram.of(5 - segment.policy_versions).max == 2


@dataclasses.dataclass
class Played:
    """A group of a simulated run: written with the engine's version at each tick of the attempt that counts."""

    least: int
    order: int
    ends_at: int
    attempts: list[int]
    versions: list[int] = dataclasses.field(default_factory=list)
    is_failed: bool = False

    @property
    def is_finished(self) -> bool:
        """True when the last attempt has ended."""
        return not self.attempts


class Simulation:
    """A run by a clock of ticks: groups with attempts, a step of two ticks, an engine that lags behind."""

    def __init__(self, rule: LagRule, *, attempts: list[list[int]], update_delay: int, cap: int) -> None:
        self.rule = rule
        self.attempts = attempts
        self.update_delay = update_delay
        self.cap = max(cap, rule.groups_per_step)
        self.tick = self.now = self.engine = self.num_issued = 0
        self.pending: dict[str, Played] = {}
        self.updates: list[tuple[int, int]] = []
        self.step_ends: int | None = None
        self.lags: Counter[int] = Counter()
        self.trained: list[str] = []
        self.dropped: list[tuple[int, int]] = []
        self.num_masked = 0

    def play(self, *, num_trained: int) -> None:
        while len(self.trained) < num_trained:
            self.tick += 1
            assert self.tick < 6000, "the run stood still"
            self._end_step()
            self._write()
            self._admit()
            if self.step_ends is None:
                self._take()

    def _end_step(self) -> None:
        if self.step_ends is not None and self.tick >= self.step_ends:
            self.now, self.step_ends = self.now + 1, None
            self.updates.append((self.tick + self.update_delay, self.now))
        self.engine = max([self.engine, *(version for at, version in self.updates if at <= self.tick)])

    def _write(self) -> None:
        """Each running attempt writes a token; one that fails for its infrastructure loses them, and starts again."""
        for name, group in list(self.pending.items()):
            if group.is_finished:
                continue
            if self.tick >= group.ends_at:
                group.attempts.pop(0)
                if group.attempts:
                    group.ends_at, group.versions = self.tick + group.attempts[0], []
                elif group.is_failed:
                    del self.pending[name]
                continue
            group.versions.append(self.engine)

    def _admit(self) -> None:
        next_version = self.now + (self.step_ends is not None)
        due = self.rule.due(self.engine)
        while len(self.pending) < self.cap and self.rule.may_admit(
            [self.rule.due(group.least) for group in self.pending.values()], due=due, now=next_version
        ):
            attempts = list(self.attempts[self.num_issued % len(self.attempts)])
            self.pending[f"g{self.num_issued}"] = Played(
                least=self.engine,
                order=self.num_issued,
                ends_at=self.tick + attempts[0],
                attempts=attempts,
                versions=[self.engine],
                is_failed=self.num_issued % 7 == 6,
            )
            self.num_issued += 1

    def _take(self) -> None:
        pending = [
            PendingGroup(
                group_id=name,
                order=group.order,
                due=self.rule.due(group.least),
                is_finished=group.is_finished,
                oldest_version=min(group.versions, default=None) if group.is_finished else None,
            )
            for name, group in self.pending.items()
        ]
        choice = self.rule.choose(pending, now=self.now, more_to_come=True)
        for name in choice.drop:
            self.dropped.append((self.now, min(self.pending.pop(name).versions)))
        for name in choice.take:
            self._train(name, self.pending.pop(name))
        if choice.take:
            self.step_ends = self.tick + 2

    def _train(self, name: str, group: Played) -> None:
        assert min(group.versions, default=group.least) >= group.least
        segment = segment_of(group.versions)
        if self.rule.on_lag == "mask":
            segment = mask_stale(segment, now=self.now, max_lag=self.rule.max_lag)
        self.lags.update((self.now - segment.policy_versions[segment.train_mask]).tolist())
        self.num_masked += int((~segment.train_mask).sum())
        self.trained.append(name)


@pytest.mark.parametrize("on_lag", RULES)
@settings(max_examples=60, deadline=None)
@given(
    max_lag=st.integers(0, 4),
    groups_per_step=st.integers(1, 3),
    update_delay=st.integers(0, 2),
    attempts=st.lists(st.lists(st.integers(1, 15), min_size=1, max_size=3), min_size=9, max_size=9),
    cap=st.integers(3, 9),
)
def test_no_token_above_the_bound_is_trained_whatever_fails_and_is_played_again(
    on_lag: OnLag, max_lag: int, groups_per_step: int, update_delay: int, attempts: list[list[int]], cap: int
) -> None:
    """Attempts share the due version of their group, though later ones have newer tokens. One group in seven fails."""
    if on_lag != "wait":  # these go on only when most groups are young enough at their turn
        attempts = [[1 + length % 2 for length in group[:1]] for group in attempts[:-1]] + attempts[-1:]
        max_lag += 3
    rule = LagRule(max_lag=max_lag, groups_per_step=groups_per_step, on_lag=on_lag)
    run = Simulation(rule, attempts=attempts, update_delay=update_delay, cap=cap)
    run.play(num_trained=40)
    assert len(set(run.trained)) == len(run.trained)
    assert max(run.lags) <= max_lag
    assert all(now - oldest > max_lag for now, oldest in run.dropped)
    if on_lag != "mask":
        assert run.num_masked == 0
    if on_lag != "drop":
        assert not run.dropped


@pytest.mark.parametrize(("on_lag", "length"), [("wait", 5), ("mask", 7), ("drop", 7)])
def test_the_bound_is_reached_and_kept(on_lag: OnLag, length: int) -> None:
    """Episodes of several steps: tokens of lag D are trained, those of D + 1 are waited for, masked or dropped."""
    rule = LagRule(max_lag=2, groups_per_step=1, on_lag=on_lag)
    run = Simulation(rule, attempts=[[1], [1], [length]], update_delay=0, cap=4)
    run.play(num_trained=60)
    assert max(run.lags) == 2
    assert (run.num_masked > 0) == (on_lag == "mask")
    assert (len(run.dropped) > 0) == (on_lag == "drop")
    assert min((now - oldest for now, oldest in run.dropped), default=3) == 3

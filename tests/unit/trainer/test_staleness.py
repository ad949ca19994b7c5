"""The lag rule, against an independent model: groups as jobs, steps as places, a matching between them."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driftgym.errors import TrainingError
from driftgym.trainer.staleness import (
    LagHistogram,
    LagRule,
    OnLag,
    PendingGroup,
    newest_version,
    oldest_version,
    stale_by_turn,
)
from driftgym.types import (
    Completion,
    Message,
    Task,
    Trajectory,
    TrajectoryGroup,
    TrajectoryStatus,
    Turn,
    float32_array,
    int32_array,
)


def rule(*, max_lag: int = 2, groups_per_step: int = 2, on_lag: OnLag = "wait") -> LagRule:
    return LagRule(max_lag=max_lag, groups_per_step=groups_per_step, on_lag=on_lag)


def pending(name: str, *, due: int, finished: bool = True, oldest: int | None = None, order: int = 0) -> PendingGroup:
    return PendingGroup(group_id=name, order=order, due=due, is_finished=finished, oldest_version=oldest)


def has_schedule(dues: list[int], *, now: int, groups_per_step: int) -> bool:
    """Is there a place for every group in a step at or before it is due? By augmenting paths, without any counting."""
    places = [version for version in range(now, max(dues, default=now) + 1) for _ in range(groups_per_step)]
    holder: dict[int, int] = {}

    def seat(group: int, seen: set[int]) -> bool:
        for place, version in enumerate(places):
            if version > dues[group] or place in seen:
                continue
            seen.add(place)
            if place not in holder or seat(holder[place], seen):
                holder[place] = group
                return True
        return False

    return all(seat(group, set()) for group in range(len(dues)))


@given(dues=st.lists(st.integers(-1, 6), max_size=9), now=st.integers(0, 4), groups_per_step=st.integers(1, 3))
def test_feasible_is_when_a_schedule_exists(dues: list[int], now: int, groups_per_step: int) -> None:
    expected = has_schedule(dues, now=now, groups_per_step=groups_per_step)
    assert rule(groups_per_step=groups_per_step).is_feasible(dues, now=now) == expected


@given(
    groups=st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=9),
    now=st.integers(0, 3),
    groups_per_step=st.integers(1, 3),
)
def test_a_choice_keeps_the_rest_feasible_and_waits_only_when_it_must(
    groups: list[tuple[int, bool]], now: int, groups_per_step: int
) -> None:
    all_pending = [pending(f"g{i}", due=due, finished=finished, order=i) for i, (due, finished) in enumerate(groups)]
    if not has_schedule([g.due for g in all_pending], now=now, groups_per_step=groups_per_step):
        return
    choice = rule(groups_per_step=groups_per_step).choose(all_pending, now=now, more_to_come=True)
    finished = sorted((g for g in all_pending if g.is_finished), key=lambda g: (g.due, g.order))
    oldest = finished[:groups_per_step]
    rest = [g.due for g in all_pending if g not in oldest]
    may_go = len(oldest) == groups_per_step and has_schedule(rest, now=now + 1, groups_per_step=groups_per_step)
    assert choice.take == (tuple(g.group_id for g in oldest) if may_go else ())
    assert not set(choice.waits_for) & {g.group_id for g in finished}


@dataclasses.dataclass
class Running:
    """A group of the simulation."""

    due: int
    ends_at: int
    order: int


@settings(max_examples=150, deadline=None)
@given(
    max_lag=st.integers(0, 5),
    groups_per_step=st.integers(1, 3),
    publish_every=st.integers(1, 6),
    update_delay=st.integers(0, 3),
    durations=st.lists(st.integers(1, 25), min_size=12, max_size=12),
    cap=st.integers(3, 12),
)
def test_no_group_is_trained_too_late_and_none_is_left_behind(
    max_lag: int, groups_per_step: int, publish_every: int, update_delay: int, durations: list[int], cap: int
) -> None:
    """A clock of ticks: a step takes 2, groups take what hypothesis says, an update arrives after a delay."""
    the_rule = rule(max_lag=max_lag, groups_per_step=groups_per_step)
    publish_every = min(publish_every, max_lag + 1)
    now = engine = issued = 0
    running: dict[str, Running] = {}
    updates: list[tuple[int, int]] = []
    batch: tuple[str, ...] = ()
    step_ends = -1
    trained: list[str] = []
    for tick in range(3000):
        engine = max([engine, *(version for at, version in updates if at <= tick)])
        if batch and tick >= step_ends:
            now, batch = now + 1, ()
            if now % publish_every == 0:
                updates.append((tick + update_delay, now))
        next_version = now + bool(batch)
        while len(running) < max(cap, groups_per_step) and the_rule.may_admit(
            [g.due for g in running.values()], due=the_rule.due(engine), now=next_version
        ):
            ends_at = tick + durations[issued % len(durations)]
            running[f"g{issued}"] = Running(due=the_rule.due(engine), ends_at=ends_at, order=issued)
            issued += 1
        if not batch:
            groups = [
                pending(name, due=g.due, finished=g.ends_at <= tick, order=g.order) for name, g in running.items()
            ]
            batch = the_rule.choose(groups, now=now, more_to_come=True).take
            for name in batch:
                assert now <= running.pop(name).due
                trained.append(name)
            step_ends = tick + 2
        if len(trained) >= 60:
            break
    assert len(trained) >= 60, "the run stood still"
    assert len(set(trained)) == len(trained)
    # Nothing is left behind: whatever was issued long ago has been trained.
    assert all(g.order >= issued - max(cap, groups_per_step) * (max_lag + 2) for g in running.values())


@pytest.mark.parametrize(("max_lag", "admitted"), [(0, 2), (1, 4), (8, 18)])
def test_admission_stops_at_the_bound(max_lag: int, admitted: int) -> None:
    the_rule = rule(max_lag=max_lag)
    dues = [the_rule.due(5)] * (admitted - 1)
    assert the_rule.may_admit(dues, due=the_rule.due(5), now=5)
    assert not the_rule.may_admit([*dues, the_rule.due(5)], due=the_rule.due(5), now=5)


def test_a_group_that_would_be_too_old_when_trained_is_not_admitted() -> None:
    the_rule = rule(max_lag=1)
    assert the_rule.may_admit([], due=the_rule.due(4), now=5)
    assert not the_rule.may_admit([], due=the_rule.due(3), now=5)


def test_wait_takes_younger_groups_while_the_old_one_can_still_be_trained_in_time() -> None:
    groups = [pending("old", due=4, finished=False), *(pending(f"new{i}", due=9, order=i) for i in range(4))]
    assert rule().choose(groups, now=3, more_to_come=True).take == ("new0", "new1")


def test_wait_waits_for_the_group_that_is_due_now() -> None:
    groups = [pending("old", due=3, finished=False), *(pending(f"new{i}", due=9, order=i) for i in range(4))]
    choice = rule().choose(groups, now=3, more_to_come=True)
    assert (choice.take, choice.waits_for) == ((), ("old",))


def test_drop_at_the_bound_and_one_beyond() -> None:
    """Limit 1, versions 7, 6, 5, the trainer at 7: the first two are kept."""
    groups = [pending(str(v), due=v + 1, oldest=v, order=v) for v in (7, 6, 5)]
    choice = rule(max_lag=1, on_lag="drop").choose(groups, now=7, more_to_come=True)
    assert (set(choice.take), choice.drop) == ({"7", "6"}, ("5",))


def test_what_waits_in_the_queue_is_judged_when_it_is_consumed() -> None:
    """A group of version 7 left in the queue while the trainer goes to 9 is too old for a limit of 1."""
    the_rule = rule(max_lag=1, groups_per_step=1, on_lag="drop")
    assert the_rule.choose([pending("g", due=8, oldest=7)], now=8, more_to_come=True).take == ("g",)
    assert the_rule.choose([pending("g", due=8, oldest=7)], now=9, more_to_come=True).drop == ("g",)


@pytest.mark.parametrize("on_lag", ["mask", "drop"])
def test_mask_and_drop_never_wait_for_one_group(on_lag: OnLag) -> None:
    groups = [pending("old", due=0, finished=False), pending("a", due=9, oldest=9), pending("b", due=9, oldest=9)]
    assert rule(on_lag=on_lag).choose(groups, now=9, more_to_come=True).take == ("a", "b")
    assert rule(on_lag=on_lag).may_admit([0] * 50, due=0, now=9)


def test_the_last_batch_may_be_short_and_waits_for_all_that_runs() -> None:
    groups = [pending("a", due=5), pending("b", due=5, finished=False, order=1), pending("c", due=5, order=2)]
    the_rule = rule(groups_per_step=4)
    assert the_rule.choose(groups, now=4, more_to_come=False).waits_for == ("b",)
    finished = [dataclasses.replace(g, is_finished=True) for g in groups]
    choice = the_rule.choose(finished, now=4, more_to_come=False)
    assert (choice.take, choice.is_last) == (("a", "b", "c"), True)
    assert the_rule.choose(finished, now=4, more_to_come=True).take == ()
    nothing = the_rule.choose([], now=4, more_to_come=False)
    assert (nothing.take, nothing.is_last) == ((), True)


def test_a_broken_bound_is_an_error_and_not_a_wait_for_ever() -> None:
    groups = [pending(f"g{i}", due=3, order=i) for i in range(3)]
    with pytest.raises(TrainingError, match="lag bound"):
        rule(groups_per_step=1).choose(groups, now=3, more_to_come=True)


def test_feasible_part_keeps_the_earliest_due_and_leaves_out_what_is_too_late() -> None:
    groups = [pending("late", due=2), *(pending(f"g{i}", due=4, order=i) for i in range(5))]
    assert rule().feasible_part(groups, now=3) == ("g0", "g1", "g2", "g3")
    assert len(rule(on_lag="mask").feasible_part(groups, now=3)) == 6


def trajectory(*turn_versions: list[int], status: TrajectoryStatus = TrajectoryStatus.COMPLETED) -> Trajectory:
    turns = tuple(
        Turn(
            new_prompt_token_ids=int32_array([1]),
            completion=Completion(
                request_id="r",
                token_ids=int32_array(range(len(versions))),
                logprobs=float32_array(np.zeros(len(versions))),
                policy_versions=int32_array(versions),
                finish_reason="stop",
            ),
            action=Message(role="assistant"),
        )
        for versions in turn_versions
    )
    return Trajectory(
        trajectory_id="t",
        group_id="g",
        member=0,
        attempt=0,
        task_id="task",
        turns=turns,
        status=status,
        reward=1.0 if status.is_scored else None,
    )


def group(*trajectories: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup(group_id="g", task=Task(task_id="task", env_id="e"), trajectories=trajectories)


def test_versions_of_a_group() -> None:
    """The oldest token decides the lag; a member that is not scored is not trained, but its tokens may be lost ones."""
    mixed = group(trajectory([3] * 4, [5] * 6), trajectory([9], status=TrajectoryStatus.ENV_ERROR), trajectory([]))
    assert (oldest_version(mixed), newest_version(mixed)) == (3, 9)
    assert (oldest_version(group()), newest_version(group())) == (None, None)


def test_stale_tokens_are_counted_by_turn() -> None:
    groups = [group(trajectory([1, 3], [3, 3, 4]), trajectory([2], status=TrajectoryStatus.INFRA_ERROR))]
    assert stale_by_turn(groups, now=5, max_lag=2) == ((1, 2), (0, 3))
    assert stale_by_turn(groups, now=6, max_lag=2) == ((2, 2), (2, 3))


@given(lags=st.lists(st.integers(0, 30), min_size=1, max_size=300))
def test_histogram_against_numpy(lags: list[int]) -> None:
    histogram = LagHistogram.of(lags[:100]) + LagHistogram.of(lags[100:])
    assert histogram.num_tokens == len(lags)
    assert histogram.mean == pytest.approx(np.mean(lags))
    assert histogram.max == max(lags)
    assert histogram.p99 == np.percentile(lags, 99, method="inverted_cdf")


def test_histogram_of_nothing_and_of_the_future() -> None:
    assert (LagHistogram().mean, LagHistogram().p99, LagHistogram().max) == (0, 0, 0)
    with pytest.raises(ValueError, match="below 0"):
        LagHistogram.of([-1])

"""Which turn gets which part of an episode's worth."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftgym.trainer.credit import tells_apart, turn_advantages
from driftgym.types import Completion, Message, Task, Trajectory, TrajectoryGroup, TrajectoryStatus, Turn

METHODS = ("group_mean", "leave_one_out", "group_normalised", "batch_normalised")


def turn(reward=0.0, *, is_interrupted=False):
    completion = Completion(request_id="r", token_ids=[5], logprobs=[-0.1], policy_versions=[0], finish_reason="stop")
    return Turn(
        new_prompt_token_ids=[1],
        completion=completion,
        action=Message(role="assistant", content="x"),
        reward=reward,
        is_interrupted=is_interrupted,
    )


def member(reward, *turns, parts=None, index=0):
    return Trajectory(
        trajectory_id=f"g0-{index}-0",
        group_id="g0",
        member=index,
        attempt=0,
        task_id="t0",
        turns=tuple(each if isinstance(each, Turn) else turn(each) for each in turns),
        status=TrajectoryStatus.INFRA_ERROR if reward is None else TrajectoryStatus.COMPLETED,
        reward=reward,
        reward_parts=parts or {},
    )


def group(*members):
    return TrajectoryGroup(group_id="g0", task=Task(task_id="t0", env_id="e"), trajectories=tuple(members))


def advantages(*members, method="group_mean", credit="turn"):
    (found,) = turn_advantages([group(*members)], method=method, credit=credit)
    return found


def test_a_turn_is_credited_with_what_came_of_it_and_not_with_what_was_before():
    """Two members of equal grade; the first earns 1 in its first turn, the second 1 in its second."""
    first, second = advantages(member(1.0, 1.0, 0.0), member(1.0, 0.0, 1.0))
    # Returns from the first turn on are equal; from the second on they are 0 and 1.
    assert first == pytest.approx([0.0, -0.5])
    assert second == pytest.approx([0.0, 0.5])


def test_with_the_group_mean_it_is_the_return_less_its_baseline():
    members = [member(1.0, 0.5, 0.25), member(0.0, 0.0, 0.5), member(0.5, 0.25, 0.0)]
    returns = [[1.75, 1.25], [0.5, 0.5], [0.75, 0.5]]
    means = [3.0 / 3, 2.25 / 3]
    expected = [[g - mean for g, mean in zip(row, means, strict=True)] for row in returns]
    for found, values in zip(advantages(*members), expected, strict=True):
        assert found == pytest.approx(values)


def test_the_baseline_of_a_turn_is_over_the_members_that_have_it():
    short, long, longer = advantages(member(0.0, 0.0), member(0.0, 0.0, 1.0), member(0.0, 0.0, 0.0))
    assert short == pytest.approx([-1 / 3]), "of the first turn's returns 0, 1, 0"
    assert long == pytest.approx([2 / 3, 0.5]), "of the second turn's returns 1, 0"
    assert longer == pytest.approx([-1 / 3, -0.5])


@pytest.mark.parametrize("method", METHODS)
def test_a_member_without_a_reward_is_left_out_of_every_baseline(method):
    scored = [member(1.0, 0.5), member(0.0, 0.0, 1.0), member(1.0, 0.0, 0.0)]
    with_failed = advantages(scored[0], member(None, 9.0, 9.0, 9.0), *scored[1:], method=method)
    assert with_failed[1] is None
    assert [with_failed[0], *with_failed[2:]] == advantages(*scored, method=method)
    assert advantages(member(None, 1.0), member(None), method=method) == [None, None]
    assert advantages(member(0.7, 0.1, 0.2), method=method) == [[0.0, 0.0]]
    assert advantages(member(0.7), member(0.7), method=method) == [[], []]


GRADES = st.lists(
    st.tuples(st.none() | st.floats(0, 1, allow_subnormal=False), st.integers(0, 4)), min_size=1, max_size=5
)


@pytest.mark.parametrize("method", [*METHODS, "max_rl"])
@given(grades=st.lists(GRADES, min_size=1, max_size=3))
def test_without_turn_rewards_both_credits_are_the_same_exactly(method, grades):
    groups = [group(*(member(reward, *[0.0] * num_turns) for reward, num_turns in each)) for each in grades]
    by_episode = turn_advantages(groups, method=method, credit="episode")
    assert turn_advantages(groups, method=method, credit="turn") == by_episode
    for found, each in zip(by_episode, grades, strict=True):
        assert [values is None for values in found] == [reward is None for reward, _ in each]
        assert [len(values or ()) for values in found] == [0 if reward is None else n for reward, n in each]


@pytest.mark.parametrize("method", METHODS)
@given(data=st.data())
def test_any_turn_rewards_give_finite_numbers(method, data):
    rewards = st.lists(st.floats(-10, 10), max_size=3)
    members = data.draw(st.lists(st.tuples(st.none() | st.floats(-1, 1), rewards), max_size=4))
    found = advantages(*(member(reward, *turns) for reward, turns in members), method=method)
    assert all(math.isfinite(value) for values in found if values is not None for value in values)


def test_a_grade_that_is_the_sum_of_the_turn_rewards_is_not_counted_twice():
    """As a foreign environment's, whose grade is the return: what counts is the reward to go."""
    won = member(1.0, 0.0, 1.0, parts={"return": 1.0})
    early = member(1.0, 1.0, 0.0, parts={"return": 1.0})
    lost = member(0.0, 0.0, 0.0, parts={"return": 0.0})
    third = 1 / 3
    expected = [[third, 2 * third], [third, -third], [-2 * third, -third]]
    for found, values in zip(advantages(won, early, lost), expected, strict=True):
        assert found == pytest.approx(values)


def test_what_a_grade_holds_beside_the_return_counts_for_every_turn():
    bonus = member(3.0, 1.0, 0.0, parts={"return": 1.0, "bonus": 2.0})
    plain = member(1.0, 1.0, 0.0, parts={"return": 1.0})
    assert advantages(bonus, plain) == [[1.0, 1.0], [-1.0, -1.0]]


def test_an_interrupted_answer_is_one_turn():
    plain = member(0.0, 1.0, 0.0)
    interrupted = member(0.0, turn(is_interrupted=True), 0.0, 1.0)
    assert advantages(plain, interrupted) == [[0.0, -0.5], [0.0, 0.0, 0.5]]


def test_credit_of_the_episode_does_not_look_at_turn_rewards():
    assert advantages(member(1.0, 5.0), member(0.0, -5.0, 3.0), credit="episode") == [[0.5], [-0.5, -0.5]]


def test_the_whole_batch_is_one_scale_for_grades_and_one_for_turns():
    groups = [group(member(1.0, 0.2), member(0.0, 0.0)), group(member(1.0, 0.0), member(1.0, 0.0))]
    found = turn_advantages(groups, method="batch_normalised", credit="turn")
    assert found[0][0] == pytest.approx([2.0], abs=1e-4), "a standard deviation of each"
    assert found[1] == [[0.0], [0.0]]


def test_a_group_tells_something_when_any_of_its_advantages_is_not_zero():
    equal_grades = group(member(1.0, 1.0, 0.0), member(1.0, 0.0, 1.0))
    assert not tells_apart(equal_grades, credit="episode")
    assert tells_apart(equal_grades, credit="turn")
    assert tells_apart(group(member(1.0), member(0.0)), credit="turn")
    # The same rewards in another order, whose sums differ in their last bit when added up one by one.
    rounding = group(member(1.0, 0.1, 0.2, 0.3), member(1.0, 0.3, 0.2, 0.1))
    first, second = advantages(*rounding.trajectories, method="group_normalised")
    assert first[0] == second[0] == 0.0
    for nothing in (
        group(),
        group(member(0.3)),
        group(member(None), member(None, 1.0)),
        group(member(0.0), member(0.0)),
    ):
        assert not tells_apart(nothing, credit="turn")
        assert not tells_apart(nothing, credit="episode")

"""Advantages against figures computed elsewhere, and the groups that have no statistics."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftgym.errors import TrainingError
from driftgym.trainer.advantages import batch_advantages, group_advantages, has_variance
from driftgym.types import MAX_REWARD

GROUP_METHODS = ("group_mean", "leave_one_out", "group_normalised", "max_rl")
METHODS = (*GROUP_METHODS, "batch_normalised")
_VECTORS = json.loads((Path(__file__).parents[2] / "data" / "objective_vectors.json").read_text())["vectors"]
_VECTOR = next(vector for vector in _VECTORS if vector["id"] == "advantages")
REWARDS = _VECTOR["inputs"]["rewards"]
EXPECTED = _VECTOR["expected"]

ANY_GROUP = st.lists(st.none() | st.floats(0, 1, allow_subnormal=False), max_size=8)


@pytest.mark.parametrize(
    ("method", "is_unbiased", "key"),
    [
        ("group_mean", True, "dr_grpo"),
        ("leave_one_out", True, "rloo"),
        ("group_normalised", True, "grpo_std_unbiased"),
        ("group_normalised", False, "grpo_std_population"),
        ("max_rl", True, "max_rl"),
    ],
)
def test_the_vectors_of_methods_that_look_at_one_group(method, is_unbiased, key):
    for rewards, expected in zip(REWARDS, EXPECTED[key], strict=True):
        found = group_advantages(rewards, method=method, is_unbiased=is_unbiased)
        assert found == pytest.approx(expected, abs=_VECTOR["tol"]["abs"])


def test_the_vector_of_the_whole_batch():
    kept = EXPECTED["zero_variance_kept_prompts"]
    assert [int(has_variance(rewards)) for rewards in REWARDS] == kept
    telling = [rewards for rewards, is_kept in zip(REWARDS, kept, strict=True) if is_kept]
    found = batch_advantages(telling, method="batch_normalised")
    for values, expected in zip(found, EXPECTED["scalerl_batch_norm"], strict=True):
        assert values == pytest.approx(expected, abs=_VECTOR["tol"]["abs"])


def test_a_group_that_tells_nothing_does_not_change_the_batch_whether_it_stays_or_not():
    first, solved, third = batch_advantages(REWARDS, method="batch_normalised")
    assert solved == [0.0] * 4
    assert [first, third] == batch_advantages([REWARDS[0], REWARDS[2]], method="batch_normalised")


def test_a_batch_normalised_batch_has_the_standard_deviation_one():
    values = [v for group in batch_advantages(REWARDS, method="batch_normalised") for v in group]
    telling = values[:4] + values[8:]
    assert math.fsum(v * v for v in telling) / len(telling) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_all_solved_a_failed_member_a_single_one_and_nobody(method):
    """Groups [1,1,1,1], [1,0,None,1], [0.7], [None,None]: nothing is counted as 0, nothing is NaN."""
    groups = [[1.0, 1.0, 1.0, 1.0], [1.0, 0.0, None, 1.0], [0.7], [None, None]]
    solved, failed, single, nobody = batch_advantages(groups, method=method)
    assert solved == [0.0] * 4
    assert single == [0.0]
    assert nobody == [None, None]
    assert failed[2] is None
    scale = failed[0] / (1 / 3)
    assert scale > 0
    assert [failed[0], failed[1], failed[3]] == pytest.approx([scale / 3, -2 * scale / 3, scale / 3])
    without = batch_advantages([[1.0, 0.0, 1.0]], method=method)[0]
    assert [failed[0], failed[1], failed[3]] == pytest.approx(without), "as if the failed member had not been there"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "rewards",
    [
        [0.1 + 0.2, 0.3, 0.3],
        [float(np.float32(0.1) + np.float32(0.2)), 0.3, float(np.float32(0.3))],
        [0.1 + 0.2 - 0.3, 0.0, 0.0],
        [sum([0.1] * 10) * 1e6, 1e6, None],
    ],
)
def test_rewards_that_differ_by_rounding_alone_are_equal(method, rewards):
    assert not has_variance(rewards)
    telling = [1.0, 0.0]
    noise, other = batch_advantages([rewards, telling], method=method)
    assert {value for value in noise if value is not None} == {0.0}
    assert other == batch_advantages([telling], method=method)[0], "it does not change the others either"


def test_small_and_large_rewards_that_differ_tell_something():
    assert has_variance([1e-6, 0.0])
    assert has_variance([1e6, 1e6 + 10.0])
    assert has_variance([-1.0, 1.0])


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_of_nothing(method):
    assert batch_advantages([], method=method) == []
    assert batch_advantages([[]], method=method) == [[]]
    assert batch_advantages([[0.1] * 3, [None]], method=method) == [[0.0] * 3, [None]]


@pytest.mark.parametrize("method", METHODS)
@given(groups=st.lists(ANY_GROUP, max_size=5))
def test_any_batch_gives_finite_numbers_that_add_up_to_zero_in_each_group(method, groups):
    advantages = batch_advantages(groups, method=method)
    for rewards, values in zip(groups, advantages, strict=True):
        assert [value is None for value in values] == [reward is None for reward in rewards]
        scored = [value for value in values if value is not None]
        assert all(math.isfinite(value) for value in scored)
        largest = max((abs(value) for value in scored), default=0.0)
        assert abs(math.fsum(scored)) <= 1e-9 * max(1.0, largest)
        assert any(scored) <= has_variance(rewards)


@pytest.mark.parametrize("method", GROUP_METHODS)
def test_other_groups_of_the_batch_do_not_matter_to_the_methods_of_one_group(method):
    assert batch_advantages(REWARDS, method=method) == [group_advantages(r, method=method) for r in REWARDS]


def test_the_whole_batch_is_not_asked_of_one_group():
    with pytest.raises(ValueError, match="batch_normalised is of a whole batch"):
        group_advantages([1.0, 0.0], method="batch_normalised")


def test_a_mean_that_cannot_be_divided_by_is_refused():
    with pytest.raises(TrainingError, match="max_rl divides by the mean reward"):
        group_advantages([1.0, -1.0], method="max_rl")
    assert group_advantages([-1.0, -1.0], method="max_rl") == [0.0, 0.0]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("reward", [math.nan, math.inf, -1.7e308, 1e39])
def test_a_reward_that_is_not_finite_or_too_large_is_refused(method, reward):
    with pytest.raises(ValueError, match="not finite, or too large"):
        batch_advantages([[1.0, reward]], method=method)


@pytest.mark.parametrize("method", [method for method in METHODS if method != "max_rl"])
def test_the_largest_rewards_and_returns_have_advantages_in_float32(method):
    for largest in (MAX_REWARD, 1e6 * MAX_REWARD):
        values = np.float32(batch_advantages([[largest, -largest], [largest, largest, 0.0]], method=method)[0])
        assert np.isfinite(values).all()
        assert values[0] == -values[1] > 0

"""Group advantages against figures computed elsewhere, and the groups that have no statistics."""

import json
import math
from pathlib import Path

import pytest

from driftgym.trainer.advantages import group_advantages

METHODS = ("group_mean", "group_normalised", "leave_one_out")
_VECTORS = json.loads((Path(__file__).parents[2] / "data" / "objective_vectors.json").read_text())["vectors"]
_ADVANTAGES = next(vector for vector in _VECTORS if vector["id"] == "advantages")


@pytest.mark.parametrize(
    ("method", "key"),
    [("group_mean", "dr_grpo"), ("group_normalised", "grpo_std_unbiased"), ("leave_one_out", "rloo")],
)
def test_the_vectors(method, key):
    for rewards, expected in zip(_ADVANTAGES["inputs"]["rewards"], _ADVANTAGES["expected"][key], strict=True):
        assert group_advantages(rewards, method=method) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_equal_rewards_give_exactly_zero(method):
    assert group_advantages([1.0, 1.0, 1.0, 1.0], method=method) == [0.0] * 4
    assert group_advantages([0.1] * 3, method=method) == [0.0] * 3


@pytest.mark.parametrize("method", METHODS)
def test_a_single_scored_member_gets_zero(method):
    assert group_advantages([0.7], method=method) == [0.0]
    assert group_advantages([None, 0.7], method=method) == [None, 0.0]


@pytest.mark.parametrize("method", METHODS)
def test_without_scored_members_there_is_no_advantage(method):
    assert group_advantages([None, None], method=method) == [None, None]
    assert group_advantages([], method=method) == []


def test_a_failed_member_is_left_out_of_the_mean():
    first, second, failed, last = group_advantages([1.0, 0.0, None, 1.0], method="group_mean")
    assert failed is None
    assert [first, second, last] == pytest.approx([1 / 3, -2 / 3, 1 / 3])


@pytest.mark.parametrize("method", METHODS)
def test_advantages_of_a_group_add_up_to_zero(method):
    values = group_advantages([0.1, 0.9, 0.35, None, 0.2], method=method)
    assert math.fsum(value for value in values if value is not None) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused(reward):
    with pytest.raises(ValueError, match="not finite"):
        group_advantages([1.0, reward], method="group_mean")

import re
from collections import Counter

import numpy as np
import pytest

from driftgym.envs.lookup.env import is_answer
from driftgym.envs.lookup.store import NAMES, TOOLS, LatencyDraws, draw_fault, draw_world

LEVELS = ("one_call", "two_calls")


def _worlds(level, num=400):
    return [draw_world(seed=seed, level=level, num_people=8) for seed in range(num)]


@pytest.mark.parametrize("level", LEVELS)
def test_a_world_is_its_seeds(level):
    first, again, other = (draw_world(seed=seed, level=level, num_people=8) for seed in (7, 7, 8))
    assert first == again
    assert first != other


@pytest.mark.parametrize("level", LEVELS)
def test_values_are_unique_and_short(level):
    for world in _worlds(level):
        values = [value for record in world.records.values() for value in record.values()]
        assert len(set(values)) == len(values) == 32
        assert all(10 <= value <= 999 for value in values)
        assert all(type(value) is int for value in values)
        assert set(world.people) <= set(world.records)


@pytest.mark.parametrize("level", LEVELS)
def test_questions_are_short_and_do_not_name_the_tool(level):
    literal = {schema.name.removeprefix("get_") for schema in TOOLS[level]}
    questions = Counter()
    for world in _worlds(level):
        words = re.findall(r"\w+", world.question.lower())
        assert len(words) <= 12
        assert not literal & set(words)
        assert all(person in world.question for person in world.people)
        questions[re.sub("|".join(NAMES), "X", world.question)] += 1
    assert len(questions) == (12 if level == "one_call" else 24)


@pytest.mark.parametrize("level", LEVELS)
def test_plain_questions_name_what_the_needed_tools_are_called_after(level):
    for seed in range(200):
        world = draw_world(seed=seed, level=level, num_people=8, wording="plain")
        words = set(re.findall(r"\w+", world.question.lower()))
        assert {call.tool.removeprefix("get_") for call in world.needed} <= words
        others = {schema.name for schema in TOOLS[level]} - {call.tool for call in world.needed}
        assert not {name.removeprefix("get_") for name in others} & words


@pytest.mark.parametrize("level", LEVELS)
def test_every_tool_is_needed_about_as_often(level):
    worlds = _worlds(level)
    needed = Counter(call.tool for world in worlds for call in world.needed)
    assert set(needed) == {schema.name for schema in TOOLS[level]}
    assert min(needed.values()) > 0.7 * max(needed.values())


def test_two_calls_follow_each_other():
    for world in _worlds("two_calls"):
        select, fetch = world.needed
        assert fetch.arguments == {"person": select.result}
        ages = {world.records[person]["age"]: person for person in world.people}
        chosen = max(ages) if select.tool == "get_oldest" else min(ages)
        assert ages[chosen] == select.result
        assert world.answer == str(world.records[select.result][fetch.tool.removeprefix("get_")])


def test_faults_hit_their_share_of_the_seeds():
    shares = {"hang": 0.1, "raise": 0.2, "flood": 0.3}
    drawn = Counter(draw_fault(seed=seed, shares=shares) for seed in range(2000))
    for fault, share in shares.items():
        assert drawn[fault] / 2000 == pytest.approx(share, abs=0.03)
    assert draw_fault(seed=1, shares={}) is None
    assert draw_fault(seed=1, shares={"hang": 1.0}) == "hang"


def test_latencies():
    assert LatencyDraws(seed=1, mean_s=0.5, sigma=0).next_s() == 0.5
    assert LatencyDraws(seed=1, mean_s=0, sigma=1).next_s() == 0
    first, again = (LatencyDraws(seed=1, mean_s=0.5, sigma=1) for _ in range(2))
    draws = [first.next_s() for _ in range(4000)]
    assert draws[:5] == [again.next_s() for _ in range(5)]
    assert np.mean(draws) == pytest.approx(0.5, rel=0.1)
    assert max(draws) > 4


@pytest.mark.parametrize("answer", ["41", " 41\n", "Room 41.", "It is 41!", "41, sure", "(41)", "41 41"])
def test_right_answers(answer):
    assert is_answer(answer, "41")


@pytest.mark.parametrize(
    "answer",
    ["", "forty-one", "4 1", "411", "141", "41a", "a41", "41 or 42", "41.5", "-41", "0.41", "\u0664\u0661", "4\u0661"],
)
def test_wrong_answers(answer):
    assert not is_answer(answer, "41")

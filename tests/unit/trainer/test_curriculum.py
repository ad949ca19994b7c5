"""Tasks over and over, without those that are solved."""

import pytest

from driftgym.trainer.curriculum import Curriculum
from driftgym.trainer.scripted import NumberedTasks


def play(curriculum, scores, *, num_groups):
    """The seeds of the groups that are played, each scored by `scores(seed)` as soon as it was."""
    seeds, index = [], 0
    while len(seeds) < num_groups and (index := curriculum.next_index(index)) is not None:
        seeds.append(curriculum.task(index).seed)
        curriculum.saw(index, scores(seeds[-1]))
        index += 1
    return seeds


def test_without_a_number_no_task_comes_twice():
    assert play(Curriculum(NumberedTasks()), lambda seed: [1.0], num_groups=7) == list(range(7))


def test_the_first_tasks_come_over_and_over():
    curriculum = Curriculum(NumberedTasks(), num_tasks=3)
    assert play(curriculum, lambda seed: [1.0], num_groups=7) == [0, 1, 2, 0, 1, 2, 0]
    assert not curriculum.is_solved, "nothing is solved without a threshold"


def test_a_solved_task_does_not_come_again():
    curriculum = Curriculum(NumberedTasks(), num_tasks=3, solved_above=0.75)
    scores = {0: [0.5, 1.0], 1: [0.0, 1.0], 2: [1.0, 0.25]}  # means of 0.75, 0.5, 0.625
    assert play(curriculum, scores.get, num_groups=6) == [0, 1, 2, 1, 2, 1]
    assert curriculum.num_solved == 1


def test_when_every_task_is_solved_nothing_is_left():
    curriculum = Curriculum(NumberedTasks(), num_tasks=4, solved_above=1.0)
    assert play(curriculum, lambda seed: [1.0, 1.0], num_groups=100) == [0, 1, 2, 3]
    assert curriculum.is_solved
    assert curriculum.next_index(0) is None


def test_members_that_are_not_scored_solve_nothing():
    curriculum = Curriculum(NumberedTasks(), num_tasks=1, solved_above=0.0)
    assert play(curriculum, lambda seed: [], num_groups=3) == [0, 0, 0]


def test_the_history_of_a_run_is_taken_up():
    history = [(0, [0.0]), (1, [1.0]), (3, [1.0]), (5, [0.0])]
    curriculum = Curriculum(NumberedTasks(), num_tasks=3, solved_above=1.0, history=history)
    assert curriculum.num_solved == 2, "task 0 by its second group, task 1 by its first"
    assert curriculum.next_index(6) == 8


def test_a_list_that_ends_before_the_number_of_tasks_ends():
    curriculum = Curriculum(NumberedTasks(num_tasks=2), num_tasks=5)
    with pytest.raises(IndexError):
        play(curriculum, lambda seed: [0.0], num_groups=5)

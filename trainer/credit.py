"""Which turn gets which part of an episode's worth: advantages of every turn of every member of a batch.

With credit `episode`, each turn of a member gets the advantage of its reward R (`Trajectory.reward`, the grade). With
credit `turn`, turn k of member i gets

    A(i, k) = A(O_i) + A(T_ik)        T_ik = sum over l >= k of the turn rewards r_il (`Turn.reward`)

so that a turn is credited with what came of it, and not with what was earned before. O is the grade; where it tells
the turn rewards again, that part is taken off (`RETURN_PART`), so that nothing counts twice. Either part has the
baseline and the scale of the method (`advantages.py`), over the members of the group: O's over all of them, T's over
those that have a turn k. With `group_mean` this is the return from turn k on, less its baseline. Where an environment
gives no turn rewards, T is 0 and every A is that of credit `episode`, exactly. The parts of an answer that was
interrupted for its length (`Turn.is_interrupted`) are one turn here. Source: the sum of an outcome advantage
and a turn advantage, each normalised on its own, is that of MT-GRPO (arXiv:2505.11821), here for any number of turns
and with rewards to go.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

from driftgym.trainer.advantages import AdvantageMethod, Rewards, batch_advantages, has_variance
from driftgym.types import Trajectory, TrajectoryGroup

Credit: TypeAlias = Literal["episode", "turn"]
TurnAdvantages: TypeAlias = list[list[float] | None]

RETURN_PART = "return"
"""A part of the grade with this name (`Grade.parts`) is the sum of the turn rewards, told again in the grade."""


def turn_advantages(
    groups: Sequence[TrajectoryGroup], *, method: AdvantageMethod, credit: Credit
) -> list[TurnAdvantages]:
    """The advantage of each turn of each member of each group of a batch.

    Returns:
        [groups][members][turns] None for a member that is not scored.

    Raises:
        ValueError: a reward is not finite.
        TrainingError: `max_rl`, and the mean of different rewards is not above 0.
    """
    outcomes = batch_advantages([_outcomes(group, credit) for group in groups], method=method)
    # Each turn index of each group has a baseline of its own: to the method it is a group.
    returns = [_returns_by_turn(group, credit) for group in groups]
    flat = iter(batch_advantages(list(itertools.chain.from_iterable(returns)), method=method))
    of_turns = [[next(flat) for _ in of_group] for of_group in returns]
    return [
        [_of_member(t, of[member], [values[member] for values in by_turn]) for member, t in enumerate(g.trajectories)]
        for g, of, by_turn in zip(groups, outcomes, of_turns, strict=True)
    ]


def tells_apart(group: TrajectoryGroup, *, credit: Credit) -> bool:
    """False for a zero-variance group: every advantage of it is 0, whatever the method."""
    return has_variance(_outcomes(group, credit)) or any(map(has_variance, _returns_by_turn(group, credit)))


def _of_member(trajectory: Trajectory, outcome: float | None, by_turn: Sequence[float | None]) -> list[float] | None:
    """[turns] of one member; `by_turn` are the parts of its turns, [] with credit `episode`."""
    if outcome is None:
        return None
    if not by_turn:
        return [outcome] * len(trajectory.turns)
    return [outcome + (by_turn[index] or 0.0) for index in _answers(trajectory)]


def _answers(trajectory: Trajectory) -> list[int]:
    """[turns] which answer of the episode each of its records is of, from 0."""
    ended = itertools.accumulate((not turn.is_interrupted for turn in trajectory.turns), initial=0)
    return list(ended)[: len(trajectory.turns)]


def _outcomes(group: TrajectoryGroup, credit: Credit) -> Rewards:
    """[members] what the advantage of a whole member is of."""
    if credit == "episode":
        return [trajectory.reward for trajectory in group.trajectories]
    return [
        None if trajectory.reward is None else trajectory.reward - trajectory.reward_parts.get(RETURN_PART, 0.0)
        for trajectory in group.trajectories
    ]


def _returns_by_turn(group: TrajectoryGroup, credit: Credit) -> list[Rewards]:
    """[turns][members] T, None for a member that is not scored or has no such turn; [] with credit `episode`."""
    if credit == "episode":
        return []
    returns = [_returns(t) if t.status.is_scored else [] for t in group.trajectories]
    return list(itertools.zip_longest(*returns))


def _returns(trajectory: Trajectory) -> list[float]:
    """[answers] T of one member: exactly rounded, so that the same rewards in another order are the same return."""
    answers = _answers(trajectory)
    return [
        math.fsum(turn.reward for turn, answer in zip(trajectory.turns, answers, strict=True) if answer >= k)
        for k in range(max(answers, default=-1) + 1)
    ]

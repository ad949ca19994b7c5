"""What both sides of `trl_side_by_side.py` have in common. Data only."""

from collections.abc import Sequence

GROUPS_PER_STEP = 8
GROUP_SIZE = 8
LEARNING_RATE = 3e-4
BETAS = (0.9, 0.95)
MAX_TURNS = 4
MAX_TOKENS_PER_TURN = 32
MAX_EPISODE_TOKENS = 96  # of an episode, after the question; one that goes well has about 50
WINDOW = 10  # steps

Point = tuple[float, float]
"""Seconds since the first episode began, at the end of a step; the mean reward of the episodes that it trained."""


def seconds_to(points: Sequence[Point], reward: float) -> float | None:
    """The end of the first step whose mean reward, with the `WINDOW - 1` steps before, is `reward` at least.

    >>> seconds_to([(float(second), 0.1 * second) for second in range(1, 21)], 0.8)
    13.0
    """
    for end in range(WINDOW, len(points) + 1):
        if sum(point[1] for point in points[end - WINDOW : end]) / WINDOW >= reward - 1e-9:
            return points[end - 1][0]
    return None

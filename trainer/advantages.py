"""How much better than its siblings each member of a group did."""

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

AdvantageMethod: TypeAlias = Literal["group_mean", "group_normalised", "leave_one_out"]

_EPSILON = 1e-6


def group_advantages(rewards: Sequence[float | None], *, method: AdvantageMethod) -> list[float | None]:
    """The advantage of each member of one group.

    R is a member's reward, and the mean is over the n members that have one:

    - `group_mean`: R - mean (Dr. GRPO, arXiv:2503.20783).
    - `group_normalised`: (R - mean) / (std + 1e-6), std with n - 1 in its denominator (GRPO, arXiv:2402.03300).
    - `leave_one_out`: R - mean of the others = n / (n - 1) · (R - mean) (RLOO, arXiv:2402.14740).

    Args:
        rewards: one per member; None when the member was not scored. It is left out of the statistics.
        method: one of the above.

    Returns:
        One per member; None where the reward is None; exactly 0 when all rewards are equal or there is only one.

    Raises:
        ValueError: a reward is not finite.
    """
    scored = [float(reward) for reward in rewards if reward is not None]
    if not all(math.isfinite(reward) for reward in scored):
        raise ValueError(f"group_advantages: a reward is not finite: {list(rewards)}")
    if not scored or min(scored) == max(scored):
        return [None if reward is None else 0.0 for reward in rewards]
    mean = math.fsum(scored) / len(scored)
    scale = _scale(scored, mean, method)
    return [None if reward is None else (reward - mean) * scale for reward in rewards]


def _scale(scored: Sequence[float], mean: float, method: AdvantageMethod) -> float:
    """What R - mean is multiplied by; there are at least two rewards, not all equal."""
    num = len(scored)
    if method == "group_mean":
        return 1.0
    if method == "leave_one_out":
        return num / (num - 1)
    variance = math.fsum((reward - mean) ** 2 for reward in scored) / (num - 1)
    return 1.0 / (math.sqrt(variance) + _EPSILON)

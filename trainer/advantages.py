"""How much better than its siblings each member of a group did. Pure functions of rewards.

R is a member's reward; mean and std are those of the n members of its group that have one. A member without a reward
(nobody's score: the environment or the infrastructure failed) is left out of every statistic and gets no advantage.
A group whose rewards are all equal, or that has a single one, tells nothing: its advantages are exactly 0. Rewards
that differ by rounding alone are equal: a standard deviation of rounding errors would make advantages of them.

| method | advantage | also known as, source |
|---|---|---|
| `group_mean` | R - mean | Dr. GRPO (dr_grpo), arXiv:2503.20783, together with the learner's normalisation `fixed` |
| `leave_one_out` | R - mean of the others = n / (n - 1) * (R - mean) | RLOO, arXiv:2402.14740 |
| `group_normalised` | (R - mean) / (std + 1e-6) | GRPO, arXiv:2402.03300 |
| `batch_normalised` | (R - mean) / (batch std + 1e-6) | ScaleRL, arXiv:2510.13786 |
| `max_rl` | (R - mean) / mean | MaxRL, arXiv:2602.02710 |

The batch std is the population standard deviation of all R - mean of the batch, groups that tell nothing excepted,
whether or not they stay in the batch: many solved tasks in it do not blow up the advantages of the others.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

from driftgym.errors import TrainingError
from driftgym.types import MAX_REWARD

GroupMethod: TypeAlias = Literal["group_mean", "leave_one_out", "group_normalised", "max_rl"]
AdvantageMethod: TypeAlias = Literal[GroupMethod, "batch_normalised"]
Rewards: TypeAlias = Sequence[float | None]
Advantages: TypeAlias = list[float | None]

_EPSILON = 1e-6
_SAME = 1e-6  # of the largest: by less differ sums of the same rewards in float32, whatever the order
_NOTHING = 1e-9  # likewise where parts of about 1 cancel
_LARGEST = 1e6 * MAX_REWARD  # the return of a turn is a sum of rewards; twice this still is a float32


def has_variance(rewards: Rewards) -> bool:
    """True when two members have different rewards, beyond rounding: without that, every advantage is 0."""
    scored = _scored(rewards)
    return len(scored) > 1 and not math.isclose(min(scored), max(scored), rel_tol=_SAME, abs_tol=_NOTHING)


def group_advantages(rewards: Rewards, *, method: AdvantageMethod, is_unbiased: bool = True) -> Advantages:
    """The advantage of each member of one group, by a method that looks at no other group.

    Args:
        rewards: [members] None when the member was not scored.
        method: one of the above, not `batch_normalised`.
        is_unbiased: for `group_normalised`: the std has n - 1 in its denominator; else n (population).

    Returns:
        [members] None where the reward is None; all finite.

    Raises:
        ValueError: a reward is not finite, or far above `types.MAX_REWARD`; or the method needs the whole batch.
        TrainingError: `max_rl`, and the mean of different rewards is not above 0.
    """
    if method == "batch_normalised":
        raise ValueError("batch_normalised is of a whole batch: see batch_advantages")
    centred = _centred(rewards)
    divisor = _divisor(_scored(rewards), method, is_unbiased=is_unbiased) if has_variance(rewards) else 1.0
    return _divided(centred, divisor)


def batch_advantages(groups: Sequence[Rewards], *, method: AdvantageMethod) -> list[Advantages]:
    """The advantage of each member of each group of a batch, by any method. Raises as `group_advantages` does.

    Args:
        groups: [groups][members] the rewards.
        method: one of the above; `group_normalised` with the unbiased std.

    Returns:
        [groups][members] None where the reward is None; all finite.
    """
    if method != "batch_normalised":
        return [group_advantages(rewards, method=method) for rewards in groups]
    centred = [_centred(rewards) for rewards in groups]
    telling = [_scored(values) for rewards, values in zip(groups, centred, strict=True) if has_variance(rewards)]
    flat = [value for values in telling for value in values]
    divisor = _std(flat, mean=0.0, is_unbiased=False) if flat else 1.0
    return [_divided(values, divisor) for values in centred]


def _centred(rewards: Rewards) -> Advantages:
    """R - mean, exactly 0 where all are equal. Raises ValueError when a reward is not finite, or too large."""
    scored = _scored(rewards)
    if not all(abs(reward) <= _LARGEST for reward in scored):
        raise ValueError(f"a reward is not finite, or too large: {list(rewards)}")
    if not has_variance(rewards):
        return [None if reward is None else 0.0 for reward in rewards]
    mean = _mean(scored)
    return [None if reward is None else reward - mean for reward in rewards]


def _divisor(scored: Sequence[float], method: GroupMethod, *, is_unbiased: bool) -> float:
    """What R - mean is divided by; there are at least two rewards, not all equal."""
    mean = _mean(scored)
    if method == "leave_one_out":
        return 1.0 - 1.0 / len(scored)
    if method == "group_normalised":
        return _std(scored, mean=mean, is_unbiased=is_unbiased)
    if method == "max_rl":
        if mean <= 0:
            raise TrainingError(f"max_rl divides by the mean reward, which must be above 0; rewards: {list(scored)}")
        return mean
    return 1.0


def _divided(values: Advantages, divisor: float) -> Advantages:
    return [None if value is None else value / divisor for value in values]


def _std(values: Sequence[float], *, mean: float, is_unbiased: bool) -> float:
    """The standard deviation and a little, so that it can be divided by."""
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - is_unbiased)
    return math.sqrt(variance) + _EPSILON


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _scored(rewards: Iterable[float | None]) -> list[float]:
    return [float(reward) for reward in rewards if reward is not None]

"""Objectives that weigh the policy gradient by a bounded ratio: no token's gradient is taken away by a clip.

Legend: the package.
"""

from typing import Literal

import torch
from torch import Tensor

from driftgym.trainer.objectives.clipped import clipped_surrogate, proximal_logprobs
from driftgym.trainer.objectives.tokens import MAX_LOG_RATIO, TokenBatch, TokenLosses, bounded_exp, losses_of

Level = Literal["token", "sequence", "geometric"]


def reinforce(tokens: TokenBatch) -> TokenLosses:
    """l = -A·lp. Nothing corrects for lag: meant for lag 0. Source: Williams 1992."""
    tokens = tokens.masked()
    return losses_of(tokens, -tokens.advantages * tokens.logprobs)


def positives_only(tokens: TokenBatch) -> TokenLosses:
    """l = -max(A, 0)·lp: what went well is imitated, and what did not is left out.

    Bears any lag, since it never pushes a probability down, and so can learn nothing from failure: where bad episodes
    are rewarded now and then, it imitates them too. Source: filtered behaviour cloning, as in RAFT arXiv:2304.06767.
    """
    tokens = tokens.masked()
    left_out = tokens.advantages < 0
    return losses_of(tokens, -tokens.advantages.clamp(min=0.0) * tokens.logprobs, left_out=left_out)


def tis(tokens: TokenBatch, *, cap: float, level: Level = "token", eps_low: float, eps_high: float) -> TokenLosses:
    """l = sg(min(w, cap))·max(-A·u, -A·clip(u, 1 - eps_low, 1 + eps_high)): truncated importance sampling.

    u = exp(lp - prox) is the ratio against the proximal policy, w = exp(prox - mu) the weight that corrects for who
    wrote the token; with one step a batch prox is sg(lp): the gradient is -A·min(r, cap), and the clip never holds.
    The ratio is in w alone: a surrogate that is anchored on mu already would count it twice.
    `level`: w of the token, the product over its sequence, or its geometric mean.
    Sources: V-trace arXiv:1802.01561; fengyao.notion.site/off-policy-rl. Detached: w, prox, mu and A.
    Published to bear: the mismatch of engine and trainer, and a few versions.
    """
    tokens = tokens.masked()
    weights = level_weights(tokens, level)
    return _corrected(tokens, weights.clamp(max=cap), eps_low=eps_low, eps_high=eps_high, cut=weights > cap)


def mis(
    tokens: TokenBatch, *, low: float, high: float, level: Level = "sequence", eps_low: float, eps_high: float
) -> TokenLosses:
    """As `tis`, with w where low <= w <= high, and 0 elsewhere: masked importance sampling.

    `low` and `high` bound w itself, not 1/w. What is left out stays in the denominator.
    Sources: IcePop (Ring-1T arXiv:2510.18855) for `token`; verl's Seq-MIS and Geo-MIS for the other levels.
    """
    tokens = tokens.masked()
    weights = level_weights(tokens, level)
    outside = (weights < low) | (weights > high)
    return _corrected(tokens, torch.where(outside, 0.0, weights), eps_low=eps_low, eps_high=eps_high, left_out=outside)


def aipo(tokens: TokenBatch, *, cap: float) -> TokenLosses:
    """l = -sg(min(r, cap))·A·lp. Each token keeps its gradient, however far the policy has moved.

    Source: LlamaRL arXiv:2505.24034 (several versions of lag). Detached: the weight, mu and A.
    """
    tokens = tokens.masked()
    ratio = bounded_exp(tokens.log_ratios.detach())
    losses = -ratio.clamp(max=cap) * tokens.advantages * tokens.logprobs
    return losses_of(tokens, losses, clipped=ratio > cap)


def cispo(
    tokens: TokenBatch, *, eps_low: float, eps_high: float, beyond: Literal["cut", "drop"] = "cut"
) -> TokenLosses:
    """l = -sg(clip(r, 1 - eps_low, 1 + eps_high))·A·lp; with `drop`, tokens outside of the band weigh 0.

    The upper bound is 1 + eps_high: a published "ε high" of 5 that is meant absolutely is eps_high 4 here. eps_low 1
    is no lower bound. Sources: MiniMax-M1 arXiv:2506.13585, ScaleRL arXiv:2510.13786. Detached: the weight, mu and A.
    Published to bear: 8 steps (ScaleRL's PipelineRL-8).
    """
    tokens = tokens.masked()
    ratio = bounded_exp(tokens.log_ratios.detach())
    low, high = 1.0 - eps_low, 1.0 + eps_high
    if beyond == "drop":
        outside = (ratio <= low) | (ratio >= high)
        losses = -torch.where(outside, 0.0, ratio) * tokens.advantages * tokens.logprobs
        return losses_of(tokens, losses, left_out=outside)
    losses = -ratio.clamp(low, high) * tokens.advantages * tokens.logprobs
    return losses_of(tokens, losses, clipped=(ratio < low) | (ratio > high))


def topr(tokens: TokenBatch, *, level: Literal["token", "sequence"] = "sequence") -> TokenLosses:
    """l = -sg(c)·A·lp, c = 1 for A > 0 and min(ratio, 1) for A <= 0: tapered off-policy REINFORCE.

    `sequence`, the paper's, tapers by ∏r: a failure that the policy would no longer produce is not pushed further
    down. On long episodes ∏r is all but 0 after little drift. `token` tapers by each token's r.
    Source: arXiv:2503.14286 (fully offline data). Detached: c, mu and A.
    """
    tokens = tokens.masked()
    ratio = level_ratios(tokens, level)
    taper = torch.where(tokens.advantages > 0, 1.0, ratio.clamp(max=1.0))
    losses = -taper * tokens.advantages * tokens.logprobs
    return losses_of(tokens, losses, clipped=(tokens.advantages <= 0) & (ratio > 1.0))


def level_ratios(tokens: TokenBatch, level: Level) -> Tensor:
    """[N] r of each token, or ∏r or the geometric mean of its sequence; detached. `tokens` are masked."""
    return _at_level(tokens, tokens.log_ratios.detach(), level)


def level_weights(tokens: TokenBatch, level: Level) -> Tensor:
    """[N] the same of w = exp(prox - mu)."""
    return _at_level(tokens, proximal_logprobs(tokens) - tokens.behaviour_logprobs, level)


def _at_level(tokens: TokenBatch, log_ratios: Tensor, level: Level) -> Tensor:
    if level == "token":
        return bounded_exp(log_ratios)
    of_sequence = tokens.sums(log_ratios) if level == "sequence" else tokens.means(log_ratios)
    return tokens.per_token(of_sequence.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp())


def _corrected(
    tokens: TokenBatch,
    weights: Tensor,
    *,
    eps_low: float,
    eps_high: float,
    cut: Tensor | None = None,
    left_out: Tensor | None = None,
) -> TokenLosses:
    """PPO's loss against the proximal policy, weighted."""
    ratio = bounded_exp(tokens.logprobs - proximal_logprobs(tokens))
    surrogate = clipped_surrogate(tokens, ratio, eps_low=eps_low, eps_high=eps_high)
    clipped = surrogate.clipped if cut is None else surrogate.clipped | cut
    return losses_of(tokens, weights * surrogate.losses, clipped=clipped, left_out=left_out)

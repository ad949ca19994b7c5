"""The objective that `async` runs train with by default, and the mask of stale failures. Legend: the package."""

import torch
from torch import Tensor

from driftgym.trainer.objectives.tokens import TokenBatch, TokenLosses, bounded_exp, losses_of


def robust(tokens: TokenBatch, *, low: float, cap: float, max_drift: float) -> TokenLosses:
    """l = -sg(c)·A·lp, c = clip(r, low, cap) for A > 0; min(r, cap) for A <= 0, and 0 where the sequence drifted.

    The two signs fail differently under lag. A success stays worth imitating however old it is: its weight is bounded
    from both sides. A failure that the policy would hardly produce any more has taught what it could; pushed further
    down, its probability goes to places that nobody chose. So a sequence of A <= 0 is left out as a whole once the
    policy gives it, per token, `max_drift` nats less than its writer did: mean(mu - lp) > max_drift. That is measured
    on the sequence itself, whatever its version, and does not depend on its length.

    Sources: the taper of TOPR arXiv:2503.14286; sequence masking of DeepSeek-V3.2 arXiv:2512.02556.
    Measured: docs/gap-tolerance.md.
    Detached: c, mu and A.
    """
    tokens = tokens.masked()
    ratio = bounded_exp(tokens.log_ratios.detach())
    stale = stale_failures(tokens, max_drift=max_drift)
    weights = torch.where(tokens.advantages > 0, ratio.clamp(low, cap), ratio.clamp(max=cap))
    weights = torch.where(stale, 0.0, weights)
    return losses_of(
        tokens, -weights * tokens.advantages * tokens.logprobs, clipped=(ratio > cap) & ~stale, left_out=stale
    )


def stale_failures(tokens: TokenBatch, *, max_drift: float) -> Tensor:
    """[N] bool: tokens of A <= 0 in sequences whose mean of mu - lp is above `max_drift`, in nats a token."""
    drift = tokens.means(-tokens.log_ratios.detach())
    return (tokens.advantages <= 0) & tokens.mask & (drift > max_drift)[tokens.sequences]

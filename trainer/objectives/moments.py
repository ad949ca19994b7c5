"""Objectives whose bounds follow from the batch: M2PO and BAPO. Both read the whole batch. Legend: the package."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from driftgym.trainer.objectives.clipped import clipped_surrogate, is_outward
from driftgym.trainer.objectives.tokens import TokenBatch, TokenLosses, bounded_exp, losses_of

_ROUNDING = 16.0  # of exp and sqrt together, in units of the precision


def m2po(
    tokens: TokenBatch,
    *,
    max_m2: float,
    form: Literal["mask", "outward_mask", "clip"] = "mask",
    floor_low: float = 0.3,
    floor_high: float = 0.5,
) -> TokenLosses:
    """Bounds M2, the second moment of the log-ratio.

    - `mask`: l = -keep·A·r; the tokens of largest (log r)² are left out until the mean of the rest is below max_m2,
      or a single one is left.
    - `outward_mask`: the same among the tokens that move outwards alone (A > 0, r > 1 or A < 0, r < 1).
    - `clip`: PPO with bounds exp(±x), x just below the largest abs(log r) for which M2 of the outward tokens, held at
      it, is within max_m2; the bounds are never narrower than 1 - floor_low and 1 + floor_high.

    Source: arXiv:2510.01161 (256 steps), `clip` being its published code. Detached: keep, mu and A; r is not.
    """
    tokens = tokens.masked()
    squares = tokens.log_ratios.detach().square()
    outward = is_outward(tokens) & tokens.mask
    if form == "clip":
        reach = _reach(squares[outward], max_m2=max_m2)
        eps_low, eps_high = max(1.0 - math.exp(-reach), floor_low), max(math.exp(reach) - 1.0, floor_high)
        return clipped_surrogate(tokens, bounded_exp(tokens.log_ratios), eps_low=eps_low, eps_high=eps_high)
    candidates = torch.nonzero(outward if form == "outward_mask" else tokens.mask).flatten()
    left_out = torch.zeros_like(tokens.mask)
    left_out[candidates[_to_drop(squares[candidates], max_m2=max_m2)]] = True
    kept = torch.where(left_out, 0.0, tokens.advantages)
    return losses_of(tokens, -kept * bounded_exp(tokens.log_ratios), left_out=left_out)


def bapo(
    tokens: TokenBatch,
    *,
    target: float,
    dual_clip: float = 3.0,
    lows: tuple[float, float, float] = (0.6, 0.8, 0.05),
    highs: tuple[float, float, float] = (1.2, 2.0, 0.05),
) -> TokenLosses:
    """PPO whose bounds are raised, first the lower, then the upper, until gains balance losses.

    Balance: Σ A·min(r, high) over A >= 0, over Σ abs(A)·max(r, low) over A < 0; the bounds rise in steps (`lows`,
    `highs`: first, last, step) until it reaches `target`. Source: arXiv:2510.18927. Detached: the bounds, mu and A.
    """
    tokens = tokens.masked()
    ratio = bounded_exp(tokens.log_ratios)
    low, high = lows[0], highs[0]
    for low, high in _ladder(lows, highs):
        if _balance(tokens, ratio.detach(), low=low, high=high) >= target:
            break
    return clipped_surrogate(tokens, ratio, eps_low=1.0 - low, eps_high=high - 1.0, dual_clip=dual_clip)


def _to_drop(squares: Tensor, *, max_m2: float) -> Tensor:
    """Which of `squares`, the largest first, go until the mean of the rest is below `max_m2`; never the last."""
    ordered, order = torch.sort(squares, descending=True, stable=True)
    rest = ordered.flip(0).cumsum(0).flip(0)  # summed from the smallest up: no cancellation
    means = rest / torch.arange(len(ordered), 0, -1, device=squares.device)
    within = torch.nonzero(means < max_m2).flatten()
    num_dropped = int(within[0]) if len(within) else max(0, len(ordered) - 1)
    return order[:num_dropped]


def _reach(squares: Tensor, *, max_m2: float) -> float:
    """Just below the largest abs(log r) of the outward tokens at which M2, held there, is within `max_m2`; or 0.

    Below, so that the token that gives the bound lies outside of it, whatever the rounding.
    """
    if not len(squares):
        return 0.0
    ordered = torch.sort(squares).values
    below = ordered.cumsum(0) - ordered
    num_from = torch.arange(len(ordered), 0, -1, device=squares.device)
    held = (below + ordered * num_from) / len(ordered)
    within = ordered[held <= max_m2]
    if not len(within):
        return 0.0
    return max(0.0, float(within[-1].sqrt()) - _ROUNDING * torch.finfo(squares.dtype).eps)


def _ladder(lows: Sequence[float], highs: Sequence[float]) -> list[tuple[float, float]]:
    """The bounds in the order in which they are tried."""
    num_lows = round((lows[1] - lows[0]) / lows[2])
    num_highs = round((highs[1] - highs[0]) / highs[2])
    raised = [(lows[0] + index * lows[2], highs[0]) for index in range(num_lows + 1)]
    return raised + [(lows[1], highs[0] + index * highs[2]) for index in range(1, num_highs + 1)]


def _balance(tokens: TokenBatch, ratio: Tensor, *, low: float, high: float) -> float:
    advantages = tokens.advantages
    gains = float((advantages.clamp(min=0) * ratio.clamp(max=high))[tokens.mask].sum())
    losses = float((-advantages.clamp(max=0) * ratio.clamp(min=low))[tokens.mask].sum())
    return gains / losses if losses > 0 else math.inf

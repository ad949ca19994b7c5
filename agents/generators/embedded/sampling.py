"""Drawing tokens for many rows at once, each with its own temperature, nucleus and seed.

Shapes: n rows, V vocabulary. The log-prob of a token is that of the distribution it was drawn from, in float32.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_BELOW_ONE = 1.0 - 1e-9  # keeps a draw below the total mass after rounding, so that no token of mass 0 is drawn


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draws:
    """One token a row, on the host.

    >>> Draws(token_ids=np.array([3]), logprobs=np.array([-0.5], dtype=np.float32)).token_ids.tolist()
    [3]
    """

    token_ids: NDArray[np.int64]
    """[n] what was drawn."""
    logprobs: NDArray[np.float32]
    """[n] its log-prob; not finite where the logits were not."""


def uniforms(seeds: NDArray[np.uint64], counts: NDArray[np.int32]) -> NDArray[np.float64]:
    """[n] numbers in [0, 1), a function of (seed, how many tokens the request has) alone.

    So a request with a seed draws the same whatever else is in the batch, and after its KV was recomputed. The
    mixing function is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
    """
    with np.errstate(over="ignore"):
        state = _mixed(seeds) + (counts.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        return (_mixed(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))


@torch.inference_mode()
def draw_tokens(
    logits_nV: torch.Tensor,  # noqa: N803  # the shape is part of the name
    *,
    temperatures: NDArray[np.float32],
    top_ps: NDArray[np.float32],
    draws: NDArray[np.float64],
) -> Draws:
    """Draws one token a row by inverting the cumulative distribution at `draws`.

    Args:
        logits_nV: [n, V] of any float type.
        temperatures: [n]; 0 takes the most likely token, whose log-prob is then that at temperature 1.
        top_ps: [n]; the smallest set of most likely tokens whose mass reaches it, renormalised; 1 takes all.
        draws: [n] in [0, 1).
    """
    device = logits_nV.device
    is_greedy = temperatures == 0.0
    any_is_greedy = bool(is_greedy.any())
    shifted = logits_nV.float()
    # Before the division, which may then take a logit to -inf at most: the likeliest stays at 0.
    shifted = shifted - shifted.amax(dim=-1, keepdim=True)
    if (temperatures != 1.0).any():
        divisors = torch.from_numpy(np.where(is_greedy, np.float32(1.0), temperatures)).to(device)
        shifted = shifted / divisors[:, None]
    if (top_ps < 1.0).any():
        nucleus = (top_ps < 1.0) & ~is_greedy
        limits = torch.from_numpy(np.where(nucleus, top_ps, np.float32(2.0))).to(device)
        shifted = _within_nucleus(shifted, limits)
    cumulative = shifted.exp().cumsum(dim=-1, dtype=torch.float64)  # float64, since V terms are summed
    mass = cumulative[:, -1:]
    targets = torch.from_numpy(draws * _BELOW_ONE).to(device)[:, None] * mass
    # The first token whose cumulative mass is above the target; past the end only where logits are not finite.
    token_ids = torch.searchsorted(cumulative, targets, right=True).clamp_(max=shifted.shape[-1] - 1)
    if any_is_greedy:
        greedy = torch.from_numpy(is_greedy).to(device)[:, None]
        token_ids = torch.where(greedy, shifted.argmax(dim=-1, keepdim=True), token_ids)
    chosen = shifted.gather(-1, token_ids) - mass.log()
    # One copy to the host: float64 holds token ids exactly.
    both = torch.cat([token_ids, chosen], dim=-1).cpu().numpy()
    return Draws(token_ids=both[:, 0].astype(np.int64), logprobs=both[:, 1].astype(np.float32))


def _within_nucleus(logits: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    """Logits within the nucleus, -inf outside of it; a limit above 1 leaves a row as it is."""
    ordered, order = logits.sort(dim=-1, descending=True)
    mass = ordered.double().softmax(dim=-1)
    before = mass.cumsum(dim=-1) - mass
    outside = before >= limits[:, None]
    outside[:, 0] = False
    return torch.empty_like(logits).scatter_(-1, order, ordered.masked_fill(outside, -torch.inf))

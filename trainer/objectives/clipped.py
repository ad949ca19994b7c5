"""Objectives that take the gradient of a token away when it moved far enough: PPO and its kin. Legend: the package."""

from typing import Literal

import torch
from torch import Tensor

from driftgym.trainer.objectives.tokens import TokenBatch, TokenLosses, bounded_exp, by_sign, losses_of

_PROBABLE = 1.0 - 1e-7  # keeps log(1 - p) finite


def ppo(tokens: TokenBatch, *, eps_low: float, eps_high: float, dual_clip: float | None = None) -> TokenLosses:
    """l = max(-A·r, -A·clip(r, 1 - eps_low, 1 + eps_high)), the ratio taken against the behaviour policy.

    With a dual clip c, and for A < 0 only, l is at most -A·c: without it such a token's loss and gradient have no
    bound in r, and one token can rule the step.
    Sources: PPO arXiv:1707.06347, eps_high above eps_low DAPO arXiv:2503.14476, dual clip arXiv:1912.09729.
    Detached: mu and A. The gradient is -A·r where the first term is the larger, and 0 where the clip holds.
    Published to bear: a few updates on one batch; with lag, the clip takes away most of what is learnt from.
    """
    tokens = tokens.masked()
    return clipped_surrogate(
        tokens, bounded_exp(tokens.log_ratios), eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
    )


def decoupled_ppo(
    tokens: TokenBatch,
    *,
    proximal: Literal["recomputed", "interpolated"] = "recomputed",
    eps_low: float,
    eps_high: float,
    cap: float | None = None,
    beyond: Literal["cut", "drop"] = "drop",
) -> TokenLosses:
    """l = w·max(-A·u, -A·clip(u, 1 - eps_low, 1 + eps_high)), u = exp(lp - prox), w = sg exp(prox - mu).

    The clip is against a proximal policy that is near, and w corrects for who wrote the token.

    - `recomputed`: prox is the policy before the first of several steps on the batch (`proximal_logprobs`); with one
      step a batch it is sg(lp), u is 1, the clip never holds, and all protection is in the cap of w.
    - `interpolated`: prox = a·sg(lp) + (1 - a)·mu with a = (lag - 1) / lag, 0 for lag 0: no further forward pass.

    Above `cap`, w is `cut` to it or the token is `drop`ped; null: neither.
    Sources: arXiv:2110.00641; AReaL arXiv:2505.24298 (bears a lag of 8 there); interpolated A-3PO arXiv:2512.06547.
    Detached: prox, w, mu and A.
    """
    tokens = tokens.masked()
    near = _interpolated(tokens) if proximal == "interpolated" else proximal_logprobs(tokens)
    weights = bounded_exp(near - tokens.behaviour_logprobs)
    beyond_cap = torch.zeros_like(tokens.mask) if cap is None else weights > cap
    if cap is not None:
        weights = weights.clamp(max=cap) if beyond == "cut" else torch.where(beyond_cap, 0.0, weights)
    surrogate = clipped_surrogate(tokens, bounded_exp(tokens.logprobs - near), eps_low=eps_low, eps_high=eps_high)
    is_cut = beyond_cap if beyond == "cut" else torch.zeros_like(beyond_cap)
    return losses_of(
        tokens,
        weights * surrogate.losses,
        clipped=surrogate.clipped | is_cut,
        left_out=beyond_cap & ~is_cut,
    )


def dppo_tv(tokens: TokenBatch, *, low: float, high: float, tau: float) -> TokenLosses:
    """l = -keep·A·r + tau·(log r)², keep 0 where p - q > high and A > 0, or p - q < -low and A <= 0.

    p = exp(lp) and q = exp(mu): the trust region is in probability (the total variation of the two-way choice between
    this token and any other), not in the ratio, which says little where both are tiny. The second term stands for
    all tokens, the masked ones too, and carries no 1/2.
    Sources: DPPO arXiv:2602.04879; this form is the default of prime-rl. Detached: mu and A; r is not.
    Published to bear: a lag of up to 8 steps.
    """
    tokens = tokens.masked()
    moved = tokens.logprobs.detach().exp() - tokens.behaviour_logprobs.exp()
    far = torch.where(tokens.advantages > 0, moved > high, moved < -low)
    return _kept_surrogate(tokens, far, tau=tau)


def ipo(tokens: TokenBatch, *, high: float, tau: float) -> TokenLosses:
    """l = -keep·A·r + tau·(log r)², keep 0 where abs(p - q) > high, whatever the sign of A; p and q as in `dppo_tv`.

    Source: prime-rl's symmetric form of it. Detached: mu and A; r is not.
    """
    tokens = tokens.masked()
    moved = tokens.logprobs.detach().exp() - tokens.behaviour_logprobs.exp()
    return _kept_surrogate(tokens, moved.abs() > high, tau=tau)


def dppo_kl(tokens: TokenBatch, *, high: float, cap: float) -> TokenLosses:
    """l = -keep·sg(min(r, cap))·A·lp, keep 0 where D > high and the token moves outwards.

    Outwards: A > 0 and r > 1, or A < 0 and r < 1.
    D = q·log(q/p) + (1 - q)·log((1 - q)/(1 - p)), the divergence of the two-way choice; p = exp(lp), q = exp(mu).
    Source: DPPO-Binary-KL arXiv:2602.04879. Detached: all but the last lp.
    """
    tokens = tokens.masked()
    log_ratios = tokens.log_ratios.detach()
    q = tokens.behaviour_logprobs.exp().clamp(max=_PROBABLE)
    p = tokens.logprobs.detach().exp().clamp(max=_PROBABLE)
    divergence = -q * log_ratios + (1 - q) * (torch.log1p(-q) - torch.log1p(-p))
    far = (divergence > high) & is_outward(tokens)
    ratio = bounded_exp(log_ratios)
    losses = -torch.where(far, 0.0, ratio.clamp(max=cap)) * tokens.advantages * tokens.logprobs
    return losses_of(tokens, losses, clipped=(ratio > cap) & ~far, left_out=far)


def sapo(tokens: TokenBatch, *, tau_pos: float, tau_neg: float) -> TokenLosses:
    """l = -A·(4/tau)·sigmoid(tau·(r - 1)), tau_pos for A > 0, tau_neg else: a soft gate in the place of the clip.

    The gradient is -A·4·s·(1 - s)·r with s the sigmoid: -A at r = 1, and falling to both sides.
    Source: SAPO arXiv:2511.20347. Detached: mu and A.
    """
    tokens = tokens.masked()
    tau = by_sign(tokens.advantages > 0, tau_pos, tau_neg, like=tokens.logprobs)
    gate = torch.sigmoid(tau * (bounded_exp(tokens.log_ratios) - 1.0))
    return losses_of(tokens, -tokens.advantages * 4.0 / tau * gate)


def clipped_surrogate(
    tokens: TokenBatch, ratio: Tensor, *, eps_low: float, eps_high: float, dual_clip: float | None = None
) -> TokenLosses:
    """PPO's loss for a ratio [N], with a gradient; `tokens` are masked."""
    advantages = tokens.advantages
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - eps_low, 1.0 + eps_high)
    losses = torch.maximum(plain, bounded)
    clipped = bounded > plain
    if dual_clip is not None:
        bound = -advantages * dual_clip
        beyond = (advantages < 0) & (losses > bound)
        losses = torch.where(beyond, bound, losses)
        clipped = clipped | beyond
    return losses_of(tokens, losses, clipped=clipped)


def proximal_logprobs(tokens: TokenBatch) -> Tensor:
    """[N] prox: as given, or sg(lp) when the batch has one step alone."""
    given = tokens.proximal_logprobs
    return (tokens.logprobs if given is None else given).detach()


def is_outward(tokens: TokenBatch) -> Tensor:
    """[N] bool: the advantage drives the token further from the behaviour policy than it is already."""
    log_ratios = tokens.log_ratios.detach()
    return ((tokens.advantages > 0) & (log_ratios > 0)) | ((tokens.advantages < 0) & (log_ratios < 0))


def _interpolated(tokens: TokenBatch) -> Tensor:
    lags = tokens.lags.to(tokens.logprobs.dtype)
    share = torch.where(lags > 0, (lags - 1.0) / lags.clamp(min=1.0), 0.0)
    return share * tokens.logprobs.detach() + (1.0 - share) * tokens.behaviour_logprobs


def _kept_surrogate(tokens: TokenBatch, far: Tensor, *, tau: float) -> TokenLosses:
    log_ratios = tokens.log_ratios
    kept = torch.where(far, 0.0, tokens.advantages)
    return losses_of(tokens, -kept * bounded_exp(log_ratios) + tau * log_ratios.square(), left_out=far)

"""Objectives of whole sequences. Each gives every token the loss f of its sequence: with `normalisation: sequence` the
batch's loss is the published mean of f over sequences. Legend: the package.
"""

from typing import Literal

import torch
from torch import Tensor

from driftgym.trainer.objectives.tokens import (
    MAX_LOG_RATIO,
    TokenBatch,
    TokenLosses,
    bounded_exp,
    by_sign,
    losses_of,
)


def gspo(tokens: TokenBatch, *, eps_low: float, eps_high: float) -> TokenLosses:
    """f = max(-A·s, -A·clip(s, 1 - eps_low, 1 + eps_high)), s the geometric mean of the ratios.

    Source: arXiv:2507.18071 (eps 3e-4 and 4e-4; a few updates on one batch: with lag, almost every sequence falls
    outside). Detached: mu and A. The gradient of a token is -A·s/n.
    """
    tokens = tokens.masked()
    ratio = _geometric(tokens, tokens.log_ratios)
    return _clipped_sequences(tokens, ratio, eps_low=eps_low, eps_high=eps_high)


def gmpo(tokens: TokenBatch, *, eps_low: float, eps_high: float) -> TokenLosses:
    """f = -A·exp(mean x), x the log-ratio, held at eps_high for A > 0 and at -eps_low for A < 0.

    The bounds are of the logarithm: 0.4 stands for a ratio of exp(±0.4). Source: arXiv:2507.20673. Detached: mu, A.
    """
    tokens = tokens.masked()
    positive = tokens.advantages > 0
    log_ratios = tokens.log_ratios
    held = torch.where(positive, log_ratios.clamp(max=eps_high), log_ratios.clamp(min=-eps_low))
    ratio = _geometric(tokens, held)
    return losses_of(tokens, tokens.per_token(-_advantages(tokens) * ratio), clipped=held != log_ratios)


def gepo(tokens: TokenBatch, *, eps_low: float, eps_high: float) -> TokenLosses:
    """f = max(-A·v, -A·clip(v, 1 - eps_low, 1 + eps_high)), v = p / (Σ q² / Σ q) over the group.

    p and q are the geometric mean probabilities of the sequence under policy and behaviour. The denominator is the
    group's, so that a tiny q does not blow the weight up; v is biased, and not 1 on policy.
    Source: arXiv:2508.17850 (hundreds of seconds of delay). Detached: q, A. Reads whole groups.
    """
    tokens = tokens.masked()
    log_p, log_q = tokens.means(tokens.logprobs), tokens.means(tokens.behaviour_logprobs)
    log_expected = tokens.group_log_sums(2.0 * log_q) - tokens.group_log_sums(log_q)
    return _clipped_sequences(tokens, bounded_exp(log_p - log_expected), eps_low=eps_low, eps_high=eps_high)


def vespo(tokens: TokenBatch, *, k_pos: float, lambda_pos: float, k_neg: float, lambda_neg: float) -> TokenLosses:
    """l = -sg(φ(∏r))·A·lp, φ(W) = exp(λ)·W^k·exp(-λ·W): 1 at W = 1, and falling to 0 on both sides.

    k and λ by the sign of A (A >= 0 takes the first two). Source: arXiv:2602.10693 (64 steps). Detached: φ, mu, A.
    """
    tokens = tokens.masked()
    log_w = tokens.sums(tokens.log_ratios.detach()).clamp(max=MAX_LOG_RATIO)
    is_positive = _advantages(tokens) >= 0
    k = by_sign(is_positive, k_pos, k_neg, like=log_w)
    lam = by_sign(is_positive, lambda_pos, lambda_neg, like=log_w)
    phi = (lam + k * log_w - lam * log_w.exp()).exp()
    return losses_of(tokens, -tokens.per_token(phi) * tokens.advantages * tokens.logprobs)


def opmd(tokens: TokenBatch, *, tau: float, form: Literal["token", "sequence", "residual"] = "sequence") -> TokenLosses:
    """Online policy mirror descent towards exp(R / tau)·mu, from squared log-ratios; no ratio is ever formed.

    With lp(y) and S the sums of lp and of lp - mu over the sequence, R its reward:

    - `sequence`: f = -(R - mean of the group)·lp(y) + tau/2·S². (Kimi k1.5, arXiv:2501.12599, equation 3.)
    - `token`: l = -A·lp + tau/2·(lp - mu)²; the same, token by token.
    - `residual`: f = (R - tau·log mean exp(R / tau) - tau·S)², the mean over the group. (Section 2.3.2 there.)

    Detached: mu, R, A and the group's terms. Reads whole groups: those terms are of every row, trained or not.
    Published for the lag of partial rollouts.
    """
    tokens = tokens.masked()
    if form == "token":
        pull = tau / 2.0 * tokens.log_ratios.square()
        return losses_of(tokens, -tokens.advantages * tokens.logprobs + pull)
    drift = tokens.sums(tokens.log_ratios)
    if form == "sequence":
        gain = tokens.rewards - tokens.group_means(tokens.rewards, of_all=True)
        return _of_sequences(tokens, -gain * tokens.sums(tokens.logprobs) + tau / 2.0 * drift.square())
    scaled = tokens.rewards / tau
    log_sizes = tokens.group_log_sums(torch.zeros_like(scaled), of_all=True)
    log_z = tokens.group_log_sums(scaled, of_all=True) - log_sizes
    return _of_sequences(tokens, (tokens.rewards - tau * log_z - tau * drift).square())


def tba(tokens: TokenBatch, *, tau: float) -> TokenLosses:
    """f = (log Z + S - R / tau)², S the sum of lp - ref, log Z = sg of the group's mean of R / tau - S.

    Trajectory balance: needs no behaviour log-probs, and bears any lag in principle. Source: arXiv:2503.18929.
    Detached: log Z, ref, R. Reads whole groups.

    Raises:
        ValueError: there are no reference log-probs.
    """
    if tokens.reference_logprobs is None:
        raise ValueError("tba: needs the log-probs of the reference policy")
    tokens = tokens.masked()
    drift = tokens.sums(tokens.logprobs - tokens.reference_logprobs)  # type: ignore[operator]
    target = tokens.rewards / tau
    log_z = tokens.group_means(target - drift).detach()
    return _of_sequences(tokens, (log_z + drift - target).square())


def _geometric(tokens: TokenBatch, log_ratios: Tensor) -> Tensor:
    return bounded_exp(tokens.means(log_ratios))


def _advantages(tokens: TokenBatch) -> Tensor:
    """[S] the mean advantage of each sequence's trained tokens: they are all the same unless turns have their own."""
    return tokens.means(tokens.advantages)


def _of_sequences(tokens: TokenBatch, losses: Tensor) -> TokenLosses:
    return losses_of(tokens, tokens.per_token(losses))


def _clipped_sequences(tokens: TokenBatch, ratio: Tensor, *, eps_low: float, eps_high: float) -> TokenLosses:
    """PPO's loss for [S] ratios."""
    advantages = _advantages(tokens)
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - eps_low, 1.0 + eps_high)
    clipped = (bounded > plain)[tokens.sequences]
    return losses_of(tokens, tokens.per_token(torch.maximum(plain, bounded)), clipped=clipped)

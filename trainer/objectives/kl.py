"""What goes beside any objective: a pull towards a reference policy, and the masking of stale failures.

Legend: the package; ref is the log-prob under the reference policy.
"""

from dataclasses import replace

import torch
from torch import Tensor

from driftgym.trainer.objective_config import KlEstimator
from driftgym.trainer.objectives.robust import stale_failures
from driftgym.trainer.objectives.tokens import MAX_LOG_RATIO, TokenBatch, TokenLosses


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """[N] an estimate of KL(policy ‖ reference) at each token, with a gradient to lp.

    - `k1`: lp - ref. Unbiased in value; as a loss its gradient is 0 in expectation.
    - `k2`: (lp - ref)² / 2. Its gradient is that of the divergence, on policy.
    - `k3`: exp(ref - lp) - (ref - lp) - 1. Never negative.
    - `k3_straight_through`: the value of k3 with the gradient of k2.

    Source: joschu.net/blog/kl-approx.html. Detached: ref.
    """
    log_ratios = logprobs - reference_logprobs.detach()
    if estimator == "k1":
        return log_ratios
    k2 = log_ratios.square() / 2.0
    if estimator == "k2":
        return k2
    k3 = (-log_ratios).clamp(max=MAX_LOG_RATIO).exp() + log_ratios - 1.0
    return k3 if estimator == "k3" else k3.detach() + k2 - k2.detach()


def kl_returns(tokens: TokenBatch, *, coef: float) -> Tensor:
    """[N] what a penalty of -coef·(mu - ref) at each token adds to its advantage: the sum of its own and later ones.

    Undiscounted, over the trained tokens of its sequence. Its sign is that of a reward. Detached: all.

    Raises:
        ValueError: there are no reference log-probs.
    """
    rewards = -coef * (tokens.behaviour_logprobs - _reference(tokens)).detach()
    rewards = torch.where(tokens.mask, rewards, 0.0).double()  # sums run over all sequences: what is before must cancel
    up_to = rewards.cumsum(0) if tokens.order is None else _running_sums(rewards, tokens.order)
    # In that order a sequence stands together: what is left of it is its total less what came before.
    totals = tokens.sums(rewards).cumsum(0)
    returns = torch.where(tokens.mask, totals[tokens.sequences] - up_to + rewards, 0.0)
    return returns.to(tokens.logprobs.dtype)


def with_kl_in_reward(tokens: TokenBatch, *, coef: float) -> TokenBatch:
    """The same batch, its advantages with `kl_returns` added."""
    return replace(tokens, advantages=tokens.advantages + kl_returns(tokens, coef=coef))


def with_kl_in_loss(tokens: TokenBatch, result: TokenLosses, *, coef: float, estimator: KlEstimator) -> TokenLosses:
    """`result` with coef times the penalty added to the loss of every trained token, those that were left out too."""
    tokens = tokens.masked()
    penalty = coef * kl_penalty(tokens.logprobs, _reference(tokens), estimator)
    return replace(result, losses=result.losses + torch.where(tokens.mask, penalty, penalty.new_zeros(())))


def without_stale_failures(tokens: TokenBatch, result: TokenLosses, *, max_drift: float) -> TokenLosses:
    """`result` without the loss of sequences of A <= 0 whose mean of mu - lp is above `max_drift`, in nats a token.

    They stay in the denominator. Source: off-policy sequence masking, DeepSeek-V3.2 arXiv:2512.02556.
    """
    stale = stale_failures(tokens, max_drift=max_drift)
    losses = torch.where(stale, result.losses.new_zeros(()), result.losses)
    return TokenLosses(losses=losses, clipped=result.clipped & ~stale, left_out=result.left_out | stale)


def _running_sums(values: Tensor, order: Tensor) -> Tensor:
    """[N] for each place the sum of [N] `values` up to it, in the order of places [N] `order`."""
    return torch.empty_like(values).index_copy(0, order, values[order].cumsum(0))


def _reference(tokens: TokenBatch) -> Tensor:
    if tokens.reference_logprobs is None:
        raise ValueError("a KL term needs the log-probs of the reference policy")
    return tokens.reference_logprobs

"""Objectives: pure functions of per-token log-probs, and how the losses of tokens are added up.

Legend, for one token: `lp` its log-prob under the weights that are trained, `mu` its log-prob under the policy that
wrote it (`behaviour`), r = exp(lp - mu) the ratio, A the advantage, sg(·) "no gradient flows through". A loss is
minimised. Every function works on tensors of any one shape, in float32 or float64.

The loss of a batch is Σ w·l over tokens: l from an objective, w from `token_weights`, which are fixed by the whole
batch before any token is left out. Micro-batches and masks therefore never change what a token counts.

Log-ratios are clamped to ±20 before exp, so that a token that the policy has all but unlearnt, or learnt, gives finite
numbers; at such a ratio every objective here is clipped or capped, except that of PPO for A < 0 without a dual clip.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from driftgym.trainer.learner_config import Aggregation, PpoConfig, ReinforceConfig, TisConfig

_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenBatch:
    """What an objective reads. All tensors have one shape.

    >>> one = torch.zeros(1)
    >>> TokenBatch(logprobs=one, behaviour_logprobs=one, advantages=one + 1, mask=one == 0).mask.tolist()
    [True]
    """

    logprobs: Tensor
    """lp, with a gradient."""
    behaviour_logprobs: Tensor
    """mu."""
    advantages: Tensor
    """A."""
    mask: Tensor
    """Bool: the tokens that are trained. What the others hold is never read, not even a NaN."""

    def masked(self) -> "TokenBatch":
        """The same with zeros on the tokens that are not trained: their losses and gradients are exactly 0."""
        zero = self.logprobs.new_zeros(())
        return TokenBatch(
            logprobs=torch.where(self.mask, self.logprobs, zero),
            behaviour_logprobs=torch.where(self.mask, self.behaviour_logprobs, zero),
            advantages=torch.where(self.mask, self.advantages, zero),
            mask=self.mask,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLosses:
    """What an objective gives, token by token: 0 and False where the mask is false.

    >>> TokenLosses(losses=torch.zeros(1), clipped=torch.tensor([True])).clipped.tolist()
    [True]
    """

    losses: Tensor
    """l, with a gradient to lp."""
    clipped: Tensor
    """Bool: PPO: the tokens whose gradient was taken away; TIS: those whose weight was cut to the cap."""


Objective: TypeAlias = Callable[[TokenBatch, Any], TokenLosses]


def reinforce(tokens: TokenBatch, config: ReinforceConfig) -> TokenLosses:
    """l = -A·lp. Nothing corrects for lag. (Williams 1992.)"""
    tokens = tokens.masked()
    return TokenLosses(losses=-tokens.advantages * tokens.logprobs, clipped=torch.zeros_like(tokens.mask))


def ppo(tokens: TokenBatch, config: PpoConfig) -> TokenLosses:
    """l = max(-A·r, -A·clip(r, 1 - eps_low, 1 + eps_high)), the ratio taken against the behaviour policy.

    With a dual clip c, and for A < 0 only, l is at most -A·c, so that one token of large ratio cannot rule the step.
    Sources: PPO arXiv:1707.06347, eps_high above eps_low DAPO arXiv:2503.14476, dual clip arXiv:1912.09729.
    Detached: mu and A. The gradient is -A·r where the first term is the larger, and 0 where the clip holds.
    """
    tokens = tokens.masked()
    return _clipped_surrogate(_ratio(tokens.logprobs, tokens.behaviour_logprobs), tokens, config)


def tis(tokens: TokenBatch, config: TisConfig) -> TokenLosses:
    """l = -sg(min(r, C))·A·lp: truncated importance sampling without a proximal policy.

    Each token keeps a gradient of -A·min(r, C) however far the policy has moved, which is why it bears long lags.
    Sources: V-trace's truncated ratio arXiv:1802.01561, for language models arXiv:2505.24034 (AIPO).
    Detached: the weight, mu and A.
    """
    tokens = tokens.masked()
    ratio = _ratio(tokens.logprobs.detach(), tokens.behaviour_logprobs)
    losses = -ratio.clamp(max=config.cap) * tokens.advantages * tokens.logprobs
    return TokenLosses(losses=losses, clipped=tokens.mask & (ratio > config.cap))


def tis_proximal(tokens: TokenBatch, *, proximal_logprobs: Tensor, clip: PpoConfig, cap: float) -> TokenLosses:
    """l = sg(min(w, C))·max(-A·u, -A·clip(u, 1 - eps_low, 1 + eps_high)), for several steps on one batch.

    u = exp(lp - prox) is the ratio against the proximal policy (the weights before the first of the steps, re-scored by
    the trainer), w = exp(prox - mu) the weight that corrects for who wrote the token.
    Source: truncated importance sampling over PPO, fengyao.notion.site/off-policy-rl.
    Detached: the weight, the proximal log-probs, mu and A.
    """
    tokens = tokens.masked()
    proximal = torch.where(tokens.mask, proximal_logprobs.detach(), 0.0)
    weight = _ratio(proximal, tokens.behaviour_logprobs).clamp(max=cap)
    surrogate = _clipped_surrogate(_ratio(tokens.logprobs, proximal), tokens, clip)
    return TokenLosses(losses=weight * surrogate.losses, clipped=surrogate.clipped)


OBJECTIVES: Mapping[str, Objective] = {"reinforce": reinforce, "ppo": ppo, "tis": tis}
"""By the `name` of their configuration. In each, a token of advantage 0 has no loss and no gradient."""


def token_weights(
    num_tokens: Sequence[int], *, aggregation: Aggregation, fixed_num_tokens: int | None = None
) -> list[float]:
    """The weight w of each token of each segment, so that the loss of the batch is Σ w·l.

    With n the sampled tokens of a segment (trained or not), N their sum, and B the segments that have any:

    - `token_mean`: 1 / N. Every token counts the same.
    - `seq_mean_token_mean`: 1 / (B·n). Every segment counts the same (GRPO arXiv:2402.03300).
    - `seq_mean_token_sum`: 1 / B.
    - `fixed`: 1 / (B·fixed_num_tokens). No segment's length enters (Dr. GRPO arXiv:2503.20783).

    Args:
        num_tokens: n of each segment of the whole batch.
        aggregation: one of the above.
        fixed_num_tokens: for `fixed` alone.
    """
    num_segments = sum(num > 0 for num in num_tokens)
    total = sum(num_tokens)
    if not total:
        return [0.0] * len(num_tokens)
    if aggregation == "token_mean":
        return [1.0 / total] * len(num_tokens)
    if aggregation == "seq_mean_token_mean":
        return [1.0 / (num_segments * num) if num else 0.0 for num in num_tokens]
    if aggregation == "seq_mean_token_sum":
        return [1.0 / num_segments] * len(num_tokens)
    if fixed_num_tokens is None:
        raise ValueError("token_weights: aggregation `fixed` needs fixed_num_tokens")
    return [1.0 / (num_segments * fixed_num_tokens)] * len(num_tokens)


@torch.no_grad()
def ratio_metrics(tokens: TokenBatch) -> dict[str, float]:
    """How far the policy has moved from the one that wrote the tokens; over trained tokens, before any clamping.

    - `ratio_mean`, `ratio_max`: of r.
    - `ess`: (Σr)² / (n·Σr²), the effective share of the tokens: 1 when all weigh the same.
    - `kl_k1`: mean of mu - lp; `kl_k3`: mean of r - 1 - log r, never negative. Both estimate KL(behaviour ‖ policy).

    Without trained tokens: the values of an unmoved policy. (k1, k3: joschu.net/blog/kl-approx.html.)
    """
    log_ratio = (tokens.logprobs - tokens.behaviour_logprobs)[tokens.mask].double()
    if not log_ratio.numel():
        return {"ratio_mean": 1.0, "ratio_max": 1.0, "ess": 1.0, "kl_k1": 0.0, "kl_k3": 0.0}
    # Within ±300 the squares are finite in float64.
    log_ratio = log_ratio.clamp(-300.0, 300.0)
    ratio = log_ratio.exp()
    figures = [
        ratio.mean(),
        ratio.max(),
        ratio.sum().square() / (ratio.numel() * ratio.square().sum()),
        -log_ratio.mean(),
        (ratio - 1.0 - log_ratio).mean(),
    ]
    values = torch.stack(figures).tolist()
    return dict(zip(("ratio_mean", "ratio_max", "ess", "kl_k1", "kl_k3"), values, strict=True))


def _ratio(logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    return (logprobs - behaviour_logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def _clipped_surrogate(ratio: Tensor, tokens: TokenBatch, config: PpoConfig) -> TokenLosses:
    """PPO's loss for a ratio; `tokens` are masked."""
    advantages = tokens.advantages
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - config.eps_low, 1.0 + config.eps_high)
    losses = torch.maximum(plain, bounded)
    clipped = bounded > plain
    if config.dual_clip is not None:
        bound = -advantages * config.dual_clip
        beyond = (advantages < 0) & (losses > bound)
        losses = torch.where(beyond, bound, losses)
        clipped = clipped | beyond
    return TokenLosses(losses=losses, clipped=clipped & tokens.mask)

"""How far the policy has moved from the one that wrote the tokens, and how many sequences still carry the estimate.

Over the trained tokens, before any clamping or masking by an objective. An effective sample size of clamped weights
could not fall below a constant: here it can, also where products over long sequences are beyond any float. Legend: the
package.
"""

from dataclasses import replace

import torch
from torch import Tensor

from driftgym.trainer.objectives.tokens import TokenBatch

_FINITE = 300.0  # exp of ±300 and its square are finite in float64


@torch.no_grad()
def drift_metrics(tokens: TokenBatch) -> dict[str, float]:
    """The measures of drift, by their names in docs/metrics.md.

    - `ratio_mean`, `ratio_max`, `ratio_min`, `ratio_p50`, `ratio_p99`: of r (percentiles interpolate linearly).
    - `ess`, `ess_sequence`, `ess_geometric`: (Σw)² / (n·Σw²), w being r of the n tokens, ∏r of the n sequences, and
      its geometric mean: 1 when all weigh the same, 1/n when one carries all.
    - `m2`: mean of (log r)². `kl_k1`: mean of mu - lp; `kl_k2`: m2 / 2; `kl_k3`: mean of r - 1 - log r, never
      negative. The three estimate KL(behaviour ‖ policy).
    - `log_ratio_abs_mean`: mean of abs(log r).
    - `drift_max`: the largest mean of mu - lp of a sequence, in nats a token.

    Without trained tokens: the values of an unmoved policy. (k1 to k3: joschu.net/blog/kl-approx.html.)
    """
    if not bool(tokens.mask.any()):
        return _UNMOVED.copy()
    tokens = _in_float64(tokens)
    log_ratios = tokens.log_ratios[tokens.mask]
    ratio = log_ratios.exp()
    has_tokens = tokens.sums(torch.ones_like(tokens.log_ratios)) > 0
    sums = tokens.sums(tokens.log_ratios)[has_tokens]
    means = tokens.means(tokens.log_ratios)[has_tokens]
    ordered = ratio.sort().values
    m2 = log_ratios.square().mean()
    figures = {
        "ratio_mean": ratio.mean(),
        "ratio_max": ordered[-1],
        "ratio_min": ordered[0],
        "ratio_p50": _percentile(ordered, 0.5),
        "ratio_p99": _percentile(ordered, 0.99),
        "ess": _effective_share(log_ratios),
        "ess_sequence": _effective_share(sums),
        "ess_geometric": _effective_share(means),
        "m2": m2,
        "kl_k1": -log_ratios.mean(),
        "kl_k2": m2 / 2.0,
        "kl_k3": (ratio - 1.0 - log_ratios).mean(),
        "log_ratio_abs_mean": log_ratios.abs().mean(),
        "drift_max": (-means).max(),
    }
    values = torch.stack(list(figures.values())).tolist()
    return dict(zip(figures, values, strict=True))


_UNMOVED = dict.fromkeys(
    ("ratio_mean", "ratio_max", "ratio_min", "ratio_p50", "ratio_p99", "ess", "ess_sequence", "ess_geometric"), 1.0
) | dict.fromkeys(("m2", "kl_k1", "kl_k2", "kl_k3", "log_ratio_abs_mean", "drift_max"), 0.0)


def _in_float64(tokens: TokenBatch) -> TokenBatch:
    gap = tokens.log_ratios.detach().double().clamp(-_FINITE, _FINITE)
    return replace(tokens, logprobs=gap, behaviour_logprobs=torch.zeros_like(gap))


def _percentile(ordered: Tensor, share: float) -> Tensor:
    """Of any number of values in rising order; torch.quantile takes 16 million at most."""
    place = share * (len(ordered) - 1)
    below = int(place)
    return torch.lerp(ordered[below], ordered[min(below + 1, len(ordered) - 1)], place - below)


def _effective_share(log_weights: Tensor) -> Tensor:
    weights = (log_weights - log_weights.max()).exp()
    return weights.sum().square() / (weights.numel() * weights.square().sum())

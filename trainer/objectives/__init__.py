"""Objectives: pure functions of per-token log-probs, and how the losses of tokens are added up.

Legend, for one token: `lp` its log-prob under the weights that are trained, `mu` its log-prob under the policy that
wrote it (`behaviour`), r = exp(lp - mu) the ratio, A the advantage, sg(·) "no gradient flows through". For a sequence
of n trained tokens: ∏r the product, and the geometric mean (∏r)^(1/n). A loss is minimised.

The loss of a batch is Σ w·l over tokens: l from an objective, w from `normalisation.token_weights`, which are fixed by
the whole batch before any token is left out. A rejected token loses its l and stays in the denominator.
"""

from driftgym.trainer.objectives.diagnostics import drift_metrics
from driftgym.trainer.objectives.normalisation import token_weights
from driftgym.trainer.objectives.registry import OBJECTIVES, LossSpec
from driftgym.trainer.objectives.tokens import TokenBatch, TokenLosses

__all__ = ["OBJECTIVES", "LossSpec", "TokenBatch", "TokenLosses", "drift_metrics", "token_weights"]

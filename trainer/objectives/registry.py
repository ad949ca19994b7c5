"""The objectives by their names, and the loss that a configuration describes: objective, mask and KL term together."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from driftgym.trainer.objective_config import KlConfig, ObjectiveConfig
from driftgym.trainer.objectives import clipped, moments, robust, sequences, weighted
from driftgym.trainer.objectives.kl import with_kl_in_loss, with_kl_in_reward, without_stale_failures
from driftgym.trainer.objectives.tokens import TokenBatch, TokenLosses

Objective: TypeAlias = Callable[..., TokenLosses]
"""Takes a TokenBatch, and its numbers as keyword arguments."""

OBJECTIVES: Mapping[str, Objective] = {
    "robust": robust.robust,
    "reinforce": weighted.reinforce,
    "positives_only": weighted.positives_only,
    "ppo": clipped.ppo,
    "decoupled_ppo": clipped.decoupled_ppo,
    "tis": weighted.tis,
    "mis": weighted.mis,
    "icepop": weighted.mis,
    "aipo": weighted.aipo,
    "cispo": weighted.cispo,
    "topr": weighted.topr,
    "gspo": sequences.gspo,
    "gmpo": sequences.gmpo,
    "gepo": sequences.gepo,
    "vespo": sequences.vespo,
    "m2po": moments.m2po,
    "bapo": moments.bapo,
    "dppo_tv": clipped.dppo_tv,
    "ipo": clipped.ipo,
    "dppo_kl": clipped.dppo_kl,
    "sapo": clipped.sapo,
    "opmd": sequences.opmd,
    "tba": sequences.tba,
}
"""By the `name` of their configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """All that makes the loss of a token.

    >>> LossSpec(objective=ObjectiveConfig(name="reinforce")).needs_reference
    False
    """

    objective: ObjectiveConfig
    """Which objective, and its numbers."""
    kl: KlConfig | None = None
    """The pull towards the reference policy."""
    max_failure_drift: float | None = None
    """Stale failures are left out above this drift, in nats a token; None leaves none out."""

    @property
    def needs_whole_sequences(self) -> bool:
        """True when a token's loss depends on other tokens of its sequence, in whichever of its rows they stand."""
        is_in_reward = self.kl is not None and self.kl.place == "reward"
        return self.objective.needs_whole_sequences or self.max_failure_drift is not None or is_in_reward

    @property
    def needs_reference(self) -> bool:
        """True when the log-probs of the reference policy are read."""
        return self.kl is not None or self.objective.needs_reference

    @property
    def moves_without_advantage(self) -> bool:
        """True when a token of advantage 0 may have a gradient."""
        return self.kl is not None or self.objective.moves_without_advantage

    def losses(self, tokens: TokenBatch) -> TokenLosses:
        """The loss of each token. Raises ValueError where reference log-probs are needed and not there."""
        if self.kl is not None and self.kl.place == "reward":
            tokens = with_kl_in_reward(tokens, coef=self.kl.coef)
        result = OBJECTIVES[self.objective.name](tokens, **self.objective.numbers)
        if self.max_failure_drift is not None:
            result = without_stale_failures(tokens, result, max_drift=self.max_failure_drift)
        if self.kl is not None and self.kl.place == "loss":
            result = with_kl_in_loss(tokens, result, coef=self.kl.coef, estimator=self.kl.estimator)
        return result

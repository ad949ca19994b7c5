"""The configuration of the learner, and what its process is told at the start. No torch: the trainer reads this too."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import pydantic

from driftgym.config import Config
from driftgym.trainer.models import ModelConfig
from driftgym.types import WeightKind

Aggregation: TypeAlias = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "fixed"]


class ReinforceConfig(Config):
    """The policy gradient without any correction for lag."""

    name: Literal["reinforce"] = "reinforce"


class PpoConfig(Config):
    """The clipped objective, its ratio taken against the policy that wrote the token."""

    name: Literal["ppo"] = "ppo"
    eps_low: float = pydantic.Field(0.2, ge=0, le=1, description="The ratio is clipped below at 1 - eps_low.")
    eps_high: float = pydantic.Field(0.28, ge=0, description="The ratio is clipped above at 1 + eps_high.")
    dual_clip: float | None = pydantic.Field(
        None,
        gt=1,
        description="Bounds the loss of a token of negative advantage at this multiple of it; null: no bound.",
    )


class TisConfig(Config):
    """The policy gradient, each token weighted by its ratio, capped (truncated importance sampling)."""

    name: Literal["tis"] = "tis"
    cap: float = pydantic.Field(2.0, gt=0, description="No token weighs more than this.")


ObjectiveConfig: TypeAlias = Annotated[ReinforceConfig | PpoConfig | TisConfig, pydantic.Field(discriminator="name")]


class OptimizerConfig(Config):
    """AdamW."""

    learning_rate: float = pydantic.Field(1e-5, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = pydantic.Field(0.0, ge=0)
    max_grad_norm: float = pydantic.Field(1.0, gt=0, description="Gradients are scaled down to this norm.")
    warmup_steps: int = pydantic.Field(0, ge=0, description="The learning rate rises linearly over these first steps.")
    decay_steps: int | None = pydantic.Field(
        None, gt=0, description="It then falls linearly, to a tenth at this step; null keeps it."
    )

    @pydantic.field_validator("betas")
    @classmethod
    def _check_betas(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("each beta must lie in [0, 1)")
        return betas


class LearnerConfig(Config):
    """How a batch of segments becomes an optimizer step."""

    objective: ObjectiveConfig = TisConfig()
    aggregation: Aggregation = pydantic.Field(
        "token_mean", description="How the losses of tokens are added up; see objectives.token_weights."
    )
    fixed_num_tokens: int | None = pydantic.Field(
        None, gt=0, description="With aggregation `fixed`: the tokens per segment that the loss is divided by."
    )
    optimizer: OptimizerConfig = OptimizerConfig()
    micro_batch_tokens: int = pydantic.Field(
        2048, gt=0, description="A forward pass takes at most this many tokens, padding included."
    )
    num_threads: int = pydantic.Field(1, gt=0, description="Threads of the learner on a CPU.")

    @pydantic.model_validator(mode="after")
    def _check_fixed(self) -> "LearnerConfig":
        if (self.aggregation == "fixed") != (self.fixed_num_tokens is not None):
            raise ValueError("fixed_num_tokens is given exactly when aggregation is `fixed`")
        return self


class WarmupConfig(Config):
    """Supervised training on demonstrations, before the first optimizer step of RL."""

    num_steps: int = pydantic.Field(0, ge=0, description="0: no warm-up.")
    batch_size: int = pydantic.Field(64, gt=0, description="Rows per step.")
    learning_rate: float = pydantic.Field(3e-3, gt=0)
    copy_fraction: float = pydantic.Field(
        0.25,
        ge=0,
        le=1,
        description="The share of rows that are random tokens said twice: they teach a new model to copy.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSpec:
    """All that a learner is made from.

    >>> spec = LearnerSpec(model=ModelConfig(path="m"), model_folder=Path("/m"), config=LearnerConfig(),
    ...                    warmup=WarmupConfig(), seed=0, temperature=1.0, incarnation=1)
    >>> spec.config.aggregation
    'token_mean'
    """

    model: ModelConfig
    """How the model is made."""
    model_folder: Path
    """Where `models.resolve_model` found it."""
    config: LearnerConfig
    """How it is trained."""
    warmup: WarmupConfig
    """How it is trained before that."""
    seed: int
    """Of random weights and of the warm-up."""
    temperature: float
    """The temperature that the generators sample at: log-probs are those of the distribution sampled from."""
    incarnation: int
    """The life of the run; travels with each publication."""
    publishes: tuple[WeightKind, ...] = ("full",)
    """The kinds of publications that the generators take."""

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(f"LearnerSpec: training needs a sampling temperature above 0, got {self.temperature}")

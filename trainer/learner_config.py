"""The configuration of the learner, and what its process is told at the start. No torch: the trainer reads this too."""

from dataclasses import dataclass
from pathlib import Path

import pydantic

from driftgym.config import Config
from driftgym.trainer.models import ModelConfig
from driftgym.trainer.objective_config import KlConfig, Normalisation, ObjectiveConfig
from driftgym.types import WeightKind


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

    @pydantic.model_validator(mode="after")
    def _check_decay(self) -> "OptimizerConfig":
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ValueError(f"decay_steps must be above warmup_steps, got {self.decay_steps} and {self.warmup_steps}")
        return self


class LearnerConfig(Config):
    """How a batch of segments becomes an optimizer step."""

    objective: ObjectiveConfig = ObjectiveConfig()
    max_failure_drift: float | None = pydantic.Field(
        None,
        ge=0,
        description="Trajectories of advantage 0 or less are left out once the policy gives them so many nats a token "
        "less than their writer did; null leaves none out beyond what the objective does.",
    )
    kl: KlConfig | None = pydantic.Field(None, description="A section turns the pull towards the first weights on.")
    normalisation: Normalisation = pydantic.Field(
        "token", description="How the losses of tokens are added up; see objectives.normalisation."
    )
    fixed_num_tokens: int | None = pydantic.Field(
        None, gt=0, description="With normalisation `fixed`: the tokens per trajectory that the loss is divided by."
    )
    optimizer: OptimizerConfig = OptimizerConfig()
    micro_batch_tokens: int = pydantic.Field(
        2048, gt=0, description="A forward pass takes at most this many tokens, padding included."
    )
    num_threads: int = pydantic.Field(1, gt=0, description="Threads of the learner on a CPU, of each of its processes.")
    num_processes: int = pydantic.Field(
        1, gt=0, description="Processes that share the rows of a step, each with a part of every weight (FSDP)."
    )

    @pydantic.model_validator(mode="after")
    def _check_fixed(self) -> "LearnerConfig":
        if (self.normalisation == "fixed") != (self.fixed_num_tokens is not None):
            raise ValueError("fixed_num_tokens is given exactly when normalisation is `fixed`")
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
    >>> spec.config.normalisation
    'token'
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
        if problem := processes_problem(self.model, self.config):
            raise ValueError(f"LearnerSpec: {problem}")


def processes_problem(model: ModelConfig, config: LearnerConfig) -> str | None:
    """Why `model` cannot be trained by so many processes; None when it can."""
    if config.num_processes > 1 and model.lora is not None:
        return (
            f"learner.num_processes: adapters (model.lora) are trained by one process: set it from "
            f"{config.num_processes} to 1, or model.lora to null"
        )
    return None

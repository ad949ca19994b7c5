"""Rows go through the model in micro-batches: gradients are added up, and what the step's figures need is kept."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from driftgym.trainer.batching import MicroBatch, Row, TokenScores, micro_batch, plan_micro_batches, score_tokens
from driftgym.trainer.learner_config import ObjectiveConfig
from driftgym.trainer.objectives import OBJECTIVES, TokenBatch, ratio_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSettings:
    """How rows go through the model.

    >>> from driftgym.trainer.learner_config import TisConfig
    >>> PassSettings(objective=TisConfig(), temperature=1.0, max_tokens=4096, device=torch.device("cpu")).max_tokens
    4096
    """

    objective: ObjectiveConfig
    """Which loss."""
    temperature: float
    """That tokens were sampled at."""
    max_tokens: int
    """Of one micro-batch, padding included."""
    device: torch.device
    """Where the model is."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenRecord:
    """What is kept of the N trained tokens of one micro-batch or, joined, of a step. No gradients."""

    losses: Tensor
    """[N] weighted, so that their sum is the loss."""
    logprobs: Tensor
    """[N]."""
    behaviour_logprobs: Tensor
    """[N]."""
    entropies: Tensor
    """[N]."""
    clipped: Tensor
    """[N] bool."""
    lags: Tensor
    """[N] int64."""
    exact: Tensor
    """[N] bool."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassReport:
    """What all passes of a step gave, gradients apart."""

    record: TokenRecord | None
    """Of every trained token; None when there is none."""
    num_micro_batches: int
    """Forward passes."""
    num_inputs: int
    """Tokens that the model read, padding included."""
    num_padding: int
    """Of these, padding."""

    @property
    def loss(self) -> float:
        """The loss of the whole batch; 0 when nothing is trained."""
        return float(self.record.losses.double().sum()) if self.record is not None else 0.0

    def lag0(self) -> tuple[int, float]:
        """How many trained tokens of lag 0 have a log-prob that can be reproduced, and the sum of their ratios."""
        if self.record is None:
            return 0, 0.0
        chosen = (self.record.lags == 0) & self.record.exact
        log_ratio = (self.record.logprobs - self.record.behaviour_logprobs)[chosen].double()
        return int(chosen.sum()), float(log_ratio.clamp(-300.0, 300.0).exp().sum())

    def metrics(self) -> dict[str, float]:
        """The figures of the step that come from its tokens; all finite where the loss is."""
        figures = {
            "loss": self.loss,
            "num_micro_batches": float(self.num_micro_batches),
            "padding_fraction": self.num_padding / max(1, self.num_inputs),
        }
        record = self.record
        if record is None:
            return figures | ratio_metrics(_nothing()) | {"clip_fraction": 0.0, "entropy": 0.0}
        tokens = TokenBatch(
            logprobs=record.logprobs,
            behaviour_logprobs=record.behaviour_logprobs,
            advantages=record.losses,
            mask=torch.ones_like(record.exact),
        )
        return (
            figures
            | ratio_metrics(tokens)
            | {"clip_fraction": float(record.clipped.double().mean()), "entropy": float(record.entropies.mean())}
        )


def accumulate_gradients(
    model: nn.Module, rows: Sequence[Row], *, policy_version: int, settings: PassSettings
) -> PassReport:
    """Adds the gradient of the loss of `rows` to the parameters of `model`.

    Rows whose trained tokens all have advantage 0 have no gradient under any objective: they are scored for the
    figures, at a third of the cost. Any split into micro-batches gives the same sums within float error.
    """
    records: list[TokenRecord] = []
    num_inputs = num_padding = 0
    for needs_gradient in (True, False):
        chosen = [row for row in rows if row.has_gradient == needs_gradient]
        for group in plan_micro_batches(chosen, max_tokens=settings.max_tokens):
            batch = micro_batch(group, policy_version=policy_version, device=settings.device)
            with torch.set_grad_enabled(needs_gradient):
                records.append(_one_pass(model, batch, settings))
            num_inputs += batch.token_ids.numel()
            num_padding += batch.token_ids.numel() - sum(row.num_inputs for row in group)
    return PassReport(
        record=_joined(records), num_micro_batches=len(records), num_inputs=num_inputs, num_padding=num_padding
    )


def _one_pass(model: nn.Module, batch: MicroBatch, settings: PassSettings) -> TokenRecord:
    """Forward and, where gradients are on, backward."""
    scores: TokenScores = score_tokens(model, batch, temperature=settings.temperature)
    result = OBJECTIVES[settings.objective.name](batch.tokens(scores.logprobs), settings.objective)
    losses = result.losses * batch.weights.to(result.losses.dtype)
    if torch.is_grad_enabled():
        losses.sum().backward()
    return TokenRecord(
        losses=losses.detach(),
        logprobs=scores.logprobs.detach(),
        behaviour_logprobs=batch.behaviour_logprobs,
        entropies=scores.entropies,
        clipped=result.clipped,
        lags=batch.lags,
        exact=batch.exact,
    )


def _joined(records: Sequence[TokenRecord]) -> TokenRecord | None:
    if not records:
        return None
    names = TokenRecord.__dataclass_fields__
    return TokenRecord(**{name: torch.cat([getattr(record, name) for record in records]) for name in names})


def _nothing() -> TokenBatch:
    empty = torch.zeros(0)
    return TokenBatch(logprobs=empty, behaviour_logprobs=empty, advantages=empty, mask=empty.bool())

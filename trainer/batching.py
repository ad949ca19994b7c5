"""Segments become micro-batches of tensors, and micro-batches become per-token log-probs.

Legend: B rows, T tokens of the longest row, H the model's width, V its vocabulary, N the trained tokens of the
micro-batch, flat. Rows are padded on the right, so with causal attention no real token ever sees padding: no attention
mask is made, and padding changes nothing. Rows of like length share a micro-batch. A row ends where its last trained
token is predicted, and logits are computed only where a trained token is predicted: most of [B, T, V] is never made.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from driftgym.trainer.last_layer import hidden_states_at
from driftgym.trainer.objectives import TokenBatch
from driftgym.types import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A segment and the weight of each of its tokens in the loss of the whole batch.

    >>> segment = Segment(trajectory_id="g0-0-0", segment_index=0, token_ids=[1, 5], loss_mask=[False, True],
    ...                   behaviour_logprobs=[0.0, -0.1], policy_versions=[-1, 3], advantages=[0.0, 0.5])
    >>> Row(segment=segment, token_weight=1.0).num_inputs
    1
    """

    segment: Segment
    """The training row."""
    token_weight: float
    """See objectives.token_weights."""

    @property
    def num_inputs(self) -> int:
        """How many tokens the model must read: up to the one before the last trained token. 0: nothing is trained."""
        trained = np.flatnonzero(self.segment.train_mask)
        return int(trained[-1]) if len(trained) else 0

    @property
    def has_gradient(self) -> bool:
        """True when a trained token has an advantage: without one, no objective gives the row a gradient."""
        return bool(self.segment.advantages[self.segment.train_mask].any())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Rows that go through the model together. Made by `micro_batch`."""

    token_ids: Tensor
    """[B, T] int64, padded on the right with 0."""
    predictors: Tensor
    """[N] int64: where in the flat [B·T] each trained token is predicted."""
    targets: Tensor
    """[N] int64: the trained tokens."""
    behaviour_logprobs: Tensor
    """[N]."""
    advantages: Tensor
    """[N]."""
    weights: Tensor
    """[N]: of each token in the loss of the whole batch."""
    lags: Tensor
    """[N] int64: the trainer's policy version minus the token's."""
    exact: Tensor
    """[N] bool: the engine's log-prob is one that re-scoring reproduces."""

    def tokens(self, logprobs: Tensor) -> TokenBatch:
        """What an objective reads, for [N] `logprobs` of the targets."""
        return TokenBatch(
            logprobs=logprobs,
            behaviour_logprobs=self.behaviour_logprobs.to(logprobs.dtype),
            advantages=self.advantages.to(logprobs.dtype),
            mask=torch.ones_like(self.exact),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenScores:
    """What the model says of the N trained tokens of a micro-batch.

    >>> TokenScores(logprobs=torch.zeros(2), entropies=torch.zeros(2)).logprobs.shape
    torch.Size([2])
    """

    logprobs: Tensor
    """[N] the log-prob of each target, with a gradient."""
    entropies: Tensor
    """[N] the entropy of the distribution it is drawn from, in nats, without a gradient."""


def plan_micro_batches(rows: Sequence[Row], *, max_tokens: int) -> list[list[Row]]:
    """Rows in groups of like length, each of at most `max_tokens` tokens, padding included, or of a single row.

    Rows in which nothing is trained are left out.

    Raises:
        ValueError: a segment trains its first token, which nothing predicts.
    """
    for row in rows:
        if len(row.segment.loss_mask) and row.segment.loss_mask[0]:
            raise ValueError(f"segment of {row.segment.trajectory_id}: its first token cannot be trained")
    groups: list[list[Row]] = []
    width = 0
    for row in sorted((row for row in rows if row.num_inputs), key=lambda row: -row.num_inputs):
        if not groups or width * (len(groups[-1]) + 1) > max_tokens:
            groups.append([])
            width = row.num_inputs
        groups[-1].append(row)
    return groups


def micro_batch(rows: Sequence[Row], *, policy_version: int, device: torch.device) -> MicroBatch:
    """The tensors of one group of rows."""
    width = max(row.num_inputs for row in rows)
    token_ids = np.zeros((len(rows), width), dtype=np.int64)
    trained: list[np.ndarray[Any, np.dtype[np.intp]]] = []
    for index, row in enumerate(rows):
        token_ids[index, : row.num_inputs] = row.segment.token_ids[: row.num_inputs]
        trained.append(np.flatnonzero(row.segment.train_mask))

    def gather(name: str) -> Tensor:
        """[N] the field `name` of every trained token."""
        values = [getattr(row.segment, name)[where] for row, where in zip(rows, trained, strict=True)]
        return torch.from_numpy(np.concatenate(values)).to(device)

    offsets = [where - 1 + index * width for index, where in enumerate(trained)]
    weights = [np.full(len(where), row.token_weight) for row, where in zip(rows, trained, strict=True)]
    return MicroBatch(
        token_ids=torch.from_numpy(token_ids).to(device),
        predictors=torch.from_numpy(np.concatenate(offsets)).to(device),
        targets=gather("token_ids").long(),
        behaviour_logprobs=gather("behaviour_logprobs"),
        advantages=gather("advantages"),
        weights=torch.from_numpy(np.concatenate(weights)).to(device),
        lags=policy_version - gather("policy_versions").long(),
        exact=gather("exact_mask"),
    )


def score_tokens(model: nn.Module, batch: MicroBatch, *, temperature: float) -> TokenScores:
    """The log-probs of the trained tokens at the sampling temperature, in float32 at least.

    Args:
        model: a causal language model of transformers whose logits are its head applied to its decoder's output
            (`model_loading.load_model` checks that).
        batch: what is scored.
        temperature: divides the logits, as it did when the tokens were sampled.
    """
    hidden_NH = hidden_states_at(model, batch.token_ids, batch.predictors)
    logits_NV = model.get_output_embeddings()(hidden_NH)  # type: ignore[operator]
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) / temperature
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    with torch.no_grad():
        entropies = torch.special.entr(logprobs_NV.exp()).sum(dim=-1)
    return TokenScores(logprobs=logprobs_NV.gather(1, batch.targets[:, None]).squeeze(1), entropies=entropies)

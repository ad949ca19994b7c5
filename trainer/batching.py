"""Segments become micro-batches of tensors, and micro-batches become per-token log-probs.

A micro-batch is packed or padded, whichever reads less; `packing` says when. Packed rows are one sequence in which what
rows begin with in common stands once. Padded rows are padded on the right, so with causal attention no real token ever
sees padding: no attention mask is made, and padding changes nothing. A row ends where its last trained token is
predicted, and logits are computed only where a trained token is predicted: most of [B, T, V] is never made.

Legend: B rows (1 where they are packed), T tokens (of the longest row, or of the packed sequence), H the model's width,
V its vocabulary, N the trained tokens of the micro-batch, flat, row by row.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from driftgym.trainer.head import head_logits
from driftgym.trainer.last_layer import hidden_states_at
from driftgym.trainer.packed_attention import PackedRows, packed_rows, packed_token_ids, takes_packed_rows
from driftgym.trainer.packing import in_prefix_order, pays, plan_packing_where_it_pays, shared_lengths
from driftgym.types import Int32Array, Segment

_MAX_KEYS_PER_TOKEN = 8  # that attention gathers for a token read: bounds its memory where rows share much


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
        """True when a trained token has an advantage; without one, few losses move it (`moves_without_advantage`)."""
        return bool(self.segment.advantages[self.segment.train_mask].any())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Rows that go through the model together. Made by `micro_batch`."""

    token_ids: Tensor
    """[B, T] int64, padded on the right with 0; [1, T] where rows are packed."""
    predictors: Tensor
    """[N] int64: where in the flat [B·T] each trained token is predicted."""
    predictor_positions: Tensor
    """[N] int64: the position in its row at which each trained token is predicted."""
    packed_rows: PackedRows | None
    """How rows are packed; None: they are padded."""
    targets: Tensor
    """[N] int64: the trained tokens."""
    rows: Tensor
    """[N] int64: the row of each trained token, as an index into the list of rows that the batch was made of."""
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
    num_padding: int
    """Of the tokens that the model reads, those that are padding."""

    @property
    def num_inputs(self) -> int:
        """The tokens that the model reads, padding included."""
        return self.token_ids.numel()

    def padded(self) -> tuple[Tensor, Tensor]:
        """`token_ids` and `predictors` as those of padded rows."""
        if self.packed_rows is None:
            return self.token_ids, self.predictors
        paths = self.packed_rows.paths
        return self.token_ids[0][paths], self.rows * paths.shape[1] + self.predictor_positions


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


def plan_micro_batches(rows: Sequence[Row], *, max_tokens: int, packs: bool = True) -> list[list[Row]]:
    """Rows in parts of which the model reads at most `max_tokens` tokens, padding included, or of a single row.

    The rows of a group are kept together where they fit. Rows in which nothing is trained are left out.

    Args:
        rows: training rows.
        max_tokens: of a part.
        packs: false for a model that reads padded rows only.

    Raises:
        ValueError: a segment trains its first token, which nothing predicts.
    """
    for row in rows:
        if len(row.segment.loss_mask) and row.segment.loss_mask[0]:
            raise ValueError(f"segment of {row.segment.trajectory_id}: its first token cannot be trained")
    inputs = [(row, row.num_inputs) for row in rows]
    sized = [(row, num_inputs) for row, num_inputs in inputs if num_inputs]
    by_length = _parts_by_length(sized, max_tokens=max_tokens)
    if not packs:
        return by_length.parts
    by_group = _parts_by_group(sized, max_tokens=max_tokens)
    return by_group.parts if pays(num_packed=by_group.num_read, num_padded=by_length.num_read) else by_length.parts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Parts, and how many tokens the model reads for all of them."""

    parts: list[list[Row]]
    num_read: int


def _parts_by_length(rows: Sequence[tuple[Row, int]], *, max_tokens: int) -> _Plan:
    """Padded rows of like length."""
    parts: list[list[Row]] = []
    width = num_read = 0
    for row, num_inputs in sorted(rows, key=lambda each: -each[1]):
        if not parts or width * (len(parts[-1]) + 1) > max_tokens:
            parts.append([])
            width = num_inputs
        parts[-1].append(row)
        num_read += width
    return _Plan(parts=parts, num_read=num_read)


def _parts_by_group(rows: Sequence[tuple[Row, int]], *, max_tokens: int) -> _Plan:
    """Packed rows, sorted by their tokens within groups, and groups among each other."""
    inputs = [row.segment.token_ids[:num_inputs] for row, num_inputs in rows]
    groups: dict[str, list[int]] = {}
    for index in in_prefix_order(inputs):
        segment = rows[index][0].segment
        groups.setdefault(segment.group_id or f"\0{index}", []).append(index)
    order = [index for group in groups.values() for index in group]
    run = _Run([inputs[index] for index in order], max_tokens=max_tokens)
    parts: list[list[Row]] = []
    num_read = start = first = 0
    for last in np.cumsum([len(group) for group in groups.values()]).tolist():
        cuts = run.cuts(start, first, last)
        for end in cuts:
            parts.append([rows[index][0] for index in order[start:end]])
            num_read += run.num_read(start, end)
            start = end
        first = last
    if start < len(order):
        parts.append([rows[index][0] for index in order[start:]])
        num_read += run.num_read(start, len(order))
    return _Plan(parts=parts, num_read=num_read)


class _Run:
    """Token sequences in the order in which they are cut into parts."""

    def __init__(self, ordered: Sequence[Int32Array], *, max_tokens: int) -> None:
        self._lengths = [len(sequence) for sequence in ordered]
        self._length_sums = [0, *itertools.accumulate(self._lengths)]
        self._shared_sums = [0, *itertools.accumulate(shared_lengths(ordered))]
        self._max_tokens = max_tokens

    def cuts(self, start: int, first: int, last: int) -> list[int]:
        """Where a part begun at `start` ends, and those after it, when the group from `first` to `last` is added."""
        cuts: list[int] = []
        if start < first and not self._fits(start, last):
            cuts.append(first)
            start = first
        while not self._fits(start, last):
            end = next(end for end in range(last - 1, start, -1) if end == start + 1 or self._fits(start, end))
            cuts.append(end)
            start = end
        return cuts

    def num_read(self, start: int, end: int) -> int:
        """How many tokens the model reads for the sequences from `start` to before `end`, padding included."""
        num_shared = self._shared_sums[end] - self._shared_sums[start + 1]
        num_packed = self._length_sums[end] - self._length_sums[start] - num_shared
        num_padded = (end - start) * max(self._lengths[start:end])
        return num_packed if pays(num_packed=num_packed, num_padded=num_padded) else num_padded

    def _fits(self, start: int, end: int) -> bool:
        num_keys = self._length_sums[end] - self._length_sums[start]
        is_small = self.num_read(start, end) <= self._max_tokens and num_keys <= _MAX_KEYS_PER_TOKEN * self._max_tokens
        return is_small or end - start == 1


def micro_batch(rows: Sequence[Row], *, policy_version: int, device: torch.device, packs: bool = True) -> MicroBatch:
    """The tensors of one part of the rows; of none, those of a token that nobody trains (see `ranks`).

    Args:
        rows: each with a trained token.
        policy_version: the trainer's, from which lags are counted.
        device: where the model is.
        packs: false pads rows in any case.
    """
    if not rows:
        return _nothing(device)
    trained = [np.flatnonzero(row.segment.train_mask) for row in rows]
    sequences = [row.segment.token_ids[: where[-1]] for row, where in zip(rows, trained, strict=True)]
    counts = [len(where) for where in trained]
    owners = np.repeat(np.arange(len(rows)), counts)
    positions = np.concatenate(trained) - 1

    def gather(name: str) -> Tensor:
        """[N] the field `name` of every trained token."""
        values = [getattr(row.segment, name)[where] for row, where in zip(rows, trained, strict=True)]
        return torch.from_numpy(np.concatenate(values)).to(device)

    inputs = _inputs(sequences, device=device, packs=packs)
    return MicroBatch(
        token_ids=inputs.token_ids,
        predictors=torch.from_numpy(inputs.places[owners, positions]).to(device),
        predictor_positions=torch.from_numpy(positions).to(device),
        packed_rows=inputs.packed_rows,
        num_padding=inputs.num_padding,
        targets=gather("token_ids").long(),
        rows=torch.from_numpy(owners).to(device),
        behaviour_logprobs=gather("behaviour_logprobs"),
        advantages=gather("advantages"),
        weights=torch.from_numpy(np.repeat([row.token_weight for row in rows], counts)).to(device),
        lags=policy_version - gather("policy_versions").long(),
        exact=gather("exact_mask"),
    )


def _nothing(device: torch.device) -> MicroBatch:
    numbers, values = torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(0, device=device)
    return MicroBatch(
        token_ids=torch.zeros((1, 1), dtype=torch.int64, device=device),
        predictors=numbers,
        predictor_positions=numbers,
        packed_rows=None,
        num_padding=1,
        targets=numbers,
        rows=numbers,
        behaviour_logprobs=values,
        advantages=values,
        weights=values.double(),
        lags=numbers,
        exact=numbers.bool(),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Inputs:
    """What the model reads."""

    token_ids: Tensor
    """[B, T], or [1, T]."""
    places: NDArray[np.int64]
    """[B, W] where each token of a row stands in the flat `token_ids`."""
    packed_rows: PackedRows | None
    num_padding: int


def _inputs(sequences: Sequence[Int32Array], *, device: torch.device, packs: bool) -> _Inputs:
    plan = plan_packing_where_it_pays(sequences) if packs else None
    if plan is not None:
        return _Inputs(
            token_ids=packed_token_ids(plan, sequences, device=device),
            places=plan.paths,
            packed_rows=packed_rows(plan, device=device),
            num_padding=0,
        )
    width = max(map(len, sequences))
    token_ids = np.zeros((len(sequences), width), dtype=np.int64)
    for index, sequence in enumerate(sequences):
        token_ids[index, : len(sequence)] = sequence
    return _Inputs(
        token_ids=torch.from_numpy(token_ids).to(device),
        places=np.arange(token_ids.size).reshape(token_ids.shape),
        packed_rows=None,
        num_padding=token_ids.size - sum(map(len, sequences)),
    )


class TokenScorer(nn.Module):
    """`score_tokens` of a model as a module, so that all that a pass reads is read within one `forward`.

    Sharded weights are whole within a forward alone (see `sharding`).
    """

    def __init__(self, model: nn.Module) -> None:
        """Of a causal language model of transformers, which it does not copy."""
        super().__init__()
        self.model = model

    def get_decoder(self) -> Any:
        """The model's."""
        return self.model.get_decoder()  # type: ignore[operator]

    def forward(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """[N] log-probs and [N] entropies; see `TokenScores`."""
        scores = score_tokens(self.model, batch, temperature=temperature)
        return scores.logprobs.clone(), scores.entropies  # torch warns of views, which lose their hooks


def score_tokens(model: nn.Module, batch: MicroBatch, *, temperature: float) -> TokenScores:
    """The log-probs of the trained tokens at the sampling temperature, in float32 at least.

    Args:
        model: a causal language model of transformers whose logits are its head applied to its decoder's output
            (`model_loading.load_model` checks that), or a `TokenScorer` of one.
        batch: what is scored.
        temperature: divides the logits, as it did when the tokens were sampled.
    """
    if isinstance(model, TokenScorer):
        logprobs, entropies = model(batch, temperature)
        return TokenScores(logprobs=logprobs, entropies=entropies)
    if batch.packed_rows is None or takes_packed_rows(model):
        hidden_NH = hidden_states_at(model, batch.token_ids, batch.predictors, packed_rows=batch.packed_rows)
    else:
        hidden_NH = hidden_states_at(model, *batch.padded())
    logits_NV = head_logits(model.get_output_embeddings(), hidden_NH)  # type: ignore[operator]
    if temperature != 1.0:
        logits_NV = logits_NV / temperature
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    return TokenScores(
        logprobs=logprobs_NV.gather(1, batch.targets[:, None]).squeeze(1), entropies=_entropies(logprobs_NV.detach())
    )


def _entropies(logprobs: Tensor) -> Tensor:
    """[N] of [N, V] distributions, in nats; a token of probability 0 adds nothing."""
    finite_NV = logprobs.clamp(min=torch.finfo(logprobs.dtype).min)
    return -(finite_NV.exp().mul_(finite_NV)).sum(dim=-1)

"""Micro-batches after their forward pass, and what the loss reads of them together.

Shapes: N trained tokens of all of them, flat.
"""

import hashlib
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from driftgym.trainer.batch_shape import sequence_names
from driftgym.trainer.batching import MicroBatch, Row, TokenScores
from driftgym.trainer.objectives import TokenBatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredRows:
    """A micro-batch after its forward pass."""

    rows: Sequence[Row]
    """What it was made of."""
    batch: MicroBatch
    """Their tensors."""
    scores: TokenScores
    """What the policy says of them."""
    reference_logprobs: Tensor | None
    """[N] what the reference policy says; None where the loss does not read it."""


def sequence_name(row: Row) -> Hashable:
    """The sequence of `row`."""
    (name,) = sequence_names([row.segment])
    return name


def joined_tokens(scored: Sequence[ScoredRows], untrained: Sequence[Row]) -> TokenBatch:
    """What the loss reads of these micro-batches, and of rows without a trained token: their groups and rewards."""
    rows = [row for each in scored for row in each.rows] + list(untrained)
    sequences = _numbers_of([sequence_name(row) for row in rows])
    first_rows = dict(zip(reversed(sequences), reversed(rows), strict=True))
    firsts = [first_rows[number] for number in range(len(first_rows))]
    groups = _numbers_of([row.segment.group_id or (number, "alone") for number, row in enumerate(firsts)])
    logprobs = torch.cat([each.scores.logprobs for each in scored])
    like = {"dtype": logprobs.dtype, "device": logprobs.device}
    row_of_token = _row_of_token(scored)
    references = [each.reference_logprobs for each in scored if each.reference_logprobs is not None]
    return TokenBatch(
        logprobs=logprobs,
        behaviour_logprobs=torch.cat([each.batch.behaviour_logprobs for each in scored]).to(logprobs.dtype),
        advantages=torch.cat([each.batch.advantages for each in scored]).to(logprobs.dtype),
        mask=torch.ones_like(logprobs, dtype=torch.bool),
        sequences=torch.tensor(sequences, device=logprobs.device)[row_of_token],
        groups=torch.tensor(groups, device=logprobs.device),
        rewards=torch.tensor([row.segment.reward for row in firsts], **like),  # type: ignore[arg-type]
        lags=torch.cat([each.batch.lags for each in scored]),
        reference_logprobs=torch.cat(references) if references else None,
        order=_order(rows, sequences, row_of_token) if len(firsts) < len(rows) else None,
    )


def _numbers_of(names: Sequence[Hashable]) -> list[int]:
    """Each name as a number, from 0 in the order of their first appearance."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [numbers[name] for name in names]


def _row_of_token(scored: Sequence[ScoredRows]) -> Tensor:
    """[N] int64: the row of each token, counted over the micro-batches."""
    starts = itertools.accumulate((len(each.rows) for each in scored), initial=0)
    return torch.cat([each.batch.rows + start for each, start in zip(scored, starts, strict=False)])


def _order(rows: Sequence[Row], sequences: Sequence[int], row_of_token: Tensor) -> Tensor:
    """See TokenBatch.order."""
    by_sequence = sorted(range(len(rows)), key=lambda index: (sequences[index], rows[index].segment.segment_index))
    ranks = torch.empty(len(rows), dtype=torch.int64)
    ranks[torch.tensor(by_sequence)] = torch.arange(len(rows))
    return torch.argsort(ranks.to(row_of_token.device)[row_of_token], stable=True)


def lasting_numbers(scored: Sequence[ScoredRows]) -> Tensor:
    """[N] int64: see TokenRecord.sequences."""
    names = [repr(sequence_name(row)).encode() for each in scored for row in each.rows]
    digests = [hashlib.blake2b(name, digest_size=8).digest() for name in names]
    row_of_token = _row_of_token(scored)
    numbers = [int.from_bytes(digest, "big", signed=True) for digest in digests]
    return torch.tensor(numbers, device=row_of_token.device)[row_of_token]

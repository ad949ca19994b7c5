"""Rows that begin with the same tokens become one packed sequence, in which each such beginning stands once.

What a decoder computes at a token depends on the tokens up to it and on nothing else, so rows that begin alike (the
members of a group share their prompt, groups the tools' description, parts of a trajectory whole turns) may share
what is computed there. Sorted by their tokens, the longest beginning that a row shares with any row before it is the
one that it shares with its neighbour: a row owns what comes after that, and the packed sequence is what all rows own.

Linear layers then read each token once, without padding. Attention goes by blocks of rows of like size: each of S
queries at most, the tokens that the rows own, and of K keys, the whole rows (or, where there is a kernel for rows of
unequal lengths, in one call for all of them: see `packed_attention`).

When it pays, measured with `benchmarks/packing.py` on one CPU core: time follows the tokens read, and gathering what
attention reads costs up to 3 % of a step. Rows are packed where that leaves out a twentieth of the tokens of padded
rows, and padded otherwise. Rows of unequal lengths that share nothing gain about what padding took; the rest comes from
sharing. One dense mask over the packed sequence would cost more than it saves from some hundred tokens on; blocks
compute no pair of tokens of different rows, and their masks hold S·K bytes for a row. Where a row's S·K exceeds what
causal attention over the whole row would take, or a bound, the whole row is taken: that needs no mask.

Legend: B rows, T tokens of the packed sequence, W the longest row, b rows of a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from driftgym.types import Int32Array

Int64Array: TypeAlias = NDArray[np.int64]

_LEAST_SAVING = 0.05  # of the tokens of padded rows
_MAX_MASKED_PAIRS = 1 << 22  # of one row
_MASKED_LEEWAY = 64  # queries by which a masked row may exceed half of the row: kernels skip what is whole blocks
_BLOCK_COST = 4096  # pairs that the calls for one block are worth


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockPlan:
    """Rows whose attention is computed together.

    >>> BlockPlan(rows=[0, 1], first_queries=[0, 0], num_queries=5, num_keys=5).is_causal
    True
    """

    rows: Sequence[int]
    """[b] which."""
    first_queries: Sequence[int]
    """[b] the position of the first query of each row."""
    num_queries: int
    """S, of the row that has most."""
    num_keys: int
    """K, the length of the longest row."""

    @property
    def is_causal(self) -> bool:
        """True where queries are whole rows, so that a kernel's own causal mask will do."""
        return not any(self.first_queries)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackingPlan:
    """Where the tokens of rows stand in their packed sequence.

    Two rows, (5, 6, 7) and (5, 6, 9), share their first two tokens:

    >>> plan = plan_packing([np.array([5, 6, 7], dtype=np.int32), np.array([5, 6, 9], dtype=np.int32)])
    >>> plan.paths.tolist(), plan.num_tokens
    ([[0, 1, 2], [0, 1, 3]], 4)
    """

    paths: Int64Array
    """[B, W] the place of each token of a row; 0 after its end."""
    lengths: Int64Array
    """[B] of the rows."""
    num_shared: Int64Array
    """[B] how many leading tokens of each row another row owns."""
    blocks: Sequence[BlockPlan]
    """In the order of the packed sequence: it is what the rows of the first block own, row by row, and so on."""
    num_tokens: int
    """T."""

    def owned(self, block: BlockPlan) -> Int64Array:
        """[T of the block] the places, within the flat [b·S] queries of `block`, of tokens that its rows own."""
        return np.concatenate(
            [
                index * block.num_queries + np.arange(self.num_shared[row], self.lengths[row]) - first
                for index, (row, first) in enumerate(zip(block.rows, block.first_queries, strict=True))
            ]
        )


def pays(*, num_packed: int, num_padded: int) -> bool:
    """Whether reading `num_packed` tokens is worth the gathering, where padded rows have `num_padded`."""
    return num_packed <= (1.0 - _LEAST_SAVING) * num_padded


def in_prefix_order(sequences: Sequence[Int32Array]) -> list[int]:
    """The indices of token sequences, sorted by their tokens."""
    keys = [sequence.astype(">i4").tobytes() for sequence in sequences]
    return sorted(range(len(sequences)), key=keys.__getitem__)


def shared_lengths(ordered: Sequence[Int32Array]) -> list[int]:
    """How many leading tokens each sequence shares with the one before it; 0 for the first."""
    return [0, *map(_num_common, ordered, ordered[1:])] if ordered else []


def plan_packing(sequences: Sequence[Int32Array]) -> PackingPlan:
    """Lays out token sequences, none of them empty, as one packed sequence."""
    order = in_prefix_order(sequences)
    return _laid_out(sequences, order, shared_lengths([sequences[index] for index in order]))


def plan_packing_where_it_pays(sequences: Sequence[Int32Array]) -> PackingPlan | None:
    """As `plan_packing`, or None where padded rows are better."""
    order = in_prefix_order(sequences)
    shared = shared_lengths([sequences[index] for index in order])
    lengths = list(map(len, sequences))
    if not pays(num_packed=sum(lengths) - sum(shared), num_padded=len(lengths) * max(lengths)):
        return None
    return _laid_out(sequences, order, shared)


def _laid_out(sequences: Sequence[Int32Array], order: Sequence[int], shared: Sequence[int]) -> PackingPlan:
    """`order` sorts the sequences; `shared` says what each has in common with the one before it in that order."""
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    num_shared = np.zeros(len(sequences), dtype=np.int64)
    num_shared[order] = shared
    blocks = _blocks(lengths, num_shared)
    firsts = np.zeros(len(sequences), dtype=np.int64)
    num_tokens = 0
    for row in (row for block in blocks for row in block.rows):
        firsts[row] = num_tokens
        num_tokens += int(lengths[row] - num_shared[row])
    paths = np.zeros((len(sequences), int(lengths.max())), dtype=np.int64)
    before = order[0]
    for row in order:
        begun, length = num_shared[row], lengths[row]
        paths[row, :begun] = paths[before, :begun]
        paths[row, begun:length] = np.arange(firsts[row], firsts[row] + length - begun)
        before = row
    return PackingPlan(paths=paths, lengths=lengths, num_shared=num_shared, blocks=blocks, num_tokens=num_tokens)


def _num_common(one: Int32Array, other: Int32Array) -> int:
    """How many leading tokens are the same."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


def _blocks(lengths: Int64Array, num_shared: Int64Array) -> list[BlockPlan]:
    """Rows that own a token, in blocks of like size; those that need a mask apart from those that do not."""
    num_owned = lengths - num_shared
    is_masked = (num_shared > 0) & (num_owned <= lengths // 2 + _MASKED_LEEWAY)
    is_masked &= num_owned * lengths <= _MAX_MASKED_PAIRS
    first_queries = np.where(is_masked, num_shared, 0)
    blocks: list[BlockPlan] = []
    for chosen in (~is_masked, is_masked):
        rows = np.flatnonzero(chosen & (num_owned > 0))
        sizes = (lengths - first_queries)[rows]
        rows = rows[np.lexsort((first_queries[rows], -lengths[rows], -sizes))]
        blocks += _like_sized(rows.tolist(), lengths.tolist(), first_queries.tolist())
    return blocks


def _like_sized(rows: Sequence[int], lengths: Sequence[int], first_queries: Sequence[int]) -> list[BlockPlan]:
    """Rows of falling numbers of queries, cut where that costs least: pairs, padding included, and calls."""
    num_keys = np.zeros(len(rows), dtype=np.int64)
    most_queries = np.array([lengths[row] - first_queries[row] for row in rows], dtype=np.int64)
    least = np.zeros(len(rows) + 1)
    starts: list[int] = []
    for end, row in enumerate(rows, 1):
        keys = num_keys[:end]
        np.maximum(keys, lengths[row], out=keys)
        costs = least[:end] + np.arange(end, 0, -1) * most_queries[:end] * keys + _BLOCK_COST
        starts.append(int(costs.argmin()))
        least[end] = costs[starts[-1]]
    blocks: list[BlockPlan] = []
    end = len(rows)
    while end:
        blocks.append(_block(rows[starts[end - 1] : end], lengths, first_queries))
        end = starts[end - 1]
    return blocks


def _block(rows: Sequence[int], lengths: Sequence[int], first_queries: Sequence[int]) -> BlockPlan:
    return BlockPlan(
        rows=rows,
        first_queries=[first_queries[row] for row in rows],
        num_queries=max(lengths[row] - first_queries[row] for row in rows),
        num_keys=max(lengths[row] for row in rows),
    )

"""Which tokens of which rows a forward pass reads. Shapes: n rows, Q tokens a row."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from driftgym.agents.generators.embedded.cache import Rows
from driftgym.agents.generators.embedded.slots import SlotTable

_DEFER_TOKENS = 16  # waiting one step to share this much KV with a prompt that is being read pays
_NARROW_TOKENS = 16  # a pass has a fixed cost: prompts that leave this much or less to read go together


def should_defer(slots: SlotTable, sequence: NDArray[np.int32], *, first: int) -> bool:
    """True when `sequence` shares much with a row from `first` on, whose KV is not there before the next step."""
    being_read = slots.state["length"][first : slots.num_active]
    in_step, _ = slots.shared_length(sequence, first=first, lengths=being_read)
    if in_step < _DEFER_TOKENS:
        return False
    cached, _ = slots.shared_length(sequence, first=0, lengths=slots.state["kv_length"])
    return in_step >= cached + _DEFER_TOKENS


def prefill_groups(slots: SlotTable, *, first: int, max_tokens: int) -> Iterator[Rows]:
    """The rows from `first` on in groups that leave a like number of tokens to read, so that padding stays small.

    A group reads at most `max_tokens`, or is one row.
    """
    state = slots.state[first : slots.num_active]
    num_unread = state["length"] - state["kv_length"]
    # Classes by powers of four.
    classes = np.ceil(np.log2(np.maximum(num_unread, _NARROW_TOKENS) / _NARROW_TOKENS) / 2)
    for value in np.unique(classes):
        rows = first + np.flatnonzero(classes == value)
        widest = int(num_unread[rows - first].max())
        per_pass = max(1, max_tokens // widest)
        for start in range(0, len(rows), per_pass):
            yield _as_rows(rows[start : start + per_pass])


def unread_tokens(
    slots: SlotTable, rows: Rows, *, max_width: int | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[n, Q] the tokens of `rows` that have no KV yet, padded on the left, and their positions (-1: padding).

    `max_width`: at most so many of each row, the first ones.
    """
    state = slots.state[rows]
    cached = state["kv_length"].astype(np.int64)[:, None]
    lengths = state["length"].astype(np.int64)[:, None]
    if max_width is not None:
        lengths = np.minimum(lengths, cached + max_width)
    width = int((lengths - cached).max())
    positions = lengths - width + np.arange(width)
    positions = np.where(positions >= cached, positions, -1)
    index = np.arange(slots.num_slots)[rows]
    return slots.tokens[index[:, None], np.maximum(positions, 0)].astype(np.int64), positions


def newest_tokens(slots: SlotTable, rows: slice) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """As `unread_tokens`, of rows that have one token each to read."""
    positions = slots.state["length"][rows].astype(np.int64) - 1
    tokens = slots.tokens[rows][np.arange(len(positions)), positions]
    return tokens.astype(np.int64)[:, None], positions[:, None]


def _as_rows(rows: NDArray[np.int64]) -> Rows:
    """Neighbours as a slice."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows

"""A preallocated KV cache of slots, in which rows of different lengths decode together.

Shapes: S slots, T positions of a slot, H key/value heads, D head size, n rows of a forward pass, Q new tokens a row.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache, CacheLayerMixin

Rows = slice | NDArray[np.int64]
"""The slots of a forward pass: neighbours as a slice (no copy of their KV), others as an index array."""


class _Placement:
    """Where the forward pass that runs now writes and reads; shared by all layers."""

    __slots__ = ("kv_length", "positions", "row_index", "rows")

    def __init__(self) -> None:
        self.rows: slice | torch.Tensor = slice(0, 0)
        self.row_index = torch.zeros(0, 1, dtype=torch.int64)
        self.positions = torch.zeros(0, 1, dtype=torch.int64)
        self.kv_length = 0


class _SlotLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """One layer's keys and values, [S, T + 1, H, D]; the last position takes what padding writes."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, placement: _Placement) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True
        self._placement = placement

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the memory is there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the new [n, H, Q, D] states and returns the rows' [n, H, kv_length, D]."""
        place = self._placement
        self.keys[place.row_index, place.positions] = key_states.transpose(1, 2)
        self.values[place.row_index, place.positions] = value_states.transpose(1, 2)
        keys = self.keys[place.rows, : place.kv_length] if isinstance(place.rows, slice) else self._gather(self.keys)
        values = (
            self.values[place.rows, : place.kv_length] if isinstance(place.rows, slice) else self._gather(self.values)
        )
        return keys.transpose(1, 2), values.transpose(1, 2)

    def _gather(self, states: torch.Tensor) -> torch.Tensor:
        return states[:, : self._placement.kv_length][self._placement.rows]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask is made by the caller; these are its sizes."""
        return self._placement.kv_length, 0

    def get_seq_length(self) -> int:
        """The longest row that the running pass reads."""
        return self._placement.kv_length

    def get_max_length(self) -> int:
        """T, the positions of a slot."""
        return int(self.keys.shape[1]) - 1


class SlotCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """The KV of S slots, in one tensor over all layers so that a slot is copied by one operation."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        max_length: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # [2 L, S, T + 1, H, D]: the states of one token lie together, so that a step writes H·D numbers at once.
        shape = (2 * num_layers, num_slots, max_length + 1, num_heads, head_dim)
        self._states = torch.zeros(shape, dtype=dtype, device=device)
        self._placement = _Placement()
        self._padding_position = max_length
        self._all_rows = torch.arange(num_slots, device=device)[:, None]
        super().__init__(
            layers=[
                _SlotLayer(self._states[2 * layer], self._states[2 * layer + 1], self._placement)
                for layer in range(num_layers)
            ]
        )

    def place(self, rows: Rows, positions: torch.Tensor, kv_length: int) -> None:
        """Says where the next forward pass writes: `positions` [n, Q] of `rows`, negative for padding.

        The pass reads positions below `kv_length`; its mask says which of them each row may see.
        """
        place = self._placement
        if isinstance(rows, slice):
            place.rows = rows
            place.row_index = self._all_rows[rows]
        else:
            place.rows = torch.from_numpy(rows).to(self._states.device)
            place.row_index = place.rows[:, None]
        # A single token a row is never padding.
        is_padded = positions.shape[1] > 1
        place.positions = torch.where(positions < 0, self._padding_position, positions) if is_padded else positions
        place.kv_length = kv_length

    def copy_prefix(self, *, source: int, target: int, length: int) -> None:
        """Copies the first `length` positions of one slot to another."""
        self._states[:, target, :length] = self._states[:, source, :length]

    def wipe(self, slot: int) -> None:
        """Sets a slot to zero."""
        self._states[:, slot] = 0

    def swap(self, first: int, second: int, *, first_length: int, second_length: int) -> None:
        """Exchanges two slots of which so many positions are in use."""
        kept = self._states[:, first, :first_length].clone()
        self._states[:, first, :second_length] = self._states[:, second, :second_length]
        self._states[:, second, :first_length] = kept

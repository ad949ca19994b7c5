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
    """One layer's keys and values, [S, H, T + 1, D]; the last position takes what padding writes."""

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
        self.keys[place.row_index, :, place.positions] = key_states.transpose(1, 2)
        self.values[place.row_index, :, place.positions] = value_states.transpose(1, 2)
        return self.keys[:, :, : place.kv_length][place.rows], self.values[:, :, : place.kv_length][place.rows]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask is made by the caller; these are its sizes."""
        return self._placement.kv_length, 0

    def get_seq_length(self) -> int:
        """The longest row that the running pass reads."""
        return self._placement.kv_length

    def get_max_length(self) -> int:
        """T, the positions of a slot."""
        return int(self.keys.shape[2]) - 1


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
        # [2 L, S, H, T + 1, D]: slots and heads together are one batch of matrices, which attention multiplies.
        shape = (2 * num_layers, num_slots, num_heads, max_length + 1, head_dim)
        self._states = torch.zeros(shape, dtype=dtype, device=device)
        # Of each layer [2·S·H·(T + 1), D], and where in it the keys and the values of each slot begin, [S, 2·H].
        self._lines = self._states.view(num_layers, -1, head_dim).unbind()
        first_lines = torch.arange(2 * num_slots * num_heads, device=device) * (max_length + 1)
        self._first_lines = first_lines.view(2, num_slots, num_heads).transpose(0, 1).reshape(num_slots, -1)
        self._placement = _Placement()
        self._padding_position = max_length
        self._all_rows = torch.arange(num_slots, device=device)[:, None]
        super().__init__(
            layers=[
                _SlotLayer(self._states[2 * layer], self._states[2 * layer + 1], self._placement)
                for layer in range(num_layers)
            ]
        )

    def index(self, rows: Rows) -> slice | torch.Tensor:
        """The same rows, as the other methods take them."""
        return rows if isinstance(rows, slice) else torch.from_numpy(rows).to(self._states.device)

    def place(self, rows: slice | torch.Tensor, positions: torch.Tensor, kv_length: int) -> None:
        """Says where the next forward pass writes: `positions` [n, Q] of `rows`, negative for padding.

        The pass reads positions below `kv_length`; its mask says which of them each row may see.
        """
        place = self._placement
        place.rows = rows
        place.row_index = self._all_rows[rows]
        place.positions = self._past_padding(positions)
        place.kv_length = kv_length

    def _past_padding(self, positions: torch.Tensor) -> torch.Tensor:
        # A single token a row is never padding.
        is_padded = positions.shape[1] > 1
        return torch.where(positions < 0, self._padding_position, positions) if is_padded else positions

    def lines(self, rows: slice | torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[n·Q·2H] where `write` puts the states of tokens: at `positions` [n, Q] of `rows`, negative for padding."""
        return (self._first_lines[rows, None] + self._past_padding(positions).unsqueeze(-1)).flatten()

    def write(self, layer: int, lines: torch.Tensor, states: torch.Tensor) -> None:
        """Puts `states` [n·Q, 2H, D], the H keys of each token and then its H values, where `lines` says."""
        self._lines[layer].index_copy_(0, lines, states.reshape(-1, states.shape[-1]))

    def read(self, layer: int, rows: slice | torch.Tensor, kv_length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and the values of `rows`, [n, H, kv_length, D] each."""
        keys, values = self._states[2 * layer : 2 * layer + 2, rows, :, :kv_length].unbind()
        return keys, values

    def copy_prefix(self, *, source: int, target: int, length: int) -> None:
        """Copies the first `length` positions of one slot to another."""
        self._states[:, target, :, :length] = self._states[:, source, :, :length]

    def wipe(self, slot: int) -> None:
        """Sets a slot to zero."""
        self._states[:, slot] = 0

    def swap(self, first: int, second: int, *, first_length: int, second_length: int) -> None:
        """Exchanges two slots of which so many positions are in use."""
        kept = self._states[:, first, :, :first_length].clone()
        self._states[:, first, :, :second_length] = self._states[:, second, :, :second_length]
        self._states[:, second, :, :first_length] = kept

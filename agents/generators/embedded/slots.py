"""The slots of the engine: the host's side of each row, and the KV that lies in it.

Active rows are the slots 0 to n - 1, so that a forward pass reads their KV in place. The other slots keep the
tokens and the KV of what ended in them, until the slot is needed: a prompt that begins with the same tokens (the
next turn of a session, another member of a group) takes that KV over. All state per row is numpy, so that a step
has no Python loop over rows.
"""

import numpy as np
from numpy.typing import NDArray

from driftgym.agents.generators.embedded.cache import Rows, SlotCache
from driftgym.agents.generators.embedded.requests import Request

_MIN_REUSED_TOKENS = 8  # below that, a copy costs more than it saves
_NO_STOP = -1
_STATE = np.dtype(
    [
        ("length", np.int32),  # tokens in the slot
        ("kv_length", np.int32),  # of which so many have their KV
        ("num_prompt", np.int32),
        ("max_length", np.int32),  # prompt and token budget
        ("kv_epoch", np.int32),  # the oldest epoch among its KV
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("seed", np.uint64),
        ("last_used", np.int64),
    ]
)


class SlotTable:
    """S slots of T positions. `num_active` of them hold requests."""

    def __init__(self, cache: SlotCache, *, num_slots: int, max_length: int) -> None:
        self.num_slots = num_slots
        self.num_active = 0
        self.requests: list[Request | None] = [None] * num_slots
        self.state = np.zeros(num_slots, _STATE)
        self.tokens = np.zeros((num_slots, max_length), np.int32)
        self.logprobs = np.zeros((num_slots, max_length), np.float32)
        self.epochs = np.zeros((num_slots, max_length), np.int32)
        self._stops = np.full((num_slots, 4), _NO_STOP, np.int32)
        self._cache = cache
        self._clock = 0

    def shared_length(self, sequence: NDArray[np.int32], *, first: int, lengths: NDArray[np.int32]) -> tuple[int, int]:
        """How many leading tokens a slot shares with `sequence`, and which slot shares most; (0, 0) for none.

        Looks at slots `first`, `first + 1`, ..., one for each of `lengths`, at that many tokens of each. The last
        token of the sequence never counts: its logits are wanted.
        """
        limit = len(sequence) - 1
        last = first + len(lengths)
        if limit <= 0 or first == last:
            return 0, 0
        differs = self.tokens[first:last, :limit] != sequence[:limit]
        shared = np.where(differs.any(axis=1), differs.argmax(axis=1), limit)
        shared = np.minimum(shared, lengths)
        best = int(shared.argmax())
        return int(shared[best]), first + best

    def place(self, request: Request, sequence: NDArray[np.int32], *, epoch: int) -> int:
        """Gives `request` the next slot, with the KV that other slots share with it. Returns the slot."""
        row = self.hold(sequence, epoch=epoch)
        self._fill(row, request)
        return row

    def hold(
        self,
        sequence: NDArray[np.int32],
        *,
        epoch: int,
        max_shared: int | None = None,
        only_fresh: bool = False,
    ) -> int:
        """Puts `sequence` into the next slot, with the KV that other slots share with it. Returns the slot.

        Args:
            sequence: the tokens.
            epoch: that of the weights now.
            max_shared: takes over the KV of at most so many.
            only_fresh: takes over none of older epochs.
        """
        lengths = self.state["kv_length"]
        if only_fresh:
            lengths = np.where(self.state["kv_epoch"] == epoch, lengths, 0)
        shared, source = self.shared_length(sequence, first=0, lengths=lengths)
        shared = shared if max_shared is None else min(shared, max_shared)
        if shared < _MIN_REUSED_TOKENS:
            shared = 0
        row = self.num_active
        source = self._make_room(source, shared)
        if shared and source != row:
            self._cache.copy_prefix(source=source, target=row, length=shared)
        self.state["kv_epoch"][row] = self.state["kv_epoch"][source] if shared else epoch
        self.state["kv_length"][row] = shared
        self.state["length"][row] = len(sequence)
        self.tokens[row, : len(sequence)] = sequence
        self.num_active += 1
        return row

    def _make_room(self, source: int, shared: int) -> int:
        """Empties the next slot: what it keeps moves to the place of the least recently used. Returns the source's
        place after that. A source that is used up by the new request is the one that goes."""
        row = self.num_active
        used_up = source >= row and shared == self.state["kv_length"][source] > 0
        victim = source if used_up else row + int(self.state["last_used"][row:].argmin())
        if victim == row:
            return source
        self.swap(row, victim)
        return {row: victim, victim: row}.get(source, source)

    def _fill(self, row: int, request: Request) -> None:
        num_prompt, sampling = len(request.prompt_ids), request.sampling
        sampled = slice(num_prompt, num_prompt + len(request.token_ids))
        self.logprobs[row, sampled] = request.logprobs
        self.epochs[row, sampled] = request.epochs
        state = self.state[row : row + 1]
        state["num_prompt"] = num_prompt
        state["max_length"] = num_prompt + sampling.max_tokens
        state["temperature"] = sampling.temperature
        state["top_p"] = sampling.top_p
        state["seed"] = request.seed
        self._set_stops(row, sampling.stop_token_ids)
        self.requests[row] = request

    def _set_stops(self, row: int, stop_ids: tuple[int, ...]) -> None:
        missing = len(stop_ids) - self._stops.shape[1]
        if missing > 0:
            self._stops = np.pad(self._stops, ((0, 0), (0, missing)), constant_values=_NO_STOP)
        self._stops[row] = _NO_STOP
        self._stops[row, : len(stop_ids)] = stop_ids

    def append(
        self, rows: Rows, token_ids: NDArray[np.int64], logprobs: NDArray[np.float32], *, epoch: int
    ) -> NDArray[np.int64]:
        """Writes one drawn token behind each of the n `rows`; their KV now reaches up to it.

        A token whose log-prob is not finite is not written. Returns the rows that end here.
        """
        index = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        state = self.state[rows]  # a view where the rows are a slice
        lengths = state["length"].copy()
        self.state["kv_length"][rows] = lengths
        is_finite = np.isfinite(logprobs)
        self.tokens[index, lengths] = token_ids
        self.logprobs[index, lengths] = logprobs
        self.epochs[index, lengths] = epoch
        lengths = lengths + is_finite
        self.state["length"][rows] = lengths
        has_stopped = (self._stops[rows] == token_ids[:, None]).any(axis=1)
        ends = has_stopped | ~is_finite | (lengths >= state["max_length"])
        return index[ends]

    def matched_stop(self, row: int) -> int | None:
        """The stop token that the row ends with, if it does."""
        last = int(self.tokens[row, self.state["length"][row] - 1])
        return last if last in self._stops[row] else None

    def release(self, row: int) -> Request:
        """Takes the request out of its slot, with the tokens that it has. The slot's KV stays for others."""
        request = self.requests[row]
        assert request is not None
        span = slice(int(self.state["num_prompt"][row]), int(self.state["length"][row]))
        request.keep(
            self.tokens[row, span].copy(),
            self.logprobs[row, span].copy(),
            self.epochs[row, span].copy(),
            int(self.state["kv_epoch"][row]),
        )
        self.requests[row] = None
        self.free(row)
        return request

    def free(self, row: int) -> None:
        """Gives a slot up; what lies in it stays for others. The last active row moves into its place."""
        self._clock += 1
        self.state["last_used"][row] = self._clock
        self.num_active -= 1
        if row != self.num_active:
            self.swap(row, self.num_active)

    def active_requests(self) -> list[Request]:
        """Those that have a slot."""
        return [request for request in self.requests[: self.num_active] if request is not None]

    def drop_kv(self) -> None:
        """Forgets the KV of all slots."""
        self.state["kv_length"] = 0

    def wipe(self, row: int) -> None:
        """Clears a slot's KV: a number that is not finite would be felt even where the mask hides it."""
        self.state["kv_length"][row] = 0
        self._cache.wipe(row)

    def swap(self, first: int, second: int) -> None:
        """Exchanges two slots."""
        lengths = self.state["kv_length"]
        self._cache.swap(first, second, first_length=int(lengths[first]), second_length=int(lengths[second]))
        pair, swapped = [first, second], [second, first]
        for array in (self.state, self.tokens, self.logprobs, self.epochs, self._stops):
            array[pair] = array[swapped]
        self.requests[first], self.requests[second] = self.requests[second], self.requests[first]

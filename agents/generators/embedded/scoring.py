"""Log-probs of given tokens: sequences wait, get a slot for the time of one step, and sample nothing.

Shapes: n rows of a pass, Q tokens a row, V vocabulary.
"""

import time
from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from driftgym.agents.generators.embedded.cache import Rows
from driftgym.agents.generators.embedded.model import ModelRunner
from driftgym.agents.generators.embedded.prefill import prefill_groups, unread_tokens
from driftgym.agents.generators.embedded.requests import ABORTED, NOT_FINITE, ScoreAnswer, ScoreRequest
from driftgym.agents.generators.embedded.slots import SlotTable
from driftgym.agents.generators.embedded.weights import ModelWeights
from driftgym.types import Int32Array

_MAX_LOGITS = 2**26  # of one pass: V can be a hundred times what a token needs elsewhere


class Scorer:
    """Scores sequences in the slots that no request holds. Not thread-safe.

    A sequence takes over KV of the weights that score it, never of older ones, and leaves its own KV to others.
    """

    def __init__(
        self, runner: ModelRunner, slots: SlotTable, weights: ModelWeights, *, max_prefill_tokens: int
    ) -> None:
        """A step reads about `max_prefill_tokens`."""
        self._runner = runner
        self._slots = slots
        self._weights = weights
        self._max_prefill_tokens = max_prefill_tokens
        self._max_pass_tokens = max(1, min(max_prefill_tokens, _MAX_LOGITS // runner.vocab_size))
        self._waiting: deque[ScoreRequest] = deque()

    @property
    def num_queued(self) -> int:
        """Sequences that were not scored yet."""
        return len(self._waiting)

    def submit(
        self, request_id: str, token_ids: Int32Array, *, start: int, on_finished: Callable[[ScoreAnswer], None]
    ) -> None:
        """Queues a sequence that fits a slot; `on_finished` is called once, from within `step` or `abort`."""
        self._waiting.append(
            ScoreRequest(
                request_id=request_id,
                token_ids=token_ids,
                start=start,
                on_finished=on_finished,
                arrived_at=time.monotonic(),
            )
        )

    def abort(self, request_id: str | None) -> None:
        """Ends one, or all, unscored."""
        waiting, self._waiting = self._waiting, deque()
        for request in waiting:
            if request_id in (None, request.request_id):
                self._end(request, num_cached=0, logprobs=None, message=ABORTED)
            else:
                self._waiting.append(request)

    def step(self) -> None:
        """Scores the oldest sequences, as many as find a slot and are not too much for one step."""
        first = self._slots.num_active
        held: list[tuple[ScoreRequest, int]] = []
        budget = self._max_prefill_tokens
        while self._waiting and self._slots.num_active < self._slots.num_slots and budget > 0:
            request = self._waiting.popleft()
            row = self._hold(request)
            num_cached = int(self._slots.state["kv_length"][row])
            budget -= len(request.token_ids) - num_cached
            held.append((request, num_cached))
        for rows in prefill_groups(self._slots, first=first, max_tokens=self._max_pass_tokens):
            self._read(rows)
        # From the last row down: no row moves before it is let go.
        logprobs = [self._let_go(row, held[row - first][0]) for row in range(self._slots.num_active - 1, first - 1, -1)]
        for (request, num_cached), found in zip(held, reversed(logprobs), strict=True):
            self._end(request, num_cached=num_cached, logprobs=found)

    def _hold(self, request: ScoreRequest) -> int:
        # The logits after the last token are not wanted, so it is not read; those after token `start` are.
        row = self._slots.hold(
            request.token_ids[:-1], epoch=self._weights.epoch, max_shared=request.start, only_fresh=True
        )
        self._slots.tokens[row, len(request.token_ids) - 1] = request.token_ids[-1]
        return row

    def _read(self, rows: Rows) -> None:
        """Runs `rows` through the model, a part of them at a time, and notes the log-prob of each token but the first
        `kv_length` + 1."""
        slots = self._slots
        index = np.arange(slots.num_slots)[rows][:, None]
        per_row = max(1, self._max_pass_tokens // len(index))
        while True:
            token_ids, positions = unread_tokens(slots, rows, max_width=per_row)
            if positions.shape[1] == 0:
                return
            logits = self._runner.forward(
                token_ids,
                positions,
                rows=rows,
                kv_length=int(positions.max()) + 1,
                num_logits=positions.shape[1],
            )
            scored = np.where(positions < 0, 0, positions + 1)
            targets = slots.tokens[index, scored].astype(np.int64)
            found = _logprobs(logits, targets)
            slots.logprobs[index, scored] = np.where(positions < 0, np.float32(0.0), found)
            slots.state["kv_length"][rows] = np.maximum(slots.state["kv_length"][rows], positions[:, -1] + 1)

    def _let_go(self, row: int, request: ScoreRequest) -> np.ndarray:
        found = self._slots.logprobs[row, request.start + 1 : len(request.token_ids)].copy()
        self._slots.free(row)
        if not np.isfinite(found).all():
            self._slots.wipe(self._slots.num_active)
        return found

    def _end(
        self,
        request: ScoreRequest,
        *,
        num_cached: int,
        logprobs: np.ndarray | None,
        message: str | None = None,
    ) -> None:
        is_failure = logprobs is not None and not np.isfinite(logprobs).all()
        request.on_finished(
            ScoreAnswer(
                request_id=request.request_id,
                token_ids=request.token_ids,
                start=request.start,
                logprobs=None if is_failure else logprobs,
                message=NOT_FINITE if is_failure else message,
                is_failure=is_failure,
                num_cached_tokens=num_cached,
                latency_s=time.monotonic() - request.arrived_at,
                version=self._weights.version,
            )
        )


def _logprobs(logits_nQV: torch.Tensor, targets: np.ndarray) -> np.ndarray:  # noqa: N803  # the shape is in the name
    """[n, Q] the log-prob of each target at temperature 1, in float32."""
    logits_nQV = logits_nQV.float()
    chosen = logits_nQV.gather(-1, torch.from_numpy(targets).to(logits_nQV.device)[:, :, None])[:, :, 0]
    found: np.ndarray = (chosen - logits_nQV.logsumexp(dim=-1)).cpu().numpy()
    return found

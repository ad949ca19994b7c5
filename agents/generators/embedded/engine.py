"""Continuous batching: requests join, decode together and leave between two steps of one model.

`Engine` has no thread and no clock of its own: whoever owns it calls `step` while `has_work`. So everything that is
called between two steps (abort, pause, new weights) takes effect between two tokens.
"""

import secrets
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from driftgym.agents.generators.embedded.cache import Rows
from driftgym.agents.generators.embedded.model import ModelRunner
from driftgym.agents.generators.embedded.prefill import newest_tokens, prefill_groups, should_defer, unread_tokens
from driftgym.agents.generators.embedded.requests import (
    ABORTED,
    NOT_FINITE,
    Answer,
    Request,
    ScoreAnswer,
)
from driftgym.agents.generators.embedded.sampling import draw_tokens, uniforms
from driftgym.agents.generators.embedded.scoring import Scorer
from driftgym.agents.generators.embedded.slots import SlotTable
from driftgym.agents.generators.embedded.weights import ModelWeights, NewWeights, WeightsRefusedError
from driftgym.agents.generators.traffic import Stopwatch
from driftgym.types import FinishReason, Int32Array, SamplingParams

PauseMode = Literal["abort", "retract", "in_place"]


class Engine:
    """Decodes many requests with one model. Not thread-safe."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        max_batch_size: int,
        max_context_tokens: int,
        weight_version: str,
        max_prefill_tokens: int = 8192,
        weights: ModelWeights | None = None,
    ) -> None:
        self.vocab_size = runner.vocab_size
        self.max_context_tokens = max_context_tokens
        self.is_paused = False
        self.accepts_waiting = True
        """False keeps waiting requests out of the slots, so that the running ones drain."""
        self.num_sampled_tokens = 0
        self._runner = runner
        self._slots = SlotTable(runner.cache, num_slots=max_batch_size, max_length=max_context_tokens)
        self._waiting: deque[Request] = deque()
        self._request_ids: set[str] = set()
        self.weights = weights or ModelWeights(runner.model, version=weight_version)
        self._scorer = Scorer(runner, self._slots, self.weights, max_prefill_tokens=max_prefill_tokens)
        self._max_prefill_tokens = max_prefill_tokens
        self._busy = Stopwatch()

    @property
    def version(self) -> str:
        """The name of the weights that the engine has."""
        return self.weights.version

    @property
    def num_running(self) -> int:
        """Requests that have a slot."""
        return self._slots.num_active

    @property
    def num_queued(self) -> int:
        """Requests that wait for one, those included that ask for the log-probs of given tokens."""
        return len(self._waiting) + self._scorer.num_queued

    @property
    def has_work(self) -> bool:
        """True when `step` would do something."""
        return not self.is_paused and (self.num_running > 0 or (self.accepts_waiting and self.num_queued > 0))

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one request had a slot and was not paused."""
        return self._busy.seconds

    def submit(
        self, request_id: str, prompt_ids: Int32Array, sampling: SamplingParams, on_finished: Callable[[Answer], None]
    ) -> None:
        """Queues a request; `on_finished` is called once, from within `step`, `abort` or `pause`.

        Raises:
            ValueError: the prompt is empty, does not fit, or has unknown ids; or the request id is in use.
        """
        self._enter(request_id, prompt_ids, max_tokens=sampling.max_tokens)
        now = time.monotonic()
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(64)
        self._waiting.append(
            Request(
                request_id=request_id,
                prompt_ids=prompt_ids,
                sampling=sampling,
                seed=seed % 2**64,
                on_finished=on_finished,
                arrived_at=now,
                waiting_since=now,
            )
        )

    def score(
        self, request_id: str, token_ids: Int32Array, *, start: int, on_finished: Callable[[ScoreAnswer], None]
    ) -> None:
        """Queues given tokens, of which those after token `start` are scored; otherwise as `submit`.

        Raises:
            ValueError: as `submit`; or nothing is to be scored.
        """
        if not 0 <= start <= len(token_ids) - 2:
            raise ValueError(f"of a prompt of {len(token_ids)} tokens none is scored after token {start}")
        self._enter(request_id, token_ids, max_tokens=0)

        def finished(answer: ScoreAnswer) -> None:
            self._request_ids.discard(request_id)
            on_finished(answer)

        self._scorer.submit(request_id, token_ids, start=start, on_finished=finished)

    def _enter(self, request_id: str, prompt_ids: Int32Array, *, max_tokens: int) -> None:
        if request_id in self._request_ids:
            raise ValueError(f"request id {request_id!r} is in use")
        _check(prompt_ids, max_tokens=max_tokens, vocab_size=self.vocab_size, max_context=self.max_context_tokens)
        self._request_ids.add(request_id)

    def step(self) -> None:
        """Scores what waits for it, reads the prompts that have a slot free, samples a token for all that run."""
        if not self.has_work:
            return
        self._busy.run(True)
        if self.accepts_waiting and self._scorer.num_queued:
            self._scorer.step()
        if self.accepts_waiting and self._waiting and self.num_running < self._slots.num_slots:
            self._admit()
        if self.num_running:
            rows = slice(0, self.num_running)
            self._finish(self._sample(rows, *newest_tokens(self._slots, rows)))
        self._note_busy()

    def _note_busy(self) -> None:
        self._busy.run(self.num_running > 0 and not self.is_paused)

    def abort(self, request_id: str | None = None) -> None:
        """Ends one request, or all, with what they have; unknown ids are those of requests that have ended."""
        for row in range(self.num_running - 1, -1, -1):
            request = self._slots.requests[row]
            if request is not None and request_id in (None, request.request_id):
                self._end(self._slots.release(row), "abort", message=ABORTED)
        self._scorer.abort(request_id)
        waiting, self._waiting = self._waiting, deque()
        for request in waiting:
            if request_id in (None, request.request_id):
                self._end(request, "abort", message=ABORTED)
            else:
                self._waiting.append(request)
        self._note_busy()

    def pause(self, mode: PauseMode) -> None:
        """Stops between two tokens.

        `abort` ends all requests. `retract` takes the running ones back to the front of the queue and drops their KV,
        which is computed anew when they go on. `in_place` leaves them in their slots with their KV.
        """
        self.is_paused = True
        if mode == "abort":
            self.abort()
        elif mode == "retract":
            self._retract()
        now = time.monotonic()
        for request in self._slots.active_requests():
            request.start_waiting(now)
        self._note_busy()

    def _retract(self) -> None:
        now = time.monotonic()
        self._slots.state["kv_length"][: self.num_running] = 0
        for row in range(self.num_running - 1, -1, -1):
            request = self._slots.release(row)
            request.start_waiting(now)
            self._waiting.appendleft(request)

    def resume(self) -> None:
        """Goes on after `pause`; nothing happens when it was not paused."""
        self.is_paused = False
        now = time.monotonic()
        for request in self._slots.active_requests():
            request.stop_waiting(now)

    def update_weights(self, new: NewWeights, *, flush_cache: bool) -> None:
        """Takes weights that were read, whole or not at all; tokens sampled from now on are of their version.

        With `flush_cache` no request may be running: what the slots keep is forgotten. Without, running requests and
        later prompts go on with KV of older weights, and their answers say so.

        Raises:
            WeightsRefusedError: nothing was changed.
        """
        if flush_cache and self.num_running:
            raise WeightsRefusedError("the cache cannot be flushed while requests hold KV: pause with mode retract")
        self.weights.take(new)
        if flush_cache:
            self._slots.drop_kv()

    def _admit(self) -> None:
        """Gives slots to waiting requests, oldest first, and samples the first token of each.

        A prompt that shares much with one that got its slot in this same step stays in the queue: in the next step
        it finds the shared KV there.
        """
        first = self.num_running
        deferred: list[Request] = []
        budget = self._max_prefill_tokens
        while self._waiting and self.num_running < self._slots.num_slots and budget > 0:
            request = self._waiting.popleft()
            sequence = request.sequence
            if should_defer(self._slots, sequence, first=first):
                deferred.append(request)
                continue
            row = self._slots.place(request, sequence, epoch=self.weights.epoch)
            num_cached = int(self._slots.state["kv_length"][row])
            budget -= len(sequence) - num_cached
            request.stop_waiting(time.monotonic())
            if request.num_cached_tokens is None:
                request.num_cached_tokens = num_cached
        self._waiting.extendleft(reversed(deferred))
        # Rows move when one of them ends, so they end after the last pass.
        finished = [
            self._sample(rows, *unread_tokens(self._slots, rows))
            for rows in prefill_groups(self._slots, first=first, max_tokens=self._max_prefill_tokens)
        ]
        if finished:
            self._finish(np.concatenate(finished))

    def _sample(self, rows: Rows, token_ids: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Runs what `rows` have to read through the model, and gives each its next token. Returns those that end."""
        logits = self._runner.forward(token_ids, positions, rows=rows, kv_length=int(positions.max()) + 1)
        state = self._slots.state[rows]
        drawn = draw_tokens(
            logits[:, -1],
            temperatures=state["temperature"],
            top_ps=state["top_p"],
            draws=uniforms(state["seed"], state["length"] - state["num_prompt"]),
        )
        self.num_sampled_tokens += len(drawn.token_ids)
        return self._slots.append(rows, drawn.token_ids, drawn.logprobs, epoch=self.weights.epoch)

    def _finish(self, rows: NDArray[np.int64]) -> None:
        # From the last row down: releasing one moves the last active row into its place.
        for row in np.sort(rows)[::-1].tolist():
            state = self._slots.state[row]
            matched = self._slots.matched_stop(row)
            # `length` was not moved on when the token was refused.
            if state["length"] == state["kv_length"]:
                self._end(self._slots.release(row), "abort", message=NOT_FINITE)
                self._slots.wipe(self.num_running)
            elif matched is not None:
                self._end(self._slots.release(row), "stop", matched=matched)
            else:
                self._end(self._slots.release(row), "length")

    def _end(
        self, request: Request, reason: FinishReason, *, matched: int | None = None, message: str | None = None
    ) -> None:
        now = time.monotonic()
        request.stop_waiting(now)
        self._request_ids.discard(request.request_id)
        request.on_finished(
            request.answer(
                reason,
                matched=matched,
                message=message,
                versions=self.weights.versions,
                now=now,
            )
        )


def _check(prompt_ids: Int32Array, *, max_tokens: int, vocab_size: int, max_context: int) -> None:
    if len(prompt_ids) == 0:
        raise ValueError("the prompt is empty")
    if (needed := len(prompt_ids) + max_tokens) > max_context:
        raise ValueError(
            f"a prompt of {len(prompt_ids)} tokens and max_new_tokens {max_tokens} are {needed} tokens, "
            f"the context holds {max_context}"
        )
    if prompt_ids.min() < 0 or prompt_ids.max() >= vocab_size:
        raise ValueError(f"the prompt has ids outside of the vocabulary of {vocab_size}")

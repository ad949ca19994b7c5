"""The engine among coroutines: one asyncio loop serves HTTP between the steps of the model.

`EngineLoop.run` consumes what `generate` submits, waits for work, and produces answers; a submission, `resume` and
an update wake it. A step is never interrupted, so what happens between two steps is atomic to the tokens.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from driftgym.agents.generators.embedded.engine import Engine, PauseMode
from driftgym.agents.generators.embedded.requests import Answer, ScoreAnswer, WeightsOrder
from driftgym.agents.generators.embedded.weights import WeightsRefusedError
from driftgym.types import Int32Array, SamplingParams

_TURNS_PER_STEP = 3  # of the asyncio loop: a request passes through several before it is submitted


_Reply = TypeVar("_Reply", Answer, ScoreAnswer)


class EngineLoop:
    """Runs an `Engine` between the other coroutines of the running loop."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._wake = asyncio.Event()
        self._none_running = asyncio.Event()
        self._updating = asyncio.Lock()

    async def run(self) -> None:
        """Steps the engine for ever. An exception of the engine ends it: the server cannot go on."""
        while True:
            if self.engine.num_running == 0 or self.engine.is_paused:
                self._none_running.set()
            if not self.engine.has_work:
                self._wake.clear()
                await self._wake.wait()
            else:
                self.engine.step()
            # After waking, too: what arrives together is read together, and who resumed gets its answer first.
            for _ in range(_TURNS_PER_STEP):
                await asyncio.sleep(0)

    async def generate(self, request_id: str, input_ids: Int32Array, sampling: SamplingParams) -> Answer:
        """The answer to one request; a caller that is cancelled takes its request with it.

        Raises:
            ValueError: as `Engine.submit`.
        """
        return await self._reply(
            request_id, lambda deliver: self.engine.submit(request_id, input_ids, sampling, deliver)
        )

    async def score(self, request_id: str, input_ids: Int32Array, *, start: int) -> ScoreAnswer:
        """As `generate`, of `Engine.score`."""
        return await self._reply(
            request_id,
            lambda deliver: self.engine.score(request_id, input_ids, start=start, on_finished=deliver),
        )

    async def _reply(self, request_id: str, submit: Callable[[Callable[[_Reply], None]], None]) -> _Reply:
        future: asyncio.Future[_Reply] = asyncio.get_running_loop().create_future()

        def deliver(answer: _Reply) -> None:
            if not future.done():
                future.set_result(answer)

        submit(deliver)
        self._wake.set()
        try:
            return await future
        except asyncio.CancelledError:
            self.abort(request_id)
            raise

    def abort(self, request_id: str | None) -> None:
        """As `Engine.abort`."""
        self.engine.abort(request_id)
        self._wake.set()

    def pause(self, mode: PauseMode) -> None:
        """As `Engine.pause`."""
        self.engine.pause(mode)
        self._wake.set()

    def resume(self) -> None:
        """As `Engine.resume`."""
        self.engine.resume()
        self._wake.set()

    async def update_weights(self, order: WeightsOrder, *, flush_cache: bool) -> None:
        """Takes new weights: at once when paused, else after the running requests have ended, while new ones wait.
        They are read before that, aside.

        Raises:
            WeightsRefusedError: nothing was changed.
        """
        async with self._updating:
            self.engine.weights.check(order)
            new = await asyncio.to_thread(self.engine.weights.read, order)
            self.engine.accepts_waiting = False
            try:
                while self.engine.num_running and not self.engine.is_paused:
                    self._none_running.clear()
                    await self._none_running.wait()
                self.engine.update_weights(new, flush_cache=flush_cache)
            finally:
                self.engine.accepts_waiting = True
                self._wake.set()

    async def name_weights(self, version: str) -> None:
        """Takes the weights that are in its memory by their name.

        Raises:
            WeightsRefusedError: nobody else in this process changes them, or they are others.
        """
        raise WeightsRefusedError(f"weights {version} are not in the memory of this server: send them from disk")

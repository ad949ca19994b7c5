"""Pausing an engine and ending its requests, each call within a limit of its own."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any, Literal, Protocol

from driftgym.agents.generators.http import EngineHttp
from driftgym.agents.generators.traffic import Traffic
from driftgym.errors import GeneratorError

CONTROL_S = 10.0  # any call but a generation or a weight update
_ABORT_S = 2.0  # the caller's deadline has passed already
_ABORT_TRIES = 4
_ABORT_INTERVAL_S = 0.5

PauseMode = Literal["abort", "retract", "in_place"]
"""What becomes of running requests: they end with what they have; they lose their KV and wait; they stand still."""

ControlCall = tuple[str, Mapping[str, Any]]
"""The path of a POST, with its query, and its body."""


class ControlCalls(Protocol):
    """The control calls in the words of one kind of engine."""

    def pause(self, mode: PauseMode) -> ControlCall:
        """Stops decoding."""
        ...

    def resume(self) -> ControlCall:
        """Goes on decoding."""
        ...

    def abort(self, request_id: str | None) -> ControlCall:
        """Ends one request, or all."""
        ...


class SGLangCalls:
    """As SGLang's native API has them."""

    def pause(self, mode: PauseMode) -> ControlCall:
        """As `ControlCalls.pause`."""
        return "/pause_generation", {"mode": mode}

    def resume(self) -> ControlCall:
        """As `ControlCalls.resume`."""
        return "/continue_generation", {}

    def abort(self, request_id: str | None) -> ControlCall:
        """As `ControlCalls.abort`."""
        return "/abort_request", {"abort_all": True} if request_id is None else {"rid": wire_id(request_id)}


class EngineControls:
    """The control calls to one engine. All raise GeneratorError when it does not answer within ten seconds."""

    def __init__(self, http: EngineHttp, traffic: Traffic, *, calls: ControlCalls | None = None) -> None:
        """Calls nothing yet. `traffic` is told when the engine stands still; `calls` are by default SGLang's."""
        self._http = http
        self._traffic = traffic
        self._calls = calls or SGLangCalls()
        self._aside: set[asyncio.Task[None]] = set()
        self._ordered = asyncio.Lock()  # a call that nobody waits for any more must not come after a later one

    async def halt(self, mode: PauseMode) -> None:
        """Stops decoding."""
        async with self._ordered:
            self._traffic.halt(True)
            await self._post(*self._calls.pause(mode))

    async def go_on(self) -> None:
        """Goes on decoding."""
        async with self._ordered:
            try:
                await self._post(*self._calls.resume())
            finally:
                self._traffic.halt(False)

    async def abort(self, request_id: str | None) -> None:
        """Ends one request, or all. Asks again where the engine had not seen the request yet."""
        named = self._traffic.abort(request_id)
        await self._post(*self._calls.abort(request_id))
        for _ in range(_ABORT_TRIES):
            if not any(self._traffic.is_sent(request) for request in named):
                return
            await asyncio.sleep(_ABORT_INTERVAL_S)
            await self._post(*self._calls.abort(request_id))

    async def abort_quietly(self, request_id: str) -> None:
        """Ends a request that nobody waits for, if the engine can be told."""
        with contextlib.suppress(GeneratorError, TimeoutError):
            async with asyncio.timeout(_ABORT_S):
                await self._http.post(*self._calls.abort(request_id))

    def abort_aside(self, request_id: str) -> None:
        """As `abort_quietly`, without waiting for it."""
        if not self._http.is_closed:
            task = asyncio.create_task(self.abort_quietly(request_id))
            self._aside.add(task)
            task.add_done_callback(self._aside.discard)

    async def close(self) -> None:
        """Waits for what goes on aside. Call it when the connections are closed: it then ends at once."""
        for task in tuple(self._aside):
            await task

    @contextlib.asynccontextmanager
    async def within_limit(self, path: str = "") -> AsyncIterator[None]:
        """Bounds control calls; `path` is for the message."""
        try:
            async with asyncio.timeout(CONTROL_S):
                yield
        except TimeoutError:
            raise GeneratorError(f"{self._http.url}{path}: no answer within {CONTROL_S} s") from None

    async def _post(self, path: str, body: Mapping[str, Any]) -> None:
        async with self.within_limit(path):
            await self._http.post(path, body)


def wire_id(request_id: str) -> str:
    """The request's id at the engine. SGLang aborts every request whose id begins with the one that it is given."""
    return f"{len(request_id)}:{request_id}"

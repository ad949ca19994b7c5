"""Calls to a toolbox over any byte stream: whoever owns the stream feeds what arrives and tells when it is lost."""

import asyncio
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from driftgym.errors import SandboxError

_HEADER = struct.Struct(">II")
_MAX_FRAME_BYTES = 256 * 1024 * 1024
_GRACE_S = 15.0
"""How much later than the box's own deadline an answer may come before the box counts as lost."""


class StartError(SandboxError):
    """The box is there, and could not start a process."""


class ProcessGoneError(SandboxError):
    """The box is there, and the process that was asked is gone."""


class AskTimeoutError(TimeoutError):
    """A process did not answer a line within its deadline, and was killed."""


_ERRORS: Mapping[str, type[Exception]] = {
    "start": StartError,
    "gone": ProcessGoneError,
    "timeout": AskTimeoutError,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the toolbox answered.

    >>> Answer(fields={"dropped": 0}, payload=b"41").payload
    b'41'
    """

    fields: Mapping[str, Any]
    """The JSON object."""
    payload: bytes
    """The bytes that came with it."""


class ToolboxClient:
    """Many concurrent calls to one toolbox. Each waits for the stream, has a deadline, and ends when that is lost."""

    def __init__(self, *, name: str, write: Callable[[bytes], None]) -> None:
        self.name = name
        self._write = write
        self._incoming = bytearray()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._on_ended: dict[int, Callable[[], None]] = {}
        self._next_id = 1
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lost: str | None = None

    @property
    def is_lost(self) -> bool:
        """True when nothing can be asked any more."""
        return self._lost is not None

    async def wait_ready(self) -> None:
        """Waits until the toolbox serves. The caller sets the deadline. Raises SandboxError when it is lost."""
        await asyncio.shield(self._ready)

    async def call(
        self,
        op: str,
        payload: bytes = b"",
        *,
        timeout_s: float,
        on_ended: Callable[[], None] | None = None,
        **fields: Any,
    ) -> Answer:
        """The answer to one request, which the box itself ends at `timeout_s`.

        `on_ended` is called when a process that this request starts has ended. A call that is cancelled kills what
        it has started.

        Raises:
            SandboxError: the box is lost, or did not answer in time, and is lost therefore.
            StartError: the box could not start a process.
            ProcessGoneError: the process that was asked is gone.
            AskTimeoutError: the process that was asked did not answer in time.
        """
        if self._lost is not None:
            raise SandboxError(f"{self.name}: {self._lost}")
        request_id = self._next_id
        self._next_id += 1
        if on_ended is not None:
            self._on_ended[request_id] = on_ended
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        try:
            self._send({"id": request_id, "op": op, "timeout_s": timeout_s, **fields}, payload)
            async with asyncio.timeout(timeout_s + _GRACE_S):
                answer = await future
        except asyncio.CancelledError:
            self.kill_later(request_id)
            raise
        except AskTimeoutError:
            raise
        except TimeoutError:
            self.lose(f"no answer to {op} within {timeout_s + _GRACE_S:.0f} s")
            raise SandboxError(f"{self.name}: {self._lost}") from None
        finally:
            self._waiting.pop(request_id, None)
        return answer

    def kill_later(self, key: int) -> None:
        """Has the box kill what the request `key` started, without waiting for it."""
        if self._lost is None:
            request_id = self._next_id
            self._next_id += 1
            self._send({"id": request_id, "op": "kill", "key": key}, b"")

    def _send(self, message: Mapping[str, Any], payload: bytes) -> None:
        text = json.dumps(message).encode()
        self._write(_HEADER.pack(len(text), len(payload)) + text + payload)

    def feed(self, data: bytes) -> None:
        """Takes bytes that have come from the toolbox. Nonsense loses the box, and never raises."""
        self._incoming += data
        try:
            while len(self._incoming) >= _HEADER.size and self._lost is None:
                num_text, num_payload = _HEADER.unpack_from(self._incoming)
                end = _HEADER.size + num_text + num_payload
                if end > _MAX_FRAME_BYTES:
                    raise ValueError(f"a frame of {end} bytes")
                if len(self._incoming) < end:
                    return
                fields = json.loads(self._incoming[_HEADER.size : _HEADER.size + num_text])
                payload = bytes(self._incoming[end - num_payload : end])
                del self._incoming[:end]
                self._take(fields, payload)
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            self.lose(f"what answers is no toolbox: {error}")

    def _take(self, fields: dict[str, Any], payload: bytes) -> None:
        event = fields.get("event")
        if event == "ready" and not self._ready.done():
            self._ready.set_result(None)
        if event == "ended":
            on_ended = self._on_ended.pop(fields["key"], None)
            if on_ended is not None:
                on_ended()
        if event is not None:
            return
        future = self._waiting.get(fields["id"])
        if future is None or future.done():
            return
        error = fields.get("error")
        if error is None:
            future.set_result(Answer(fields=fields, payload=payload))
        else:
            future.set_exception(_ERRORS[error](f"{self.name}: {fields.get('message', error)}"))

    def lose(self, reason: str) -> None:
        """Ends every wait with SandboxError: the box is gone for `reason`. The first reason counts."""
        if self._lost is not None:
            return
        self._lost = reason
        self._incoming.clear()
        waiting: list[asyncio.Future[Any]] = [self._ready, *self._waiting.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(SandboxError(f"{self.name}: {reason}"))
        if self._ready.done() and not self._ready.cancelled():
            self._ready.exception()  # nobody may be waiting for it
        ended, self._on_ended = list(self._on_ended.values()), {}
        for on_ended in ended:
            on_ended()

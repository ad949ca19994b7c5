"""Calls to a toolbox over any byte stream: whoever owns the stream feeds what arrives and tells when it is lost.

The protocol is described in `toolbox`.
"""

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from driftgym.errors import SandboxError

_HEADER = struct.Struct(">II")
_MAX_FRAME_BYTES = 8 * 1024 * 1024
"""More than any frame that a toolbox sends or takes."""
_MAX_TEXT_BYTES = 3 * 1024 * 1024
"""Of a request without its payload: no system starts a program with so long a command line."""
_INPUT_PART_BYTES = 64 * 1024
INPUT_WINDOW_BYTES = 256 * 1024
"""How much of an input may be under way before the box has passed it on."""
_NUM_BEATS = 4
"""How many signs of life fit into the time after which a box takes its owner for dead."""
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
    "replayed": SandboxError,
}
_CODE = {"exit_code": (int, type(None)), "num_stdout": (int,)}
_BODY = {**_CODE, "dropped": (int,)}
_COMMAND = {**_BODY, "duration_s": (int, float), "timed_out": (bool,), "oom_killed": (bool,)}
_FIELDS: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    **dict.fromkeys(("read", "write", "upload", "download"), _BODY),
    "exec": _COMMAND,
    "reset": _CODE,
    "ask": {"dropped": (int,)},
}
"""What an answer has, by operation: whoever takes the toolbox's place shall not choose what its owner stumbles over."""


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


@dataclass(slots=True, kw_only=True)
class _Call:
    """A call under way."""

    op: str
    answer: asyncio.Future[Answer]
    request_id: int
    on_output: Callable[[int, bytes], None] | None = None
    """Takes standard output as it comes, after the request's id; None keeps it for the answer."""
    max_bytes: int
    """How much the box may send before it is no toolbox."""
    parts: dict[int, list[bytes]] = field(default_factory=lambda: {1: [], 2: []})
    credit_bytes: int = INPUT_WINDOW_BYTES
    """How much of the input may still be sent."""
    is_unread: bool = False
    """True when nothing in the box takes the input any more."""
    more_credit: asyncio.Event = field(default_factory=asyncio.Event)

    def take_part(self, which: int, data: bytes) -> None:
        """Takes a part of the output. Raises ValueError for more than was asked for."""
        self.max_bytes -= len(data)
        if self.max_bytes < 0:
            raise ValueError("more output than was asked for")
        if self.on_output is not None and which == 1:
            self.on_output(self.request_id, data)
        else:
            self.parts[which].append(data)

    def complete(self, fields: dict[str, Any], payload: bytes) -> None:
        """Ends the call with its answer, the parts included. Raises ValueError for what is none to this operation."""
        for name, types in _FIELDS.get(self.op, {}).items():
            if not isinstance(fields.get(name, ""), types):
                raise ValueError(f"an answer to {self.op} with {name} {fields.get(name)!r:.100}")
        if any(self.parts.values()):
            num_stdout = fields.get("num_stdout", len(payload))
            stdout = b"".join([*self.parts[1], payload[:num_stdout]])
            payload = b"".join([stdout, *self.parts[2], payload[num_stdout:]])
            fields = {**fields, "num_stdout": len(stdout)}
        self.answer.set_result(Answer(fields=fields, payload=payload))


class ToolboxClient:
    """Many concurrent calls to one toolbox. Each waits for the stream, has a deadline, and ends when that is lost.

    With `dead_man_s`, the box's own bound, it says often enough that its owner lives, from when the toolbox serves.
    """

    def __init__(self, *, name: str, write: Callable[[bytes], None], dead_man_s: float | None = None) -> None:
        self.name = name
        self.on_relay: Callable[[Mapping[str, Any], bytes], None] | None = None
        """Takes what the relay in the box says: a message and its payload. Must not raise."""
        self._write = write
        self._dead_man_s = dead_man_s
        self._beat: asyncio.TimerHandle | None = None
        self._incoming = bytearray()
        self._calls: dict[int, _Call] = {}
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
        payload: bytes | AsyncIterator[bytes] = b"",
        *,
        timeout_s: float,
        grace_s: float = _GRACE_S,
        on_ended: Callable[[], None] | None = None,
        on_output: Callable[[int, bytes], None] | None = None,
        **fields: Any,
    ) -> Answer:
        """The answer to one request, which the box itself ends at `timeout_s`, and may be `grace_s` late with it.

        A payload that is long, or an iterator, goes in parts, as fast as the box passes them on. `on_ended` is called
        when a process that this request starts has ended. `on_output` takes the request's id and standard output
        as it comes; the answer then holds its end alone. A call that is cancelled kills what it has started.

        Raises:
            SandboxError: the box is lost, or did not answer in time, and is lost therefore.
            StartError: the box could not start a process.
            ProcessGoneError: the process that was asked is gone.
            AskTimeoutError: the process that was asked did not answer in time.
            Exception: whatever an iterator raises.
        """
        if self._lost is not None:
            raise SandboxError(f"{self.name}: {self._lost}")
        first, rest = _split(payload, is_whole=op == "ask")
        message = {"op": op, "timeout_s": timeout_s, **fields, **({} if rest is None else {"more": True})}
        request_id, frame = self._frame(message, first)
        if on_ended is not None:
            self._on_ended[request_id] = on_ended
        call = _Call(
            op=op,
            request_id=request_id,
            answer=asyncio.get_running_loop().create_future(),
            on_output=on_output,
            max_bytes=_max_answer_bytes(fields),
        )
        self._calls[request_id] = call
        try:
            self._write(frame)
            async with asyncio.timeout(timeout_s + grace_s):
                if rest is not None:
                    await self._send_rest(request_id, call, rest)
                return await call.answer
        except AskTimeoutError:
            raise
        except TimeoutError:
            self.lose(f"no answer to {op} within {timeout_s + grace_s:g} s")
            raise SandboxError(f"{self.name}: {self._lost}") from None
        except SandboxError:
            self._on_ended.pop(request_id, None)  # nothing has started that could end
            raise
        except BaseException:
            self.kill_later(request_id)
            raise
        finally:
            self._calls.pop(request_id, None)

    def _frame(self, message: Mapping[str, Any], payload: bytes) -> tuple[int, bytes]:
        """A request's id and frame. Raises StartError when it is too long."""
        text = json.dumps({"id": self._next_id, **message}).encode()
        if len(text) > _MAX_TEXT_BYTES or len(text) + len(payload) > _MAX_FRAME_BYTES - _HEADER.size:
            raise StartError(f"{self.name}: the request is too long ({len(text) + len(payload)} bytes)")
        self._next_id += 1
        return self._next_id - 1, _HEADER.pack(len(text), len(payload)) + text + payload

    async def _send_rest(self, request_id: int, call: _Call, rest: AsyncIterator[bytes]) -> None:
        """Sends the rest of an input, until it is whole, nothing takes it, or the answer is there."""

        async def send() -> None:
            async for data in rest:
                for start in range(0, len(data), _INPUT_PART_BYTES):
                    part = data[start : start + _INPUT_PART_BYTES]
                    while call.credit_bytes < len(part) and not call.is_unread:
                        call.more_credit.clear()
                        await call.more_credit.wait()
                    if call.is_unread:
                        return
                    call.credit_bytes -= len(part)
                    self.post({"op": "input", "key": request_id}, part)
            self.post({"op": "input", "key": request_id, "end": True})

        sending = asyncio.ensure_future(send())
        try:
            waits: set[asyncio.Future[Any]] = {sending, call.answer}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await sending

    def kill_later(self, key: int) -> None:
        """Has the box kill what the request `key` started, without waiting for it."""
        if self._lost is None:
            self._write(self._frame({"op": "kill", "key": key}, b"")[1])

    def post(self, message: Mapping[str, Any], payload: bytes = b"") -> None:
        """Sends a frame that is not answered. Nothing happens when the box is lost."""
        if self._lost is None:
            text = json.dumps(message).encode()
            self._write(_HEADER.pack(len(text), len(payload)) + text + payload)

    def give_credit(self, key: int, num_bytes: int) -> None:
        """Lets so much more of the output of request `key`, which has a window, leave the box."""
        self.post({"op": "credit", "key": key, "num_bytes": num_bytes})

    def _live_on(self) -> None:
        """Says that the owner lives, and goes on doing so."""
        assert self._dead_man_s is not None
        self.post({"op": "beat"})
        self._beat = asyncio.get_running_loop().call_later(self._dead_man_s / _NUM_BEATS, self._live_on)

    def feed(self, data: bytes) -> None:
        """Takes bytes that have come from the toolbox. Nonsense loses the box, and never raises."""
        if self._lost is not None:  # kept, they would be without bound
            return
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
        if event is not None:
            self._take_event(str(event), fields, payload)
            return
        call = self._calls.get(fields["id"])
        if call is None or call.answer.done():
            return
        error = fields.get("error")
        if error is None:
            call.complete(fields, payload)
        else:
            call.answer.set_exception(_ERRORS[error](f"{self.name}: {fields.get('message', error)}"))

    def _take_event(self, event: str, fields: dict[str, Any], payload: bytes) -> None:
        if event == "part":
            call = self._calls.get(fields["id"])
            if call is not None:
                call.take_part(fields["which"], payload)
        elif event == "credit":
            call = self._calls.get(fields["key"])
            if call is not None:
                call.is_unread |= fields["num_bytes"] < 0
                call.credit_bytes += fields["num_bytes"]
                call.more_credit.set()
        elif event == "ended":
            on_ended = self._on_ended.pop(fields["key"], None)
            if on_ended is not None:
                on_ended()
        elif event == "ready" and not self._ready.done():
            self._ready.set_result(None)
            if self._dead_man_s is not None:
                self._live_on()
        elif event.startswith("relay_") and self.on_relay is not None:
            self.on_relay(fields, payload)

    def lose(self, reason: str) -> None:
        """Ends every wait with SandboxError: the box is gone for `reason`. The first reason counts."""
        if self._lost is not None:
            return
        self._lost = reason
        self._incoming.clear()
        if self._beat is not None:
            self._beat.cancel()
        waiting: list[asyncio.Future[Any]] = [self._ready, *(call.answer for call in self._calls.values())]
        for future in waiting:
            if not future.done():
                future.set_exception(SandboxError(f"{self.name}: {reason}"))
        if self._ready.done() and not self._ready.cancelled():
            self._ready.exception()  # nobody may be waiting for it
        ended, self._on_ended = list(self._on_ended.values()), {}
        for on_ended in ended:
            on_ended()


def _split(payload: bytes | AsyncIterator[bytes], *, is_whole: bool) -> tuple[bytes, AsyncIterator[bytes] | None]:
    """What goes with the request, and the rest; None when that is all, as it must be where `is_whole`."""
    if not isinstance(payload, bytes):
        return b"", payload
    if is_whole or len(payload) <= _INPUT_PART_BYTES:
        return payload, None
    return b"", _once(payload)


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


def _max_answer_bytes(fields: Mapping[str, Any]) -> int:
    """Both outputs of a command, or the line of a process."""
    return 2 * int(fields.get("max_output_bytes", fields.get("max_reply_bytes", 0))) + _MAX_FRAME_BYTES

"""One question to the Docker engine over its unix socket, without the SDK, a thread or a task.

The SDK blocks, so that each of its calls needs a thread, and an engine that hangs holds that thread, the calls behind
it and the exit of this process. Here a question is a future: it has a deadline, and it goes on when the event loop
cancels every task at its end, so that what has been created can still be removed.
"""

import asyncio
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from driftgym.errors import SandboxError

_MAX_ANSWER_BYTES = 64 * 1024 * 1024
_READ_BYTES = 256 * 1024
_CUT_SHORT = "no Docker engine answers, or it hangs up before its answer is whole"


class RefusedError(SandboxError):
    """The engine answers, and will not."""

    def __init__(self, reason: str, *, status: int) -> None:
        super().__init__(reason)
        self.status = status
        """The HTTP status, 400 or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAnswer:
    """What the engine answered.

    >>> EngineAnswer(status=201, body=b'{"Id": "1f"}').value["Id"]
    '1f'
    """

    status: int
    """The HTTP status, below 400."""
    body: bytes
    """What came with it."""

    @property
    def value(self) -> Any:
        """The body, which is JSON. Raises SandboxError when it is not."""
        try:
            return json.loads(self.body)
        except ValueError:
            raise SandboxError(f"the Docker engine answers nonsense: {self.body[:200]!r}") from None


class EngineRequest:
    """A request on a connection of its own, which the engine closes after its answer (HTTP/1.0).

    Consumes what the engine sends; produces `answer`, which ends with an EngineAnswer, with RefusedError, or with
    SandboxError when the engine is not there, hangs up, or `abort` is called.
    """

    def __init__(self, *, socket_path: str, method: str, path: str, body: Mapping[str, Any] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[EngineAnswer] = self._loop.create_future()
        self._incoming = bytearray()
        self._outgoing = _request_bytes(method, path, body)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._socket.connect(socket_path)  # a unix socket connects at once, or not at all
        except OSError as error:
            self.abort(_unreachable(socket_path, error))
            return
        self._loop.add_reader(self._socket, self._read)
        self._loop.add_writer(self._socket, self._write)
        self._write()  # what is short is sent, even if the event loop never runs again

    def abort(self, reason: str) -> None:
        """Ends it with SandboxError, unless it has ended."""
        if not self.answer.done():
            self.answer.set_exception(SandboxError(reason))
            self.answer.exception()  # whoever asked may not be there any more
        self._close()

    def _close(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()

    def _write(self) -> None:
        try:
            del self._outgoing[: self._socket.send(self._outgoing)]
        except BlockingIOError:
            return
        except OSError:
            self._outgoing.clear()  # the engine has answered without reading on, or is gone: reading tells
        if not self._outgoing:
            self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self.abort(f"the Docker engine hangs up ({error.strerror})")
            return
        self._incoming += data
        if not data:
            self._finish()
        elif len(self._incoming) > _MAX_ANSWER_BYTES:
            self.abort(f"the Docker engine answers more than {_MAX_ANSWER_BYTES} bytes")

    def _finish(self) -> None:
        self._close()
        if self.answer.done():
            return
        try:
            self.answer.set_result(_parse(bytes(self._incoming)))
        except SandboxError as error:
            self.answer.set_exception(error)
            self.answer.exception()


def _unreachable(socket_path: str, error: OSError) -> str:
    if isinstance(error, PermissionError):
        return f"no Docker engine answers at {socket_path}: this user may not use it, but the group that owns it may"
    return (
        f"no Docker engine answers at {socket_path} ({error.strerror or error}): start one, or name its socket in "
        "DOCKER_HOST"
    )


def _request_bytes(method: str, path: str, body: Mapping[str, Any] | None) -> bytearray:
    content = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.0\r\nHost: docker\r\nContent-Type: application/json\r\nContent-Length: "
    return bytearray(f"{head}{len(content)}\r\n\r\n".encode() + content)


def _parse(data: bytes) -> EngineAnswer:
    """Raises RefusedError for a status of 400 or more, SandboxError for what is no whole answer."""
    head, end, body = data.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split(maxsplit=2)
    if not end or len(words) < 2 or not words[0].startswith("HTTP/") or not words[1].isdecimal():
        raise SandboxError(_CUT_SHORT)
    for line in lines[1:]:
        name, _, text = line.partition(":")
        if name.strip().lower() == "content-length" and text.strip() != str(len(body)):
            raise SandboxError(_CUT_SHORT)
    status = int(words[1])
    if status >= 400:
        raise RefusedError(_reason(body), status=status)
    return EngineAnswer(status=status, body=body)


def _reason(body: bytes) -> str:
    try:
        text = str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        text = body.decode("utf-8", "replace")
    return (text.strip().splitlines() or ["no reason given"])[0][:300]

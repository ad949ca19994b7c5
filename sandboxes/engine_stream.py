"""The hijacked connection of a command that the Docker engine runs: standard input, output and error.

Nothing is kept here: what arrives is passed on as it comes, and what is sent waits for the engine to take it.
"""

import asyncio
import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

from driftgym.errors import SandboxError
from driftgym.sandboxes.docker_request import RefusedError

_FRAME = struct.Struct(">BxxxL")
_PIECE_BYTES = 64 * 1024
_MAX_RESPONSE_BYTES = 64 * 1024
STDOUT = 1
STDERR = 2

OnOutput = Callable[[int, "memoryview[int]"], None]


class ExecStream(asyncio.Protocol):
    """One command's streams.

    Produces output for `on_output`, with STDOUT or STDERR; `opened` ends when the engine has begun with the command
    (or with RefusedError, SandboxError), `ended` when the connection has ended.
    """

    def __init__(self, on_output: OnOutput) -> None:
        loop = asyncio.get_running_loop()
        self._on_output = on_output
        self._transport: asyncio.Transport | None = None
        self._response = bytearray()
        self._header = bytearray()
        self._kind = STDOUT
        self._num_left = 0
        self._can_write = asyncio.Event()
        self._can_write.set()
        self.num_received = 0
        """Bytes that have arrived so far, to see whether more come."""
        self.opened: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()

    @classmethod
    async def open(cls, *, socket_path: str, path: str, body: Mapping[str, Any], on_output: OnOutput) -> "ExecStream":
        """Sends the request that starts a command; its answer is `opened`. Raises SandboxError without an engine."""
        try:
            transport, stream = await asyncio.get_running_loop().create_unix_connection(
                lambda: cls(on_output), socket_path
            )
        except OSError as error:
            raise SandboxError(f"the Docker engine does not answer at {socket_path}: {error}") from None
        content = json.dumps(body).encode()
        transport.write(
            f"POST {path} HTTP/1.1\r\nHost: docker\r\nContent-Type: application/json\r\nConnection: Upgrade\r\n"
            f"Upgrade: tcp\r\nContent-Length: {len(content)}\r\n\r\n".encode()
            + content
        )
        return stream

    async def send(self, data: bytes) -> None:
        """Writes all of `data` as fast as the engine takes it. Returns early when the connection has ended."""
        view = memoryview(data)
        while view and self._transport is not None and not self._transport.is_closing():
            self._transport.write(view[:_PIECE_BYTES])
            view = view[_PIECE_BYTES:]
            await self._can_write.wait()

    def write(self, data: bytes) -> None:
        """Writes without waiting."""
        if self._transport is not None:
            self._transport.write(data)

    def end_input(self) -> None:
        """Ends standard input, and goes on reading output."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()

    def pause(self) -> None:
        """Takes no more output, so that the command waits once the pipes are full."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        """Takes output again."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def close(self) -> None:
        """Ends the connection at once; the command goes on."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def pause_writing(self) -> None:
        """Makes `send` wait."""
        self._can_write.clear()

    def resume_writing(self) -> None:
        """Lets `send` go on."""
        self._can_write.set()

    def data_received(self, data: bytes) -> None:
        """Takes the response to the request, then frames."""
        self.num_received += len(data)
        if self.opened.done():
            self._read_frames(memoryview(data))
            return
        self._response += data
        head, end, rest = bytes(self._response).partition(b"\r\n\r\n")
        if not end:
            if len(self._response) > _MAX_RESPONSE_BYTES:
                self._refuse(SandboxError("the Docker engine answers nonsense"))
            return
        status = head.split(b"\r\n")[0].decode("latin-1")
        if status.split()[1:2] in (["101"], ["200"]):
            self._response.clear()
            self.opened.set_result(None)
            self._read_frames(memoryview(rest))
        else:
            number = status.split()[1:2]
            code = int(number[0]) if number and number[0].isdecimal() else 500
            self._refuse(RefusedError(f"{status} {rest[:300].decode('utf-8', 'replace')}", status=code))

    def _refuse(self, error: SandboxError) -> None:
        if not self.opened.done():
            self.opened.set_exception(error)
            self.opened.exception()  # whoever asked may not be there any more
        self.close()

    def _read_frames(self, data: "memoryview[int]") -> None:
        while data:
            if self._num_left:
                piece = data[: self._num_left]
                data = data[len(piece) :]
                self._num_left -= len(piece)
                self._on_output(self._kind, piece)
                continue
            missing = _FRAME.size - len(self._header)
            self._header += data[:missing]
            data = data[missing:]
            if len(self._header) == _FRAME.size:
                self._kind, self._num_left = _FRAME.unpack(self._header)
                self._header.clear()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tells whoever waits."""
        self._can_write.set()
        self._refuse(SandboxError("the Docker engine hangs up"))
        if not self.ended.done():
            self.ended.set_result(None)

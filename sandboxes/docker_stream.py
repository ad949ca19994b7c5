"""What is said to the Docker engine over its unix socket without the SDK, and so without a thread.

That is the attached stream of a container, which is a hijacked connection, and the first question of all, which an
engine that hangs must not block.
"""

import asyncio
import struct
from collections.abc import Callable

from driftgym.errors import SandboxError
from driftgym.sandboxes.docker_request import EngineRequest, RefusedError

_FRAME = struct.Struct(">BxxxL")
_STDOUT = 1
_MAX_STDERR_BYTES = 2000


async def read_api_version(socket_path: str) -> str:
    """The version of the API that the engine speaks. The caller sets the deadline. Raises SandboxError."""
    request = EngineRequest(socket_path=socket_path, method="GET", path="/version")
    try:
        return str((await request.answer).value["ApiVersion"])
    except (KeyError, TypeError, RefusedError) as error:
        raise SandboxError(f"what answers at {socket_path} is no Docker engine ({error!r})") from None
    finally:
        request.abort("given up")


class AttachedStream(asyncio.Protocol):
    """Standard input, output and error of a container's main process.

    Produces standard output for the `on_output` of `listen`, and keeps the end of standard error for its `on_lost`.
    """

    def __init__(self) -> None:
        self._on_output: Callable[[bytes], None] | None = None
        self._on_lost: Callable[[str], None] | None = None
        self._lost: str | None = None
        self._transport: asyncio.Transport | None = None
        self._incoming = bytearray()
        self._is_attached = False
        self._attached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._errors = bytearray()

    @classmethod
    async def attach(cls, *, socket_path: str, container_id: str) -> "AttachedStream":
        """Attaches to a container that has been created or runs. The caller sets the deadline.

        Raises:
            SandboxError: the engine does not answer, or refuses.
        """
        try:
            transport, stream = await asyncio.get_running_loop().create_unix_connection(cls, socket_path)
        except OSError as error:
            raise SandboxError(f"the Docker engine does not answer at {socket_path}: {error}") from None
        transport.write(
            f"POST /containers/{container_id}/attach?stream=1&stdin=1&stdout=1&stderr=1 HTTP/1.1\r\n"
            "Host: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 0\r\n\r\n".encode()
        )
        try:
            await stream._attached
        except BaseException:
            transport.abort()
            raise
        return stream

    def listen(self, *, on_output: Callable[[bytes], None], on_lost: Callable[[str], None]) -> None:
        """Has standard output passed on from its start, and `on_lost` called once, with the reason, at the end."""
        self._on_output, self._on_lost = on_output, on_lost
        self._read_frames()
        if self._lost is not None:
            on_lost(self._lost)

    def write(self, data: bytes) -> None:
        """Writes to standard input."""
        if self._transport is not None:
            self._transport.write(data)

    def close(self) -> None:
        """Ends the connection at once: the engine closes the container's standard input with it."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Takes the response to the request, then frames."""
        self._incoming += data
        if not self._is_attached:
            self._read_response()
        self._read_frames()

    def _read_response(self) -> None:
        head, end, rest = bytes(self._incoming).partition(b"\r\n\r\n")
        if not end:
            return
        status = head.split(b"\r\n")[0].decode("latin-1")
        if status.split()[1:2] in (["101"], ["200"]):
            self._is_attached = True
            self._incoming = bytearray(rest)
            if not self._attached.done():
                self._attached.set_result(None)
        else:
            self._refuse(f"the Docker engine refuses to attach: {status} {rest[:200].decode('utf-8', 'replace')}")

    def _refuse(self, reason: str) -> None:
        if not self._attached.done():
            self._attached.set_exception(SandboxError(reason))

    def _read_frames(self) -> None:
        while self._on_output is not None and self._is_attached and len(self._incoming) >= _FRAME.size:
            kind, size = _FRAME.unpack_from(self._incoming)
            end = _FRAME.size + size
            if len(self._incoming) < end:
                return
            data = bytes(self._incoming[_FRAME.size : end])
            del self._incoming[:end]
            if kind != _STDOUT:
                self._errors = (self._errors + data)[-_MAX_STDERR_BYTES:]
            else:
                self._on_output(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tells whoever waits or listens."""
        words = self._errors.decode("utf-8", "replace").strip()
        self._lost = f"the container has ended{': ' + words if words else ''}"
        self._refuse(self._lost)
        if self._on_lost is not None:
            self._on_lost(self._lost)

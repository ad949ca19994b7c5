"""The hijacked connection to a container, against an engine that the test plays."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from driftgym.errors import SandboxError
from driftgym.sandboxes.docker_stream import AttachedStream, read_api_version

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
UPGRADED = b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\n\r\n"


def frame(kind: int, data: bytes) -> bytes:
    return struct.pack(">BxxxL", kind, len(data)) + data


@contextlib.asynccontextmanager
async def engine(path: Path, answer: Answer) -> AsyncIterator[str]:
    """An engine that reads the request and then does what `answer` does."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"POST /containers/1f/attach?")
            await answer(reader, writer)
        writer.close()

    server = await asyncio.start_unix_server(serve, str(path / "engine.sock"))
    async with server:
        yield str(path / "engine.sock")


async def test_output_is_separated_however_it_is_cut(tmp_path: Path) -> None:
    data = UPGRADED + frame(1, b"one") + frame(2, b"a complaint") + frame(1, b"") + frame(1, b"two")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for byte in data:
            writer.write(bytes([byte]))
            await writer.drain()
        assert await reader.readexactly(5) == b"hello"

    output = bytearray()
    lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with engine(tmp_path, answer) as path:
        stream = await AttachedStream.attach(socket_path=path, container_id="1f")
        stream.listen(on_output=output.extend, on_lost=lost.set_result)
        stream.write(b"hello")
        assert await lost == "the container has ended: a complaint"
    assert output == b"onetwo"
    stream.close()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'HTTP/1.1 404 Not Found\r\n\r\n{"message":"No such container: 1f"}', "404 Not Found.*No such container"),
        (b"HTTP/1.1 500 Internal", "ended"),
        (b"nonsense\r\n\r\n", "refuses"),
        (b"", "ended"),
    ],
)
async def test_refusals_are_typed_errors(tmp_path: Path, data: bytes, words: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    async with engine(tmp_path, answer) as path:
        with pytest.raises(SandboxError, match=words):
            await AttachedStream.attach(socket_path=path, container_id="1f")


async def test_missing_engine_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="does not answer"):
        await AttachedStream.attach(socket_path=str(tmp_path / "none.sock"), container_id="1f")


@pytest.mark.parametrize("data", [b"", b"nonsense", b"HTTP/1.0 200 OK\r\n\r\n[]", b"HTTP/1.0 200 OK\r\n\r\n{}"])
async def test_what_is_no_engine_is_a_typed_error(tmp_path: Path, data: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(data)
        writer.close()

    path = str(tmp_path / "engine.sock")
    async with await asyncio.start_unix_server(serve, path):
        with pytest.raises(SandboxError, match="no Docker engine"):
            await read_api_version(path)

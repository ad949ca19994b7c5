"""The streams of a command that the engine runs, against an engine that the test plays."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from driftgym.errors import SandboxError
from driftgym.sandboxes.docker_request import RefusedError
from driftgym.sandboxes.engine_stream import STDERR, STDOUT, ExecStream

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
UPGRADED = b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\n\r\n"


def frame(kind: int, data: bytes) -> bytes:
    return struct.pack(">BxxxL", kind, len(data)) + data


class Output:
    def __init__(self) -> None:
        self.parts = {STDOUT: bytearray(), STDERR: bytearray()}

    def take(self, kind: int, data: "memoryview[int]") -> None:
        self.parts[kind] += data


@contextlib.asynccontextmanager
async def stream_to(path: Path, answer: Answer, output: Output) -> AsyncIterator[ExecStream]:
    """A stream to an engine that reads the request and then does what `answer` does."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"POST /exec/1f/start HTTP/1.1\r\n")
            assert await reader.readexactly(len(b'{"Tty": false}')) == b'{"Tty": false}'
            await answer(reader, writer)
        writer.close()

    socket_path = str(path / "engine.sock")
    async with await asyncio.start_unix_server(serve, socket_path):
        stream = await ExecStream.open(
            socket_path=socket_path, path="/exec/1f/start", body={"Tty": False}, on_output=output.take
        )
        try:
            yield stream
        finally:
            stream.close()


@pytest.mark.parametrize("size", [1, 3, 10_000])
async def test_output_is_separated_however_it_is_cut(tmp_path: Path, size: int) -> None:
    data = UPGRADED + frame(1, b"one") + frame(2, b"a complaint") + frame(1, b"") + frame(1, b"two" * 1000)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for start in range(0, len(data), size):
            writer.write(data[start : start + size])
            await writer.drain()

    output = Output()
    async with stream_to(tmp_path, answer, output) as stream:
        await stream.opened
        await stream.ended
    assert output.parts == {STDOUT: b"one" + b"two" * 1000, STDERR: b"a complaint"}
    assert stream.num_received == len(data)


async def test_input_is_sent_whole_and_ended_while_output_comes(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(UPGRADED)
        data = await reader.read()
        writer.write(frame(1, b"%d" % len(data)))

    output = Output()
    async with stream_to(tmp_path, answer, output) as stream:
        await stream.opened
        await stream.send(b"x" * 5_000_000)
        stream.end_input()
        await stream.ended
    assert output.parts[STDOUT] == b"5000000"


async def test_input_waits_for_the_engine_and_ends_with_the_connection(tmp_path: Path) -> None:
    can_end, has_ended = asyncio.Event(), asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(UPGRADED)
        await can_end.wait()
        writer.transport.abort()
        has_ended.set()

    async with stream_to(tmp_path, answer, Output()) as stream:
        await stream.opened
        sending = asyncio.ensure_future(stream.send(b"x" * 50_000_000))
        await asyncio.sleep(0.1)
        assert not sending.done()
        stream.close()
        await sending
        can_end.set()
        await has_ended.wait()


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b'HTTP/1.1 409 Conflict\r\n\r\n{"message":"Container 1f is not running"}', RefusedError),
        (b"HTTP/1.1 500 Internal", SandboxError),
        (b"nonsense\r\n\r\n", SandboxError),
        (b"x" * 100_000, SandboxError),
        (b"", SandboxError),
    ],
)
async def test_refusals_are_typed_errors(tmp_path: Path, data: bytes, error: type[Exception]) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    async with stream_to(tmp_path, answer, Output()) as stream:
        with pytest.raises(error):
            await stream.opened
        await stream.ended


async def test_missing_engine_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="does not answer"):
        await ExecStream.open(
            socket_path=str(tmp_path / "none.sock"), path="/", body={}, on_output=lambda kind, data: None
        )

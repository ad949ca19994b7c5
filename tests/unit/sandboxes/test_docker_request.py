"""Requests to an engine that the test plays."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from driftgym.errors import SandboxError
from driftgym.sandboxes.docker_engine import Engine
from driftgym.sandboxes.docker_request import EngineRequest, RefusedError

Serve = Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def socket_of(folder: Path, serve: Serve) -> AsyncIterator[str]:
    """An engine that reads a whole request and then does what `serve` does with it; ends when all have hung up."""
    open_ends = 0
    all_hung_up = asyncio.Event()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_ends
        open_ends += 1
        all_hung_up.clear()
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
            await serve(head + await reader.readexactly(length), reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        open_ends -= 1
        if open_ends == 0:
            all_hung_up.set()

    path = str(folder / "engine.sock")
    async with await asyncio.start_unix_server(take, path):
        yield path
        await all_hung_up.wait()


def answering(data: bytes) -> Serve:
    async def serve(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    return serve


async def hang(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()  # until whoever asked hangs up


class Api:
    """What `Engine` needs of the SDK here."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def engine_at(path: str) -> Engine:
    return Engine(api=Api(), socket_path=path, version="1.41")


async def test_large_body_and_answer_arrive_whole(tmp_path: Path) -> None:
    async def echo(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, _, body = request.partition(b"\r\n\r\n")
        assert head.startswith(b"POST /v1.41/containers/create?platform=a+b HTTP/1.0\r\n")
        writer.write(b"HTTP/1.0 201 Created\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()

    text = "é" * 3_000_000
    async with socket_of(tmp_path, echo) as path:
        engine = engine_at(path)
        answer = await engine.request("POST", "/containers/create", body={"text": text}, platform="a b")
        assert answer.status == 201
        assert answer.value == {"text": text}
        await engine.close()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "whole"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\n{}", "whole"),
        (b"HTTP/1.0 200 OK\r\nContent-", "whole"),
        (b"nonsense\r\n\r\n", "whole"),
        (b"HTTP/1.0 two OK\r\n\r\n", "whole"),
        (b"HTTP/1.0 200 OK\r\n\r\n{", "nonsense"),
    ],
)
async def test_what_is_no_whole_answer_is_a_typed_error(tmp_path: Path, data: bytes, words: str) -> None:
    async with socket_of(tmp_path, answering(data)) as path:
        with pytest.raises(SandboxError, match=words):
            _ = (await engine_at(path).request("GET", "/info")).value


@pytest.mark.parametrize(
    ("body", "reason"),
    [(b'{"message":"no such image\\nmore"}', "no such image"), (b"oops", "oops"), (b"", "no reason"), (b"[]", r"\[\]")],
)
async def test_refusal_tells_status_and_reason(tmp_path: Path, body: bytes, reason: str) -> None:
    async with socket_of(tmp_path, answering(b"HTTP/1.0 404 Not Found\r\n\r\n" + body)) as path:
        with pytest.raises(RefusedError, match=reason) as caught:
            await engine_at(path).request("GET", "/images/x/json")
        assert caught.value.status == 404
        assert await engine_at(path).image("x") is None


async def test_engine_that_hangs_is_given_up_at_the_deadline(tmp_path: Path) -> None:
    async with socket_of(tmp_path, hang) as path:
        engine = engine_at(path)
        with pytest.raises(SandboxError, match="within 0 s"):
            await engine.request("GET", "/info", timeout_s=0.05)
        pending = engine.send("GET", "/info")
        await engine.close()
        with pytest.raises(SandboxError, match="closed"):
            await pending
        with pytest.raises(SandboxError, match="closed"):
            engine.send("GET", "/info")


async def test_engine_that_is_not_there_is_a_typed_error(tmp_path: Path) -> None:
    request = EngineRequest(socket_path=str(tmp_path / "none.sock"), method="GET", path="/info")
    with pytest.raises(SandboxError, match=r"no Docker engine answers at .*: start one, or name its socket"):
        await request.answer
    request.abort("again")
    request = EngineRequest(socket_path="/" + "x" * 200, method="GET", path="/info")
    with pytest.raises(SandboxError, match="path too long"):
        await request.answer


async def test_removal_that_is_under_way_is_waited_for(tmp_path: Path) -> None:
    asked: list[bytes] = []

    async def serve(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(request.split(b" HTTP")[0])
        status = b"409 Conflict" if request.startswith(b"DELETE") else b"200 OK"
        writer.write(b"HTTP/1.0 " + status + b'\r\n\r\n{"message":"already in progress"}')

    async with socket_of(tmp_path, serve) as path:
        engine = engine_at(path)
        await engine.remove("1f")
        await engine.close()
    assert asked == [
        b"DELETE /v1.41/containers/1f?force=true&v=true",
        b"POST /v1.41/containers/1f/wait?condition=removed",
    ]


async def test_removal_is_tried_again_and_then_a_typed_error(tmp_path: Path) -> None:
    num_asked = 0

    async def busy(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_asked
        num_asked += 1
        writer.write(b"HTTP/1.0 500 Oops\r\n\r\n" + json.dumps({"message": "device is busy"}).encode())

    async with socket_of(tmp_path, busy) as path:
        with pytest.raises(SandboxError, match="device is busy"):
            await engine_at(path).remove("1f")
    assert num_asked == 3


async def test_call_in_a_thread_that_hangs_keeps_nobody(tmp_path: Path) -> None:
    import threading

    release = threading.Event()
    async with socket_of(tmp_path, answering(b"HTTP/1.0 200 OK\r\n\r\n{}")) as path:
        engine = engine_at(path)
        hanging = [asyncio.ensure_future(engine.call(release.wait, 60)) for _ in range(20)]
        assert await engine.call(lambda: "answer") == "answer"
        assert (await engine.request("GET", "/info")).value == {}
        await engine.close()
        release.set()
        assert await asyncio.gather(*hanging) == [True] * 20
    with pytest.raises(SandboxError, match="closed"):
        await engine.call(lambda: "answer")

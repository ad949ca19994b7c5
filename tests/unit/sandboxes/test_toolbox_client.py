"""The client's side of the toolbox, over a byte stream that the test plays."""

import asyncio
import json
import struct

import pytest

from driftgym.errors import SandboxError
from driftgym.sandboxes.toolbox_client import ToolboxClient

HEADER = struct.Struct(">II")


def frame(message: object, payload: bytes = b"") -> bytes:
    text = json.dumps(message).encode()
    return HEADER.pack(len(text), len(payload)) + text + payload


def request_of(data: bytes) -> tuple[dict[str, object], bytes]:
    num_text, num_payload = HEADER.unpack_from(data)
    assert len(data) == HEADER.size + num_text + num_payload
    return json.loads(data[HEADER.size : HEADER.size + num_text]), data[HEADER.size + num_text :]


class Stream:
    """Keeps what the client writes."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.client = ToolboxClient(name="box", write=self.written.append)


async def test_answers_are_matched_by_id_in_any_order() -> None:
    stream = Stream()
    calls = [asyncio.ensure_future(stream.client.call("ping", b"in", timeout_s=5, word=i)) for i in range(3)]
    await asyncio.sleep(0)
    requests = [request_of(data) for data in stream.written]
    assert [request["word"] for request, _ in requests] == [0, 1, 2]
    assert all(payload == b"in" for _, payload in requests)
    for request, _ in reversed(requests):
        stream.client.feed(frame({"id": request["id"]}, f"answer {request['word']}".encode()))
    assert [(await call).payload for call in calls] == [b"answer 0", b"answer 1", b"answer 2"]


async def test_frames_may_arrive_byte_by_byte() -> None:
    stream = Stream()
    ready = asyncio.ensure_future(stream.client.wait_ready())
    call = asyncio.ensure_future(stream.client.call("ping", timeout_s=5))
    await asyncio.sleep(0)
    for data in frame({"event": "ready"}) + frame({"id": 1}, b"\0\xff"):
        stream.client.feed(bytes([data]))
    await ready
    assert (await call).payload == b"\0\xff"


@pytest.mark.parametrize(
    "nonsense",
    [
        b"bash: python3: command not found\n",
        HEADER.pack(2**32 - 1, 2**32 - 1),
        HEADER.pack(3, 0) + b"{]}",
        frame([1, 2]),
        frame({"no": "id"}),
        frame({"event": "ended"}),
        frame({"id": 1, "error": "unheard-of"}),
        HEADER.pack(2, 0) + b"\xff\xfe",
        HEADER.pack(100_000, 0) + b"[" * 100_000,
    ],
)
async def test_nonsense_loses_the_box_with_a_typed_error(nonsense: bytes) -> None:
    stream = Stream()
    call = asyncio.ensure_future(stream.client.call("ping", timeout_s=5))
    await asyncio.sleep(0)
    stream.client.feed(nonsense)
    with pytest.raises(SandboxError, match="no toolbox"):
        await call
    with pytest.raises(SandboxError):
        await stream.client.wait_ready()
    with pytest.raises(SandboxError):
        await stream.client.call("ping", timeout_s=5)
    stream.client.feed(nonsense)


async def test_answers_to_nobody_are_ignored() -> None:
    stream = Stream()
    stream.client.feed(frame({"id": 77}) + frame({"event": "news"}) + frame({"event": "ended", "key": 5}))
    assert not stream.client.is_lost


async def test_loss_ends_every_wait_and_tells_processes() -> None:
    stream = Stream()
    ended: list[str] = []
    call = asyncio.ensure_future(stream.client.call("spawn", timeout_s=5, on_ended=lambda: ended.append("one")))
    await asyncio.sleep(0)
    stream.client.feed(frame({"id": 1}))
    await call
    stream.client.lose("the engine is gone")
    stream.client.lose("a second reason")
    assert ended == ["one"]
    with pytest.raises(SandboxError, match="box: the engine is gone"):
        await stream.client.call("ping", timeout_s=5)


async def test_cancelled_call_has_the_box_kill_what_it_started() -> None:
    stream = Stream()
    call = asyncio.ensure_future(stream.client.call("exec", timeout_s=5))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    request, _ = request_of(stream.written[-1])
    assert (request["op"], request["key"]) == ("kill", 1)
    stream.client.feed(frame({"id": 1}))

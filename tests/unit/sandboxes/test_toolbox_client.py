"""The client's side of the toolbox, over a byte stream that the test plays."""

import asyncio
import json
import struct
import tracemalloc
from collections.abc import AsyncIterator

import pytest

from driftgym.errors import SandboxError
from driftgym.sandboxes.toolbox_client import INPUT_WINDOW_BYTES, StartError, ToolboxClient

HEADER = struct.Struct(">II")
ENDED = {"exit_code": 0, "num_stdout": 0, "dropped": 0, "duration_s": 0.1, "timed_out": False, "oom_killed": False}


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


@pytest.mark.parametrize("op", ["exec", "read", "write", "upload", "download", "reset", "ask"])
@pytest.mark.parametrize("name", ["exit_code", "num_stdout", "dropped", "duration_s", "timed_out", "oom_killed"])
async def test_answer_that_is_none_to_its_question_loses_the_box(op: str, name: str) -> None:
    for wrong in ({key: value for key, value in ENDED.items() if key != name}, {**ENDED, name: "1"}):
        stream = Stream()
        call = asyncio.ensure_future(stream.client.call(op, timeout_s=5))
        await asyncio.sleep(0)
        stream.client.feed(frame({"id": 1, **wrong}))
        await asyncio.wait({call})
        if stream.client.is_lost:
            assert isinstance(call.exception(), SandboxError)
        else:  # it is not looked at
            assert (op, name) not in [("exec", name), ("ask", "dropped"), ("reset", "exit_code"), ("read", "dropped")]


async def test_nothing_is_kept_of_what_comes_after_the_loss() -> None:
    stream = Stream()
    stream.client.lose("closed")
    tracemalloc.start()
    for _ in range(50):
        stream.client.feed(b"x" * 1_000_000)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 2_000_000


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


async def test_process_that_could_not_start_is_not_told_to_have_ended() -> None:
    stream = Stream()
    ended: list[str] = []
    call = asyncio.ensure_future(stream.client.call("spawn", timeout_s=5, on_ended=lambda: ended.append("one")))
    await asyncio.sleep(0)
    stream.client.feed(frame({"id": 1, "error": "start", "message": "no process is to be had"}))
    with pytest.raises(StartError):
        await call
    stream.client.feed(frame({"event": "ended", "key": 1}))
    stream.client.lose("closed")
    assert ended == []


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


async def test_long_input_goes_in_parts_as_far_as_credit_goes() -> None:
    stream = Stream()
    call = asyncio.ensure_future(stream.client.call("exec", bytes(1_000_000), timeout_s=5))
    await asyncio.sleep(0.05)
    requests = [request_of(data) for data in stream.written]
    assert (requests[0][0]["more"], requests[0][1]) == (True, b"")
    assert sum(len(payload) for _, payload in requests) == INPUT_WINDOW_BYTES
    stream.client.feed(frame({"event": "credit", "key": 1, "num_bytes": 10_000_000}))
    await asyncio.sleep(0.05)
    requests = [request_of(data) for data in stream.written]
    assert sum(len(payload) for _, payload in requests) == 1_000_000
    assert requests[-1][0] == {"op": "input", "key": 1, "end": True}
    stream.client.feed(frame({"id": 1, **ENDED}))
    await call


@pytest.mark.parametrize(
    "message", [{"event": "credit", "key": 1, "num_bytes": -1}, {"id": 1, **ENDED}], ids=["unread", "ended"]
)
async def test_input_that_nothing_reads_is_given_up(message: dict[str, object]) -> None:
    stream = Stream()
    call = asyncio.ensure_future(stream.client.call("exec", bytes(1_000_000), timeout_s=5))
    await asyncio.sleep(0.05)
    stream.client.feed(frame(message))
    stream.client.feed(frame({"id": 1, **ENDED}))
    await call
    assert sum(len(data) for data in stream.written) < INPUT_WINDOW_BYTES + 2000


async def test_source_that_fails_ends_the_call_and_the_command() -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"x"
        raise OSError("no such disk")

    stream = Stream()
    with pytest.raises(OSError, match="no such disk"):
        await stream.client.call("upload", broken(), timeout_s=5)
    assert request_of(stream.written[-1])[0]["op"] == "kill"


async def test_parts_are_put_before_the_end_of_each_output() -> None:
    stream = Stream()
    call = asyncio.ensure_future(stream.client.call("exec", timeout_s=5, max_output_bytes=100))
    await asyncio.sleep(0)
    for which, data in ((1, b"a"), (2, b"x"), (1, b"b")):
        stream.client.feed(frame({"event": "part", "id": 1, "which": which}, data))
    stream.client.feed(frame({"id": 1, **ENDED, "num_stdout": 1}, b"cy"))
    answer = await call
    assert (answer.payload, answer.fields["num_stdout"]) == (b"abcxy", 3)


async def test_more_output_than_asked_for_loses_the_box() -> None:
    stream = Stream()
    call = asyncio.ensure_future(stream.client.call("exec", timeout_s=5, max_output_bytes=100))
    await asyncio.sleep(0)
    for _ in range(10):
        stream.client.feed(frame({"event": "part", "id": 1, "which": 1}, bytes(1_000_000)))
    with pytest.raises(SandboxError, match="more output"):
        await call


async def test_request_that_is_too_long_is_refused_and_the_box_stays() -> None:
    stream = Stream()
    with pytest.raises(StartError, match="too long"):
        await stream.client.call("exec", timeout_s=5, argv=["x" * 10_000_000])
    with pytest.raises(StartError, match="too long"):
        await stream.client.call("ask", bytes(10_000_000), timeout_s=5)
    assert not stream.written
    assert not stream.client.is_lost


async def test_owner_says_that_it_lives_while_the_box_is_there() -> None:
    stream = Stream()
    stream.client = ToolboxClient(name="box", write=stream.written.append, dead_man_s=0.04)
    await asyncio.sleep(0.1)
    assert not stream.written
    stream.client.feed(frame({"event": "ready"}))
    await asyncio.sleep(0.1)
    assert {request_of(data)[0]["op"] for data in stream.written} == {"beat"}
    stream.client.lose("gone")
    num_written = len(stream.written)
    await asyncio.sleep(0.05)
    assert len(stream.written) == num_written


async def test_relay_s_words_go_to_whoever_takes_them() -> None:
    stream = Stream()
    stream.client.feed(frame({"event": "relay_open", "conn": 1}))
    heard: list[tuple[object, bytes]] = []
    stream.client.on_relay = lambda message, payload: heard.append((message, payload))
    stream.client.feed(frame({"event": "relay_data", "conn": 1}, b"GET"))
    assert heard == [({"event": "relay_data", "conn": 1}, b"GET")]
    stream.client.post({"op": "relay_close", "conn": 1})
    assert request_of(stream.written[-1])[0] == {"op": "relay_close", "conn": 1}
    stream.client.lose("gone")
    stream.client.post({"op": "relay_close", "conn": 1})
    assert len(stream.written) == 1

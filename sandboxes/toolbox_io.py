"""The toolbox's streams: one epoll, the frames to and from the client, the pipes of each process.

Runs inside the box, beside `toolbox`: standard library only, Python 3.8 and later.

Frames, both ways: two big-endian 32-bit lengths, a JSON object of the first length, bytes of the second. What is long
goes in parts, so that neither side holds it: see `toolbox`.
"""

from __future__ import annotations

import os
import select
import struct
import time

from driftgym.sandboxes.toolbox_system import MAX_PIPE_BYTES, READ_BYTES, read_some
from driftgym.sandboxes.toolbox_wire import decode, encode

TYPE_CHECKING = False  # the module typing costs several milliseconds at each start
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

HEADER = struct.Struct(">II")
MAX_FRAME_BYTES = 8 * 1024 * 1024
FULL_BYTES = 256 * 1024
"""Past so many bytes that the client has not taken, no process is read from."""
PART_BYTES = 32 * 1024
"""Output that is longer leaves at once; what is shorter goes with the answer."""
MAX_RECORDED = 256
MAX_RECORDED_BYTES = 256 * 1024


class Poller:
    """Which descriptors are waited for, and what is done when one is ready."""

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self.handlers: dict[int, Callable[[], None]] = {}

    def on_readable(self, fd: int, handler: Callable[[], None]) -> None:
        """Calls `handler` whenever `fd` can be read."""
        self.epoll.register(fd, select.EPOLLIN)
        self.handlers[fd] = handler

    def on_writable(self, fd: int, handler: Callable[[], None]) -> None:
        """Calls `handler` whenever `fd` can be written; nothing changes when that is so already."""
        if fd not in self.handlers:
            self.epoll.register(fd, select.EPOLLOUT)
            self.handlers[fd] = handler

    def forget(self, fd: int) -> None:
        """Waits no longer for `fd`."""
        if self.handlers.pop(fd, None) is not None:
            self.epoll.unregister(fd)

    def wait(self, timeout_s: float | None) -> bool:
        """Handles what is ready, at the latest after `timeout_s`. True when something was."""
        ready = self.epoll.poll(timeout_s)
        for fd, _ in ready:
            handler = self.handlers.get(fd)  # an earlier handler may have closed it
            if handler is not None:
                handler()
        return bool(ready)


class Channel:
    """Frames over standard input and output."""

    def __init__(self, poller: Poller) -> None:
        self.poller = poller
        self.incoming = bytearray()
        self.outgoing = bytearray()
        self.is_closed = False
        self.heard = time.monotonic()
        self.on_room: Callable[[], None] = lambda: None
        os.set_blocking(0, False)
        os.set_blocking(1, False)

    @property
    def is_full(self) -> bool:
        """True while the client takes less than there is for it; `on_room` is called when that ends."""
        return len(self.outgoing) >= FULL_BYTES

    def receive(self) -> Iterator[tuple[dict[str, Any], bytes, bytes]]:
        """The requests that have come in whole: each with its payload, and its own text.

        Raises ValueError for what is no frame, or a longer one than may be.
        """
        try:
            data = os.read(0, MAX_PIPE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.is_closed = True
        self.heard = time.monotonic()
        self.incoming += data
        while len(self.incoming) >= HEADER.size:
            num_text, num_payload = HEADER.unpack_from(self.incoming)
            end = HEADER.size + num_text + num_payload
            if end > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {end} bytes")
            if len(self.incoming) < end:
                return
            text = bytes(self.incoming[HEADER.size : HEADER.size + num_text])
            payload = bytes(self.incoming[end - num_payload : end])
            del self.incoming[:end]
            request = decode(text)
            if not isinstance(request, dict):
                raise ValueError("no object")
            yield request, payload, text

    def send(self, message: dict[str, Any], payload: bytes = b"") -> bytes:
        """Sends a frame, and returns it; what the client does not take at once is kept for later."""
        text = encode(message)
        frame = HEADER.pack(len(text), len(payload)) + text + payload
        self.send_frame(frame)
        return frame

    def send_frame(self, frame: bytes) -> None:
        """Sends what `send` has returned once more. Says nothing once it is closed."""
        if self.is_closed:
            return
        was_empty = not self.outgoing
        self.outgoing += frame
        if was_empty:
            self.flush()

    def flush(self) -> None:
        """Writes what can be written."""
        was_full = self.is_full
        try:
            sent = os.write(1, self.outgoing)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.is_closed = True
            return
        del self.outgoing[:sent]
        if self.outgoing:
            self.poller.on_writable(1, self.flush)
        else:
            self.poller.forget(1)
        if was_full and not self.is_full:
            self.on_room()


class Record:
    """Which requests there have been: one that is asked again is not run again.

    Ids count upwards. The last answers are kept, bounded by count and bytes; older ones are forgotten, and so are
    those that went in parts: such a request is refused.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.last_id = 0
        self.running: set[int] = set()
        self.in_parts: set[int] = set()
        self.frames: dict[int, bytes] = {}
        self.num_bytes = 0

    def begin(self, request_id: int) -> bool:
        """True for a request that is new, which is then running. What is known already is answered for here."""
        if request_id > self.last_id:
            self.last_id = request_id
            self.running.add(request_id)
            return True
        if request_id in self.frames:
            self.channel.send_frame(self.frames[request_id])
        elif request_id not in self.running:
            words = f"request {request_id} was asked before, and its answer is not kept"
            self.channel.send({"id": request_id, "error": "replayed", "message": words})
        return False

    def send_part(self, request_id: int, which: int, data: bytes) -> None:
        """Sends a part of an answer that is not complete."""
        self.in_parts.add(request_id)
        self.channel.send({"event": "part", "id": request_id, "which": which}, data)

    def answer(self, request_id: int, message: dict[str, Any], payload: bytes = b"") -> None:
        """Answers a request, and keeps the answer."""
        frame = self.channel.send({"id": request_id, **message}, payload)
        self.running.discard(request_id)
        if request_id in self.in_parts:
            self.in_parts.discard(request_id)
            return
        self.frames[request_id] = frame
        self.num_bytes += len(frame)
        while len(self.frames) > MAX_RECORDED or self.num_bytes > MAX_RECORDED_BYTES:
            self.num_bytes -= len(self.frames.pop(next(iter(self.frames))))


class Output:
    """One output of a process: bounded, and sent on in parts when it grows."""

    def __init__(self) -> None:
        self.limit = 0
        self.num_taken = 0
        self.num_dropped = 0
        self.kept = bytearray()

    def take(self, data: bytes) -> None:
        """Keeps `data` up to the limit and counts the rest."""
        part = data[: max(0, self.limit - self.num_taken)]
        self.kept += part
        self.num_taken += len(part)
        self.num_dropped += len(data) - len(part)

    def release(self) -> bytes:
        """What is kept, once."""
        data, self.kept = bytes(self.kept), bytearray()
        return data

    def restart(self, limit: int) -> None:
        """Begins to count anew."""
        self.limit, self.num_taken, self.num_dropped = limit, 0, 0


class Child:
    """A process that the toolbox started and its pipes: a command, a line process, or a function of the agent's user.

    Of a command, `outputs` are its standard output and error. Of a line process, the first is the line so far, and
    `early` is what came after the end of the line before.
    """

    def __init__(self, poller: Poller, key: int, pid: int, fds: list[int], is_line: bool) -> None:
        self.poller = poller
        self.key = key
        self.pid = pid
        self.fds = fds  # standard input, output, error; -1 where closed
        self.is_line = is_line
        self.outputs = {1: Output(), 2: Output()}
        self.early = b""
        self.window: int | None = None  # how much standard output may leave before the client asks for more
        self.pending: list[memoryview] = []
        self.is_input_whole = True
        self.on_input_taken: Callable[[int], None] = lambda num_bytes: None
        self.started = time.monotonic()
        self.deadline: float | None = None
        self.timed_out = False
        self.was_killed = False
        self.is_reset = False
        self.oom_killed = False
        self.ask_id: int | None = None
        for fd in fds:
            os.set_blocking(fd, False)

    def write_input(self, data: bytes, is_whole: bool = True) -> None:
        """Writes to standard input as fast as the process reads; closes it once whole, unless it is a line process."""
        # A process may have answered before it has read the whole of its last line.
        self.is_input_whole = is_whole
        if data:
            self.pending.append(memoryview(data))
        self._pump_input()

    def _pump_input(self) -> None:
        fd = self.fds[0]
        num_taken = 0
        try:
            while self.pending:
                sent = os.write(fd, self.pending[0])
                num_taken += sent
                self.pending[0] = self.pending[0][sent:]
                if not self.pending[0]:
                    del self.pending[0]
        except BlockingIOError:
            self.poller.on_writable(fd, self._pump_input)
        except OSError:  # the process has closed its input: what it does not read is nobody's
            self.pending = []
            num_taken = -1
        if not self.pending:
            self.poller.forget(fd)
            if not self.is_line and (self.is_input_whole or num_taken < 0):
                self.close_fd(0)
        if num_taken:
            self.on_input_taken(num_taken)

    def take_output(self, which: int, data: bytes) -> bool:
        """Keeps `data` up to the limit and counts the rest. True when a line process has answered its question."""
        end = data.find(b"\n") if self.is_line else -1
        if end < 0:
            self.outputs[which].take(data)
            return False
        self.outputs[which].take(data[:end])
        self.early += data[end + 1 :]
        return True

    def drain(self, on_taken: Callable[[Child, int], None]) -> bool:
        """Takes what its pipes still hold. Bounded: something left in the background may write without end."""
        for which in (1, 2):
            num_read = 0
            while self.fds[which] >= 0 and num_read < MAX_PIPE_BYTES:
                data = read_some(self.fds[which], READ_BYTES)
                if not data:
                    break
                num_read += len(data)
                if self.take_output(which, data):
                    return True
                on_taken(self, which)
        return False

    def close_fd(self, which: int) -> None:
        """Closes a pipe; nothing happens when it is closed already."""
        fd, self.fds[which] = self.fds[which], -1
        if fd >= 0:
            self.poller.forget(fd)
            os.close(fd)

    @property
    def is_starting(self) -> bool:
        """True until the program of a line process has taken over: its third pipe closes then."""
        return self.is_line and self.fds[2] >= 0

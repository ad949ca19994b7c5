"""The toolbox's streams: one epoll, the frames to and from the client, the pipes of each process.

Runs inside the box, beside `toolbox`: standard library only, Python 3.8 and later.

Frames, both ways: two big-endian 32-bit lengths, a JSON object of the first length, bytes of the second.
"""

from __future__ import annotations

import json
import os
import select
import struct
import time

from driftgym.sandboxes.toolbox_system import MAX_PIPE_BYTES, read_some

TYPE_CHECKING = False  # the module typing costs several milliseconds at each start
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

HEADER = struct.Struct(">II")


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

    def wait(self, timeout_s: float | None) -> None:
        """Handles what is ready, at the latest after `timeout_s`."""
        for fd, _ in self.epoll.poll(timeout_s):
            handler = self.handlers.get(fd)  # an earlier handler may have closed it
            if handler is not None:
                handler()


class Channel:
    """Frames over standard input and output."""

    def __init__(self, poller: Poller) -> None:
        self.poller = poller
        self.incoming = bytearray()
        self.outgoing = bytearray()
        self.is_closed = False
        os.set_blocking(0, False)
        os.set_blocking(1, False)

    def receive(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        """The requests that have come in whole."""
        try:
            data = os.read(0, MAX_PIPE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.is_closed = True
        self.incoming += data
        while len(self.incoming) >= HEADER.size:
            num_text, num_payload = HEADER.unpack_from(self.incoming)
            end = HEADER.size + num_text + num_payload
            if len(self.incoming) < end:
                return
            request = json.loads(self.incoming[HEADER.size : HEADER.size + num_text])
            payload = bytes(self.incoming[end - num_payload : end])
            del self.incoming[:end]
            yield request, payload

    def send(self, message: dict[str, Any], payload: bytes = b"") -> None:
        """Sends a frame; what the client does not take at once is kept for later. Says nothing once it is closed."""
        if self.is_closed:
            return
        text = json.dumps(message).encode()
        was_empty = not self.outgoing
        self.outgoing += HEADER.pack(len(text), len(payload)) + text + payload
        if was_empty:
            self.flush()

    def flush(self) -> None:
        """Writes what can be written."""
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


class Child:
    """A process that the toolbox started and its pipes: a command, a line process, or a function of the agent's user.

    Of a command, `out` and `err` hold its output. Of a line process, `out` holds the line so far, and `err` what
    came after the end of the line before.
    """

    def __init__(self, poller: Poller, key: int, pid: int, fds: list[int], is_line: bool) -> None:
        self.poller = poller
        self.key = key
        self.pid = pid
        self.fds = fds  # standard input, output, error; -1 where closed
        self.is_line = is_line
        self.limit = 0
        self.out = bytearray()
        self.err = bytearray()
        self.num_dropped = 0
        self.pending = memoryview(b"")
        self.started = time.monotonic()
        self.deadline: float | None = None
        self.timed_out = False
        self.oom_before = 0
        self.ask_id: int | None = None
        for fd in fds:
            os.set_blocking(fd, False)

    def write_input(self, data: bytes) -> None:
        """Writes to standard input as fast as the process reads; then closes it, unless it is a line process."""
        # A process may have answered before it has read the whole of its last line.
        self.pending = memoryview(bytes(self.pending) + data) if self.pending else memoryview(data)
        self._pump_input()

    def _pump_input(self) -> None:
        fd = self.fds[0]
        try:
            while self.pending:
                self.pending = self.pending[os.write(fd, self.pending) :]
        except BlockingIOError:
            self.poller.on_writable(fd, self._pump_input)
            return
        except OSError:  # the process has closed its input: what it does not read is nobody's
            self.pending = memoryview(b"")
        self.poller.forget(fd)
        if not self.is_line:
            self.close_fd(0)

    def take_output(self, which: int, data: bytes) -> bool:
        """Keeps `data` up to the limit and counts the rest. True when a line process has answered its question."""
        if self.is_line:
            return self._take_line(data)
        buffer = self.out if which == 1 else self.err
        kept = data[: max(0, self.limit - len(buffer))]
        buffer += kept
        self.num_dropped += len(data) - len(kept)
        return False

    def _take_line(self, data: bytes) -> bool:
        end = data.find(b"\n")
        line = data if end < 0 else data[:end]
        kept = line[: max(0, self.limit - len(self.out))]
        self.out += kept
        self.num_dropped += len(line) - len(kept)
        if end >= 0:
            self.err += data[end + 1 :]
        return end >= 0

    def drain(self) -> bool:
        """Takes what its pipes still hold. Bounded: something left in the background may write without end."""
        for which in (1, 2):
            num_read = 0
            while self.fds[which] >= 0 and num_read < MAX_PIPE_BYTES:
                data = read_some(self.fds[which])
                if not data:
                    break
                num_read += len(data)
                if self.take_output(which, data):
                    return True
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

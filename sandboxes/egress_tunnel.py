"""The owner's view of the connections that programs in a box have made to its relay; see `toolbox_relay`."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from driftgym.sandboxes.toolbox_relay import TOTAL_WINDOW_BYTES, WINDOW_BYTES

MAX_HEAD_BYTES = 16 * 1024
Post = Callable[[Mapping[str, Any], bytes], None]


class Link:
    """What all connections of a box share: its stream, and how much may be under way on that."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._num_arrived = 0
        self._waiting: dict[int, asyncio.Event] = {}
        self.credit = TOTAL_WINDOW_BYTES

    def say(self, op: str, number: int, payload: bytes = b"", **fields: int) -> None:
        """Tells the box."""
        self._post({"op": op, "conn": number, **fields}, payload)

    def count_arrived(self, num_bytes: int) -> None:
        """Gives the box credit over all connections for what has arrived."""
        self._num_arrived += num_bytes
        if self._num_arrived >= TOTAL_WINDOW_BYTES // 2:
            self.say("relay_credit", 0, num_bytes=self._num_arrived)
            self._num_arrived = 0

    def wait(self, number: int, event: asyncio.Event) -> None:
        """Has `event` set when there is credit again; who has waited the longest is the first."""
        self._waiting[number] = event

    def take_credit(self, num_bytes: int) -> None:
        """Takes credit over all connections."""
        self.credit = min(self.credit + num_bytes, TOTAL_WINDOW_BYTES)
        waiting, self._waiting = self._waiting, {}
        for event in waiting.values():
            event.set()

    def forget(self, number: int) -> None:
        """A connection that waits no longer."""
        self._waiting.pop(number, None)


class Tunnel:
    """One connection of a program. Consumes what the relay says of it, produces bytes for the program.

    `read` waits for the program, `send` for credit; cancelling the task that serves the connection unblocks both.
    """

    def __init__(self, link: Link, number: int) -> None:
        self.number = number
        self.task: asyncio.Task[None] | None = None
        self.deadline: asyncio.Timeout | None = None
        """Where set, put off whenever bytes move."""
        self.idle_timeout_s = 0.0
        self._link = link
        self._incoming = asyncio.StreamReader(limit=MAX_HEAD_BYTES)
        self._num_ahead = 0  # bytes from the program that no credit has been given for
        self._num_passed_on = 0  # of these, bytes that may be given credit for
        self._credit = WINDOW_BYTES
        self._may_send = asyncio.Event()
        self._closed = asyncio.Event()
        self._has_ended = False
        self._program_has_ended = False

    # -- what the relay says

    def feed(self, data: bytes) -> None:
        """Takes bytes of the program. Raises ValueError for more than the box had credit for, and after the end."""
        self._num_ahead += len(data)
        if self._program_has_ended or self._num_ahead > WINDOW_BYTES:
            raise ValueError("bytes without credit, or after the end")
        self._incoming.feed_data(data)

    def feed_eof(self) -> None:
        """The program sends no more."""
        self._program_has_ended = True
        self._incoming.feed_eof()

    def take_credit(self, num_bytes: int) -> None:
        """Takes credit."""
        self._credit = min(self._credit + num_bytes, WINDOW_BYTES)
        self._may_send.set()

    def lose(self) -> None:
        """The box has closed the connection: by the way, when both sides had ended; otherwise serving it is over."""
        self._closed.set()
        is_over = self._has_ended and self._program_has_ended
        if self.task is not None and not is_over:
            self.task.cancel()

    # -- what serves it

    async def read_head(self) -> bytes:
        """The bytes up to the first empty line.

        Raises:
            EOFError: the program has ended before.
            ValueError: they are too many.
        """
        try:
            head = await self._incoming.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise ValueError(f"more than {MAX_HEAD_BYTES} bytes before the empty line") from None
        self.grant(len(head))
        return head

    async def read(self, max_bytes: int) -> bytes:
        """Some bytes of the program, that `grant` is to be called for; empty at its end."""
        data = await self._incoming.read(max_bytes)
        self._touch()
        return data

    def grant(self, num_bytes: int) -> None:
        """Gives the box credit for bytes that have been passed on."""
        self._num_passed_on += num_bytes
        if self._num_passed_on >= WINDOW_BYTES // 2 and not self._closed.is_set():
            self._link.say("relay_credit", self.number, num_bytes=self._num_passed_on)
            self._num_ahead -= self._num_passed_on
            self._num_passed_on = 0

    async def send(self, data: bytes) -> None:
        """Sends bytes to the program, as there is credit."""
        while data:
            num_bytes = min(len(data), self._credit, self._link.credit)
            if num_bytes:
                self._credit -= num_bytes
                self._link.credit -= num_bytes
                self._link.say("relay_data", self.number, data[:num_bytes])
                data = data[num_bytes:]
                self._touch()
                await asyncio.sleep(0)  # the others' turn: credit over all connections is scarce
                continue
            self._may_send.clear()
            if self._credit:
                self._link.wait(self.number, self._may_send)
            await self._may_send.wait()

    def send_eof(self) -> None:
        """Lets the program see the end. Nothing happens the second time."""
        if not self._has_ended:
            self._has_ended = True
            self._link.say("relay_eof", self.number)

    async def wait_closed(self) -> None:
        """Waits until the box has closed the connection: the program has all, and has ended too."""
        await self._closed.wait()

    def close(self) -> None:
        """Ends the connection at once, unless it has ended."""
        self._link.forget(self.number)
        if not self._closed.is_set():
            self._closed.set()
            self._link.say("relay_close", self.number)

    def _touch(self) -> None:
        if self.deadline is not None and not self.deadline.expired():
            self.deadline.reschedule(asyncio.get_running_loop().time() + self.idle_timeout_s)

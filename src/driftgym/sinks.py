"""Sinks: places that rows of metrics go to, each behind a thread of its own, so that none holds up the run.

A sink may be slow, raise anything at all, or never return, in each of its methods. What the run sees of that is a
count of the rows that it did not take.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

Row = Mapping[str, Any]
_THREAD_NAME = "sink "
_MAX_QUEUED = 256  # of rows, and of lines; a sink that lags this many steps behind is taken for dead


class Sink(Protocol):
    """A place that rows go to. All calls come from one thread of its own; each may be slow, and may raise.

    It is made in the thread of the run: whatever may wait or fail (a connection, a terminal) belongs into the first
    call, not into the construction.
    """

    def write(self, row: Row) -> None:
        """Takes the figures of one step, in a copy of its own that JSON can say (`metrics.plain_row`). Within one life
        of a run, no `step` is lower than the one before."""
        ...

    def say(self, text: str) -> None:
        """Takes a line of news for people."""
        ...

    def show(self, text: str) -> None:
        """Takes what is being done or waited for at this moment. Of several that could not be taken in time, only
        the last comes."""
        ...

    def close(self) -> None:
        """Ends. Comes last, once."""
        ...


class SinkThread:
    """A sink, its queue, and the thread that empties it. What is offered is taken at once, or dropped at once."""

    def __init__(self, sink: Sink, *, on_first_failure: Callable[[str], None] = lambda text: None) -> None:
        """Starts.

        Args:
            sink: called from here on by this thread alone.
            on_first_failure: called once, by this thread, with a line that says what the sink raised.
        """
        self._sink = sink
        self._on_first_failure = on_first_failure
        self._changed = threading.Condition()
        self._queue: deque[tuple[str, Any]] = deque()
        self._num_queued = {"row": 0, "say": 0}
        self._shown: str | None = None
        self._is_ending = False
        self._is_given_up = False
        self._has_row_in_hand = False
        self._has_failed = False
        self.num_dropped = 0
        """Rows that the sink did not take."""
        self._thread = threading.Thread(target=self._run, name=_THREAD_NAME + type(sink).__name__, daemon=True)
        self._thread.start()

    def write(self, row: Row) -> None:
        """Queues a row; drops and counts it when too many are waiting."""
        self._offer("row", row)

    def say(self, text: str) -> None:
        """Queues a line; drops it when too many are waiting."""
        self._offer("say", text)

    def show(self, text: str) -> None:
        """Takes the place of what was to be shown before."""
        with self._changed:
            self._shown = text
            self._changed.notify()

    def _offer(self, kind: str, value: Any) -> None:
        with self._changed:
            if self._num_queued[kind] == _MAX_QUEUED:
                self.num_dropped += kind == "row"
                return
            self._queue.append((kind, value))
            self._num_queued[kind] += 1
            self._changed.notify()

    def end(self) -> None:
        """The sink is closed once it has taken what is queued."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()

    def join(self, timeout_s: float) -> float:
        """Waits, `timeout_s` at most, until the sink is closed; gives it up then, and counts the rows that are left.

        Returns:
            The seconds that it took.
        """
        started_s = time.monotonic()
        self._thread.join(max(timeout_s, 0.0))
        with self._changed:
            if self._thread.is_alive() and not self._is_given_up:
                self.num_dropped += self._num_queued["row"] + self._has_row_in_hand
                self._is_given_up = True
                self._queue.clear()
                self._shown = None
        return time.monotonic() - started_s

    def _next(self) -> tuple[str, Any]:
        with self._changed:
            while not self._queue and self._shown is None and not self._is_ending:
                self._changed.wait()
            if self._queue:
                kind, value = self._queue.popleft()
                self._num_queued[kind] -= 1
            elif self._shown is not None:
                kind, value, self._shown = "show", self._shown, None
            else:
                kind, value = "end", None
            self._has_row_in_hand = kind == "row"
            return kind, value

    def _run(self) -> None:
        kind = ""
        while kind != "end":
            kind, value = self._next()
            try:
                self._take(kind, value)
            except BaseException as error:  # SystemExit too, which libraries raise where a program should end
                self._note_failure(error)

    def _take(self, kind: str, value: Any) -> None:
        if kind == "row":
            self._sink.write(value)
        elif kind == "say":
            self._sink.say(value)
        elif kind == "show":
            self._sink.show(value)
        else:
            self._sink.close()

    def _note_failure(self, error: BaseException) -> None:
        with self._changed:
            self.num_dropped += self._has_row_in_hand and not self._is_given_up
            self._has_row_in_hand = False
        if not self._has_failed:
            self._has_failed = True
            self._on_first_failure(f"{type(self._sink).__name__} failed: {_told(error)}")


def _told(error: BaseException) -> str:
    """What it says of itself; its type alone where it cannot even do that."""
    with contextlib.suppress(Exception):
        return f"{type(error).__name__}: {error}"
    return type(error).__name__


def any_sink_is_alive() -> bool:
    """True while a sink of this process is at work; after `Metrics.close`: one that was given up."""
    return any(thread.name.startswith(_THREAD_NAME) for thread in threading.enumerate())


def within(timeout_s: float, act: Callable[[], object]) -> bool:
    """Runs `act` in a thread of its own, and waits `timeout_s` at most. True when it came to its end in time.

    For output at the edge of a program: nobody may be reading it, and what it raises is of no consequence.
    """
    is_done = threading.Event()

    def run() -> None:
        with contextlib.suppress(BaseException):
            act()
            is_done.set()

    thread = threading.Thread(target=run, name=_THREAD_NAME + "output", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return is_done.is_set()

"""`ToolMeter`: for how long tools were at work, and how many at once."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolTime:
    """Time of tools so far.

    >>> ToolTime(busy_s=2.0, running_s=6.0).running_s / 2.0  # in two seconds: three at once, in the mean
    3.0
    """

    busy_s: float = 0.0
    """Seconds in which at least one was running."""
    running_s: float = 0.0
    """The seconds of each, added up."""

    def __add__(self, other: "ToolTime") -> "ToolTime":
        return ToolTime(busy_s=self.busy_s + other.busy_s, running_s=self.running_s + other.running_s)

    def __sub__(self, other: "ToolTime") -> "ToolTime":
        return ToolTime(busy_s=self.busy_s - other.busy_s, running_s=self.running_s - other.running_s)


class ToolMeter:
    """Counts the environments that are replying to an action at this moment: what `Turn.tool_latency_s` measures.

    Each reply costs two looks at the clock, whatever else is running. Used by one thread.

    >>> meter = ToolMeter()
    >>> with meter.running(), meter.running():
    ...     pass
    >>> 0.0 < meter.time.busy_s <= meter.time.running_s
    True
    """

    def __init__(self) -> None:
        """Nothing is running."""
        self._num_running = 0
        self._busy_s = 0.0
        self._running_s = 0.0
        self._changed_s = 0.0  # on time.monotonic(): when `_num_running` last changed

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Within it one more is running."""
        self._change(1)
        try:
            yield
        finally:
            self._change(-1)

    @property
    def time(self) -> ToolTime:
        """So far."""
        self._change(0)
        return ToolTime(busy_s=self._busy_s, running_s=self._running_s)

    def _change(self, by: int) -> None:
        now_s = time.monotonic()
        if self._num_running:
            self._busy_s += now_s - self._changed_s
            self._running_s += (now_s - self._changed_s) * self._num_running
        self._changed_s = now_s
        self._num_running += by

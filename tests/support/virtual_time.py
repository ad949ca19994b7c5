"""An event loop in which nobody waits: as soon as nothing is left to do, its clock goes on to the next timer.

What sleeps does so for no time, and what happens first is decided by the lengths that were asked for alone, never by
how busy the machine is: a test of what comes in which order gives the same each time. For code within one process that
waits by the loop alone; what is sent to a thread is done at once. `time.monotonic()` is as it was, and runs slower.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class _Selector(selectors.DefaultSelector):
    """Never waits for a timer, but makes it be due; waits for files where there is no timer."""

    skipped_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        """As its base."""
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        ready = super().select(0)
        if not ready:
            self.skipped_s += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """See the module."""

    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        """Seconds that were waited for."""
        return self._clock.skipped_s

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """Does it here and now."""
        del executor
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done


def in_virtual_time(main: Coroutine[Any, Any, _T]) -> _T:
    """What `main` gives, run in such a loop."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)

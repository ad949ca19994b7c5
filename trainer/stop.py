"""How a run is stopped by its user: ctrl-C or SIGTERM once ends it cleanly, a second time at once."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from driftgym.console import print_in_time

EXIT_INTERRUPTED = 130  # as shells report a program that ctrl-C ended
_SAME_PRESS_S = 0.5  # programs such as timeout(1) hand one ctrl-C on twice: to the process and to its group
_T = TypeVar("_T")


class RunInterruptedError(Exception):
    """The user asked the run to stop: not an error, and not a success."""


class Stop:
    """The wish to stop, and waits that give way to it."""

    def __init__(self) -> None:
        self._requested = asyncio.Event()

    @property
    def is_requested(self) -> bool:
        """True once the user asked."""
        return self._requested.is_set()

    def request(self) -> None:
        """Asks the run to stop."""
        self._requested.set()

    async def or_stop(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The result of `work`; when the run is to stop first, `work` is cancelled and RunInterruptedError raised."""
        task = asyncio.ensure_future(work)
        stopped = asyncio.ensure_future(self._requested.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not self.is_requested:
                return task.result()
            if task.done() and task.exception() is not None:
                return task.result()  # what went wrong says more than the wish to stop
            raise RunInterruptedError
        finally:
            for waiting in (task, stopped):
                waiting.cancel()
            await asyncio.gather(task, stopped, return_exceptions=True)

    @contextlib.contextmanager
    def on_signals(self, *, say: Callable[[str], None]) -> Iterator[None]:
        """Within the block, SIGINT and SIGTERM stop the run: the first asks, the second ends the process at once.

        What ends with this process when it is killed (learner, generator, boxes: each sees its input end) ends then
        too; nothing is saved.
        """
        loop = asyncio.get_running_loop()
        first = -_SAME_PRESS_S

        def on_signal() -> None:
            nonlocal first
            if not self.is_requested:
                first = time.monotonic()
                self.request()
                say("stopping: a step in progress ends, a checkpoint is written; once more stops at once")
            elif time.monotonic() - first > _SAME_PRESS_S:
                print_in_time("stopped at once", to_stderr=True)
                os._exit(EXIT_INTERRUPTED)

        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, on_signal)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

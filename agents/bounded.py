"""Waiting for code that may hang: each call has a limit, and an end even where it does not heed its cancellation."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_ResultT = TypeVar("_ResultT")
_LOG = logging.getLogger(__name__)
_HEED_S = 2.0
_SHORTEST_WAIT_S = 0.05
_abandoned: set[asyncio.Task[Any]] = set()


class DeadlinePassed(Exception):  # noqa: N818 - it is what happened, and becomes data
    """A call did not end within its limit, and was cancelled."""


async def bounded(
    coroutine: Coroutine[Any, Any, _ResultT],
    *,
    limit_s: float,
    what: str,
    stood_still_s: Callable[[], float] = lambda: 0.0,
) -> _ResultT:
    """The result of `coroutine`, run as a task of its own.

    Waits for the task; its end, `limit_s` or a cancellation unblocks it. A task that does not end within two
    seconds of its cancellation is left to itself, and said. The seconds that `stood_still_s` tells do not count.

    Raises:
        DeadlinePassed: it did not end within `limit_s`.
        RuntimeError: it ended as cancelled, although nobody cancelled it here.
    """
    task = asyncio.create_task(coroutine)
    try:
        done, _ = await asyncio.wait((task,), timeout=max(limit_s, 0.0))
        counted_s = 0.0
        while not done and (more_s := stood_still_s() - counted_s) > 0:
            counted_s += more_s
            done, _ = await asyncio.wait((task,), timeout=max(more_s, _SHORTEST_WAIT_S))
    except asyncio.CancelledError:
        await _cancel(task, what)
        raise
    if not done:
        await _cancel(task, what)
        raise DeadlinePassed(f"{what} did not end within {limit_s:.3g} s")
    if task.cancelled():
        raise RuntimeError(f"{what} cancelled itself")
    return task.result()


async def _cancel(task: asyncio.Task[Any], what: str) -> None:
    task.cancel()
    await asyncio.wait((task,), timeout=_HEED_S)
    if task.done():
        _ = task.cancelled() or task.exception()  # looked at, so that the loop does not report it
        return
    _LOG.error("%s does not heed its cancellation; it is left to itself", what)
    _abandoned.add(task)
    task.add_done_callback(_forget)


def _forget(task: asyncio.Task[Any]) -> None:
    _abandoned.discard(task)
    _ = task.cancelled() or task.exception()


class EpisodeClock:
    """An episode's time. It stands still while its request is queued or paused.

    >>> clock = EpisodeClock(limit_s=10.0)
    >>> 9.0 < clock.remaining_s <= 10.0
    True
    """

    def __init__(self, *, limit_s: float) -> None:
        """Starts now; `limit_s` is how long the episode may take."""
        self._end_s = time.monotonic() + limit_s

    @property
    def remaining_s(self) -> float:
        """What is left, in seconds; below zero when it has run out."""
        return self._end_s - time.monotonic()

    def credit(self, waited_s: float) -> None:
        """Gives back time that a request spent waiting; a negative figure counts as none."""
        self._end_s += max(waited_s, 0.0)

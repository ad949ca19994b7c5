"""`CallOrder`: calls that run one after the other, in the order in which they were submitted."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from driftgym.errors import NotDoneError

_T = TypeVar("_T")


class CallOrder:
    """Runs what is submitted, one call at a time.

    Consumes calls; waits for the call before, which its own deadline ends; gives a future for each at once. A call that
    raises fails its own future and leaves the others alone. Whoever stops waiting for a future, or is cancelled while
    waiting, takes nothing back: what was submitted runs, so that no call runs without those before it.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    def submit(self, call: Callable[[], Awaitable[_T]], *, name: str, is_repeated: bool = False) -> asyncio.Future[_T]:
        """Lets `call` run after all that was submitted before.

        Args:
            call: what is to be done.
            name: in the errors of calls that are not done.
            is_repeated: a later call says again what goes wrong in this one. Of any other call, an error that nobody
                asked for is logged by asyncio when its future is gone; not so a NotDoneError, which repeats a cause.
        """
        task = asyncio.create_task(self._run(call, name), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        future = asyncio.shield(task)

        def look(done: asyncio.Future[_T]) -> None:
            if not done.cancelled() and (is_repeated or isinstance(task.exception(), NotDoneError)):
                done.exception()  # counts as asked for

        future.add_done_callback(look)
        return future

    async def _run(self, call: Callable[[], Awaitable[_T]], name: str) -> _T:
        async with self._turn:
            if self._is_closed:
                raise NotDoneError(f"{name} was not done: the learner was closed before its turn came")
            return await call()

    @property
    def is_followed(self) -> bool:
        """Within a call that runs: true when another one waits for its end."""
        return sum(not task.done() for task in self._tasks) > 1

    def stop(self) -> None:
        """Calls that have not begun are not done; the one that runs goes on."""
        self._is_closed = True

    async def settle(self) -> None:
        """Waits until the call that runs has ended, by itself or by the end of what does it; after `stop`."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

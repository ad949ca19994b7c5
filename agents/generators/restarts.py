"""New engines in the place of lost ones, and the tasks that a pool leaves to run beside its callers."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from driftgym.agents.generators.base import Generator
from driftgym.errors import GeneratorError

Restart = Callable[[], Awaitable[Generator]]
"""Starts an engine with the latest published weights."""

OnEvent = Callable[[str, str], None]
"""Takes the name of what happened (one of those below), and a line that tells it to people."""
LOST = "generator_lost"
RESTARTED = "generator_restarted"
NOT_RESTARTED = "generator_not_restarted"
BEHIND = "generator_behind"
RETURNED = "generator_returned"
JOINED = "generator_joined"
LEFT = "generator_left"


class Background:
    """Tasks that nobody waits for until the end. None of them raises."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        """`on_end` is called at the end of each task."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_end = on_end

    @property
    def is_busy(self) -> bool:
        """True while a task runs."""
        return bool(self._tasks)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs `work` as a task."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._on_end()

    def cancel(self) -> None:
        """Cancels all tasks."""
        for task in self._tasks:
            task.cancel()

    async def wait(self) -> None:
        """Waits for the tasks that run now."""
        if self._tasks:
            await asyncio.wait(self._tasks)


class Restarts:
    """Starts engines in the place of lost ones, a bounded number of times."""

    def __init__(
        self,
        restart: Restart | None,
        *,
        timeout_s: float,
        max_restarts: int,
        let_in: Callable[[Generator], Awaitable[None]],
        on_event: OnEvent,
        on_end: Callable[[], None],
    ) -> None:
        """Starts nothing yet.

        Args:
            restart: starts an engine; None starts none.
            timeout_s: bounds one start, `let_in` included.
            max_restarts: so many starts in all, failed ones included.
            let_in: takes the new engine over; when it raises, the engine is closed.
            on_event: told of a start that failed.
            on_end: called when a replacement has come, or will not.
        """
        self._restart = restart
        self._timeout_s = timeout_s
        self._num_left = 0 if restart is None else max_restarts
        self._let_in = let_in
        self._on_event = on_event
        self.tasks = Background(on_end)
        """The replacements under way."""

    def replace(self) -> None:
        """Starts an engine in the place of one, beside the caller; nothing happens when no start is left."""
        if self._num_left:
            self.tasks.start(self._start_another())

    async def _start_another(self) -> None:
        """Asks `restart` for an engine until one comes, and has it let in."""
        while self._num_left:
            self._num_left -= 1
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._start_and_let_in()
                return
            except Exception as error:  # a background task: those who wait learn of it by finding no engine
                reason = str(error) or type(error).__name__
                self._on_event(NOT_RESTARTED, f"no generator could be started in the place of a lost one: {reason}")

    async def _start_and_let_in(self) -> None:
        assert self._restart is not None
        generator = await self._restart()
        try:
            await self._let_in(generator)
        except BaseException:
            await asyncio.shield(close_quietly(generator))
            raise


async def close_quietly(generator: Generator) -> None:
    """Closes an engine that may be gone."""
    with contextlib.suppress(GeneratorError):
        await generator.close()

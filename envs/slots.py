"""`EnvSlots`: a bounded number of environments, each playing one episode at a time, reused from one to the next."""

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from driftgym.envs.base import ToolEnv
from driftgym.errors import EnvError

_logger = logging.getLogger(__name__)


class EnvSlots:
    """Leases environments. Made lazily; at most `num_slots` exist and are not being closed.

    A lease waits for a free slot: for another lease to end. The caller bounds that wait.
    """

    def __init__(
        self,
        make: Callable[[], ToolEnv | Awaitable[ToolEnv]],
        *,
        num_slots: int,
        close_s: float = 10.0,
    ) -> None:
        """No environment yet.

        Args:
            make: a new environment.
            num_slots: how many may play at once.
            close_s: bounds the closing of one environment, and that of all.
        """
        if num_slots < 1:
            raise ValueError(f"EnvSlots: num_slots must be at least 1, got {num_slots}")
        self._make = make
        self._close_s = close_s
        self._free = asyncio.Semaphore(num_slots)
        self._idle: list[ToolEnv] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @contextlib.asynccontextmanager
    async def lease(self) -> AsyncIterator[ToolEnv]:
        """An environment for one episode, nobody else's until the block ends.

        When the block raises or is cancelled, or the environment says that it is broken, the environment is closed
        and the next lease of the slot makes a new one.

        Raises:
            EnvError: the slots are closed.
        """
        async with self._free:
            env = await self._take()
            is_sound = False
            try:
                yield env
                is_sound = not env.is_broken
            finally:
                if is_sound and not self._is_closed:
                    self._idle.append(env)
                else:
                    await self._discard(env)

    async def _take(self) -> ToolEnv:
        if self._is_closed:
            raise EnvError("environment slots: closed")
        if self._idle:
            return self._idle.pop()
        made = self._make()
        return await made if inspect.isawaitable(made) else made

    async def _discard(self, env: ToolEnv) -> None:
        """Closes `env`; that goes on when the waiting for it is cancelled, or runs past its time."""
        await asyncio.wait({self._start_closing(env)}, timeout=self._close_s)

    def _start_closing(self, env: ToolEnv) -> asyncio.Task[None]:
        task = asyncio.create_task(self._close_one(env))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    async def _close_one(self, env: ToolEnv) -> None:
        try:
            async with asyncio.timeout(self._close_s):
                await env.aclose()
        except Exception as error:  # the episode is over: its record stands, whatever the closing does
            _logger.warning("closing %s failed: %s: %s", type(env).__name__, type(error).__name__, error)

    async def close(self) -> None:
        """Closes the idle environments, and each leased one when its lease ends. Takes at most `close_s`."""
        self._is_closed = True
        while self._idle:
            self._start_closing(self._idle.pop())
        if self._closing:
            await asyncio.wait(set(self._closing), timeout=self._close_s)

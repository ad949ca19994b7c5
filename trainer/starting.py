"""What every part of a run is started with, and how parts are closed."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from driftgym.config import Limits
from driftgym.trainer.lineage import Lineage
from driftgym.trainer.run_config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRequest:
    """What one life of a run starts from.

    >>> StartRequest.__slots__
    ('config', 'run_dir', 'lineage', 'incarnation', 'say', 'count')
    """

    config: RunConfig
    """The run."""
    run_dir: Path
    """Its folder."""
    lineage: Lineage
    """Where this life begins."""
    incarnation: int
    """Which life it is."""
    say: Callable[[str], None]
    """Takes news for people."""
    count: Callable[[str], None]
    """Counts an event by its name, for the summary."""


class Closer:
    """Closes parts in the reverse order of their start, each within `limits.close_s`; a failure is said, not raised."""

    def __init__(self, stack: contextlib.AsyncExitStack, *, limits: Limits, say: Callable[[str], None]) -> None:
        self._stack = stack
        self._limits = limits
        self._say = say

    def add(self, name: str, close: Callable[[], Awaitable[None]]) -> None:
        """`close` is called at the end."""
        self._stack.push_async_callback(self._close, name, close)

    async def _close(self, name: str, close: Callable[[], Awaitable[None]]) -> None:
        try:
            # Twice close_s: each part bounds its own closing, and is given up only when that fails.
            async with asyncio.timeout(2 * self._limits.close_s):
                await close()
        except Exception as error:  # the other parts must be closed, and the run's own error told
            self._say(f"closing {name} failed: {type(error).__name__}: {error}")

"""`SandboxProvider` of Docker boxes."""

import asyncio
from collections.abc import Sequence

from driftgym.errors import SandboxError
from driftgym.sandboxes import reaper
from driftgym.sandboxes.base import SandboxInfo, SandboxSpec
from driftgym.sandboxes.docker import DockerSandbox, Engine

_MAX_CONCURRENT_STARTS = 4
"""More at once make each slower, and none sooner, on an engine of few cores."""


class DockerProvider:
    """Starts boxes on one engine, which it owns; labels them with their owner and run."""

    def __init__(self, engine: Engine, *, run_id: str = "") -> None:
        self._engine = engine
        self._labels = {reaper.OWNER_LABEL: reaper.own_label(), reaper.RUN_LABEL: run_id}
        self._turns = asyncio.Semaphore(_MAX_CONCURRENT_STARTS)
        self._boxes: set[DockerSandbox] = set()
        self._is_closed = False

    @classmethod
    async def open(cls, *, timeout_s: float, run_id: str = "") -> "DockerProvider":
        """Connects to the engine. Raises SandboxError when none answers within `timeout_s`."""
        return cls(await Engine.connect(timeout_s=timeout_s), run_id=run_id)

    @property
    def kind(self) -> str:
        """`docker`."""
        return "docker"

    @property
    def engine(self) -> Engine:
        """The engine that it is connected to."""
        return self._engine

    async def sweep(self) -> int:
        """Removes the boxes whose owners are dead; how many. Raises SandboxError when the engine is gone."""
        return await reaper.sweep(self._engine)

    async def start(self, spec: SandboxSpec, *, timeout_s: float) -> DockerSandbox:
        """A new box. Few start at once; `timeout_s` counts from this one's turn. Raises SandboxError."""
        async with self._turns:
            if self._is_closed:
                raise SandboxError("the provider of boxes is closed")
            box = await DockerSandbox.start(self._engine, spec, labels=self._labels, timeout_s=timeout_s)
            if self._is_closed:
                await box.close()
                raise SandboxError("the provider of boxes was closed while a box started")
        self._boxes = {known for known in self._boxes if not known.is_closed} | {box}
        return box

    async def list(self) -> Sequence[SandboxInfo]:
        """Every box of driftgym's on this engine, of any owner. Raises SandboxError when the engine is gone."""
        return await reaper.list_boxes(self._engine)

    async def remove(self, sandbox_id: str) -> None:
        """Removes a box by force. Raises SandboxError when the engine is gone."""
        await self._engine.remove(sandbox_id)

    async def close(self) -> None:
        """Closes the boxes that are still there, waits for starts under way, which clean up after themselves, and
        ends the connection. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        await asyncio.gather(*(box.close() for box in self._boxes))
        for _ in range(_MAX_CONCURRENT_STARTS):
            await self._turns.acquire()
        for _ in range(_MAX_CONCURRENT_STARTS):
            self._turns.release()  # whoever asks for a box from now on is refused
        await self._engine.close()

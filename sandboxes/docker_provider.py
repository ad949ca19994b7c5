"""`SandboxProvider` of Docker boxes."""

import asyncio
from collections.abc import Sequence

from driftgym.errors import SandboxError
from driftgym.sandboxes import reaper
from driftgym.sandboxes.base import SandboxInfo, SandboxSpec
from driftgym.sandboxes.docker import DockerSandbox, NoPythonError
from driftgym.sandboxes.docker_container import MissingImageError
from driftgym.sandboxes.docker_engine import Engine, ImageInfo
from driftgym.sandboxes.engine_sandbox import EngineSandbox
from driftgym.sandboxes.images import resolve_image

_MAX_CONCURRENT_STARTS = 8
"""More at once make each slower, and none sooner, on an engine of few cores."""
DockerBox = DockerSandbox | EngineSandbox


class DockerProvider:
    """Starts boxes on one engine, which it owns; labels them with their owner, run and lease.

    A box is served by the toolbox where its image holds a Python 3, and else by the engine's exec, unless the spec
    says which.
    """

    def __init__(self, engine: Engine, *, run_id: str = "") -> None:
        self._engine = engine
        self._run_id = run_id
        self._turns = asyncio.Semaphore(_MAX_CONCURRENT_STARTS)
        self._boxes: set[DockerBox] = set()
        self._images: dict[SandboxSpec, ImageInfo] = {}
        self._ids_without_python: set[str] = set()
        self._starts: set[asyncio.Timeout] = set()
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

    async def start(self, spec: SandboxSpec, *, timeout_s: float) -> DockerBox:
        """A new box. Few start at once; `timeout_s` counts from this one's turn. Raises SandboxError."""
        async with self._turns:
            self._check_open()
            try:
                async with asyncio.timeout(timeout_s) as deadline:
                    self._starts.add(deadline)
                    box = await self._start(spec, timeout_s=timeout_s)
            except TimeoutError:
                self._check_open()
                raise SandboxError(f"the box did not start within {timeout_s} s") from None
            finally:
                self._starts.discard(deadline)
            if self._is_closed:  # at the moment at which it had started
                await box.close()
                self._check_open()
            self._boxes = {known for known in self._boxes if not known.is_closed} | {box}
        return box

    def _check_open(self) -> None:
        if self._is_closed:
            raise SandboxError("the provider of boxes is closed")

    async def _start(self, spec: SandboxSpec, *, timeout_s: float) -> DockerBox:
        image = await self._image(spec)
        try:
            return await self._start_of(image, spec, timeout_s=timeout_s)
        except MissingImageError:
            self._images.pop(spec, None)  # it was replaced, or removed: the next start looks for it anew
            raise

    async def _image(self, spec: SandboxSpec) -> ImageInfo:
        """The spec's image, looked up once: all boxes of a spec are made of the same one."""
        if spec not in self._images:
            name = await resolve_image(self._engine, spec)
            image = await self._engine.image(name)
            if image is None:
                raise MissingImageError(name)
            self._images[spec] = image
        return self._images[spec]

    async def _start_of(self, image: ImageInfo, spec: SandboxSpec, *, timeout_s: float) -> DockerBox:
        labels = reaper.labels_of(spec, run_id=self._run_id)
        has_python = image.image_id not in self._ids_without_python
        if spec.toolbox == "python" or (spec.toolbox == "auto" and has_python):
            try:
                return await DockerSandbox.start(self._engine, spec, image=image, labels=labels, timeout_s=timeout_s)
            except NoPythonError:
                if spec.toolbox == "python":
                    raise
                self._ids_without_python.add(image.image_id)
        if spec.egress:
            raise SandboxError(f"image {image.name} holds no python3, without which no egress is let through")
        return await EngineSandbox.start(self._engine, spec, image=image, labels=labels, timeout_s=timeout_s)

    async def list(self) -> Sequence[SandboxInfo]:
        """Every box of driftgym's on this engine, of any owner. Raises SandboxError when the engine is gone."""
        return await reaper.list_boxes(self._engine)

    async def remove(self, sandbox_id: str) -> None:
        """Removes a box by force. Raises SandboxError when the engine is gone."""
        await self._engine.remove(sandbox_id)

    async def close(self) -> None:
        """Closes the boxes that are still there, cuts short the starts under way, which clean up after themselves,
        and ends the connection. Safe to call twice; takes some seconds at most, also where the engine hangs."""
        if self._is_closed:
            return
        self._is_closed = True
        now = asyncio.get_running_loop().time()
        for start in self._starts:
            start.reschedule(now)
        await asyncio.gather(*(box.close() for box in self._boxes))
        for _ in range(_MAX_CONCURRENT_STARTS):
            await self._turns.acquire()
        for _ in range(_MAX_CONCURRENT_STARTS):
            self._turns.release()  # whoever asks for a box from now on is refused
        await self._engine.close()

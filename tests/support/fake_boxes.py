"""A provider of boxes in memory that starts, cleans and closes them slowly, badly or not at all, as a test says, and
that counts what a pool must bound."""

import asyncio
from collections.abc import Callable

from driftgym.errors import SandboxError
from driftgym.sandboxes.base import ExecResult, SandboxSpec
from driftgym.sandboxes.scripted import ScriptedSandbox


class FakeBox(ScriptedSandbox):
    """A box that can die, and that remembers who used it."""

    def __init__(self, yard: "FakeYard", *, number: int, spec: SandboxSpec) -> None:
        super().__init__(sandbox_id=f"box-{number}")
        self.spec = spec
        self.is_dead = False
        self.fails_reset = False
        self.num_resets = 0
        self._yard = yard

    async def ping(self, *, timeout_s: float) -> None:
        """As the contract says."""
        await self._yard.pause("ping")
        self._check_alive()

    async def exec(self, command: object, **options: object) -> ExecResult:
        """Does nothing; `die` makes the box die."""
        self._check_alive()
        await self._yard.pause("exec")
        if command == "die":
            self.is_dead = True
        self._check_alive()
        return ExecResult(exit_code=0, stdout="", stderr="", duration_s=0.0)

    async def reset(self, *, keep_files: bool = False) -> None:
        """As the contract says."""
        await self._yard.pause("reset")
        self._check_alive()
        if self.fails_reset:
            raise SandboxError("not clean")
        self.num_resets += 1
        files = dict(self.files) if keep_files else {}
        await super().reset()
        self.files.update(files)

    async def close(self) -> None:
        """Goes on when its caller is cancelled, as those of real boxes."""
        if not self.is_closed:
            await super().close()
            self._yard.closing.add(closing := asyncio.ensure_future(self._leave()))
            closing.add_done_callback(self._yard.closing.discard)
            await asyncio.shield(closing)

    async def _leave(self) -> None:
        await self._yard.pause("close")
        self._yard.forget(self)

    def _check_alive(self) -> None:
        if self.is_dead or self.is_closed:
            raise SandboxError(f"{self.sandbox_id} is gone")


class FakeYard:
    """The provider. What it does waits in `pause`, which a test may fill with what it likes."""

    kind = "fake"

    def __init__(self) -> None:
        self.boxes: list[FakeBox] = []
        self.live: list[FakeBox] = []
        self.closing: set[asyncio.Task[None]] = set()
        self.errors: list[Exception] = []
        """What the next starts raise."""
        self.num_starts = 0
        self.num_starting = 0
        self.starting_bytes = 0
        self.most_starting = self.most_boxes = self.most_bytes = 0
        self.gates: dict[str, asyncio.Event] = {}
        """What has to be set before an act of that name goes on."""
        self.num_steps: Callable[[str], int] = lambda act: 0
        """How many passes of the loop an act takes."""
        self.is_closed = False

    async def pause(self, act: str) -> None:
        """Waits as long as the test says."""
        for _ in range(self.num_steps(act)):
            await asyncio.sleep(0)
        if act in self.gates:
            await self.gates[act].wait()

    def hold(self, act: str) -> asyncio.Event:
        """From now on acts of that name wait for the event."""
        self.gates[act] = asyncio.Event()
        return self.gates[act]

    def release(self) -> None:
        """Nothing waits any more."""
        for gate in self.gates.values():
            gate.set()
        self.gates.clear()

    async def start(self, spec: SandboxSpec, *, timeout_s: float) -> FakeBox:
        """As the contract says; leaves nothing when it is cancelled."""
        self.num_starts += 1
        self.num_starting += 1
        self.starting_bytes += spec.memory_bytes
        self._measure()
        try:
            async with asyncio.timeout(timeout_s):
                await self.pause("start")
            if self.errors:
                raise self.errors.pop(0)
            box = FakeBox(self, number=len(self.boxes), spec=spec)
            self.boxes.append(box)
            self.live.append(box)
        except TimeoutError:
            raise SandboxError(f"the box did not start within {timeout_s} s") from None
        finally:
            self.num_starting -= 1
            self.starting_bytes -= spec.memory_bytes
        return box

    def forget(self, box: FakeBox) -> None:
        """The box is gone."""
        self.live.remove(box)

    async def list(self) -> list[object]:
        """Nothing."""
        return []

    async def remove(self, sandbox_id: str) -> None:
        """Closes a box."""
        for box in self.live:
            if box.sandbox_id == sandbox_id:
                await box.close()

    async def close(self) -> None:
        """Waits for what is being closed."""
        while self.closing:
            await asyncio.wait(self.closing)
        self.is_closed = True

    def _measure(self) -> None:
        self.most_starting = max(self.most_starting, self.num_starting)
        self.most_boxes = max(self.most_boxes, self.num_starting + len(self.live))
        self.most_bytes = max(self.most_bytes, self.starting_bytes + sum(box.spec.memory_bytes for box in self.live))

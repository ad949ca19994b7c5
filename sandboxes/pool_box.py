"""What a `SandboxPool` hands out: a box that is given back instead of removed."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from driftgym.errors import SandboxError
from driftgym.sandboxes.base import MIB, WORK_DIR, ExecResult, Reply, Sandbox, SandboxProcess, SandboxSpec
from driftgym.sandboxes.pool_state import Slot
from driftgym.sandboxes.pool_stock import Stock, is_clean_again

Reuse = Literal["fresh", "reset"]
_ResultT = TypeVar("_ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    """What a box is lent for.

    >>> LeaseTerms(spec=SandboxSpec(), reuse="reset", timeout_s=60.0, lease_s=3600.0).reuse
    'reset'
    """

    spec: SandboxSpec
    """What it is made of."""
    reuse: Reuse
    """How it becomes clean."""
    timeout_s: float
    """How long a new box is waited for, in seconds."""
    lease_s: float
    """After how many seconds without a reset it is taken back."""


class PooledSandbox:
    """A box on lease; see `Sandbox`.

    Each call goes to the box behind it. A call that raised SandboxError, or was cancelled, makes that box dirty: it
    goes on serving its holder, and is thrown away instead of handed out again. When the lease is over (given back,
    taken back at its deadline, pool closed), every call raises SandboxError that says so, also one that is under way.
    """

    def __init__(
        self, *, stock: Stock, slot: Slot, terms: LeaseTerms, on_end: "Callable[[PooledSandbox], None]"
    ) -> None:
        self._stock = stock
        self._slot: Slot | None = slot
        self._terms = terms
        self._on_end = on_end
        self._sandbox_id = slot.box.sandbox_id
        self._turn = asyncio.Lock()
        self._over: str | None = None
        self._timer = self._start_timer()

    @property
    def sandbox_id(self) -> str:
        """What the provider knows the box by; with `fresh`, another one after each reset."""
        return self._sandbox_id

    @property
    def reuse(self) -> Reuse:
        """How `reset` makes it clean: `fresh` by another box, `reset` by emptying this one."""
        return self._terms.reuse

    @property
    def is_closed(self) -> bool:
        """True when the lease is over."""
        return self._over is not None

    async def ping(self, *, timeout_s: float) -> None:
        """Waits for a sign of life. Raises SandboxError."""
        await self._call(lambda box: box.ping(timeout_s=timeout_s))

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str = WORK_DIR,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float = 10.0,
        max_output_bytes: int | None = None,
    ) -> ExecResult:
        """Runs an argv, or a shell line when `command` is a string. Raises SandboxError when the box is gone."""
        return await self._call(
            lambda box: box.exec(
                command, cwd=cwd, env=env, stdin=stdin, timeout_s=timeout_s, max_output_bytes=max_output_bytes
            )
        )

    async def spawn(
        self, argv: Sequence[str], *, cwd: str = WORK_DIR, env: Mapping[str, str] | None = None
    ) -> "PooledProcess":
        """Starts a long-lived process. Raises SandboxError when the box is gone or the program cannot be started."""
        slot = self._held()
        process = await self._call(lambda box: box.spawn(argv, cwd=cwd, env=env))
        return PooledProcess(lease=self, slot=slot, process=process)

    async def read_file(self, path: str, *, max_bytes: int = 1 * MIB) -> bytes:
        """The content of a file. Raises FileNotFoundError, ValueError (too long), SandboxError (the box is gone)."""
        return await self._call(lambda box: box.read_file(path, max_bytes=max_bytes))

    async def write_file(self, path: str, content: bytes) -> None:
        """Writes a file, and the folders above it. Raises OSError, or SandboxError when the box is gone."""
        await self._call(lambda box: box.write_file(path, content))

    async def upload(self, local: Path, path: str, *, timeout_s: float = 60.0) -> None:
        """Copies a folder into the box. Raises NotADirectoryError, OSError, or SandboxError when the box is gone."""
        await self._call(lambda box: box.upload(local, path, timeout_s=timeout_s))

    async def download(
        self, path: str, local: Path, *, max_bytes: int = 64 * MIB, max_files: int = 10_000, timeout_s: float = 60.0
    ) -> None:
        """Copies a folder out of the box. Raises FileNotFoundError, ValueError (too much), OSError, SandboxError."""
        await self._call(
            lambda box: box.download(path, local, max_bytes=max_bytes, max_files=max_files, timeout_s=timeout_s)
        )

    async def reset(self, *, keep_files: bool = False) -> None:
        """Makes the box as new, and renews the lease.

        With `fresh` it is thrown away for a new one. With `reset` it is cleaned and verified; one that does not come
        back clean, is dirty, or has calls under way is thrown away too. Waits for a box as long as the start did.
        With `keep_files` only the processes are killed, in either case.

        Raises:
            SandboxError: the lease is over, or there is no new box; a later reset may bring one.
        """
        if keep_files:
            await self._call(lambda box: box.reset(keep_files=True))
        else:
            async with self._turn:
                await self._renew_box()
        self._timer.cancel()
        self._timer = self._start_timer()

    async def close(self) -> None:
        """Gives the box back at once; what has to be done with it goes on in the background. Safe to call twice."""
        self.end("it was given back", is_sound=True)

    def end(self, reason: str, *, is_sound: bool) -> None:
        """Ends the lease. `is_sound` says that the box may come back into service if it is clean."""
        if self._over is not None:
            return
        self._over = reason
        self._timer.cancel()
        self._on_end(self)
        slot, self._slot = self._slot, None
        if slot is None:  # a reset has it, and gives it back
            return
        if is_sound and self._may_reset(slot):
            self._stock.recycle(slot)
        else:
            self._stock.discard(slot)

    async def run(
        self, slot: Slot, work: Callable[[], Awaitable[_ResultT]], *, is_of_process: bool = False
    ) -> _ResultT:
        """What `work` returns, which concerns the box of `slot`.

        Raises:
            SandboxError: the box is gone, or this lease does not have it any more when `work` has ended.
        """
        slot.num_calls += 1
        try:
            result = await work()
        except SandboxError:
            slot.is_dirty = slot.is_dirty or not is_of_process  # a process that has ended harms no box
            self._check_holds(slot)
            raise
        except asyncio.CancelledError:
            slot.is_dirty = slot.is_dirty or not is_of_process  # what it would have done may still be done
            raise
        finally:
            slot.num_calls -= 1
        self._check_holds(slot)
        return result

    def holds(self, slot: Slot) -> bool:
        """True while the box of `slot` is this lease's."""
        return self._slot is slot

    async def _call(self, work: Callable[[Sandbox], Awaitable[_ResultT]]) -> _ResultT:
        slot = self._held()
        return await self.run(slot, lambda: work(slot.box))

    def _held(self) -> Slot:
        if self._slot is None:
            raise SandboxError(f"box {self.sandbox_id}: {self._over or 'there is none: a reset goes on, or failed'}")
        return self._slot

    def _check_holds(self, slot: Slot) -> None:
        if self._slot is not slot:
            raise SandboxError(f"box {slot.box.sandbox_id}: {self._over or 'it was reset'} while a call went on")

    def _may_reset(self, slot: Slot) -> bool:
        return self._terms.reuse == "reset" and not slot.is_dirty and slot.num_calls == 0

    async def _renew_box(self) -> None:
        """While it goes on, the lease has no box: what is done in a box meanwhile would escape its verification."""
        self._check_not_over()
        slot, self._slot = self._slot, None
        try:
            if slot is not None and not (self._may_reset(slot) and await is_clean_again(slot.box)):
                self._stock.discard(slot)
                slot = None
            if slot is None:
                slot = await self._stock.take(self._terms.spec, timeout_s=self._terms.timeout_s)
            self._check_not_over()
        except BaseException:
            if slot is not None:
                self._stock.discard(slot)
            raise
        self._slot = slot
        self._sandbox_id = slot.box.sandbox_id

    def _check_not_over(self) -> None:
        if self._over is not None:
            raise SandboxError(f"box {self.sandbox_id}: {self._over}")

    def _start_timer(self) -> asyncio.TimerHandle:
        lease_s = self._terms.lease_s
        reason = f"it was taken back, since it was not reset within its lease of {lease_s:g} s"
        return asyncio.get_running_loop().call_later(lease_s, lambda: self.end(reason, is_sound=False))


class PooledProcess:
    """A long-lived process in a box on lease; see `SandboxProcess`. It ends with the lease, or at a reset."""

    def __init__(self, *, lease: PooledSandbox, slot: Slot, process: SandboxProcess) -> None:
        self._lease = lease
        self._slot = slot
        self._process = process

    @property
    def is_alive(self) -> bool:
        """True while the process can be asked."""
        return self._lease.holds(self._slot) and self._process.is_alive

    async def ask(self, line: str, *, timeout_s: float, max_reply_bytes: int = 64 * 1024) -> Reply:
        """Writes `line` and returns the next line of its output. Raises as every `SandboxProcess` does."""
        if not self._lease.holds(self._slot):
            raise SandboxError(f"box {self._slot.box.sandbox_id}: the process has ended with its lease, or at a reset")
        return await self._lease.run(
            self._slot,
            lambda: self._process.ask(line, timeout_s=timeout_s, max_reply_bytes=max_reply_bytes),
            is_of_process=True,
        )

    async def kill(self) -> None:
        """Kills the process tree. Nothing happens when it has already ended."""
        if self._lease.holds(self._slot):
            await self._lease.run(self._slot, self._process.kill, is_of_process=True)

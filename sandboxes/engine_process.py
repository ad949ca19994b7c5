"""A line process that the Docker engine runs: see `SandboxProcess`."""

import asyncio
from typing import Any

from driftgym.errors import SandboxError
from driftgym.sandboxes.base import Reply
from driftgym.sandboxes.engine_exec import Command, Execution, Runner
from driftgym.sandboxes.engine_guard import Guard
from driftgym.sandboxes.engine_stream import STDOUT
from driftgym.sandboxes.toolbox_sandbox import decode_output

_START_TIMEOUT_S = 30.0
_MAX_EARLY_BYTES = 64 * 1024
_CHECK_S = 1.0
"""A process that has ended may have left another that holds its output: it is looked for so often during a question."""


class LineReader:
    """Cuts output into lines: keeps what is asked for up to a limit, and of what nobody has asked for a little."""

    def __init__(self) -> None:
        self.early = bytearray()
        """What came after the last answer; not more than one piece beyond what `is_full` says."""
        self._line = bytearray()
        self._num_dropped = 0
        self._limit = 0
        self._answer: asyncio.Future[tuple[bytes, int]] | None = None

    @property
    def is_full(self) -> bool:
        """True when no more should be read before the next question."""
        return self._answer is None and len(self.early) >= _MAX_EARLY_BYTES

    def question(self, *, max_bytes: int) -> "asyncio.Future[tuple[bytes, int]]":
        """The next line, cut at `max_bytes`, and how many bytes of it were dropped."""
        self._limit = max_bytes
        answer: asyncio.Future[tuple[bytes, int]] = asyncio.get_running_loop().create_future()
        self._answer = answer
        early, self.early = self.early, bytearray()
        self.feed(memoryview(early))
        return answer

    def feed(self, data: "memoryview[int]") -> None:
        """Takes output."""
        if self._answer is None:
            self.early += data
            return
        text = bytes(data)
        line, end, rest = text.partition(b"\n")
        kept = line[: max(0, self._limit - len(self._line))]
        self._line += kept
        self._num_dropped += len(line) - len(kept)
        if end:
            if not self._answer.done():
                self._answer.set_result((bytes(self._line), self._num_dropped))
            self._answer, self._num_dropped = None, 0
            self._line.clear()
            self.early += rest


class EngineProcess:
    """A long-lived process in a box without Python. Its standard error is not attached, and goes nowhere."""

    def __init__(self, *, runner: Runner, guard: Guard) -> None:
        self._runner = runner
        self._guard = guard
        self._reader = LineReader()
        self._execution: Execution | None = None
        self._is_alive = True
        self._turn = asyncio.Lock()

    @property
    def is_alive(self) -> bool:
        """True while the process can be asked."""
        has_ended = self._execution is not None and self._execution.stream.ended.done()
        return self._is_alive and not has_ended and not self._guard.lost.done()

    async def start(self, command: Command) -> None:
        """Starts the program. Raises SandboxError when that cannot be done."""
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                self._execution = await self._runner.start(
                    command, self._take, streams=("Stdout",), is_full=lambda: self._reader.is_full
                )
        except TimeoutError:
            await self._runner.wait_endings()
            raise SandboxError(f"{self._guard.name}: {command.argv[0]} did not start in time") from None

    def _take(self, kind: int, data: "memoryview[int]") -> None:
        if kind == STDOUT:
            self._reader.feed(data)

    async def ask(self, line: str, *, timeout_s: float, max_reply_bytes: int = 64 * 1024) -> Reply:
        """Writes `line` and returns the next line of its standard output; questions wait for each other.

        Raises:
            ValueError: `line` holds more than one line.
            TimeoutError: no whole line within `timeout_s`; the process tree has been killed.
            SandboxError: the process or its box is gone.
        """
        if "\n" in line:
            raise ValueError(f"a question is one line, this holds a line break: {line[:80]!r}")
        async with self._turn:
            if not self.is_alive or self._execution is None:
                raise SandboxError(f"{self._guard.name}: the process has ended")
            self._is_alive = False  # unless it answers
            try:
                async with asyncio.timeout(timeout_s):
                    text, num_dropped = await self._answer(self._execution, line, max_reply_bytes)
            except TimeoutError:
                await self._end()
                raise TimeoutError(f"{self._guard.name}: no answer within {timeout_s} s") from None
            except BaseException:  # its answer would be taken for that of the next question
                self._runner.end_later(self._execution)
                raise
            self._is_alive = True
        shown = decode_output(text, is_cut=num_dropped > 0)
        return Reply(text=shown, truncated=num_dropped > 0, num_dropped_bytes=num_dropped)

    async def _answer(self, execution: Execution, line: str, max_reply_bytes: int) -> tuple[bytes, int]:
        answer = self._reader.question(max_bytes=max_reply_bytes)
        stream = execution.stream
        stream.write(line.encode("utf-8", "replace") + b"\n")
        stream.resume()
        waiting: set[asyncio.Future[Any]] = {answer, stream.ended}
        while not answer.done():
            await asyncio.wait(waiting, timeout=_CHECK_S, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                break
            if stream.ended.done() or (await execution.state()).has_ended:
                await execution.drain()
                if not answer.done():
                    self._guard.check()
                    raise SandboxError(f"{self._guard.name}: the process has ended")
        if self._reader.is_full:
            stream.pause()
        return answer.result()

    async def kill(self) -> None:
        """Kills the process tree. Nothing happens when it has already ended."""
        if self._is_alive and not self._guard.lost.done():
            self._is_alive = False
            await self._end()

    def mark_ended(self) -> None:
        """Called when everything in the box has been killed."""
        self._is_alive = False
        if self._execution is not None:
            self._runner.forget(self._execution)

    async def _end(self) -> None:
        assert self._execution is not None
        self._runner.end_later(self._execution)
        await self._runner.wait_endings()

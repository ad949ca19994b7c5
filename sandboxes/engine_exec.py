"""Commands in a container by the Docker engine's exec: started, watched, and ended with all that came from them.

What the engine does not do is done here: a command that nobody waits for any more is killed, its answer does not wait
for what it left in the background, and its exit code is told apart from the engine's reasons for not starting it.
"""

import asyncio
import contextlib
import os
import posixpath
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from driftgym.errors import SandboxError
from driftgym.sandboxes.base import WORK_DIR
from driftgym.sandboxes.docker_engine import Engine
from driftgym.sandboxes.docker_request import RefusedError
from driftgym.sandboxes.engine_guard import Guard
from driftgym.sandboxes.engine_stream import ExecStream, OnOutput

NUM_STARTS = 2
"""Commands that start at once in a box. The engine's program that starts one lives in the box's limits meanwhile."""
_FIRST_TAG = 1 << 20
_FIRST_PAUSE_S = 0.005
_MAX_PAUSE_S = 0.5
_QUIET_S = 0.25
"""A command has ended, and something that it started still holds its output: what is silent for so long is through."""
_DRAIN_S = 1.0
_KILL_TIMEOUT_S = 30.0
_STATE_TIMEOUT_S = 20.0
_MAX_STRING_BYTES = 128 * 1024 - 1
_MAX_STRINGS_BYTES = 2 * 1024 * 1024 - 128 * 1024
"""What the kernel takes as one argument, and as all of them and the environment, under the usual limit of the stack."""
_SIGNAL_BASE = 128
_NUM_SIGNALS = 64
_START_CODES = (126, 127)
_PREFIX = re.compile(r"^(OCI runtime exec failed|exec failed|unable to start container process): ")
_LATE_REASON = re.compile(rb"exec [^\n]*: (exec format error|argument list too long|no such file or directory)\n")
"""What the engine's program prints in the command's place, with exit code 1, when the kernel refuses it at the end."""
_MAX_REASON_BYTES = 4096

Feed = Callable[[ExecStream], Awaitable[None]]


class StartError(SandboxError):
    """The box is there, and the engine could not start a command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecState:
    """What the engine says of a command.

    >>> ExecState(has_started=True, exit_code=None).has_ended
    False
    """

    has_started: bool
    """True from the moment on when its program runs."""
    exit_code: int | None
    """The engine's exit code; None before its end."""

    @property
    def has_ended(self) -> bool:
        """True when it has ended, or could not be started."""
        return self.exit_code is not None

    @property
    def outcome(self) -> int | None:
        """The exit code; negative is the signal that ended it, which the engine tells as 128 and its number."""
        if self.exit_code is None or not 0 < self.exit_code - _SIGNAL_BASE <= _NUM_SIGNALS:
            return self.exit_code
        return _SIGNAL_BASE - self.exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What is to be run.

    >>> Command.checked(["echo", "a"], cwd="sub", env={}).cwd == f"{WORK_DIR}/sub"
    True
    """

    argv: tuple[str, ...]
    """The program and its arguments."""
    cwd: str
    """Where it runs, absolute."""
    env: tuple[str, ...]
    """Added to the environment, as NAME=VALUE."""

    @classmethod
    def checked(cls, argv: Sequence[str], *, cwd: str, env: Mapping[str, str]) -> "Command":
        """A command that the engine and the kernel can take. Raises StartError for what they cannot."""
        settings = {"LANG": "C.UTF-8", "HOME": WORK_DIR, "TMPDIR": "/tmp", **env}
        strings = [*argv, cwd, *(f"{name}={value}" for name, value in settings.items())]
        try:
            sizes = [len(os.fsencode(text)) for text in strings]
            for text in strings:
                text.encode()  # the engine takes text
        except UnicodeEncodeError:
            raise StartError(f"{_shown(argv)}: holds what is no text") from None
        if any("\0" in text for text in strings):
            raise StartError(f"{_shown(argv)}: embedded null byte")
        if not argv or not argv[0]:
            raise StartError("cannot start: there is no program to start")
        if any(not name or "=" in name for name in settings):
            raise StartError("cannot start: a variable's name is empty, or holds '='")
        if max(sizes) > _MAX_STRING_BYTES or sum(sizes) + 9 * len(sizes) > _MAX_STRINGS_BYTES:
            raise StartError(f"{_shown(argv)}: Argument list too long")
        return cls(
            argv=tuple(argv),
            cwd=posixpath.join(WORK_DIR, cwd),
            env=tuple(f"{name}={value}" for name, value in settings.items()),
        )


def _shown(argv: Sequence[str]) -> str:
    shown = argv[0][:100].encode("utf-8", "replace").decode() if argv else ""
    return shown or "cannot start"


class Execution:
    """One command: its streams, its tag, and its state in the engine."""

    def __init__(self, *, engine: Engine, guard: Guard, exec_id: str, tag: int, stream: ExecStream) -> None:
        self._engine = engine
        self._guard = guard
        self._exec_id = exec_id
        self.tag = tag
        self.stream = stream

    async def state(self) -> ExecState:
        """Asks the engine. Raises SandboxError when the engine or the box is gone."""
        self._guard.check()
        path = f"/exec/{self._exec_id}/json"
        value = (await self._engine.request("GET", path, timeout_s=_STATE_TIMEOUT_S)).value
        code = value.get("ExitCode")
        return ExecState(
            has_started=bool(value.get("Pid")), exit_code=None if value.get("Running") or code is None else int(code)
        )

    async def wait(self, until: Callable[[ExecState], bool]) -> ExecState:
        """The first state that is as wanted, asked for at growing intervals, and at once when the streams end."""
        pause_s = _FIRST_PAUSE_S
        while not until(state := await self.state()):
            if self.stream.ended.done():
                await asyncio.sleep(pause_s)
            else:
                await asyncio.wait({self.stream.ended}, timeout=pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        return state

    async def drain(self) -> None:
        """Waits for the rest of the output of a command that has ended; bounded, since others may hold its pipes."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _DRAIN_S
        num_before = -1
        while num_before != self.stream.num_received and loop.time() < deadline:
            num_before = self.stream.num_received
            done, _ = await asyncio.wait({self.stream.ended}, timeout=_QUIET_S)
            if done:
                return


class Runner:
    """The commands of one container. Every one of them ends: by itself, at its deadline, or when it is cancelled."""

    def __init__(self, *, engine: Engine, container_id: str, uid: int, guard: Guard) -> None:
        self._engine = engine
        self._container_id = container_id
        self._uid = uid
        self._guard = guard
        self._next_tag = _FIRST_TAG
        self._turns = asyncio.Semaphore(NUM_STARTS)
        self._executions: set[Execution] = set()
        self._endings: set[asyncio.Task[None]] = set()
        guard.on_lost(self._hang_up)

    def _hang_up(self) -> None:
        """Wakes whoever waits for a command of a box that is gone."""
        for execution in list(self._executions):
            self.forget(execution)

    @contextlib.asynccontextmanager
    async def nothing_starts(self) -> AsyncIterator[None]:
        """Within the block no command starts but those that say so, and none that was given up is left."""
        for _ in range(NUM_STARTS):
            await self._turns.acquire()
        try:
            await self.wait_endings()
            yield
        finally:
            for _ in range(NUM_STARTS):
                self._turns.release()

    async def run(
        self, command: Command, *, timeout_s: float, feed: Feed | None, on_output: OnOutput, has_turn: bool = False
    ) -> ExecState | None:
        """Runs a command to its end; None when it was killed at its deadline. Cancelled, it is killed too.

        `feed` writes standard input, which ends with it. `has_turn` is for callers within `nothing_starts`.

        Raises:
            StartError: the engine could not start it.
            SandboxError: the box is gone.
        """
        try:
            async with asyncio.timeout(timeout_s):
                execution = await self.start(command, on_output, streams=("Stdout", "Stderr"), has_turn=has_turn)
                try:
                    state = await _finish(execution, feed)
                except BaseException:
                    self.end_later(execution)
                    raise
        except TimeoutError:
            await self.wait_endings()
            self._guard.check()
            return None
        self.forget(execution)
        return state

    async def start(
        self,
        command: Command,
        on_output: OnOutput,
        *,
        streams: Sequence[str],
        is_full: Callable[[], bool] = lambda: False,
        has_turn: bool = False,
    ) -> Execution:
        """A command that runs, or has ended. The caller ends it, or forgets it when it has ended.

        Its output is paused whenever `is_full` says so after a piece of it, also before this returns.

        Raises:
            StartError: the engine could not start it.
            SandboxError: the box is gone.
        """
        reason = bytearray()

        def take(kind: int, data: "memoryview[int]") -> None:
            reason.extend(data[: _MAX_REASON_BYTES - len(reason)])
            on_output(kind, data)
            if is_full():
                execution.stream.pause()

        async with contextlib.nullcontext() if has_turn else self._turns:
            self._guard.check()
            execution = await self._begin(command, take, streams)
            self._executions.add(execution)
            try:
                await self._wait_running(execution, reason)
            except BaseException:
                self.end_later(execution)
                raise
        return execution

    async def _begin(self, command: Command, on_output: OnOutput, streams: Sequence[str]) -> Execution:
        tag, self._next_tag = self._next_tag, self._next_tag + 1
        body: dict[str, Any] = {
            "User": f"{self._uid}:{tag}",
            "Cmd": list(command.argv),
            "WorkingDir": command.cwd,
            "Env": list(command.env),
            "Tty": False,
            "AttachStdin": True,
            **{f"Attach{name}": True for name in streams},
        }
        path = f"/containers/{self._container_id}/exec"
        try:
            exec_id = str((await self._engine.request("POST", path, body=body)).value["Id"])
        except RefusedError as error:
            raise self._refusal(error) from None
        stream = await ExecStream.open(
            socket_path=self._engine.socket_path,
            path=self._engine.path(f"/exec/{exec_id}/start"),
            body={"Detach": False, "Tty": False},
            on_output=on_output,
        )
        return Execution(engine=self._engine, guard=self._guard, exec_id=exec_id, tag=tag, stream=stream)

    async def _wait_running(self, execution: Execution, reason: bytearray) -> None:
        """Waits until the program runs. Raises StartError when it cannot."""
        try:
            await asyncio.shield(execution.stream.opened)
        except RefusedError as error:
            raise self._refusal(error) from None
        state = await execution.wait(lambda state: state.has_started or state.has_ended)
        if not state.has_started and state.exit_code in _START_CODES:
            await execution.drain()
            raise StartError(_words(bytes(reason)))

    def _refusal(self, error: RefusedError) -> SandboxError:
        """A bad request says something of the command, anything else that the container is not there."""
        if error.status == 400:
            return StartError(str(error))
        self._guard.lose(f"the engine runs no command in it: {error}")
        return SandboxError(f"{self._guard.name}: {error}")

    def forget(self, execution: Execution) -> None:
        """Ends the streams of a command that has ended."""
        execution.stream.close()
        self._executions.discard(execution)

    def end_later(self, execution: Execution) -> None:
        """Has a command killed, and whatever came from it, without waiting for that."""
        if self._guard.lost.done():
            self.forget(execution)
            return
        ending = asyncio.ensure_future(self._end(execution))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    async def wait_endings(self) -> None:
        """Waits until no command that is being killed is left."""
        while self._endings:
            await asyncio.wait(self._endings)

    async def _end(self, execution: Execution) -> None:
        """What survives loses the box."""
        try:
            async with asyncio.timeout(_KILL_TIMEOUT_S):
                with contextlib.suppress(RefusedError):
                    await self._kill(execution)
                await self._guard.ask("kill", execution.tag)  # what came from it may have outlived it
        except (TimeoutError, SandboxError) as error:
            self._guard.lose(f"a command could not be killed: {error or 'its end took too long'}")
        finally:
            self.forget(execution)

    async def _kill(self, execution: Execution) -> None:
        """Kills a command until the engine says that it has ended; one that it is about to start is waited for."""
        await asyncio.shield(execution.stream.opened)
        pause_s = _FIRST_PAUSE_S
        while not (await execution.state()).has_ended:
            await self._guard.ask("kill", execution.tag)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)


async def _finish(execution: Execution, feed: Feed | None) -> ExecState:
    """Feeds a command, and waits until it has ended and its output has come."""
    feeding = asyncio.ensure_future(_feed(execution.stream, feed))
    try:
        state = await execution.wait(lambda state: state.has_ended)
        await execution.drain()
    finally:
        feeding.cancel()
        await asyncio.wait({feeding})
    if not feeding.cancelled():
        feeding.result()  # what kept it from being fed whole
    return state


async def _feed(stream: ExecStream, feed: Feed | None) -> None:
    if feed is not None:
        await feed(stream)
    stream.end_input()


def _words(reason: bytes) -> str:
    """The engine's reason, without what it says each time."""
    text = reason.decode("utf-8", "replace").strip().removesuffix(": unknown")
    while match := _PREFIX.match(text):
        text = text[match.end() :]
    if not text or "init-p" in text:  # the engine's program has ended within the box
        return f"no process, or no memory, is to be had to start it ({text or 'no reason given'})"
    return text


def late_reason(state: ExecState, *, stdout: bytes | bytearray, stderr: bytes | bytearray) -> str | None:
    """Why the kernel did not take a program that the engine had found; None when it did.

    >>> late_reason(ExecState(has_started=True, exit_code=1), stdout=b"", stderr=b"exec /x: exec format error\\n")
    'exec /x: exec format error'
    """
    is_so = state.exit_code == 1 and not stdout and _LATE_REASON.fullmatch(stderr)
    return stderr.decode("utf-8", "replace").strip() if is_so else None

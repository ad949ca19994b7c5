"""A box whose image holds a shell and its tools, and no Python: commands run by the Docker engine's exec."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from driftgym.errors import SandboxError
from driftgym.sandboxes.base import MIB, WORK_DIR, ExecResult, SandboxSpec
from driftgym.sandboxes.docker_container import CannotStartError, Container
from driftgym.sandboxes.docker_engine import Engine, ImageInfo
from driftgym.sandboxes.docker_settings import agent_uid, writable_folders
from driftgym.sandboxes.engine_exec import NUM_STARTS, Command, Runner, StartError, late_reason
from driftgym.sandboxes.engine_files import EngineFiles
from driftgym.sandboxes.engine_guard import Guard, guard_command
from driftgym.sandboxes.engine_output import MAX_WORDS_BYTES, Output
from driftgym.sandboxes.engine_process import EngineProcess
from driftgym.sandboxes.engine_scripts import CLEAN_SCRIPT, shell_argv

_RESET_TIMEOUT_S = 30.0
_PAUSE_S = 0.01
_NUM_OWN_PIDS = 2
_NUM_START_PIDS = 10
"""Threads of the engine's program that starts a command, before it becomes that command."""
_MIN_OPEN_FILES = 16


class EngineSandbox:
    """A container as `DockerSandbox` makes it, for an image of which nothing is asked but /bin/sh, cat, head,
    mkdir, rm, chmod, find, mv and tar, as busybox has them. See `Sandbox`.

    What is slower or weaker than with the toolbox:

    - A command takes the engine's 45 to 75 ms (and two start at once), a file likewise, a reset about 0.2 s.
    - The engine tells a death by signal n as exit code 128 + n, and so does this class as -n, also of a program that
      exits with such a code by itself.
    - Where a command leaves something behind that holds its output, its answer comes up to a second later.
    - A line process that closes its output is found at the deadline of a question.
    - `oom_killed` says that the memory limit killed a process of the box during the command, of whichever command.
      All processes are alike to the kernel then: it may choose the main process, and the box is gone.
    - While a command starts, some ten threads of the engine's program count within the limits of the box, so that
      `max_pids` is 20 at least.
    - In a shell without `read -t` (dash) the dead-man timer is the end of the connection alone.
    - /work belongs to root, and everybody may write there: what the agent's user owns could keep extended attributes
      and times past a reset, which these tools cannot see. (Some programs, as git, want to own the folder they work in:
      give them one below it.)
    """

    def __init__(
        self, *, container: Container, guard: Guard, runner: Runner, folders: Sequence[str], max_output_bytes: int
    ) -> None:
        self.sandbox_id = container.container_id
        self._container = container
        self._guard = guard
        self._runner = runner
        self._folders = tuple(folders)
        self._max_output_bytes = max_output_bytes
        self._files = EngineFiles(runner=runner, guard=guard)
        self._processes: set[EngineProcess] = set()
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, engine: Engine, spec: SandboxSpec, *, image: ImageInfo, labels: Mapping[str, str], timeout_s: float
    ) -> "EngineSandbox":
        """A new box. A start that fails, is cancelled or times out leaves nothing behind.

        Raises:
            MissingImageError: the engine does not have the image.
            SandboxError: the engine is gone, the image holds no shell, or `timeout_s` is over.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await cls._start(engine, spec, image=image, labels=labels)
        except TimeoutError:
            raise SandboxError(f"the box did not start within {timeout_s} s") from None

    @classmethod
    async def _start(
        cls, engine: Engine, spec: SandboxSpec, *, image: ImageInfo, labels: Mapping[str, str]
    ) -> "EngineSandbox":
        folders = ["/work", "/tmp", *writable_folders(image.volumes)]
        command = guard_command(dead_man_s=spec.dead_man_s, folders=folders)
        try:
            container = await Container.start(
                engine,
                spec,
                image=image.name,
                image_info=image,
                command=command,
                labels=labels,
                adapt=lambda body: _adapt(body, spec),
            )
        except CannotStartError as error:
            raise _no_shell(image.name, error) from None
        box = cls._serve(container, spec, folders=folders)
        try:
            await box._guard.start()
        except BaseException as error:
            await box.close()
            if isinstance(error, SandboxError):
                raise _no_shell(image.name, error) from None
            raise
        return box

    @classmethod
    def _serve(cls, container: Container, spec: SandboxSpec, *, folders: Sequence[str]) -> "EngineSandbox":
        name = f"box {container.container_id[:12]}"
        guard = Guard(name=name, write=container.stream.write, dead_man_s=spec.dead_man_s)
        container.listen(on_output=guard.feed, on_lost=guard.lose)
        runner = Runner(engine=container.engine, container_id=container.container_id, uid=agent_uid(spec), guard=guard)
        return cls(
            container=container, guard=guard, runner=runner, folders=folders, max_output_bytes=spec.max_output_bytes
        )

    @property
    def is_closed(self) -> bool:
        """True from the first call of `close` on."""
        return self._closing is not None

    async def ping(self, *, timeout_s: float) -> None:
        """Waits for a sign of life. Raises SandboxError when none comes; the box is lost then."""
        await self._guard.ask("ping", timeout_s=timeout_s)

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
        loop = asyncio.get_running_loop()
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        output = Output(self._max_output_bytes if max_output_bytes is None else max_output_bytes)
        num_oom = await self._guard.ask("oom")
        started = loop.time()
        try:
            state = await self._runner.run(
                Command.checked(argv, cwd=cwd, env=env or {}),
                timeout_s=timeout_s,
                feed=lambda stream: stream.send(stdin),
                on_output=output.take,
            )
        except StartError as error:
            return _not_started(str(error), duration_s=loop.time() - started)
        duration_s = loop.time() - started
        has_oom = await self._guard.ask("oom") > num_oom  # this also finds out whether the box is still there
        if state is not None and (reason := late_reason(state, stdout=output.stdout, stderr=output.stderr)):
            return _not_started(reason, duration_s=duration_s)
        return output.result(state, duration_s=duration_s, oom_killed=has_oom)

    async def spawn(
        self, argv: Sequence[str], *, cwd: str = WORK_DIR, env: Mapping[str, str] | None = None
    ) -> EngineProcess:
        """Starts a long-lived process. Raises SandboxError when the box is gone or the program cannot be started."""
        process = EngineProcess(runner=self._runner, guard=self._guard)
        await process.start(Command.checked(argv, cwd=cwd, env=env or {}))
        self._processes = {known for known in self._processes if known.is_alive} | {process}
        return process

    async def read_file(self, path: str, *, max_bytes: int = 1 * MIB) -> bytes:
        """The content of a file. Raises FileNotFoundError, ValueError (too long), SandboxError (the box is gone)."""
        return await self._files.read_file(path, max_bytes=max_bytes)

    async def write_file(self, path: str, content: bytes) -> None:
        """Writes a file, and the folders above it. Raises OSError, or SandboxError when the box is gone."""
        await self._files.write_file(path, content)

    async def upload(self, local: Path, path: str, *, timeout_s: float = 60.0) -> None:
        """Copies a folder of this machine into the box. Raises NotADirectoryError, OSError, SandboxError."""
        await self._files.upload(local, path, timeout_s=timeout_s)

    async def download(
        self, path: str, local: Path, *, max_bytes: int = 64 * MIB, max_files: int = 10_000, timeout_s: float = 60.0
    ) -> None:
        """Copies a folder of the box to this machine. Raises FileNotFoundError, ValueError, OSError, SandboxError."""
        await self._files.download(path, local, max_bytes=max_bytes, max_files=max_files, timeout_s=timeout_s)

    async def reset(self, *, keep_files: bool = False) -> None:
        """Kills every process, empties the folders and verifies both. Raises SandboxError when that fails."""
        try:
            async with asyncio.timeout(_RESET_TIMEOUT_S), self._runner.nothing_starts():
                for process in self._processes:
                    process.mark_ended()
                self._processes.clear()
                await self._kill_all()
                if not keep_files:
                    await self._clean_up()
                    await self._kill_all()
        except TimeoutError:
            raise SandboxError(f"{self._guard.name}: not clean after a reset: it took too long") from None

    async def _kill_all(self) -> None:
        num_left = await self._guard.ask("all")
        while num_left > 0:
            await asyncio.sleep(_PAUSE_S)
            num_left = await self._guard.ask("all")

    async def _clean_up(self) -> None:
        output = Output(MAX_WORDS_BYTES)
        argv = shell_argv(CLEAN_SCRIPT, *self._folders)
        command = Command.checked(argv, cwd="/", env={})
        state = await self._runner.run(
            command, timeout_s=_RESET_TIMEOUT_S, feed=None, on_output=output.take, has_turn=True
        )
        if state is None or state.exit_code != 0:
            reason = output.words or "the folders are not empty"
            raise SandboxError(f"{self._guard.name}: not clean after a reset: {reason}")

    async def close(self) -> None:
        """Kills everything in the box and removes it. Safe to call twice; goes on when its caller is cancelled."""
        if self._closing is None:
            self._guard.lose("closed")
            self._closing = asyncio.ensure_future(self._container.release())
        await asyncio.shield(self._closing)


def _adapt(body: dict[str, Any], spec: SandboxSpec) -> None:
    """Changes the settings of a container to those of a box without a toolbox."""
    host = body["HostConfig"]
    host["PidsLimit"] = max(host["PidsLimit"], _NUM_OWN_PIDS + NUM_STARTS * _NUM_START_PIDS)
    for limit in host["Ulimits"]:
        if limit["Name"] == "nofile":  # commands inherit it, where the toolbox sets their own
            limit["Soft"] = limit["Hard"] = max(spec.max_open_files, _MIN_OPEN_FILES)
    for folder, options in host["Tmpfs"].items():
        kept = [option for option in options.split(",") if option.partition("=")[0] not in ("mode", "uid", "gid")]
        host["Tmpfs"][folder] = ",".join([*kept, "mode=1777"])


def _no_shell(image: str, error: SandboxError) -> SandboxError:
    return SandboxError(f"image {image} cannot serve a box without Python, it takes a /bin/sh: {error}")


def _not_started(reason: str, *, duration_s: float) -> ExecResult:
    return ExecResult(exit_code=127, stdout="", stderr=reason, duration_s=duration_s)

"""The fake twin: a box in memory, whose commands and processes are Python functions."""

import asyncio
import inspect
import posixpath
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from driftgym.errors import SandboxError
from driftgym.sandboxes.base import MIB, WORK_DIR, ExecResult, Reply, SandboxInfo, SandboxSpec
from driftgym.sandboxes.toolbox_sandbox import decode_output

_NOT_FOUND = 127
_ROOTS = (WORK_DIR, "/tmp")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedCall:
    """A command as its handler sees it.

    >>> ScriptedCall(argv=("echo", "hi"), stdin=b"", cwd="/work", env={}, files={}).argv[1]
    'hi'
    """

    argv: tuple[str, ...]
    """The argv; of a shell line, the line alone."""
    stdin: bytes
    """Standard input."""
    cwd: str
    """Where it runs, absolute."""
    env: Mapping[str, str]
    """What the caller added to the environment."""
    files: MutableMapping[str, bytes]
    """The box's files by absolute path; a handler may change them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a handler's command did.

    >>> Outcome(stdout=b"hi").exit_code
    0
    """

    stdout: bytes = b""
    """Standard output."""
    stderr: bytes = b""
    """Standard error."""
    exit_code: int = 0
    """The exit code."""


class ProcessExitError(Exception):
    """Raised by a line handler: its process ends instead of answering."""


CommandHandler = Callable[[ScriptedCall], Outcome | Awaitable[Outcome]]
LineHandler = Callable[[str], str | Awaitable[str]]


def _absolute(path: str, cwd: str = WORK_DIR) -> str:
    return posixpath.normpath(posixpath.join(cwd, path))


def _writable(path: str, *, is_folder: bool = False) -> str:
    """Where a file, or what is in a folder, is written. Raises OSError where the box is read-only."""
    where = _absolute(path)
    if not (where + "/" * is_folder).startswith(tuple(root + "/" for root in _ROOTS)):
        raise OSError(30, "Read-only file system", path)
    return where


def _is_odd(env: Mapping[str, str]) -> bool:
    return any(not name or "=" in name for name in env)


def _reason(name: str, env: Mapping[str, str]) -> str:
    """Why a command is not started."""
    if not name:
        return "cannot start: there is no program to start"
    if _is_odd(env):
        return "cannot start: a variable's name is empty, or holds '='"
    return f"{name}: No such file or directory"


def _read_folder(local: Path) -> dict[str, bytes | None]:
    """What is below a folder: the content of each file, None for each folder."""
    if not local.is_dir():
        raise NotADirectoryError(20, "Not a directory", str(local))
    found: dict[str, bytes | None] = {}
    for path in sorted(local.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            continue
        found[path.relative_to(local).as_posix()] = path.read_bytes() if path.is_file() else None
    return found


def _write_folder(local: Path, folders: Sequence[str], files: Mapping[str, bytes]) -> None:
    for folder in ("", *folders):
        (local / folder).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (local / name).parent.mkdir(parents=True, exist_ok=True)
        (local / name).write_bytes(content)


def _cat(call: ScriptedCall) -> Outcome:
    if len(call.argv) == 1:
        return Outcome(stdout=call.stdin)
    content = call.files.get(_absolute(call.argv[1], call.cwd))
    if content is None:
        return Outcome(stderr=f"cat: {call.argv[1]}: No such file or directory\n".encode(), exit_code=1)
    return Outcome(stdout=content)


def _printenv(call: ScriptedCall) -> Outcome:
    value = call.env.get(call.argv[1])
    return Outcome(exit_code=1) if value is None else Outcome(stdout=f"{value}\n".encode())


async def _sleep(call: ScriptedCall) -> Outcome:
    await asyncio.sleep(float(call.argv[1]))
    return Outcome()


async def _never(line: str) -> str:
    await asyncio.Event().wait()
    return ""


_COMMANDS: Mapping[str, CommandHandler] = {
    "true": lambda call: Outcome(),
    "false": lambda call: Outcome(exit_code=1),
    "echo": lambda call: Outcome(stdout=" ".join(call.argv[1:]).encode() + b"\n"),
    "pwd": lambda call: Outcome(stdout=call.cwd.encode() + b"\n"),
    "cat": _cat,
    "env": lambda call: Outcome(stdout="".join(f"{name}={value}\n" for name, value in call.env.items()).encode()),
    "printenv": _printenv,
    "sleep": _sleep,
}
_PROCESSES: Mapping[str, LineHandler] = {"cat": lambda line: line, "sleep": _never}


class ScriptedProcess:
    """A long-lived process played by a Python function; see `SandboxProcess`."""

    def __init__(self, *, handler: LineHandler) -> None:
        self._handler = handler
        self._is_alive = True
        self._turn = asyncio.Lock()

    @property
    def is_alive(self) -> bool:
        """True while the process can be asked."""
        return self._is_alive

    async def ask(self, line: str, *, timeout_s: float, max_reply_bytes: int = 64 * 1024) -> Reply:
        """The handler's answer. Raises ValueError, TimeoutError and SandboxError as every box does."""
        if "\n" in line:
            raise ValueError(f"a question is one line, this holds a line break: {line[:80]!r}")
        async with self._turn:
            if not self._is_alive:
                raise SandboxError("the process has ended")
            self._is_alive = False  # unless it answers
            try:
                async with asyncio.timeout(timeout_s):
                    answer = self._handler(line)
                    text = await answer if inspect.isawaitable(answer) else answer
            except ProcessExitError:
                raise SandboxError("the process has ended") from None
            self._is_alive = True
        data = text.encode().partition(b"\n")[0]
        num_dropped = max(0, len(data) - max_reply_bytes)
        shown = decode_output(data[:max_reply_bytes], is_cut=num_dropped > 0)
        return Reply(text=shown, truncated=num_dropped > 0, num_dropped_bytes=num_dropped)

    async def kill(self) -> None:
        """Ends the process."""
        self._is_alive = False


class ScriptedSandbox:
    """A box in memory; see `Sandbox`. `commands` are looked up by the shell line, or by the first word of an argv.

    Of a folder that is copied, it takes files and folders: it knows no links and no permissions.
    """

    def __init__(
        self,
        *,
        commands: Mapping[str, CommandHandler] | None = None,
        processes: Mapping[str, LineHandler] | None = None,
        sandbox_id: str = "scripted-0",
        max_output_bytes: int = 1 * MIB,
    ) -> None:
        self.sandbox_id = sandbox_id
        self.files: dict[str, bytes] = {}
        self._folders: set[str] = set()
        self._max_output_bytes = max_output_bytes
        self._commands = {**_COMMANDS, **(commands or {})}
        self._handlers = {**_PROCESSES, **(processes or {})}
        self._running: list[ScriptedProcess] = []
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """True from the first call of `close` on."""
        return self._is_closed

    def _check_open(self) -> None:
        if self._is_closed:
            raise SandboxError(f"box {self.sandbox_id}: closed")

    async def ping(self, *, timeout_s: float) -> None:
        """Raises SandboxError when the box is closed."""
        self._check_open()

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
        """Calls the handler of the command; 127 when it has none. Raises SandboxError when the box is closed."""
        self._check_open()
        limit = self._max_output_bytes if max_output_bytes is None else max_output_bytes
        argv = (command,) if isinstance(command, str) else tuple(command)
        started = time.monotonic()
        call = ScriptedCall(argv=argv, stdin=stdin, cwd=_absolute(cwd), env=env or {}, files=self.files)
        name = argv[0] if argv else ""
        handler = self._commands.get(name)
        timed_out = False
        outcome = Outcome(stderr=_reason(name, env or {}).encode("utf-8", "replace"), exit_code=_NOT_FOUND)
        try:
            async with asyncio.timeout(timeout_s):
                if handler is not None and not _is_odd(env or {}):
                    result = handler(call)
                    outcome = await result if inspect.isawaitable(result) else result
        except TimeoutError:
            timed_out, outcome = True, Outcome()
        out, err = outcome.stdout[:limit], outcome.stderr[:limit]
        num_dropped = len(outcome.stdout) - len(out) + len(outcome.stderr) - len(err)
        return ExecResult(
            exit_code=None if timed_out else outcome.exit_code,
            stdout=decode_output(out, is_cut=len(out) < len(outcome.stdout)),
            stderr=decode_output(err, is_cut=len(err) < len(outcome.stderr)),
            duration_s=time.monotonic() - started,
            timed_out=timed_out,
            output_truncated=num_dropped > 0,
            num_dropped_bytes=num_dropped,
        )

    async def spawn(
        self, argv: Sequence[str], *, cwd: str = WORK_DIR, env: Mapping[str, str] | None = None
    ) -> ScriptedProcess:
        """A process that the handler of its first word answers for. Raises SandboxError when it has none."""
        self._check_open()
        name = argv[0] if argv else ""
        handler = self._handlers.get(name)
        if handler is None or _is_odd(env or {}):
            raise SandboxError(_reason(name, env or {}))
        process = ScriptedProcess(handler=handler)
        self._running.append(process)
        return process

    async def read_file(self, path: str, *, max_bytes: int = 1 * MIB) -> bytes:
        """The content of a file. Raises FileNotFoundError, ValueError (too long), SandboxError (closed)."""
        self._check_open()
        content = self.files.get(_absolute(path))
        if content is None:
            raise FileNotFoundError(2, "No such file or directory", path)
        if len(content) > max_bytes:
            raise ValueError(f"{path}: longer than {max_bytes} bytes")
        return content

    async def write_file(self, path: str, content: bytes) -> None:
        """Writes a file of the work folder or of /tmp. Raises OSError elsewhere, SandboxError when closed."""
        self._check_open()
        self.files[_writable(path)] = content

    async def upload(self, local: Path, path: str, *, timeout_s: float = 60.0) -> None:
        """Copies a folder into the box. Raises NotADirectoryError, OSError, SandboxError (closed)."""
        self._check_open()
        where = _writable(path, is_folder=True)
        found = await asyncio.to_thread(_read_folder, local)
        for name, content in found.items():
            if content is None:
                self._folders.add(_absolute(name, where))
            else:
                self.files[_absolute(name, where)] = content
        self._folders.add(where)

    async def download(
        self, path: str, local: Path, *, max_bytes: int = 64 * MIB, max_files: int = 10_000, timeout_s: float = 60.0
    ) -> None:
        """Copies a folder of the box. Raises FileNotFoundError, ValueError (too much), OSError, SandboxError."""
        self._check_open()
        where = _absolute(path)
        prefix = where.rstrip("/") + "/"
        files = {name.removeprefix(prefix): data for name, data in self.files.items() if name.startswith(prefix)}
        folders = [name.removeprefix(prefix) for name in self._folders if name.startswith(prefix)]
        if not files and not folders and where not in (*_ROOTS, *self._folders):
            raise FileNotFoundError(2, "No such folder", path)
        if sum(map(len, files.values())) > max_bytes or len(files) + len(folders) > max_files:
            raise ValueError(f"{path}: holds more than {max_bytes} bytes or {max_files} files")
        await asyncio.to_thread(_write_folder, local, folders, files)

    async def reset(self, *, keep_files: bool = False) -> None:
        """Ends every process and removes every file. Raises SandboxError when the box is closed."""
        self._check_open()
        if not keep_files:
            self.files.clear()
            self._folders.clear()
        for process in self._running:
            await process.kill()
        self._running.clear()

    async def close(self) -> None:
        """Ends every process; the box is gone. Safe to call twice."""
        for process in self._running:
            await process.kill()
        self._is_closed = True


class ScriptedProvider:
    """Starts `ScriptedSandbox`es, all with the same handlers."""

    def __init__(
        self,
        *,
        commands: Mapping[str, CommandHandler] | None = None,
        processes: Mapping[str, LineHandler] | None = None,
    ) -> None:
        self._commands = commands
        self._processes = processes
        self._boxes: dict[str, ScriptedSandbox] = {}
        self._num_started = 0
        self._is_closed = False

    @property
    def kind(self) -> str:
        """`scripted`."""
        return "scripted"

    async def start(self, spec: SandboxSpec, *, timeout_s: float) -> ScriptedSandbox:
        """A new box, at once. Raises SandboxError when the provider is closed."""
        if self._is_closed:
            raise SandboxError("the provider of boxes is closed")
        sandbox_id = f"scripted-{self._num_started}"
        self._num_started += 1
        box = ScriptedSandbox(
            commands=self._commands,
            processes=self._processes,
            sandbox_id=sandbox_id,
            max_output_bytes=spec.max_output_bytes,
        )
        self._boxes[sandbox_id] = box
        return box

    async def list(self) -> Sequence[SandboxInfo]:
        """The boxes that have not been closed."""
        return [
            SandboxInfo(sandbox_id=key, owner="scripted", state="running", age_s=0.0, owner_is_alive=True)
            for key, box in self._boxes.items()
            if not box.is_closed
        ]

    async def remove(self, sandbox_id: str) -> None:
        """Closes a box. Nothing happens when it is already gone."""
        if sandbox_id in self._boxes:
            await self._boxes.pop(sandbox_id).close()

    async def close(self) -> None:
        """Closes the boxes that are still there. Safe to call twice."""
        self._is_closed = True
        for box in self._boxes.values():
            await box.close()
        self._boxes.clear()

"""A `Sandbox` on top of a toolbox, wherever that runs: `ProcessSandbox` and `DockerSandbox` add start and end."""

import abc
import asyncio
import codecs
import errno
from collections.abc import Mapping, Sequence
from pathlib import Path

from driftgym.errors import SandboxError
from driftgym.sandboxes.base import MIB, WORK_DIR, ExecResult, Reply
from driftgym.sandboxes.toolbox_client import Answer, AskTimeoutError, ProcessGoneError, StartError, ToolboxClient
from driftgym.sandboxes.toolbox_transfer import receive_folder, send_folder

_FILE_TIMEOUT_S = 30.0
_RESET_TIMEOUT_S = 30.0
_SPAWN_TIMEOUT_S = 30.0


def decode_output(data: bytes, *, is_cut: bool) -> str:
    """`data` as text, with replacement; where it was cut, without the part of a character that it ends with.

    >>> decode_output("aé".encode()[:2], is_cut=True), decode_output(b"a\\xff", is_cut=False)
    ('a', 'a\ufffd')
    """
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data, final=not is_cut)


class ToolboxProcess:
    """A long-lived process in the box; see `SandboxProcess`."""

    def __init__(self, *, client: ToolboxClient) -> None:
        self._client = client
        self._key = 0
        self._is_alive = True
        self._turn = asyncio.Lock()

    @property
    def is_alive(self) -> bool:
        """True while the process can be asked."""
        return self._is_alive and not self._client.is_lost

    def mark_ended(self) -> None:
        """Called when the process has ended."""
        self._is_alive = False

    async def start(self, argv: Sequence[str], *, cwd: str, env: Mapping[str, str]) -> None:
        """Starts the program. Raises SandboxError when that cannot be done."""
        answer = await self._client.call(
            "spawn",
            timeout_s=_SPAWN_TIMEOUT_S,
            on_ended=self.mark_ended,
            argv=list(argv),
            cwd=cwd,
            env=dict(env),
        )
        self._key = answer.fields["id"]

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
            if not self._is_alive:
                raise SandboxError(f"{self._client.name}: the process has ended")
            try:
                answer = await self._client.call(
                    "ask",
                    line.encode("utf-8", "replace"),
                    timeout_s=timeout_s,
                    key=self._key,
                    max_reply_bytes=max_reply_bytes,
                )
            except ProcessGoneError:
                self._is_alive = False
                raise
            except AskTimeoutError:
                self._is_alive = False
                raise TimeoutError(f"{self._client.name}: no answer within {timeout_s} s") from None
            except asyncio.CancelledError:
                self._is_alive = False  # its answer would be taken for that of the next question
                self._client.kill_later(self._key)
                raise
        num_dropped = answer.fields["dropped"]
        text = decode_output(answer.payload, is_cut=num_dropped > 0)
        return Reply(text=text, truncated=num_dropped > 0, num_dropped_bytes=num_dropped)

    async def kill(self) -> None:
        """Kills the process tree. Nothing happens when it has already ended."""
        if self.is_alive:
            self._is_alive = False
            await self._client.call("kill", timeout_s=_SPAWN_TIMEOUT_S, key=self._key)


class ToolboxSandbox(abc.ABC):
    """One box; see `Sandbox`. Its subclass owns what it runs in, and releases that once."""

    def __init__(self, *, client: ToolboxClient, sandbox_id: str, max_output_bytes: int = 1 * MIB) -> None:
        self.sandbox_id = sandbox_id
        self._client = client
        self._max_output_bytes = max_output_bytes
        self._closing: asyncio.Task[None] | None = None

    @property
    def is_closed(self) -> bool:
        """True from the first call of `close` on."""
        return self._closing is not None

    async def ping(self, *, timeout_s: float) -> None:
        """Waits for a sign of life. Raises SandboxError when there is none within `timeout_s`; the box is then lost."""
        await self._client.call("ping", timeout_s=timeout_s, grace_s=0.0)

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
        max_output_bytes = self._max_output_bytes if max_output_bytes is None else max_output_bytes
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        try:
            answer = await self._client.call(
                "exec",
                stdin,
                timeout_s=timeout_s,
                argv=argv,
                cwd=cwd,
                env=dict(env or {}),
                max_output_bytes=max_output_bytes,
            )
        except StartError as error:
            return ExecResult(exit_code=127, stdout="", stderr=str(error), duration_s=0.0)
        return _exec_result(answer, max_output_bytes)

    async def spawn(
        self, argv: Sequence[str], *, cwd: str = WORK_DIR, env: Mapping[str, str] | None = None
    ) -> ToolboxProcess:
        """Starts a long-lived process. Raises SandboxError when the box is gone or the program cannot be started."""
        process = ToolboxProcess(client=self._client)
        await process.start(argv, cwd=cwd, env=env or {})
        return process

    async def read_file(self, path: str, *, max_bytes: int = 1 * MIB) -> bytes:
        """The content of a file. Raises FileNotFoundError, ValueError (too long), SandboxError (the box is gone)."""
        answer = await self._client.call(
            "read", timeout_s=_FILE_TIMEOUT_S, path=path, cwd="/", max_output_bytes=max_bytes
        )
        error = _file_error(answer, path)
        if error is not None:
            raise FileNotFoundError(errno.ENOENT, f"cannot be read ({error.strerror})", path)
        if answer.fields["dropped"]:
            raise ValueError(f"{path}: longer than {max_bytes} bytes")
        return answer.payload

    async def write_file(self, path: str, content: bytes) -> None:
        """Writes a file, and the folders above it. Raises OSError, or SandboxError when the box is gone."""
        answer = await self._client.call("write", content, timeout_s=_FILE_TIMEOUT_S, path=path, cwd="/")
        error = _file_error(answer, path)
        if error is not None:
            raise error

    async def upload(self, local: Path, path: str, *, timeout_s: float = 60.0) -> None:
        """Copies a folder of this machine into the box; see `Sandbox`.

        Raises:
            NotADirectoryError: `local` is no folder.
            OSError: it cannot be written there, or `local` cannot be read.
            SandboxError: the box is gone, or the copy did not end within `timeout_s`.
        """
        answer = await send_folder(self._client, local, path, timeout_s=timeout_s)
        error = _file_error(answer, path)
        if error is not None:
            raise error

    async def download(
        self, path: str, local: Path, *, max_bytes: int = 64 * MIB, max_files: int = 10_000, timeout_s: float = 60.0
    ) -> None:
        """Copies a folder of the box to this machine; see `Sandbox`.

        Files that the agent's user cannot read are left out.

        Raises:
            FileNotFoundError: there is no such folder, or it cannot be read by the agent's user.
            ValueError: it holds more than `max_bytes` or `max_files`.
            OSError: `local` cannot be written.
            SandboxError: the box is gone, or the copy did not end within `timeout_s`.
        """

        def check(answer: Answer) -> None:
            error = _file_error(answer, path)
            if error is not None and error.errno == errno.EFBIG:
                raise ValueError(f"{path}: {error.strerror}")
            if error is not None:
                raise FileNotFoundError(errno.ENOENT, f"cannot be read ({error.strerror})", path)
            if answer.fields["dropped"]:
                raise ValueError(f"{path}: more than {max_bytes} bytes")

        await receive_folder(
            self._client, path, local, max_bytes=max_bytes, max_files=max_files, timeout_s=timeout_s, check=check
        )

    async def reset(self, *, keep_files: bool = False) -> None:
        """Kills every process, empties the folders unless `keep_files`, and verifies that.

        Verified from outside of the agent's reach: no process is left, the folders where files can be written are
        empty and carry the mode, owner, times and attributes of a new box, and no System V object is there.

        Raises:
            SandboxError: the box is gone, or does not come back clean; it must then be closed.
        """
        answer = await self._client.call("reset", timeout_s=_RESET_TIMEOUT_S, cwd="/", keep_files=keep_files)
        if answer.fields["exit_code"] != 0:
            reason = decode_output(answer.payload, is_cut=False) or "the folders are not empty"
            raise SandboxError(f"{self._client.name}: not clean after a reset: {reason}")

    async def close(self) -> None:
        """Kills everything in the box and removes it. Safe to call twice; goes on when its caller is cancelled."""
        if self._closing is None:
            self._client.lose("closed")
            self._closing = asyncio.ensure_future(self._release())
        await asyncio.shield(self._closing)

    @abc.abstractmethod
    async def _release(self) -> None:
        """Ends what the box runs in. Called once; raises nothing when that is gone already."""


def _exec_result(answer: Answer, max_output_bytes: int) -> ExecResult:
    fields = answer.fields
    num_stdout, num_dropped = fields["num_stdout"], fields["dropped"]
    stdout, stderr = answer.payload[:num_stdout], answer.payload[num_stdout:]
    return ExecResult(
        exit_code=fields["exit_code"],
        stdout=decode_output(stdout, is_cut=num_dropped > 0 and len(stdout) == max_output_bytes),
        stderr=decode_output(stderr, is_cut=num_dropped > 0 and len(stderr) == max_output_bytes),
        duration_s=fields["duration_s"],
        timed_out=fields["timed_out"],
        oom_killed=fields["oom_killed"],
        output_truncated=num_dropped > 0,
        num_dropped_bytes=num_dropped,
    )


def _file_error(answer: Answer, path: str) -> OSError | None:
    """What kept the agent's user from a file; raises SandboxError when the work was cut short instead."""
    fields = answer.fields
    if fields["exit_code"] == 0:
        return None
    number, _, reason = answer.payload[fields["num_stdout"] :].decode("utf-8", "replace").partition(" ")
    if fields["exit_code"] != 1 or not number.isdigit():
        raise SandboxError(f"{path}: the box was reset, or ran out of time, processes or memory ({reason})")
    return OSError(int(number), reason, path)

"""Files and folders into a box without Python, and out of it: scripts of the agent's user, and their words."""

import asyncio
import errno
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from driftgym.errors import SandboxError
from driftgym.sandboxes.archive import max_archive_bytes, pack_folder, unpack_archive
from driftgym.sandboxes.engine_exec import Command, ExecState, Feed, Runner
from driftgym.sandboxes.engine_guard import Guard
from driftgym.sandboxes.engine_output import MAX_WORDS_BYTES, Output, Spool
from driftgym.sandboxes.engine_scripts import (
    CANNOT_READ,
    DOWNLOAD_SCRIPT,
    MODES_SCRIPT,
    READ_SCRIPT,
    UPLOAD_SCRIPT,
    WRITE_SCRIPT,
    absolute_path,
    error_of,
    has_no_tool,
    shell_argv,
)
from driftgym.sandboxes.engine_stream import ExecStream
from driftgym.sandboxes.toolbox_transfer import in_time

_FILE_TIMEOUT_S = 30.0
_PIECE_BYTES = 256 * 1024
_MAX_SPOOL_BYTES = 1024 * 1024
_MAX_PARTS = 100


class EngineFiles:
    """The files of one box; see `Sandbox` for what each method raises."""

    def __init__(self, *, runner: Runner, guard: Guard) -> None:
        self._runner = runner
        self._guard = guard

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        """The content of a file. Raises FileNotFoundError, ValueError (too long), SandboxError (the box is gone)."""
        try:
            where = absolute_path(path)
        except OSError as error:
            raise _unreadable(error, path) from None
        output = Output(max_bytes + 1)
        argv = shell_argv(READ_SCRIPT, where, str(max_bytes + 1))
        state = await self._run(argv, timeout_s=_FILE_TIMEOUT_S, on_output=output.take, what=path)
        if state.exit_code != 0:
            raise _unreadable(error_of(output.words, path), path)
        if len(output.stdout) > max_bytes:
            raise ValueError(f"{path}: longer than {max_bytes} bytes")
        return bytes(output.stdout)

    async def write_file(self, path: str, content: bytes) -> None:
        """Writes a file, and the folders above it. Raises OSError, or SandboxError when the box is gone."""
        where = absolute_path(path)
        argv = shell_argv(WRITE_SCRIPT, where, where.rpartition("/")[0] or "/")
        await self._write(argv, path, timeout_s=_FILE_TIMEOUT_S, feed=lambda stream: stream.send(content))

    async def upload(self, local: Path, path: str, *, timeout_s: float) -> None:
        """Copies a folder of this machine into the box. Raises NotADirectoryError, OSError, SandboxError."""
        where = absolute_path(path)
        with tempfile.TemporaryFile() as archive:
            modes = await in_time(asyncio.to_thread(pack_folder, local, archive), timeout_s)
            archive.seek(0)
            argv = shell_argv(UPLOAD_SCRIPT, where)
            await self._write(argv, path, timeout_s=timeout_s, feed=lambda stream: _send_file(stream, archive))
        pending = [part for name, mode in modes.items() for part in (f"{mode:o}", name)]
        while pending:  # some tar programs leave a folder that is there already as it is
            part, pending = pending[:_MAX_PARTS], pending[_MAX_PARTS:]
            await self._write(shell_argv(MODES_SCRIPT, where, *part), path, timeout_s=timeout_s)

    async def _write(self, argv: Sequence[str], path: str, *, timeout_s: float, feed: Feed | None = None) -> None:
        """Runs a script that writes below `path`. Raises OSError with what it complained of, or SandboxError."""
        output = Output(MAX_WORDS_BYTES)
        state = await self._run(argv, timeout_s=timeout_s, on_output=output.take, feed=feed, what=path)
        if state.exit_code != 0:
            raise error_of(output.words, path)

    async def download(self, path: str, local: Path, *, max_bytes: int, max_files: int, timeout_s: float) -> None:
        """Copies a folder of the box to this machine. Raises FileNotFoundError, ValueError, OSError, SandboxError."""
        try:
            where = absolute_path(path)
        except OSError as error:
            raise _unreadable(error, path) from None
        with tempfile.SpooledTemporaryFile(max_size=_MAX_SPOOL_BYTES) as archive:
            spool = Spool(archive, max_bytes=max_archive_bytes(max_bytes=max_bytes, max_files=max_files))
            state = await self._receive(spool, where, timeout_s=timeout_s, what=path)
            if state is None:
                raise ValueError(f"{path}: holds more than {max_bytes} bytes or {max_files} files")
            if state.exit_code == CANNOT_READ:
                raise _unreadable(error_of(spool.words, path), path)
            archive.seek(0)
            unpacking = asyncio.to_thread(unpack_archive, archive, local, max_bytes=max_bytes, max_files=max_files)
            await in_time(unpacking, timeout_s)

    async def _receive(self, spool: Spool, where: str, *, timeout_s: float, what: str) -> ExecState | None:
        """Runs the script that sends a folder; None when it sent too much, and has been ended. Raises OSError when what
        it sent cannot be kept, and SandboxError."""
        argv = shell_argv(DOWNLOAD_SCRIPT, where)
        run = asyncio.ensure_future(self._run(argv, timeout_s=timeout_s, on_output=spool.take, what=what))
        try:
            waiting: set[asyncio.Future[Any]] = {run, spool.full}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if spool.full.done():
                return spool.full.result()
            return run.result()
        finally:
            run.cancel()
            await asyncio.wait({run})

    async def _run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        on_output: Callable[[int, "memoryview[int]"], None],
        what: str,
        feed: Feed | None = None,
    ) -> ExecState:
        """Runs a script for a file or folder. Raises SandboxError when it was cut short."""
        command = Command.checked(argv, cwd="/", env={})
        state = await self._runner.run(command, timeout_s=timeout_s, feed=feed, on_output=on_output)
        if state is None:
            raise SandboxError(f"{what}: the box did not do that within {timeout_s:g} s")
        if has_no_tool(state.exit_code):
            raise SandboxError(f"{what}: the image lacks a tool that this takes (see EngineSandbox)")
        if state.outcome is None or state.outcome < 0:
            self._guard.check()
            raise SandboxError(f"{what}: the box was reset, or ran out of memory")
        return state


def _unreadable(error: OSError, path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, f"cannot be read ({error.strerror})", path)


async def _send_file(stream: ExecStream, file: IO[bytes]) -> None:
    while data := await asyncio.to_thread(file.read, _PIECE_BYTES):
        await stream.send(data)

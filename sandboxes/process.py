"""A box on this machine: a toolbox as a child process. For trusted code only."""

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

from driftgym.errors import SandboxError
from driftgym.sandboxes.base import SandboxSpec
from driftgym.sandboxes.owned_folders import box_tag, owned_prefix, tagged_processes
from driftgym.sandboxes.toolbox_client import ToolboxClient
from driftgym.sandboxes.toolbox_program import local_command
from driftgym.sandboxes.toolbox_sandbox import ToolboxSandbox
from driftgym.sandboxes.toolbox_system import kill_all, processes_below

_END_TIMEOUT_S = 10.0


class _Stream(asyncio.Protocol):
    """The socket between this process and the toolbox."""

    client: ToolboxClient

    def __init__(self, log: IO[bytes]) -> None:
        self._log = log

    def data_received(self, data: bytes) -> None:
        """Passes on what the toolbox says."""
        self.client.feed(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tells the client, with what the toolbox complained of."""
        self._log.seek(0)
        words = self._log.read().decode("utf-8", "replace").strip()[-2000:]
        self._log.close()
        self.client.lose(f"the toolbox has ended{': ' + words if words else ''}")


class ProcessSandbox(ToolboxSandbox):
    """A box without walls: **for trusted code only**.

    Commands run as this process's own user, with its network and its file system; a temporary folder stands for
    `/work` where this class takes a path, and is HOME. What holds: a deadline that kills the whole process tree,
    bounded output, no inherited environment (no tokens of the owner's), limits on memory (private writable memory,
    per process), open files and file size. What does not: `max_pids`, `num_cpus`, `network`, `read_only_root`.
    `kill -9` of the owner ends the toolbox, which kills what it has started and removes its folders. `kill -9` of the
    toolbox ends the commands that it has started, and `close` what came from them, unless it hides its environment.
    What `kill -9` of both leaves is removed by the next sweep (`owned_folders`).
    """

    def __init__(
        self,
        *,
        client: ToolboxClient,
        transport: asyncio.BaseTransport,
        child: "subprocess.Popen[bytes]",
        folders: tuple[str, str],
        max_output_bytes: int,
    ) -> None:
        super().__init__(client=client, sandbox_id=f"process-{child.pid}", max_output_bytes=max_output_bytes)
        self._transport = transport
        self._child = child
        self._folders = folders

    @classmethod
    async def start(cls, spec: SandboxSpec, *, timeout_s: float) -> "ProcessSandbox":
        """A new box. Raises SandboxError when it does not start in `timeout_s`; then nothing is left."""
        opening = asyncio.ensure_future(cls._open(spec))
        try:
            async with asyncio.timeout(timeout_s):
                box = await asyncio.shield(opening)
                await box._client.wait_ready()
        except BaseException as error:
            await asyncio.shield(asyncio.ensure_future(_undo(opening)))
            if isinstance(error, TimeoutError):
                raise SandboxError(f"the toolbox did not start within {timeout_s} s") from None
            raise
        return box

    @classmethod
    async def _open(cls, spec: SandboxSpec) -> "ProcessSandbox":
        """A box that may not serve yet. Raises SandboxError when this machine has no process, file or space for it."""
        with contextlib.ExitStack() as undo:
            try:
                folders = (_make_folder("work", undo), _make_folder("tmp", undo))
                log = undo.enter_context(tempfile.TemporaryFile())
                ours, theirs = socket.socketpair()
                undo.enter_context(ours)
                with theirs:
                    child = _start_toolbox(spec, folders=folders, end=theirs, log=log)
            except OSError as error:
                raise SandboxError(f"a box cannot be started on this machine: {error}") from None
            undo.pop_all()
        stream = _Stream(log)
        # Nothing arrives before the next pass of the loop, so that the client is in its place by then.
        transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: stream, sock=ours)
        stream.client = ToolboxClient(
            name=f"box process-{child.pid}", write=transport.write, dead_man_s=spec.dead_man_s
        )
        return cls(
            client=stream.client,
            transport=transport,
            child=child,
            folders=folders,
            max_output_bytes=spec.max_output_bytes,
        )

    @property
    def pid(self) -> int:
        """The process id of the toolbox."""
        return self._child.pid

    async def _release(self) -> None:
        self._transport.abort()  # type: ignore[attr-defined]
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                await _wait_exit(self._child)
        except TimeoutError:
            pid = self.pid
            # What it has started, while it is still there to be found by.
            kill_all(lambda: {pid, *processes_below(pid)})
            await _wait_exit(self._child)
        if self._child.returncode != 0:  # it was killed, and has killed nothing itself
            await asyncio.to_thread(kill_all, lambda: tagged_processes(box_tag(self._folders[0])))
        for folder in self._folders:  # the toolbox has removed them, unless it was killed
            shutil.rmtree(folder, ignore_errors=True)


async def _undo(opening: "asyncio.Future[ProcessSandbox]") -> None:
    """Closes a box that is being, or has been, opened."""
    with contextlib.suppress(SandboxError):  # then it never was
        await (await opening).close()


def _make_folder(name: str, undo: contextlib.ExitStack) -> str:
    folder = tempfile.mkdtemp(prefix=owned_prefix(name))
    undo.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _start_toolbox(
    spec: SandboxSpec, *, folders: tuple[str, str], end: socket.socket, log: IO[bytes]
) -> "subprocess.Popen[bytes]":
    settings = {
        "uid": None,
        "work_dir": folders[0],
        "tmp_dir": folders[1],
        "limits": {"nofile": spec.max_open_files, "fsize": spec.work_dir_bytes, "data": spec.memory_bytes},
        "is_local": True,
        "box_tag": box_tag(folders[0]),
        "dead_man_s": spec.dead_man_s,
    }
    own_programs = str(Path(sys.executable).parent)  # so that python3 means this interpreter
    path = os.pathsep.join([own_programs, os.environ.get("PATH", os.defpath)])
    return subprocess.Popen(
        local_command(settings),
        stdin=end.fileno(),
        stdout=end.fileno(),
        stderr=log,
        env={"PATH": path, "LANG": "C.UTF-8"},
        start_new_session=True,  # ctrl-C goes to the owner, which closes its boxes in order
    )


async def _wait_exit(child: "subprocess.Popen[bytes]") -> None:
    """Waits for the end of a child without a thread."""
    if child.poll() is not None:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    fd = os.pidfd_open(child.pid)
    loop.add_reader(fd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(fd)
        with contextlib.suppress(OSError):
            os.close(fd)
    child.wait()

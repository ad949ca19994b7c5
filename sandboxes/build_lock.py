"""One build at a time of one thing, over all tasks and processes of a user on this machine."""

import asyncio
import contextlib
import fcntl
import hashlib
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import BinaryIO

from driftgym.errors import SandboxError

_POLL_S = 0.2


@contextlib.asynccontextmanager
async def only_one(name: str, *, timeout_s: float, say: Callable[[str], None]) -> AsyncIterator[None]:
    """Holds the lock of `name` inside; waits until nobody else does. The lock of a process that dies is free.

    Args:
        name: what is being built.
        timeout_s: how long to wait, in seconds.
        say: is told when there is something to wait for.

    Raises:
        SandboxError: still held after `timeout_s`, or no lock can be made.
    """
    path = _lock_path(name)
    lock = await _acquire(path, name=name, timeout_s=timeout_s, say=say)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # before it is let go: whoever waits for this file sees that it is no more the one
        lock.close()


def _lock_path(name: str) -> Path:
    folder = Path(tempfile.gettempdir()) / f"driftgym-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise SandboxError(f"{folder} belongs to another user: remove it, or set TMPDIR")
    except OSError as error:
        raise SandboxError(f"builds are locked in {folder}, which cannot be made: {error}") from None
    return folder / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.lock"


async def _acquire(path: Path, *, name: str, timeout_s: float, say: Callable[[str], None]) -> BinaryIO:
    deadline = asyncio.get_running_loop().time() + timeout_s
    is_told = False
    while (lock := _try(path)) is None:
        if asyncio.get_running_loop().time() > deadline:
            raise SandboxError(f"{name} is being built elsewhere, and was not ready within {timeout_s:.0f} s")
        if not is_told:
            say(f"{name} is being built elsewhere: waiting")
            is_told = True
        await asyncio.sleep(_POLL_S)
    return lock


def _try(path: Path) -> BinaryIO | None:
    """The lock; None when it is held, or its file was removed by the one who held it. Raises SandboxError."""
    try:
        lock = path.open("ab")
    except OSError as error:
        raise SandboxError(f"no build can be locked with {path}: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_mine = os.fstat(lock.fileno()).st_ino == path.stat().st_ino
    except (BlockingIOError, FileNotFoundError):
        is_mine = False
    except BaseException:
        lock.close()
        raise
    if is_mine:
        return lock
    lock.close()
    return None

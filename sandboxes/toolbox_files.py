"""What a child of the toolbox does with files as the agent's user: reads, writes, and makes the box new again.

Runs inside the box, beside `toolbox`: standard library only, Python 3.8 and later.
"""

from __future__ import annotations

import os
import stat
import sys

from driftgym.sandboxes.toolbox_system import READ_BYTES, read_path

TYPE_CHECKING = False  # the module typing costs several milliseconds at each start
if TYPE_CHECKING:
    from typing import Any

IPC_TABLES = ("/proc/sysvipc/shm", "/proc/sysvipc/sem", "/proc/sysvipc/msg")
INVALID = 22
FLAGS_GET, FLAGS_SET = 0x80086601, 0x40086602
NOT_SUPPORTED = (25, 38, 61, 95)
"""What calls for attributes and flags answer where the file system has none."""


def read_file(path: str, max_bytes: int) -> int:
    """Writes a regular file to standard output, at most one byte more than `max_bytes`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        check_regular(fd)
        num_left = max_bytes + 1
        while num_left:
            data = os.read(fd, min(num_left, READ_BYTES))
            if not data:
                break
            write_whole(1, data)
            num_left -= len(data)
    except (OSError, ValueError, RecursionError) as error:
        return report_error(error)
    return 0


def write_file(path: str) -> int:
    """Writes standard input to a file, and makes the folders above it."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY, 0o644)
        check_regular(fd)
        os.ftruncate(fd, 0)
        while True:
            data = os.read(0, READ_BYTES)
            if not data:
                return 0
            write_whole(fd, data)
    except (OSError, ValueError, RecursionError) as error:
        return report_error(error)


def check_regular(fd: int) -> None:
    """Raises OSError for devices, pipes and folders."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(INVALID, "Not a regular file")


def write_whole(fd: int, data: bytes) -> None:
    """Writes all of `data`."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def report_error(error: Exception) -> int:
    """Tells the client the error's number and words; the exit code is that of a failed body. What Python raises for a
    path that cannot be (a null byte, half a character, thousands of folders) is EINVAL to the client."""
    number, words = (error.errno, error.strerror) if isinstance(error, OSError) else (INVALID, "Invalid path")
    sys.stderr.write(f"{number or 0} {words}")
    sys.stderr.flush()
    return 1


# -- making new, and new again


def open_folders(settings: dict[str, Any]) -> None:
    """Gives the folders where work happens the permissions that they were mounted with: runtimes in use then put on
    those of the image's folder of that name."""
    own = [settings["work_dir"], *settings.get("more_dirs", ())]
    wanted = {**dict.fromkeys(own, 0o755), settings["tmp_dir"]: 0o1777}
    for folder, mode in wanted.items():
        if folder.startswith("/dev/") or not os.path.isdir(folder):  # what the engine mounts by itself is sound
            continue
        state = os.stat(folder)
        if stat.S_IMODE(state.st_mode) != mode:
            change_mode(folder, mode, state.st_uid)


def change_mode(folder: str, mode: int, owner: int) -> None:
    """Changes a mode as the owner of the folder, since root without capabilities may not."""
    if owner == os.geteuid():
        os.chmod(folder, mode)
        return
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(owner)
            os.setuid(owner)
            os.chmod(folder, mode)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def describe_roots(folders: list[str]) -> dict[str, list[int]]:
    """Mode, owner, group and times of the folders where files can be written, those that are there."""
    roots = {}
    for folder in folders:
        if os.path.isdir(folder):
            state = os.stat(folder)
            roots[folder] = [state.st_mode, state.st_uid, state.st_gid, state.st_atime_ns, state.st_mtime_ns]
    return roots


def clean_up(roots: dict[str, list[int]], uid: int) -> int:
    """Empties the folders, and makes those of the agent's user `uid` what they were."""
    try:
        for folder, state in roots.items():
            empty_folder(folder, uid)
            if os.stat(folder).st_uid == uid:
                restore_root(folder, state)
    except OSError as error:
        return report_error(error)
    return 0


def restore_root(folder: str, state: list[int]) -> None:
    """Takes off what its owner can have put on a folder itself, and sets its mode and times back."""
    for name in attribute_names(folder):
        os.removexattr(folder, name)
    restore_flags(folder)
    os.chmod(folder, stat.S_IMODE(state[0]))
    os.utime(folder, ns=(state[3], state[4]))


def attribute_names(folder: str) -> list[str]:
    """The extended attributes of a folder, access lists among them."""
    try:
        return os.listxattr(folder)
    except OSError as error:
        if error.errno in NOT_SUPPORTED:
            return []
        raise


def restore_flags(folder: str) -> None:
    """Clears the flags that `chattr` sets, which its owner may."""
    try:
        import fcntl
    except ImportError:
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        flags = fcntl.ioctl(fd, FLAGS_GET, bytes(8))
        if any(flags):
            fcntl.ioctl(fd, FLAGS_SET, bytes(8))
    except OSError as error:
        if error.errno not in (*NOT_SUPPORTED, INVALID, 1):
            raise
    finally:
        os.close(fd)


def what_is_left(roots: dict[str, list[int]], is_local: bool) -> str:
    """What a reset has left, in words; empty when the box is as it was. Looks as the toolbox's own user."""
    for folder, state in roots.items():
        if os.listdir(folder):
            return f"{folder} is not empty"
        if attribute_names(folder):
            return f"{folder} has attributes"
        if os.stat(folder).st_uid == os.geteuid():
            os.utime(folder, ns=(state[3], state[4]))
        now = os.stat(folder)
        if [now.st_mode, now.st_uid, now.st_gid, now.st_mtime_ns] != [*state[:3], state[4]]:
            return f"mode, owner or times of {folder} have changed"
    for path in () if is_local else IPC_TABLES:
        if read_path(path).count(b"\n") > 1:  # below the heading
            return "objects are left in " + path
    return ""


def empty_folder(folder: str, uid: int) -> None:
    """Removes what is in a folder as its user `uid`, however deep and whatever the permissions. Nothing else may be
    at work in it."""
    if os.stat(folder).st_uid == uid:
        os.chmod(folder, 0o755)  # whoever owns it may have locked it
    os.chdir(folder)
    pending = [unlink_files()]
    names: list[str] = []
    while pending:
        if pending[-1]:
            name = pending[-1].pop()
            os.chmod(name, 0o700)
            os.chdir(name)  # step by step, since a whole path may be too long for the kernel
            names.append(name)
            pending.append(unlink_files())
        else:
            pending.pop()
            if names:
                os.chdir("..")
                os.rmdir(names.pop())


def unlink_files() -> list[str]:
    """Removes all but the folders from the current folder; returns the folders' names."""
    folders = []
    for entry in list(os.scandir(".")):
        if entry.is_dir(follow_symlinks=False):
            folders.append(entry.name)
        else:
            os.unlink(entry.name)
    return folders

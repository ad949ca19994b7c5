"""What a child of the toolbox does with whole folders as the agent's user: sends one as a tar archive, or fills one.

Runs inside the box, beside `toolbox`: standard library only, Python 3.8 and later. The other end is `archive`.
"""

from __future__ import annotations

import os
import stat

from driftgym.sandboxes.toolbox_files import report_error, write_whole
from driftgym.sandboxes.toolbox_system import READ_BYTES

TYPE_CHECKING = False  # the module typing costs several milliseconds at each start
if TYPE_CHECKING:
    import tarfile
    from collections.abc import Iterator

BLOCK_BYTES = 512
TOO_LARGE = 27
MAX_PATH_BYTES = 4096


def pack(folder: str, max_bytes: int, max_files: int) -> int:
    """Writes a folder to standard output as a tar archive: files, folders and symbolic links that can be read."""
    try:
        num_left, num_files_left = max_bytes, max_files
        for path in walk(folder):
            if num_files_left == 0:
                raise OSError(TOO_LARGE, f"more than {max_files} files")
            num_files_left -= 1
            num_left -= pack_entry(path, os.path.relpath(path, folder), num_left)
        write_whole(1, bytes(2 * BLOCK_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        return report_error(error)
    return 0


def walk(folder: str) -> Iterator[str]:
    """Every path below a folder, each folder before what it holds. What cannot be listed is empty, but for the first.

    Raises OSError when `folder` itself cannot be listed.
    """
    pending = [sorted(os.path.join(folder, name) for name in os.listdir(folder))]
    while pending:
        if not pending[-1]:
            pending.pop()
            continue
        path = pending[-1].pop(0)
        yield path
        below: list[str] = []
        if os.path.isdir(path) and not os.path.islink(path):
            try:
                below = sorted(os.path.join(path, name) for name in os.listdir(path))
            except OSError:  # locked, gone, or too deep for the kernel
                below = []
        pending.append([name for name in below if len(os.fsencode(name)) < MAX_PATH_BYTES])


def pack_entry(path: str, name: str, max_bytes: int) -> int:
    """Writes one entry; how many bytes of content it has. Raises OSError when these are more than `max_bytes`."""
    import tarfile

    try:
        state = os.lstat(path)
        entry = tarfile.TarInfo(name)
        entry.mode, entry.mtime = stat.S_IMODE(state.st_mode), int(state.st_mtime)
        if stat.S_ISLNK(state.st_mode):
            entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(path)
        elif stat.S_ISDIR(state.st_mode):
            entry.type = tarfile.DIRTYPE
        elif stat.S_ISREG(state.st_mode):
            return pack_file(path, entry, max_bytes)
        else:
            return 0
    except OSError as error:
        if error.errno == TOO_LARGE:
            raise
        return 0  # it cannot be read, or is gone
    write_whole(1, header(entry))
    return 0


def pack_file(path: str, entry: tarfile.TarInfo, max_bytes: int) -> int:
    """Writes a regular file, which may change meanwhile: as many bytes as its header has said."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY)
    try:
        state = os.fstat(fd)
        if not stat.S_ISREG(state.st_mode):
            return 0
        if state.st_size > max_bytes:
            raise OSError(TOO_LARGE, "more bytes than asked for")
        entry.size = num_left = state.st_size
        write_whole(1, header(entry))
        while num_left:
            data = os.read(fd, min(num_left, READ_BYTES)) or bytes(min(num_left, READ_BYTES))
            write_whole(1, data)
            num_left -= len(data)
        write_whole(1, bytes(-entry.size % BLOCK_BYTES))
        return entry.size
    finally:
        os.close(fd)


def header(entry: tarfile.TarInfo) -> bytes:
    """The blocks before an entry's content."""
    import tarfile

    return entry.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def unpack(folder: str) -> int:
    """Fills a folder, which is made, from the tar archive at standard input."""
    import tarfile

    try:
        os.makedirs(folder, exist_ok=True)
        source = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115 (it is not ours to close)
        with tarfile.open(fileobj=source, mode="r|", encoding="utf-8", errors="surrogateescape") as archive:
            for entry in archive:
                unpack_entry(archive, entry, os.path.join(folder, entry.name))
                archive.members = []  # type: ignore[attr-defined]  # it would keep them all
        while os.read(0, READ_BYTES):
            pass
    except tarfile.TarError as error:
        return report_error(OSError(5, f"the archive cannot be read: {error}"))
    except (OSError, ValueError, RecursionError) as error:
        return report_error(error)
    return 0


def unpack_entry(archive: tarfile.TarFile, entry: tarfile.TarInfo, path: str) -> None:
    """Writes one entry; a file takes the place of one of the same name. Raises OSError when that cannot be done."""
    if entry.isdir():
        os.makedirs(path, exist_ok=True)
        os.chmod(path, entry.mode)
        return
    if os.path.lexists(path):
        os.unlink(path)
    if entry.issym():
        os.symlink(entry.linkname, path)
        return
    content = archive.extractfile(entry)
    if content is None:
        return
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        while True:
            data = content.read(READ_BYTES)
            if not data:
                break
            write_whole(fd, data)
        os.fchmod(fd, entry.mode)
    finally:
        os.close(fd)

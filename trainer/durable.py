"""What is to outlast a failure of the machine, and not of the process alone, is flushed to the disk by its path.

A file is there after a power failure once it and its folder were flushed; in that order, since a name must not be there
before what it stands for.
"""

import contextlib
import errno
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_CANNOT = (errno.EINVAL, errno.ENOTSUP)
_MAX_AT_ONCE = 16


def flush_to_disk(*paths: Path) -> None:
    """Waits until the files, and the names in the folders, among `paths` are on the disk, one after another.

    A folder that may not be read, such as one of others that can only be written to, cannot be flushed either: it is
    passed over.

    Raises:
        OSError: one is not there, a file may not be read, or the disk refuses.
    """
    for path in paths:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except PermissionError:
            if path.is_dir():
                continue
            raise
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _CANNOT:  # a file system that does not flush folders
                raise
        finally:
            os.close(descriptor)


def flush_files(folder: Path, files: Sequence[Path]) -> None:
    """As `flush_to_disk`: files of `folder`, many at a time, then their names in it.

    A disk flushes many files in little more than the time of one. Files that somebody has removed meanwhile are passed
    over; without files, nothing is done.

    Raises:
        OSError: the folder is not there, a file may not be read, or the disk refuses.
    """
    if not files:
        return
    with ThreadPoolExecutor(min(_MAX_AT_ONCE, len(files)), thread_name_prefix="flush") as threads:
        list(threads.map(_flush_if_there, files))
    flush_to_disk(folder)


def _flush_if_there(file: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        flush_to_disk(file)

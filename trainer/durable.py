"""What is to outlast a failure of the machine, and not of the process alone, is flushed to the disk by its path.

A file is there after a power failure once it and its folder were flushed; in that order, since a name must not be there
before what it stands for.
"""

import errno
import os
from pathlib import Path

_CANNOT = (errno.EINVAL, errno.ENOTSUP)


def flush_to_disk(*paths: Path) -> None:
    """Waits until the files, and the names in the folders, among `paths` are on the disk, one after another.

    Raises:
        OSError: one is not there, or the disk refuses.
    """
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _CANNOT:  # a file system that does not flush folders
                raise
        finally:
            os.close(descriptor)

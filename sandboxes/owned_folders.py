"""Temporary folders that name their owner, so that those of owners that were killed are known and removed.

The owner stands in the name, which comes with the folder: at no moment is there a folder that nobody seems to own.
Removed are folders of this user's, whose name says an owner that is certainly gone (`owners.is_owner_alive`); at the
next start of boxes that are processes, and by `driftgym sandbox reap`. Several may sweep at once.
"""

import functools
import hashlib
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

from driftgym.sandboxes.owners import is_owner_alive, own_host, own_label
from driftgym.sandboxes.toolbox_system import kill_all, process_table, tag_in_environment

_NAME = re.compile(
    r"driftgym-(?P<what>work|tmp|image)-(?P<host>[0-9a-f]{12})-(?P<pid>\d+)-(?P<started>\d+)-[a-z0-9_]{8}"
)


def owned_prefix(what: str) -> str:
    """What the name of a temporary folder of this process begins with; `tempfile` adds the rest.

    Args:
        what: `work`, `tmp` or `image`.
    """
    _, pid, started = own_label().rsplit(":", 2)
    return f"driftgym-{what}-{_digest(own_host())}-{pid}-{started}-"


def box_tag(work_folder: str | Path) -> str:
    """What the processes of the box are known by whose `/work` is this folder."""
    return Path(work_folder).name + "-"


def tagged_processes(tag: str) -> set[int]:
    """The processes of a box, wherever they are."""
    return {pid for pid in process_table() if tag_in_environment(pid, tag) is not None}


def left_over_folders() -> list[Path]:
    """The temporary folders of owners that are gone; none where temporary files have no folder that can be read."""
    try:
        with os.scandir(tempfile.gettempdir()) as entries:
            return [Path(entry.path) for entry in entries if _is_left_over(entry)]
    except OSError:
        return []


def sweep_folders() -> int:
    """Removes them, and ends what still runs of their boxes. Returns how many are gone."""
    folders = left_over_folders()
    for folder in folders:
        find = functools.partial(tagged_processes, box_tag(folder))
        if find():
            kill_all(find)
        shutil.rmtree(folder, ignore_errors=True)
    return sum(not folder.exists() for folder in folders)


def _is_left_over(entry: "os.DirEntry[str]") -> bool:
    name = _NAME.fullmatch(entry.name)
    if name is None or name["host"] != _digest(own_host()):
        return False
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return False
    return not is_owner_alive(f"{own_host()}:{name['pid']}:{name['started']}")


def _digest(host: str) -> str:
    return hashlib.sha256(host.encode("utf-8", "surrogateescape")).hexdigest()[:12]

"""Which process owns something, and whether it is still there. An owner is a host, a process id and a start time."""

import os
import socket
from pathlib import Path

_START_TIME_FIELD = 19
"""Field 22 of /proc/PID/stat, counted from the state, which is field 3."""


def process_start_time(pid: int) -> int | None:
    """When a process of this machine started, in clock ticks since boot; None when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[_START_TIME_FIELD])


def own_host() -> str:
    """Where this process's id means something: this boot of this machine, and this namespace of process ids.

    Machines may share a name, and containers of one machine number their processes apart.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()}/{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"


def own_label() -> str:
    """This process as an owner: host, process id, start time. A process id alone would be used again."""
    return f"{own_host()}:{os.getpid()}:{process_start_time(os.getpid())}"


def is_owner_alive(owner: str) -> bool:
    """False only when it is certain that the owner is gone: it was on this host, and is not there any more."""
    rest, _, started = owner.rpartition(":")
    host, _, pid = rest.rpartition(":")
    if host != own_host() or not _is_number(pid) or not _is_number(started):
        return True
    found = process_start_time(int(pid))
    if found is None:
        return _is_hidden(int(pid))
    return found == int(started)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 20


def _is_hidden(pid: int) -> bool:
    """True when a process exists and is not shown: /proc may be mounted so that others' processes are not."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return process_start_time(pid) is not None  # a zombie can be sent a signal

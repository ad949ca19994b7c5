"""Which rights a child of the toolbox gives up: those of a command all, those of work on files all but its safety.

Runs inside the box, beside `toolbox`: standard library only, Python 3.8 and later.

What reads, writes, copies or empties for the owner touches files as the agent's user, and must not end because a
process of the agent's signals it: that would be taken for trouble with the box. The kernel looks for files at one of a
process's users, and for signals, tracing and priorities at the three others. So such a child has the agent's as the
first, and others as the rest, without a capability. It runs no program, and loads nothing that the agent can write.
"""

from __future__ import annotations

import os
import struct

from driftgym.sandboxes.toolbox_system import GROUP_BASE, read_path

TYPE_CHECKING = False  # the module typing costs several milliseconds at each start
if TYPE_CHECKING:
    from typing import Any

FILE_OPS = ("read", "write", "upload", "download", "reset")
NOBODY = GROUP_BASE
"""A user that is neither root nor the agent's: root's would open what lies in /proc/sys, the agent's may be slowed."""
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
CAPABILITY_VERSION = 0x20080522
SETUID_BIT = 1 << 7
KEEP = -1


class Rights:
    """Gives up the rights of children. Made before any process of the agent's is there."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.uid = settings["uid"]
        self.gid: Any = settings.get("gid")
        self.root_capabilities = settings.get("root_capabilities", ())
        self.set_file_user: Any = find_call("setfsuid") if self.uid else None
        self.set_capabilities: Any = find_call("capset") if self.uid is not None else None
        if settings.get("is_root_writable"):  # what children load later, lest they load what an agent wrote
            import fcntl
            import tarfile

            self.loaded = (fcntl, tarfile)

    def give_up(self, op: str, request_id: int) -> None:
        """Makes this process one of the agent's, or one that works on files for its user.

        Raises OSError when that cannot be done.
        """
        if self.uid is None:
            return
        os.setgroups([GROUP_BASE + request_id])
        os.setgid(self.gid)
        if self.set_file_user is not None and self.set_capabilities is not None and op in FILE_OPS:
            self.work_on_files()
            return
        os.setuid(self.uid)
        if self.uid == 0 and self.set_capabilities is not None:
            clear_ambient()
            status = read_path("/proc/self/status").split()
            had = int(status[status.index(b"CapPrm:") + 1], 16)
            self.keep(had & sum(1 << number for number in self.root_capabilities))

    def work_on_files(self) -> None:
        """Takes the agent's user for files alone. Where the kernel has no such user apart (gVisor's), the effective
        one stands for it: that kernel lets nobody slow another process."""
        os.setresuid(0, NOBODY, 0)
        self.keep(SETUID_BIT)  # the change of the effective user has switched it off
        self.set_file_user(self.uid)
        if self.set_file_user(self.uid) != self.uid:  # it returns the one before
            os.setresuid(KEEP, self.uid, KEEP)
        self.keep(0)

    def keep(self, capabilities: int) -> None:
        """Gives up every other capability; these are in effect. Under no-new-privileges, none comes back."""
        low, high = capabilities & 0xFFFFFFFF, capabilities >> 32
        sets = struct.pack("<6I", low, low, 0, high, high, 0)
        if self.set_capabilities(struct.pack("<Ii", CAPABILITY_VERSION, 0), sets) != 0:
            raise OSError(1, "capabilities cannot be given up")


def clear_ambient() -> None:
    """Gives up what programs would be given anew."""
    prctl = find_call("prctl")
    if prctl is not None:
        prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)


def find_call(name: str) -> Any:
    """A function of the C library that Python has none for: `call(*arguments)` is its result. None where there is none.

    By the core of `ctypes` if that is the usual one: the package itself takes a box milliseconds at its start.
    """
    try:
        import _ctypes

        core: Any = _ctypes
        call, address = core.call_function, core.dlsym(core.dlopen(None, 0), name)
        return lambda *arguments: call(address, arguments)
    except (ImportError, AttributeError, TypeError, OSError):
        pass
    try:
        import ctypes

        return getattr(ctypes.CDLL(None), name)
    except (ImportError, AttributeError, OSError):
        return None

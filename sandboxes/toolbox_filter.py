"""The toolbox's own filter of system calls, for itself and for every process that it starts in a container.

Runs inside the box, beside `toolbox`: standard library only, Python 3.8 and later.

It stands behind the engine's filter, which it does not replace, and closes what the filters of engines in use leave
open: sockets of other families than unix, IPv4, IPv6 and netlink (a vsock reaches the host of a virtual machine from
a container without network), io_uring (which works past filters), and parts of the kernel that no command needs.
"""

from __future__ import annotations

import os
import struct

TYPE_CHECKING = False  # the module typing costs several milliseconds at each start
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK."""
IO_URING = (425, 426, 427)
SOCKET_BY_ARCHITECTURE = {0xC000003E: 41, 0x40000003: 359, 0xC00000B7: 198, 0x40000028: 281}
"""Of x86-64, i386, arm64 and arm: the number of socket(2)."""
DENIED_BY_ARCHITECTURE = {
    0xC000003E: (248, 249, 250, 298, 321, 323),
    0x40000003: (102, 286, 287, 288, 336, 357, 374),
    0xC00000B7: (217, 218, 219, 241, 280, 282),
    0x40000028: (309, 310, 311, 364, 386, 388),
}
"""add_key, request_key, keyctl, perf_event_open, bpf, userfaultfd; of i386 also socketcall, whose arguments a filter
cannot see."""
X32_MASK = 0xBFFFFFFF
"""Takes away the mark of x86-64's second table of calls."""

LOAD, AND, JUMP_EQUAL, RETURN = 0x20, 0x54, 0x15, 0x06
NUMBER_AT, ARCHITECTURE_AT, ARGUMENT_AT = 0, 4, 16
ALLOW = 0x7FFF0000
SET_NO_NEW_PRIVILEGES, SET_SECCOMP, MODE_FILTER = 38, 22, 2
"""Of prctl(2); without the first, the second needs a right that nobody has here."""
HEAD_FORMAT = "=H6xQ"
NO_SUCH_CALL, NO_SUCH_FAMILY = 0x00050000 | 38, 0x00050000 | 97  # ENOSYS, EAFNOSUPPORT


def instruction(code: int, k: int, if_equal: int = 0, if_not: int = 0) -> bytes:
    """One instruction; the jumps count what is left out."""
    return struct.pack("=HBBI", code, if_equal, if_not, k)


def denies(number: int) -> list[bytes]:
    """Denies one call."""
    return [instruction(JUMP_EQUAL, number, 0, 1), instruction(RETURN, NO_SUCH_CALL)]


def rules_of(architecture: int) -> list[bytes]:
    """What holds for calls of one architecture; falls through nowhere."""
    rules = [instruction(LOAD, NUMBER_AT), instruction(AND, X32_MASK)]
    for number in (*IO_URING, *DENIED_BY_ARCHITECTURE[architecture]):
        rules += denies(number)
    rules += [
        instruction(JUMP_EQUAL, SOCKET_BY_ARCHITECTURE[architecture], 1, 0),
        instruction(RETURN, ALLOW),
        instruction(LOAD, ARGUMENT_AT),
    ]
    for family in FAMILIES:
        rules += [instruction(JUMP_EQUAL, family, 0, 1), instruction(RETURN, ALLOW)]
    return [*rules, instruction(RETURN, NO_SUCH_FAMILY)]


def filter_program() -> Sequence[bytes]:
    """The whole filter. Calls of an architecture that it does not know are left to the engine's."""
    program = []
    for architecture in SOCKET_BY_ARCHITECTURE:
        rules = rules_of(architecture)
        program += [instruction(LOAD, ARCHITECTURE_AT), instruction(JUMP_EQUAL, architecture, 0, len(rules)), *rules]
    return [*program, instruction(RETURN, ALLOW)]


def install_filter() -> bool:
    """Puts the filter on this process and those that it will start, for good. False where the image's Python or the
    kernel lacks what it takes: the engine's filter stands alone then."""
    if struct.calcsize("P") != 8 or os.name != "posix":
        return False
    program = filter_program()
    for install in (install_by_core, install_by_ctypes):
        try:
            return install(b"".join(program), len(program))
        except (ImportError, AttributeError, TypeError, OSError):
            pass
    return False


def install_by_core(code: bytes, num_steps: int) -> bool:
    """With the core of `ctypes` alone: the package itself takes a box milliseconds at its start, and memory that each
    fork has to copy. Raises ImportError, AttributeError or TypeError where the core is another one."""
    import _ctypes

    core: Any = _ctypes
    byte = type("Byte", (core._SimpleCData,), {"_type_": "c"})
    buffer_type: Any = type("Buffer", (core.Array,), {"_type_": byte, "_length_": len(code)})
    buffer = buffer_type.from_buffer_copy(code)
    head = struct.pack(HEAD_FORMAT, num_steps, core.addressof(buffer))
    prctl = core.dlsym(core.dlopen(None, 0), "prctl")
    calls = [(SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (SET_SECCOMP, MODE_FILTER, head, 0, 0)]
    return all(core.call_function(prctl, call) == 0 for call in calls)


def install_by_ctypes(code: bytes, num_steps: int) -> bool:
    """As documented. Raises ImportError, AttributeError or OSError where there is none."""
    import ctypes

    buffer = ctypes.create_string_buffer(code, len(code))
    head = ctypes.create_string_buffer(struct.pack(HEAD_FORMAT, num_steps, ctypes.addressof(buffer)))
    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    calls = [(SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (SET_SECCOMP, MODE_FILTER, ctypes.addressof(head), 0, 0)]
    return all(prctl(*call) == 0 for call in calls)

"""What the toolbox's filter of system calls lets through, and what not, on a process of this machine."""

import subprocess
import sys

import pytest

from driftgym.sandboxes.toolbox_filter import SOCKET_BY_ARCHITECTURE, filter_program, rules_of

PROGRAM = """
import ctypes, errno, mmap, os, signal, socket, subprocess, sys
from driftgym.sandboxes import toolbox_filter
if sys.argv[2] == "any":
    assert toolbox_filter.install_filter()
else:
    steps = toolbox_filter.filter_program()
    assert getattr(toolbox_filter, sys.argv[2])(b"".join(steps), len(steps))
libc = ctypes.CDLL(None, use_errno=True)

def attempt(body):
    try: body()
    except OSError as error: return errno.errorcode[error.errno]
    return "ok"

def call(number, *args):
    if libc.syscall(number, *args) < 0: raise OSError(ctypes.get_errno(), "")

def old_socket_call():
    "socket(AF_VSOCK, SOCK_STREAM, 0) by the table of 32-bit programs."
    code = bytes.fromhex("53 b8 67010000 bb 28000000 b9 01000000 31 d2 cd 80 5b c3")
    memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(code)
    result = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))()
    if result < 0: raise OSError(-result, "")

for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK):
    kind = socket.SOCK_RAW if family == socket.AF_NETLINK else socket.SOCK_STREAM
    print(family.name, attempt(lambda: socket.socket(family, kind, 0)))
print("pair", attempt(socket.socketpair))
for family in (38, 40, 17, 21, 999):
    print(family, attempt(lambda: call(41 if sys.argv[1] == "x86_64" else 198, family, 1, 0)))
print("io_uring", attempt(lambda: call(425, 8, ctypes.create_string_buffer(256))))
print("child", subprocess.run([sys.executable, "-c", "import socket; socket.socket(40)"], stderr=-3).returncode)
print("true", subprocess.run(["true"]).returncode)
if sys.argv[1] == "x86_64":
    print("x32", attempt(lambda: call(0x40000000 | 41, 40, 1, 0)))
    sys.stdout.flush()
    print("i386", attempt(old_socket_call))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the filter is Linux's")
@pytest.mark.parametrize("way", ["any", "install_by_core", "install_by_ctypes"])
def test_filter_closes_what_it_names_and_nothing_else(way: str) -> None:
    machine = subprocess.run(["uname", "-m"], capture_output=True, text=True, check=True).stdout.strip()
    argv = [sys.executable, "-P", "-c", PROGRAM, machine, way]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    answers = dict(line.split() for line in done.stdout.splitlines())
    for name in ("AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK", "pair"):
        assert answers.pop(name) == "ok"
    for family in ("38", "40", "17", "21", "999"):
        assert answers.pop(family) == "EAFNOSUPPORT"
    assert answers.pop("io_uring") == "ENOSYS"
    assert (answers.pop("child"), answers.pop("true")) == ("1", "0")
    if machine == "x86_64":
        assert answers.pop("x32") in ("EAFNOSUPPORT", "ENOSYS")
        assert answers.pop("i386", "no 32-bit calls here") in ("EAFNOSUPPORT", "no 32-bit calls here")
    assert answers == {}


def test_jumps_stay_within_a_byte() -> None:
    assert all(len(rules_of(architecture)) < 256 for architecture in SOCKET_BY_ARCHITECTURE)
    assert all(len(step) == 8 for step in filter_program())
    assert len(filter_program()) < 4096, "the kernel takes no more"

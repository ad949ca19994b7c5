"""What the escape attempts share: boxes with small limits, and the program that makes an attempt inside of one."""

import contextlib
from collections.abc import AsyncIterator

import pytest
from docker_engine import open_docker, require_gvisor

from driftgym.errors import SandboxError
from driftgym.sandboxes.base import MIB, Sandbox, SandboxSpec
from driftgym.sandboxes.docker_provider import DockerProvider

START_TIMEOUT_S = 60.0
DOCKER = pytest.param("docker", marks=pytest.mark.docker)
ENGINE_EXEC = pytest.param("engine-exec", marks=pytest.mark.docker)
GVISOR = pytest.param("gvisor", marks=[pytest.mark.docker, pytest.mark.gvisor])
KINDS = [DOCKER, ENGINE_EXEC, GVISOR]

REFUSED = 7
"""The exit code of an attempt that the system refused."""

PRELUDE = """
import ctypes, errno, os, signal, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
NUMBERS = {
    "x86_64": {"pivot_root": 155, "init_module": 175, "quotactl": 179, "kexec_load": 246, "add_key": 248,
               "keyctl": 250, "perf_event_open": 298, "fanotify_init": 300, "open_by_handle_at": 304,
               "process_vm_readv": 310, "bpf": 321, "userfaultfd": 323, "reboot": 169, "exit": 60},
    "aarch64": {"pivot_root": 41, "init_module": 105, "quotactl": 60, "kexec_load": 104, "add_key": 217,
                "keyctl": 219, "perf_event_open": 241, "fanotify_init": 262, "open_by_handle_at": 265,
                "process_vm_readv": 270, "bpf": 280, "userfaultfd": 282, "reboot": 142, "exit": 93},
}[os.uname().machine]
NUMBERS.update(io_uring_setup=425, pidfd_open=434, pidfd_getfd=438, pidfd_send_signal=424)
def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def call(name, *args):
    return check(getattr(libc, name)(*args))
def system_call(name, *args):
    return check(libc.syscall(NUMBERS[name], *args))
def zeros(num_bytes):
    return ctypes.create_string_buffer(num_bytes)
def guards():
    "The processes of the box that are not the agent's."
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try: lines = open("/proc/" + name + "/status").read().split("\\n")
            except OSError: continue
            if any(line.split()[:2] == ["Uid:", "0"] for line in lines):
                found.append(int(name))
    return found
def on_each_guard(attempt):
    "Fails unless the attempt succeeds on any."
    assert guards()
    for pid in guards():
        try: attempt(pid)
        except OSError as error: last = error
        else: return
    raise last
def become_root_of_a_namespace():
    uid, gid = os.getuid(), os.getgid()
    call("unshare", 0x10000000)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        try:
            with open("/proc/self/" + name, "w") as file: file.write(text)
        except OSError:
            if name != "setgroups": raise
def main():
    try: attempt()
    except OSError as error:
        print(error)
        sys.exit(7)
"""


def attempt_program(body: str) -> list[str]:
    """An argv that makes the attempt `body`: exit code REFUSED when the system refuses, 0 when it lets it."""
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    return ["python3", "-I", "-S", "-c", f"{PRELUDE}\ndef attempt():\n{lines}\nmain()\n"]


async def small_spec(kind: str, provider: DockerProvider) -> SandboxSpec:
    """A box of one kind, of the base image, with limits that are soon reached."""
    if kind == "gvisor":
        await require_gvisor(provider.engine)
    return SandboxSpec(
        base="debian",
        toolbox="engine" if kind == "engine-exec" else "auto",
        runtime="runsc" if kind == "gvisor" else None,
        memory_bytes=128 * MIB,
        max_pids=32,
        max_open_files=64,
        work_dir_bytes=8 * MIB,
    )


@contextlib.asynccontextmanager
async def small_box(kind: str) -> AsyncIterator[Sandbox]:
    """A box of one kind with small limits, and its provider, closed at the end."""
    provider = await open_docker()
    try:
        yield await provider.start(await small_spec(kind, provider), timeout_s=START_TIMEOUT_S)
    finally:
        await provider.close()


async def assert_usable(box: Sandbox, kind: str, *, why_lost: str = "") -> None:
    """The box answers. One under gVisor may instead be reported as lost, for the reason `why_lost`, where it is given:
    its kernel is a process within the box's own limits, and ends with them."""
    try:
        result = await box.exec(["echo", "on"], timeout_s=20)
    except SandboxError as error:
        if kind != "gvisor" or not why_lost:
            raise
        assert_reason(error, why_lost)
    else:
        assert result.stdout == "on\n"


def assert_reason(error: SandboxError, *reasons: str) -> None:
    """The error says one of these."""
    assert any(reason in str(error) for reason in reasons), str(error)

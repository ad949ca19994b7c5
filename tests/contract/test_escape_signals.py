"""Attempts to hinder what reads, writes and copies files for the owner: such an episode would not be graded."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from attacks import DOCKER, GVISOR, attempt_program, small_box

from driftgym.sandboxes.base import MIB, Sandbox

pytestmark = [pytest.mark.docker, pytest.mark.asyncio(loop_scope="module")]

KILLER = """
if os.fork(): sys.exit()
os.setsid()
open("/work/begun", "w").close()
while True:
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in (1, os.getpid()):
            try: os.kill(int(name), signal.SIGKILL)
            except OSError: pass
"""
HINDRANCE = """
import json
PTRACE_SEIZE, GIVE_ATTACH = 0x4206, 16
def is_helper(pid):
    "A process that is not the agent's, and has the tag of a request."
    try: lines = open(f"/proc/{pid}/status").read().splitlines()
    except OSError: return False
    words = {line.split(":")[0]: line.split()[1:] for line in lines if ":" in line}
    groups = [int(word) for word in words.get("Groups", [])]
    return words.get("Uid", [""])[0] == "0" and max(groups, default=0) >= 1 << 20
def opens(path, mode):
    with open(path, mode) as file: return file.read(1) if mode == "rb" else b""
def on_handle(name, pid, *rest):
    handle = os.pidfd_open(pid)
    try: return system_call(name, handle, *rest)
    finally: os.close(handle)
def streams(pid):
    names = os.listdir(f"/proc/{pid}/fd")
    if not names: raise PermissionError(errno.EACCES, "none is shown")
    for name in names: opens(f"/proc/{pid}/fd/{name}", "rb+")
ATTEMPTS = {
    "stop": lambda pid: os.kill(pid, signal.SIGSTOP),
    "kill": lambda pid: os.kill(pid, signal.SIGKILL),
    "group": lambda pid: os.killpg(pid, signal.SIGKILL),
    "handle": lambda pid: on_handle("pidfd_send_signal", pid, signal.SIGKILL, None, 0),
    "trace": lambda pid: call("ptrace", PTRACE_SEIZE, pid, 0, 0),
    "memory": lambda pid: opens(f"/proc/{pid}/mem", "rb+"),
    "environment": lambda pid: opens(f"/proc/{pid}/environ", "rb"),
    "streams": streams,
    "descriptor": lambda pid: on_handle("pidfd_getfd", pid, 1, 0),
    "memory-killer": lambda pid: opens(f"/proc/{pid}/oom_score_adj", "rb+"),
    "limits": lambda pid: __import__("resource").prlimit(pid, 7, (0, 0)),
    "priority": lambda pid: os.setpriority(os.PRIO_PROCESS, pid, 19),
    "idle": lambda pid: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)),
}
num_tries, done = dict.fromkeys(ATTEMPTS, 0), set()
while not os.path.exists("/work/stop"):
    for name in os.listdir("/proc"):
        if not name.isdigit() or not is_helper(int(name)): continue
        for kind, attempt in ATTEMPTS.items():
            try:
                attempt(int(name))
                if is_helper(int(name)): done.add(kind)
            except OSError as error:
                num_tries[kind] += error.errno not in (errno.ESRCH, errno.ENOENT)
print(json.dumps({"refused": num_tries, "done": sorted(done)}))
"""
NO_EFFECT = {"gvisor": {"priority", "idle", "environment"}}
"""What that kernel answers without doing anything, and an environment that holds nothing."""


@pytest.fixture(scope="module", params=[DOCKER, GVISOR])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def boxes(kind: str) -> AsyncIterator[Sandbox]:
    async with small_box(kind) as box:
        yield box


@pytest_asyncio.fixture(loop_scope="module")
async def box(boxes: Sandbox) -> Sandbox:
    """The one box of this module, clean."""
    await boxes.reset()
    return boxes


async def test_files_are_read_and_written_beside_one_who_kills_all_he_can(box: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x").write_bytes(b"x" * 100_000)
    await box.exec(attempt_program(KILLER))
    assert await box.read_file("begun") == b""
    for number in range(60):
        content = b"%d" % number * 1000
        await box.write_file("deep/f", content)
        assert await box.read_file("deep/f") == content
    for number in range(5):
        await box.upload(tmp_path / "in", "/work/up")
        await box.download("/work/up", tmp_path / str(number))
        assert (tmp_path / str(number) / "x").read_bytes() == b"x" * 100_000
    await box.reset(keep_files=True)
    assert (await box.exec(["cat", "up/x"])).stdout == "x" * 100_000


async def test_helpers_cannot_be_signaled_traced_read_or_slowed(box: Sandbox, kind: str) -> None:
    attempts = asyncio.ensure_future(box.exec(attempt_program(HINDRANCE), timeout_s=60))
    await box.write_file("big", b"x" * MIB)
    for _ in range(40):
        assert len(await box.read_file("big")) == MIB
    await box.write_file("stop", b"")
    result = await attempts
    assert result.exit_code == 0, result
    found = json.loads(result.stdout)
    assert set(found["done"]) <= NO_EFFECT.get(kind, set()), found
    untried = {name for name, num in found["refused"].items() if not num} - NO_EFFECT.get(kind, set())
    assert not untried, found


async def test_a_helper_has_the_agent_s_user_for_files_alone(box: Sandbox, kind: str) -> None:
    """No capability, no way back to one, and neither root's user nor the agent's where the kernel looks for others."""
    lines = (await box.read_file("/proc/self/status")).decode().splitlines()
    words = {line.partition(":")[0]: line.split()[1:] for line in lines}
    real, effective, saved, files = words["Uid"]
    assert (real, saved, files) == ("0", "0", "1000")
    assert effective not in (("0",) if kind == "gvisor" else ("0", "1000"))
    assert words["Gid"] == ["1000"] * 4
    assert len(words["Groups"]) == 1
    for name in ("CapInh", "CapPrm", "CapEff"):
        assert int(words[name][0], 16) == 0
    await box.write_file("mine", b"x")
    owner = await box.exec(["python3", "-c", "import os; s = os.stat('mine'); print(s.st_uid, s.st_gid)"])
    assert owner.stdout == "1000 1000\n"


CLOSED = ["/etc/shadow", "/proc/1/mem", "/proc/1/fd/1", "/root/x", "/proc/sys/net/ipv4/tcp_fastopen_key"]


@pytest.mark.parametrize("path", CLOSED)
async def test_helpers_open_nothing_of_root_s(box: Sandbox, path: str) -> None:
    """Also what is opened by another of a process's users than files are, as in /proc/sys."""
    if (await box.exec(["python3", "-c", f"open({path!r})"])).exit_code == 0:
        pytest.skip("here the agent itself may")
    with pytest.raises(FileNotFoundError):
        await box.read_file(path)
    with pytest.raises(OSError, match=path):
        await box.write_file(path, b"x")

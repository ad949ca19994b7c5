"""Attempts to use up what a box has, or what is around it: each meets the box's own limit.

gVisor's kernel is a process within the box's limits. Where those are reached, the box as a whole ends with it, and
says so: that is what `assert_usable` lets pass, and all that differs from a box on the shared kernel.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from attacks import KINDS, PRELUDE, START_TIMEOUT_S, assert_reason, assert_usable, attempt_program, small_spec
from docker_engine import open_docker

from driftgym.errors import SandboxError
from driftgym.sandboxes.base import MIB, Sandbox, SandboxSpec
from driftgym.sandboxes.docker_provider import DockerProvider

MEMORY = "memory limit"
ENDED = "ended"


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture
async def provider() -> AsyncIterator[DockerProvider]:
    provider = await open_docker()
    try:
        yield provider
    finally:
        await provider.close()


@pytest_asyncio.fixture
async def spec(kind: str, provider: DockerProvider) -> SandboxSpec:
    return await small_spec(kind, provider)


@pytest_asyncio.fixture
async def box(provider: DockerProvider, spec: SandboxSpec) -> Sandbox:
    return await provider.start(spec, timeout_s=START_TIMEOUT_S)


async def num_processes(provider: DockerProvider, box: Sandbox) -> int:
    """How many processes the engine counts in a box."""
    top = await provider.engine.call(provider.engine.api.top, box.sandbox_id)
    return len(top["Processes"])


FORK_BOMB = "import os, time\nwhile True:\n    try: os.fork()\n    except OSError: time.sleep(0.01)"


async def test_fork_bomb_stays_in_its_box(provider: DockerProvider, spec: SandboxSpec, box: Sandbox, kind: str) -> None:
    other = await provider.start(spec, timeout_s=START_TIMEOUT_S)
    bomb = asyncio.ensure_future(box.exec(["python3", "-c", FORK_BOMB], timeout_s=2))
    await asyncio.sleep(1)
    assert (await other.exec("echo on")).stdout == "on\n"
    if kind != "gvisor":  # of which the engine sees the kernel alone
        assert await num_processes(provider, box) <= spec.max_pids + 8
    with contextlib.suppress(SandboxError):
        assert (await bomb).timed_out
    await assert_usable(box, kind, why_lost=ENDED)


async def test_processes_in_the_background_are_bounded_and_reset(
    provider: DockerProvider, spec: SandboxSpec, box: Sandbox, kind: str
) -> None:
    if kind == "gvisor":
        pytest.skip("its kernel ends with the limit, as in the test of the fork bomb")
    await box.exec("for i in $(seq 100); do sleep 100 & done", timeout_s=5)
    assert await num_processes(provider, box) <= spec.max_pids + 8
    await box.reset()
    assert (await box.exec("echo on")).stdout == "on\n"


async def test_memory_in_small_pieces_stays_in_its_box(
    provider: DockerProvider, spec: SandboxSpec, box: Sandbox, kind: str
) -> None:
    """Many processes that make themselves as worthy of being kept as what guards the box. The kernel may take that,
    and the box is reported as lost to its memory limit; no other box is touched."""
    piece = (
        "fd = os.open('/proc/self/oom_score_adj', os.O_WRONLY)\n"
        "try: os.write(fd, b'0')\n"
        "except OSError: pass\n"
        "for _ in range(28):\n    if not os.fork():\n        kept = bytearray(b'x' * 6_000_000); time.sleep(30)\n"
        "time.sleep(1)"
    )
    other = await provider.start(spec, timeout_s=START_TIMEOUT_S)
    try:
        result = await box.exec(attempt_program(piece), timeout_s=10)
        assert result.oom_killed
        assert (await box.exec("echo on", timeout_s=20)).stdout == "on\n"
    except SandboxError as error:
        assert_reason(error, MEMORY)
    assert (await other.exec("echo on")).stdout == "on\n"


async def test_memory_in_files_is_counted(provider: DockerProvider, spec: SandboxSpec, kind: str) -> None:
    """Files of a tmpfs are memory: where they may be larger than it, writing them is what the limit ends."""
    large = spec.model_copy(update={"work_dir_bytes": 512 * MIB})
    box = await provider.start(large, timeout_s=START_TIMEOUT_S)
    try:
        result = await box.exec("head -c 400000000 /dev/zero >big; true", timeout_s=30)
        assert result.oom_killed or "No space" in result.stderr
        await box.reset()
        assert (await box.exec("echo on", timeout_s=20)).stdout == "on\n"
    except SandboxError as error:
        assert_reason(error, MEMORY, "no memory", "not clean")


@pytest.mark.parametrize("folder", ["/work", "/tmp", "/dev/shm"])
async def test_disk_is_bounded_and_given_back(box: Sandbox, folder: str) -> None:
    filled = await box.exec(f"head -c 40000000 /dev/zero >{folder}/big", timeout_s=30)
    assert filled.exit_code != 0
    assert "No space" in filled.stderr
    with pytest.raises(OSError, match="No space"):
        await box.write_file(f"{folder}/more", b"x" * 2 * MIB)
    assert (await box.exec("echo on")).stdout == "on\n"
    await box.reset()
    await box.write_file(f"{folder}/more", b"x" * MIB)


@pytest.mark.slow
async def test_empty_files_are_bounded_and_given_back(box: Sandbox, kind: str) -> None:
    """Names and inodes take memory too, which no size of a tmpfs counts: the number of files has a limit, or they
    meet that on memory."""
    script = (
        "n = 0\nfor n in range(3_000_000):\n    os.close(os.open(f'/work/{n}', os.O_CREAT | os.O_WRONLY))\nprint('all')"
    )
    try:
        result = await box.exec(attempt_program(script), timeout_s=20)
        assert "all" not in result.stdout, "three million files were made"
        await box.reset()
    except SandboxError as error:
        assert_reason(error, MEMORY, "not clean")
    else:
        assert (await box.exec("echo on; ls | head -n 1", timeout_s=20)).stdout == "on\n"


async def test_open_files_are_bounded(box: Sandbox, spec: SandboxSpec) -> None:
    script = "kept = []\nwhile True: kept.append(os.open('/dev/null', os.O_RDONLY)); print(len(kept), end=' ')"
    result = await box.exec(attempt_program(script))
    assert "Too many open files" in result.stdout
    assert max(int(word) for word in result.stdout.split() if word.isdecimal()) <= spec.max_open_files


async def test_pipes_and_sockets_of_many_processes_harm_nobody_else(box: Sandbox, kind: str) -> None:
    script = (
        "for _ in range(12):\n    if not os.fork(): break\n"
        "kept = []\n"
        "try:\n    while True: kept += socket.socketpair()\n"
        "except OSError: pass\n"
        "for end in kept: end.setblocking(False)\n"
        "for end in kept:\n"
        "    try:\n        while True: end.send(bytes(65536))\n"
        "    except OSError: pass\n"
        "time.sleep(2)"
    )
    with contextlib.suppress(SandboxError):
        await box.exec(attempt_program(script), timeout_s=4)
    await assert_usable(box, kind, why_lost=ENDED)


def own_memory_bytes() -> int:
    """What this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def highest_growth_bytes(work: "asyncio.Future[object]") -> int:
    """How much memory this process takes more, at its highest, until `work` ends."""
    before = highest = own_memory_bytes()
    while not work.done():
        await asyncio.sleep(0.02)
        highest = max(highest, own_memory_bytes())
    return highest - before


async def guard_memory_bytes(box: Sandbox) -> int:
    """The most memory that what guards the box has had so far, as the box sees it; 0 where it does not tell."""
    script = "\n".join(
        (
            PRELUDE,
            "import re",
            "texts = [open(f'/proc/{pid}/status').read() for pid in guards()]",
            "print(max(int((re.findall(r'VmHWM:\\s+(\\d+)', text) or [0])[0]) for text in texts))",
        )
    )
    result = await box.exec(["python3", "-I", "-S", "-c", script])
    return int(result.stdout) * 1024


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["1", "2"], ids=["stdout", "stderr"])
async def test_a_gigabyte_of_output_takes_no_memory(box: Sandbox, kind: str, stream: str) -> None:
    size = 1_000_000_000 if kind == "docker" else 100_000_000
    call = asyncio.ensure_future(box.exec(f"head -c {size} /dev/zero >&{stream}; exit 3", timeout_s=100))
    growth_bytes = await highest_growth_bytes(call)
    result = await call
    assert result.exit_code == 3
    assert result.num_dropped_bytes == size - MIB
    assert growth_bytes < 30 * MIB
    assert await guard_memory_bytes(box) < 60 * MIB


STAY = "time.sleep(7171)"
DAEMON = "os.fork() and os._exit(0)\nos.setsid()\nos.fork() and os._exit(0)\n"
THREAD = "import threading\nthreading.Thread(target=time.sleep, args=(7171,)).start()\n"
HIDING = {
    "ignores-signals": "for n in set(range(1, 32)) - {9, 19}: signal.signal(n, signal.SIG_IGN)\nhidden()",
    "daemon": DAEMON + "hidden()",
    "without-environment": DAEMON + "hidden(); os.execve('/bin/sleep', ['sleep', '7171'], {})",
    "stopped": DAEMON + "signal.signal(signal.SIGHUP, signal.SIG_IGN); hidden(); os.kill(os.getpid(), signal.SIGSTOP)",
    "forged-name": DAEMON + "libc.prctl(15, b'x) Z 0 0\\nGroups:\\t7'); hidden()",
    "main-thread-gone": THREAD + "hidden(); system_call('exit', 0)",
    "daemon-whose-main-thread-is-gone": DAEMON + THREAD + "hidden(); system_call('exit', 0)",
    "traced": "child = os.fork()\nif not child:\n    os.setsid(); time.sleep(7171)\n"
    "call('ptrace', 0x4206, child, 0, 0); hidden()",
    "new-namespace": DAEMON
    + "try:\n    become_root_of_a_namespace(); os.setgroups([])\nexcept OSError: pass\nhidden()",
}


OTHERS = """
def is_alive(pid):
    "Also when its first thread has ended and another runs on."
    fields = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
    return fields[0] not in "ZX" or int(fields[17]) > 1
for name in os.listdir("/proc"):
    if name.isdigit() and int(name) not in [os.getpid(), os.getppid(), *guards()]:
        try:
            if is_alive(int(name)): print(name, open(f"/proc/{name}/stat").read())
        except OSError: pass
"""


async def others_of(box: Sandbox) -> str:
    """The processes of the box that are neither what guards it nor the one that looks."""
    result = await box.exec(["python3", "-I", "-S", "-c", PRELUDE + OTHERS])
    assert result.exit_code == 0, result
    return result.stdout


@pytest.mark.parametrize("hide", HIDING.values(), ids=HIDING.keys())
async def test_deadline_finds_what_hides(box: Sandbox, hide: str) -> None:
    """The whole of what a command has started is gone after its deadline, whatever it did not to be found."""
    lines = ["def hidden(): open('/work/hides', 'w').close()", "if not os.fork():"]
    lines += [f"    {line}" for line in [*hide.splitlines(), STAY]]
    program = attempt_program("\n".join([*lines, STAY]))
    for timeout_s in (0.7, 5, 20):  # a busy machine may need that long to come to the point
        assert (await box.exec(program, timeout_s=timeout_s)).timed_out
        if (await box.exec("test -e hides")).exit_code == 0:
            break
    for _ in range(50):
        left = await others_of(box)
        if not left:
            break
        await asyncio.sleep(0.1)
    assert left == ""


@pytest.mark.parametrize("hide", HIDING.values(), ids=HIDING.keys())
async def test_reset_finds_what_hides(box: Sandbox, hide: str) -> None:
    """Also what has been left in the background by a command that ended long ago."""
    program = attempt_program("\n".join(["def hidden(): open('/tmp/hides', 'w').close()", DAEMON, hide, STAY]))
    await box.exec(program, timeout_s=20)
    for _ in range(100):
        if (await box.exec("test -e /tmp/hides")).exit_code == 0:
            break
        await asyncio.sleep(0.1)
    assert await others_of(box) != ""
    await box.reset()
    assert await others_of(box) == ""
    assert (await box.exec("echo on")).stdout == "on\n"


async def test_command_whose_main_thread_is_gone_is_answered_for(box: Sandbox) -> None:
    script = THREAD + "system_call('exit', 0)"
    result = await box.exec(attempt_program(script), timeout_s=2)
    assert result.timed_out
    assert (await box.exec("echo on")).stdout == "on\n"


async def test_zombies_are_collected(provider: DockerProvider, spec: SandboxSpec) -> None:
    roomy = spec.model_copy(update={"max_pids": 256, "memory_bytes": 256 * MIB})
    box = await provider.start(roomy, timeout_s=START_TIMEOUT_S)
    made = await box.exec("for i in $(seq 200); do (sleep 0.01 &) ; done; sleep 0.5", timeout_s=60)
    assert made.exit_code == 0
    count = "cat /proc/[0-9]*/stat 2>/dev/null | grep -c ') Z '; true"
    for _ in range(50):
        if (await box.exec(count)).stdout == "0\n":
            break
        await asyncio.sleep(0.1)
    assert (await box.exec(count)).stdout == "0\n"


async def test_parent_that_collects_no_child_meets_the_limit(box: Sandbox, kind: str) -> None:
    """Zombies that are somebody's children stay as long as that one, and count."""
    script = "for n in range(200):\n    if not os.fork(): os._exit(0)"
    with contextlib.suppress(SandboxError):
        await box.exec(attempt_program(script))
    await assert_usable(box, kind, why_lost=ENDED)

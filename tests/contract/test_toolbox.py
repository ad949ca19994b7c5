"""What the toolbox keeps within a container: flat memory, service at the process limit, a reset that is verified."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from driftgym.sandboxes.base import MIB, Sandbox, SandboxSpec
from driftgym.sandboxes.docker_provider import DockerProvider
from driftgym.sandboxes.docker_settings import toolbox_settings

pytestmark = pytest.mark.docker
START_TIMEOUT_S = 60.0


@pytest_asyncio.fixture
async def small_box(docker_provider: DockerProvider) -> AsyncIterator[Sandbox]:
    """A box with the least memory that may be asked for, and few processes."""
    spec = SandboxSpec(memory_bytes=32 * MIB, max_pids=16)
    box = await docker_provider.start(spec, timeout_s=START_TIMEOUT_S)
    yield box
    await box.close()


async def toolbox_memory_kib(box: Sandbox) -> int:
    """The most memory that the toolbox has had."""
    status = (await box.exec("cat /proc/$PPID/status")).stdout
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


@pytest.mark.slow
async def test_memory_is_flat_while_much_goes_in_and_out(small_box: Sandbox) -> None:
    before = await toolbox_memory_kib(small_box)
    num_bytes = 100_000_000
    written = await small_box.exec(
        f"head -c {num_bytes} /dev/zero | tr '\\0' x", timeout_s=120, max_output_bytes=num_bytes
    )
    assert (written.exit_code, len(written.stdout), written.output_truncated) == (0, num_bytes, False)
    read = await small_box.exec("wc -c", stdin=bytes(num_bytes), timeout_s=120)
    assert (read.exit_code, int(read.stdout), read.oom_killed) == (0, num_bytes, False)
    assert await toolbox_memory_kib(small_box) - before < 6_000


async def test_box_answers_at_its_process_limit_and_reset_wins(small_box: Sandbox) -> None:
    bomb = "import os, time\nwhile True:\n try: os.fork()\n except OSError: time.sleep(0.01)"
    await small_box.exec(["sh", "-c", f'python3 -I -S -c "{bomb}" >/dev/null 2>&1 &'])
    for _ in range(100):
        result = await small_box.exec("ls | cat", timeout_s=30)
        if result.exit_code != 0:
            break
    assert result.exit_code != 0, "the limit was never reached"
    assert not result.timed_out
    results = [await small_box.exec(["true"], timeout_s=30) for _ in range(5)]
    assert all(each.exit_code == 0 or (each.exit_code == 127 and "unavailable" in each.stderr) for each in results)
    await small_box.ping(timeout_s=10)
    await small_box.reset()
    assert (await small_box.exec("ls | cat; echo on")).stdout == "on\n"


async def test_memory_limit_is_told_of_the_command_that_it_struck(docker_provider: DockerProvider) -> None:
    box = await docker_provider.start(SandboxSpec(memory_bytes=64 * MIB), timeout_s=START_TIMEOUT_S)
    hog = "b = bytearray(2 << 30)"
    other = asyncio.ensure_future(box.exec("sleep 3; echo done", timeout_s=60))
    await asyncio.sleep(0.2)
    struck = await box.exec(["python3", "-I", "-S", "-c", hog], timeout_s=60)
    assert (struck.exit_code, struck.oom_killed, struck.timed_out) == (-9, True, False)
    assert not (await other).oom_killed
    within = await box.exec(f"python3 -I -S -c '{hog}'; true", timeout_s=60)
    assert (within.exit_code, within.oom_killed) == (0, True)
    late = await box.exec("sleep 60", timeout_s=0.3)
    assert (late.timed_out, late.oom_killed) == (True, False)
    assert not (await box.exec(["true"])).oom_killed
    await box.close()


async def test_reset_leaves_no_trace_on_the_folders_themselves(small_box: Sandbox) -> None:
    look = "stat -c '%n %a %u %g %Y' /work /tmp /dev/shm /dev/mqueue"
    before = (await small_box.exec(look)).stdout
    mark = (
        "import os\n"
        "try: os.setxattr('/work', 'user.note', b'hello')\n"
        "except OSError: pass\n"
        "os.chmod('/work', 0o710); open('/tmp/x', 'w'); open('/dev/shm/x', 'w'); os.utime('/work', (5, 5))\n"
    )
    assert (await small_box.exec(["python3", "-I", "-S", "-c", mark])).exit_code == 0
    assert (await small_box.exec(look)).stdout != before
    await small_box.reset()
    assert (await small_box.exec(look)).stdout == before
    names = await small_box.exec(["python3", "-I", "-S", "-c", "import os; print(os.listxattr('/work'))"])
    assert names.stdout == "[]\n"


async def test_files_are_kept_when_asked_to_and_no_process_is(small_box: Sandbox) -> None:
    await small_box.exec("echo x >kept; (while true; do echo y >>kept; sleep 0.01; done) >/dev/null 2>&1 &")
    await small_box.reset(keep_files=True)
    first = await small_box.read_file("kept")
    await asyncio.sleep(0.1)
    assert await small_box.read_file("kept") == first
    assert first.startswith(b"x\n")


async def test_root_keeps_the_named_capabilities_alone(docker_provider: DockerProvider) -> None:
    box = await docker_provider.start(SandboxSpec(run_as_root=True), timeout_s=START_TIMEOUT_S)
    status = (await box.exec("id -u; grep -E 'CapPrm|CapEff|CapInh|CapAmb' /proc/self/status; touch /work/x")).stdout
    lines = status.split()
    assert lines[0] == "0"
    kept = sum(1 << number for number in toolbox_settings(SandboxSpec(run_as_root=True))["root_capabilities"])
    expected = {"CapPrm:": kept, "CapEff:": kept, "CapInh:": 0, "CapAmb:": 0}
    assert {name: int(value, 16) for name, value in zip(lines[1::2], lines[2::2], strict=True)} == expected
    await box.close()

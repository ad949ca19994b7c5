"""Faults that sandboxes of this kind are known for: floods, orphans, the memory limit, an open network."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from attacks import DOCKER, ENGINE_EXEC, GVISOR, START_TIMEOUT_S, assert_usable
from docker_engine import busybox_image, open_docker, require_gvisor

from driftgym.errors import SandboxError
from driftgym.sandboxes.base import MIB, Sandbox, SandboxProvider, SandboxSpec
from driftgym.sandboxes.docker_provider import DockerProvider
from driftgym.sandboxes.providers import ProcessProvider

LIMIT_BYTES = 1_000_000


def of_kinds(*kinds: object) -> pytest.MarkDecorator:
    """Runs a test on boxes of these kinds."""
    return pytest.mark.parametrize("kind", kinds)


@pytest_asyncio.fixture
async def provider(kind: str) -> AsyncIterator[SandboxProvider]:
    provider = ProcessProvider() if kind == "process" else await open_docker()
    try:
        yield provider
    finally:
        await provider.close()


@pytest_asyncio.fixture
async def spec(kind: str, provider: SandboxProvider) -> SandboxSpec:
    """64 MB of memory, where the box can be made of so little: gVisor's kernel needs some of its own."""
    if not isinstance(provider, DockerProvider):
        return SandboxSpec(memory_bytes=128 * MIB)
    if kind == "gvisor":
        await require_gvisor(provider.engine)
        return SandboxSpec(runtime="runsc", memory_bytes=128 * MIB)
    if kind == "engine-exec":
        return SandboxSpec(image=await busybox_image(provider.engine), toolbox="engine", memory_bytes=64 * MIB)
    return SandboxSpec(memory_bytes=64 * MIB)


@pytest_asyncio.fixture
async def box(provider: SandboxProvider, spec: SandboxSpec) -> Sandbox:
    return await provider.start(spec, timeout_s=START_TIMEOUT_S)


# -- output


@of_kinds("process", DOCKER, ENGINE_EXEC, GVISOR)
@pytest.mark.parametrize("stream", [1, 2], ids=["stdout", "stderr"])
async def test_output_is_cut_and_counted_around_the_limit(box: Sandbox, stream: int) -> None:
    for size in (LIMIT_BYTES - 1, LIMIT_BYTES, LIMIT_BYTES + 1, 3 * LIMIT_BYTES):
        line = f"head -c {size} /dev/zero | tr '\\0' x >&{stream}; exit 3"
        result = await box.exec(line, timeout_s=60, max_output_bytes=LIMIT_BYTES)
        kept, other = (result.stdout, result.stderr) if stream == 1 else (result.stderr, result.stdout)
        assert result.exit_code == 3
        assert (len(kept), other) == (min(size, LIMIT_BYTES), "")
        assert result.num_dropped_bytes == max(0, size - LIMIT_BYTES)
        assert result.output_truncated == (size > LIMIT_BYTES)
        assert not any((result.timed_out, result.oom_killed))


@of_kinds("process", DOCKER, ENGINE_EXEC, GVISOR)
async def test_both_streams_are_cut_apart(box: Sandbox) -> None:
    line = "head -c 250 /dev/zero | tr '\\0' o; head -c 350 /dev/zero | tr '\\0' e >&2"
    result = await box.exec(line, max_output_bytes=100)
    assert (result.stdout, result.stderr) == ("o" * 100, "e" * 100)
    assert result.num_dropped_bytes == 150 + 250


@pytest.mark.slow
@of_kinds("process", DOCKER)
async def test_three_hundred_megabytes_do_not_grow_the_owner(box: Sandbox) -> None:
    command = "head -c 300000000 /dev/zero | tr '\\0' x; exit 3"
    call = asyncio.ensure_future(box.exec(command, timeout_s=100, max_output_bytes=LIMIT_BYTES))
    before = highest = own_memory_bytes()
    while not call.done():
        await asyncio.sleep(0.02)
        highest = max(highest, own_memory_bytes())
    result = await call
    assert result.exit_code == 3
    assert result.stdout == "x" * LIMIT_BYTES
    assert result.output_truncated
    assert result.num_dropped_bytes == 300_000_000 - LIMIT_BYTES
    assert highest - before < 50_000_000


def own_memory_bytes() -> int:
    """What this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# -- processes

ORPHANS = "for i in $(seq 300); do (sleep 0.02 &) ; done"
COUNT_ZOMBIES = "cat /proc/[0-9]*/stat 2>/dev/null | grep -c ') Z '; true"


@pytest.mark.slow
@of_kinds(DOCKER, ENGINE_EXEC, GVISOR)
async def test_orphans_are_collected(provider: SandboxProvider, spec: SandboxSpec) -> None:
    """By the init process. There may be as many at once as they like: it is not their limit that is tried."""
    roomy = spec.model_copy(update={"max_pids": 512, "memory_bytes": 512 * MIB})
    box = await provider.start(roomy, timeout_s=START_TIMEOUT_S)
    for _ in range(3):
        assert (await box.exec(ORPHANS, timeout_s=60)).exit_code is not None
        left = "?"
        for _ in range(100):
            left = (await box.exec(COUNT_ZOMBIES, timeout_s=60)).stdout
            if left == "0\n":
                break
            await asyncio.sleep(0.1)
        assert left == "0\n"


@of_kinds(DOCKER, ENGINE_EXEC, GVISOR)
async def test_bounded_fork_loop_meets_the_limit_of_its_box(
    provider: SandboxProvider, spec: SandboxSpec, kind: str
) -> None:
    """200 processes at once, where 64 are allowed: the box works on, and so does the one beside it. Of gVisor's, whose
    kernel ends with the limit, the box is reported as lost."""
    box, other = await asyncio.gather(*(provider.start(spec, timeout_s=START_TIMEOUT_S) for _ in range(2)))
    loop = "i=0; while [ $i -lt 200 ]; do sleep 2 & i=$((i+1)); done; wait"
    call = asyncio.ensure_future(box.exec(loop, timeout_s=20))
    await asyncio.sleep(0.5)
    assert (await other.exec("echo beside")).stdout == "beside\n"
    try:
        result = await call
    except SandboxError:
        assert kind == "gvisor"
    else:
        assert result.exit_code != 0 or kind == "gvisor"
    await assert_usable(box, kind, why_lost="ended")


# -- memory

HOG = 'python3 -c "b=bytearray(2<<30)"'


@of_kinds(DOCKER)
async def test_memory_limit_is_told_from_a_deadline(box: Sandbox) -> None:
    alone = await box.exec(HOG)
    assert (alone.oom_killed, alone.timed_out) == (True, False)
    assert alone.exit_code not in (0, None)
    hidden = await box.exec(f"sh -c '{HOG}; true'")
    assert (hidden.oom_killed, hidden.timed_out, hidden.exit_code) == (True, False, 0)
    in_a_pipe = await box.exec(f"{HOG} | cat; echo done")
    assert (in_a_pipe.oom_killed, in_a_pipe.stdout) == (True, "done\n")
    as_argv = await box.exec(["python3", "-c", "b=bytearray(2<<30)"])
    assert (as_argv.oom_killed, as_argv.exit_code) == (True, -9)
    late = await box.exec("sleep 60", timeout_s=0.3)
    assert (late.oom_killed, late.timed_out, late.exit_code) == (False, True, None)
    killed = await box.exec("kill -9 $$")
    assert (killed.oom_killed, killed.timed_out, killed.exit_code) == (False, False, -9)
    assert not (await box.exec("true")).oom_killed


@of_kinds(ENGINE_EXEC)
async def test_memory_limit_is_told_without_python(box: Sandbox) -> None:
    hidden = await box.exec("tail -c 300000000 /dev/zero; true", timeout_s=30)
    assert (hidden.oom_killed, hidden.timed_out, hidden.exit_code) == (True, False, 0)
    late = await box.exec("sleep 60", timeout_s=0.3)
    assert (late.oom_killed, late.timed_out) == (False, True)


@of_kinds(GVISOR)
async def test_memory_limit_ends_a_box_under_gvisor_and_is_told(box: Sandbox) -> None:
    """All of the box's memory is that of gVisor's kernel, which ends with it. The reason is in the error."""
    with pytest.raises(SandboxError, match="memory limit"):
        await box.exec(HOG, timeout_s=30)
    with pytest.raises(SandboxError, match="memory limit"):
        await box.exec("true")


@of_kinds(DOCKER)
async def test_memory_limit_met_in_the_background_is_told(box: Sandbox) -> None:
    """To the command that started what met it, while that still runs."""
    result = await box.exec(f"({HOG} &) ; sleep 1; echo done")
    assert (result.oom_killed, result.stdout) == (True, "done\n")


@of_kinds(DOCKER)
async def test_deadline_beside_the_memory_limit_is_no_memory_limit(box: Sandbox) -> None:
    """Of two commands at once, the one that meets the limit says so; each says whether it was late."""
    late = asyncio.ensure_future(box.exec("sleep 60", timeout_s=1.5))
    await asyncio.sleep(0.3)
    hog = await box.exec(HOG)
    assert (hog.oom_killed, hog.timed_out) == (True, False)
    assert (await late).timed_out
    assert (await box.exec("echo on")).stdout == "on\n"


@of_kinds("process")
async def test_memory_limit_of_a_local_box_is_an_error_of_the_program(box: Sandbox) -> None:
    result = await box.exec(HOG)
    assert "MemoryError" in result.stderr
    assert not result.oom_killed


# -- network

CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10)"
CALLS = {
    "tcp": (["python3", "-c", CONNECT, "1.1.1.1", "443"], "nc -w 2 1.1.1.1 443"),
    "name": (["python3", "-c", "import socket; socket.getaddrinfo('deb.debian.org', 80)"], "nslookup deb.debian.org"),
    "metadata": (["python3", "-c", CONNECT, "169.254.169.254", "80"], "nc -w 2 169.254.169.254 80"),
    "docker-socket": (["test", "-S", "/var/run/docker.sock"], "test -S /var/run/docker.sock"),
}


@of_kinds(DOCKER, ENGINE_EXEC, GVISOR)
async def test_network_fails_fast(box: Sandbox, kind: str) -> None:
    """Within three seconds, as an answer of the command itself."""
    for with_python, with_shell in CALLS.values():
        result = await box.exec(with_shell if kind == "engine-exec" else with_python, timeout_s=3)
        assert not result.timed_out, result
        assert result.exit_code not in (0, 127), result

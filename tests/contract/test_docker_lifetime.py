"""Whatever becomes of the owner, no box of its is left behind, and none of anybody else's is touched."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from docker_engine import boxes_of_run, busybox_image
from private_engine import PrivateEngine, private_engine

from driftgym.errors import SandboxError
from driftgym.sandboxes import reaper
from driftgym.sandboxes.base import SandboxSpec
from driftgym.sandboxes.docker_provider import DockerProvider
from driftgym.sandboxes.images import BASE_IMAGE

pytestmark = pytest.mark.docker
START_TIMEOUT_S = 60.0
PATIENCE_S = 30.0
"""For what other load on the machine may delay; longer than any bound that is tested."""

OWNER = """
import asyncio, sys
from driftgym.sandboxes.base import SandboxSpec
from driftgym.sandboxes.docker_provider import DockerProvider

def say(word):
    print(word, flush=True)

async def live(provider, spec, phase):
    say("create")
    box = await provider.start(spec, timeout_s=60)
    say("exec " + box.sandbox_id)
    if phase == "exec":
        await box.exec("sleep 300 & setsid sleep 300 & sleep 300", timeout_s=300)
    say("close")
    await box.close()

async def main():
    run_id, phase, num_boxes, dead_man_s = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    provider = await DockerProvider.open(timeout_s=10, run_id=run_id)
    spec = SandboxSpec(dead_man_s=dead_man_s)
    await asyncio.gather(*(live(provider, spec, phase) for _ in range(num_boxes)))
    await asyncio.sleep(300)

asyncio.run(main())
"""


async def eventually(holds: Callable[[], Awaitable[bool]], *, within_s: float = PATIENCE_S) -> None:
    """Waits until `holds`; the test fails when that takes too long."""
    async with asyncio.timeout(within_s):
        while not await holds():  # noqa: ASYNC110 - the engine tells nobody of it
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def owner(
    run_id: str, *, phase: str, num_boxes: int = 1, dead_man_s: float = 60.0, host: str | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Another process that owns boxes and says what it is about to do, a word a line."""
    argv = [sys.executable, "-P", "-c", OWNER, run_id, phase, str(num_boxes), str(dead_man_s)]
    env = {**os.environ, **({"DOCKER_HOST": host} if host is not None else {})}
    process = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE, env=env)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def heard(process: asyncio.subprocess.Process, word: str) -> str:
    """The line that begins with `word`, when the owner has said it."""
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        while line := (await process.stdout.readline()).decode():
            if line.startswith(word):
                return line
    raise AssertionError(f"the owner ended and never said {word!r}")


# -- the owner is killed


@pytest.fixture(scope="module")
def engine() -> Iterator[PrivateEngine]:
    """An engine on which whatever is left was left by the tests of this module."""
    with private_engine(BASE_IMAGE) as engine:
        yield engine


def test_a_private_engine_leaves_no_control_groups(tmp_path: Path) -> None:
    folder = tmp_path / f"driftgym-engine-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    engine = PrivateEngine(folder)
    roots = [root for root in Path("/sys/fs/cgroup").glob("*") if (root / "cgroup.procs").exists()]
    try:
        for root in roots or [Path("/sys/fs/cgroup")]:
            (root / folder.name / "a-box").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        pytest.skip(f"control groups cannot be made here: {error}")
    assert engine.groups()
    engine.remove()
    assert engine.groups() == []


@pytest_asyncio.fixture
async def witness(engine: PrivateEngine, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DockerProvider]:
    """A living owner of boxes on the private engine."""
    monkeypatch.setenv("DOCKER_HOST", engine.host)
    provider = await DockerProvider.open(timeout_s=10, run_id="witness")
    yield provider
    await provider.close()


def moments() -> list[tuple[str, float]]:
    """Ten moments to be killed at: what the owner has just begun, and how long ago, in seconds."""
    dice = random.Random(20)
    spans = {"create": 0.05, "start": 0.5, "exec": 0.3, "close": 0.2}
    phases = ["create", "start", "exec", "close"] * 2 + ["start", "close"]
    return [(phase, round(dice.uniform(0, spans[phase]), 3)) for phase in phases]


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "delay_s"), moments())
async def test_killed_owner_leaves_nothing(
    engine: PrivateEngine, witness: DockerProvider, run_id: str, phase: str, delay_s: float
) -> None:
    other = await witness.start(SandboxSpec(), timeout_s=START_TIMEOUT_S)
    async with owner(run_id, phase=phase, num_boxes=3, host=engine.host) as process:
        await heard(process, "create" if phase == "start" else phase)
        await asyncio.sleep(delay_s)
        process.kill()
        await process.wait()
    await eventually(lambda: runs_no_more(witness, run_id), within_s=reaper.GONE_WITHIN_S)
    await eventually(lambda: swept(witness, run_id))
    assert engine.containers() == [other.sandbox_id]
    assert (await other.exec("echo on")).stdout == "on\n"
    await other.close()
    assert engine.volumes() == []
    await eventually(lambda: is_empty(engine))


async def runs_no_more(provider: DockerProvider, run_id: str) -> bool:
    return all(box.state == "created" for box in await boxes_of_run(provider, run_id))


async def swept(provider: DockerProvider, run_id: str) -> bool:
    """Sweeps; True when nothing of the run is left. A request that the engine had begun may end after its sender."""
    await provider.sweep()
    return not await boxes_of_run(provider, run_id)


async def is_empty(engine: PrivateEngine) -> bool:
    return not engine.processes_in_containers()


@pytest.mark.slow
async def test_owner_that_is_stopped_loses_its_box_and_is_told(docker_provider: DockerProvider, run_id: str) -> None:
    async with owner(run_id, phase="exec", dead_man_s=1.0) as process:
        await heard(process, "exec")
        process.send_signal(signal.SIGSTOP)
        await eventually(lambda: is_gone(docker_provider, run_id))
        process.send_signal(signal.SIGCONT)
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == 1  # its exec has raised


async def is_gone(provider: DockerProvider, run_id: str) -> bool:
    return not await boxes_of_run(provider, run_id)


@pytest.mark.slow
async def test_idle_box_of_a_living_owner_stays(run_provider: DockerProvider, run_id: str) -> None:
    box = await run_provider.start(SandboxSpec(dead_man_s=1.0), timeout_s=START_TIMEOUT_S)
    await asyncio.sleep(4.0)
    assert (await box.exec("echo on")).stdout == "on\n"
    [info] = await boxes_of_run(run_provider, run_id)
    assert info.labels[reaper.LEASE_LABEL] == "1"


async def test_owner_whose_terminal_hangs_up_leaves_nothing(docker_provider: DockerProvider, run_id: str) -> None:
    async with owner(run_id, phase="exec", num_boxes=2) as process:
        for _ in range(2):
            await heard(process, "exec")
        process.send_signal(signal.SIGHUP)
        await process.wait()
    await eventually(lambda: is_gone(docker_provider, run_id))


# -- starts that fail


async def test_main_process_that_is_missing_leaves_nothing(run_provider: DockerProvider, run_id: str) -> None:
    image = await busybox_image(run_provider.engine)
    with pytest.raises(SandboxError, match="holds no python3"):
        await run_provider.start(SandboxSpec(image=image, toolbox="python"), timeout_s=START_TIMEOUT_S)
    assert await boxes_of_run(run_provider, run_id) == []


async def test_runtime_that_is_missing_is_a_clear_error(run_provider: DockerProvider, run_id: str) -> None:
    with pytest.raises(SandboxError, match="no-such-runtime"):
        await run_provider.start(SandboxSpec(runtime="no-such-runtime"), timeout_s=START_TIMEOUT_S)
    assert await boxes_of_run(run_provider, run_id) == []


async def test_deadline_of_a_command_leaves_nothing_after_close(run_provider: DockerProvider, run_id: str) -> None:
    box = await run_provider.start(SandboxSpec(), timeout_s=START_TIMEOUT_S)
    assert (await box.exec("setsid sleep 300 & sleep 300", timeout_s=0.3)).timed_out
    await box.close()
    assert await boxes_of_run(run_provider, run_id) == []


# -- many at once


@pytest.mark.slow
async def test_starts_of_two_processes_do_not_collide(run_provider: DockerProvider, run_id: str) -> None:
    api = run_provider.engine.api
    name = f"driftgym-{uuid.uuid4().hex[:12]}"
    foreign = await run_provider.engine.call(api.create_container, BASE_IMAGE, ["true"], name=name)
    try:
        async with owner(run_id, phase="exec", num_boxes=7) as one, owner(run_id, phase="exec", num_boxes=7) as two:
            ids = {(await heard(process, "exec")).split()[1] for process in (one, two) for _ in range(7)}
            assert len(ids) == 14
            assert {box.sandbox_id for box in await boxes_of_run(run_provider, run_id)} == ids
        await eventually(lambda: is_gone(run_provider, run_id))
        await run_provider.sweep()
        assert (await run_provider.engine.call(api.inspect_container, name))["Id"] == foreign["Id"]
    finally:
        await run_provider.remove(foreign["Id"])


@pytest.mark.slow
async def test_thirty_two_boxes_start_at_once(run_provider: DockerProvider, run_id: str) -> None:
    spec = SandboxSpec(memory_bytes=64 * 2**20)
    boxes = await asyncio.gather(*(run_provider.start(spec, timeout_s=START_TIMEOUT_S) for _ in range(32)))
    assert len({box.sandbox_id for box in boxes}) == 32
    results = await asyncio.gather(*(box.exec(["echo", str(number)]) for number, box in enumerate(boxes)))
    assert [result.stdout for result in results] == [f"{number}\n" for number in range(32)]
    await asyncio.gather(*(box.close() for box in boxes))
    assert await boxes_of_run(run_provider, run_id) == []

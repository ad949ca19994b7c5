"""How Docker boxes start and end: by their provider, by trouble from outside, and never left behind."""

import asyncio
import contextlib
import signal
import subprocess
import sys
from pathlib import Path
from typing import Literal

import docker.errors
import pytest
import pytest_asyncio
from docker_engine import boxes_of_run

from driftgym.errors import ConfigError, SandboxError
from driftgym.sandboxes import owners, reaper
from driftgym.sandboxes.base import MIB, SandboxConfig, SandboxSpec
from driftgym.sandboxes.docker import DockerSandbox
from driftgym.sandboxes.docker_provider import DockerBox, DockerProvider
from driftgym.sandboxes.images import BASE_IMAGE
from driftgym.sandboxes.providers import open_provider

pytestmark = pytest.mark.docker
START_TIMEOUT_S = 60.0


@pytest_asyncio.fixture
async def box(docker_provider: DockerProvider) -> DockerSandbox:
    return await docker_provider.start(SandboxSpec(memory_bytes=96 * MIB, max_pids=32), timeout_s=START_TIMEOUT_S)


async def test_failed_start_leaves_no_container(run_provider: DockerProvider, run_id: str) -> None:
    with pytest.raises(SandboxError, match="driftgym sandbox build"):
        await run_provider.start(SandboxSpec(image="driftgym/no-such-image:1"), timeout_s=START_TIMEOUT_S)
    with pytest.raises(SandboxError, match="did not start within"):
        await run_provider.start(SandboxSpec(), timeout_s=0.01)
    assert await boxes_of_run(run_provider, run_id) == []


async def test_image_without_any_program_is_a_clear_error(run_provider: DockerProvider, run_id: str) -> None:
    api = run_provider.engine.api
    name = f"driftgym/{run_id}:empty"
    await run_provider.engine.call(api.import_image_from_data, empty_archive(), repository=name[:-6], tag="empty")
    try:
        with pytest.raises(SandboxError, match="holds no python3"):
            await run_provider.start(SandboxSpec(image=name, toolbox="python"), timeout_s=START_TIMEOUT_S)
        with pytest.raises(SandboxError, match="takes a /bin/sh"):
            await run_provider.start(SandboxSpec(image=name), timeout_s=START_TIMEOUT_S)
        assert await boxes_of_run(run_provider, run_id) == []
    finally:
        await run_provider.engine.call(api.remove_image, name)


def empty_archive() -> bytes:
    """A root file system with one folder."""
    import io
    import tarfile

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        folder = tarfile.TarInfo("etc")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
    return buffer.getvalue()


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.05, 0.1, 0.2, 0.3])
async def test_cancelled_start_leaves_no_container(run_provider: DockerProvider, run_id: str, delay_s: float) -> None:
    task = asyncio.ensure_future(run_provider.start(SandboxSpec(), timeout_s=START_TIMEOUT_S))
    await asyncio.sleep(delay_s)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await (await task).close()
    assert await boxes_of_run(run_provider, run_id) == []


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.2])
async def test_close_while_boxes_start_leaves_no_container(
    docker_provider: DockerProvider, run_id: str, delay_s: float
) -> None:
    provider = await DockerProvider.open(timeout_s=10, run_id=run_id)
    starts = [asyncio.ensure_future(provider.start(SandboxSpec(), timeout_s=START_TIMEOUT_S)) for _ in range(6)]
    await asyncio.sleep(delay_s)
    await provider.close()
    for start in starts:
        with contextlib.suppress(SandboxError), pytest.raises(SandboxError):
            await (await start).exec("true")
    assert await boxes_of_run(docker_provider, run_id) == []
    with pytest.raises(SandboxError, match="closed"):
        await provider.list()


class SlowProvider(DockerProvider):
    """A provider whose boxes are handed out when a test says."""

    has_started: asyncio.Event
    may_go_on: asyncio.Event

    async def _start(self, spec: SandboxSpec, *, timeout_s: float) -> DockerBox:
        box = await super()._start(spec, timeout_s=timeout_s)
        self.has_started.set()
        await self.may_go_on.wait()
        return box


async def test_close_at_the_moment_at_which_a_box_has_started_leaves_no_container(
    docker_provider: DockerProvider, run_id: str
) -> None:
    provider = await SlowProvider.open(timeout_s=10, run_id=run_id)
    provider.has_started, provider.may_go_on = asyncio.Event(), asyncio.Event()
    start = asyncio.ensure_future(provider.start(SandboxSpec(), timeout_s=START_TIMEOUT_S))
    await provider.has_started.wait()
    provider.may_go_on.set()
    await provider.close()
    with pytest.raises(SandboxError, match="closed"):
        await start
    assert await boxes_of_run(docker_provider, run_id) == []


STARTER = """
import asyncio, sys
from driftgym.sandboxes.base import SandboxSpec
from driftgym.sandboxes.docker_provider import DockerProvider

async def main():
    provider = await DockerProvider.open(timeout_s=10, run_id=sys.argv[1])
    print("starting", flush=True)
    starts = [asyncio.ensure_future(provider.start(SandboxSpec(), timeout_s=60)) for _ in range(6)]
    if sys.argv[2] == "awaited":
        await asyncio.gather(*starts)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.2])
@pytest.mark.parametrize("how", ["awaited", "forgotten"])
async def test_interrupt_while_boxes_start_leaves_no_container(
    docker_provider: DockerProvider, run_id: str, how: str, delay_s: float
) -> None:
    argv = (sys.executable, "-P", "-c", STARTER, run_id, how)
    owner = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert owner.stdout is not None
    await owner.stdout.readline()
    await asyncio.sleep(delay_s)
    owner.send_signal(signal.SIGINT)
    await asyncio.wait_for(owner.wait(), 60)
    for _ in range(100):  # the engine removes those that ran, once their input has ended
        if not await boxes_of_run(docker_provider, run_id):
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"left: {await boxes_of_run(docker_provider, run_id)}")


async def test_more_cores_than_there_are_is_no_error(docker_provider: DockerProvider) -> None:
    box = await docker_provider.start(SandboxSpec(num_cpus=512), timeout_s=START_TIMEOUT_S)
    assert (await box.exec("echo on")).stdout == "on\n"


async def test_bad_configuration_of_docker_is_a_clear_error(
    docker_provider: DockerProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json"):
        await open_provider(SandboxConfig(kind="docker"), say=lambda text: None)


async def test_box_that_is_removed_from_outside_is_a_sandbox_error(box: DockerSandbox) -> None:
    call = asyncio.ensure_future(box.exec("sleep 60", timeout_s=60))
    await asyncio.sleep(0.2)
    await box._engine.remove(box.sandbox_id)
    with pytest.raises(SandboxError, match="ended"):
        await call
    with pytest.raises(SandboxError):
        await box.exec("true")
    await box.close()


def dead_owner() -> str:
    """The label of an owner that has ended."""
    ended = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    label = f"{owners.own_host()}:{ended.pid}:{owners.process_start_time(ended.pid)}"
    ended.communicate()
    return label


async def test_sweep_removes_the_boxes_of_dead_owners_alone(run_provider: DockerProvider, run_id: str) -> None:
    dead = dead_owner()
    elsewhere = "another-host:" + dead.split(":", 1)[1]
    mine = await run_provider.start(SandboxSpec(), timeout_s=START_TIMEOUT_S)
    api = run_provider.engine.api
    others = {}
    for owner in (dead, elsewhere, "nonsense"):
        labels = {reaper.OWNER_LABEL: owner, reaper.RUN_LABEL: run_id}
        created = await run_provider.engine.call(api.create_container, BASE_IMAGE, ["true"], labels=labels)
        others[owner] = created["Id"]
    try:
        assert not owners.is_owner_alive(dead)
        assert await run_provider.sweep() >= 1
        left = {info.sandbox_id for info in await boxes_of_run(run_provider, run_id)}
        assert left == {mine.sandbox_id, others[elsewhere], others["nonsense"]}
        assert (await mine.exec("echo on")).stdout == "on\n"
    finally:
        for container_id in others.values():
            await run_provider.remove(container_id)


async def test_auto_takes_docker_and_says_so(docker_provider: DockerProvider) -> None:
    said: list[str] = []
    provider = await open_provider(SandboxConfig(), say=said.append)
    try:
        assert provider.kind == "docker"
        assert any("Docker" in line and BASE_IMAGE in line for line in said)
    finally:
        await provider.close()


@pytest.mark.parametrize("kind", ["docker", "auto"])
async def test_missing_image_is_refused(docker_provider: DockerProvider, kind: Literal["docker", "auto"]) -> None:
    spec = SandboxSpec(image="driftgym/no-such-image:1")
    with pytest.raises(ConfigError, match=r"no-such-image.*driftgym sandbox build"):
        await open_provider(SandboxConfig(kind=kind, spec=spec), say=lambda text: None)


async def test_engine_errors_are_typed(docker_provider: DockerProvider) -> None:
    with pytest.raises(docker.errors.NotFound):
        await docker_provider.engine.call(docker_provider.engine.api.inspect_container, "no-such-container")
    await docker_provider.remove("0" * 64)

"""What boxes without Python keep beyond the contract: the wall around their main process, their limits, their ends."""

import asyncio
import io
import tarfile
from pathlib import Path

import pytest
import pytest_asyncio
from docker_engine import busybox_image

from driftgym.errors import SandboxError
from driftgym.sandboxes.base import MIB, SandboxSpec
from driftgym.sandboxes.docker_provider import DockerProvider
from driftgym.sandboxes.engine_sandbox import EngineSandbox
from driftgym.sandboxes.images import BASE_IMAGE

pytestmark = pytest.mark.docker
EMPTY_IMAGE = "driftgym/test:no-shell"


@pytest_asyncio.fixture
async def spec(docker_provider: DockerProvider) -> SandboxSpec:
    return SandboxSpec(image=await busybox_image(docker_provider.engine))


async def start(provider: DockerProvider, spec: SandboxSpec, **changes: object) -> EngineSandbox:
    box = await provider.start(spec.model_copy(update=changes), timeout_s=60)
    assert isinstance(box, EngineSandbox), "the image holds no Python"
    return box


async def test_commands_have_no_rights_and_a_group_each(docker_provider: DockerProvider, spec: SandboxSpec) -> None:
    box = await start(docker_provider, spec, max_open_files=99)
    groups = set()
    for _ in range(2):
        status = (await box.exec("cat /proc/self/status; ulimit -n; grep ' /work ' /proc/mounts")).stdout
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":\t" in line)
        assert fields["Uid"].split() == ["1000"] * 4
        assert int(fields["CapEff"], 16) == int(fields["CapPrm"], 16) == int(fields["CapInh"], 16) == 0
        assert fields["NoNewPrivs"].strip() == "1"
        assert set(fields["Groups"].split()) == set(fields["Gid"].split())
        assert "\n99\n" in status
        groups.add(fields["Gid"])
    assert len(groups) == 2


async def test_boxes_of_a_spec_are_made_of_one_image(docker_provider: DockerProvider, spec: SandboxSpec) -> None:
    engine, name = docker_provider.engine, "driftgym/test:moving"
    first, second = spec.image, BASE_IMAGE
    try:
        for image in (first, second):
            await engine.call(engine.api.tag, image, "driftgym/test", "moving", force=True)
            box = await start(docker_provider, spec, image=name, toolbox="engine")
            assert (await box.exec(["/bin/busybox", "true"])).exit_code == 0
    finally:
        await engine.call(engine.api.remove_image, name)


async def test_commands_cannot_end_the_main_process(docker_provider: DockerProvider, spec: SandboxSpec) -> None:
    box = await start(docker_provider, spec)
    await box.exec("kill -KILL 1; for p in /proc/[0-9]*; do kill -KILL ${p#/proc/}; done; kill -KILL -1")
    assert (await box.exec("echo x >/proc/1/fd/0")).exit_code != 0
    assert (await box.exec("echo on")).stdout == "on\n"


async def test_folders_that_outlive_a_reset_are_not_the_agents_own(
    docker_provider: DockerProvider, spec: SandboxSpec
) -> None:
    box = await start(docker_provider, spec)
    for folder in ("/work", "/tmp", "/dev/shm", "/dev/mqueue"):
        assert (await box.exec(f"touch {folder}/x")).exit_code == 0
        assert (await box.exec(f"chmod 700 {folder}")).exit_code != 0
        assert (await box.exec(f"touch -d 2001-01-01 {folder}")).exit_code != 0


async def test_memory_hog_is_told_apart_from_a_deadline(docker_provider: DockerProvider, spec: SandboxSpec) -> None:
    box = await start(docker_provider, spec, memory_bytes=64 * MIB)
    hog = "dd if=/dev/zero of=/dev/null bs=400M count=1"
    killed = await box.exec(hog)
    assert (killed.oom_killed, killed.timed_out) == (True, False)
    hidden = await box.exec(f"{hog}; true")
    assert (hidden.oom_killed, hidden.exit_code) == (True, 0)
    late = await box.exec("sleep 60", timeout_s=1)
    assert (late.oom_killed, late.timed_out) == (False, True)


async def test_pid_limit_is_a_clear_result_and_no_lost_box(docker_provider: DockerProvider, spec: SandboxSpec) -> None:
    box = await start(docker_provider, spec, max_pids=8)
    await box.exec("while :; do sleep 600 & done", timeout_s=30)  # the shell ends when it cannot fork
    for result in await asyncio.gather(*(box.exec("true | true; echo on", timeout_s=60) for _ in range(3))):
        assert result.stdout == ""
        assert (result.exit_code, result.stderr != "") in ((127, True), (2, True))
    await box.ping(timeout_s=30)
    await box.reset()
    assert (await box.exec("echo on")).stdout == "on\n"


async def test_command_under_way_ends_with_a_reset(docker_provider: DockerProvider, spec: SandboxSpec) -> None:
    box = await start(docker_provider, spec)
    calls = [asyncio.ensure_future(box.exec("sleep 600", timeout_s=600)) for _ in range(3)]
    await asyncio.sleep(1.5)
    await box.reset()
    for call in calls:
        result = await asyncio.wait_for(call, timeout=60)
        assert result.exit_code in (-9, 127, 0) or result.timed_out
    assert (await box.exec("ls -A")).stdout == ""


async def test_calls_that_are_given_up_at_any_moment_leave_nothing(
    docker_provider: DockerProvider, spec: SandboxSpec
) -> None:
    box = await start(docker_provider, spec)
    for delay_s in (0.0, 0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.2):
        call = asyncio.ensure_future(box.exec("sleep 7272", timeout_s=600))
        await asyncio.sleep(delay_s)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await box.exec("sleep 7272", timeout_s=delay_s)).timed_out
    await box.reset(keep_files=True)
    listed = await box.exec("for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' <$f; done")
    assert "7272" not in listed.stdout.replace("tr ", "").split("sh -c")[0]


async def test_container_that_is_removed_is_a_sandbox_error(docker_provider: DockerProvider, spec: SandboxSpec) -> None:
    box = await start(docker_provider, spec)
    process = await box.spawn(["cat"])
    call = asyncio.ensure_future(box.exec("sleep 600", timeout_s=600))
    await asyncio.sleep(0.5)
    await docker_provider.remove(box.sandbox_id)
    with pytest.raises(SandboxError):
        await asyncio.wait_for(call, timeout=60)
    for again in (box.exec("true"), box.reset(), box.ping(timeout_s=5), process.ask("x", timeout_s=5)):
        with pytest.raises(SandboxError):
            await again
    await box.close()


async def test_image_without_a_shell_is_a_clear_error(docker_provider: DockerProvider) -> None:
    engine = docker_provider.engine
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("nothing"))
    repository, _, tag = EMPTY_IMAGE.rpartition(":")
    await engine.call(engine.api.import_image_from_data, buffer.getvalue(), repository=repository, tag=tag)
    try:
        with pytest.raises(SandboxError, match="/bin/sh"):
            await docker_provider.start(SandboxSpec(image=EMPTY_IMAGE), timeout_s=60)
    finally:
        await engine.call(engine.api.remove_image, EMPTY_IMAGE)


async def test_command_that_the_tools_are_not_there_for_is_said(
    docker_provider: DockerProvider, spec: SandboxSpec, tmp_path: Path
) -> None:
    box = await start(docker_provider, spec)
    await box.write_file("script", b"no interpreter\n")
    assert (await box.exec("chmod +x script; echo '#!/no/such' >other; chmod +x other")).exit_code == 0
    for name, words in (("script", "format"), ("other", "no such file"), ("/work", "ermission")):
        result = await box.exec([f"./{name}" if name[0] != "/" else name])
        assert result.exit_code == 127
        assert words in result.stderr.lower() or words in result.stderr

"""What a spec loosens, and what stays bounded then; what a box is told of the machine that it runs on."""

import contextlib
import io
import tarfile
import uuid
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from docker_engine import busybox_image

from driftgym.errors import SandboxError
from driftgym.sandboxes.base import MIB, SandboxSpec
from driftgym.sandboxes.docker import AGENT_UID, Engine
from driftgym.sandboxes.docker_provider import DockerProvider
from driftgym.sandboxes.images import BASE_IMAGE

pytestmark = pytest.mark.docker
START_TIMEOUT_S = 60.0


async def test_root_that_is_writable_is_bounded_by_the_file(docker_provider: DockerProvider) -> None:
    spec = SandboxSpec(read_only_root=False, run_as_root=True, work_dir_bytes=4 * MIB)
    box = await docker_provider.start(spec, timeout_s=START_TIMEOUT_S)
    assert (await box.exec("echo x >/etc/x && cat /etc/x")).stdout == "x\n"
    assert (await box.exec("head -c 3000000 /dev/zero >/opt/small")).exit_code == 0
    assert (await box.exec("head -c 5000000 /dev/zero >/opt/big")).exit_code != 0
    assert (await box.exec("head -c 5000000 /dev/zero >/work/big")).exit_code != 0


async def test_commands_of_root_install_and_do_not_rule(docker_provider: DockerProvider) -> None:
    box = await docker_provider.start(SandboxSpec(read_only_root=False, run_as_root=True), timeout_s=START_TIMEOUT_S)
    status = (await box.exec("id -u; grep -E 'Cap(Eff|Bnd)|NoNewPrivs' /proc/self/status")).stdout.split()
    assert status == ["0", "CapEff:", "00000000000000eb", "CapBnd:", "00000000000000eb", "NoNewPrivs:", "1"]
    installed = await box.exec("touch /opt/tool && chown 1000:1000 /opt/tool && chmod 600 /opt/tool && cat /opt/tool")
    assert installed.exit_code == 0, installed.stderr
    for attempt in ("mount -t tmpfs none /mnt", "mknod /tmp/disk b 8 0", "hostname other"):
        assert (await box.exec(attempt)).exit_code != 0
    await box.write_file("note", b"x")
    await box.reset()
    assert (await box.exec("ls /work")).stdout == ""


async def test_commands_of_root_cannot_write_a_root_that_is_read_only(docker_provider: DockerProvider) -> None:
    box = await docker_provider.start(SandboxSpec(run_as_root=True), timeout_s=START_TIMEOUT_S)
    assert (await box.exec("echo x >/etc/x")).exit_code != 0
    assert (await box.exec("echo x >/work/x && cat /work/x")).stdout == "x\n"


CLOSE_A_CONNECTION = """
import socket
with socket.create_server(("127.0.0.1", 8000)) as server, socket.create_connection(("127.0.0.1", 8000)):
    server.accept()[0].close()
"""
TAKE_THE_PORT = "import socket; socket.socket().bind(('127.0.0.1', 8000))"


@pytest.mark.parametrize("toolbox", ["python", "engine"])
async def test_no_port_stays_taken_past_a_reset(docker_provider: DockerProvider, toolbox: str) -> None:
    box = await docker_provider.start(SandboxSpec.model_validate({"toolbox": toolbox}), timeout_s=START_TIMEOUT_S)
    assert (await box.exec(["python3", "-c", CLOSE_A_CONNECTION])).exit_code == 0
    await box.reset()
    taken = await box.exec(["python3", "-c", TAKE_THE_PORT])
    assert (taken.exit_code, taken.stderr) == (0, "")
    assert (await box.exec("wc -l </proc/net/tcp")).stdout.strip() == "1"


async def test_box_without_network_learns_of_no_resolver(docker_provider: DockerProvider) -> None:
    box = await docker_provider.start(SandboxSpec(), timeout_s=START_TIMEOUT_S)
    told = (await box.exec("grep -v '^#' /etc/resolv.conf")).stdout
    assert [line for line in told.splitlines() if line.startswith("nameserver")] == ["nameserver 127.0.0.1"]
    assert "search" not in told
    lookup = await box.exec(["python3", "-c", "import socket; socket.getaddrinfo('example.com', 80)"], timeout_s=10)
    assert lookup.exit_code == 1
    assert not lookup.timed_out


@contextlib.asynccontextmanager
async def built_image(engine: Engine, rest: str) -> AsyncIterator[str]:
    """The base image with what the `rest` of a Dockerfile does to it, by its name; removed at the end."""
    name = f"driftgym/test-{uuid.uuid4().hex[:12]}:built"
    dockerfile = f"FROM {BASE_IMAGE}\n{rest}\n".encode()
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as archive:
        entry = tarfile.TarInfo("Dockerfile")
        entry.size = len(dockerfile)
        archive.addfile(entry, io.BytesIO(dockerfile))
    context.seek(0)
    await engine.call(
        lambda: list(engine.api.build(fileobj=context, custom_context=True, tag=name, rm=True, network_mode="none"))
    )
    yield name
    await engine.call(engine.api.remove_image, name)


@pytest_asyncio.fixture
async def volume_image(docker_provider: DockerProvider) -> AsyncIterator[str]:
    """An image that declares a volume with a file in it."""
    rest = "RUN mkdir -m 777 /data && touch /data/old\nVOLUME /data"
    async with built_image(docker_provider.engine, rest) as name:
        yield name


@pytest_asyncio.fixture
async def locked_image(docker_provider: DockerProvider) -> AsyncIterator[str]:
    """An image whose folders for work have permissions of their own."""
    rest = "RUN mkdir -p /work /data && chmod 500 /work /data && chmod 755 /tmp\nVOLUME /data"
    async with built_image(docker_provider.engine, rest) as name:
        yield name


@pytest.mark.slow
@pytest.mark.parametrize("run_as_root", [False, True])
async def test_permissions_of_the_image_do_not_lock_the_folders_for_work(
    docker_provider: DockerProvider, locked_image: str, run_as_root: bool
) -> None:
    spec = SandboxSpec(image=locked_image, run_as_root=run_as_root)
    box = await docker_provider.start(spec, timeout_s=START_TIMEOUT_S)
    look = "stat -c '%n %a %u' /work /tmp /data /dev/shm"
    uid = 0 if run_as_root else AGENT_UID
    expected = f"/work 755 {uid}\n/tmp 1777 0\n/data 755 {uid}\n/dev/shm 1777 0\n"
    assert (await box.exec(look)).stdout == expected
    for folder in ("/work", "/tmp", "/data"):
        assert (await box.exec(f"echo x >{folder}/x && cat {folder}/x")).stdout == "x\n"
    await box.reset()
    assert (await box.exec(f"{look}; ls /work /tmp /data")).stdout == expected + "/data:\n\n/tmp:\n\n/work:\n"
    await box.close()


@pytest.mark.slow
async def test_volume_of_an_image_is_bounded_and_reset(docker_provider: DockerProvider, volume_image: str) -> None:
    spec = SandboxSpec(image=volume_image, work_dir_bytes=4 * MIB)
    box = await docker_provider.start(spec, timeout_s=START_TIMEOUT_S)
    assert (await box.exec("ls /data")).stdout == ""
    assert (await box.exec("echo x >/data/new && head -c 5000000 /dev/zero >/data/big")).exit_code != 0
    await box.reset()
    assert (await box.exec("ls /data")).stdout == ""
    inspected = await docker_provider.engine.call(docker_provider.engine.api.inspect_container, box.sandbox_id)
    assert [mount for mount in inspected["Mounts"] if mount["Type"] == "volume"] == []
    await box.close()


async def test_image_without_python_is_served_by_the_engine(docker_provider: DockerProvider) -> None:
    spec = SandboxSpec(image=await busybox_image(docker_provider.engine))
    for _ in range(2):
        box = await docker_provider.start(spec, timeout_s=START_TIMEOUT_S)
        assert (await box.exec("echo on")).stdout == "on\n"
        await box.close()
    with pytest.raises(SandboxError, match="egress"):
        await docker_provider.start(spec.model_copy(update={"egress": ("example.com",)}), timeout_s=START_TIMEOUT_S)


async def test_missing_image_is_a_typed_error_without_the_toolbox(docker_provider: DockerProvider) -> None:
    spec = SandboxSpec(image=f"driftgym/no-such-{uuid.uuid4().hex}:1", toolbox="engine")
    with pytest.raises(SandboxError, match="no-such"):
        await docker_provider.start(spec, timeout_s=START_TIMEOUT_S)


async def test_image_that_is_replaced_is_noticed_and_looked_up_anew(docker_provider: DockerProvider) -> None:
    engine = docker_provider.engine
    first = await busybox_image(engine)
    repository, tag = f"driftgym/test-{uuid.uuid4().hex[:12]}", "replaced"
    spec = SandboxSpec(image=f"{repository}:{tag}")
    await engine.call(engine.api.import_image_from_data, empty_archive(), repository=repository, tag=tag)
    with pytest.raises(SandboxError, match="cannot"):
        await docker_provider.start(spec, timeout_s=START_TIMEOUT_S)
    await engine.call(engine.api.remove_image, spec.image)
    with pytest.raises(SandboxError, match="missing"):
        await docker_provider.start(spec, timeout_s=START_TIMEOUT_S)
    await engine.call(engine.api.tag, first, repository, tag)
    box = await docker_provider.start(spec, timeout_s=START_TIMEOUT_S)
    assert (await box.exec("echo on")).stdout == "on\n"
    await box.close()
    await engine.call(engine.api.remove_image, spec.image)


def empty_archive() -> bytes:
    """A root file system with one folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        folder = tarfile.TarInfo("etc")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
    return buffer.getvalue()

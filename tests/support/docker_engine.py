"""The Docker engine of tests that need one, and what else they need of it.

What is missing skips a test, and fails it where DRIFTGYM_REQUIRE names it (`docker`, `gvisor`).
"""

import io
import os
import shutil
import tarfile
from pathlib import Path
from typing import NoReturn

import pytest

from driftgym.errors import SandboxError
from driftgym.sandboxes import reaper
from driftgym.sandboxes.base import SandboxInfo
from driftgym.sandboxes.docker import Engine
from driftgym.sandboxes.docker_provider import DockerProvider
from driftgym.sandboxes.images import BASE_IMAGE

BUSYBOX_IMAGE = "driftgym/test:busybox"


async def open_docker() -> DockerProvider:
    """A provider of Docker boxes, on an engine that has the base image."""
    try:
        provider = await DockerProvider.open(timeout_s=10.0)
    except SandboxError as error:
        _lack("docker", str(error))
    if not await provider.engine.has_image(BASE_IMAGE):
        await provider.close()
        _lack("docker", f"the image {BASE_IMAGE} is missing (make sandbox-engine)")
    return provider


async def boxes_of_run(provider: DockerProvider, run_id: str) -> list[SandboxInfo]:
    """The boxes that carry a run, in any state."""
    return [info for info in await provider.list() if info.labels.get(reaper.RUN_LABEL) == run_id]


async def busybox_image(engine: Engine) -> str:
    """The name of an image that holds a shell and its tools, and no Python; made of this machine's busybox-static."""
    if not await engine.has_image(BUSYBOX_IMAGE):
        program = shutil.which("busybox")
        if program is None:
            _lack("docker", "busybox is missing (Debian: apt-get install busybox-static)")
        repository, _, tag = BUSYBOX_IMAGE.rpartition(":")
        archive = _busybox_archive(Path(program))
        await engine.call(engine.api.import_image_from_data, archive, repository=repository, tag=tag)
    return BUSYBOX_IMAGE


async def require_gvisor(engine: Engine) -> None:
    """Skips, or fails, where the engine has no runtime `runsc`."""
    info = await engine.call(engine.api.info)
    if "runsc" not in info["Runtimes"]:
        _lack("gvisor", "the engine has no runtime runsc (make sandbox-engine GVISOR=1)")


def _lack(what: str, reason: str) -> NoReturn:
    if what in os.environ.get("DRIFTGYM_REQUIRE", "").split(","):
        pytest.fail(f"DRIFTGYM_REQUIRE names {what}: {reason}")
    pytest.skip(reason)


def _busybox_archive(program: Path) -> bytes:
    """A root file system of busybox alone: the program, a link to it for every tool, the usual empty folders."""
    import subprocess

    tools = subprocess.run([str(program), "--list"], capture_output=True, text=True, check=True).stdout.split()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in ("bin", "dev", "etc", "proc", "root", "sys", "tmp", "work"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(folder)
        content = program.read_bytes()
        file = tarfile.TarInfo("bin/busybox")
        file.size, file.mode = len(content), 0o755
        archive.addfile(file, io.BytesIO(content))
        for tool in tools:
            if tool == "busybox":
                continue
            link = tarfile.TarInfo(f"bin/{tool}")
            link.type, link.linkname = tarfile.SYMTYPE, "/bin/busybox"
            archive.addfile(link)
    return buffer.getvalue()

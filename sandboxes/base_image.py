"""The base image of Docker boxes: made from the distribution's own packages, without any registry."""

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import docker.errors

from driftgym.errors import ConfigError, SandboxError
from driftgym.sandboxes.build_lock import only_one
from driftgym.sandboxes.docker_engine import Engine
from driftgym.sandboxes.image_build import drop_unnamed
from driftgym.sandboxes.owned_folders import owned_prefix

BASE_IMAGE = "driftgym/base:debian"
DEBIAN_SUITE = "bookworm"
_PACKAGES = "python3"
_LEFT_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*")
_BUILD_TIMEOUT_S = 900.0
_END_TIMEOUT_S = 30.0
_BUILDER = "mmdebstrap"


async def build_base_image(
    engine: Engine,
    *,
    tag: str = BASE_IMAGE,
    say: Callable[[str], None],
    mirror: str | None = None,
    rebuild: bool = False,
) -> None:
    """Makes the base image: Debian's essential packages (a shell, coreutils, ...) and python3.

    Nothing is done when the image is there, unless `rebuild`. Of several calls at once, by tasks or processes of one
    user, one does the work.

    Args:
        engine: gets the image.
        tag: its name.
        say: takes news for people.
        mirror: the URL that packages come from; Debian's own when None.
        rebuild: makes it also when it is there.

    Raises:
        ConfigError: the program that unpacks the packages is not installed.
        SandboxError: it failed, or the engine did; nothing is left.
    """
    if not rebuild and await engine.has_image(tag):
        say(f"{tag} is there already")
        return
    if shutil.which(_BUILDER) is None:
        raise ConfigError(
            f"the base image is made with {_BUILDER}, which is missing: `make sandbox-engine` installs it"
        )
    async with only_one(tag, timeout_s=_BUILD_TIMEOUT_S, say=say):
        if not rebuild and await engine.has_image(tag):
            return
        replaced = await engine.image(tag)
        await _make(engine, tag=tag, say=say, mirror=mirror)
        await drop_unnamed(engine, replaced)
    say(f"{tag} is ready")


async def _make(engine: Engine, *, tag: str, say: Callable[[str], None], mirror: str | None) -> None:
    try:
        temporary = tempfile.TemporaryDirectory(prefix=owned_prefix("image"))
    except OSError as error:
        raise SandboxError(f"there is no room to unpack packages ({error}): set TMPDIR") from None
    with temporary as folder:
        archive = Path(folder) / "root.tar"
        say(f"unpacking Debian {DEBIAN_SUITE}")
        await _unpack_debian(archive, mirror=mirror)
        say(f"importing {archive.stat().st_size // 2**20} MiB as {tag}")
        await _import_archive(engine, archive, tag=tag)


async def _unpack_debian(archive: Path, *, mirror: str | None) -> None:
    options = [f"--dpkgopt=path-exclude={pattern}" for pattern in _LEFT_OUT]
    process = await asyncio.create_subprocess_exec(
        _BUILDER,
        "--quiet",
        "--variant=essential",
        f"--include={_PACKAGES}",
        '--aptopt=Apt::Install-Recommends "false"',
        *options,
        DEBIAN_SUITE,
        str(archive),
        *([mirror] if mirror is not None else []),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(_BUILD_TIMEOUT_S):
            output, _ = await process.communicate()
    except TimeoutError:
        raise SandboxError(f"{_BUILDER} did not end within {_BUILD_TIMEOUT_S:.0f} s") from None
    finally:
        if process.returncode is None:
            await _end(process)
    if process.returncode != 0:
        words = output.decode("utf-8", "replace").strip()[-1000:]
        raise SandboxError(f"{_BUILDER} failed with exit code {process.returncode}: {words}")


async def _end(process: asyncio.subprocess.Process) -> None:
    """Asks the builder to end, since it removes its own temporary folder then; kills it when it does not."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_END_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _import_archive(engine: Engine, archive: Path, *, tag: str) -> None:
    repository, _, version = tag.rpartition(":")
    try:
        answer = await engine.call(engine.api.import_image_from_file, str(archive), repository=repository, tag=version)
    except docker.errors.APIError as error:
        raise SandboxError(f"{tag} cannot be imported: {error}") from None
    if not await engine.has_image(tag):
        raise SandboxError(f"{tag} cannot be imported: {str(answer)[-500:]}")

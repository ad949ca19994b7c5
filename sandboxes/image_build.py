"""Builds and pulls images on the Docker engine, with its own (legacy) builder: nothing else need be installed."""

import asyncio
import collections
import contextlib
import re
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from typing import IO, Any

import docker.auth
import docker.utils

from driftgym.errors import ConfigError, SandboxError
from driftgym.sandboxes.build_context import DOCKERFILE, BuildContext
from driftgym.sandboxes.docker_engine import Engine, ImageInfo
from driftgym.sandboxes.docker_request import RefusedError
from driftgym.sandboxes.engine_progress import progress_of

BUILD_TIMEOUT_S = 3600.0
PULL_TIMEOUT_S = 3600.0
_NUM_LAST_LINES = 20
_RUNNING = re.compile(r"^ ---> Running in ([0-9a-f]{12,})$")
_STEP = re.compile(r"^Step (\d+/\d+) : (.*)$")
_NEWS = re.compile(r"^(Step \d+/\d+ : | ---> |Removing intermediate container |Successfully )")
"""How the builder's own words begin; whatever else it passes on is the output of a step."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_BAD_REQUEST = 400
_Say = Callable[[str], None]


async def build_image(
    engine: Engine, context: BuildContext, *, name_of: Callable[[str], str], say: _Say, use_cache: bool = True
) -> str:
    """Builds the image of a folder; its name.

    A build that fails or is cancelled leaves no container and no name; the layers of the steps that went well stay,
    as Docker's own builds leave them, and make the next try shorter.

    Args:
        engine: builds it.
        context: the folder. It is packed first, so that what is built is what the name says.
        name_of: the name of the image, by the digest of the packed folder.
        say: takes each step, and the output of its command.
        use_cache: whether the engine may take the layers of an earlier build.

    Raises:
        ConfigError: the folder cannot be read, or the engine cannot read the Dockerfile.
        SandboxError: a step failed (the message has the step and the last lines), or the engine.
    """
    with _packing_file() as archive:
        name = name_of(await asyncio.to_thread(context.pack, archive))
        archive.seek(0)
        query = {"t": name, "rm": "1", "forcerm": "1", "nocache": str(int(not use_cache)), "dockerfile": DOCKERFILE}
        log = _BuildLog(context, say=say)
        headers = {"Content-Type": "application/x-tar"}
        try:
            async with (
                asyncio.timeout(BUILD_TIMEOUT_S),
                progress_of(engine, "/build", query=query, headers=headers, body=archive) as messages,
            ):
                await _follow(messages, log.take)
        except TimeoutError:
            raise SandboxError(f"{context.folder}: not built within {BUILD_TIMEOUT_S:.0f} s, {log.where}") from None
        except RefusedError as error:
            if error.status == _BAD_REQUEST:
                raise ConfigError(f"{context.folder / DOCKERFILE}: {error}") from None
            raise SandboxError(f"{context.folder}: cannot be built: {error}") from None
        finally:
            await _remove_container(engine, log.container_id)
    if not await engine.has_image(name):
        raise SandboxError(f"{context.folder}: the engine's build ended without an image, {log.where}")
    return name


@contextlib.contextmanager
def _packing_file() -> Iterator[IO[bytes]]:
    """A temporary file. Raises SandboxError where there is no room for it, at its end too: it may still be written."""
    try:
        with tempfile.TemporaryFile(prefix="driftgym-build-") as archive:
            yield archive
    except OSError as error:
        raise SandboxError(f"there is no room to pack what is built from ({error}): set TMPDIR") from None


async def drop_unnamed(engine: Engine, image: ImageInfo | None) -> None:
    """Removes an image that has lost its names to a newer one, unless something is made of it still. Raises nothing."""
    if image is None:
        return
    path = f"/images/{image.image_id}"
    with contextlib.suppress(SandboxError):
        names = (await engine.request("GET", f"{path}/json")).value.get("RepoTags")
        if not names:  # with one left, that name would be removed
            await engine.request("DELETE", path)


async def _follow(messages: AsyncIterator[dict[str, Any]], take: Callable[[dict[str, Any]], None]) -> None:
    async for message in messages:
        take(message)


async def _remove_container(engine: Engine, container_id: str | None) -> None:
    """Removes what a build that was broken off leaves for a moment; goes on when the caller is cancelled meanwhile."""
    if container_id is not None:
        with contextlib.suppress(SandboxError):
            await asyncio.shield(engine.remove(container_id))


class _BuildLog:
    """Follows the messages of one build."""

    def __init__(self, context: BuildContext, *, say: _Say) -> None:
        self.container_id: str | None = None
        """The container of the step that runs; None between steps."""
        self._folder = context.folder
        self._say = say
        self._step = ""
        self._line = ""
        self._last_lines: collections.deque[str] = collections.deque(maxlen=_NUM_LAST_LINES)

    @property
    def where(self) -> str:
        """The step that it is at, for people."""
        return f"at step {self._step}" if self._step else "before its first step"

    def take(self, message: dict[str, Any]) -> None:
        """Takes the next message. Raises SandboxError when it is that of a step that failed."""
        text = _COLOUR.sub("", str(message.get("stream") or ""))
        if self._line and _NEWS.match(text):  # output that ends without a line's end
            text = f"\n{text}"
        self._line += text
        *lines, self._line = self._line.split("\n")
        for line in lines:
            self._take_line(line.rstrip("\r"))
        if "error" in message:
            output = "\n".join([*self._last_lines, str(message["error"]).strip()])
            raise SandboxError(f"{self._folder}: the build failed {self.where}\n{output}")

    def _take_line(self, line: str) -> None:
        step, running = _STEP.match(line), _RUNNING.match(line)
        if running:
            self.container_id = running[1]
        if line.startswith("Removing intermediate container "):
            self.container_id = None
        if step:
            self._step = f"{step[1]}: {step[2]}"
            self._last_lines.clear()
            self._say(f"step {self._step}")
        elif line.strip() and not _NEWS.match(line):
            self._last_lines.append(line)
            self._say(line)


async def pull_image(engine: Engine, name: str, *, say: _Say) -> None:
    """Pulls an image from its registry, with what `docker login` has left on this machine.

    Raises:
        SandboxError: the registry cannot be reached, has no such image, or refuses; or the engine does not answer.
    """
    repository, tag = docker.utils.parse_repository_tag(name)
    registry, _ = docker.auth.resolve_repository_name(repository)
    header = await engine.call(docker.auth.get_config_header, engine.api, registry)
    headers = {"X-Registry-Auth": header.decode() if isinstance(header, bytes) else header} if header else {}
    say(f"pulling {name}")
    progress = _PullLog(name, say=say)
    try:
        async with (
            asyncio.timeout(PULL_TIMEOUT_S),
            progress_of(
                engine, "/images/create", query={"fromImage": repository, "tag": tag or "latest"}, headers=headers
            ) as messages,
        ):
            await _follow(messages, progress.take)
    except TimeoutError:
        raise SandboxError(f"image {name}: not pulled within {PULL_TIMEOUT_S:.0f} s") from None
    except RefusedError as error:
        raise SandboxError(f"image {name} cannot be pulled: {error}") from None
    say(f"{name} is pulled")


class _PullLog:
    """Says what becomes of each layer, once a change: the engine tells every few kilobytes."""

    def __init__(self, name: str, *, say: _Say) -> None:
        self._name = name
        self._say = say
        self._states: dict[str, str] = {}

    def take(self, message: dict[str, Any]) -> None:
        """Takes the next message. Raises SandboxError when it is an error."""
        if "error" in message:
            raise SandboxError(f"image {self._name} cannot be pulled: {message['error']}")
        layer, state = str(message.get("id", "")), str(message.get("status", ""))
        if state and self._states.get(layer) != state:
            self._states[layer] = state
            self._say(f"{layer}: {state}" if layer else state)

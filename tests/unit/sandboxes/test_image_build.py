"""Builds and pulls against an engine that is played: what it says, in which pieces, and when it breaks off."""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web

from driftgym.errors import ConfigError, SandboxError
from driftgym.sandboxes.base import SandboxSpec
from driftgym.sandboxes.build_context import read_context
from driftgym.sandboxes.docker_engine import Engine
from driftgym.sandboxes.image_build import build_image
from driftgym.sandboxes.images import BASE_IMAGE, prepare_image, resolve_image

BREAK = b"break the connection"
HANG = b"say nothing any more"


class PlayedEngine:
    """An engine that has the base image, and answers a build or a pull with what the test gives it."""

    def __init__(self) -> None:
        self.images = {BASE_IMAGE: "sha256:1"}
        self.pieces: list[bytes] = []
        self.status = 200
        self.result: str | None = None
        """The image that is there after a build or a pull; None takes the name that was asked for, "" none."""
        self.requests: list[web.Request] = []
        self.removed: list[str] = []
        self.has_hung_up = asyncio.Event()

    def application(self) -> web.Application:
        """The part of the Engine's API that is asked."""
        app = web.Application(client_max_size=2**24)
        app.router.add_get("/version", self._version)
        app.router.add_get("/{version}/images/{name:.*}/json", self._image)
        app.router.add_delete("/{version}/containers/{id}", self._remove)
        app.router.add_post("/{version}/build", self._work)
        app.router.add_post("/{version}/images/create", self._work)
        return app

    async def _version(self, request: web.Request) -> web.Response:
        return await self._json({"ApiVersion": "1.41"})

    async def _json(self, value: object, *, status: int = 200) -> web.Response:
        return web.json_response(value, status=status)

    async def _image(self, request: web.Request) -> web.Response:
        image_id = self.images.get(request.match_info["name"])
        if image_id is None:
            return await self._json({"message": "No such image"}, status=404)
        return await self._json({"Id": image_id, "Config": {}})

    async def _remove(self, request: web.Request) -> web.Response:
        self.removed.append(request.match_info["id"])
        return web.Response(status=204)

    async def _work(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        self.requests.append(request)
        if self.status != 200:
            return await self._json({"message": "the engine's reason"}, status=self.status)
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in self.pieces:
            if piece == BREAK:
                assert request.transport is not None
                request.transport.abort()
                return response
            if piece == HANG:
                await self._wait_for_the_end()
            await response.write(piece)
            await asyncio.sleep(0.005)
        query = request.query
        name = query["t"] if "t" in query else f"{query['fromImage']}:{query['tag']}"
        self.images[name if self.result is None else self.result] = "sha256:2"
        return response

    async def _wait_for_the_end(self) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            self.has_hung_up.set()


@pytest_asyncio.fixture
async def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PlayedEngine]:
    played = PlayedEngine()
    runner = web.AppRunner(played.application(), handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "engine.sock")).start()
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path / 'engine.sock'}")
    try:
        yield played
    finally:
        await runner.cleanup()


@pytest_asyncio.fixture
async def engine(played: PlayedEngine) -> AsyncIterator[Engine]:
    engine = await Engine.connect(timeout_s=5)
    try:
        yield engine
    finally:
        await engine.close()


@pytest.fixture
def spec(tmp_path: Path) -> SandboxSpec:
    (tmp_path / "box").mkdir()
    (tmp_path / "box" / "Dockerfile").write_text(f"FROM {BASE_IMAGE}\nRUN make\n")
    return SandboxSpec(dockerfile=str(tmp_path / "box"))


def streams(*texts: str) -> list[bytes]:
    """The messages of a build that says `texts`."""
    return [json.dumps({"stream": text}).encode() + b"\r\n" for text in texts]


STEPS = streams("Step 1/2 : FROM x\n", " ---> 12ab\n", "Step 2/2 : RUN make\n", " ---> Running in 0123456789ab\n")


async def build(engine: Engine, spec: SandboxSpec, say: Callable[[str], None] = lambda text: None) -> str:
    return await prepare_image(engine, spec, say=say, may_build=True)


async def test_a_build_says_its_steps_and_their_output(played: PlayedEngine, engine: Engine, spec: SandboxSpec) -> None:
    said: list[str] = []
    played.pieces = [
        *STEPS,
        *streams("\x1b[91mwarning: ", "old\x1b[0m\n", "half a line"),
        *streams("Removing intermediate container 0123456789ab\n", " ---> 34cd\n", "Successfully built 34cd\n"),
    ]
    name = await build(engine, spec, said.append)
    assert name.startswith("driftgym/built:")
    assert said[1:] == ["step 1/2: FROM x", "step 2/2: RUN make", "warning: old", "half a line", f"{name} is ready"]
    assert played.removed == []
    assert await resolve_image(engine, spec) == name
    assert await build(engine, spec) == name
    assert len(played.requests) == 1


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_messages_may_come_in_any_pieces(
    played: PlayedEngine, engine: Engine, spec: SandboxSpec, size: int
) -> None:
    said: list[str] = []
    whole = b"".join([*STEPS, *streams("zwölf 🎈\n")]).rstrip()
    played.pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
    await build(engine, spec, said.append)
    assert said[1:-1] == ["step 1/2: FROM x", "step 2/2: RUN make", "zwölf 🎈"]


async def test_a_step_that_fails_is_told_with_its_last_lines(
    played: PlayedEngine, engine: Engine, spec: SandboxSpec
) -> None:
    error = {"error": "The command 'make' returned a non-zero code: 2", "errorDetail": {"code": 2}}
    lines = [f"line {n}\n" for n in range(100)]
    played.pieces = [*STEPS, *streams(*lines), json.dumps(error).encode()]
    with pytest.raises(SandboxError, match=r"box: the build failed at step 2/2: RUN make\n") as caught:
        await build(engine, spec)
    words = str(caught.value).splitlines()
    assert words[1:-1] == [line.strip() for line in lines[-20:]]
    assert words[-1] == error["error"]
    assert played.removed == ["0123456789ab"]


async def test_a_dockerfile_that_the_engine_cannot_read_is_bad_input(
    played: PlayedEngine, engine: Engine, spec: SandboxSpec
) -> None:
    played.status = 400
    with pytest.raises(ConfigError, match=r"box/Dockerfile: the engine's reason"):
        await build(engine, spec)
    played.status = 500
    with pytest.raises(SandboxError, match="cannot be built: the engine's reason"):
        await build(engine, spec)


@pytest.mark.parametrize("pieces", [[BREAK], [*STEPS, BREAK], [*STEPS, b'{"stream": "hal', BREAK]])
async def test_an_engine_that_breaks_off_is_an_error(
    played: PlayedEngine, engine: Engine, spec: SandboxSpec, pieces: Sequence[bytes]
) -> None:
    played.pieces = list(pieces)
    with pytest.raises(SandboxError):
        await build(engine, spec)
    with pytest.raises(SandboxError, match="is not built"):
        await resolve_image(engine, spec)


async def test_nonsense_is_an_error(played: PlayedEngine, engine: Engine, spec: SandboxSpec) -> None:
    played.result = ""
    for piece in (b"<html>\n", b"[1]\n", b"\xff\xfe\n"):
        played.pieces = [piece]
        with pytest.raises(SandboxError, match="nonsense"):
            await build(engine, spec)


async def test_a_build_that_ends_without_an_image_is_an_error(
    played: PlayedEngine, engine: Engine, spec: SandboxSpec
) -> None:
    played.pieces, played.result = STEPS, ""
    with pytest.raises(SandboxError, match="without an image, at step 2/2"):
        await build(engine, spec)


async def test_no_room_for_temporary_files_is_an_error(
    engine: Engine, spec: SandboxSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    context = read_context(spec.dockerfile or "")
    with pytest.raises(SandboxError, match="no room"):
        await build_image(engine, context, name_of=lambda digest: "x", say=lambda text: None)


async def test_a_build_that_is_cancelled_hangs_up_and_removes_its_container(
    played: PlayedEngine, engine: Engine, spec: SandboxSpec
) -> None:
    played.pieces = [*STEPS, HANG]
    reached = asyncio.Event()
    building = asyncio.ensure_future(build(engine, spec, lambda text: reached.set() if "2/2" in text else None))
    await asyncio.wait_for(reached.wait(), 10)
    await asyncio.sleep(0.05)
    building.cancel()
    with pytest.raises(asyncio.CancelledError):
        await building
    await asyncio.wait_for(played.has_hung_up.wait(), 10)
    assert played.removed == ["0123456789ab"]


async def test_what_a_dockerfile_begins_with_is_pulled_where_allowed(
    played: PlayedEngine, engine: Engine, spec: SandboxSpec
) -> None:
    assert spec.dockerfile is not None
    (Path(spec.dockerfile) / "Dockerfile").write_text("FROM reg.example:5000/team/python:3.12 AS a\nFROM a\n")
    with pytest.raises(ConfigError, match=r"begins with what is not there: image reg\.example.* may not be pulled"):
        await build(engine, spec)
    with pytest.raises(SandboxError, match="begins with what is not there"):
        await resolve_image(engine, spec)
    assert played.requests == []
    name = await build(engine, spec.model_copy(update={"may_pull": True}))
    pull, made = played.requests
    assert dict(pull.query) == {"fromImage": "reg.example:5000/team/python", "tag": "3.12"}
    assert made.query["t"] == name


async def test_another_base_is_another_image(played: PlayedEngine, engine: Engine, spec: SandboxSpec) -> None:
    first = await build(engine, spec)
    played.images[BASE_IMAGE] = "sha256:3"
    assert await build(engine, spec) != first


async def test_an_image_is_pulled_only_where_allowed(played: PlayedEngine, engine: Engine) -> None:
    spec = SandboxSpec(image="python")
    with pytest.raises(ConfigError, match=r"image python is missing and may not be pulled: .*may_pull"):
        await prepare_image(engine, spec, say=print, may_build=True)
    allowed = spec.model_copy(update={"may_pull": True})
    with pytest.raises(SandboxError, match="missing"):
        await resolve_image(engine, allowed)
    said: list[str] = []
    played.result = "python"
    states = ("Downloading", "Downloading", "Extracting", "Pull complete")
    played.pieces = [json.dumps({"id": "1f", "status": state}).encode() + b"\r\n" for state in states]
    assert await prepare_image(engine, allowed, say=said.append, may_build=False) == "python"
    assert said == [
        "pulling python",
        *("1f: Downloading", "1f: Extracting", "1f: Pull complete"),
        "python is pulled",
    ]
    assert await resolve_image(engine, spec) == "python"


async def test_a_pull_that_fails_is_a_clear_error(played: PlayedEngine, engine: Engine) -> None:
    spec = SandboxSpec(image="python:3", may_pull=True)
    played.pieces, played.result = [json.dumps({"error": "no such host"}).encode()], ""
    with pytest.raises(SandboxError, match="image python:3 cannot be pulled: no such host"):
        await prepare_image(engine, spec, say=print, may_build=True)
    played.status = 404
    with pytest.raises(SandboxError, match="image python:3 cannot be pulled: the engine's reason"):
        await prepare_image(engine, spec, say=print, may_build=True)


async def test_the_base_image_is_not_built_where_it_may_not(played: PlayedEngine, engine: Engine) -> None:
    assert await resolve_image(engine, SandboxSpec()) == BASE_IMAGE
    assert await resolve_image(engine, SandboxSpec(base="debian")) == BASE_IMAGE
    played.images.clear()
    with pytest.raises(ConfigError, match="driftgym sandbox build"):
        await prepare_image(engine, SandboxSpec(), say=print, may_build=False)
    with pytest.raises(SandboxError, match="driftgym sandbox build"):
        await resolve_image(engine, SandboxSpec())

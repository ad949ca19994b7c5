"""Images on a real engine: built once per content, without a network; what fails or is broken off leaves nothing."""

import asyncio
import json
import signal
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import docker.errors
import pytest
import pytest_asyncio
from docker_engine import busybox_image, open_docker

from driftgym.errors import ConfigError, SandboxError
from driftgym.sandboxes.base import SandboxSpec
from driftgym.sandboxes.docker_engine import Engine
from driftgym.sandboxes.docker_provider import DockerProvider
from driftgym.sandboxes.images import (
    BASE_IMAGE,
    BUILT_REPOSITORY,
    build_base_image,
    build_folder,
    prepare_image,
    resolve_image,
)

pytestmark = pytest.mark.docker
START_TIMEOUT_S = 60.0


@pytest_asyncio.fixture
async def provider() -> AsyncIterator[DockerProvider]:
    provider = await open_docker()
    try:
        yield provider
    finally:
        await provider.close()


@pytest.fixture
def engine(provider: DockerProvider) -> Engine:
    return provider.engine


class Folder:
    """A folder with a Dockerfile whose images and build containers can be told from all others by a label."""

    def __init__(self, path: Path, *, engine: Engine) -> None:
        self.path = path
        self.label = f"driftgym.test={uuid.uuid4().hex}"
        self._engine = engine
        path.mkdir()
        (path / "greeting").write_text("hello")

    @property
    def spec(self) -> SandboxSpec:
        """What asks for its image."""
        return SandboxSpec(dockerfile=str(self.path))

    def write(self, *lines: str, base: str = BASE_IMAGE) -> None:
        """Writes the Dockerfile."""
        (self.path / "Dockerfile").write_text("\n".join([f"FROM {base}", f"LABEL {self.label}", *lines, ""]))

    async def containers(self) -> list[str]:
        """The containers of its builds that are there."""
        found = await self._engine.call(self._engine.api.containers, all=True, filters={"label": [self.label]})
        return [container["Id"] for container in found]

    async def built(self) -> list[Any]:
        """Its images that have a name."""
        found = await self._engine.call(self._engine.api.images, filters={"label": [self.label]})
        return [image for image in found if any(tag.startswith(BUILT_REPOSITORY) for tag in image["RepoTags"] or ())]

    async def wait_until_clean(self) -> None:
        """Waits for the engine, which may still be on its way to a step when the client hangs up, and then removes what
        it built with: until there has been nothing for a second."""
        num_clean = 0
        for _ in range(150):
            num_clean = 0 if await self.containers() else num_clean + 1
            if num_clean == 10:
                return
            await asyncio.sleep(0.1)
        pytest.fail(f"left: {await self.containers()}")

    async def remove(self) -> None:
        """Removes its images: the last first, since each is a layer of later ones; the engine may still be at one."""
        for _ in range(100):
            found = await self._engine.call(self._engine.api.images, all=True, filters={"label": [self.label]})
            if not found:
                return
            removed = [image for image in reversed(found) if await self._remove_image(image["Id"])]
            await asyncio.sleep(0 if removed else 0.1)

    async def _remove_image(self, image_id: str) -> bool:
        try:
            await self._engine.call(self._engine.api.remove_image, image_id, force=True)
        except docker.errors.APIError:  # a layer of another, or gone with one
            return False
        return True


@pytest_asyncio.fixture
async def folder(tmp_path: Path, engine: Engine) -> AsyncIterator[Folder]:
    folder = Folder(tmp_path / "box", engine=engine)
    try:
        yield folder
    finally:
        await folder.remove()


async def prepare(engine: Engine, folder: Folder, said: list[str] | None = None) -> str:
    say = (lambda text: None) if said is None else said.append
    return await prepare_image(engine, folder.spec, say=say, may_build=True)


async def test_a_dockerfile_is_built_once_per_content(engine: Engine, folder: Folder) -> None:
    folder.write("COPY greeting /greeting", "RUN cat /greeting")
    with pytest.raises(SandboxError, match=r"is not built: `driftgym sandbox build .*box`"):
        await resolve_image(engine, folder.spec)
    with pytest.raises(ConfigError, match="is not built"):
        await prepare_image(engine, folder.spec, say=print, may_build=False)
    said: list[str] = []
    name = await prepare(engine, folder, said)
    assert name.startswith(f"{BUILT_REPOSITORY}:")
    assert "hello" in said
    assert await resolve_image(engine, folder.spec) == name
    again: list[str] = []
    assert await prepare(engine, folder, again) == name
    assert again == []
    (folder.path / "greeting").write_text("good morning")
    assert await prepare(engine, folder) != name
    assert len(await folder.built()) == 2
    assert await folder.containers() == []


async def test_a_rebuild_replaces_the_image(engine: Engine, folder: Folder) -> None:
    folder.write("RUN date +%N >/now")
    first = await build_folder(engine, str(folder.path), say=print)
    before = await engine.image(first)
    assert await build_folder(engine, str(folder.path), say=print, rebuild=True) == first
    after = await engine.image(first)
    assert before is not None
    assert after is not None
    assert before.image_id != after.image_id
    assert await engine.image(before.image_id) is None


async def test_a_box_holds_what_its_dockerfile_says(provider: DockerProvider, engine: Engine, folder: Folder) -> None:
    (folder.path / ".dockerignore").write_text("secret\n")
    (folder.path / "secret").write_text("x")
    (folder.path / "run.sh").write_text("#!/bin/sh\necho it runs\n")
    (folder.path / "run.sh").chmod(0o755)
    folder.write("COPY . /files", "ENV GREETING=hi", "USER 33", 'ENTRYPOINT ["false"]')
    await prepare(engine, folder)
    box = await provider.start(folder.spec, timeout_s=START_TIMEOUT_S)
    try:
        result = await box.exec("cat /files/greeting; ls /files; /files/run.sh")
    finally:
        await box.close()
    assert result.stdout.split("\n") == ["helloDockerfile", "greeting", "run.sh", "it runs", ""]


async def test_an_image_without_python_can_be_built_upon(
    provider: DockerProvider, engine: Engine, folder: Folder
) -> None:
    folder.write("COPY greeting /greeting", base=await busybox_image(engine))
    await prepare(engine, folder)
    box = await provider.start(folder.spec, timeout_s=START_TIMEOUT_S)
    try:
        assert (await box.exec("cat /greeting")).stdout == "hello"
    finally:
        await box.close()


async def test_a_step_that_fails_is_told_and_leaves_nothing(engine: Engine, folder: Folder) -> None:
    folder.write("RUN echo first", "RUN echo trying; echo the reason >&2; exit 7")
    with pytest.raises(SandboxError, match=r"the build failed at step 4/4: RUN echo trying") as caught:
        await prepare(engine, folder)
    words = str(caught.value)
    assert "the reason" in words
    assert "returned a non-zero code: 7" in words
    assert "first" not in words.split("\n", 1)[1]
    assert await folder.containers() == []
    assert await folder.built() == []


@pytest.mark.parametrize("lines", [["RUNN true"], ["COPY nowhere /x"], ["COPY"]], ids=["word", "file", "arguments"])
async def test_a_dockerfile_that_is_wrong_is_told(engine: Engine, folder: Folder, lines: list[str]) -> None:
    folder.write(*lines)
    with pytest.raises((ConfigError, SandboxError), match="box"):
        await prepare(engine, folder)
    assert await folder.built() == []


async def test_what_is_missing_and_may_not_be_pulled_is_told(engine: Engine, folder: Folder) -> None:
    folder.write(base="driftgym/no-such-image:1")
    with pytest.raises(ConfigError, match=r"begins with what is not there: image driftgym/no-such-image:1"):
        await prepare(engine, folder)
    with pytest.raises(ConfigError, match="driftgym/no-such-image:1 is missing and may not be pulled"):
        await prepare_image(engine, SandboxSpec(image="driftgym/no-such-image:1"), say=print, may_build=True)


async def test_tasks_that_build_the_same_do_it_once(engine: Engine, folder: Folder) -> None:
    folder.write("COPY greeting /greeting", "RUN sleep 0.3")
    said: list[list[str]] = [[] for _ in range(4)]
    names = await asyncio.gather(*(prepare(engine, folder, each) for each in said))
    assert len(set(names)) == 1
    assert len(await folder.built()) == 1
    assert sum(any(line.startswith("step 1/") for line in each) for each in said) == 1


async def cli(*words: str) -> tuple[int, str, str]:
    """The exit code of `driftgym WORDS`, its standard output, and its standard error."""
    argv = (sys.executable, "-P", "-m", "driftgym.cli", *words)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*argv, stdout=pipe, stderr=pipe)
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_processes_that_build_the_same_do_it_once(folder: Folder) -> None:
    folder.write("COPY greeting /greeting", "RUN sleep 0.5")
    ends = await asyncio.gather(*(cli("sandbox", "build", str(folder.path), "--json") for _ in range(2)))
    assert [code for code, _, _ in ends] == [0, 0]
    assert len({json.loads(out)["image"] for _, out, _ in ends}) == 1
    assert sum("step 1/" in err for _, _, err in ends) == 1
    assert len(await folder.built()) == 1


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.3, 0.8])
async def test_a_build_that_is_cancelled_leaves_no_container(engine: Engine, folder: Folder, delay_s: float) -> None:
    folder.write("COPY greeting /greeting", "RUN sleep 100")
    building = asyncio.ensure_future(prepare(engine, folder))
    await asyncio.sleep(delay_s)
    building.cancel()
    with pytest.raises(asyncio.CancelledError):
        await building
    await folder.wait_until_clean()
    assert await folder.built() == []


async def test_a_builder_that_is_killed_leaves_no_container(folder: Folder) -> None:
    folder.write("RUN sleep 100")
    argv = (sys.executable, "-P", "-m", "driftgym.cli", "sandbox", "build", str(folder.path))
    builder = await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.PIPE)
    assert builder.stderr is not None
    async with asyncio.timeout(60):
        while b"RUN sleep" not in await builder.stderr.readline():
            pass
    builder.send_signal(signal.SIGKILL)
    await builder.communicate()
    await folder.wait_until_clean()
    assert await folder.built() == []


async def test_the_base_image_is_made_once(engine: Engine) -> None:
    said: list[str] = []
    await build_base_image(engine, say=said.append)
    assert said == [f"{BASE_IMAGE} is there already"]
    assert await resolve_image(engine, SandboxSpec(base="debian")) == BASE_IMAGE


async def test_a_failed_build_is_one_line_and_code_one(folder: Folder) -> None:
    folder.write("RUN exit 3")
    code, out, err = await cli("sandbox", "build", str(folder.path), "--json")
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith(f"driftgym: {folder.path}: the build failed at step 3/3: RUN exit 3 (")


async def test_boxes_are_listed_and_orphans_removed_as_json(provider: DockerProvider) -> None:
    box = await provider.start(SandboxSpec(), timeout_s=START_TIMEOUT_S)
    code, out, _ = await cli("sandbox", "list", "--json")
    assert code == 0
    found = [each for each in json.loads(out)["boxes"] if each["sandbox_id"] == box.sandbox_id]
    assert [(each["state"], each["owner_is_alive"]) for each in found] == [("running", True)]
    code, out, _ = await cli("sandbox", "list")
    assert box.sandbox_id[:12] in out
    code, out, _ = await cli("sandbox", "reap", "--json")
    assert code == 0
    assert json.loads(out)["num_removed"] >= 0
    assert (await box.exec("echo on")).stdout == "on\n"

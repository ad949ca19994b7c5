"""Which image a box is made of, and how it gets onto the engine: built once per content, pulled only where allowed.

A spec names an image, a folder with a Dockerfile, or the base image. `resolve_image` finds what is there;
`prepare_image`, before any work starts, also makes what is not.
"""

import asyncio
import hashlib
from collections.abc import Callable, Iterable

from driftgym.errors import ConfigError, SandboxError
from driftgym.sandboxes.base import SandboxSpec
from driftgym.sandboxes.base_image import BASE_IMAGE, build_base_image
from driftgym.sandboxes.build_context import read_context
from driftgym.sandboxes.build_lock import only_one
from driftgym.sandboxes.docker_engine import Engine
from driftgym.sandboxes.image_build import BUILD_TIMEOUT_S, build_image, drop_unnamed, pull_image

__all__ = ["BASE_IMAGE", "BUILT_REPOSITORY", "build_base_image", "build_folder", "prepare_image", "resolve_image"]

BUILT_REPOSITORY = "driftgym/built"
"""Images of Dockerfiles; the tag is the hash of what each was built from."""
_NUM_TAG_CHARACTERS = 32
_Say = Callable[[str], None]


async def resolve_image(engine: Engine, spec: SandboxSpec) -> str:
    """The name of the image that boxes of `spec` are made of, which the engine has. Builds and pulls nothing.

    A Dockerfile's folder is read for its hash: remember the answer where boxes start by the thousand.

    Raises:
        SandboxError: the engine does not have it (the message says what to do), or does not answer; or the
            Dockerfile's folder cannot be read.
    """
    try:
        return await prepare_image(engine, spec, say=_say_nothing, may_build=False, may_pull=False)
    except ConfigError as error:
        raise SandboxError(str(error)) from None


async def prepare_image(
    engine: Engine, spec: SandboxSpec, *, say: _Say, may_build: bool, may_pull: bool | None = None
) -> str:
    """The name of the image that boxes of `spec` are made of, after it has been built or pulled where it was missing.

    Args:
        engine: gets the image.
        spec: names it.
        say: takes news for people.
        may_build: whether the base image, or that of a Dockerfile, is built.
        may_pull: whether images are pulled; None takes the spec's.

    Raises:
        ConfigError: it is missing and may not be built or pulled, or the Dockerfile's folder is no such thing.
        SandboxError: the build or the pull failed, or the engine does not answer.
    """
    may_pull = spec.may_pull if may_pull is None else may_pull
    if spec.dockerfile is not None:
        return await build_folder(engine, spec.dockerfile, say=say, may_build=may_build, may_pull=may_pull)
    name = spec.image or BASE_IMAGE
    await _prepare_named(engine, name, say=say, may_build=may_build, may_pull=may_pull)
    return name


async def build_folder(
    engine: Engine, folder: str, *, say: _Say, may_build: bool = True, may_pull: bool = False, rebuild: bool = False
) -> str:
    """The name of the image of the Dockerfile in `folder`, after it has been built, unless the engine has it.

    The name is a hash of the folder (paths, permissions, contents, without what `.dockerignore` leaves out) and of
    the ids of the images that the Dockerfile begins with; so a change of either is another image. Of several calls
    at once, by tasks or processes of one user, one builds.

    Args:
        engine: gets the image.
        folder: holds the Dockerfile.
        say: takes news for people.
        may_build: whether it is built where it is missing.
        may_pull: whether the images that the Dockerfile names are pulled where they are missing.
        rebuild: builds it also when it is there, every step anew.

    Raises:
        ConfigError: see `prepare_image`; or the engine cannot read the Dockerfile.
        SandboxError: a step failed (the message has the step and the last lines of its output), or the engine.
    """
    context = await asyncio.to_thread(read_context, folder)
    for image in context.named_images:
        try:
            await _prepare_named(engine, image, say=say, may_build=may_build, may_pull=may_pull)
        except ConfigError as error:
            raise ConfigError(f"{context.folder}: its Dockerfile begins with what is not there: {error}") from None
    image_ids = [f"{image}={await _image_id(engine, image)}" for image in context.named_images]
    name = _built_name(await asyncio.to_thread(context.digest), image_ids)
    if not rebuild and await engine.has_image(name):
        return name
    if not may_build:
        raise ConfigError(f"the image of {context.folder} is not built: `driftgym sandbox build {context.folder}`")
    async with only_one(name, timeout_s=BUILD_TIMEOUT_S, say=say):
        if not rebuild and await engine.has_image(name):
            return name
        say(f"building {context.folder} as {name}")
        replaced = await engine.image(name)
        name = await build_image(
            engine, context, name_of=lambda digest: _built_name(digest, image_ids), say=say, use_cache=not rebuild
        )
        await drop_unnamed(engine, replaced)
    say(f"{name} is ready")
    return name


def _built_name(digest: str, image_ids: Iterable[str]) -> str:
    whole = "\n".join([digest, *image_ids])
    return f"{BUILT_REPOSITORY}:{hashlib.sha256(whole.encode()).hexdigest()[:_NUM_TAG_CHARACTERS]}"


async def _prepare_named(engine: Engine, name: str, *, say: _Say, may_build: bool, may_pull: bool) -> None:
    if await engine.has_image(name):
        return
    if name == BASE_IMAGE:
        if not may_build:
            raise ConfigError(f"image {name} is missing: build it with `driftgym sandbox build`, or name another image")
        await build_base_image(engine, tag=name, say=say)
        return
    if not may_pull:
        raise ConfigError(
            f"image {name} is missing and may not be pulled: set sandbox.spec.may_pull, load it into the engine, "
            "or leave image out for the base image that `driftgym sandbox build` makes"
        )
    async with only_one(name, timeout_s=BUILD_TIMEOUT_S, say=say):
        if not await engine.has_image(name):
            await pull_image(engine, name, say=say)


async def _image_id(engine: Engine, name: str) -> str:
    info = await engine.image(name)
    if info is None:
        raise SandboxError(f"image {name} was removed meanwhile")
    return info.image_id


def _say_nothing(text: str) -> None:
    """News of what builds and pulls nothing."""

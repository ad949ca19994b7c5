"""A container that serves a box: created, attached to and started as one step that leaves nothing behind."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from driftgym.errors import SandboxError
from driftgym.sandboxes.base import SandboxSpec
from driftgym.sandboxes.docker_engine import Engine, ImageInfo
from driftgym.sandboxes.docker_request import EngineAnswer, RefusedError
from driftgym.sandboxes.docker_settings import container_settings
from driftgym.sandboxes.docker_stream import AttachedStream

_logger = logging.getLogger(__name__)
_NUM_LOOKS = 8
_NUM_LOOKS_AT_END = 3
_LOOK_PAUSE_S = 0.1
"""The stream of a container ends a little before the engine has noted why."""
_LOOK_TIMEOUT_S = 2.0
_OOM_SPAN_NS = 5_000_000_000


class MissingImageError(SandboxError):
    """The engine does not have the image."""

    def __init__(self, name: str) -> None:
        super().__init__(f"image {name} is missing: build it with `driftgym sandbox build`")


class CannotStartError(SandboxError):
    """The container is there, and its main process cannot be started; the engine says why."""


class Container:
    """A running container, and the stream that is attached to its main process."""

    def __init__(self, *, engine: Engine, container_id: str, stream: AttachedStream) -> None:
        self.engine = engine
        self.container_id = container_id
        self.stream = stream
        self._is_released = False
        self._ending: asyncio.Future[None] | None = None

    @classmethod
    async def start(
        cls,
        engine: Engine,
        spec: SandboxSpec,
        *,
        image: str,
        image_info: ImageInfo,
        command: Sequence[str],
        labels: Mapping[str, str],
        adapt: Callable[[dict[str, Any]], None] = lambda body: None,
    ) -> "Container":
        """A container of an image, called `image`, with `command` as its main process. The caller sets the deadline.

        `adapt` changes what the engine is asked for, where the usual settings do not fit the main process.

        One that fails, or is cancelled, is removed, at the latest when an engine that hangs goes on; the reaper finds
        what an engine that is gone leaves.

        Raises:
            CannotStartError: the engine cannot start `command`.
            MissingImageError: the engine does not have the image.
            SandboxError: the engine is gone, or what the spec asks for is not to be had.
        """
        body = container_settings(
            spec,
            image=image_info.image_id,
            command=command,
            labels=labels,
            volumes=image_info.volumes,
            has_quota=engine.has_quota and not spec.read_only_root,
        )
        adapt(body)
        creation = engine.send("POST", "/containers/create", body=body)
        stream = None
        try:
            container_id = await _created(creation, image)
            stream = await AttachedStream.attach(socket_path=engine.socket_path, container_id=container_id)
            await _run(engine, container_id)
        except BaseException as error:
            if stream is not None:
                stream.close()
            await _undo(engine, creation)
            if _is_lack_of_quota(error, body):
                engine.has_quota = False
                return await cls.start(
                    engine, spec, image=image, image_info=image_info, command=command, labels=labels, adapt=adapt
                )
            raise
        return cls(engine=engine, container_id=container_id, stream=stream)

    def listen(self, *, on_output: Callable[[bytes], None], on_lost: Callable[[str], None]) -> None:
        """Has standard output of the main process passed on from its start, and `on_lost` called once, with the reason,
        when the container has ended."""

        def find_out(reason: str) -> None:
            self._ending = asyncio.ensure_future(self._tell_end(reason, on_lost))

        self.stream.listen(on_output=on_output, on_lost=find_out)

    async def _tell_end(self, reason: str, on_lost: Callable[[str], None]) -> None:
        """The engine removes what has ended, and its state: what is left is the list of what happened to it."""
        try:
            if not self._is_released and await self._met_memory_limit():
                reason = f"{reason}: it met its memory limit"
        except (SandboxError, ValueError, KeyError, TypeError):
            return  # the engine is gone too, or answers nonsense, and `reason` stands
        finally:
            on_lost(reason)

    async def _met_memory_limit(self) -> bool:
        """True when the memory limit has taken a process of the container before it ended.

        Raises:
            SandboxError: the engine does not answer.
        """
        filters = json.dumps({"container": [self.container_id], "event": ["oom", "die"]})
        num_looks_at_end = 0
        for _ in range(_NUM_LOOKS):
            until = f"{time.time():.9f}"
            answer = await self.engine.request(
                "GET", "/events", timeout_s=_LOOK_TIMEOUT_S, since="0", until=until, filters=filters
            )
            events = [json.loads(line) for line in answer.body.splitlines() if line.strip()]
            times_ns = {event["Action"]: int(event["timeNano"]) for event in events}
            if "oom" in times_ns:
                # An earlier one took a command, and not the container.
                return times_ns.get("die", 0) - times_ns["oom"] < _OOM_SPAN_NS
            # The two come by ways of their own: the end may be listed before what it was due to.
            num_looks_at_end += "die" in times_ns
            if num_looks_at_end == _NUM_LOOKS_AT_END:
                return False
            await asyncio.sleep(_LOOK_PAUSE_S)
        return False

    async def release(self) -> None:
        """Kills everything in the container and removes it, within some seconds; raises nothing.

        The end of the stream is the end of its main process, also where the engine hangs and removes it later.
        """
        self._is_released = True
        try:
            await self.engine.remove(self.container_id)
        except SandboxError as error:
            _logger.warning("a box is left to the engine, and to the reaper: %s", error)
        finally:
            self.stream.close()


async def _created(creation: "asyncio.Future[EngineAnswer]", image: str) -> str:
    """The id of the container. Cancelled, it leaves the creation to go on."""
    try:
        return str((await asyncio.shield(creation)).value["Id"])
    except RefusedError as error:
        if error.status == 404:
            raise MissingImageError(image) from None
        raise SandboxError(f"a box cannot be created: {error}") from None


async def _run(engine: Engine, container_id: str) -> None:
    try:
        await engine.request("POST", f"/containers/{container_id}/start")
    except RefusedError as error:
        raise CannotStartError(str(error)) from None


def _is_lack_of_quota(error: BaseException, body: Mapping[str, Any]) -> bool:
    return "StorageOpt" in body["HostConfig"] and isinstance(error, SandboxError) and "storage-opt" in str(error)


async def _undo(engine: Engine, creation: "asyncio.Future[EngineAnswer]") -> None:
    """Removes a container that is being, or has been, created, also when it is cancelled meanwhile.

    An engine that hangs is not waited for; the removal follows when it goes on.
    """
    loop = asyncio.get_running_loop()
    removed: asyncio.Future[None] = loop.create_future()

    def on_created(answer: "asyncio.Future[EngineAnswer]") -> None:
        try:
            removal = engine.send_removal(answer.result().value["Id"])
        except SandboxError:  # there is no container, or no engine
            removed.set_result(None)
            return
        removal.add_done_callback(lambda _: removed.set_result(None))

    creation.add_done_callback(on_created)
    was_cancelled = False
    since_s = loop.time()
    while not removed.done() and (left_s := engine.patience_left_s(since_s=since_s)) > 0:
        try:
            await asyncio.wait({removed}, timeout=left_s)
        except asyncio.CancelledError:
            was_cancelled = True
    if was_cancelled:
        raise asyncio.CancelledError

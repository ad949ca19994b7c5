"""The Docker engine, asked from asyncio: requests of its API, and the SDK for what is long and rare."""

import asyncio
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import docker
import docker.errors
import requests

from driftgym.errors import SandboxError
from driftgym.sandboxes.docker_request import EngineAnswer, EngineRequest, RefusedError
from driftgym.sandboxes.docker_stream import read_api_version

DEFAULT_HOST = "unix:///var/run/docker.sock"
REQUEST_TIMEOUT_S = 60.0
SILENCE_S = 7.0
"""An engine that has answered nothing for so long hangs: the end of a box is not waited for any longer."""
_MAX_REMOVAL_S = 60.0
_CLOSE_TIMEOUT_S = 2.0
_NUM_REMOVALS = 3
_PAUSE_S = 0.3
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInfo:
    """An image that the engine has.

    >>> ImageInfo(name="debian:12", image_id="sha256:1f").volumes
    ()
    """

    name: str
    """What it was asked for by."""
    image_id: str
    """Its content's id: a name may mean another image tomorrow."""
    volumes: tuple[str, ...] = ()
    """The folders that it declares as volumes."""


class Engine:
    """The Docker engine. Nothing of it blocks the event loop, and no call waits for another one that hangs."""

    def __init__(self, *, api: Any, socket_path: str, version: str) -> None:
        self.api = api
        """The SDK's low-level client, for `call`."""
        self.socket_path = socket_path
        self.has_quota = True
        """False once the engine has refused to bound a root that can be written; few storage drivers do."""
        self._version = version
        self._pending: dict[asyncio.Future[Any], EngineRequest | None] = {}
        self._answered_at_s = 0.0
        self._is_closed = False

    @classmethod
    async def connect(cls, *, timeout_s: float) -> "Engine":
        """The engine at DOCKER_HOST, or at the usual socket.

        Raises:
            SandboxError: no engine answers within `timeout_s`, or it is not on a unix socket.
        """
        host = os.environ.get("DOCKER_HOST") or DEFAULT_HOST
        if not host.startswith("unix:///"):
            raise SandboxError(f"DOCKER_HOST={host}: only an engine on a unix socket can be used (unix:///PATH)")
        socket_path = host.removeprefix("unix://")
        try:
            async with asyncio.timeout(timeout_s):
                version = await read_api_version(socket_path)
        except TimeoutError:
            raise SandboxError(f"no Docker engine answers at {host} within {timeout_s} s") from None
        try:
            api = docker.APIClient(base_url=host, version=version, timeout=int(REQUEST_TIMEOUT_S))
        except Exception as error:  # the SDK reads Docker's configuration file, and raises anything over a bad one
            raise SandboxError(f"the Docker SDK fails, maybe over ~/.docker/config.json: {error!r}") from error
        return cls(api=api, socket_path=socket_path, version=version)

    def path(self, path: str, **query: Any) -> str:
        """A path of the API in the version that this engine speaks, with its query."""
        return f"/v{self._version}{path}" + (f"?{urlencode(query)}" if query else "")

    def send(
        self, method: str, path: str, *, body: Mapping[str, Any] | None = None, **query: Any
    ) -> "asyncio.Future[EngineAnswer]":
        """Starts a request; its future is no task, and so goes on when the event loop cancels all of them at its end.

        Whoever waits sets the deadline, with a shield where the request is to go on past it. It ends with RefusedError
        when the engine refuses, and with SandboxError when it does not answer or the connection is closed.

        Raises:
            SandboxError: the connection is closed.
        """
        self._check_open()
        request = EngineRequest(socket_path=self.socket_path, method=method, path=self.path(path, **query), body=body)
        self._track(request.answer, request)
        return request.answer

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
        **query: Any,
    ) -> EngineAnswer:
        """A request and its answer. Cancelled or late, it hangs up.

        Raises:
            RefusedError: the engine refuses.
            SandboxError: the engine does not answer within `timeout_s`, or the connection is closed.
        """
        answer = self.send(method, path, body=body, **query)
        request = self._pending[answer]
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(answer)
        except TimeoutError:
            raise SandboxError(f"the Docker engine does not answer within {timeout_s:.0f} s ({path})") from None
        finally:
            if request is not None:
                request.abort("given up")

    async def call(self, function: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """`function(*args, **kwargs)`, a method of `api`, in a thread of its own that keeps nothing from its end.

        Raises:
            docker.errors.APIError: the engine refuses; NotFound and ImageNotFound are of this kind.
            SandboxError: the engine does not answer, or the connection is closed.
        """
        self._check_open()
        answer: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._track(answer, None)
        _run_in_thread(answer, functools.partial(function, *args, **kwargs))
        try:
            return await asyncio.shield(answer)
        except docker.errors.APIError:
            raise
        except (docker.errors.DockerException, requests.RequestException, OSError) as error:
            raise SandboxError(f"the Docker engine does not answer: {error}") from None

    def _check_open(self) -> None:
        if self._is_closed:
            raise SandboxError("the connection to the Docker engine is closed")

    def _track(self, future: "asyncio.Future[Any]", request: EngineRequest | None) -> None:
        self._pending[future] = request
        future.add_done_callback(self._forget)

    def _forget(self, ended: "asyncio.Future[Any]") -> None:
        self._pending.pop(ended, None)
        if ended.cancelled():
            return
        if ended.exception() is None or isinstance(ended.exception(), RefusedError):
            self._answered_at_s = asyncio.get_running_loop().time()

    def patience_left_s(self, *, since_s: float) -> float:
        """How much longer an end is waited for that began at `since_s` on the loop's clock; negative is no more.

        Many ends at once take their time; only an engine that answers nobody is given up.
        """
        heard_at_s = max(since_s, self._answered_at_s)
        return min(heard_at_s + SILENCE_S, since_s + _MAX_REMOVAL_S) - asyncio.get_running_loop().time()

    async def image(self, name: str) -> ImageInfo | None:
        """An image by its name or id; None when the engine has none. Raises SandboxError when it does not answer."""
        try:
            value = (await self.request("GET", f"/images/{quote(name)}/json")).value
        except RefusedError as error:
            if error.status == 404:
                return None
            raise SandboxError(f"image {name}: {error}") from None
        volumes = (value.get("Config") or {}).get("Volumes") or {}
        return ImageInfo(name=name, image_id=value["Id"], volumes=tuple(sorted(volumes)))

    async def has_image(self, name: str) -> bool:
        """True when the engine has the image. Raises SandboxError when it does not answer."""
        return await self.image(name) is not None

    async def remove(self, container_id: str) -> None:
        """Kills and removes a container and its volumes; waits until it is gone. Nothing happens when it is.

        An engine that hangs is waited for some seconds, and goes on removing it when it goes on.

        Raises:
            SandboxError: the engine does not answer, hangs, or cannot remove it.
        """
        for attempt in range(1, _NUM_REMOVALS + 1):
            try:
                await self._wait_removed(self.send_removal(container_id))
                return
            except RefusedError as error:  # as when a file system is still busy
                if attempt == _NUM_REMOVALS:
                    raise SandboxError(f"container {container_id[:12]}: {error}") from None
            except TimeoutError:
                raise SandboxError(f"container {container_id[:12]} is not removed: the engine hangs") from None
            await asyncio.sleep(_PAUSE_S)

    async def _wait_removed(self, removal: "asyncio.Future[None]") -> None:
        since_s = asyncio.get_running_loop().time()
        while not removal.done():
            left_s = self.patience_left_s(since_s=since_s)
            if left_s <= 0:
                raise TimeoutError
            await asyncio.wait({removal}, timeout=left_s)
        removal.result()

    def send_removal(self, container_id: str) -> "asyncio.Future[None]":
        """Starts a removal, which is no task either. Ends with RefusedError or SandboxError; raises the latter."""
        removed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_answer(answer: "asyncio.Future[EngineAnswer]") -> None:
            error = answer.exception()
            status = error.status if isinstance(error, RefusedError) else None
            if status == 409:  # the engine is at it already
                with contextlib.suppress(SandboxError):
                    waiting = self.send("POST", f"/containers/{container_id}/wait", condition="removed")
                    waiting.add_done_callback(lambda _: _settle(removed, None))
                    return
            _settle(removed, None if status == 404 else error)

        self.send("DELETE", f"/containers/{container_id}", force="true", v="true").add_done_callback(on_answer)
        return removed

    async def close(self) -> None:
        """Ends the connection, after what is under way, or when that hangs. Safe to call twice."""
        self._is_closed = True
        if self._pending:
            await asyncio.wait(self._pending, timeout=_CLOSE_TIMEOUT_S)
        for request in list(self._pending.values()):
            if request is not None:
                request.abort("the connection to the Docker engine is closed")
        self.api.close()


def _settle(future: "asyncio.Future[None]", error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
        future.exception()  # whoever asked may not be there any more


def _run_in_thread(answer: "asyncio.Future[_T]", function: Callable[[], _T]) -> None:
    """Runs `function` in a thread that the exit of this process does not wait for."""
    loop = asyncio.get_running_loop()

    def settle(result: Any, error: Exception | None) -> None:
        if answer.done():
            return
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)
            answer.exception()

    def work() -> None:
        result, failure = None, None
        try:
            result = function()
        except Exception as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed, nobody waits
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, name="docker", daemon=True).start()

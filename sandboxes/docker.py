"""Docker boxes: hardened containers whose main process is the toolbox."""

import asyncio
import contextlib
import functools
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import docker
import docker.errors
import requests

from driftgym.errors import SandboxError
from driftgym.sandboxes.base import MIB, SandboxSpec
from driftgym.sandboxes.docker_stream import AttachedStream, read_api_version
from driftgym.sandboxes.toolbox_client import ToolboxClient
from driftgym.sandboxes.toolbox_program import container_command
from driftgym.sandboxes.toolbox_sandbox import ToolboxSandbox

AGENT_UID = 1000
DEFAULT_HOST = "unix:///var/run/docker.sock"
_REQUEST_TIMEOUT_S = 60
_NUM_THREADS = 8
_NUM_OWN_PIDS = 4
"""What the init process, the toolbox and a child of its need, beyond the agent's own processes."""
_NUM_OWN_FILES = 1024
"""What the toolbox needs for the pipes of many commands at once; each command has the limit of the spec."""
_SHM_BYTES = 16 * MIB
_CPU_PERIOD_US = 100_000
_T = TypeVar("_T")


class Engine:
    """The Docker engine: its API from asyncio. The SDK blocks, and runs in a few threads of its own."""

    def __init__(self, *, api: Any, socket_path: str, executor: ThreadPoolExecutor) -> None:
        self.api = api
        self.socket_path = socket_path
        self._executor = executor
        self._is_closed = False

    @classmethod
    async def connect(cls, *, timeout_s: float) -> "Engine":
        """The engine at DOCKER_HOST, or at the usual socket.

        Raises:
            SandboxError: no engine answers within `timeout_s`, or it is not on a unix socket.
        """
        host = os.environ.get("DOCKER_HOST") or DEFAULT_HOST
        if not host.startswith("unix://"):
            raise SandboxError(f"DOCKER_HOST={host}: only an engine on a unix socket can be used")
        socket_path = host.removeprefix("unix://")
        try:
            async with asyncio.timeout(timeout_s):
                version = await read_api_version(socket_path)
        except TimeoutError:
            raise SandboxError(f"no Docker engine answers at {host} within {timeout_s} s") from None
        try:
            api = docker.APIClient(base_url=host, version=version, timeout=_REQUEST_TIMEOUT_S, num_pools=_NUM_THREADS)
        except Exception as error:  # the SDK reads Docker's configuration file, and raises anything over a bad one
            raise SandboxError(f"the Docker SDK fails, maybe over ~/.docker/config.json: {error!r}") from error
        executor = ThreadPoolExecutor(max_workers=_NUM_THREADS, thread_name_prefix="docker")
        return cls(api=api, socket_path=socket_path, executor=executor)

    async def call(self, function: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """`function(*args, **kwargs)`, a method of `api`, in a thread.

        Raises:
            docker.errors.APIError: the engine refuses; NotFound and ImageNotFound are of this kind.
            SandboxError: the engine does not answer, or the connection is closed.
        """
        return await self.answer(self.submit(function, *args, **kwargs))

    def submit(self, function: Callable[..., _T], *args: Any, **kwargs: Any) -> "asyncio.Future[_T]":
        """Starts a call; it is no task, and so goes on when the event loop cancels all of them at its end.

        Raises:
            SandboxError: the connection is closed.
        """
        if self._is_closed:
            raise SandboxError("the connection to the Docker engine is closed")
        call = functools.partial(function, *args, **kwargs)
        return asyncio.get_running_loop().run_in_executor(self._executor, call)

    async def answer(self, submitted: "asyncio.Future[_T]") -> _T:
        """The result of a call that was submitted. Raises as `call` does."""
        try:
            return await submitted
        except docker.errors.APIError:
            raise
        except (docker.errors.DockerException, requests.RequestException, OSError) as error:
            raise SandboxError(f"the Docker engine does not answer: {_first_line(error)}") from None

    async def has_image(self, name: str) -> bool:
        """True when the engine has the image. Raises SandboxError when it does not answer."""
        try:
            await self.call(self.api.inspect_image, name)
        except docker.errors.NotFound:
            return False
        except docker.errors.APIError as error:
            raise SandboxError(f"image {name}: {_first_line(error)}") from None
        return True

    async def remove(self, container_id: str) -> None:
        """Kills and removes a container and its volumes; waits until it is gone. Nothing happens when it is.

        Raises:
            SandboxError: the engine does not answer, or cannot remove it.
        """
        try:
            await self.call(self.remove_in_thread, container_id)
        except docker.errors.APIError as error:
            raise SandboxError(f"container {container_id[:12]}: {_first_line(error)}") from None

    def remove_in_thread(self, container_id: str) -> None:
        """What `remove` does, for a thread. Raises what the SDK raises."""
        try:
            self.api.remove_container(container_id, force=True, v=True)
        except docker.errors.NotFound:
            return
        except docker.errors.APIError as error:
            if error.status_code != 409:
                raise
            with contextlib.suppress(docker.errors.APIError):  # the engine is at it already
                self.api.wait(container_id, condition="removed", timeout=_REQUEST_TIMEOUT_S)

    async def close(self) -> None:
        """Ends the connection, after what is under way."""
        self._is_closed = True
        await asyncio.to_thread(self._executor.shutdown, wait=True)
        self.api.close()


class DockerSandbox(ToolboxSandbox):
    """A container without network, capabilities or a writable root, whose commands run as an unprivileged user.

    The toolbox is its main process (below an init process) and runs as root with SETUID, SETGID and KILL alone.
    Its standard input is this process's connection: when that ends, for whatever reason, the toolbox ends, the
    container with it, and the engine removes it.
    """

    def __init__(self, *, engine: Engine, container_id: str, stream: AttachedStream, client: ToolboxClient) -> None:
        super().__init__(client=client, sandbox_id=container_id)
        self._engine = engine
        self._stream = stream

    @classmethod
    async def start(
        cls, engine: Engine, spec: SandboxSpec, *, labels: Mapping[str, str], timeout_s: float
    ) -> "DockerSandbox":
        """A new box. A start that fails, is cancelled or times out leaves nothing behind.

        Raises:
            SandboxError: the engine is gone, the image is missing or holds no Python 3, or `timeout_s` is over.
        """
        creation = engine.submit(engine.api.create_container, **_creation_settings(engine, spec, labels))
        stream = None
        try:
            async with asyncio.timeout(timeout_s):
                container_id = await _created(engine, creation, spec.image)
                stream = await AttachedStream.attach(socket_path=engine.socket_path, container_id=container_id)
                client = ToolboxClient(name=f"box {container_id[:12]}", write=stream.write)
                stream.listen(on_output=client.feed, on_lost=client.lose)
                await _start(engine, container_id, spec.image)
                await _wait_ready(client, spec.image)
        except BaseException as error:
            if stream is not None:
                stream.close()
            await _undo(engine, creation)
            if isinstance(error, TimeoutError):
                raise SandboxError(f"the box did not start within {timeout_s} s") from None
            raise
        return cls(engine=engine, container_id=container_id, stream=stream, client=client)

    async def _release(self) -> None:
        try:
            await self._engine.remove(self.sandbox_id)
        except SandboxError:
            return  # without an engine there is nothing that could be removed, and the reaper comes later
        finally:
            self._stream.close()


def _creation_settings(engine: Engine, spec: SandboxSpec, labels: Mapping[str, str]) -> dict[str, Any]:
    """Of a container that has no name: the engine gives it one."""
    return {
        "image": spec.image,
        "entrypoint": container_command(_toolbox_settings(spec)),
        "user": "0:0",
        "working_dir": "/",
        "stdin_open": True,
        "tty": False,
        "labels": dict(labels),
        "healthcheck": {"test": ["NONE"]},
        "host_config": engine.api.create_host_config(**_host_settings(spec)),
    }


async def _created(engine: Engine, creation: "asyncio.Future[Mapping[str, Any]]", image: str) -> str:
    """The id of the container. Cancelled, it leaves the creation to go on."""
    try:
        return str((await engine.answer(asyncio.shield(creation)))["Id"])
    except docker.errors.ImageNotFound:
        raise SandboxError(f"image {image} is missing: build it with `driftgym sandbox build`") from None
    except docker.errors.APIError as error:
        raise SandboxError(f"a box cannot be created: {_first_line(error)}") from None


async def _start(engine: Engine, container_id: str, image: str) -> None:
    try:
        await engine.call(engine.api.start, container_id)
    except docker.errors.APIError as error:
        raise _start_error(image, _first_line(error)) from None


async def _wait_ready(client: ToolboxClient, image: str) -> None:
    try:
        await client.wait_ready()
    except SandboxError as error:
        raise _start_error(image, str(error)) from None


def _start_error(image: str, reason: str) -> SandboxError:
    """The init process of some engines, and others themselves, say which program is not there."""
    if "python3" in reason and "No such file" in reason:
        return SandboxError(f"image {image} holds no python3, which a box needs")
    return SandboxError(f"a box of image {image} cannot be started: {reason}")


async def _undo(engine: Engine, creation: "asyncio.Future[Mapping[str, Any]]") -> None:
    """Removes a container that is being, or has been, created; the reaper finds what an engine that is gone leaves.

    Each wait is for a call in a thread, which the end of the event loop does not cancel as it does tasks.
    """
    was_cancelled = await _outlast(creation)
    if creation.exception() is None:
        was_cancelled |= await _outlast(engine.submit(engine.remove_in_thread, creation.result()["Id"]))
    if was_cancelled:
        raise asyncio.CancelledError


async def _outlast(submitted: "asyncio.Future[Any]") -> bool:
    """Waits for the end of a submitted call, whatever comes of it. True when the wait was cancelled, and went on."""
    was_cancelled = False
    while not submitted.done():
        try:
            await asyncio.wait({submitted})
        except asyncio.CancelledError:
            was_cancelled = True
    submitted.exception()  # seen, and of no interest here
    return was_cancelled


def _toolbox_settings(spec: SandboxSpec) -> dict[str, Any]:
    return {
        "uid": AGENT_UID,
        "gid": AGENT_UID,
        "work_dir": "/work",
        "tmp_dir": "/tmp",
        "more_dirs": ["/dev/shm", "/dev/mqueue"],
        "limits": {"nofile": spec.max_open_files},
    }


def _host_settings(spec: SandboxSpec) -> dict[str, Any]:
    owner = f"uid={AGENT_UID},gid={AGENT_UID}"
    num_files = spec.max_open_files + _NUM_OWN_FILES
    return {
        "network_mode": spec.network,
        "cap_drop": ["ALL"],
        "cap_add": ["SETUID", "SETGID", "KILL"],
        "security_opt": ["no-new-privileges:true"],
        "read_only": spec.read_only_root,
        "tmpfs": {
            "/work": f"rw,exec,nosuid,nodev,size={spec.work_dir_bytes},mode=0755,{owner}",
            "/tmp": f"rw,exec,nosuid,nodev,size={spec.work_dir_bytes},mode=1777",
        },
        "shm_size": _SHM_BYTES,
        "mem_limit": spec.memory_bytes,
        "memswap_limit": spec.memory_bytes,
        "pids_limit": spec.max_pids + _NUM_OWN_PIDS,
        # Not `nano_cpus`, which an engine of fewer cores refuses.
        "cpu_period": _CPU_PERIOD_US,
        "cpu_quota": int(spec.num_cpus * _CPU_PERIOD_US),
        "ulimits": [
            docker.types.Ulimit(name="nofile", soft=num_files, hard=num_files),
            docker.types.Ulimit(name="core", soft=0, hard=0),
        ],
        "init": True,
        "ipc_mode": "private",
        "log_config": docker.types.LogConfig(type="none"),
        "auto_remove": True,
    }


def _first_line(error: BaseException) -> str:
    text = getattr(error, "explanation", None) or str(error) or type(error).__name__
    return str(text).strip().splitlines()[0][:300]

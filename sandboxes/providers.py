"""Which boxes a run uses: `open_provider` reads the configuration, and says what it took."""

import asyncio
import os
import time
from collections.abc import Callable, Sequence

from driftgym.errors import ConfigError, SandboxError
from driftgym.sandboxes.base import SandboxConfig, SandboxInfo, SandboxProvider, SandboxSpec
from driftgym.sandboxes.owned_folders import sweep_folders
from driftgym.sandboxes.pool import SandboxPool, check_pool
from driftgym.sandboxes.process import ProcessSandbox

_CONNECT_TIMEOUT_S = 2.0
_MAX_CONCURRENT_STARTS = 4
_NEEDS_DOCKER = ("image", "dockerfile", "base", "runtime", "egress", "network", "run_as_root")
"""What of a spec a process box cannot give, where it is not the default."""


async def open_provider(config: SandboxConfig, *, say: Callable[[str], None], run_id: str = "") -> SandboxPool:
    """The pool of boxes that `config` asks for; it is a provider itself.

    `auto` takes Docker when an engine answers within two seconds and has the image of `config.spec`, and otherwise
    processes of this machine, unless the spec names what these cannot give. `docker` builds the image when it is
    missing, or pulls it where the spec allows that. Boxes of dead owners, or the folders that they left, are removed
    first.

    Raises:
        ConfigError: `docker` is asked for, or needed, and there is no engine, or not the image; or boxes of
            `config.spec` are to be reset, and cannot be, or never fit into the pool's memory.
    """
    check_pool(config.spec, config.pool)
    return SandboxPool(await _open_boxes(config, say=say, run_id=run_id), config.pool)


async def _open_boxes(config: SandboxConfig, *, say: Callable[[str], None], run_id: str) -> SandboxProvider:
    if config.kind == "process":
        say("boxes: processes of this machine (trusted code only)")
        return await _open_processes(say=say)
    try:
        return await _open_docker(config.spec, say=say, run_id=run_id, may_build=config.kind == "docker")
    except ConfigError as error:
        if config.kind == "docker":
            raise
        needs = [f"sandbox.spec.{name}" for name in _NEEDS_DOCKER if _is_named(config.spec, name)]
        if needs:
            raise ConfigError(
                f"{needs[0]}: boxes that are processes of this machine cannot give it, and there are no Docker boxes: "
                f"{str(error).removeprefix('sandbox.kind: ')}. Start Docker with the image (`make sandbox-engine`; "
                f"sandbox.kind=docker builds or pulls it), or leave out {', '.join(needs)}"
            ) from None
        say(f"boxes: processes of this machine (trusted code only), since {error}")
        return await _open_processes(say=say)


async def _open_processes(*, say: Callable[[str], None]) -> "ProcessProvider":
    if num_removed := await asyncio.to_thread(sweep_folders):
        say(f"boxes: removed {num_removed} folders of owners that are dead")
    return ProcessProvider()


def _is_named(spec: SandboxSpec, name: str) -> bool:
    return bool(getattr(spec, name) != SandboxSpec.model_fields[name].default)


async def _open_docker(
    spec: SandboxSpec, *, say: Callable[[str], None], run_id: str, may_build: bool
) -> SandboxProvider:
    """Raises ConfigError with the one reason why there are no Docker boxes."""
    try:
        from driftgym.sandboxes.docker_provider import DockerProvider
        from driftgym.sandboxes.images import prepare_image
    except ImportError:
        raise ConfigError("sandbox.kind: the Docker SDK is missing: `pip install 'driftgym[docker]'`") from None
    try:
        provider = await DockerProvider.open(timeout_s=_CONNECT_TIMEOUT_S, run_id=run_id)
    except SandboxError as error:
        raise ConfigError(f"sandbox.kind: {error}") from None
    try:
        image = await prepare_image(
            provider.engine, spec, say=say, may_build=may_build, may_pull=spec.may_pull and may_build
        )
        num_removed = await provider.sweep()
    except SandboxError as error:
        await provider.close()
        raise ConfigError(f"sandbox.kind: {error}") from None
    except BaseException:
        await provider.close()
        raise
    if num_removed:
        say(f"boxes: removed {num_removed} of owners that are dead")
    say(f"boxes: Docker, image {image}")
    return provider


class ProcessProvider:
    """Starts boxes that are processes of this machine. For trusted code only."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(_MAX_CONCURRENT_STARTS)
        self._boxes: dict[str, tuple[ProcessSandbox, float]] = {}
        self._is_closed = False

    @property
    def kind(self) -> str:
        """`process`."""
        return "process"

    async def start(self, spec: SandboxSpec, *, timeout_s: float) -> ProcessSandbox:
        """A new box. Few start at once; `timeout_s` counts from this one's turn. Raises SandboxError."""
        async with self._turns:
            if self._is_closed:
                raise SandboxError("the provider of boxes is closed")
            box = await ProcessSandbox.start(spec, timeout_s=timeout_s)
        if self._is_closed:
            await box.close()
            raise SandboxError("the provider of boxes was closed while a box started")
        self._forget_closed()
        self._boxes[box.sandbox_id] = (box, time.time())
        return box

    async def list(self) -> Sequence[SandboxInfo]:
        """The boxes of this provider: nobody else keeps a register of processes."""
        self._forget_closed()
        now = time.time()
        return [
            SandboxInfo(
                sandbox_id=sandbox_id,
                owner=f"pid {os.getpid()}",
                state="running",
                age_s=now - started,
                owner_is_alive=True,
            )
            for sandbox_id, (_, started) in self._boxes.items()
        ]

    async def remove(self, sandbox_id: str) -> None:
        """Closes a box. Nothing happens when it is already gone."""
        known = self._boxes.pop(sandbox_id, None)
        if known is not None:
            await known[0].close()

    async def close(self) -> None:
        """Closes the boxes that are still there. Safe to call twice."""
        self._is_closed = True
        boxes, self._boxes = self._boxes, {}
        await asyncio.gather(*(box.close() for box, _ in boxes.values()))

    def _forget_closed(self) -> None:
        self._boxes = {key: known for key, known in self._boxes.items() if not known[0].is_closed}

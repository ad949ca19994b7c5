"""Docker boxes: hardened containers whose main process is the toolbox."""

import asyncio
from collections.abc import Mapping

from driftgym.errors import SandboxError
from driftgym.sandboxes.base import SandboxSpec
from driftgym.sandboxes.docker_container import CannotStartError, Container
from driftgym.sandboxes.docker_engine import DEFAULT_HOST, Engine, ImageInfo
from driftgym.sandboxes.docker_settings import AGENT_UID, toolbox_settings
from driftgym.sandboxes.egress import EGRESS_PORT, EgressGate
from driftgym.sandboxes.toolbox_client import ToolboxClient
from driftgym.sandboxes.toolbox_program import container_command
from driftgym.sandboxes.toolbox_sandbox import ToolboxSandbox

__all__ = ["AGENT_UID", "DEFAULT_HOST", "DockerSandbox", "Engine", "NoPythonError"]


class NoPythonError(SandboxError):
    """The image holds no Python 3, which the toolbox needs."""


class DockerSandbox(ToolboxSandbox):
    """A container without network, capabilities or a writable root, whose commands run as an unprivileged user.

    The toolbox is its main process (below an init process) and runs as root with SETUID, SETGID and KILL alone.
    Its standard input is this process's connection: when that ends, for whatever reason, or nothing comes over it for
    the spec's `dead_man_s`, the toolbox ends, the container with it, and the engine removes it.

    What a spec can loosen:

    - `network: bridge` opens the network; `egress` lets named hosts through alone, by way of this process.
    - `read_only_root: false`: what is written besides /work and /tmp lies on the disk of the engine's machine. Where
      the storage driver has quotas (overlay2 on xfs with `pquota`, btrfs, zfs) it is bounded by `work_dir_bytes`
      altogether; elsewhere, as on overlay2 on ext4, `work_dir_bytes` bounds each file and nothing bounds their sum.
      `reset` does not restore it.
    - `run_as_root`: commands run as user 0 with CHOWN, DAC_OVERRIDE, FOWNER, SETUID, SETGID and KILL, enough to install
      packages. The wall between them and the toolbox is gone: they can kill it and answer in its place.
    """

    def __init__(
        self, *, container: Container, client: ToolboxClient, gate: EgressGate | None, max_output_bytes: int
    ) -> None:
        super().__init__(client=client, sandbox_id=container.container_id, max_output_bytes=max_output_bytes)
        self._engine = container.engine
        self._container = container
        self._gate = gate

    @classmethod
    async def start(
        cls, engine: Engine, spec: SandboxSpec, *, image: ImageInfo, labels: Mapping[str, str], timeout_s: float
    ) -> "DockerSandbox":
        """A new box. A start that fails, is cancelled or times out leaves nothing behind.

        Raises:
            NoPythonError: the image holds no Python 3.
            MissingImageError: the engine does not have the image.
            SandboxError: the engine is gone, or `timeout_s` is over.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await cls._start(engine, spec, image=image, labels=labels)
        except TimeoutError:
            raise SandboxError(f"the box did not start within {timeout_s} s") from None

    @classmethod
    async def _start(
        cls, engine: Engine, spec: SandboxSpec, *, image: ImageInfo, labels: Mapping[str, str]
    ) -> "DockerSandbox":
        settings = toolbox_settings(spec, volumes=image.volumes)
        if spec.egress:
            settings["egress_port"] = EGRESS_PORT
        command = container_command(settings)
        try:
            container = await Container.start(
                engine, spec, image=image.name, image_info=image, command=command.argv, labels=labels
            )
        except CannotStartError as error:
            raise _start_error(image.name, str(error)) from None
        container.stream.write(command.program)
        box = cls._serve(container, spec)
        try:
            await box._client.wait_ready()
        except BaseException as error:
            await box.close()
            if isinstance(error, SandboxError):
                raise _start_error(image.name, str(error)) from None
            raise
        return box

    @classmethod
    def _serve(cls, container: Container, spec: SandboxSpec) -> "DockerSandbox":
        name = f"box {container.container_id[:12]}"
        client = ToolboxClient(name=name, write=container.stream.write, dead_man_s=spec.dead_man_s)
        gate = None
        if spec.egress:
            gate = EgressGate(spec.egress, client.post, name=name)
            client.on_relay = gate.on_relay
        container.listen(on_output=client.feed, on_lost=client.lose)
        return cls(container=container, client=client, gate=gate, max_output_bytes=spec.max_output_bytes)

    async def _release(self) -> None:
        try:
            await self._container.release()
        finally:
            if self._gate is not None:
                await self._gate.close()


def _start_error(image: str, reason: str) -> SandboxError:
    """The init process of some engines, and others themselves, say which program is not there."""
    if "python3" in reason and "No such file" in reason:
        return NoPythonError(f"image {image} holds no python3, which a box needs")
    return SandboxError(f"a box of image {image} cannot be started: {reason}")

"""What a box is: the contract that every implementation keeps, and how one is asked for.

A `SandboxProvider` starts, lists and removes boxes; a `Sandbox` runs commands. `tests/contract/` runs one suite
over every implementation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import pydantic

from driftgym.config import Config
from driftgym.errors import ConfigError
from driftgym.sandboxes.egress_rules import check_rules

MIB = 1024 * 1024
WORK_DIR = "/work"
"""Where a command runs unless it says otherwise; a process sandbox maps it to its temporary folder."""


class SandboxSpec(Config):
    """What a box is made of and what it may use. The defaults are for untrusted commands; each is loosened by name.

    At most one of `image`, `dockerfile` and `base` is given; none of them means `base: debian`.
    """

    image: str | None = pydantic.Field(
        None, min_length=1, description="An image that the Docker engine has, or may pull."
    )
    dockerfile: str | None = pydantic.Field(
        None, min_length=1, description="A folder with a Dockerfile; built once per content."
    )
    base: Literal["debian"] | None = pydantic.Field(
        None, description="A small image of the distribution's own packages, made without a registry."
    )
    may_pull: bool = pydantic.Field(False, description="A missing `image` may be pulled from its registry.")
    runtime: str | None = pydantic.Field(
        None, min_length=1, description="The engine's runtime, as `runsc` (gVisor); None takes its default."
    )
    toolbox: Literal["auto", "python", "engine"] = pydantic.Field(
        "auto", description="How commands get in: by a server in the image's Python, or by the engine's exec."
    )
    memory_bytes: int = pydantic.Field(256 * MIB, ge=32 * MIB, description="Memory, swap included; 32 MiB at least.")
    num_cpus: float = pydantic.Field(1.0, ge=0.01, description="CPU share, in cores.")
    max_pids: int = pydantic.Field(64, gt=0, description="Processes and threads.")
    max_open_files: int = pydantic.Field(256, gt=0, description="Open files per process.")
    max_output_bytes: int = pydantic.Field(
        1 * MIB, gt=0, description="Standard output of a command, and its standard error, unless the call says."
    )
    work_dir_bytes: int = pydantic.Field(64 * MIB, gt=0, description="Size of the tmpfs where work happens.")
    network: Literal["none", "bridge"] = pydantic.Field("none", description="`bridge` opens the network.")
    egress: tuple[str, ...] = pydantic.Field(
        (), description="Hosts that a box without network may still reach by HTTP(S), as `name`, `*.name`, `name:port`."
    )
    read_only_root: bool = pydantic.Field(True, description="False makes the root file system writable.")
    run_as_root: bool = pydantic.Field(
        False, description="True runs commands as root: the wall between them and the toolbox is gone."
    )
    dead_man_s: float = pydantic.Field(
        60.0, gt=0, description="A box whose owner says nothing for so long ends itself, in seconds."
    )

    @pydantic.model_validator(mode="after")
    def _check(self) -> "SandboxSpec":
        named = [name for name in ("image", "dockerfile", "base") if getattr(self, name) is not None]
        if len(named) > 1:
            raise ValueError(f"give one of image, dockerfile and base, not {' and '.join(named)}")
        try:
            check_rules(self.egress)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if self.egress and self.network != "none":
            raise ValueError("egress names what a box without network may reach: leave out network, or egress")
        if self.egress and self.toolbox == "engine":
            raise ValueError("egress is let through by the toolbox: toolbox: engine has none")
        return self


class PoolConfig(Config):
    """How boxes are kept ready, and how they come back into service."""

    reuse: Literal["auto", "fresh", "reset"] = pydantic.Field(
        "auto",
        description="`fresh` gives every episode a new box, `reset` cleans and verifies the same one; `auto` resets "
        "boxes of the engine's default runtime whose root is read-only and whose commands do not run as root.",
    )
    num_warm: int = pydantic.Field(2, ge=0, description="Boxes kept started and unused, ahead of the next request.")
    max_boxes: int = pydantic.Field(256, gt=0, description="Boxes at once, warm and leased.")
    max_memory_bytes: int | None = pydantic.Field(
        None, gt=0, description="The memory limits of all boxes together; None bounds their number alone."
    )
    lease_s: float = pydantic.Field(
        3600.0, gt=0, description="A box that is neither reset nor given back for so long is taken back."
    )


class SandboxConfig(Config):
    """Which boxes a run uses."""

    kind: Literal["auto", "docker", "process"] = pydantic.Field(
        "auto", description="`auto` takes Docker when the engine answers; `process` is for trusted code only."
    )
    spec: SandboxSpec = SandboxSpec()
    pool: PoolConfig = PoolConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """What a command did. A non-zero exit is a value, not an error.

    >>> ExecResult(exit_code=0, stdout="hi", stderr="", duration_s=0.01).timed_out
    False
    """

    exit_code: int | None
    """The exit code; negative is the signal that ended it; None when it was killed at its deadline."""
    stdout: str
    """Standard output, decoded with replacement; never ends within a character."""
    stderr: str
    """Standard error, likewise."""
    duration_s: float
    """Wall time in the box, in seconds."""
    timed_out: bool = False
    """True when the deadline killed the process tree."""
    oom_killed: bool = False
    """True when the box's memory limit killed a process while this command ran."""
    output_truncated: bool = False
    """True when output was dropped."""
    num_dropped_bytes: int = 0
    """How many bytes of output were dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One line that a process in the box answered.

    >>> Reply(text="41").truncated
    False
    """

    text: str
    """The line without its end, decoded with replacement; a prefix of it when truncated."""
    truncated: bool = False
    """True when the line was longer than allowed."""
    num_dropped_bytes: int = 0
    """How many bytes of the line were dropped."""


class SandboxProcess(Protocol):
    """A long-lived process in a box that answers a line with a line: tools that would be dear to start each time."""

    async def ask(self, line: str, *, timeout_s: float, max_reply_bytes: int = 64 * 1024) -> Reply:
        """Writes `line` and returns the next line of its standard output.

        Past `timeout_s` the process tree is killed (its answer would be taken for that of the next question)
        and TimeoutError is raised; the box stays usable.

        Raises:
            TimeoutError: no whole line within `timeout_s`.
            SandboxError: the process or its box is gone.
        """
        ...

    async def kill(self) -> None:
        """Kills the process tree. Nothing happens when it has already ended."""
        ...

    @property
    def is_alive(self) -> bool:
        """True while the process can be asked."""
        ...


class Sandbox(Protocol):
    """One box. Every method raises SandboxError when the box is gone."""

    @property
    def sandbox_id(self) -> str:
        """What the provider knows it by."""
        ...

    async def ping(self, *, timeout_s: float) -> None:
        """Waits for a sign of life.

        Raises:
            SandboxError: the box is gone, or does not answer within `timeout_s`, and is lost therefore.
        """
        ...

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str = WORK_DIR,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float = 10.0,
        max_output_bytes: int | None = None,
    ) -> ExecResult:
        """Runs an argv, or a shell line when `command` is a string, and waits for it.

        At `timeout_s` the whole process tree is killed and the box stays usable. `max_output_bytes` (None takes the
        spec's) holds for standard output and standard error each; what is beyond is counted and dropped, the command
        goes on.
        A command that cannot be started gives exit code 127 with the reason in `stderr`.

        Raises:
            SandboxError: the box is gone.
        """
        ...

    async def spawn(
        self, argv: Sequence[str], *, cwd: str = WORK_DIR, env: Mapping[str, str] | None = None
    ) -> SandboxProcess:
        """Starts a long-lived process that answers line by line. Its standard error is dropped.

        Raises:
            SandboxError: the box is gone, or the program cannot be started.
        """
        ...

    async def read_file(self, path: str, *, max_bytes: int = 1 * MIB) -> bytes:
        """The content of a file.

        Raises:
            FileNotFoundError: there is no such file, or it cannot be read by the agent's user.
            ValueError: it is longer than `max_bytes`.
            SandboxError: the box is gone.
        """
        ...

    async def write_file(self, path: str, content: bytes) -> None:
        """Writes a file, and the folders above it, as the agent's user.

        Raises:
            OSError: it cannot be written there (read-only, no space).
            SandboxError: the box is gone.
        """
        ...

    async def upload(self, local: Path, path: str, *, timeout_s: float = 60.0) -> None:
        """Copies a folder of this machine into the folder `path` of the box, as the agent's user.

        Folders are made, files of the same name replaced, others left alone. Regular files, folders and symbolic
        links are copied, with their permissions; whatever else is there (devices, sockets) is left out.

        Raises:
            NotADirectoryError: `local` is no folder.
            OSError: it cannot be written there (read-only, no space), or `local` cannot be read.
            SandboxError: the box is gone, or the copy did not end within `timeout_s`.
        """
        ...

    async def download(
        self, path: str, local: Path, *, max_bytes: int = 64 * MIB, max_files: int = 10_000, timeout_s: float = 60.0
    ) -> None:
        """Copies the folder `path` of the box into the folder `local` of this machine, which is made.

        What the box holds is not trusted: nothing is written outside of `local`, links that lead out of it, devices
        and the like are left out, and permissions are those of an ordinary file or folder.

        Raises:
            FileNotFoundError: there is no such folder, or it cannot be read by the agent's user.
            ValueError: it holds more than `max_bytes` or `max_files`, or folders nested deeper than 200; part of it may
                have been written.
            OSError: `local` cannot be written.
            SandboxError: the box is gone, or the copy did not end within `timeout_s`.
        """
        ...

    async def reset(self, *, keep_files: bool = False) -> None:
        """Kills every process that was started in the box, empties every place where files could be written, and
        verifies that both is so. With `keep_files`, kills alone: grading can read what no process can change.

        Raises:
            SandboxError: the box is gone, or does not come back clean; it must then be closed.
        """
        ...

    async def close(self) -> None:
        """Kills everything in the box and removes it. Safe to call twice; raises nothing when the box is gone."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxInfo:
    """A box that exists, as the provider's engine reports it.

    >>> SandboxInfo(sandbox_id="1f", owner="host:42", state="running", age_s=3.0, owner_is_alive=True).state
    'running'
    """

    sandbox_id: str
    """The engine's id."""
    owner: str
    """Who started it: host, process id and start time of the owner's process."""
    state: str
    """The engine's word for its state (`created`, `running`, `exited`, ...)."""
    age_s: float
    """Seconds since it was created."""
    owner_is_alive: bool
    """False when the owner's process on this host is gone."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """All its labels."""


class SandboxProvider(Protocol):
    """Starts, lists and removes boxes of one kind."""

    @property
    def kind(self) -> str:
        """`docker`, `process` or `scripted`."""
        ...

    async def start(self, spec: SandboxSpec, *, timeout_s: float) -> Sandbox:
        """A new box. A start that fails, is cancelled or times out leaves nothing behind.

        Raises:
            SandboxError: the engine is gone, the image is missing, or the box did not start in `timeout_s`.
        """
        ...

    async def list(self) -> Sequence[SandboxInfo]:
        """Every box of driftgym's that the engine knows, in any state, of any owner on this engine."""
        ...

    async def remove(self, sandbox_id: str) -> None:
        """Removes a box by force. Nothing happens when it is already gone."""
        ...

    async def close(self) -> None:
        """Closes the boxes that this provider started and are still there, then the connection to the engine."""
        ...

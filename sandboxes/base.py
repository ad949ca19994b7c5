"""What a box is: the contract that every implementation keeps, and how one is asked for.

A `SandboxProvider` starts, lists and removes boxes; a `Sandbox` runs commands. `tests/contract/` runs one suite
over every implementation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import pydantic

from driftgym.config import Config

MIB = 1024 * 1024
WORK_DIR = "/work"
"""Where a command runs unless it says otherwise; a process sandbox maps it to its temporary folder."""


class SandboxSpec(Config):
    """What a box may use. The defaults are for untrusted commands; each is loosened by name."""

    image: str = pydantic.Field("driftgym/base:debian", description="Image of a Docker box; see `sandbox build`.")
    memory_bytes: int = pydantic.Field(256 * MIB, ge=32 * MIB, description="Memory, swap included; 32 MiB at least.")
    num_cpus: float = pydantic.Field(1.0, ge=0.01, description="CPU share, in cores.")
    max_pids: int = pydantic.Field(64, gt=0, description="Processes and threads.")
    max_open_files: int = pydantic.Field(256, gt=0, description="Open files per process.")
    work_dir_bytes: int = pydantic.Field(64 * MIB, gt=0, description="Size of the tmpfs where work happens.")
    network: Literal["none", "bridge"] = pydantic.Field("none", description="`bridge` opens the network.")
    read_only_root: bool = pydantic.Field(True, description="False makes the root file system writable.")


class SandboxConfig(Config):
    """Which boxes a run uses."""

    kind: Literal["auto", "docker", "process"] = pydantic.Field(
        "auto", description="`auto` takes Docker when the engine answers; `process` is for trusted code only."
    )
    spec: SandboxSpec = SandboxSpec()


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

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str = WORK_DIR,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float = 10.0,
        max_output_bytes: int = 1 * MIB,
    ) -> ExecResult:
        """Runs an argv, or a shell line when `command` is a string, and waits for it.

        At `timeout_s` the whole process tree is killed and the box stays usable. `max_output_bytes` holds for
        standard output and standard error each; what is beyond is counted and dropped, the command goes on.
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

    async def reset(self) -> None:
        """Kills every process that was started in the box and empties its work folder and temporary folder.

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

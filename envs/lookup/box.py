"""The box of a Lookup environment and the tool process in it, kept from one episode to the next where that is allowed.

The agent runs no commands in this box: it asks the tool process, which is driftgym's own code and forgets the last
episode when it loads the next one. So where boxes are reused by a reset, neither is even reset. Where every episode is
to have a fresh box, it gets one.
"""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from driftgym.config import Limits
from driftgym.envs.lookup.store import Fault
from driftgym.envs.tools import PolicyError, ToolOutput
from driftgym.errors import EnvError, SandboxError
from driftgym.sandboxes.base import (
    WORK_DIR,
    PoolConfig,
    Reply,
    Sandbox,
    SandboxConfig,
    SandboxProcess,
    SandboxProvider,
    SandboxSpec,
)
from driftgym.sandboxes.pool_box import PooledSandbox

Records = Mapping[str, Mapping[str, int]]

_SCRIPT = "lookup_tools.py"
# The longest escape of a JSON string, a pair of \uXXXX, has 12 characters.
_LONGEST_ESCAPE = 12
# A reply may also be a traceback, which the agent's bound on output must not cut.
_TRACEBACK_BYTES = 4096


class ToolBox:
    """One box and one tool process. Starts both when they are needed, the process again when it was lost, and both for
    each episode when the pool that the box is of says `fresh`."""

    def __init__(
        self,
        *,
        sandboxes: SandboxProvider | None,
        spec: SandboxSpec,
        limits: Limits,
        max_output_bytes: int,
    ) -> None:
        """Nothing is started yet.

        Args:
            sandboxes: where the box comes from; None opens a provider of process boxes, and closes it at the end.
            spec: what the box may use.
            limits: the deadlines.
            max_output_bytes: how much of a tool's output leaves the box.
        """
        self._sandboxes = sandboxes
        self._owned_sandboxes: SandboxProvider | None = None
        self._spec = spec
        self._limits = limits
        self._max_output_bytes = max_output_bytes
        self._box: Sandbox | None = None
        self._process: SandboxProcess | None = None
        self._is_box_used = False
        self._is_in_step = True
        self._num_asked = 0
        self._records: Records = {}

    async def load(self, records: Records) -> None:
        """Puts `records` in the place of all that the store held.

        Raises:
            SandboxError: no box can be had, or it is lost.
        """
        self._records = records
        if self._is_box_used and isinstance(self._box, PooledSandbox) and self._box.reuse == "fresh":
            await self._swap_box(self._box)
        self._is_box_used = True
        if await self._has_process():
            # A process that the last episode harmed is replaced.
            with contextlib.suppress(TimeoutError, SandboxError, EnvError):
                await self._load(timeout_s=self._limits.tool_call_s)
                return
        await self._start_anew()

    async def call(
        self,
        tool: str,
        arguments: Mapping[str, Any],
        *,
        sleep_s: float,
        fault: Fault | None,
        timeout_s: float,
    ) -> ToolOutput:
        """Runs a tool in the box, after `sleep_s` seconds there.

        Raises:
            TimeoutError: it did not end within `timeout_s`; the next call gets a new process with the same records.
            PolicyError: the arguments make no sense.
            EnvError: the tool's own code failed; the message is the box's traceback.
            SandboxError: the box or its process is gone.
        """
        if not await self._has_process():
            await self._start_process()
        request = {"do": "call", "tool": tool, "arguments": dict(arguments), "sleep_s": sleep_s, "fault": fault}
        return await self._ask(request, timeout_s=timeout_s)

    async def close(self) -> None:
        """Closes the box, and the provider when it is its own. Safe to call twice."""
        box, self._box, self._process = self._box, None, None
        if box is not None:
            await box.close()
        owned, self._owned_sandboxes = self._owned_sandboxes, None
        if owned is not None:
            await owned.close()

    async def _has_process(self) -> bool:
        if self._process is None:
            return False
        if not self._is_in_step:
            await self._end_process()
        return self._process is not None and self._process.is_alive

    async def _end_process(self) -> None:
        """Kills the process. The answer to a question that was given up would be taken for that of the next one."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(SandboxError):  # then its box is gone, and the process with it
                await process.kill()

    async def _start_anew(self) -> None:
        """A new process; in a new box where the old one is lost."""
        if self._box is not None:
            try:
                await self._start_process()
                return
            except SandboxError:
                box, self._box = self._box, None
                await box.close()
        self._box = await self._start_box()
        await self._start_process()

    async def _swap_box(self, box: PooledSandbox) -> None:
        """A box that nothing was done in. Without one, the old one is given up."""
        self._process = None  # goes with its box
        try:
            await box.reset()
        except SandboxError:
            self._box = None
            await box.close()

    async def _start_box(self) -> Sandbox:
        provider = self._sandboxes or await self._own_provider()
        return await provider.start(self._spec, timeout_s=self._limits.sandbox_start_s)

    async def _own_provider(self) -> SandboxProvider:
        if self._owned_sandboxes is None:
            from driftgym.sandboxes.providers import open_provider  # only who brings no provider needs it

            config = SandboxConfig(kind="process", pool=PoolConfig(num_warm=0))  # one box is all that it needs
            self._owned_sandboxes = await open_provider(config, say=lambda _: None)
        return self._owned_sandboxes

    async def _start_process(self) -> None:
        """A new process in the box, with the records of the episode. Raises SandboxError when the box is lost: an
        episode is not moved to another box, it is played again."""
        if self._box is None:
            raise SandboxError("lookup: there is no box")
        await self._end_process()
        script = Path(__file__).with_name("box_tools.py").read_bytes()
        await self._box.write_file(f"{WORK_DIR}/{_SCRIPT}", script)
        # -S and -I leave out what a start of Python otherwise spends most of its time on.
        self._process = await self._box.spawn(["python3", "-I", "-S", "-u", _SCRIPT])
        self._is_in_step = True
        try:
            await self._load(timeout_s=self._limits.sandbox_start_s)
        except TimeoutError as error:
            raise SandboxError("lookup: a new tool process does not answer") from error

    async def _load(self, *, timeout_s: float) -> None:
        await self._ask({"do": "load", "records": self._records}, timeout_s=timeout_s)

    async def _ask(self, request: Mapping[str, Any], *, timeout_s: float) -> ToolOutput:
        assert self._process is not None
        self._num_asked += 1
        line = json.dumps({"id": self._num_asked, **request})
        self._is_in_step = False
        reply = await self._process.ask(
            line, timeout_s=timeout_s, max_reply_bytes=self._max_output_bytes + _TRACEBACK_BYTES
        )
        number, _, rest = reply.text.partition(" ")
        kind, _, escaped = rest.partition(" ")
        if number != str(self._num_asked) or kind not in ("R", "P", "E"):
            raise EnvError(f"lookup: the tool process answered out of step: {reply.text[:80]!r}")
        self._is_in_step = True
        text = _unescaped(escaped)
        if kind == "P":
            raise PolicyError(text)
        if kind == "E":
            raise EnvError(f"lookup: the tool failed in the box\n{text}")
        return _output(text, reply)


def _output(text: str, reply: Reply) -> ToolOutput:
    return ToolOutput(text=text, num_dropped_bytes=reply.num_dropped_bytes if reply.truncated else 0)


def _unescaped(escaped: str) -> str:
    """The text whose JSON string's inside is `escaped`, without the escape that a cut left unfinished."""
    for end in range(len(escaped), max(-1, len(escaped) - _LONGEST_ESCAPE), -1):
        try:
            return str(json.loads(f'"{escaped[:end]}"'))
        except ValueError:
            continue
    return escaped

"""`LookupEnv`: the question, the tools, and what an answer is worth."""

import functools
import re
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
import pydantic

from driftgym.config import Config, Limits, parse_config
from driftgym.envs.base import Grade, ResetResult, StepResult, ToolEnv
from driftgym.envs.lookup.box import ToolBox
from driftgym.envs.lookup.store import (
    NAMES,
    TOOLS,
    Fault,
    LatencyDraws,
    Level,
    Wording,
    World,
    draw_fault,
    draw_world,
)
from driftgym.envs.tools import Tool, ToolOutput, ToolSchema, Toolset
from driftgym.errors import EnvError
from driftgym.sandboxes.base import SandboxProvider, SandboxSpec
from driftgym.types import Message, ToolCall, TrajectoryStatus

_SELECTORS = ("get_oldest", "get_youngest")
_Share = Annotated[float, pydantic.Field(ge=0, le=1)]


class LookupConfig(Config):
    """The arguments of `driftgym/Lookup-v0`."""

    level: Level = pydantic.Field("one_call", description="`two_calls` asks for a fact about the oldest of three.")
    wording: Wording = pydantic.Field(
        "oblique", description="`oblique` questions do not name what the tools are called after; `plain` ones do."
    )
    num_people: int = pydantic.Field(8, ge=3, le=len(NAMES), description="People in the store.")
    latency_mean_s: float = pydantic.Field(0.0, ge=0, description="Mean time that a tool takes, slept in the box.")
    latency_sigma: float = pydantic.Field(
        0.0, ge=0, le=4, description="Sigma of the lognormal latency; 0 is constant, 1.5 has a heavy tail."
    )
    faults: dict[Fault, _Share] = pydantic.Field(
        default={}, description="Share of the episodes whose tools hang, raise or print 100 MB."
    )
    max_output_bytes: int = pydantic.Field(512, ge=64, description="What the agent sees of a tool's output.")

    @pydantic.model_validator(mode="after")
    def _shares_fit(self) -> "LookupConfig":
        if sum(self.faults.values()) > 1:
            raise ValueError("the shares of faults add up to more than 1")
        return self


class LookupEnv(ToolEnv):
    """Asks for a fact about a person. The words of the question do not name the tool that knows.

    The first message that calls no tool is the answer, and ends the episode. The reward is 1 when both parts are:

    - `answer`: the answer holds the right value as a whole word, and no other number;
    - `tools`: every call that the question needs was made, and its result held what it should. A lucky guess of
      who is the oldest is worth nothing.

    A box and its tool process serve one episode after the other: `areset` loads the new records, which replace all
    others. Values are unique within a world, so a wrong tool or person never gives the right one.
    """

    def __init__(
        self,
        *,
        sandboxes: SandboxProvider | None = None,
        sandbox_spec: SandboxSpec | None = None,
        limits: Limits | None = None,
        render_mode: str | None = None,
        **settings: Any,
    ) -> None:
        """An environment that starts its box at the first `areset`.

        Args:
            sandboxes: where the box comes from; None opens a provider of process boxes of its own.
            sandbox_spec: what the box may use.
            limits: the deadlines.
            render_mode: as in `ToolEnv`.
            settings: the fields of `LookupConfig`.

        Raises:
            ConfigError: a setting is unknown or out of range.
        """
        super().__init__(limits=limits, render_mode=render_mode)
        self.config = parse_config(LookupConfig, settings, source="driftgym/Lookup-v0")
        self._box = ToolBox(
            sandboxes=sandboxes,
            spec=sandbox_spec or SandboxSpec(),
            limits=self.limits,
            max_output_bytes=self.config.max_output_bytes,
        )
        self._level: Level = self.config.level
        self._toolsets: dict[Level, Toolset] = {}
        self._world: World | None = None
        self._fault: Fault | None = None
        self._latency = LatencyDraws(seed=0, mean_s=0, sigma=0)
        self._results: list[tuple[str, str]] = []
        self._num_calls = 0
        self._answer = ""

    @property
    def tools(self) -> tuple[ToolSchema, ...]:
        """Four similar tools: those of the level."""
        return TOOLS[self._level]

    async def areset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> ResetResult:
        """A new world. `options` may name another `level` for this episode. Raises as in `ToolEnv`."""
        seed = self.episode_seed(seed)
        self._level = self._chosen_level(options or {})
        self._world = draw_world(
            seed=seed, level=self._level, num_people=self.config.num_people, wording=self.config.wording
        )
        self._fault = draw_fault(seed=seed, shares=self.config.faults)
        self._latency = LatencyDraws(seed=seed, mean_s=self.config.latency_mean_s, sigma=self.config.latency_sigma)
        self._results, self._num_calls, self._answer = [], 0, ""
        await self._box.load(self._world.records)
        return ResetResult(messages=(Message(role="user", content=self._world.question),))

    def _chosen_level(self, options: Mapping[str, Any]) -> Level:
        unknown = set(options) - {"level"}
        if unknown:
            raise EnvError(f"lookup: unknown options {sorted(unknown)}; known: level")
        level = options.get("level", self.config.level)
        if level not in TOOLS:
            raise EnvError(f"lookup: level must be one of {sorted(TOOLS)}, got {level!r}")
        return level  # type: ignore[no-any-return]

    async def astep(self, action: Message) -> StepResult:
        """Runs the calls of `action`, or takes its text as the answer. Raises as in `ToolEnv`."""
        if self._world is None:
            raise EnvError("lookup: astep before areset")
        if not action.tool_calls:
            self._answer = action.text
            return StepResult(messages=(), terminated=True)
        replies = await self._toolset().run(action.tool_calls)
        return StepResult(messages=replies.messages, events=replies.events)

    async def grade(self, status: TrajectoryStatus) -> Grade:
        """1 or 0, with the parts `answer` and `tools`. An episode that ended without an answer is worth 0."""
        if self._world is None:
            raise EnvError("lookup: grade before areset")
        is_right = is_answer(self._answer, self._world.answer)
        is_looked_up = all((call.tool, call.result) in self._results for call in self._world.needed)
        parts = {"answer": float(is_right), "tools": float(is_looked_up)}
        return Grade(reward=float(is_right and is_looked_up), parts=parts)

    async def aclose(self) -> None:
        """Closes the box. Safe to call twice."""
        await self._box.close()

    def oracle(self, *, skill: float, rng: np.random.Generator) -> Message:
        """The next needed call, or one of the other tools; then the last result, whatever tool gave it: a poor player
        still shows how to call, and to answer with what came back.

        Raises:
            EnvError: before `areset`.
        """
        if self._world is None:
            raise EnvError("lookup: oracle before areset")
        if self._results and self._results[-1][0] not in _SELECTORS:
            return Message(role="assistant", content=self._results[-1][1])
        tool = self._world.needed[-1 if self._results else 0].tool
        if rng.random() >= skill:
            others = [schema.name for schema in self.tools if schema.name != tool]
            tool = others[int(rng.integers(len(others)))]
        call = ToolCall(
            call_id=f"call_{self._num_calls}", name=tool, arguments=self._oracle_arguments(tool, self._world)
        )
        return Message(role="assistant", tool_calls=(call,))

    def _oracle_arguments(self, tool: str, world: World) -> dict[str, Any]:
        """Those whom the question names, or whom the last result names."""
        if tool in _SELECTORS:
            return {"persons": list(world.people)}
        return {"person": self._results[-1][1] if self._results else world.people[0]}

    def _toolset(self) -> Toolset:
        if self._level not in self._toolsets:
            tools = [
                Tool(schema=schema, run=functools.partial(self._call, schema.name)) for schema in TOOLS[self._level]
            ]
            self._toolsets[self._level] = Toolset(
                tools, limits=self.limits, max_output_bytes=self.config.max_output_bytes
            )
        return self._toolsets[self._level]

    async def _call(self, tool: str, arguments: Mapping[str, Any], *, timeout_s: float) -> ToolOutput:
        self._num_calls += 1
        output = await self._box.call(
            tool, arguments, sleep_s=self._latency.next_s(), fault=self._fault, timeout_s=timeout_s
        )
        self._results.append((tool, output.text))
        return output


def is_answer(answer: str, value: str) -> bool:
    """True when `answer` holds `value` as a whole word, and no other number.

    >>> is_answer("Room 41.", "41"), is_answer("41 or 42", "41"), is_answer("411", "41"), is_answer("-41", "41")
    (True, False, False, False)
    """
    if set(re.findall(r"\d+", answer)) != {value}:
        return False
    return re.search(rf"(?<![\w.,-]){re.escape(value)}(?!\w)", answer) is not None

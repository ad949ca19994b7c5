"""Episodes from end to end: an engine that writes given lines over HTTP, and an environment that counts its tools."""

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stub_engine import StubEngine, reply
from tokenizers import Tokenizer

from driftgym.agents.episode import EpisodeId
from driftgym.agents.generators.base import Generator
from driftgym.agents.generators.pool import GeneratorPool
from driftgym.agents.rendering import Renderer, make_renderer
from driftgym.agents.rollout import EpisodeOptions, RolloutConfig, run_episode
from driftgym.agents.tool_agent import AgentConfig, ToolAgent
from driftgym.config import Limits
from driftgym.envs.base import Grade, ResetResult, StepResult, ToolEnv
from driftgym.envs.tools import Tool, ToolSchema, Toolset
from driftgym.types import Message, Task, Trajectory, TrajectoryStatus

TINY = Path(__file__).parents[2] / "configs" / "models" / "tiny-qwen3"
LIMITS = Limits(tool_call_s=5.0, generation_s=20.0, episode_s=60.0)
ANYTHING = {"type": "object", "additionalProperties": True}
NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}


class CountedTools(ToolEnv):
    """Tools of the given names, which take anything and say `NAME ran`; `add` adds. Counts what ran.

    A message without calls ends the episode, unless `follow_ups` has something more to say.
    """

    def __init__(self, *names: str, first: Sequence[Message] = (), follow_ups: Sequence[str] = ()) -> None:
        super().__init__(limits=LIMITS)
        self.first = tuple(first) or (Message(role="user", content="Go."),)
        self.follow_ups = list(follow_ups)
        self.ran: list[tuple[str, Mapping[str, Any]]] = []
        self.statuses: list[TrajectoryStatus] = []
        self._toolset = Toolset([self._tool(name) for name in names], limits=LIMITS)

    def _tool(self, name: str) -> Tool:
        async def run(arguments: Mapping[str, Any], *, timeout_s: float) -> str:
            self.ran.append((name, arguments))
            return str(arguments["a"] + arguments["b"]) if name == "add" else f"{name} ran"

        parameters = NUMBERS if name == "add" else ANYTHING
        return Tool(schema=ToolSchema(name=name, description=f"Does {name}.", parameters=parameters), run=run)

    @property
    def tools(self) -> tuple[ToolSchema, ...]:
        return self._toolset.schemas

    async def areset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> ResetResult:
        return ResetResult(messages=self.first)

    async def astep(self, action: Message) -> StepResult:
        if not action.tool_calls:
            if not self.follow_ups:
                return StepResult(messages=(), terminated=True)
            return StepResult(messages=(Message(role="user", content=self.follow_ups.pop(0)),))
        replies = await self._toolset.run(action.tool_calls)
        return StepResult(messages=replies.messages, events=replies.events)

    async def grade(self, status: TrajectoryStatus) -> Grade:
        self.statuses.append(status)
        return Grade(reward=1.0)

    async def aclose(self) -> None:
        """Holds nothing."""


class LineEngine(StubEngine):
    """Answers with the next of `lines`, encoded; one that ends with `...` is cut by its length, others have a stop.

    With `answer_of`, the line is what that says to the prompt's ids.
    """

    def __init__(
        self,
        lines: Sequence[str] = (),
        *,
        renderer: Renderer | None = None,
        encode: Callable[[str], list[int]] | None = None,
        answer_of: Callable[[list[int]], str] | None = None,
    ) -> None:
        super().__init__()
        self.renderer = renderer or make_renderer("compact", TINY)
        self.encode = encode or encode_tiny()
        self.lines = list(lines)
        self.answer_of = answer_of
        self.model = {"vocab_size": 2**20}

    @property
    def prompts(self) -> list[list[int]]:
        """[R][P] the prompt of each request, in order."""
        return [body["input_ids"] for path, body in self.calls if path == "/generate"]

    def ids_of(self, line: str) -> list[int]:
        """[L] what the engine samples for a line."""
        if line.endswith("..."):
            return self.encode(line.removesuffix("..."))
        return [*self.encode(line), self.renderer.stop_token_ids[0]]

    async def respond(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        """As `StubEngine.respond`."""
        if path == "/generate":
            line = self.answer_of(body["input_ids"]) if self.answer_of is not None else self.lines.pop(0)
            ids = self.ids_of(line)
            reason = {"type": "length", "length": len(ids)} if line.endswith("...") else None
            self.answer = reply(ids, spans=[(self.version, 0, len(ids))], reason=reason)
        return await super().respond(path, dict(body))


def encode_tiny() -> Callable[[str], list[int]]:
    """Text to ids, in which the tags of calls and of thinking are the special tokens."""
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


async def play(
    env: ToolEnv,
    generator: Generator,
    renderer: Renderer,
    *,
    name: str = "g",
    max_turns: int = 6,
    agent: Mapping[str, Any] | None = None,
) -> Trajectory:
    """One episode of `env`."""
    return await run_episode(
        env,
        ToolAgent(generator, renderer, AgentConfig(max_context_tokens=100_000, **(agent or {}))),
        Task(task_id="t", env_id="test/Counted-v0"),
        episode_id=EpisodeId(group_id=name, member=0),
        options=EpisodeOptions(limits=LIMITS, config=RolloutConfig(max_turns=max_turns)),
    )


@contextlib.asynccontextmanager
async def pool_over(engine: StubEngine) -> AsyncIterator[GeneratorPool]:
    """A pool of one client of `engine`."""
    async with engine.client() as client:
        pool = GeneratorPool([client], policy_version=3)
        try:
            yield pool
        finally:
            await pool.close()


async def play_lines(engine: LineEngine, env: ToolEnv, **options: Any) -> Trajectory:
    """One episode of `env` in which the engine's lines are said, through a pool and its client."""
    async with pool_over(engine) as pool:
        return await play(env, pool, engine.renderer, **options)

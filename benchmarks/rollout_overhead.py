"""CPU that a turn costs by itself, at 1,000 episodes of 5 turns in flight, without HTTP and with it.

A turn is everything between two tokens: rendering, the prompt's ids, the request, reading the answer, the tool call's
dispatch, the deadlines, the record. The tool sleeps a while, so that all episodes are in flight at once. Measured is
the CPU time of the whole process of the rollouts: in process, that of a scripted generator is in it; over HTTP, a pool
and its client ask a scripted server that is a process of its own, and whose time is not counted. With `--profile` the
calls that take most of it are printed, by cProfile, which makes everything slower.

    python benchmarks/rollout_overhead.py [--quick] [--json PATH] [--profile]
"""

import argparse
import asyncio
import contextlib
import cProfile
import dataclasses
import json
import pstats
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from driftgym.agents.generators.base import Generator
from driftgym.agents.generators.launch import GeneratorConfig
from driftgym.agents.generators.pool import GeneratorPool
from driftgym.agents.generators.scripted import ScriptedGenerator
from driftgym.agents.generators.sglang import SGLangGenerator
from driftgym.agents.rendering import Renderer, make_renderer
from driftgym.agents.rollout import RolloutConfig, run_group
from driftgym.agents.tool_agent import AgentConfig, ToolAgent
from driftgym.config import Limits
from driftgym.envs.base import Grade, ResetResult, StepResult, ToolEnv
from driftgym.envs.slots import EnvSlots
from driftgym.envs.tools import Tool, ToolSchema, Toolset
from driftgym.processes import collect_garbage_rarely, end_session
from driftgym.types import Message, Task, ToolCall, TrajectoryStatus

MODEL = Path(__file__).parent.parent / "configs" / "models" / "tiny-qwen3"
ENGINE = Path(__file__).parent / "scripted_engine.py"
NUM_EPISODES = 1000
NUM_TURNS = 5
TOOL_S = 0.2
GENERATION_S = 0.2  # of the scripted server, so that all requests are under way at once
BUDGETS_MS = {"rollout_cpu_ms_per_turn": 0.25, "rollout_http_cpu_ms_per_turn": 1.0}
PERSON = {"type": "object", "properties": {"person": {"type": "string"}}, "required": ["person"]}
SCHEMA = ToolSchema(name="get_room", description="Room number.", parameters=PERSON)
CALL = Message(role="assistant", tool_calls=(ToolCall(call_id="call_0", name="get_room", arguments={"person": "Rob"}),))


class SleepingEnv(ToolEnv):
    """Its tool sleeps and says a number; the episode never ends by itself."""

    def __init__(self) -> None:
        super().__init__()
        self._toolset = Toolset([Tool(schema=SCHEMA, run=self._get_room)], limits=self.limits)

    @property
    def tools(self) -> tuple[ToolSchema, ...]:
        """The one tool."""
        return self._toolset.schemas

    async def areset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> ResetResult:
        """Asks a question."""
        return ResetResult(messages=(Message(role="user", content="Where do I knock to see Rob?"),))

    async def astep(self, action: Message) -> StepResult:
        """Runs the call."""
        replies = await self._toolset.run(action.tool_calls)
        return StepResult(messages=replies.messages, events=replies.events)

    async def grade(self, status: TrajectoryStatus) -> Grade:
        """Nothing is worth anything."""
        return Grade(reward=0.0)

    async def aclose(self) -> None:
        """Holds nothing."""

    async def _get_room(self, arguments: Mapping[str, Any], *, timeout_s: float) -> str:
        await asyncio.sleep(TOOL_S)
        return "317"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one run gave.

    >>> Figures(num_turns=5000, cpu_ms_per_turn=0.2, wall_s=3.0).num_turns
    5000
    """

    num_turns: int
    """Turns played."""
    cpu_ms_per_turn: float
    """CPU of this process, in milliseconds."""
    wall_s: float
    """From the first episode's start to the last one's end."""


@contextlib.asynccontextmanager
async def in_process(answer: Sequence[int]) -> AsyncIterator[Generator]:
    """A generator that answers at once."""
    yield ScriptedGenerator(lambda request: answer)


@contextlib.asynccontextmanager
async def over_http(answer: Sequence[int]) -> AsyncIterator[Generator]:
    """A pool over the client of a scripted server, as a run makes it; the server is a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ENGINE),
        f"--token-ids={','.join(map(str, answer))}",
        f"--latency-s={GENERATION_S}",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        url = json.loads(await process.stdout.readline())["url"]
        config = GeneratorConfig(max_concurrency=NUM_EPISODES)
        client = SGLangGenerator(url, incarnation=1, max_concurrency=config.max_concurrency)
        pool = GeneratorPool(
            [client], policy_version=0, chunk_tokens=config.chunk_tokens, max_concurrency=config.max_concurrency
        )
        try:
            yield pool
        finally:
            await pool.close()
    finally:
        await end_session(process, timeout_s=5.0)


async def measure(
    open_generator: Callable[[Sequence[int]], contextlib.AbstractAsyncContextManager[Generator]],
    renderer: Renderer,
    *,
    profile: cProfile.Profile | None,
) -> Figures:
    """Plays `NUM_EPISODES` at once."""
    slots = EnvSlots(SleepingEnv, num_slots=NUM_EPISODES)
    async with open_generator(renderer.encode_action([], CALL, [])) as generator:
        agent = ToolAgent(generator, renderer, AgentConfig())
        if profile is not None:
            profile.enable()
        wall_s, cpu_s = time.monotonic(), time.process_time()
        group = await run_group(
            Task(task_id="t", env_id="benchmark/Sleeping-v0"),
            group_id="g",
            group_size=NUM_EPISODES,
            agent=agent,
            slots=slots,
            limits=Limits(),
            config=RolloutConfig(max_turns=NUM_TURNS),
        )
        wall_s, cpu_s = time.monotonic() - wall_s, time.process_time() - cpu_s
        if profile is not None:
            profile.disable()
    await slots.close()
    if any(each.status is not TrajectoryStatus.TRUNCATED_TURNS for each in group.trajectories):
        raise SystemExit(f"an episode went wrong: {group.trajectories[0].error}")
    num_turns = sum(len(each.turns) for each in group.trajectories)
    return Figures(num_turns=num_turns, cpu_ms_per_turn=1000 * cpu_s / num_turns, wall_s=wall_s)


def main() -> None:
    """Measures, prints, and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="each kind once in the place of five times")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--profile", action="store_true", help="prints where the time goes")
    arguments = parser.parse_args()
    collect_garbage_rarely()  # as `driftgym train` does
    renderer = make_renderer("compact", MODEL)
    figures: dict[str, Any] = {}
    budgets = []
    for (name, budget), open_generator in zip(BUDGETS_MS.items(), (in_process, over_http), strict=True):
        profile = cProfile.Profile() if arguments.profile else None
        runs = [
            asyncio.run(measure(open_generator, renderer, profile=profile)) for _ in range(1 if arguments.quick else 5)
        ]
        figures[name] = [dataclasses.asdict(run) for run in runs]
        value = statistics.median(run.cpu_ms_per_turn for run in runs)
        budgets.append({"name": name, "value": value, "budget": budget, "ok": value <= budget})
        print(f"{name}: {value:.3f} (budget {budget}), {runs[0].num_turns} turns in {runs[0].wall_s:.1f} s")
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    if arguments.json:
        arguments.json.write_text(json.dumps({**figures, "budgets": budgets}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

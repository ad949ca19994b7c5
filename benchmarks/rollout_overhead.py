"""CPU that a turn costs by itself, at 1,000 episodes in flight: scripted generator, trivial tool, no HTTP.

A turn is everything between two tokens: rendering, the prompt's ids, the request, reading the answer, the tool call's
dispatch, the deadlines, the record. The tool sleeps a while, so that all episodes are in flight at once. Measured is
the CPU time of the whole process, the scripted parts' own included.

    python benchmarks/rollout_overhead.py [--quick] [--json PATH]
"""

import argparse
import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from driftgym.agents.generators.scripted import ScriptedGenerator, ScriptedRequest
from driftgym.agents.rendering import make_renderer
from driftgym.agents.rollout import RolloutConfig, run_group
from driftgym.agents.tool_agent import AgentConfig, ToolAgent
from driftgym.config import Limits
from driftgym.envs.base import Grade, ResetResult, StepResult, ToolEnv
from driftgym.envs.slots import EnvSlots
from driftgym.envs.tools import Tool, ToolSchema, Toolset
from driftgym.types import Message, Task, ToolCall, TrajectoryStatus

MODEL = Path(__file__).parent.parent / "configs" / "models" / "tiny-qwen3"
BUDGET_MS = 0.25
TOOL_S = 0.2
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


async def measure(*, num_episodes: int, num_turns: int) -> dict[str, float]:
    """Plays `num_episodes` at once, of `num_turns` each; returns the figures."""
    renderer = make_renderer("compact", MODEL)
    answer = renderer.encode_action([], CALL, [])

    def script(request: ScriptedRequest) -> list[int]:
        return answer

    agent = ToolAgent(ScriptedGenerator(script), renderer, AgentConfig())
    slots = EnvSlots(SleepingEnv, num_slots=num_episodes)
    task = Task(task_id="t", env_id="benchmark/Sleeping-v0")
    wall_s, cpu_s = time.monotonic(), time.process_time()
    group = await run_group(
        task,
        group_id="g",
        group_size=num_episodes,
        agent=agent,
        slots=slots,
        limits=Limits(),
        config=RolloutConfig(max_turns=num_turns),
    )
    wall_s, cpu_s = time.monotonic() - wall_s, time.process_time() - cpu_s
    await slots.close()
    if any(each.status is not TrajectoryStatus.TRUNCATED_TURNS for each in group.trajectories):
        raise SystemExit(f"an episode went wrong: {group.trajectories[0].error}")
    num_played = sum(len(each.turns) for each in group.trajectories)
    return {"num_turns": num_played, "cpu_ms_per_turn": 1000 * cpu_s / num_played, "wall_s": wall_s}


def main() -> None:
    """Measures, prints, and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four turns an episode in the place of sixteen")
    parser.add_argument("--json", type=Path, help="where the figures go")
    arguments = parser.parse_args()
    figures = asyncio.run(measure(num_episodes=1000, num_turns=4 if arguments.quick else 16))
    value = figures["cpu_ms_per_turn"]
    budget = {"name": "rollout_cpu_ms_per_turn", "value": value, "budget": BUDGET_MS, "ok": value <= BUDGET_MS}
    print(f"{value:.3f} ms of CPU a turn (budget {BUDGET_MS} ms), {figures['num_turns']:.0f} turns")
    if arguments.json:
        arguments.json.write_text(json.dumps({**figures, "budgets": [budget]}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

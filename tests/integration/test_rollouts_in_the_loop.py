"""The loop with real rollouts, over a scripted generator: engines and tools that hang, refuse, raise, lie or flood."""

import asyncio
import contextlib
import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import scripted_run as scripted

from driftgym.agents.generators.pool import GeneratorPool
from driftgym.agents.generators.scripted import Script, ScriptedGenerator, ScriptedRequest
from driftgym.agents.rendering import Renderer, make_renderer
from driftgym.agents.tool_agent import ToolAgent
from driftgym.envs.base import Grade, ResetResult, StepResult, ToolEnv
from driftgym.envs.lookup.store import Fault, draw_fault, draw_world
from driftgym.envs.registry import make_env, register_envs
from driftgym.envs.slots import EnvSlots
from driftgym.envs.tools import ToolSchema
from driftgym.errors import GeneratorError, TrainingError
from driftgym.sandboxes.providers import open_provider
from driftgym.trainer.loop import Parts
from driftgym.trainer.parts import StartRequest, group_player
from driftgym.trainer.scripted import NumberedTasks, ScriptedTrainingClient
from driftgym.types import Completion, Message, SamplingParams, ToolCall, TrajectoryStatus

MODEL = Path(__file__).parents[2] / "configs" / "models" / "tiny-qwen3"


class AnswerEnv(ToolEnv):
    """Asks once, and takes any answer."""

    @property
    def tools(self) -> tuple[ToolSchema, ...]:
        return ()

    async def areset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> ResetResult:
        return ResetResult(messages=(Message(role="user", content="How many?"),))

    async def astep(self, action: Message) -> StepResult:
        return StepResult(messages=(), terminated=True)

    async def grade(self, status: TrajectoryStatus) -> Grade:
        return Grade(reward=1.0)

    async def aclose(self) -> None:
        return None


class FaultyGenerator(ScriptedGenerator):
    """Never answers the fifth request, and refuses the sixth."""

    async def generate(
        self,
        prompt_token_ids: Any,
        sampling: SamplingParams,
        *,
        request_id: str,
        session_id: str,
        deadline_s: float,
        min_policy_version: int = 0,
    ) -> Completion:
        if session_id.startswith("g000000-4-"):
            await asyncio.Event().wait()
        if session_id.startswith("g000000-5-"):
            raise GeneratorError("the engine refused")
        return await super().generate(
            prompt_token_ids,
            sampling,
            request_id=request_id,
            session_id=session_id,
            deadline_s=deadline_s,
            min_policy_version=min_policy_version,
        )


class LyingGenerator(ScriptedGenerator):
    """Says that its tokens are older than it was asked for."""

    async def generate(self, *arguments: Any, **options: Any) -> Completion:
        completion = await super().generate(*arguments, **options)
        old = completion.policy_versions - 9
        return Completion(
            request_id=completion.request_id,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            policy_versions=old,
            finish_reason=completion.finish_reason,
        )


def answer_at_once(renderer: Renderer) -> Script:
    """Says 41 to everything."""
    said = renderer.encode_action(
        [Message(role="user", content="How many?")], Message(role="assistant", content="41"), ()
    )
    return lambda _: said


def look_up_and_answer(renderer: Renderer) -> Script:
    """Makes the call that the question of Lookup needs, then gives the right answer, whatever the tool said."""
    question = [Message(role="user", content="?")]
    asked: set[str] = set()

    def script(request: ScriptedRequest) -> Sequence[int]:
        world = draw_world(seed=index_of(request.session_id), level="one_call", num_people=8)
        if request.session_id in asked:
            return renderer.encode_action(question, Message(role="assistant", content=world.answer), ())
        asked.add(request.session_id)
        needed = world.needed[0]
        call = ToolCall(call_id="call_0", name=needed.tool, arguments=needed.arguments)
        return renderer.encode_action(question, Message(role="assistant", tool_calls=(call,)), ())

    return script


def index_of(group_or_session_id: str) -> int:
    """The index of the task, which is its seed."""
    return int(group_or_session_id[1:7])


class RolloutParts:
    """Parts whose rollouts are real."""

    def __init__(
        self,
        generator_type: type[ScriptedGenerator] = ScriptedGenerator,
        *,
        make: Callable[[], ToolEnv] = AnswerEnv,
        script: Callable[[Renderer], Script] = answer_at_once,
    ) -> None:
        self._generator_type = generator_type
        self._make = make
        self._script = script

    async def __call__(self, request: StartRequest, stack: contextlib.AsyncExitStack) -> Parts:
        config = request.config
        renderer = make_renderer("compact", MODEL)
        generator = self._generator_type(self._script(renderer), incarnation=request.incarnation)
        pool = GeneratorPool([generator], policy_version=0)
        stack.push_async_callback(pool.close)
        agent = ToolAgent(pool, renderer, config.agent)
        slots = EnvSlots(self._make, num_slots=config.trainer.max_in_flight_groups * config.trainer.group_size)
        stack.push_async_callback(slots.close)

        client = ScriptedTrainingClient(incarnation=request.incarnation)
        play = group_player(config, agent, slots, say=request.say)
        return Parts(client=client, engines=pool, play=play, tasks=NumberedTasks())


@pytest.mark.slow
async def test_tools_that_hang_raise_or_flood_in_a_tenth_of_the_episodes_each_are_told_apart(tmp_path: Path) -> None:
    """The run goes on, and its summary says how many of which there were."""
    shares: dict[Fault, float] = {"hang": 0.1, "raise": 0.1, "flood": 0.1}
    config = scripted.run_config(
        tmp_path,
        *("trainer.max_steps=20", "trainer.group_size=2", "trainer.max_in_flight_groups=4", "trainer.max_lag=2"),
        *("agent.max_context_tokens=1000", "limits.tool_call_s=3"),
    )
    register_envs()
    sandboxes = await open_provider(config.sandbox.model_copy(update={"kind": "process"}), say=lambda line: None)

    def make() -> ToolEnv:
        kwargs = {"faults": shares}
        return make_env("driftgym/Lookup-v0", sandboxes=sandboxes, limits=config.limits, kwargs=kwargs)

    try:
        result = await scripted.begin(config, RolloutParts(make=make, script=look_up_and_answer))
    finally:
        await sandboxes.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "run" / "journal.sqlite")) as journal:
        episodes = journal.execute("SELECT group_id, status, reward FROM episodes").fetchall()
    by_fault = [(draw_fault(seed=index_of(group), shares=shares), status, reward) for group, status, reward in episodes]
    counts = Counter(fault for fault, _, _ in by_fault)
    assert min(counts["hang"], counts["raise"], counts["flood"]) >= 2, counts
    summary = result.summary
    assert summary["events"]["tool_timeout"] == counts["hang"]
    assert summary["events"]["tool_output_truncated"] == counts["flood"]
    assert summary["errors"] == {"env": counts["raise"], "infra": 0, "policy": 0}
    assert summary["events"]["groups_failed"] == counts["raise"] / 2
    assert summary["episodes_trained"] == 20 * 2 * 2
    outcomes = {
        "hang": ("completed", 0.0),
        "raise": ("env_error", None),
        "flood": ("completed", 0.0),
        None: ("completed", 1.0),
    }
    assert all((status, reward) == outcomes[fault] for fault, status, reward in by_fault)


async def test_requests_that_are_never_answered_or_refused_do_not_hold_up_the_step(tmp_path: Path) -> None:
    """A batch of eight: the fifth request is never answered, the sixth raises. Both are told, the step is done."""
    config = scripted.run_config(
        tmp_path,
        *("trainer.groups_per_step=1", "trainer.group_size=8", "trainer.max_steps=3", "rollout.max_attempts=1"),
        *("limits.generation_s=0.2", "limits.episode_s=5"),
    )
    result = await scripted.begin(config, RolloutParts(FaultyGenerator))
    assert result.summary["steps"] == 3
    assert result.summary["errors"]["infra"] == 2
    assert result.summary["episodes_trained"] == 3 * 8 - 2
    assert result.summary["reward_last_mean"] == 1.0, "an engine's fault is not a reward of 0"
    with contextlib.closing(sqlite3.connect(tmp_path / "run" / "journal.sqlite")) as journal:
        errors = dict(journal.execute("SELECT member, error FROM episodes WHERE group_id = 'g000000' AND error != ''"))
    assert sorted(errors) == [4, 5]
    assert "generation" in errors[4]
    assert "the engine refused" in errors[5]


async def test_tokens_above_the_bound_are_never_trained_whatever_the_engine_says(tmp_path: Path) -> None:
    config = scripted.run_config(tmp_path, "trainer.max_steps=3", "trainer.max_lag=4")
    with pytest.raises(TrainingError, match="would train tokens of lag 9 to 9; allowed is 0 to 4"):
        await scripted.begin(config, RolloutParts(LyingGenerator))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["episodes_trained"] == 0

"""The loop with real rollouts, over a scripted generator and an environment that needs no box."""

import asyncio
import contextlib
import importlib.util
import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from driftgym.agents.generators.pool import GeneratorPool
from driftgym.agents.generators.scripted import ScriptedGenerator
from driftgym.agents.rendering import make_renderer
from driftgym.agents.rollout import run_group
from driftgym.agents.tool_agent import ToolAgent
from driftgym.envs.base import Grade, ResetResult, StepResult, ToolEnv
from driftgym.envs.slots import EnvSlots
from driftgym.envs.tools import ToolSchema
from driftgym.errors import GeneratorError, TrainingError
from driftgym.trainer.loop import Parts
from driftgym.trainer.parts import StartRequest
from driftgym.trainer.scripted import NumberedTasks, ScriptedTrainingClient
from driftgym.types import Completion, Message, SamplingParams, Task, TrajectoryGroup, TrajectoryStatus

MODEL = Path(__file__).parents[2] / "configs" / "models" / "tiny-qwen3"
_spec = importlib.util.spec_from_file_location("scripted_run", Path(__file__).with_name("scripted_run.py"))
assert _spec is not None
assert _spec.loader is not None
scripted = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(scripted)


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


class RolloutParts:
    """Parts whose rollouts are real."""

    def __init__(self, generator_type: type[ScriptedGenerator]) -> None:
        self._generator_type = generator_type

    async def __call__(self, request: StartRequest, stack: contextlib.AsyncExitStack) -> Parts:
        config = request.config
        renderer = make_renderer("compact", MODEL)
        answer = renderer.encode_action(
            [Message(role="user", content="How many?")], Message(role="assistant", content="41"), ()
        )
        generator = self._generator_type(lambda _: answer, incarnation=request.incarnation)
        pool = GeneratorPool([generator], policy_version=0)
        stack.push_async_callback(pool.close)
        agent = ToolAgent(pool, renderer, config.agent)
        slots = EnvSlots(AnswerEnv, num_slots=64)
        stack.push_async_callback(slots.close)

        async def play(task: Task, *, group_id: str, min_policy_version: int) -> TrajectoryGroup:
            return await run_group(
                task,
                group_id=group_id,
                group_size=config.trainer.group_size,
                agent=agent,
                slots=slots,
                limits=config.limits,
                config=config.rollout,
                min_policy_version=min_policy_version,
            )

        client = ScriptedTrainingClient(incarnation=request.incarnation)
        return Parts(client=client, engines=pool, play=play, tasks=NumberedTasks())


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

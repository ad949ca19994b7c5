"""Runs over an engine behind HTTP, in which some requests are never answered, refused, or answered with nonsense."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import scripted_run as scripted
from counted_tools import CountedTools, LineEngine
from pool_engines import QUICK
from stub_engine import reply

from driftgym.agents.generators.pool import GeneratorPool
from driftgym.agents.tool_agent import ToolAgent
from driftgym.envs.slots import EnvSlots
from driftgym.errors import TrainingError
from driftgym.trainer.loop import Parts
from driftgym.trainer.parts import StartRequest, group_player
from driftgym.trainer.run import RunResult
from driftgym.trainer.scripted import NumberedTasks, ScriptedTrainingClient

Answer = tuple[int, Any]
Script = Callable[["FaultyEngine", int], Answer | None]


class FaultyEngine(LineEngine):
    """Says 41; to request n of the run, counted from 1, what `script` says instead, where that is not None."""

    def __init__(self, script: Script) -> None:
        super().__init__(answer_of=lambda prompt: "41")
        self.version = "1:0"
        self.num_asked = 0
        self._script = script

    async def respond(self, path: str, body: Mapping[str, Any]) -> Answer:
        """As `StubEngine.respond`."""
        if path == "/generate":
            self.num_asked += 1
            answer = self._script(self, self.num_asked)
            if answer is not None and answer[0] == 0:
                await asyncio.Event().wait()
            if answer is not None:
                return answer
        return await super().respond(path, body)


class HttpParts:
    """One engine behind HTTP, real rollouts over it, and a learner that counts."""

    def __init__(self, engine: FaultyEngine) -> None:
        self._engine = engine

    async def __call__(self, request: StartRequest, stack: contextlib.AsyncExitStack) -> Parts:
        """See `parts.start_parts`."""
        config = request.config
        client = await stack.enter_async_context(self._engine.client(max_concurrency=64))
        pool = GeneratorPool([client], policy_version=0, watch=QUICK, on_event=lambda event, text: request.say(text))
        stack.push_async_callback(pool.close)
        slots = EnvSlots(lambda: CountedTools("add"), num_slots=config.num_slots)
        stack.push_async_callback(slots.close)
        agent = ToolAgent(pool, self._engine.renderer, config.agent)
        return Parts(
            client=ScriptedTrainingClient(incarnation=request.incarnation),
            engines=pool,
            play=group_player(config, agent, slots, say=request.say),
            tasks=NumberedTasks(),
        )


async def play(folder: Path, script: Script, *overrides: str) -> RunResult:
    """Steps of eight episodes, with a deadline of a second for each request."""
    config = scripted.run_config(
        folder,
        *("trainer.max_steps=3", "trainer.group_size=4", "trainer.max_in_flight_groups=2", "limits.generation_s=1"),
        *("agent.max_context_tokens=1000", *overrides),
    )
    result: RunResult = await scripted.begin(config, HttpParts(FaultyEngine(script)))
    return result


async def test_of_a_batch_of_eight_one_request_is_never_answered_and_one_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case C1: both are played again past the deadline, the step happens, and both causes are told."""

    def script(engine: FaultyEngine, number: int) -> Answer | None:
        return {5: (0, None), 6: (500, {"error": {"message": "the engine refused"}})}.get(number)

    result = await play(tmp_path, script)
    scripted.assert_exactly_once(tmp_path / "run", steps=3, groups_per_step=2)
    assert result.summary["episodes_trained"] == 24
    assert result.summary["events"]["infra_retries"] == 2
    assert result.rows[0]["events/infra_retries"] == 2
    told = capsys.readouterr().out
    assert "got no answer by its deadline" in told
    assert "answered 500: the engine refused" in told


def with_meta(**meta: Any) -> Script:
    """Every answer, with these things said of it."""

    def script(engine: FaultyEngine, number: int) -> Answer:
        ids = engine.ids_of("41")
        answer = reply(ids, spans=[(engine.version, 0, len(ids))])
        answer["meta_info"] = {k: v for k, v in {**answer["meta_info"], **meta}.items() if v is not ...}
        return 200, answer

    return script


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "why"),
    [
        (with_meta(weight_version=..., weight_versions=...), "KeyError: 'weight_version'"),
        (with_meta(weight_versions=[{"version": "2:0", "start": 0, "end": 3}]), "of another life of the run"),
        (with_meta(weight_versions=[{"version": "default", "start": 0, "end": 3}]), "which no run published"),
        (with_meta(output_token_logprobs=...), "KeyError: 'output_token_logprobs'"),
        (with_meta(finish_reason={"type": "gone"}), "unknown finish reason"),
        (lambda engine, number: (200, {"text": "41"}), "KeyError: 'meta_info'"),
        (lambda engine, number: (503, {}), "answered 503"),
    ],
)
async def test_a_run_whose_engine_answers_nonsense_ends_with_the_reason_and_trains_nothing(
    tmp_path: Path, script: Script, why: str
) -> None:
    with pytest.raises(TrainingError, match="groups gave no scored episode") as caught:
        await play(tmp_path, script, "rollout.max_attempts=1")
    assert why in str(caught.value)
    assert scripted.trained_groups(tmp_path / "run") == {}


@pytest.mark.parametrize("logprob", [float("-inf"), float("nan"), 0.5, None])
async def test_a_log_prob_that_is_none_is_never_trained(tmp_path: Path, logprob: float | None) -> None:
    """One of the answers holds it: it is asked for again, and the run goes on."""

    def script(engine: FaultyEngine, number: int) -> Answer | None:
        if number != 3:
            return None
        ids = engine.ids_of("41")
        pairs = [[logprob if index == 1 else -0.5, token_id, None] for index, token_id in enumerate(ids)]
        return 200, reply(ids, spans=[(engine.version, 0, len(ids))], output_token_logprobs=pairs)

    result = await play(tmp_path, script)
    scripted.assert_exactly_once(tmp_path / "run", steps=3, groups_per_step=2)
    assert result.summary["events"]["infra_retries"] == 1

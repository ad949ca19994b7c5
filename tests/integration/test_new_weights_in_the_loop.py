"""The loop while generators take new weights: each way to take them, answers that are parked, and the lag bound."""

import contextlib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scripted_run as scripted

from driftgym.agents.generators.pool import GeneratorPool
from driftgym.agents.generators.scripted import ScriptedGenerator, ScriptedRequest
from driftgym.agents.rendering import Renderer, make_renderer
from driftgym.agents.tool_agent import ToolAgent
from driftgym.envs.base import Grade, ResetResult, StepResult, ToolEnv
from driftgym.envs.slots import EnvSlots
from driftgym.envs.tools import ToolSchema
from driftgym.errors import ConfigError
from driftgym.trainer.loop import Parts
from driftgym.trainer.parts import StartRequest, group_player
from driftgym.trainer.records import read_group
from driftgym.trainer.scripted import NumberedTasks, ScriptedTrainingClient
from driftgym.trainer.segments import segments_of
from driftgym.types import Completion, Message, Trajectory, TrajectoryStatus, WeightUpdate

MODEL = Path(__file__).parents[2] / "configs" / "models" / "tiny-qwen3"

QUESTION = [Message(role="user", content="How many?")]
NUM_LONG = 61
NUM_SHORT = 6


class AnswerEnv(ToolEnv):
    """Asks once, and takes any answer."""

    @property
    def tools(self) -> tuple[ToolSchema, ...]:
        return ()

    async def areset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> ResetResult:
        return ResetResult(messages=tuple(QUESTION))

    async def astep(self, action: Message) -> StepResult:
        return StepResult(messages=(), terminated=True)

    async def grade(self, status: TrajectoryStatus) -> Grade:
        return Grade(reward=1.0)

    async def aclose(self) -> None:
        return None


class Speaker:
    """Every third group's answers are long. Whatever slice it is asked for, it goes on where the prompt ends."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._starts: dict[str, int] = {}

    def answer(self, session_id: str) -> list[int]:
        """The whole answer, the same digit over and over."""
        index = int(session_id[1:7])
        text = str(index % 10) * ((NUM_LONG if index % 3 == 0 else NUM_SHORT) - 1)
        return self._renderer.encode_action(QUESTION, Message(role="assistant", content=text), ())

    def __call__(self, request: ScriptedRequest) -> list[int]:
        prompt = list(request.prompt_token_ids)
        start = self._starts.setdefault(request.session_id, len(prompt))
        whole = self.answer(request.session_id)
        assert whole[: len(prompt) - start] == prompt[start:]
        return whole[len(prompt) - start :]


class Engine(ScriptedGenerator):
    """Keeps what it wrote, by episode, and how its weights came."""

    def __init__(self, speaker: Speaker, versions: dict[str, list[int]], **options: Any) -> None:
        super().__init__(speaker, **options)
        self._versions = versions
        self.num_aborted = 0
        self.modes: set[str] = set()

    async def generate(self, *arguments: Any, session_id: str, **options: Any) -> Completion:
        """As `Generator.generate`."""
        completion = await super().generate(*arguments, session_id=session_id, **options)
        self._versions[session_id] += completion.policy_versions.tolist()
        self.num_aborted += completion.finish_reason == "abort"
        return completion

    async def update_weights(self, update: WeightUpdate, **options: Any) -> None:
        """As `Generator.update_weights`."""
        self.modes.add(f"{options['mode']} {options['keep_kv']}")
        await super().update_weights(update, **options)


class PoolParts:
    """Starts two engines, a pool as `generator` says, and real rollouts."""

    def __init__(self) -> None:
        self.versions: dict[str, list[int]] = defaultdict(list)
        """By episode: the versions that the engines wrote its tokens with."""
        self.speaker = Speaker(make_renderer("compact", MODEL))
        self.engines: list[Engine] = []
        self.pool: GeneratorPool

    async def __call__(self, request: StartRequest, stack: contextlib.AsyncExitStack) -> Parts:
        """See `parts.start_parts`."""
        config = request.config
        life = {"incarnation": request.incarnation, "token_latency_s": 0.002}
        self.engines = [Engine(self.speaker, self.versions, **life) for _ in range(2)]
        self.pool = GeneratorPool(
            self.engines,
            policy_version=0,
            chunk_tokens=config.generator.chunk_tokens,
            iteration_tokens=config.generator.iteration_tokens,
            max_paused_share=config.generator.max_paused_share,
            idle_s=0.1,
        )
        stack.push_async_callback(self.pool.close)
        agent = ToolAgent(self.pool, make_renderer("compact", MODEL), config.agent)
        slots = EnvSlots(AnswerEnv, num_slots=config.num_slots)
        stack.push_async_callback(slots.close)
        client = ScriptedTrainingClient(incarnation=request.incarnation, step_s=0.01)
        play = group_player(config, agent, slots, say=request.say)
        return Parts(
            client=client,
            engines=self.pool,
            play=play,
            tasks=NumberedTasks(),
            keep_kv=config.generator.keep_kv,
        )


async def run(folder: Path, *overrides: str) -> tuple[PoolParts, Mapping[str, Trajectory]]:
    """A run of twelve steps; its parts, and the trained trajectories by their episode, each checked against the truth.

    Every answer is whole, each token with the version that it was written with, and no step trained one above the
    bound.
    """
    config = scripted.run_config(
        folder,
        *("trainer.publish_every_steps=1", "trainer.group_size=2", "trainer.max_lag=3"),
        *("agent.max_context_tokens=200", "generator.chunk_tokens=16"),
        *overrides,
    )
    parts = PoolParts()
    result = await scripted.begin(config, parts)
    run_dir = folder / "run"
    scripted.assert_exactly_once(run_dir, steps=12, groups_per_step=2)
    trained: dict[str, Trajectory] = {}
    for group_id, step in scripted.trained_groups(run_dir).items():
        for trajectory in read_group(run_dir / "trajectories" / f"{group_id}.json.gz").trajectories:
            check_truth(parts, trajectory, now=step - 1, max_lag=config.trainer.max_lag)
            trained[trajectory.trajectory_id] = trajectory
    assert len(trained) == result.summary["episodes_trained"] == 12 * 2 * 2
    assert result.summary["errors"] == {"env": 0, "infra": 0, "policy": 0}
    return parts, trained


def check_truth(parts: PoolParts, trajectory: Trajectory, *, now: int, max_lag: int) -> None:
    (turn,) = trajectory.turns
    session_id = trajectory.trajectory_id
    assert turn.completion.token_ids.tolist() == parts.speaker.answer(session_id)
    assert turn.completion.policy_versions.tolist() == parts.versions[session_id]
    assert now - turn.completion.policy_versions.max() >= 0
    assert now - turn.completion.policy_versions.min() <= max_lag
    (segment,) = segments_of(trajectory, advantage=1.0)
    assert segment.policy_versions[segment.loss_mask].tolist() == parts.versions[session_id]


def num_versions(trajectory: Trajectory) -> int:
    return sum(len(np.unique(turn.completion.policy_versions)) for turn in trajectory.turns)


async def test_in_flight_answers_go_on_under_new_weights(tmp_path: Path) -> None:
    parts, trained = await run(tmp_path)
    assert parts.engines[0].modes == {"in_flight False"}
    assert sum(num_versions(trajectory) > 1 for trajectory in trained.values()) >= 2
    assert not any(engine.num_aborted for engine in parts.engines)


async def test_abort_resume_cuts_answers_and_goes_on_from_the_tokens_that_they_have(tmp_path: Path) -> None:
    parts, trained = await run(tmp_path, "trainer.weight_update=abort_resume")
    assert parts.engines[0].modes == {"abort_resume False"}
    assert sum(engine.num_aborted for engine in parts.engines) >= 2
    assert sum(num_versions(trajectory) > 1 for trajectory in trained.values()) >= 2


@pytest.mark.parametrize("share", [1.0, 0.5])
async def test_drained_answers_are_of_one_version_each(tmp_path: Path, share: float) -> None:
    parts, trained = await run(tmp_path, "trainer.weight_update=drain", f"generator.max_paused_share={share}")
    assert parts.engines[0].modes == {"drain False"}
    assert all(num_versions(trajectory) == 1 for trajectory in trained.values())
    assert len({int(trajectory.min_policy_version or 0) for trajectory in trained.values()}) > 4


async def test_the_kv_cache_is_kept_where_that_is_asked_for(tmp_path: Path) -> None:
    parts, _ = await run(tmp_path, "generator.keep_kv=true")
    assert parts.engines[0].modes == {"in_flight True"}


@pytest.mark.parametrize("mode", ["in_flight", "drain", "abort_resume"])
async def test_an_answer_above_its_share_is_parked_spans_versions_and_is_trained_once(
    tmp_path: Path, mode: str
) -> None:
    """61 tokens at 20 an iteration: parked, and unless nothing else was to do, under new weights afterwards."""
    parts, trained = await run(tmp_path, "generator.iteration_tokens=20", f"trainer.weight_update={mode}")
    long = [each for each in trained.values() if each.num_sampled_tokens == NUM_LONG]
    assert len(long) >= 6
    assert parts.pool.num_parked >= len(long)
    assert sum(num_versions(trajectory) > 1 for trajectory in long) >= len(long) / 2
    short = [each for each in trained.values() if each.num_sampled_tokens == NUM_SHORT]
    assert len(short) + len(long) == len(trained)


async def test_partial_rollouts_keep_the_tightest_bound(tmp_path: Path) -> None:
    """One step off: what is parked goes on under the next weights, and is trained with them."""
    parts, _ = await run(tmp_path, "generator.iteration_tokens=20", "trainer.max_lag=1")
    assert parts.pool.num_parked > 0


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    sync = ("trainer.mode=sync", "trainer.max_lag=0", "trainer.publish_every_steps=1")
    with pytest.raises(ConfigError, match=r"iteration_tokens .* set trainer.max_lag to 1 at least"):
        scripted.run_config(tmp_path, "generator.iteration_tokens=20", *sync)
    with pytest.raises(ConfigError, match=r"keep_kv goes with trainer.weight_update: in_flight alone, not with drain"):
        scripted.run_config(tmp_path, "generator.keep_kv=true", "trainer.weight_update=drain")

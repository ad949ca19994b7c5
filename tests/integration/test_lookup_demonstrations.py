"""The oracle of Lookup, through real boxes and the tiny model's renderer: what the warm-up learns from."""

from pathlib import Path

import pytest

from driftgym.agents.demonstrations import demonstrate
from driftgym.agents.rendering import make_renderer
from driftgym.agents.rollout import RolloutConfig
from driftgym.config import Limits
from driftgym.envs.registry import make_env, register_envs
from driftgym.envs.slots import EnvSlots
from driftgym.envs.tasks import SeededTasks
from driftgym.sandboxes.base import SandboxConfig
from driftgym.sandboxes.providers import open_provider

TINY = Path(__file__).parents[2] / "configs" / "models" / "tiny-qwen3"


@pytest.mark.parametrize(("level", "num_turns"), [("one_call", 2), ("two_calls", 3)])
async def test_a_perfect_oracle_is_always_right_within_the_tiny_context(level: str, num_turns: int) -> None:
    register_envs()
    renderer = make_renderer("auto", TINY)
    sandboxes = await open_provider(SandboxConfig(kind="process"), say=lambda line: None)
    slots = EnvSlots(
        lambda: make_env("driftgym/Lookup-v0", sandboxes=sandboxes, limits=Limits(), kwargs={"level": level}),
        num_slots=4,
    )
    try:
        trajectories = await demonstrate(
            slots=slots,
            renderer=renderer,
            tasks=SeededTasks(env_id="driftgym/Lookup-v0", seed=1),
            num_episodes=12,
            skill=1.0,
            seed=0,
            limits=Limits(),
            config=RolloutConfig(),
        )
    finally:
        await slots.close()
        await sandboxes.close()
    assert [each.reward for each in trajectories] == [1.0] * 12
    for trajectory in trajectories:
        assert len(trajectory.turns) == num_turns
        assert len(trajectory.turns[0].new_prompt_token_ids) <= 64
        num_prompt_tokens = sum(len(turn.new_prompt_token_ids) for turn in trajectory.turns)
        assert num_prompt_tokens + trajectory.num_sampled_tokens <= 160

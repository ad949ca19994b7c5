from typing import Any

import numpy as np
import pytest

from driftgym.agents.demonstrations import demonstrate
from driftgym.agents.few_shot import after_system, worked_examples
from driftgym.agents.rendering import Renderer
from driftgym.agents.rollout import RolloutConfig
from driftgym.config import Limits
from driftgym.envs.slots import EnvSlots
from driftgym.envs.tasks import SeededTasks
from driftgym.errors import EnvError
from driftgym.types import Message, TrajectoryStatus

TASKS = SeededTasks(env_id="test/Counting-v0", seed=1)


async def show(env_type: Any, renderer: Renderer, *, skill: float = 1.0, **settings: Any) -> list[Any]:
    slots = EnvSlots(lambda: env_type(**settings), num_slots=3)
    try:
        return await demonstrate(
            slots=slots,
            renderer=renderer,
            tasks=TASKS,
            num_episodes=8,
            skill=skill,
            seed=5,
            limits=Limits(),
            config=RolloutConfig(),
        )
    finally:
        await slots.close()


async def test_demonstrations_are_real_episodes_in_the_tokens_that_a_model_would_sample(
    env_type: Any, compact: Renderer
) -> None:
    trajectories = await show(env_type, compact)
    assert [each.member for each in trajectories] == list(range(8))
    for index, trajectory in enumerate(trajectories):
        assert trajectory.status is TrajectoryStatus.COMPLETED
        assert trajectory.task_id == TASKS.task(index).task_id
        first, second = trajectory.turns
        assert first.completion.token_ids[-1] == compact.stop_token_ids[0]
        read = compact.parse(first.completion.token_ids.tolist(), prompt_token_ids=[], first_call_index=0)
        assert read.tool_calls == first.action.tool_calls
        assert read.tool_calls[0].name == "add"
        assert second.action.text == first.observation[0].text
        assert not np.any(first.completion.logprobs)
        assert not np.any(first.completion.policy_versions)


async def test_skill_is_the_share_of_right_tools_and_a_seed_repeats_it(env_type: Any, compact: Renderer) -> None:
    def names(trajectories: list[Any]) -> list[str]:
        return [each.turns[0].action.tool_calls[0].name for each in trajectories]

    poor = names(await show(env_type, compact, skill=0.0))
    mixed = names(await show(env_type, compact, skill=0.5))
    assert set(poor) == {"say"}
    assert set(mixed) == {"add", "say"}
    assert names(await show(env_type, compact, skill=0.5)) == mixed


async def test_no_demonstration_at_all_is_an_error_that_says_why(env_type: Any, compact: Renderer) -> None:
    with pytest.raises(EnvError, match=r"(?s)no demonstration was completed.*boom"):
        await show(env_type, compact, faults={"astep": RuntimeError("boom")})
    mute = type("Mute", (env_type,), {"oracle": _no_oracle})
    with pytest.raises(EnvError, match="has no oracle"):
        await show(mute, compact)


def _no_oracle(self: Any, *, skill: float, rng: Any) -> Message:
    raise EnvError("has no oracle")


async def test_worked_examples_have_call_ids_of_their_own(env_type: Any) -> None:
    env = env_type()
    examples = await worked_examples(env, num_episodes=2, seed=3, options={})
    assert [message.role for message in examples] == ["user", "assistant", "tool", "assistant"] * 2
    ids = [call.call_id for message in examples for call in message.tool_calls]
    assert ids == ["example_0_x", "example_1_x"]
    assert [message.tool_call_id for message in examples if message.role == "tool"] == ids
    assert examples == await worked_examples(env, num_episodes=2, seed=3, options={})
    assert examples[0] != examples[4]


async def test_an_oracle_that_never_ends_is_an_error(env_type: Any) -> None:
    endless = type("Endless", (env_type,), {"oracle": _call_again})
    with pytest.raises(EnvError, match="does not come to an end"):
        await worked_examples(endless(), num_episodes=1, seed=3, options={})


def _call_again(self: Any, *, skill: float, rng: Any) -> Message:
    from driftgym.types import ToolCall

    return Message(role="assistant", tool_calls=(ToolCall(call_id="x", name="say", arguments={}),))


def test_examples_come_after_the_system_message() -> None:
    system, user, example = (Message(role="system"), Message(role="user"), Message(role="user", content="e"))
    assert after_system([example], [system, user]) == [system, example, user]
    assert after_system([example], [system]) == [system, example]
    assert after_system([example], [user]) == [example, user]

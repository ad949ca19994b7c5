"""Worked examples for the prompt: episodes of the environment, played by its own oracle."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from driftgym.envs.base import ToolEnv
from driftgym.errors import EnvError
from driftgym.types import Message

_MAX_TURNS = 32


async def worked_examples(env: ToolEnv, *, num_episodes: int, seed: int, options: Mapping[str, Any]) -> list[Message]:
    """The messages of `num_episodes` episodes that the oracle plays rightly, without system messages.

    Call ids are made unique by the episode's number, since the examples stand in one conversation.

    Args:
        env: begins other episodes of its own here; the caller resets it afterwards.
        num_episodes: how many.
        seed: of the first; the same seed gives the same examples.
        options: as for `areset`.

    Raises:
        EnvError: the environment has no oracle, or it does not come to an end.
        SandboxError: the box is gone.
    """
    rng = np.random.default_rng(seed)
    messages: list[Message] = []
    for number in range(num_episodes):
        episode_seed = int(rng.integers(2**31))
        messages += _renamed(await _play(env, seed=episode_seed, options=options, rng=rng), f"example_{number}_")
    return messages


def after_system(examples: Sequence[Message], prompt: Sequence[Message]) -> list[Message]:
    """`prompt` with `examples` after its system messages."""
    first = next((index for index, message in enumerate(prompt) if message.role != "system"), len(prompt))
    return [*prompt[:first], *examples, *prompt[first:]]


async def _play(env: ToolEnv, *, seed: int, options: Mapping[str, Any], rng: np.random.Generator) -> list[Message]:
    reset = await env.areset(seed=seed, options=dict(options))
    messages = [message for message in reset.messages if message.role != "system"]
    for _ in range(_MAX_TURNS):
        action = env.oracle(skill=1.0, rng=rng)
        step = await env.astep(action)
        messages += [action, *step.messages]
        if step.terminated:
            return messages
    raise EnvError(f"{type(env).__name__}: the oracle does not come to an end within {_MAX_TURNS} turns")


def _renamed(messages: Sequence[Message], prefix: str) -> list[Message]:
    return [_with_prefix(message, prefix) for message in messages]


def _with_prefix(message: Message, prefix: str) -> Message:
    calls = tuple(replace(call, call_id=prefix + call.call_id) for call in message.tool_calls)
    answered = None if message.tool_call_id is None else prefix + message.tool_call_id
    return replace(message, tool_calls=calls, tool_call_id=answered)

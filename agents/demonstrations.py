"""Demonstrations: episodes played by the environment's own oracle, in the tokens that the model would sample."""

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from driftgym.agents.base import AgentTurn
from driftgym.agents.context import TokenContext
from driftgym.agents.episode import EpisodeId
from driftgym.agents.parsing import call_id
from driftgym.agents.rendering import Renderer
from driftgym.agents.rollout import EpisodeOptions, RolloutConfig, Setup, play_in_slot
from driftgym.config import Limits
from driftgym.envs.base import ToolEnv
from driftgym.envs.slots import EnvSlots
from driftgym.envs.tools import ToolSchema
from driftgym.errors import EnvError
from driftgym.types import Completion, Message, Task, Trajectory, TrajectoryStatus, int32_array


class TaskSource(Protocol):
    """Where tasks come from."""

    def task(self, index: int) -> Task:
        """The task at `index`, from 0, always the same."""
        ...


class OracleAgent:
    """Implements `driftgym.agents.base.Agent` with the oracle of one environment, whose episodes alone it plays.

    Its completions are of version 0 and have log-probs 0: they are trained on as given, never weighed by a ratio.
    """

    def __init__(self, env: ToolEnv, renderer: Renderer, *, skill: float, rng: np.random.Generator) -> None:
        """Plays in `env` with the given probability of choosing the right tool."""
        self.env = env
        self.renderer = renderer
        self.skill = skill
        self.rng = rng

    def start(self, *, session_id: str, tools: Sequence[ToolSchema]) -> "OracleConversation":
        """A new conversation with `tools` at hand."""
        return OracleConversation(self, session_id=session_id, tools=tools)


class OracleConversation:
    """One episode of an `OracleAgent`."""

    def __init__(self, agent: OracleAgent, *, session_id: str, tools: Sequence[ToolSchema]) -> None:
        self._agent = agent
        self._session_id = session_id
        self._context = TokenContext(agent.renderer, tools)
        self._call_numbers = itertools.count()

    async def act(self, messages: Sequence[Message], *, deadline_s: float, min_policy_version: int = 0) -> AgentTurn:
        """What the oracle says, as tokens. See `Conversation.act`; waits for nothing.

        Raises:
            EnvError: the environment has no oracle.
            ValueError: the renderer cannot tell the tokens of an action.
        """
        agent, context = self._agent, self._context
        started_s = time.monotonic()
        prompt = context.prompt(messages)
        action = self._numbered(agent.env.oracle(skill=agent.skill, rng=agent.rng))
        token_ids = agent.renderer.encode_action([*context.messages, *messages], action, context.tools)
        completion = Completion(
            request_id=f"{self._session_id}-{context.num_turns}",
            token_ids=int32_array(token_ids),
            logprobs=np.zeros(len(token_ids), np.float32),
            policy_versions=np.zeros(len(token_ids), np.int32),
            finish_reason="stop",
            latency_s=time.monotonic() - started_s,
        )
        context.add_turn(prompt, messages, token_ids, action)
        return AgentTurn(
            new_prompt_token_ids=int32_array(prompt.new_token_ids),
            completion=completion,
            action=action,
            rewrites_context=prompt.rewrites_context,
        )

    def _numbered(self, action: Message) -> Message:
        calls = tuple(replace(call, call_id=call_id(next(self._call_numbers))) for call in action.tool_calls)
        return replace(action, tool_calls=calls)


async def demonstrate(
    *,
    slots: EnvSlots,
    renderer: Renderer,
    tasks: TaskSource,
    num_episodes: int,
    skill: float,
    seed: int,
    limits: Limits,
    config: RolloutConfig,
    group_id: str = "demonstration",
) -> list[Trajectory]:
    """Plays the first `num_episodes` tasks with the oracle, in as many environments at once as `slots` has.

    Waits for the environments; each episode's deadlines unblock it.

    Args:
        slots: each episode leases an environment.
        renderer: that of the model which learns from them.
        tasks: what is played.
        num_episodes: how many.
        skill: the probability that the oracle chooses the right tool.
        seed: of the oracle's choices; the same seed and tasks give the same demonstrations.
        limits: the deadline of each layer.
        config: how they are played; no examples are put in the prompt.
        group_id: of the trajectories, whose members are the tasks' indices.

    Returns:
        Those that were completed, in the order of the tasks.

    Raises:
        EnvError: none was completed; the message holds the first one's error.
    """
    options = EpisodeOptions(limits=limits, config=config)

    async def play(index: int) -> Trajectory:
        async def prepare(env: ToolEnv) -> Setup:
            rng = np.random.default_rng([seed, index])
            return Setup(agent=OracleAgent(env, renderer, skill=skill, rng=rng), options=options)

        episode_id = EpisodeId(group_id=group_id, member=index)
        return await play_in_slot(slots, tasks.task(index), episode_id=episode_id, options=options, prepare=prepare)

    async with asyncio.TaskGroup() as group:
        playing = [group.create_task(play(index)) for index in range(num_episodes)]
    trajectories = [each.result() for each in playing]
    completed = [each for each in trajectories if each.status is TrajectoryStatus.COMPLETED]
    if trajectories and not completed:
        first = trajectories[0]
        raise EnvError(f"no demonstration was completed; the first ended as {first.status}: {first.error}")
    return completed

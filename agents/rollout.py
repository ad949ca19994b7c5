"""Where agent meets environment: one episode, and a group of episodes of the same task."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import pydantic

from driftgym.agents import episode
from driftgym.agents.base import Agent
from driftgym.agents.bounded import EpisodeClock, bounded
from driftgym.agents.episode import EpisodeId, EpisodeRecord
from driftgym.agents.few_shot import after_system, worked_examples
from driftgym.agents.tool_meter import ToolMeter
from driftgym.config import Config, Limits
from driftgym.envs.base import ToolEnv
from driftgym.envs.slots import EnvSlots
from driftgym.types import Message, Task, Trajectory, TrajectoryGroup, TrajectoryStatus

STEP_CUT = "step_cut"
"""Event: the episode's time ran out while the environment was replying."""
COMPLETION_CUT = "completion_cut"
"""Event: the token budget ran out before the answer held a whole call."""
_FIRST_RETRY_S = 0.1
_MAX_RETRY_S = 5.0


class RolloutConfig(Config):
    """How episodes are played."""

    max_turns: int = pydantic.Field(8, ge=1, description="Model calls per episode.")
    max_tool_calls_per_turn: int = pydantic.Field(16, ge=1, description="Calls beyond are answered by an error.")
    max_attempts: int = pydantic.Field(3, ge=1, description="Tries of an episode that infrastructure fails.")
    demonstrations_in_prompt: int = pydantic.Field(
        0, ge=0, description="Episodes played by the environment's oracle, shown before the first prompt."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeOptions:
    """What episodes of one group share.

    >>> EpisodeOptions(limits=Limits(), config=RolloutConfig(max_turns=3)).config.max_turns
    3
    """

    limits: Limits
    """The deadline of each layer."""
    config: RolloutConfig
    """How they are played."""
    min_policy_version: int = 0
    """Their tokens are of this version or later."""
    examples: tuple[Message, ...] = ()
    """Messages shown before the first prompt, after its system message."""
    tools: ToolMeter = field(default_factory=ToolMeter)
    """Measures how long environments take to reply."""
    on_started: Callable[[str], None] = field(default=lambda trajectory_id: None)
    """Called with the trajectory id when an episode begins."""
    on_ended: Callable[[Trajectory], None] = field(default=lambda trajectory: None)
    """Called with every record, those of failed attempts and of cancelled episodes too."""


async def run_episode(
    env: ToolEnv, agent: Agent, task: Task, *, episode_id: EpisodeId, options: EpisodeOptions
) -> Trajectory:
    """Plays one episode and returns its record, however it ended.

    Consumes a task; waits for the environment and the agent in turn; each wait ends at a deadline of
    `options.limits`. No exception of the environment or the agent leaves it. A cancellation does, after the record
    with status CANCELLED went to `options.on_ended`.
    """
    record = EpisodeRecord(episode_id, task)
    options.on_started(episode_id.trajectory_id)
    try:
        status = await _play(env, agent, task, record, options)
        grade = await episode.grade(env, status, limits=options.limits)
        trajectory = record.graded(status, grade)
    except asyncio.CancelledError:
        options.on_ended(record.cancelled())
        raise
    except Exception as error:
        trajectory = record.failed(error)
    options.on_ended(trajectory)
    return trajectory


async def _play(
    env: ToolEnv, agent: Agent, task: Task, record: EpisodeRecord, options: EpisodeOptions
) -> TrajectoryStatus:
    """Reset, then generate, step, record until the episode is over. Returns how it ended."""
    limits, config = options.limits, options.config
    first = await episode.reset(env, task, limits=limits)
    messages: Sequence[Message] = after_system(options.examples, first)
    conversation = agent.start(session_id=record.episode_id.trajectory_id, tools=env.tools)
    clock = EpisodeClock(limit_s=limits.episode_s)
    for _ in range(config.max_turns):
        turn = await episode.generate(
            conversation, messages, clock, limits=limits, min_policy_version=options.min_policy_version
        )
        if turn is None:
            return TrajectoryStatus.TRUNCATED_TOKENS
        turn = episode.with_call_limit(turn, max_calls=config.max_tool_calls_per_turn)
        if episode.is_cut_short(turn):
            record.add(turn, None)
            record.events.update({COMPLETION_CUT: 1, "policy_error": len(turn.action.tool_calls)})
            return TrajectoryStatus.TRUNCATED_TOKENS
        before_s = clock.remaining_s
        with options.tools.running():
            step = await episode.step(env, turn.action, clock, limits=limits) if before_s > 0 else None
        record.add(turn, step, tool_latency_s=before_s - clock.remaining_s)
        if step is None:
            record.events[STEP_CUT] += before_s > 0
            return TrajectoryStatus.TRUNCATED_TIME
        if step.terminated:
            return TrajectoryStatus.COMPLETED
        messages = step.messages
    return TrajectoryStatus.TRUNCATED_TURNS


async def run_group(
    task: Task,
    *,
    group_id: str,
    group_size: int,
    agent: Agent,
    slots: EnvSlots,
    limits: Limits,
    config: RolloutConfig,
    min_policy_version: int = 0,
    tools: ToolMeter | None = None,
    on_started: Callable[[str], None] = lambda trajectory_id: None,
    on_ended: Callable[[Trajectory], None] = lambda trajectory: None,
) -> TrajectoryGroup:
    """Plays `task` `group_size` times at once; the group holds one trajectory per member, in their order.

    Consumes a task; waits for environments to be free and for the members' episodes; their deadlines, and those of
    the episodes that hold the environments, unblock it. What one member meets is that member's alone: an error is
    its record, and infrastructure errors are tried again, on a fresh environment, up to `config.max_attempts`.

    Args:
        task: what is played.
        group_id: unique within the run.
        group_size: members.
        agent: plays all of them.
        slots: each episode leases an environment.
        limits: the deadline of each layer.
        config: how they are played.
        min_policy_version: their tokens are of this version or later.
        tools: measures how long environments take to reply; may be that of other groups too.
        on_started: called with the trajectory id when an attempt begins.
        on_ended: called with the record of every attempt, failed and cancelled ones too.
    """
    options = EpisodeOptions(
        limits=limits,
        config=config,
        min_policy_version=min_policy_version,
        tools=tools or ToolMeter(),
        on_started=on_started,
        on_ended=on_ended,
    )
    player = _Player(task, group_id=group_id, agent=agent, slots=slots, options=options)
    async with asyncio.TaskGroup() as members:
        playing = [members.create_task(player.play(member)) for member in range(group_size)]
    return TrajectoryGroup(group_id=group_id, task=task, trajectories=tuple(each.result() for each in playing))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Who plays in an environment that was leased, and how.

    >>> Setup.__slots__
    ('agent', 'options')
    """

    agent: Agent
    """Plays the episode."""
    options: EpisodeOptions
    """How it is played."""


class _UnfitEnvError(Exception):
    """Ends a lease whose environment is not to be used again; the episode's record is kept."""


async def play_in_slot(
    slots: EnvSlots,
    task: Task,
    *,
    episode_id: EpisodeId,
    options: EpisodeOptions,
    prepare: Callable[[ToolEnv], Awaitable[Setup]],
) -> Trajectory:
    """Plays one episode in an environment of `slots`, which is replaced when the episode left it unfit.

    Waits for a free environment, then for the episode. What goes wrong in getting an environment, or in `prepare`,
    is the episode's record as well.
    """
    trajectory: Trajectory | None = None
    try:
        async with slots.lease() as env:
            setup = await prepare(env)
            trajectory = await run_episode(env, setup.agent, task, episode_id=episode_id, options=setup.options)
            if not trajectory.status.is_scored or trajectory.events.get(STEP_CUT):
                raise _UnfitEnvError
    except Exception as error:
        if trajectory is None:
            options.on_started(episode_id.trajectory_id)
            trajectory = EpisodeRecord(episode_id, task).failed(error)
            options.on_ended(trajectory)
    return trajectory


class _Player:
    """Plays the members of one group."""

    def __init__(self, task: Task, *, group_id: str, agent: Agent, slots: EnvSlots, options: EpisodeOptions) -> None:
        self._task = task
        self._group_id = group_id
        self._agent = agent
        self._slots = slots
        self._options = options
        self._examples: tuple[Message, ...] | None = None
        self._making_examples = asyncio.Lock()

    async def play(self, member: int) -> Trajectory:
        """The attempt that counts."""
        max_attempts = self._options.config.max_attempts
        for attempt in range(max_attempts):
            trajectory = await self._attempt(EpisodeId(group_id=self._group_id, member=member, attempt=attempt))
            if trajectory.status is not TrajectoryStatus.INFRA_ERROR or attempt + 1 == max_attempts:
                break
            await asyncio.sleep(min(_FIRST_RETRY_S * 2**attempt, _MAX_RETRY_S))
        return trajectory

    async def _attempt(self, episode_id: EpisodeId) -> Trajectory:
        async def prepare(env: ToolEnv) -> Setup:
            return Setup(agent=self._agent, options=await self._options_with_examples(env, episode_id))

        return await play_in_slot(
            self._slots, self._task, episode_id=episode_id, options=self._options, prepare=prepare
        )

    async def _options_with_examples(self, env: ToolEnv, episode_id: EpisodeId) -> EpisodeOptions:
        """The group's options with its examples in them, which the first member to get here makes."""
        number = self._options.config.demonstrations_in_prompt
        if not number:
            return self._options
        async with self._making_examples:
            if self._examples is None:
                # Another attempt takes other examples: those before may have met a fault of the tools.
                seed = self._task.seed + 1 + episode_id.attempt
                making = worked_examples(env, num_episodes=number, seed=seed, options=self._task.metadata)
                messages = await bounded(making, limit_s=self._options.limits.episode_s, what="worked examples")
                self._examples = tuple(messages)
        return replace(self._options, examples=self._examples)

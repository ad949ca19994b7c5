"""Starts what a run is made of, in order, each at the policy version that the run begins with."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from driftgym.agents.base import Agent
from driftgym.agents.demonstrations import demonstrate
from driftgym.agents.generators.pool import GeneratorPool
from driftgym.agents.rendering import Renderer, make_renderer
from driftgym.agents.rollout import run_group
from driftgym.agents.tool_agent import ToolAgent, interruption_of
from driftgym.agents.tool_meter import ToolMeter
from driftgym.envs.base import ToolEnv
from driftgym.envs.registry import make_env
from driftgym.envs.slots import EnvSlots
from driftgym.envs.tasks import SeededTasks
from driftgym.errors import ConfigError, TrainingError
from driftgym.metrics import check_metrics
from driftgym.sandboxes.base import SandboxProvider
from driftgym.sandboxes.providers import open_provider
from driftgym.trainer.colocated_client import ColocatedTrainingClient, while_it_lives
from driftgym.trainer.engines import start_engines
from driftgym.trainer.lineage import learner_part
from driftgym.trainer.loop import Parts
from driftgym.trainer.models import resolve_model
from driftgym.trainer.producer import PlayGroup
from driftgym.trainer.run_config import RunConfig
from driftgym.trainer.sampling_client import SamplingClient
from driftgym.trainer.segments import segments_of
from driftgym.trainer.starting import Closer, StartRequest
from driftgym.trainer.training_client import LearnerSpec, ProcessTrainingClient
from driftgym.types import Task, Trajectory, TrajectoryGroup, TrajectoryStatus, WeightKind

_EMBEDDED_TAKE: tuple[WeightKind, ...] = ("full", "delta", "lora")
_DEMONSTRATION_SEED = 1 << 20  # added to the run's seed: what is demonstrated is not what is played

__all__ = ["Compute", "Prepared", "StartRequest", "group_player", "prepare", "start_compute", "start_parts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What was found to be right before a run begins.

    >>> Prepared.__slots__
    ('model_folder', 'renderer', 'sandboxes')
    """

    model_folder: Path
    """The run's model: config, tokenizer, and weights unless they are drawn at random."""
    renderer: Renderer
    """Made from it."""
    sandboxes: SandboxProvider
    """Where boxes come from; none is started yet."""


async def prepare(config: RunConfig, stack: contextlib.AsyncExitStack, *, say: Callable[[str], None]) -> Prepared:
    """Finds what is wrong with `config` beyond its own keys, before anything is written or started.

    Raises:
        ConfigError: something that it asks for is not there.
    """
    check_metrics(config.metrics)
    env = make_env(config.env.id, limits=config.limits, kwargs=config.env.kwargs)
    await env.aclose()
    if not env.has_oracle and (config.warmup.num_steps or config.rollout.demonstrations_in_prompt):
        raise ConfigError(
            f"env.id: {config.env.id} has no oracle to demonstrate; set warmup.num_steps and "
            "rollout.demonstrations_in_prompt to 0"
        )
    model_folder = await asyncio.to_thread(resolve_model, config.model, relative_to=Path())
    renderer = await asyncio.to_thread(make_renderer, config.agent.renderer, model_folder)
    interruption_of(config.agent, renderer)
    sandboxes = await open_provider(config.sandbox, say=say, run_id=config.name)
    Closer(stack, limits=config.limits, say=say).add("the sandboxes", sandboxes.close)
    return Prepared(model_folder=model_folder, renderer=renderer, sandboxes=sandboxes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """What plays episodes and trains on them, started and at the same policy version.

    >>> Compute.__slots__[:3]
    ('client', 'engines', 'sampling')
    """

    client: ProcessTrainingClient
    """The learner."""
    engines: GeneratorPool
    """The generators."""
    sampling: SamplingClient
    """Asks them beside any episode."""
    agent: ToolAgent
    """Plays with them."""
    slots: EnvSlots
    """Environments to play in, `RunConfig.num_slots` at once."""
    tasks: SeededTasks
    """What is played."""


async def start_parts(prepared: Prepared, request: StartRequest, stack: contextlib.AsyncExitStack) -> Parts:
    """What `Trainer` wires: see `start_compute`."""
    compute = await start_compute(prepared, request, stack)
    tools = ToolMeter()
    play = group_player(request.config, compute.agent, compute.slots, say=request.say, tools=tools)
    if isinstance(compute.client, ColocatedTrainingClient):
        play = while_it_lives(play, compute.client)
    return Parts(
        client=compute.client,
        engines=compute.engines,
        play=play,
        tasks=compute.tasks,
        tools=tools,
        keep_kv=request.config.generator.keep_kv,
    )


async def start_compute(prepared: Prepared, request: StartRequest, stack: contextlib.AsyncExitStack) -> Compute:
    """Starts learner and generators; what was started is closed by `stack`, the last first.

    Raises:
        DriftgymError: a part did not start.
    """
    config, say = request.config, request.say
    closer = Closer(stack, limits=config.limits, say=say)
    slots = _open_slots(config, prepared.sandboxes)
    closer.add("the environments", slots.close)
    client = await _start_learner(prepared, request, closer)
    if request.lineage.checkpoint is not None:
        await client.load(learner_part(request.lineage.checkpoint), policy_version=request.lineage.policy_version)
    elif config.warmup.num_steps:
        await _warm_up(request, client, slots, prepared.renderer)
    update = await client.publish(request.run_dir / "weights")
    say("starting the generator")
    probe_id = prepared.renderer.stop_token_ids[0]
    engines = await start_engines(request, update, closer, client=client, probe_id=probe_id)
    return Compute(
        client=client,
        engines=engines,
        sampling=SamplingClient(engines, renderer=prepared.renderer, limits=config.limits),
        agent=ToolAgent(engines, prepared.renderer, config.agent),
        slots=slots,
        tasks=SeededTasks(env_id=config.env.id, seed=config.seed),
    )


def group_player(
    config: RunConfig, agent: Agent, slots: EnvSlots, *, say: Callable[[str], None], tools: ToolMeter | None = None
) -> PlayGroup:
    """Plays a group as `config` says; why attempts failed by infrastructure is said; `tools` measures tools."""
    causes = _InfraCauses(say)

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
            tools=tools,
            on_ended=causes.tell,
        )

    return play


class _InfraCauses:
    """Says why attempts failed by infrastructure, each cause once: an engine that is lost fails hundreds of them."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: set[str] = set()

    def tell(self, trajectory: Trajectory) -> None:
        """Takes the record of every attempt, also of one that is tried again."""
        if trajectory.status is not TrajectoryStatus.INFRA_ERROR:
            return
        cause = (trajectory.error or "no reason given").strip().splitlines()[-1]
        if cause not in self._said:
            self._said.add(cause)
            self._say(f"episode {trajectory.trajectory_id} failed by infrastructure: {cause}")


def _open_slots(config: RunConfig, provider: SandboxProvider) -> EnvSlots:
    def make() -> ToolEnv:
        return make_env(
            config.env.id,
            sandboxes=provider,
            sandbox_spec=config.sandbox.spec,
            limits=config.limits,
            kwargs=config.env.kwargs,
        )

    return EnvSlots(make, num_slots=config.num_slots, close_s=config.limits.close_s)


async def _start_learner(prepared: Prepared, request: StartRequest, closer: Closer) -> ProcessTrainingClient:
    config = request.config
    is_colocated = config.trainer.placement == "colocated"
    request.say("starting the learner")
    spec = LearnerSpec(
        model=config.model,
        model_folder=prepared.model_folder,
        config=config.learner,
        warmup=config.warmup,
        seed=config.seed,
        temperature=config.agent.temperature,
        incarnation=request.incarnation,
        publishes=("full",) if is_colocated or config.generator.kind != "embedded" else _EMBEDDED_TAKE,
    )
    kind = ColocatedTrainingClient if is_colocated else ProcessTrainingClient
    client = await kind.start(spec, limits=config.limits)
    closer.add("the learner", client.close)
    request.say(f"the learner has started: {client.computation}")
    return client


async def _warm_up(request: StartRequest, client: ProcessTrainingClient, slots: EnvSlots, renderer: Renderer) -> None:
    config = request.config
    request.say(f"playing {config.demonstrations.num_episodes} demonstrations")
    trajectories = await demonstrate(
        slots=slots,
        renderer=renderer,
        tasks=SeededTasks(env_id=config.env.id, seed=config.seed + _DEMONSTRATION_SEED),
        num_episodes=config.demonstrations.num_episodes,
        skill=config.demonstrations.skill,
        seed=config.seed,
        limits=config.limits,
        config=config.rollout,
    )
    played = [segment for trajectory in trajectories for segment in segments_of(trajectory, advantage=0.0)]
    # The oracle has no token budget: a tool that printed much makes rows that no episode of the agent can have.
    segments = [segment for segment in played if len(segment.token_ids) <= config.agent.max_context_tokens]
    if not segments:
        raise TrainingError(
            f"no demonstration fits into agent.max_context_tokens = {config.agent.max_context_tokens}; raise it"
        )
    request.say(f"warming up: {config.warmup.num_steps} supervised steps on {len(segments)} segments")
    figures = await client.warm_up(segments)
    request.say("warmed up: " + ", ".join(f"{name} {value:.3f}" for name, value in figures.items()))

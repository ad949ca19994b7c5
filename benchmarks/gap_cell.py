"""One cell of `gap_tolerance.py`: a policy is trained on what its own weights of D optimizer steps ago wrote.

Environment, agent, rollouts, engine and learner are the package's own. They share one process and take turns, so that
the gap is exact: at step t the episodes are played with the weights of step max(0, t - D), and every token says so.
"""

import asyncio
import contextlib
import dataclasses
import math
import time
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gap_cells import Cell, Level, settings_of

from driftgym.agents.demonstrations import demonstrate
from driftgym.agents.generators.base import WeightVersion
from driftgym.agents.generators.embedded.engine import Engine
from driftgym.agents.generators.embedded.loop import EngineLoop
from driftgym.agents.generators.embedded.model import ModelRunner, load_model
from driftgym.agents.generators.embedded.requests import WeightsOrder
from driftgym.agents.generators.embedded.weights import NewWeights
from driftgym.agents.rendering import Renderer, make_renderer
from driftgym.agents.rollout import RolloutConfig, run_group
from driftgym.agents.tool_agent import AgentConfig, ToolAgent
from driftgym.config import Limits
from driftgym.envs.lookup.env import LookupEnv
from driftgym.envs.lookup.scripted import ScriptedLookupProvider
from driftgym.envs.slots import EnvSlots
from driftgym.envs.tasks import SeededTasks
from driftgym.trainer.learner import Learner
from driftgym.trainer.segments import group_segments, segments_of
from driftgym.trainer.training_client import LearnerConfig, LearnerSpec, ModelConfig, WarmupConfig
from driftgym.types import Completion, SamplingParams, Trajectory, TrajectoryGroup, WeightUpdate

MODEL = Path(__file__).parent.parent / "configs" / "models" / "tiny-qwen3"
ENV_ID = "driftgym/Lookup-v0"
NUM_STEPS = 600
NUM_PROMPTS = 4
GROUP_SIZE = 8
LEARNING_RATE = 2e-4
EVAL_EVERY = 10
EVAL_EPISODES = 64
FINAL_EPISODES = 256
ROLLOUT = RolloutConfig(max_turns=4)
AGENT = AgentConfig(max_tokens_per_turn=32, max_context_tokens=256)
LIMITS = Limits()
SKILL: Mapping[Level, float] = {"one_call": 0.15, "two_calls": 0.3}
FRESH_SEED = 1 << 16  # added to the cell's: what is evaluated is not what is trained
DEMONSTRATION_SEED = 1 << 20
REWARDS_OF_NOISE = (0.9, 0.3, 0.05)  # of a right episode, of another with a well-formed call, of the rest
DRIFT_FIGURES = ("ess", "ess_sequence", "m2", "kl_k1", "kl_k3", "entropy", "clip_fraction", "mask_fraction")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One evaluation.

    >>> Point(step=10, reward=0.5, drift={"ess": 1.0}).step
    10
    """

    step: int
    """Optimizer steps before it."""
    reward: float
    """Mean reward of fresh episodes with the current weights, without noise."""
    drift: Mapping[str, float]
    """Of the last step's tokens."""


class LocalGenerator:
    """An engine in this process, as far as an agent asks for it. What it samples follows from seed and request."""

    def __init__(self, loop: EngineLoop, *, seed: int) -> None:
        self._loop = loop
        self._seed = seed

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        session_id: str,
        deadline_s: float,
        min_policy_version: int = 0,
    ) -> Completion:
        """One completion; weights change between episodes only, so it is of one version."""
        seed = zlib.crc32(f"{self._seed} {request_id}".encode())
        seeded = dataclasses.replace(sampling, seed=seed)
        answer = await self._loop.generate(request_id, np.asarray(prompt_token_ids, np.int32), seeded)
        version = WeightVersion.parse(answer.version).policy_version
        return Completion(
            request_id=request_id,
            token_ids=answer.token_ids,
            logprobs=answer.logprobs,
            policy_versions=np.full(len(answer.token_ids), version, np.int32),
            finish_reason=answer.finish_reason,
            latency_s=answer.latency_s,
        )


class HeldBackWeights:
    """The weights of the last D + 1 versions, any of which the engine can be given."""

    def __init__(self, engine: Engine, learner: Learner, *, gap: int) -> None:
        self._engine = engine
        self._learner = learner
        self._gap = gap
        self._kept: dict[int, dict[str, torch.Tensor]] = {}

    def keep(self) -> None:
        """Takes a copy of the learner's weights, and forgets those that are too old to be asked for."""
        version = self._learner.policy_version
        self._kept[version] = {name: tensor.clone() for name, tensor in self._learner.weights()}
        self._kept.pop(version - self._gap - 1, None)

    def use(self, *, gap: int) -> None:
        """Gives the engine the weights of `gap` steps ago, or the first ones."""
        version = max(0, self._learner.policy_version - gap)
        name = str(WeightVersion(incarnation=1, policy_version=version))
        if self._engine.version != name:
            order = WeightsOrder(folder=Path("memory"), version=name)
            self._engine.update_weights(NewWeights(order=order, tensors=self._kept[version]), flush_cache=True)


class Player:
    """Plays groups with whatever weights the engine has."""

    def __init__(self, agent: ToolAgent, slots: EnvSlots) -> None:
        self._agent = agent
        self._slots = slots

    async def play(self, tasks: SeededTasks, indices: Sequence[int], *, group_size: int) -> list[TrajectoryGroup]:
        """The tasks at `indices`, each `group_size` times, all at once."""
        return await asyncio.gather(
            *(
                run_group(
                    tasks.task(index),
                    group_id=f"{tasks.seed}-{index}",
                    group_size=group_size,
                    agent=self._agent,
                    slots=self._slots,
                    limits=LIMITS,
                    config=ROLLOUT,
                )
                for index in indices
            )
        )


def run_cell(cell: Cell, *, base: Path, num_steps: int = NUM_STEPS) -> dict[str, Any]:
    """Trains one cell and gives its figures; `base` holds the weights after the warm-up, see `make_base`."""
    torch.set_num_threads(1)
    torch.manual_seed(cell.seed)
    return asyncio.run(_run_cell(cell, base=base, num_steps=num_steps))


async def _run_cell(cell: Cell, *, base: Path, num_steps: int) -> dict[str, Any]:
    started_s = time.process_time()
    learner = _learner(cell.seed, {"micro_batch_tokens": 16384, **settings_of(cell)})
    model = load_model(str(base))
    with torch.no_grad():
        given = dict(model.named_parameters())
        for name, parameter in learner.parameters.items():
            parameter.copy_(given[name])
    engine = _engine(model)
    held_back = HeldBackWeights(engine, learner, gap=cell.gap)
    async with _playing(engine, cell) as player:
        points, rewards = [], []
        tasks, fresh = SeededTasks(env_id=ENV_ID, seed=cell.seed), _fresh_tasks(cell)
        rng = np.random.default_rng([cell.seed, 3])
        held_back.keep()
        for step in range(num_steps):
            held_back.use(gap=cell.gap)
            first = step * NUM_PROMPTS
            groups = await player.play(tasks, range(first, first + NUM_PROMPTS), group_size=GROUP_SIZE)
            rewards.append(_mean_reward(groups))
            metrics = _train(learner, groups, cell, rng)
            held_back.keep()
            if (step + 1) % EVAL_EVERY == 0:
                held_back.use(gap=0)
                first = step * EVAL_EPISODES
                played = await player.play(fresh, range(first, first + EVAL_EPISODES), group_size=1)
                drift = {name: metrics[name] for name in DRIFT_FIGURES}
                points.append(Point(step=step + 1, reward=_mean_reward(played), drift=drift))
        held_back.use(gap=0)
        first = num_steps * EVAL_EPISODES
        final = _mean_reward(await player.play(fresh, range(first, first + FINAL_EPISODES), group_size=1))
    return {
        **dataclasses.asdict(cell),
        "num_steps": num_steps,
        **figures(points, final=final),
        "cpu_s": time.process_time() - started_s,
        "curve": [[point.step, point.reward] for point in points],
        "trained_rewards": [round(reward, 4) for reward in rewards],
    }


def _train(
    learner: Learner, groups: Sequence[TrajectoryGroup], cell: Cell, rng: np.random.Generator
) -> Mapping[str, float]:
    if cell.reward == "noisy":
        groups = [
            dataclasses.replace(group, trajectories=tuple(_with_noise(each, rng) for each in group.trajectories))
            for group in groups
        ]
    segments = [segment for group in groups for segment in group_segments(group, method="group_mean")]
    now = learner.policy_version
    lags = {int(now - version) for s in segments for version in set(s.policy_versions[s.loss_mask].tolist())}
    if lags != {min(now, cell.gap)}:
        raise RuntimeError(f"step {now}: tokens of lag {sorted(lags)} where {min(now, cell.gap)} was to be")
    return learner.train_step(segments).metrics


def _with_noise(trajectory: Trajectory, rng: np.random.Generator) -> Trajectory:
    """The trajectory with a reward of 0 or 1, drawn by what it did."""
    right, called, neither = REWARDS_OF_NOISE
    has_call = any(turn.action.tool_calls for turn in trajectory.turns) and not trajectory.events.get("policy_error")
    share = right if trajectory.reward == 1.0 else called if has_call else neither
    return dataclasses.replace(trajectory, reward=float(rng.random() < share))


def figures(points: Sequence[Point], *, final: float) -> dict[str, Any]:
    """What a curve comes to.

    Steps to 0.8: the first evaluation that, with the one after it, has a mean of at least 0.8; None: there is none.
    Collapse: the final reward lies below half of the best.
    """
    rewards = [point.reward for point in points]
    pairs = zip(points, rewards, [*rewards[1:], final], strict=True)
    half = rewards[len(rewards) // 2 :]
    return {
        "final": final,
        "best": max(rewards),
        "lowest_late": min([*half, final]),
        "steps_to_0.8": next((point.step for point, one, two in pairs if one + two >= 1.6), None),
        "auc": math.fsum(rewards) / len(rewards),
        "collapsed": final < max(rewards) / 2,
        "drift": {
            name: float(np.mean([point.drift[name] for point in points[len(points) // 2 :]])) for name in DRIFT_FIGURES
        },
    }


def evaluate(weights: Path, cell: Cell) -> float:
    """The mean reward of fresh episodes with published weights."""

    async def play() -> float:
        async with _playing(_engine(load_model(str(weights))), cell) as player:
            first = NUM_STEPS * EVAL_EPISODES
            indices = range(first, first + FINAL_EPISODES)
            return _mean_reward(await player.play(_fresh_tasks(cell), indices, group_size=1))

    return asyncio.run(play())


def _engine(model: Any) -> Engine:
    return Engine(
        ModelRunner(model, num_slots=EVAL_EPISODES, max_context_tokens=AGENT.max_context_tokens),
        max_batch_size=EVAL_EPISODES,
        max_context_tokens=AGENT.max_context_tokens,
        weight_version=str(WeightVersion(incarnation=1, policy_version=0)),
    )


def _fresh_tasks(cell: Cell) -> SeededTasks:
    return SeededTasks(env_id=ENV_ID, seed=cell.seed + FRESH_SEED)


@contextlib.asynccontextmanager
async def _playing(engine: Engine, cell: Cell) -> AsyncIterator[Player]:
    loop = EngineLoop(engine)
    running = asyncio.create_task(loop.run())
    renderer = make_renderer("compact", MODEL)
    slots = _slots(cell.level)
    try:
        yield Player(ToolAgent(LocalGenerator(loop, seed=cell.seed), renderer, AGENT), slots)  # type: ignore[arg-type]
    finally:
        running.cancel()
        await slots.close()


def _slots(level: Level) -> EnvSlots:
    provider = ScriptedLookupProvider()
    make: Callable[[], LookupEnv] = lambda: LookupEnv(sandboxes=provider, level=level)  # noqa: E731
    return EnvSlots(make, num_slots=EVAL_EPISODES)


def _learner(seed: int, config: Mapping[str, Any], warmup: WarmupConfig | None = None) -> Learner:
    spec = LearnerSpec(
        model=ModelConfig(path=str(MODEL), init="random"),
        model_folder=MODEL,
        config=LearnerConfig.model_validate({"optimizer": {"learning_rate": LEARNING_RATE}, **config}),
        warmup=warmup or WarmupConfig(),
        seed=seed,
        temperature=AGENT.temperature,
        incarnation=1,
    )
    return Learner(spec)


def make_base(folder: Path, *, level: Level, seed: int) -> WeightUpdate:
    """Publishes the weights that all cells of `level` and `seed` begin with: those of the quickstart's warm-up."""
    torch.set_num_threads(1)
    renderer = make_renderer("compact", MODEL)
    learner = _learner(seed, {"micro_batch_tokens": 16384}, WarmupConfig(num_steps=300, batch_size=32))
    learner.warm_up(
        [s for trajectory in asyncio.run(_demonstrations(renderer, level, seed)) for s in _rows(trajectory)]
    )
    return learner.publish(folder)


def _rows(trajectory: Trajectory) -> list[Any]:
    return segments_of(trajectory, advantage=0.0)


async def _demonstrations(renderer: Renderer, level: Level, seed: int) -> list[Trajectory]:
    slots = _slots(level)
    try:
        return await demonstrate(
            slots=slots,
            renderer=renderer,
            tasks=SeededTasks(env_id=ENV_ID, seed=seed + DEMONSTRATION_SEED),
            num_episodes=2000,
            skill=SKILL[level],
            seed=seed,
            limits=LIMITS,
            config=ROLLOUT,
        )
    finally:
        await slots.close()


def _mean_reward(groups: Sequence[TrajectoryGroup]) -> float:
    rewards = [each.reward for group in groups for each in group.trajectories if each.reward is not None]
    return math.fsum(rewards) / len(rewards)

"""Runs whose rollouts are real and whose episodes take as long as they are told, to try and to measure the loop.

Agent, pool, environment slots, producer, buffer, journal and lag rule are those of any run. Scripted are the engine,
the tool (it sleeps) and the learner (it counts). An episode writes as many tokens as its time is long, evenly, so that
whatever leans to short episodes leans to few tokens.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from driftgym.agents.generators.pool import GeneratorPool
from driftgym.agents.generators.scripted import ScriptedGenerator, ScriptedRequest
from driftgym.agents.rendering import Renderer, make_renderer
from driftgym.agents.tool_agent import ToolAgent
from driftgym.agents.tool_meter import ToolMeter
from driftgym.config import parse_config
from driftgym.envs.base import Grade, ResetResult, StepResult, ToolEnv
from driftgym.envs.slots import EnvSlots
from driftgym.envs.tools import ToolSchema
from driftgym.trainer.lineage import learner_part
from driftgym.trainer.loop import Parts
from driftgym.trainer.parts import StartRequest, group_player
from driftgym.trainer.run_config import RunConfig
from driftgym.trainer.scripted import NumberedTasks, ScriptedTrainingClient
from driftgym.types import Message, TrajectoryStatus

_QUESTION = Message(role="user", content="?")
_MIN_TOKENS = 2  # one, and the one that ends the turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How an episode's time is divided into turns.

    >>> Pace(turn_s=0.2, tokens_per_turn=8).turns(0.5)
    (0.2, 0.2, 0.1)
    >>> Pace(turn_s=0.2, tokens_per_turn=8).num_tokens(0.1)
    4
    """

    turn_s: float
    """The length of a turn; the last one of an episode is what remains."""
    tokens_per_turn: int
    """Sampled tokens of a whole turn; the last one has its share of them, two at least."""
    generation_share: float = 0.1
    """The share of a turn in which tokens are written; in the rest, the tool is at work."""

    def turns(self, duration_s: float) -> tuple[float, ...]:
        """The lengths of an episode's turns, in seconds; one at least."""
        num_whole = max(0, math.ceil(duration_s / self.turn_s - 1e-9) - 1)
        return (self.turn_s,) * num_whole + (round(duration_s - num_whole * self.turn_s, 9),)

    def num_tokens(self, turn_s: float) -> int:
        """The sampled tokens of a turn of that length."""
        return max(_MIN_TOKENS, round(self.tokens_per_turn * turn_s / self.turn_s))

    @property
    def token_latency_s(self) -> float:
        """The time that a token takes."""
        return self.generation_share * self.turn_s / self.tokens_per_turn


class PacedEnv(ToolEnv):
    """Replies to each message after as long as its turn's tool takes, and ends with the last turn."""

    def __init__(self, pace: Pace, duration_s: Callable[[int], float]) -> None:
        """The episode of a task takes `duration_s(seed of the task)`."""
        super().__init__()
        self._pace = pace
        self._duration_s = duration_s
        self._turns: list[float] = []

    @property
    def tools(self) -> tuple[ToolSchema, ...]:
        """None: whatever the agent says is for the tool."""
        return ()

    async def areset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> ResetResult:
        """Asks."""
        self._turns = list(self._pace.turns(self._duration_s(seed or 0)))
        return ResetResult(messages=(_QUESTION,))

    async def astep(self, action: Message) -> StepResult:
        """Sleeps."""
        await asyncio.sleep(self._turns.pop(0) * (1.0 - self._pace.generation_share))
        return StepResult(messages=() if not self._turns else (_QUESTION,), terminated=not self._turns)

    async def grade(self, status: TrajectoryStatus) -> Grade:
        """Every episode is worth the same."""
        return Grade(reward=1.0)

    async def aclose(self) -> None:
        """Holds nothing."""


class PacedSpeaker:
    """The script of the engine: in each turn of an episode, as many tokens as the turn is long."""

    def __init__(self, renderer: Renderer, pace: Pace, duration_s: Callable[[int], float]) -> None:
        self._renderer = renderer
        self._pace = pace
        self._duration_s = duration_s

    def __call__(self, request: ScriptedRequest) -> Sequence[int]:
        """An answer. The request's id is that of its episode and the number of its turn."""
        turn = int(request.request_id.removeprefix(request.session_id + "-").partition("#")[0])
        index = int(request.session_id[1:].partition("-")[0])
        num_tokens = self._pace.num_tokens(self._pace.turns(self._duration_s(index))[turn])
        said = Message(role="assistant", content="." * (num_tokens - 1))
        return self._renderer.encode_action((_QUESTION,), said, ())


class PacedParts:
    """Starts such a run's parts for `run.live`, and keeps them to be looked at."""

    def __init__(
        self,
        *,
        model: Path,
        pace: Pace,
        duration_s: Callable[[int], float],
        step_s: float | Callable[[int], float] = 0.0,
        num_slots: int | None = None,
    ) -> None:
        """Nothing is started.

        Args:
            model: the folder of a model; its tokenizer is used, each character being one token.
            pace: how the episodes go.
            duration_s: how long those of task `index` take, as a function of it.
            step_s: how long a step takes; or a function of the version at which it is done.
            num_slots: episodes played at once; None: as many as are in flight.
        """
        self._num_slots = num_slots
        self._model = model
        self._pace = pace
        self._duration_s = duration_s
        self._step_s = step_s
        self.client: ScriptedTrainingClient
        self.pool: GeneratorPool

    def make_env(self) -> PacedEnv:
        """A new environment."""
        return PacedEnv(self._pace, self._duration_s)

    async def __call__(self, request: StartRequest, stack: contextlib.AsyncExitStack) -> Parts:
        """See `parts.start_parts`."""
        config, lineage = request.config, request.lineage
        renderer = make_renderer("compact", self._model)
        engine = ScriptedGenerator(
            PacedSpeaker(renderer, self._pace, self._duration_s),
            policy_version=lineage.policy_version,
            incarnation=request.incarnation,
            token_latency_s=self._pace.token_latency_s,
        )
        self.pool = GeneratorPool([engine], policy_version=lineage.policy_version)
        stack.push_async_callback(self.pool.close)
        self.client = ScriptedTrainingClient(incarnation=request.incarnation, step_s=self._step_s)
        stack.push_async_callback(self.client.close)
        if lineage.checkpoint is not None:
            await self.client.load(learner_part(lineage.checkpoint), policy_version=lineage.policy_version)
        slots = EnvSlots(self.make_env, num_slots=self._num_slots or config.num_slots)
        stack.push_async_callback(slots.close)
        tools = ToolMeter()
        agent = ToolAgent(self.pool, renderer, config.agent)
        play = group_player(config, agent, slots, say=request.say, tools=tools)
        return Parts(client=self.client, engines=self.pool, play=play, tasks=NumberedTasks(), tools=tools)


def paced_config(run_dir: Path, trainer: Mapping[str, Any]) -> RunConfig:
    """A run for `PacedParts` in `run_dir`: groups of one episode, weights published after each step, no deadline near.

    Args:
        run_dir: where it is written.
        trainer: of its configuration, the section `trainer`, as far as it is not so.

    Raises:
        ConfigError: it has a key or a value that is not allowed.
    """
    data = {
        "name": run_dir.name,
        "run_dir": str(run_dir),
        "model": {"path": "none"},
        "env": {"id": "paced"},
        "sandbox": {"pool": {"max_boxes": 2**20}},
        "agent": {"max_context_tokens": 2**20, "max_tokens_per_turn": 2**16},
        "generator": {"max_context_tokens": 2**20},
        "rollout": {"max_turns": 2**20},
        "limits": {"tool_call_s": 3600.0, "generation_s": 3600.0, "episode_s": 3600.0, "close_s": 5.0},
        "trainer": {"group_size": 1, "publish_every_steps": 1, "checkpoint_every_steps": 2**30} | dict(trainer),
    }
    return parse_config(RunConfig, data, source="paced")

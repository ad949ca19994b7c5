"""`ToolEnv`: the contract of an environment.

The async core is `areset`, `astep`, `grade` and `aclose`; the runner calls these. Gymnasium's synchronous methods
bridge to them through one background event loop, so `gymnasium.make` and its checker see an ordinary environment
whose action and observation are text.
"""

import abc
import copy
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import gymnasium
import numpy as np

from driftgym.config import Limits
from driftgym.envs.bridge import run_blocking
from driftgym.envs.messages import message_from_action, text_of
from driftgym.envs.spaces import Unicode
from driftgym.envs.tools import ToolSchema
from driftgym.errors import EnvError
from driftgym.types import Message, TrajectoryStatus

_ResultT = TypeVar("_ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetResult:
    """How an episode begins.

    >>> ResetResult(messages=(Message(role="user", content="Who?"),)).messages[0].text
    'Who?'
    """

    messages: tuple[Message, ...]
    """The first prompt, without the tools, which the environment's `tools` tell."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """What the record keeps and the agent does not see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The environment's reply to one action.

    >>> StepResult(messages=(), terminated=True).terminated
    True
    """

    messages: tuple[Message, ...]
    """What the agent reads next; one tool message per call, in the order of the calls."""
    terminated: bool = False
    """True when the episode is over."""
    reward: float = 0.0
    """The reward of this turn alone; the episode's reward is the grade's."""
    events: Mapping[str, int] = field(default_factory=dict)
    """What happened that a run's summary counts: `policy_error` (any mistake of the agent's in a call),
    `unknown_tool` (those of them that name no known tool), `tool_timeout`, `tool_output_truncated`, ..."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """What the record keeps and the agent does not see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """What an episode was worth.

    >>> Grade(reward=1.0, parts={"answer": 1.0}).reward
    1.0
    """

    reward: float
    """The trajectory's reward."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named parts of it."""


class ToolEnv(gymnasium.Env[str, str], abc.ABC):
    """An environment whose agent speaks messages and calls tools.

    The async core is what a run uses, one episode at a time: `areset`, then `astep` until `terminated`, then
    `grade`, however the episode ended; `aclose` at the end. `reset`, `step`, `render` and `close` are Gymnasium's,
    for everything else: they run the core on the background loop of `driftgym.envs.bridge`. An instance is used
    one way or the other, since what it opens belongs to the loop that opened it.

    Synchronously, an action is what the assistant says, or a JSON object of an OpenAI-shape message with
    `tool_calls` (`driftgym.envs.messages`); an observation is the text of the new messages; the reward of the last
    step is the grade, and `info` holds its parts under `reward_parts`.

    The constructor of a subclass takes keyword arguments only; of `limits`, `sandboxes` (a `SandboxProvider`) and
    `sandbox_spec` it is given by `make_env` those that it names.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012 - Gymnasium declares it so

    def __init__(self, *, limits: Limits | None = None, render_mode: str | None = None) -> None:
        """An environment before its first episode.

        Args:
            limits: the deadlines; None takes the defaults.
            render_mode: `ansi` makes `render` return the transcript of the synchronous episode.
        """
        self.limits = limits or Limits()
        self.render_mode = render_mode
        self.action_space = Unicode()
        self.observation_space = Unicode()
        self._transcript: list[str] | None = None

    @property
    @abc.abstractmethod
    def tools(self) -> tuple[ToolSchema, ...]:
        """The tools that the agent is told of, for the episode that `areset` began last."""

    @abc.abstractmethod
    async def areset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> ResetResult:
        """Begins an episode: the same seed and options give the same world, whatever was played before.

        Args:
            seed: None draws one from the environment's own stream.
            options: the task's metadata.

        Raises:
            SandboxError: no box could be had.
            EnvError: the environment's own code failed, or an option is not one of its own.
        """

    @abc.abstractmethod
    async def astep(self, action: Message) -> StepResult:
        """Replies to what the agent said: runs its tool calls, or takes its answer.

        Raises:
            SandboxError: the box is gone.
            EnvError: the environment's own code failed.
        """

    @abc.abstractmethod
    async def grade(self, status: TrajectoryStatus) -> Grade:
        """What the episode was worth, however it ended: called once, after the last `astep`, also when that was cut
        short. Raises EnvError when it cannot be told."""

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Gives up all that the environment holds. Safe to call twice."""

    @property
    def is_broken(self) -> bool:
        """True when the environment cannot play another episode and is to be replaced."""
        return False

    @property
    def has_oracle(self) -> bool:
        """True when `oracle` can tell what a good player would do."""
        return type(self).oracle is not ToolEnv.oracle

    def oracle(self, *, skill: float, rng: np.random.Generator) -> Message:
        """What a player who knows the answer would do next.

        Args:
            skill: the probability of choosing the right tool; otherwise another is chosen at random.
            rng: draws that choice.

        Raises:
            EnvError: the environment has no oracle.
        """
        raise EnvError(f"{type(self).__name__} has no oracle")

    def episode_seed(self, seed: int | None) -> int:
        """The seed of the episode that begins: `seed`, or else a draw from the environment's own stream, which a
        subclass takes at the start of `areset`."""
        if seed is not None:
            return seed
        return int(self.np_random.integers(2**31))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Gymnasium's `reset`, through the background loop. Raises what `areset` does, and EnvError when it takes
        longer than an episode may."""
        super().reset(seed=seed)
        seed = self.episode_seed(seed)
        result = self._wait(self.areset(seed=seed, options=options), "reset")
        observation = text_of(result.messages)
        self._transcript = [observation]
        return observation, copy.deepcopy(dict(result.info))

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Gymnasium's `step`, through the background loop. Raises what `astep` does, EnvError when it takes longer
        than an episode may, and gymnasium's ResetNeeded before the first `reset`."""
        if self._transcript is None:
            raise gymnasium.error.ResetNeeded(f"{type(self).__name__}: call reset before step")
        result, reward, parts = self._wait(self._step_and_grade(message_from_action(action)), "step")
        observation = text_of(result.messages)
        self._transcript += [f"> {action}", observation]
        info = {**copy.deepcopy(dict(result.info)), "events": dict(result.events), **parts}
        return observation, reward, result.terminated, False, info

    async def _step_and_grade(self, message: Message) -> tuple[StepResult, float, dict[str, Any]]:
        result = await self.astep(message)
        if not result.terminated:
            return result, float(result.reward), {}
        grade = await self.grade(TrajectoryStatus.COMPLETED)
        return result, float(grade.reward), {"reward_parts": dict(grade.parts)}

    def render(self) -> str | None:
        """The transcript of the synchronous episode in mode `ansi`; None otherwise."""
        if self.render_mode != "ansi":
            return None
        return "\n".join(self._transcript or [])

    def close(self) -> None:
        """Gymnasium's `close`, through the background loop. Safe to call twice."""
        run_blocking(self.aclose(), timeout_s=self.limits.close_s, what=f"{type(self).__name__}.close")

    def _wait(self, coroutine: Coroutine[Any, Any, _ResultT], method: str) -> _ResultT:
        what = f"{type(self).__name__}.{method}"
        return run_blocking(coroutine, timeout_s=self.limits.episode_s, what=what)

"""What `run_episode` is made of: the limits of each call, whose fault an error is, and the record as it grows."""

import numbers
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from driftgym.agents.base import AgentTurn, Conversation, OutOfTokensError
from driftgym.agents.bounded import DeadlinePassed, EpisodeClock, bounded
from driftgym.agents.generators.traffic import PARKED, Stopwatch
from driftgym.agents.interruption import has_whole_call
from driftgym.config import Limits
from driftgym.envs.base import Grade, ResetResult, StepResult, ToolEnv
from driftgym.envs.spaces import is_scalar_text, scalar_text
from driftgym.errors import EnvError, EpisodeError, GeneratorError, SandboxError
from driftgym.types import MAX_REWARD, Message, Task, ToolCall, Trajectory, TrajectoryStatus, Turn

# Code that keeps its own deadline gets this much more to clean up after it, before it is cancelled.
GRACE_S = 3.0
INTERRUPTED = "interrupted"
"""Event: an answer was interrupted for its length, and went on."""
_MAX_ERROR_CHARS = 8000
_WANTED = f"a number from -{MAX_REWARD:g} to {MAX_REWARD:g} is wanted"
_ResultT = TypeVar("_ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeId:
    """Which episode of a run this is.

    >>> EpisodeId(group_id="g0", member=2, attempt=1).trajectory_id
    'g0-2-1'
    """

    group_id: str
    """The group."""
    member: int
    """Its place within the group, from 0."""
    attempt: int = 0
    """Counts retries, from 0."""

    @property
    def trajectory_id(self) -> str:
        """Unique within a run."""
        return f"{self.group_id}-{self.member}-{self.attempt}"


class EpisodeRecord:
    """Becomes a `Trajectory` when the episode has ended."""

    def __init__(self, episode_id: EpisodeId, task: Task) -> None:
        """Starts now."""
        self.episode_id = episode_id
        self.events: Counter[str] = Counter()
        self._task = task
        self._turns: list[Turn] = []
        self._started_at = time.time()

    def add(self, turn: AgentTurn, step: StepResult | None, *, tool_latency_s: float = 0.0) -> None:
        """Adds a turn; `step` is None when the action was not played, or not to its end."""
        if turn.interrupted is not None:
            self._add_interrupted(turn.interrupted)
        if step is not None:
            self.events.update(step.events)
        self._turns.append(
            Turn(
                new_prompt_token_ids=turn.new_prompt_token_ids,
                completion=turn.completion,
                action=turn.action,
                observation=() if step is None else step.messages,
                reward=0.0 if step is None else float(step.reward),
                tool_latency_s=tool_latency_s,
                rewrites_context=turn.rewrites_context,
            )
        )

    def _add_interrupted(self, turn: AgentTurn) -> None:
        self.events[INTERRUPTED] += 1
        self._turns.append(
            Turn(
                new_prompt_token_ids=turn.new_prompt_token_ids,
                completion=turn.completion,
                action=turn.action,
                rewrites_context=turn.rewrites_context,
                is_interrupted=True,
            )
        )

    def graded(self, status: TrajectoryStatus, grade: Grade) -> Trajectory:
        """The trajectory of an episode that is scored."""
        return self._trajectory(status, reward=float(grade.reward), reward_parts=dict(grade.parts))

    def failed(self, error: BaseException) -> Trajectory:
        """The trajectory of an episode that `error` ended."""
        return self._trajectory(_status_of(error), error=_text_of(error))

    def cancelled(self) -> Trajectory:
        """The trajectory of an episode that was cancelled."""
        return self._trajectory(TrajectoryStatus.CANCELLED, error="cancelled")

    def _trajectory(
        self,
        status: TrajectoryStatus,
        *,
        reward: float | None = None,
        reward_parts: Mapping[str, float] | None = None,
        error: str | None = None,
    ) -> Trajectory:
        return Trajectory(
            trajectory_id=self.episode_id.trajectory_id,
            group_id=self.episode_id.group_id,
            member=self.episode_id.member,
            attempt=self.episode_id.attempt,
            task_id=self._task.task_id,
            turns=tuple(self._turns),
            status=status,
            reward=reward,
            reward_parts=reward_parts or {},
            error=error,
            started_at=self._started_at,
            ended_at=time.time(),
            events=dict(self.events),
        )


async def reset(env: ToolEnv, task: Task, *, limits: Limits) -> tuple[Message, ...]:
    """The first messages. May take as long as the start of a box and one call in it.

    Raises:
        EnvError: the environment's code failed, did not end, or gave nothing to read.
        SandboxError: no box could be had.
    """
    result = await _from_env(
        lambda: env.areset(seed=task.seed, options=dict(task.metadata)),
        ResetResult,
        limit_s=limits.sandbox_start_s + limits.tool_call_s + GRACE_S,
        what="areset",
    )
    messages = _readable(result.messages, what="areset") or task.prompt
    if not messages:
        raise EnvError("areset gave no message, and the task has no prompt")
    return messages


async def generate(
    conversation: Conversation,
    messages: Sequence[Message],
    clock: EpisodeClock,
    *,
    limits: Limits,
    min_policy_version: int,
) -> AgentTurn | None:
    """The agent's next turn, or None when its token budget has no room for one.

    `clock` gets back the time that the request was queued, paused or parked; parked, it does not run out of time.

    Raises:
        GeneratorError: no answer in time, or the agent's own code failed.
    """
    started_s = time.monotonic()
    parked = Stopwatch()
    PARKED.set(parked)
    act = conversation.act(messages, deadline_s=started_s + limits.generation_s, min_policy_version=min_policy_version)
    try:
        turn = await bounded(
            act, limit_s=limits.generation_s + GRACE_S, what="generation", stood_still_s=lambda: parked.seconds
        )
    except OutOfTokensError:
        return None
    except EpisodeError:
        raise
    except DeadlinePassed as error:
        raise GeneratorError(str(error)) from None
    except Exception as error:
        raise GeneratorError("the agent failed") from error
    clock.credit(time.monotonic() - started_s - turn.latency_s)
    return turn


async def step(env: ToolEnv, action: Message, clock: EpisodeClock, *, limits: Limits) -> StepResult | None:
    """The environment's reply, or None when the episode's time ran out before it came.

    May take as long as its calls may, one after the other.

    Raises:
        EnvError: the environment's code failed, did not end, or left the agent with nothing to read.
        SandboxError: the box is gone.
    """
    limit_s = max(1, len(action.tool_calls)) * (limits.tool_call_s + GRACE_S)
    try:
        result = await _from_env(
            lambda: env.astep(action), StepResult, limit_s=min(limit_s, clock.remaining_s), what="astep"
        )
    except DeadlinePassed:
        if clock.remaining_s > 0:
            raise
        return None
    if not result.terminated and not result.messages:
        raise EnvError("astep gave no message and did not end the episode: the agent would act without a reply")
    if not _is_reward(result.reward):
        raise EnvError(f"astep gave the reward {result.reward}; {_WANTED}")
    return replace(result, messages=_readable(result.messages, what="astep"), events=_counts(result.events))


async def grade(env: ToolEnv, status: TrajectoryStatus, *, limits: Limits) -> Grade:
    """What the episode was worth. Raises EnvError, SandboxError or DeadlinePassed when it cannot be told."""
    result = await _from_env(lambda: env.grade(status), Grade, limit_s=limits.grade_s + GRACE_S, what="grade")
    if not _is_reward(result.reward):
        raise EnvError(f"grade gave the reward {result.reward}; {_WANTED}")
    if strange := [f"{name} {part}" for name, part in result.parts.items() if not _is_reward(part)]:
        raise EnvError(f"grade gave the parts {', '.join(strange)}; {_WANTED}")
    return result


def _is_reward(value: float) -> bool:
    return abs(value) <= MAX_REWARD  # a NaN is not


def _counts(events: Mapping[str, int]) -> dict[str, int]:
    """`events` as plain numbers, which the journal can keep. Raises EnvError when they are no counts by name."""
    strange = [
        f"{name!r}: {count!r}"
        for name, count in events.items()
        if not (isinstance(name, str) and is_scalar_text(name) and isinstance(count, numbers.Integral) and count >= 0)
    ]
    if strange:
        raise EnvError(f"astep gave the events {', '.join(strange)}; names with whole numbers from 0 on are wanted")
    return {name: int(count) for name, count in events.items()}


def _readable(messages: Sequence[Message], *, what: str) -> tuple[Message, ...]:
    """`messages`, lone surrogates replaced, which no tokenizer takes. Raises EnvError when they are none."""
    if strange := [type(message).__name__ for message in messages if not isinstance(message, Message)]:
        raise EnvError(f"{what} gave a {strange[0]} as a message")
    return tuple(
        message if is_scalar_text(message.text) else replace(message, content=scalar_text(message.text))
        for message in messages
    )


async def _from_env(
    call: Callable[[], Awaitable[Any]], expected: type[_ResultT], *, limit_s: float, what: str
) -> _ResultT:
    """What an environment's method gave. Whatever it raises and nobody knows is the environment's own error."""

    async def run() -> Any:
        try:
            return await call()
        except SystemExit as error:  # would end the event loop, and every other episode with it
            raise EnvError(f"{what} called sys.exit") from error

    try:
        result = await bounded(run(), limit_s=limit_s, what=what)
    except (EpisodeError, DeadlinePassed):
        raise
    except Exception as error:
        raise EnvError(f"{what} failed") from error
    if not isinstance(result, expected):
        raise EnvError(f"{what} gave a {type(result).__name__}, not a {expected.__name__}")
    return result


def is_cut_short(turn: AgentTurn) -> bool:
    """True when the answer ran out of tokens before it held a whole call: what it says is not to be played."""
    return turn.completion.finish_reason == "length" and not has_whole_call(turn.action)


def with_call_limit(turn: AgentTurn, *, max_calls: int) -> AgentTurn:
    """`turn`, of whose calls those beyond `max_calls` are refused: each is answered by an error."""
    calls = turn.action.tool_calls
    if len(calls) <= max_calls:
        return turn
    refused = (_refused(call, max_calls) for call in calls[max_calls:])
    return replace(turn, action=replace(turn.action, tool_calls=(*calls[:max_calls], *refused)))


def _refused(call: ToolCall, max_calls: int) -> ToolCall:
    return replace(call, arguments=None, parse_error=f"at most {max_calls} calls in one message")


def _status_of(error: BaseException) -> TrajectoryStatus:
    is_infrastructure = isinstance(error, SandboxError | GeneratorError)
    return TrajectoryStatus.INFRA_ERROR if is_infrastructure else TrajectoryStatus.ENV_ERROR


def _text_of(error: BaseException) -> str:
    """The traceback; of a long one, its end."""
    text = "".join(traceback.format_exception(error))
    return text if len(text) <= _MAX_ERROR_CHARS else f"[...]{text[-_MAX_ERROR_CHARS:]}"

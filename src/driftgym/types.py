"""The nouns. One noun, one frozen type, one home.

Shapes: L is the number of tokens of one completion or segment. Token ids and policy versions are int32
arrays, log-probs are float32 arrays, masks are bool arrays; lists of equal length L are checked when the
object is made. Words: a *turn* is one model call with its environment reply, an *episode* is the act and a
`Trajectory` its record, a *policy version* is the number of optimizer steps that those weights have had.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from driftgym.arrays import BoolArray as BoolArray
from driftgym.arrays import Float32Array as Float32Array
from driftgym.arrays import Int32Array as Int32Array
from driftgym.arrays import bool_array as bool_array
from driftgym.arrays import float32_array as float32_array
from driftgym.arrays import int32_array as int32_array

Role = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length", "abort"]
WeightKind = Literal["full", "delta", "lora"]

MAX_REWARD = 1e12
"""The largest absolute value of a reward: what is computed of rewards, in float32 in the end, stays finite, squares and
the norm of the gradient included."""


def _check_equal_lengths(owner: object, *names: str) -> None:
    lengths = {name: len(getattr(owner, name)) for name in names}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{type(owner).__name__}: lists of unequal length {lengths}")


def _set(owner: object, name: str, value: object) -> None:
    """Sets a field of a frozen dataclass while it is being made."""
    object.__setattr__(owner, name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What one episode is about. A group plays the same task several times.

    >>> Task(task_id="lookup-7", env_id="driftgym/Lookup-v0", seed=7).seed
    7
    """

    task_id: str
    """Unique within a run."""
    env_id: str
    """The Gymnasium id of the environment that plays it."""
    prompt: tuple["Message", ...] = ()
    """The first messages, where they are known before `areset`; empty when the environment makes them."""
    seed: int = 0
    """Passed to `areset`: the same seed gives the same world."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Passed to `areset` as `options`: what else the environment needs to know (a level, a repository, ...)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call of a tool, as the policy wrote it.

    `arguments` is None exactly when the call could not be read; `parse_error` then says why, and the tool is
    not run: the agent reads the error in the place of the result.

    >>> ToolCall(call_id="call_0", name="get_age", arguments={"person": "Ann"}).arguments["person"]
    'Ann'
    """

    call_id: str
    """Unique within the episode; the tool message that answers carries it."""
    name: str
    """The tool's name; empty when it could not be read."""
    arguments: Mapping[str, Any] | None
    """The arguments as an object ({} when the policy gave none), or None when they could not be read."""
    parse_error: str | None = None
    """Why the call could not be read; None when it could."""

    def __post_init__(self) -> None:
        if (self.arguments is None) != (self.parse_error is not None):
            raise ValueError("ToolCall: arguments is None exactly when parse_error is given")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """A typed part of a message's content: text.

    >>> TextPart(text="hello").type
    'text'
    """

    text: str
    """The text."""
    type: Literal["text"] = "text"
    """Which part this is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation, in OpenAI's shape.

    >>> Message(role="tool", content="41", tool_call_id="call_0", name="get_age").text
    '41'
    """

    role: Role
    """Who speaks."""
    content: str | tuple[TextPart, ...] = ""
    """What is said, without reasoning and without tool calls."""
    reasoning: str | None = None
    """What the model thought before; None when it did not."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The calls that an assistant message makes, in the order they were written."""
    tool_call_id: str | None = None
    """In a tool message: the call that it answers."""
    name: str | None = None
    """In a tool message: the tool that answers."""

    @property
    def text(self) -> str:
        """The content as one string."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. Training samples with top_p 1, so that the log-probs are those of the full softmax.

    >>> SamplingParams(temperature=0.7, max_tokens=32).top_p
    1.0
    """

    temperature: float = 1.0
    """Divides the logits; 0 means the most likely token, whose log-prob is then that at temperature 1."""
    top_p: float = 1.0
    """Nucleus; 1 turns it off."""
    max_tokens: int = 256
    """At most this many sampled tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """A sampled token among these ends the completion and stays in it."""
    seed: int | None = None
    """Seed of this request's draws; None takes the engine's own stream."""

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.max_tokens < 1:
            raise ValueError(f"SamplingParams out of range: {self}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """What an engine sampled for one request.

    >>> completion = Completion(request_id="r", token_ids=[5, 6], logprobs=[-0.1, -0.2], policy_versions=[3, 5],
    ...                         finish_reason="stop")
    >>> completion.policy_versions.tolist()
    [3, 5]
    """

    request_id: str
    """The request that it answers."""
    token_ids: Int32Array
    """[L] the sampled tokens, the matched stop token included."""
    logprobs: Float32Array
    """[L] the log-prob of each token under the distribution that it was drawn from, temperature included."""
    policy_versions: Int32Array
    """[L] the version of the weights that wrote each token, from the engine's own report."""
    finish_reason: FinishReason
    """`stop`: a stop token was sampled; `length`: the token budget is used up; `abort`: cut short from outside."""
    kv_min_policy_version: int | None = None
    """The oldest version whose KV cache a token rests on, where that is older than the token's own version;
    None when each token rests on KV of its own version, so that re-scoring reproduces its log-prob."""
    latency_s: float = 0.0
    """From sending the request to its answer, in seconds, without the time it was queued or paused."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """What else the engine reported."""

    def __post_init__(self) -> None:
        _set(self, "token_ids", int32_array(self.token_ids))
        _set(self, "logprobs", float32_array(self.logprobs))
        _set(self, "policy_versions", int32_array(self.policy_versions))
        _check_equal_lengths(self, "token_ids", "logprobs", "policy_versions")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """One model call and the environment's reply.

    >>> completion = Completion(request_id="r", token_ids=[5], logprobs=[-0.1], policy_versions=[0],
    ...                         finish_reason="stop")
    >>> Turn(new_prompt_token_ids=[1, 2], completion=completion,
    ...      action=Message(role="assistant", content="hi")).reward
    0.0
    """

    new_prompt_token_ids: Int32Array
    """[P] the prompt tokens that this turn added. The turn's whole prompt is the prompt and the completion of the
    turn before, followed by these; when `rewrites_context` is true it is these alone."""
    completion: Completion
    """What the model sampled."""
    action: Message
    """The completion as a message."""
    observation: tuple[Message, ...] = ()
    """The environment's reply; empty when the episode ended with the action."""
    reward: float = 0.0
    """The reward of this turn; the trajectory's reward is that of the grade."""
    tool_latency_s: float = 0.0
    """Wall time of `env.step`, in seconds."""
    rewrites_context: bool = False
    """True where the prompt does not go on from the turn before: a new `Segment` starts here."""
    is_interrupted: bool = False
    """True where the answer was interrupted for its length: it has no action and no reply of its own. The next turn
    goes on with it: its new prompt tokens are the forced text, its action is the whole answer."""

    def __post_init__(self) -> None:
        _set(self, "new_prompt_token_ids", int32_array(self.new_prompt_token_ids))


class TrajectoryStatus(enum.StrEnum):
    """How an episode ended. See `is_scored`."""

    COMPLETED = "completed"
    TRUNCATED_TURNS = "truncated_turns"
    TRUNCATED_TOKENS = "truncated_tokens"
    TRUNCATED_TIME = "truncated_time"
    ENV_ERROR = "env_error"
    INFRA_ERROR = "infra_error"
    CANCELLED = "cancelled"

    @property
    def is_scored(self) -> bool:
        """True when the reward is the policy's own doing: graded, trained on, part of the baseline."""
        return self in _SCORED


_SCORED = frozenset(
    {
        TrajectoryStatus.COMPLETED,
        TrajectoryStatus.TRUNCATED_TURNS,
        TrajectoryStatus.TRUNCATED_TOKENS,
        TrajectoryStatus.TRUNCATED_TIME,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """The record of one episode.

    >>> trajectory = Trajectory(trajectory_id="g0-0-0", group_id="g0", member=0, attempt=0, task_id="t0", turns=(),
    ...                         status=TrajectoryStatus.COMPLETED, reward=1.0)
    >>> trajectory.status.is_scored
    True
    """

    trajectory_id: str
    """Unique within a run: group, member and attempt."""
    group_id: str
    """The group that it belongs to."""
    member: int
    """Its place within the group, from 0."""
    attempt: int
    """Counts retries, from 0. Of one (group_id, member) exactly one attempt is trained."""
    task_id: str
    """The task that was played."""
    turns: tuple[Turn, ...]
    """What happened."""
    status: TrajectoryStatus
    """How it ended."""
    reward: float | None = None
    """The grade; None when the episode is not scored."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the grade."""
    error: str | None = None
    """What went wrong, with the traceback where there is one; None when nothing did."""
    started_at: float = 0.0
    """Unix time at which the episode started, in seconds."""
    ended_at: float = 0.0
    """Unix time at which it ended, in seconds."""
    events: Mapping[str, int] = field(default_factory=dict)
    """How often each thing happened that the run's summary counts (`tool_timeout`, `unknown_tool`, ...)."""

    def __post_init__(self) -> None:
        if self.status.is_scored != (self.reward is not None):
            raise ValueError(f"Trajectory: a reward exactly when the status is scored, got {self.status} {self.reward}")

    @property
    def num_turns(self) -> int:
        """How many answers it has; one that was interrupted and went on counts once."""
        return sum(not turn.is_interrupted for turn in self.turns)

    @property
    def num_sampled_tokens(self) -> int:
        """How many tokens the model sampled in all turns."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    @property
    def min_policy_version(self) -> int | None:
        """The oldest version that wrote one of its tokens; None when it has none."""
        versions = [int(turn.completion.policy_versions.min()) for turn in self.turns if len(turn.completion.token_ids)]
        return min(versions, default=None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrajectoryGroup:
    """Trajectories of one task: the unit of admission and of the advantage baseline.

    >>> TrajectoryGroup(group_id="g0", task=Task(task_id="t0", env_id="e"), trajectories=()).trajectories
    ()
    """

    group_id: str
    """Unique within a run."""
    task: Task
    """The task that every member played."""
    trajectories: tuple[Trajectory, ...]
    """One per member: the attempt that counts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """One training row: a run of tokens that the model saw as one context.

    >>> segment = Segment(trajectory_id="g0-0-0", segment_index=0, token_ids=[1, 5], loss_mask=[False, True],
    ...                   behaviour_logprobs=[0.0, -0.1], policy_versions=[-1, 3], advantages=[0.0, 0.5])
    >>> int(segment.loss_mask.sum())
    1
    """

    trajectory_id: str
    """The trajectory that it was cut from; those of one trajectory count as one sequence."""
    segment_index: int
    """Its place within the trajectory, from 0."""
    token_ids: Int32Array
    """[L] prompt and sampled tokens, in the order the model saw them."""
    loss_mask: BoolArray
    """[L] true exactly on tokens that the engine sampled."""
    behaviour_logprobs: Float32Array
    """[L] the engine's log-prob of each sampled token; 0 elsewhere."""
    policy_versions: Int32Array
    """[L] the version that wrote each sampled token; -1 elsewhere."""
    advantages: Float32Array
    """[L] the advantage of each sampled token; 0 elsewhere."""
    train_mask: BoolArray = None  # type: ignore[assignment]
    """[L] the part of `loss_mask` that lag rules and objectives leave in; the same as `loss_mask` when not given."""
    exact_mask: BoolArray = None  # type: ignore[assignment]
    """[L] the part of `loss_mask` whose log-probs re-scoring reproduces: false where the token rests on a KV cache
    of an older version than its own; the same as `loss_mask` when not given."""
    group_id: str = ""
    """The group of its trajectory; those of one group answer the same task. Empty: the trajectory is one of its own."""
    reward: float = 0.0
    """The reward of its trajectory."""

    def __post_init__(self) -> None:
        _set(self, "token_ids", int32_array(self.token_ids))
        _set(self, "loss_mask", bool_array(self.loss_mask))
        _set(self, "behaviour_logprobs", float32_array(self.behaviour_logprobs))
        _set(self, "policy_versions", int32_array(self.policy_versions))
        _set(self, "advantages", float32_array(self.advantages))
        for name in ("train_mask", "exact_mask"):
            given = getattr(self, name)
            _set(self, name, self.loss_mask if given is None else bool_array(given))
        _check_equal_lengths(self, "token_ids", "loss_mask", "behaviour_logprobs", "policy_versions")
        _check_equal_lengths(self, "token_ids", "advantages", "train_mask", "exact_mask")
        if (self.train_mask & ~self.loss_mask).any():
            raise ValueError("Segment: train_mask must lie within loss_mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """Weights that the learner published, for generators to take.

    >>> WeightUpdate(policy_version=8, incarnation=1, location="run/weights/8", checksum="sha256:0").kind
    'full'
    """

    policy_version: int
    """The number of optimizer steps that these weights have had."""
    incarnation: int
    """The life of the run that published them: weights of a lost life are recognised and refused."""
    location: str
    """Where they are: for transport `disk` a folder, which for `full` transformers can load; for `tensor` the root of
    the server that has them in its memory already."""
    checksum: str
    """`sha256:` and the digest of the weights file; empty where there is no file."""
    base_policy_version: int | None = None
    """For `delta` and `lora`: the publication that they are put on; None for `full`."""
    kind: WeightKind = "full"
    """What is there: `full` a model, `delta` the tensors that differ from those of the base, `lora` a peft adapter,
    put on the full weights of the base in the place of any adapter before."""
    transport: Literal["disk", "tensor", "nccl"] = "disk"
    """How they travel."""

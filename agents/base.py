"""The contract of an agent: something that answers messages, and keeps the tokens it answered with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from driftgym.envs.tools import ToolSchema
from driftgym.types import Completion, Int32Array, Message


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AgentTurn:
    """What an agent did with the messages it was shown: a `Turn` that has no reply yet.

    >>> completion = Completion(request_id="r", token_ids=[5], logprobs=[-0.1], policy_versions=[0],
    ...                         finish_reason="stop")
    >>> AgentTurn(new_prompt_token_ids=[1], completion=completion, rewrites_context=False,
    ...           action=Message(role="assistant", content="hi")).action.text
    'hi'
    """

    new_prompt_token_ids: Int32Array
    """[P] as in `Turn`."""
    completion: Completion
    """What the model sampled."""
    action: Message
    """The completion as a message; where it was interrupted, all of the answer, the forced text included."""
    rewrites_context: bool
    """As in `Turn`."""
    interrupted: "AgentTurn | None" = None
    """The beginning of the answer, without an action, where it was interrupted for its length: this turn goes on with
    it, and its new prompt tokens are the text that was put after it. None for an answer in one piece."""

    @property
    def latency_s(self) -> float:
        """That of its completion, in seconds; where it was interrupted, of both."""
        before_s = 0.0 if self.interrupted is None else self.interrupted.latency_s
        return before_s + self.completion.latency_s


class OutOfTokensError(Exception):
    """The conversation does not fit the agent's token budget: the episode ends as TRUNCATED_TOKENS."""


class Conversation(Protocol):
    """One episode, seen from the agent."""

    async def act(self, messages: Sequence[Message], *, deadline_s: float, min_policy_version: int = 0) -> AgentTurn:
        """Answers `messages`: the first prompt at first, then each reply of the environment.

        Args:
            messages: what is new.
            deadline_s: on `time.monotonic()`.
            min_policy_version: the tokens are of this version or later.

        Raises:
            OutOfTokensError: the prompt leaves no room for an answer.
            GeneratorError: no generator answers.
        """
        ...


class Agent(Protocol):
    """Plays episodes. One agent serves many conversations at once."""

    def start(self, *, session_id: str, tools: Sequence[ToolSchema]) -> Conversation:
        """A new conversation with `tools` at hand."""
        ...

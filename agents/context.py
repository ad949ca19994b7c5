"""What a conversation holds in tokens, and the prompt that new messages make of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from driftgym.agents.rendering import Renderer
from driftgym.envs.tools import ToolSchema
from driftgym.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The prompt of one turn.

    >>> Prompt(token_ids=[1, 2, 3], new_token_ids=[3], rewrites_context=False).new_token_ids
    [3]
    """

    token_ids: list[int]
    """[P] all of it."""
    new_token_ids: list[int]
    """[N] what this turn added: its end, or all of it where there was none before or it replaces that."""
    rewrites_context: bool
    """True when it does not begin with the prompt and the sampled tokens of the turn before."""


class TokenContext:
    """The messages of a conversation, and the ids of its last prompt and completion as they were sent and sampled."""

    def __init__(self, renderer: Renderer, tools: Sequence[ToolSchema]) -> None:
        """An empty conversation with `tools` at hand."""
        self.tools = tuple(tools)
        self.messages: list[Message] = []
        self.num_turns = 0
        self._renderer = renderer
        self._prompt: list[int] = []
        self._completion: list[int] = []

    def prompt(self, new_messages: Sequence[Message]) -> Prompt:
        """The prompt that asks for an answer to `new_messages`; changes nothing."""
        if not self.num_turns:
            ids = self._renderer.first_prompt(new_messages, self.tools)
            return Prompt(token_ids=ids, new_token_ids=ids, rewrites_context=False)
        bridge = self._renderer.next_prompt(
            prompt_token_ids=self._prompt,
            completion_token_ids=self._completion,
            conversation=self.messages,
            new_messages=new_messages,
            tools=self.tools,
        )
        if bridge is None:
            ids = self._renderer.first_prompt([*self.messages, *new_messages], self.tools)
            return Prompt(token_ids=ids, new_token_ids=ids, rewrites_context=True)
        whole = [*self._prompt, *self._completion, *bridge]
        return Prompt(token_ids=whole, new_token_ids=bridge, rewrites_context=False)

    def add_turn(
        self, prompt: Prompt, new_messages: Sequence[Message], completion_ids: list[int], action: Message
    ) -> None:
        """Takes up a turn: `prompt` was made of `new_messages`, and was answered by `completion_ids`.

        `completion_ids` are the sampled tokens and, where the answer was interrupted, the forced ones among them.
        """
        self._prompt = prompt.token_ids
        self._completion = completion_ids
        self.messages += [*new_messages, action]
        self.num_turns += 1

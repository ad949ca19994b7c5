"""Answers that think too long are interrupted: a fixed text is put after what was sampled, and the model goes on.

The text is encoded once, on its own, and put in the context as ids: what was sampled before it stays as it was. A tag
in it that ends thinking is put there only where thinking is to be ended.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from driftgym.agents.parsing import THINK_CLOSE, THINK_OPEN
from driftgym.agents.rendering import Renderer
from driftgym.errors import ConfigError
from driftgym.types import Completion, Message

_PROMPT_TAIL = 8  # tokens of a prompt in which a template opens a thinking block that the answer goes on with


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerBudget:
    """How many tokens one answer may have.

    >>> AnswerBudget(first=256).rest
    0
    """

    first: int
    """Sampled tokens until the answer is interrupted, or, where `rest` is 0, until it is cut."""
    rest: int = 0
    """Sampled tokens after the interruption at most; 0 when the answer is not to be interrupted."""

    def is_used_up(self, completion: Completion) -> bool:
        """True when `completion`, which may have `first` tokens, ended because it had them."""
        return completion.finish_reason == "length" and len(completion.token_ids) >= self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """When an answer is interrupted, and by what.

    >>> Interruption(after_tokens=4, token_ids=(7, 8)).budget(max_tokens=10, room=20)
    AnswerBudget(first=4, rest=6)
    >>> Interruption(after_tokens=4, token_ids=(7, 8)).budget(max_tokens=10, room=8)
    AnswerBudget(first=4, rest=2)
    >>> Interruption(after_tokens=4, token_ids=(7, 8)).budget(max_tokens=10, room=6)
    AnswerBudget(first=6, rest=0)
    """

    after_tokens: int
    """Sampled tokens of an answer before it."""
    token_ids: tuple[int, ...]
    """[N] what is put in the context then."""
    outside_token_ids: tuple[int, ...] | None = None
    """[M] the same for an answer that is not thinking at that moment; None: as `token_ids`."""

    def forced(self, *, is_thinking: bool) -> tuple[int, ...]:
        """What is put in the context of an answer."""
        outside = self.token_ids if self.outside_token_ids is None else self.outside_token_ids
        return self.token_ids if is_thinking else outside

    def budget(self, *, max_tokens: int, room: int) -> AnswerBudget:
        """The budget of an answer; it is not interrupted where no token would fit after the interruption.

        Args:
            max_tokens: sampled tokens at most.
            room: tokens that fit in the context, the forced ones included.
        """
        num_forced = max(len(self.token_ids), len(self.outside_token_ids or ()))
        rest = min(max_tokens - self.after_tokens, room - self.after_tokens - num_forced)
        if rest < 1:
            return AnswerBudget(first=min(max_tokens, room))
        return AnswerBudget(first=self.after_tokens, rest=rest)


def make_interruption(renderer: Renderer, *, after_tokens: int, text: str, max_context_tokens: int) -> Interruption:
    """The interruption by `text`, whose tags of thinking and calls become the tokens that the model has for them.

    Where no thinking block is open, the first tag that closes one is left out, with the space before it.

    Raises:
        ConfigError: the text would end the turn, or never leaves room for an answer.
    """
    ids = tuple(renderer.encode_text(text))
    before, tag, after = text.partition(THINK_CLOSE)
    outside = tuple(renderer.encode_text(before.rstrip() + after)) if tag else None
    if not ids:
        raise ConfigError(f"agent.interrupt_text: {text!r} has no tokens; give a text that the model reads")
    if {*ids, *(outside or ())} & set(renderer.stop_token_ids):
        raise ConfigError(f"agent.interrupt_text: {text!r} holds a token that ends a turn; leave it out")
    if (shortest := 1 + after_tokens + len(ids) + 1) > max_context_tokens:
        raise ConfigError(
            f"agent.interrupt_text: with its {len(ids)} tokens and agent.interrupt_after_tokens {after_tokens}, no "
            f"answer could follow within agent.max_context_tokens {max_context_tokens}; that takes at least {shortest}"
        )
    return Interruption(after_tokens=after_tokens, token_ids=ids, outside_token_ids=outside)


def is_thinking(
    renderer: Renderer, action: Message, *, prompt_token_ids: Sequence[int], sampled_token_ids: Sequence[int]
) -> bool:
    """True when an answer, as far as it goes, ends within a thinking block, which it or its prompt has opened.

    Args:
        renderer: of the model.
        action: what the renderer reads in the answer so far.
        prompt_token_ids: that it follows.
        sampled_token_ids: the answer so far.
    """
    opening, closing = renderer.encode_text(THINK_OPEN), renderer.encode_text(THINK_CLOSE)
    if len(opening) == 1 and len(closing) == 1:
        tail = itertools.takewhile(
            lambda token_id: token_id not in renderer.stop_token_ids, reversed(prompt_token_ids[-_PROMPT_TAIL:])
        )
        tags = (token_id for token_id in (*reversed(sampled_token_ids), *tail) if token_id in (*opening, *closing))
        return next(tags, None) == opening[0]
    # Tags in several tokens may have grown together with what is beside them: they are seen in the text alone.
    is_all_thought = bool(action.reasoning) and not action.text.strip() and not action.tool_calls
    return is_all_thought and list(sampled_token_ids[-len(closing) :]) != closing


def has_whole_call(action: Message) -> bool:
    """True when `action` makes a call that could be read."""
    return any(call.parse_error is None for call in action.tool_calls)

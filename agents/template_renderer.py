"""Any model that carries a chat template: the template is rendered, and its prefix stability checked each turn.

What the template does not take is written in words that it does take: tool schemas go into the system message,
calls into the assistant's text, results into a user message.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from driftgym.agents.chat import (
    call_json,
    openai_message,
    openai_tool,
    readable_calls,
    special_token_escaper,
    tool_signature,
)
from driftgym.agents.library_renderer import cut_after_stop, ends_in_reasoning
from driftgym.agents.parsing import CALL_CLOSE, CALL_OPEN, THINK_CLOSE, THINK_OPEN, read_message
from driftgym.envs.tools import ToolSchema
from driftgym.errors import ConfigError
from driftgym.types import Message, ToolCall

_LOG = logging.getLogger(__name__)
_TOOL_ROLE = re.compile(r"""['"]tool['"]""")
_PROBE_TOOL = ToolSchema(name="probe_tool", description="Probe.", parameters={"type": "object", "properties": {}})
_USER = Message(role="user", content="ping")
_ANSWER = Message(role="assistant", content="pong")
_CALL = Message(
    role="assistant", tool_calls=(ToolCall(call_id="call_0", name="probe_tool", arguments={"key": "value"}),)
)


class TemplateRenderer:
    """Implements `driftgym.agents.rendering.Renderer` with the tokenizer's own chat template."""

    def __init__(self, tokenizer: Any) -> None:
        """Probes the template: what it takes, how it closes a turn, whether it keeps what it has rendered.

        Raises:
            ConfigError: there is no chat template, or it cannot render a plain conversation.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError("renderer 'template': the model's tokenizer has no chat template")
        self._tokenizer = tokenizer
        self._escape = special_token_escaper(tokenizer.all_special_tokens)
        source = str(tokenizer.chat_template)
        self._takes_reasoning = "reasoning_content" in source
        # A template that passes any role through would show the model a role that it was never trained on.
        self._takes_tool_role = _TOOL_ROLE.search(source) is not None
        self._takes_calls = True
        self._takes_tools = True
        self._takes_tools = self._shows("probe_tool", [_USER], tools=[_PROBE_TOOL])
        self._takes_calls = self._shows("probe_tool", [_USER, _CALL])
        self._close = self._probe_close()
        self._stop_token_ids = self._find_stop_token_ids()
        self._is_stable = self._probe_stability()
        if not self._is_stable:
            _LOG.warning("the chat template rewrites earlier turns: every turn starts a new segment")

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a turn."""
        return self._stop_token_ids

    @property
    def is_stable(self) -> bool:
        """False when the template rewrites a plain conversation as it grows: no turn is bridged then."""
        return self._is_stable

    def first_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """See `Renderer.first_prompt`."""
        return self._encode(self._text(messages, tools, add_generation_prompt=True))

    def next_prompt(
        self,
        *,
        prompt_token_ids: Sequence[int],
        completion_token_ids: Sequence[int],
        conversation: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSchema],
    ) -> list[int] | None:
        """See `Renderer.next_prompt`; None where the template renders the turns so far in another way now."""
        if not self._is_stable:
            return None
        before = self._text(conversation[:-1], tools, add_generation_prompt=True)
        now = self._text(conversation, tools, add_generation_prompt=False)
        after = self._text([*conversation, *new_messages], tools, add_generation_prompt=True)
        if not (now.startswith(before) and now.endswith(self._close) and after.startswith(now)):
            return None
        ids = self._encode(self._close + after[len(now) :])
        if len(completion_token_ids) and completion_token_ids[-1] in self._stop_token_ids:
            return ids[1:]  # the turn's end is among the sampled tokens
        return ids

    def parse(self, token_ids: Sequence[int], *, prompt_token_ids: Sequence[int], first_call_index: int) -> Message:
        """See `Renderer.parse`."""
        ids = list(token_ids)
        if ids and ids[-1] in self._stop_token_ids:
            ids.pop()
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        is_open = ends_in_reasoning(self._tokenizer, prompt_token_ids)
        return read_message(text, reasoning_is_open=is_open, first_call_index=first_call_index)

    def encode_text(self, text: str) -> list[int]:
        """See `Renderer.encode_text`."""
        return self._encode(text)

    def encode_action(self, conversation: Sequence[Message], action: Message, tools: Sequence[ToolSchema]) -> list[int]:
        """See `Renderer.encode_action`."""
        before = self._text(conversation, tools, add_generation_prompt=True)
        now = self._text([*conversation, action], tools, add_generation_prompt=False)
        if not now.startswith(before):
            raise ValueError("this model's template does not render an action after its own generation prompt")
        return cut_after_stop(self._encode(now[len(before) :]), self._stop_token_ids)

    def _text(self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, add_generation_prompt: bool) -> str:
        if tools and not self._takes_tools:
            messages = _with_tools_in_system(messages, tools)
        entries = [self._entry(message) for message in messages]
        given = [openai_tool(tool) for tool in tools] if tools and self._takes_tools else None
        text: str = self._tokenizer.apply_chat_template(
            entries, tools=given, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return text

    def _entry(self, message: Message) -> dict[str, Any]:
        if message.role == "tool" and not self._takes_tool_role:
            text = f"<tool_response>{message.text}</tool_response>"
            return openai_message(Message(role="user", content=text), escape=self._escape)
        if message.role == "assistant":
            message = self._in_words(message)
        return openai_message(message, escape=self._escape)

    def _in_words(self, message: Message) -> Message:
        """`message` with the fields that the template does not take written into its text."""
        text = message.text
        if message.reasoning and not self._takes_reasoning:
            text = f"{THINK_OPEN}\n{message.reasoning}\n{THINK_CLOSE}\n\n{text}"
            message = replace(message, reasoning=None)
        if message.tool_calls and not self._takes_calls:
            calls = (f"{CALL_OPEN}{call_json(call, compact=False)}{CALL_CLOSE}" for call in readable_calls(message))
            text = "\n".join(part for part in (text, *calls) if part)
            message = replace(message, tool_calls=())
        return replace(message, content=text)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _shows(self, needle: str, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> bool:
        try:
            return needle in self._text(messages, tools, add_generation_prompt=False)
        except Exception:  # a template's own refusal: jinja errors of many kinds
            return False

    def _probe_close(self) -> str:
        """What the template writes after an assistant's text."""
        try:
            text = self._text([_USER, _ANSWER], (), add_generation_prompt=False)
        except Exception as error:
            raise ConfigError(f"the chat template cannot render a plain conversation: {error}") from None
        _, found, close = text.rpartition(_ANSWER.text)
        if not found:
            raise ConfigError("the chat template drops what the assistant says")
        return close

    def _find_stop_token_ids(self) -> tuple[int, ...]:
        special = set(self._tokenizer.all_special_ids)
        candidates = [*self._encode(self._close)[:1], self._tokenizer.eos_token_id]
        stops = [token for token in candidates if token is not None and token in special]
        if not stops:
            raise ConfigError("the chat template ends a turn with no special token, and the tokenizer has no eos token")
        return tuple(dict.fromkeys(stops))

    def _probe_stability(self) -> bool:
        """True when a plain conversation only grows, and a turn's end is a stop token."""
        ends = self._encode(self._close)[:1]
        if not ends or ends[0] not in self._stop_token_ids:
            return False
        result = Message(role="tool", content="41", tool_call_id="call_0", name="probe_tool")
        prompt = self._text([_USER], (), add_generation_prompt=True)
        called = self._text([_USER, _CALL], (), add_generation_prompt=False)
        replied = self._text([_USER, _CALL, result], (), add_generation_prompt=True)
        return called.startswith(prompt) and called.endswith(self._close) and replied.startswith(called)


def _with_tools_in_system(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[Message]:
    """`messages` with the tools told in the first system message."""
    lines = [f"- {tool_signature(tool, with_types=True)}: {tool.description}" for tool in tools]
    example = f'{CALL_OPEN}{{"name": "...", "arguments": {{...}}}}{CALL_CLOSE}'
    told = "\n".join(("You can call these tools:", *lines, f"To call a tool, write {example}"))
    if messages and messages[0].role == "system":
        return [Message(role="system", content=f"{messages[0].text}\n\n{told}"), *messages[1:]]
    return [Message(role="system", content=told), *messages]

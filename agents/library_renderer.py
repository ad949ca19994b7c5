"""Known model families, through the library `renderers`, which mirrors each family's own chat template."""

import difflib
from collections.abc import Sequence
from typing import Any

from driftgym.agents.chat import openai_message, openai_tool, special_token_escaper
from driftgym.agents.parsing import THINK_OPEN, call_id, is_in_code, read_message, without_half_pairs
from driftgym.envs.arguments import read_arguments
from driftgym.envs.tools import ToolSchema
from driftgym.errors import ConfigError
from driftgym.types import Message, ToolCall

# Families whose calls are Hermes' JSON in <tool_call> tags: read as text, code fences respected.
_HERMES = frozenset({"qwen3", "qwen3-vl"})
# As many as the tag and the line ends after it may take, where the tag is not a token of its own.
_TAIL_TOKENS = 16
_NOT_FAMILIES = frozenset({"auto", "default", "custom"})


def library_renderer_names() -> list[str]:
    """The families that the library knows, sorted."""
    from renderers import base

    base._populate_registry()  # the library fills its registry on first use and has no public way to ask
    return sorted(set(base.RENDERER_REGISTRY) - _NOT_FAMILIES)


class LibraryRenderer:
    """Implements `driftgym.agents.rendering.Renderer` for the family `name`."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        """Raises ConfigError when the library has no such family, or the tokenizer lacks its special tokens."""
        from renderers import config_from_name, create_renderer

        known = library_renderer_names()
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
            raise ConfigError(f"renderer {name!r}: unknown; auto, compact, template, or a family; {hint}")
        try:
            self._library = create_renderer(tokenizer, config_from_name(name))
        except Exception as error:  # the library has no error of its own: a token or a file that it wants is missing
            raise ConfigError(f"renderer {name!r} does not fit this model's tokenizer: {error}") from None
        self._tokenizer = tokenizer
        self._is_hermes = name in _HERMES
        self._escape = special_token_escaper(tokenizer.all_special_tokens)
        self._stop_token_ids = tuple(self._library.get_stop_token_ids())

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a turn."""
        return self._stop_token_ids

    def first_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """See `Renderer.first_prompt`."""
        return self._render(messages, tools, add_generation_prompt=True)

    def next_prompt(
        self,
        *,
        prompt_token_ids: Sequence[int],
        completion_token_ids: Sequence[int],
        conversation: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSchema],
    ) -> list[int] | None:
        """See `Renderer.next_prompt`."""
        context = [*prompt_token_ids, *completion_token_ids]
        bridged = self._library.bridge_to_next_turn(
            list(prompt_token_ids),
            list(completion_token_ids),
            [openai_message(message, escape=self._escape) for message in new_messages],
            tools=self._tools(tools),
        )
        if bridged is None or list(bridged.token_ids[: len(context)]) != context:
            return None
        return list(bridged.token_ids[len(context) :])

    def parse(self, token_ids: Sequence[int], *, prompt_token_ids: Sequence[int], first_call_index: int) -> Message:
        """See `Renderer.parse`."""
        ids = list(token_ids)
        if ids and ids[-1] in self._stop_token_ids:
            ids.pop()
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        if not self._is_hermes:
            return self._parse_by_library(ids, text, prompt_token_ids, first_call_index)
        is_open = ends_in_reasoning(self._tokenizer, prompt_token_ids)
        return read_message(text, reasoning_is_open=is_open, first_call_index=first_call_index)

    def encode_text(self, text: str) -> list[int]:
        """See `Renderer.encode_text`."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_action(self, conversation: Sequence[Message], action: Message, tools: Sequence[ToolSchema]) -> list[int]:
        """See `Renderer.encode_action`."""
        prompt = self._render(conversation, tools, add_generation_prompt=True)
        whole = self._render([*conversation, action], tools, add_generation_prompt=False)
        if whole[: len(prompt)] != prompt:
            raise ValueError("this model's template does not render an action after its own generation prompt")
        return cut_after_stop(whole[len(prompt) :], self._stop_token_ids)

    def _render(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, add_generation_prompt: bool
    ) -> list[int]:
        entries = [openai_message(message, escape=self._escape) for message in messages]
        ids = self._library.render_ids(entries, tools=self._tools(tools), add_generation_prompt=add_generation_prompt)
        return list(ids)

    def _tools(self, tools: Sequence[ToolSchema]) -> list[dict[str, Any]] | None:
        return [openai_tool(tool) for tool in tools] or None

    def _parse_by_library(
        self, ids: list[int], text: str, prompt_token_ids: Sequence[int], first_call_index: int
    ) -> Message:
        """The library's reading, less the calls that stand in code."""
        parsed = self._library.parse_response(ids, prompt_ids=list(prompt_token_ids))
        attempts = [call for call in parsed.tool_calls if not self._is_in_code(call, ids, text)]
        calls = [_tool_call(call, first_call_index + offset) for offset, call in enumerate(attempts)]
        content = parsed.content
        if parsed.tool_calls and not attempts:
            content = text.rpartition("</think>")[2].lstrip("\n") if parsed.reasoning_content else text
        return Message(
            role="assistant",
            content=content,
            reasoning=parsed.reasoning_content or None,
            tool_calls=tuple(calls),
        )

    def _is_in_code(self, call: Any, ids: list[int], text: str) -> bool:
        if call.token_span is None:
            position = text.find(call.raw)
        else:
            position = len(self._tokenizer.decode(ids[: call.token_span[0]], skip_special_tokens=False))
        return position >= 0 and is_in_code(text, position)


def ends_in_reasoning(tokenizer: Any, prompt_token_ids: Sequence[int]) -> bool:
    """True when the prompt's last tokens open a thinking block that the completion goes on with."""
    tail: str = tokenizer.decode(list(prompt_token_ids[-_TAIL_TOKENS:]), skip_special_tokens=False)
    return tail.rstrip().endswith(THINK_OPEN)


def cut_after_stop(token_ids: list[int], stop_token_ids: Sequence[int]) -> list[int]:
    """`token_ids` up to the last stop token, which a model samples; the separator after it is the template's."""
    for index in range(len(token_ids) - 1, -1, -1):
        if token_ids[index] in stop_token_ids:
            return token_ids[: index + 1]
    return token_ids


def _tool_call(parsed: Any, index: int) -> ToolCall:
    identifier = parsed.id or call_id(index)
    error = None if parsed.status == "ok" else f"the call cannot be read: {parsed.status.replace('_', ' ')}"
    arguments = None
    if error is None:
        try:
            arguments = read_arguments(parsed.arguments)
        except ValueError as reason:
            error = str(reason)
    return without_half_pairs(
        ToolCall(call_id=identifier, name=parsed.name or "", arguments=arguments, parse_error=error)
    )

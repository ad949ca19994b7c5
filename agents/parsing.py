"""Reads a completion's text: reasoning is split off first, then tool calls are looked for outside of code.

The format is Hermes': `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, after an optional
`<think>...</think>`. A call that cannot be read becomes a `ToolCall` with a `parse_error`, and its text stays in
the message's content, so that nothing of what the model wrote is lost when the conversation is rendered anew.
"""

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from driftgym.envs.arguments import JSON_DECODER, json_type, read_arguments
from driftgym.types import Message, ToolCall

CALL_OPEN = "<tool_call>"
CALL_CLOSE = "</tool_call>"
THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"

# What starts a region: a fence on a line of its own, a run of back-ticks, a thinking block, a call.
_MARK = re.compile(
    rf"(?P<fence>^ {{0,3}}(?P<fence_run>`{{3,}}(?=[^`\n]*$)|~{{3,}})[^\n]*)"
    rf"|(?P<ticks>`+)|(?P<think>{THINK_OPEN})|(?P<call>{CALL_OPEN})",
    re.MULTILINE,
)
_CALL_KEYS = frozenset({"name", "arguments", "id", "type"})
_SPACE = re.compile(r"\s*")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Region:
    """A stretch of text that is not plain prose.

    >>> _Region(kind="code", start=0, end=7).kind
    'code'
    """

    kind: str
    """`code`, `think` or `call`."""
    start: int
    """Where it begins, in characters."""
    end: int
    """Where it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """A completion's reasoning and what follows it.

    >>> _Split(reasoning=None, rest="hi").rest
    'hi'
    """

    reasoning: str | None
    """What was thought; None when nothing was."""
    rest: str
    """The text after it."""


def read_message(text: str, *, reasoning_is_open: bool, first_call_index: int) -> Message:
    """The assistant message that `text` holds.

    Args:
        text: a completion without its stop token.
        reasoning_is_open: the prompt ended inside a thinking block.
        first_call_index: the number of calls that the episode has had; call ids count on from it.
    """
    split = _split_reasoning(text, is_open=reasoning_is_open)
    reasoning = [split.reasoning] if split.reasoning else []
    kept: list[str] = []
    calls: list[ToolCall] = []
    position = 0
    for region in _regions(split.rest):
        block = split.rest[region.start : region.end]
        if region.kind == "code":
            continue
        kept.append(split.rest[position : region.start])
        position = region.end
        if region.kind == "think":
            reasoning.append(block[len(THINK_OPEN) : -len(THINK_CLOSE)].strip())
            continue
        found = _read_calls(block, first_call_index + len(calls))
        calls.extend(found)
        if any(call.parse_error for call in found):
            kept.append(block)
    content = "".join((*kept, split.rest[position:]))
    return Message(
        role="assistant",
        content=content.strip() if calls else content,
        reasoning="\n".join(part for part in reasoning if part) or None,
        tool_calls=tuple(calls),
    )


def is_in_code(text: str, position: int) -> bool:
    """True when the character at `position` of `text` lies in a fenced block or a code span."""
    return any(
        region.kind == "code" and region.start <= position < region.end for region in _regions(text, stop_at=position)
    )


def _split_reasoning(text: str, *, is_open: bool) -> _Split:
    parts: list[str] = []
    rest = text
    if is_open:
        thought, _, rest = rest.partition(THINK_CLOSE)
        parts.append(thought.strip().removeprefix(THINK_OPEN))
    while rest.lstrip().startswith(THINK_OPEN):
        thought, _, rest = rest.lstrip()[len(THINK_OPEN) :].partition(THINK_CLOSE)
        parts.append(thought)
    if not parts:
        return _Split(reasoning=None, rest=text)
    reasoning = "\n".join(part.strip() for part in parts if part.strip())
    return _Split(reasoning=reasoning or None, rest=rest.lstrip("\n"))


def _regions(text: str, *, stop_at: int | None = None) -> Iterator[_Region]:
    """Code, thinking blocks and calls, in order; none lies within another."""
    position = 0
    last_think_close = text.rfind(THINK_CLOSE)  # looked for once, however many blocks are never closed
    while (mark := _MARK.search(text, position)) is not None:
        if stop_at is not None and mark.start() > stop_at:
            return
        region = _region_at(text, mark, last_think_close)
        position = mark.end() if region is None else region.end
        if region is not None:
            yield region


def _region_at(text: str, mark: re.Match[str], last_think_close: int) -> _Region | None:
    """The region that `mark` opens, or None when it opens none (a lone back-tick, the bare word of a tag)."""
    if mark["fence"]:
        end: int | None = _end_of_fence(text, mark)
        kind = "code"
    elif mark["ticks"]:
        end = _end_of_ticks(text, mark)
        kind = "code"
    elif mark["think"]:
        is_closed = mark.end() <= last_think_close
        end = text.find(THINK_CLOSE, mark.end()) + len(THINK_CLOSE) if is_closed else None
        kind = "think"
    else:
        end = _end_of_call(text, mark.end())
        kind = "call"
    return None if end is None else _Region(kind=kind, start=mark.start(), end=end)


def _end_of_fence(text: str, mark: re.Match[str]) -> int:
    """A fence ends at a line of at least as many of its marks, which a call may follow at once, or with the text."""
    run = mark["fence_run"]
    closing = re.compile(rf"^ {{0,3}}{re.escape(run[0])}{{{len(run)},}}[ \t]*(?:$|(?={CALL_OPEN}))", re.MULTILINE)
    close = closing.search(text, mark.end())
    return len(text) if close is None else close.end()


def _end_of_ticks(text: str, mark: re.Match[str]) -> int | None:
    """A code span ends at an equal run of back-ticks: on the same line, or, for three and more, anywhere.

    One that would end in the middle of a call's JSON is none: the back-tick there is the call's own.
    """
    run = mark["ticks"]
    close = re.compile(rf"(?<!`){run}(?!`)").search(text, mark.end())
    if close is None or (len(run) < 3 and "\n" in text[mark.end() : close.start()]):
        return None
    last_call = text.rfind(CALL_OPEN, mark.end(), close.start())
    if last_call >= 0 and _end_of_json(text, last_call + len(CALL_OPEN)) > close.start():
        return None
    return close.end()


def _end_of_call(text: str, start: int) -> int:
    """Where the call whose body starts at `start` ends: after its closing tag, before the next call, or with the text.

    A body that is JSON is skipped as such first, since a string in it may hold a tag.
    """
    search_from = _end_of_json(text, start)
    following = text.find(CALL_OPEN, search_from)
    limit = len(text) if following < 0 else following
    close = text.find(CALL_CLOSE, search_from, limit)
    return limit if close < 0 else close + len(CALL_CLOSE)


def _end_of_json(text: str, start: int) -> int:
    """Where the JSON object or list at `start`, or after the space there, ends; `start` when there is none."""
    body = _SPACE.match(text, start)
    assert body is not None  # it may be empty
    if not text.startswith(("{", "["), body.end()):
        return start
    with contextlib.suppress(ValueError, RecursionError):
        return JSON_DECODER.raw_decode(text, body.end())[1]
    return start


def _read_calls(block: str, first_index: int) -> list[ToolCall]:
    """The calls of one block: one object, or a list of objects."""
    body = block[len(CALL_OPEN) :].removesuffix(CALL_CLOSE).strip()
    if not block.endswith(CALL_CLOSE):
        return [_broken_call(first_index, f"the call was cut off before {CALL_CLOSE}")]
    try:
        value = JSON_DECODER.decode(body)
    except ValueError as error:
        return [_broken_call(first_index, f"the call is not JSON: {error}")]
    except RecursionError:
        return [_broken_call(first_index, "the call is nested too deeply")]
    items = value if isinstance(value, list) and value else [value]
    calls = [_read_call(item, first_index + offset) for offset, item in enumerate(items)]
    return [without_half_pairs(call) for call in calls] if _SURROGATE_ESCAPE.search(body) else calls


def without_half_pairs(call: ToolCall) -> ToolCall:
    """`call`, or one that cannot be read where it holds half of a surrogate pair, which no tokenizer takes."""
    try:
        json.dumps([call.name, call.arguments, call.parse_error], ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return ToolCall(
            call_id=call.call_id, name="", arguments=None, parse_error="the call holds half of a surrogate pair"
        )
    return call


def _read_call(item: object, index: int) -> ToolCall:
    if not isinstance(item, dict):
        return _broken_call(index, f"a call is a JSON object with name and arguments, got {json_type(item)}")
    name = item.get("name")
    if not isinstance(name, str) or not name:
        return _broken_call(index, "the call has no name")
    if "arguments" not in item and (strange := sorted(item.keys() - _CALL_KEYS)):
        return _broken_call(index, f"the call has {strange[0][:80]!r} in the place of 'arguments'", name=name)
    try:
        arguments = read_arguments(item.get("arguments"))
    except ValueError as error:
        return _broken_call(index, str(error), name=name)
    return ToolCall(call_id=call_id(index), name=name, arguments=arguments)


def _broken_call(index: int, reason: str, *, name: str = "") -> ToolCall:
    return ToolCall(call_id=call_id(index), name=name, arguments=None, parse_error=reason)


def call_id(index: int) -> str:
    """The id of an episode's call number `index`."""
    return f"call_{index}"

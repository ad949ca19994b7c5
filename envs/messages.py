"""Messages as text and as OpenAI's JSON, for the synchronous side of an environment."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from driftgym.envs.arguments import read_arguments
from driftgym.types import Message, ToolCall


def message_from_action(action: str) -> Message:
    """The assistant's message that a synchronous action stands for.

    A JSON object that has `"role": "assistant"` or a list `tool_calls` is read as a message of OpenAI's shape;
    anything else is what the assistant says. Arguments may be an object or a JSON string; calls that cannot be
    read become calls with a `parse_error`.

    >>> message_from_action("41").text
    '41'
    >>> call = {"id": "c0", "function": {"name": "get_age", "arguments": '{"person": "Ann"}'}}
    >>> message_from_action(json.dumps({"role": "assistant", "tool_calls": [call]})).tool_calls[0].name
    'get_age'
    """
    shape = _message_object(action)
    if shape is None:
        return Message(role="assistant", content=action)
    content = shape.get("content")
    calls = shape.get("tool_calls") or []
    return Message(
        role="assistant",
        content=content if isinstance(content, str) else "",
        tool_calls=tuple(_tool_call(call, index) for index, call in enumerate(calls)),
    )


def _message_object(action: str) -> dict[str, Any] | None:
    if not action.lstrip().startswith("{"):
        return None
    try:
        value = json.loads(action)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("tool_calls") or [], list):
        return None
    return value if value.get("role") == "assistant" or value.get("tool_calls") else None


def _tool_call(call: Any, index: int) -> ToolCall:
    fields = call if isinstance(call, dict) else {}
    function = fields.get("function")
    function = function if isinstance(function, dict) else {}
    call_id, name = fields.get("id"), function.get("name")
    arguments: Mapping[str, Any] | None = None
    error: str | None = None
    try:
        if not isinstance(name, str):
            raise ValueError("the call has no function name")
        arguments = read_arguments(function.get("arguments"))
    except ValueError as unreadable:
        error = str(unreadable)
    return ToolCall(
        call_id=call_id if isinstance(call_id, str) else f"call_{index}",
        name=name if isinstance(name, str) else "",
        arguments=arguments,
        parse_error=error,
    )


def text_of(messages: Iterable[Message]) -> str:
    """The texts of `messages`, an empty line between each: a synchronous observation.

    >>> text_of([Message(role="system", content="Be short."), Message(role="user", content="Who?")])
    'Be short.\\n\\nWho?'
    """
    return "\n\n".join(message.text for message in messages)

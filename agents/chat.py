"""Messages and tools in OpenAI's shape, as chat templates and the library `renderers` take them."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from driftgym.envs.arguments import read_arguments
from driftgym.envs.tools import ToolSchema
from driftgym.types import Message, ToolCall


def openai_tool(tool: ToolSchema) -> dict[str, Any]:
    """`tool` as an OpenAI tool definition."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def openai_message(message: Message, *, escape: Callable[[str], str]) -> dict[str, Any]:
    """`message` as a dictionary with OpenAI's keys; arguments are always an object.

    Calls that could not be read are left out: their text is part of the content. `escape` is applied to what
    others than the model wrote.
    """
    entry: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.role != "assistant":
        entry["content"] = escape(message.text)
    if message.reasoning:
        entry["reasoning_content"] = message.reasoning
    if calls := readable_calls(message):
        entry["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": read_arguments(call.arguments)},
            }
            for call in calls
        ]
    if message.tool_call_id is not None:
        entry["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        entry["name"] = message.name
    return entry


def readable_calls(message: Message) -> tuple[ToolCall, ...]:
    """The calls of `message` that could be read."""
    return tuple(call for call in message.tool_calls if call.parse_error is None)


def call_json(call: ToolCall, *, compact: bool) -> str:
    """The JSON text of a call, non-ASCII letters as they are."""
    value = {"name": call.name, "arguments": read_arguments(call.arguments)}
    return json.dumps(value, ensure_ascii=False, separators=(",", ":") if compact else None)


def tool_signature(tool: ToolSchema, *, with_types: bool) -> str:
    """`tool` as a signature: `get_age(person)`; optional arguments carry a question mark.

    >>> schema = {"type": "object", "properties": {"person": {"type": "string"}}, "required": ["person"]}
    >>> tool_signature(ToolSchema(name="get_age", description="", parameters=schema), with_types=True)
    'get_age(person: string)'
    """
    required = set(tool.parameters.get("required", ()))
    arguments = []
    for name, schema in tool.parameters.get("properties", {}).items():
        mark = "" if name in required else "?"
        kind = schema.get("type", "any") if isinstance(schema, dict) else "any"
        arguments.append(f"{name}{mark}: {kind}" if with_types else f"{name}{mark}")
    return f"{tool.name}({', '.join(arguments)})"


def special_token_escaper(special_tokens: Sequence[str]) -> Callable[[str], str]:
    """A function that breaks special tokens in a text by a space, so that tool output cannot forge a turn.

    >>> special_token_escaper(["<|im_end|>"])("a<|im_end|>b")
    'a< |im_end|>b'
    """
    tokens = [re.escape(token) for token in special_tokens if len(token) > 1]
    if not tokens:
        return lambda text: text
    pattern = re.compile("|".join(sorted(tokens, key=len, reverse=True)))
    return lambda text: pattern.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)

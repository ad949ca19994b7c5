"""Tools: their schemas, the checking of arguments, and the running of calls, each under its deadline.

Whose fault decides what becomes of a call. A mistake of the agent's (unreadable call, unknown tool, bad arguments,
`PolicyError` from the tool) is answered by a tool message that says so. A tool that runs past its deadline is
answered by a message that says that. An error of the tool's own code is an EnvError, and a lost box a SandboxError:
both end the episode.
"""

import asyncio
import functools
import json
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import fastjsonschema

from driftgym.config import Limits
from driftgym.envs.spaces import scalar_text
from driftgym.errors import ConfigError, DriftgymError, EnvError
from driftgym.types import Message, ToolCall

DEFAULT_MAX_OUTPUT_BYTES = 16 * 1024
# A tool that keeps its own deadline gets this much more to clean up after it, before it is cancelled.
_GRACE_S = 2.0
_MAX_NAMED_CHARS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSchema:
    """A tool as the model is told of it.

    >>> ToolSchema(name="get_age", description="Age in years.", parameters={"type": "object"}).name
    'get_age'
    """

    name: str
    """Unique within the environment."""
    description: str
    """One sentence for the model."""
    parameters: Mapping[str, Any]
    """JSON schema of the arguments; an object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutput:
    """What a tool gave, where some of it was dropped on the way.

    >>> ToolOutput(text="xxx", num_dropped_bytes=97).num_dropped_bytes
    97
    """

    text: str
    """What is left of it."""
    num_dropped_bytes: int = 0
    """How many bytes were dropped after it."""


class PolicyError(Exception):
    """A mistake of the agent's that a tool finds while it runs: the message becomes the agent's observation."""


class ToolRun(Protocol):
    """What a tool does. `Tool` says how it is called."""

    def __call__(self, arguments: Mapping[str, Any], *, timeout_s: float) -> Awaitable[str | ToolOutput]:
        """The output for `arguments`, which have been checked against the schema.

        Raises:
            TimeoutError: it did not end within `timeout_s`.
            PolicyError: the arguments make no sense.
            SandboxError: the box is gone.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool: what the model is told, and what is run.

    >>> async def get_age(arguments, *, timeout_s):
    ...     return "41"
    >>> schema = ToolSchema(name="get_age", description="Age in years.", parameters={"type": "object"})
    >>> Tool(schema=schema, run=get_age).schema.name
    'get_age'
    """

    schema: ToolSchema
    """What the model is told. Arguments that `properties` does not name are refused, unless
    `additionalProperties` allows them."""
    run: ToolRun
    """What a call runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolReplies:
    """The answers to the calls of one message.

    >>> ToolReplies(messages=(), events={"tool_timeout": 1}).events["tool_timeout"]
    1
    """

    messages: tuple[Message, ...]
    """One tool message per call, in the order of the calls, with its call id."""
    events: Mapping[str, int]
    """As in `StepResult.events`."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What one call is answered.

    >>> _Answer("41").events
    ()
    """

    text: str
    events: tuple[str, ...] = ()


class Toolset:
    """The tools of an environment, by name."""

    def __init__(
        self,
        tools: Sequence[Tool],
        *,
        limits: Limits,
        max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES,
    ) -> None:
        """A set of tools.

        Args:
            tools: each of another name.
            limits: `tool_call_s` bounds each call.
            max_output_bytes: longer output is cut, and says so.

        Raises:
            ConfigError: two tools have one name, or a schema is not valid.
        """
        self._tools = {tool.schema.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            raise ConfigError(f"tools: names must differ, got {[tool.schema.name for tool in tools]}")
        self._checks = {tool.schema.name: argument_check(tool.schema) for tool in tools}
        self._timeout_s = limits.tool_call_s
        self._max_output_bytes = max_output_bytes
        self.schemas: tuple[ToolSchema, ...] = tuple(tool.schema for tool in tools)

    async def run(self, calls: Sequence[ToolCall]) -> ToolReplies:
        """Runs `calls` one after the other. Waits for at most `tool_call_s` each, and two seconds to clean up.

        Raises:
            EnvError: a tool's own code failed; the message holds its traceback.
            SandboxError: the box is gone.
        """
        events: Counter[str] = Counter()
        messages = []
        for call in calls:
            answer = await self._answer(call)
            events.update(answer.events)
            messages.append(
                Message(
                    role="tool",
                    content=scalar_text(answer.text),
                    tool_call_id=call.call_id,
                    name=scalar_text(call.name) or None,
                )
            )
        return ToolReplies(messages=tuple(messages), events=dict(events))

    async def _answer(self, call: ToolCall) -> _Answer:
        if call.arguments is None:
            return _Answer(f"error: {call.parse_error}", ("policy_error",))
        if call.name not in self._tools:
            known = ", ".join(self._tools) or "none"
            text = f"error: unknown tool {_shortened(call.name)!r}; known: {known}"
            return _Answer(text, ("policy_error", "unknown_tool"))
        problem = self._checks[call.name](call.arguments)
        if problem is not None:
            return _Answer(f"error: {problem}", ("policy_error",))
        return await self._run(self._tools[call.name], call.arguments)

    async def _run(self, tool: Tool, arguments: Mapping[str, Any]) -> _Answer:
        try:
            async with asyncio.timeout(self._timeout_s + _GRACE_S):
                output = await tool.run(arguments, timeout_s=self._timeout_s)
        except TimeoutError:
            return _Answer(f"error: timed out after {self._timeout_s:g} s", ("tool_timeout",))
        except PolicyError as error:
            return self._bounded(ToolOutput(text=f"error: {error}"), "policy_error")
        except DriftgymError:
            raise
        except (Exception, SystemExit) as error:  # a tool that exits must not take the run along
            raise EnvError(f"tool {tool.schema.name} failed\n{traceback.format_exc()}") from error
        if isinstance(output, str):
            output = ToolOutput(text=output)
        if not isinstance(output, ToolOutput):
            raise EnvError(f"tool {tool.schema.name}: must return a str or a ToolOutput, not {type(output).__name__}")
        return self._bounded(output)

    def _bounded(self, output: ToolOutput, *events: str) -> _Answer:
        encoded = output.text.encode("utf-8", "replace")
        num_dropped_bytes = output.num_dropped_bytes + max(0, len(encoded) - self._max_output_bytes)
        if not num_dropped_bytes:
            return _Answer(output.text, events)
        kept = encoded[: self._max_output_bytes].decode("utf-8", "ignore")
        return _Answer(f"{kept}\n[output cut: {num_dropped_bytes} bytes more]", (*events, "tool_output_truncated"))


def argument_check(schema: ToolSchema) -> Callable[[Mapping[str, Any]], str | None]:
    """A function that says in one line what is wrong with a call's arguments, or None when nothing is.

    Raises:
        ConfigError: `schema.parameters` is not a valid JSON schema of an object.
    """
    try:
        text = json.dumps(dict(schema.parameters), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"tool {schema.name}: parameters are not JSON: {error}") from None
    try:
        validate = _compiled(text)
    except Exception as error:  # whatever the compiler makes of a schema that is none
        raise ConfigError(f"tool {schema.name}: parameters are not a JSON schema of an object: {error}") from None

    def check(arguments: Mapping[str, Any]) -> str | None:
        try:
            validate(dict(arguments))
        except fastjsonschema.JsonSchemaValueException as error:
            return _problem(error, arguments)
        except (ArithmeticError, ValueError, RecursionError) as error:  # as of an infinite number, or a deep nest
            return f"arguments cannot be checked: {error}"
        return None

    return check


@functools.lru_cache(maxsize=1024)
def _compiled(schema_text: str) -> Callable[[Mapping[str, Any]], Any]:
    parameters = json.loads(schema_text)
    if parameters.get("type") != "object":
        raise ValueError("its type must be 'object'")
    strict = {"additionalProperties": False, **parameters}
    compiled: Callable[[Mapping[str, Any]], Any] = fastjsonschema.compile(
        strict, handlers={"http": _refuse_remote, "https": _refuse_remote}, use_default=False
    )
    return compiled


def _refuse_remote(uri: str) -> Any:
    raise ValueError(f"it refers to {uri}, which is not fetched")


def _problem(error: fastjsonschema.JsonSchemaValueException, arguments: Mapping[str, Any]) -> str:
    at_top = len(error.path) == 1
    if at_top and error.rule == "required":
        missing = [name for name in error.rule_definition if name not in arguments]
        return f"missing argument {', '.join(map(repr, missing))}"
    if at_top and error.rule == "additionalProperties":
        known = error.definition.get("properties", {})
        unknown = sorted(_shortened(name) for name in arguments if name not in known)
        return f"unknown argument {', '.join(map(repr, unknown))}; known: {', '.join(known) or 'none'}"
    return f"argument {_shortened(error.message.removeprefix('data').removeprefix('.'))}"


def _shortened(text: str) -> str:
    """What the agent wrote is named, not echoed whole."""
    return text if len(text) <= _MAX_NAMED_CHARS else text[:_MAX_NAMED_CHARS] + "..."

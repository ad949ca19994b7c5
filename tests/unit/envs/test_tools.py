import asyncio

import pytest

from driftgym.config import Limits
from driftgym.envs.tools import PolicyError, Tool, ToolOutput, ToolSchema, Toolset, argument_check
from driftgym.errors import ConfigError, EnvError, SandboxError
from driftgym.types import ToolCall

_ADD = ToolSchema(
    name="add",
    description="Adds.",
    parameters={
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
)
_ANYTHING = {"type": "object", "additionalProperties": True}


class _Adder:
    def __init__(self):
        self.num_runs = 0

    async def __call__(self, arguments, *, timeout_s):
        self.num_runs += 1
        return str(arguments["a"] + arguments["b"])


def _call(name="add", arguments=None, *, call_id="c0", parse_error=None):
    return ToolCall(call_id=call_id, name=name, arguments=arguments, parse_error=parse_error)


def _toolset(run, *, max_output_bytes=100, tool_call_s=10.0):
    schema = ToolSchema(name="tool", description="Does it.", parameters=_ANYTHING)
    return Toolset(
        [Tool(schema=schema, run=run)], limits=Limits(tool_call_s=tool_call_s), max_output_bytes=max_output_bytes
    )


async def _reply(run, **settings):
    replies = await _toolset(run, **settings).run([_call("tool", {})])
    return replies.messages[0].text, replies.events


async def test_good_and_bad_calls_in_one_message_are_answered_in_order():
    adder = _Adder()
    toolset = Toolset([Tool(schema=_ADD, run=adder)], limits=Limits())
    replies = await toolset.run(
        [
            _call(arguments={"a": 1, "b": 2}, call_id="x"),
            _call(parse_error="arguments are not JSON: line 1", call_id="y"),
            _call(parse_error="arguments must be a JSON object, not list", call_id="z"),
        ]
    )
    assert [message.tool_call_id for message in replies.messages] == ["x", "y", "z"]
    assert [message.role for message in replies.messages] == ["tool"] * 3
    assert replies.messages[0].text == "3"
    assert "not JSON" in replies.messages[1].text
    assert "object" in replies.messages[2].text
    assert adder.num_runs == 1
    assert replies.events == {"policy_error": 2}


async def test_unknown_tool_is_named_with_the_known_ones():
    adder = _Adder()
    replies = await Toolset([Tool(schema=_ADD, run=adder)], limits=Limits()).run([_call("read", {}, call_id="r")])
    (message,) = replies.messages
    assert message.tool_call_id == "r"
    assert "'read'" in message.text
    assert "add" in message.text
    assert replies.events == {"policy_error": 1, "unknown_tool": 1}
    assert adder.num_runs == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "missing argument 'a', 'b'"),
        ({"a": 1}, "missing argument 'b'"),
        ({"a": 1, "b": 2, "c": 3}, "unknown argument 'c'; known: a, b"),
        ({"a": "1", "b": 2}, "argument a must be integer"),
        ({"a": True, "b": 2}, "argument a must be integer"),
        ({"a": None, "b": 2}, "argument a must be integer"),
    ],
)
async def test_bad_arguments_are_told(arguments, said):
    adder = _Adder()
    replies = await Toolset([Tool(schema=_ADD, run=adder)], limits=Limits()).run([_call(arguments=arguments)])
    assert said in replies.messages[0].text
    assert replies.events == {"policy_error": 1}
    assert adder.num_runs == 0


def test_nested_arguments_are_checked():
    schema = ToolSchema(
        name="t",
        description="d",
        parameters={
            "type": "object",
            "properties": {
                "names": {"type": "array", "items": {"type": "string"}, "minItems": 1},
                "mode": {"enum": ["r", "w"]},
            },
        },
    )
    check = argument_check(schema)
    assert check({"names": ["a"], "mode": "r"}) is None
    assert "names[0] must be string" in check({"names": [1]})
    assert "names must contain at least 1" in check({"names": []})
    assert "mode" in check({"mode": "x"})


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"type": "string"},
        {"type": "object", "properties": 3},
        {"type": "object", "properties": {"a": {"type": "no such type"}}},
        {"type": "object", "properties": {"a": {"$ref": "http://example.org/x.json"}}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}},
        {"type": "object", "x": object()},
    ],
)
def test_bad_schemas_are_refused(parameters):
    with pytest.raises(ConfigError, match="tool t: parameters"):
        argument_check(ToolSchema(name="t", description="d", parameters=parameters))


def test_two_tools_of_one_name_are_refused():
    tool = Tool(schema=_ADD, run=_Adder())
    with pytest.raises(ConfigError, match="names must differ"):
        Toolset([tool, tool], limits=Limits())


async def test_a_tool_that_ignores_its_deadline_is_cut():
    async def hang(arguments, *, timeout_s):
        await asyncio.sleep(3600)

    async with asyncio.timeout(10):
        text, events = await _reply(hang, tool_call_s=0.05)
    assert text == "error: timed out after 0.05 s"
    assert events == {"tool_timeout": 1}


async def test_a_tool_that_keeps_its_deadline_says_so():
    async def late(arguments, *, timeout_s):
        raise TimeoutError

    assert await _reply(late, tool_call_s=3) == ("error: timed out after 3 s", {"tool_timeout": 1})


@pytest.mark.parametrize(("size", "is_cut"), [(99, False), (100, False), (101, True), (10**6, True)])
async def test_output_is_bounded(size, is_cut):
    async def flood(arguments, *, timeout_s):
        return "x" * size

    text, events = await _reply(flood, max_output_bytes=100)
    if is_cut:
        assert text == "x" * 100 + f"\n[output cut: {size - 100} bytes more]"
        assert events == {"tool_output_truncated": 1}
    else:
        assert text == "x" * size
        assert events == {}


async def test_output_is_not_cut_within_a_character():
    async def speak(arguments, *, timeout_s):
        return "é" * 60

    text, _ = await _reply(speak, max_output_bytes=101)
    assert text == "é" * 50 + "\n[output cut: 19 bytes more]"


async def test_what_was_dropped_in_the_box_counts():
    async def flood(arguments, *, timeout_s):
        return ToolOutput(text="x" * 100, num_dropped_bytes=900)

    text, events = await _reply(flood, max_output_bytes=100)
    assert text.endswith("[output cut: 900 bytes more]")
    assert events == {"tool_output_truncated": 1}


async def test_lone_surrogates_do_not_get_through():
    async def speak(arguments, *, timeout_s):
        return "a\ud800"

    text, _ = await _reply(speak)
    assert text == "a\N{REPLACEMENT CHARACTER}"
    replies = await _toolset(speak).run([_call("\ud800", {})])
    replies.messages[0].text.encode()


async def test_a_mistake_that_the_tool_finds_is_told():
    async def picky(arguments, *, timeout_s):
        raise PolicyError("no such person: Zed")

    assert await _reply(picky) == ("error: no such person: Zed", {"policy_error": 1})


async def test_an_error_of_the_tool_is_an_env_error_with_its_traceback():
    async def broken(arguments, *, timeout_s):
        return {}["nothing"]

    with pytest.raises(EnvError, match=r"tool tool failed\n(.|\n)*KeyError: 'nothing'"):
        await _toolset(broken).run([_call("tool", {})])


async def test_a_tool_that_exits_is_an_env_error_and_not_the_end_of_the_run():
    async def leave(arguments, *, timeout_s):
        raise SystemExit(3)

    with pytest.raises(EnvError, match="SystemExit: 3"):
        await _toolset(leave).run([_call("tool", {})])


@pytest.mark.parametrize("output", [None, 3, b"x", {"text": "x"}])
async def test_a_tool_that_returns_no_text_is_an_env_error(output):
    async def odd(arguments, *, timeout_s):
        return output

    with pytest.raises(EnvError, match=f"tool tool: must return a str or a ToolOutput, not {type(output).__name__}"):
        await _toolset(odd).run([_call("tool", {})])


def _nest(depth):
    nest = {}
    for _ in range(depth):
        nest = {"a": nest}
    return nest


@pytest.mark.parametrize(
    ("argument", "arguments"),
    [
        ({"type": "number", "multipleOf": 0.5}, {"a": float("inf")}),
        ({"type": "number", "multipleOf": 0.5}, {"a": float("nan")}),
        ({"type": "number", "multipleOf": 0.5}, {"a": 10**400}),
        ({"$ref": "#"}, _nest(5000)),
    ],
    ids=["infinite", "nan", "huge", "deep"],
)
async def test_arguments_that_break_the_check_are_the_agents_mistake(argument, arguments):
    adder = _Adder()
    schema = ToolSchema(name="t", description="d", parameters={"type": "object", "properties": {"a": argument}})
    replies = await Toolset([Tool(schema=schema, run=adder)], limits=Limits()).run([_call("t", arguments)])
    assert replies.messages[0].text.startswith("error: arguments cannot be checked")
    assert replies.events == {"policy_error": 1}
    assert adder.num_runs == 0


async def test_a_mistake_that_the_tool_finds_is_bounded_too():
    async def picky(arguments, *, timeout_s):
        raise PolicyError("x" * 1000)

    text, events = await _reply(picky, max_output_bytes=100)
    assert len(text) < 200
    assert events == {"policy_error": 1, "tool_output_truncated": 1}


async def test_a_lost_box_is_nobodys_observation():
    async def lost(arguments, *, timeout_s):
        raise SandboxError("gone")

    with pytest.raises(SandboxError):
        await _toolset(lost).run([_call("tool", {})])


async def test_the_agents_words_are_not_echoed_at_length():
    replies = await _toolset(_Adder()).run([_call("x" * 10_000, {})])
    assert len(replies.messages[0].text) < 300

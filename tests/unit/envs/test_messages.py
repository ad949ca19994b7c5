import json

import pytest

from driftgym.envs.messages import message_from_action, text_of


@pytest.mark.parametrize(
    "text", ["41", "", "{", '{"a": 1}', '{"tool_calls": 3}', "[1]", '{"role": "user", "content": "x"}', "{" * 100_000]
)
def test_what_is_no_message_is_what_the_assistant_says(text):
    message = message_from_action(text)
    assert message.role == "assistant"
    assert message.text == text
    assert message.tool_calls == ()


def test_openai_message():
    calls = [
        {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
        {"id": "b", "type": "function", "function": {"name": "add", "arguments": {"q": 'Zürich "HB"'}}},
    ]
    message = message_from_action(json.dumps({"role": "assistant", "content": None, "tool_calls": calls}))
    assert message.text == ""
    assert [call.call_id for call in message.tool_calls] == ["a", "b"]
    assert message.tool_calls[0].arguments == {"a": 1}
    assert message.tool_calls[1].arguments == {"q": 'Zürich "HB"'}


@pytest.mark.parametrize("call", [None, 3, {}, {"function": None}, {"function": {"name": 3}}])
def test_nonsense_calls_become_parse_errors(call):
    (read,) = message_from_action(json.dumps({"role": "assistant", "tool_calls": [call]})).tool_calls
    assert read.parse_error
    assert read.arguments is None
    assert read.call_id == "call_0"


def test_text_of_nothing_is_empty():
    assert text_of(()) == ""

import json

import pytest

from driftgym.agents.parsing import is_in_code, read_message
from driftgym.types import Message


def read(text: str, *, is_open: bool = False, first: int = 0) -> Message:
    return read_message(text, reasoning_is_open=is_open, first_call_index=first)


def call(name: str, arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}</tool_call>"


def test_a_draft_in_the_thinking_block_is_no_call() -> None:
    message = read(f"<think>maybe {call('pay', {'eur': 900})}? no, less.</think>{call('pay', {'eur': 9})}")
    assert [(each.name, each.arguments) for each in message.tool_calls] == [("pay", {"eur": 9})]
    assert message.reasoning is not None
    assert "900" in message.reasoning
    assert message.content == ""


def test_a_thinking_block_may_mention_the_tag() -> None:
    message = read("<think>I write <tool_call> next, I think.</think>It is 4.")
    assert message.tool_calls == ()
    assert message.content == "It is 4."


def test_reasoning_that_the_prompt_opened_ends_at_its_close() -> None:
    message = read(f"or {call('pay', {'eur': 1})}\n</think>\n\nDone.", is_open=True)
    assert message.tool_calls == ()
    assert message.content == "Done."


@pytest.mark.parametrize("text", ["<think>never closed <tool_call>", "<think>"])
def test_reasoning_that_is_not_closed_is_all_reasoning(text: str) -> None:
    message = read(text)
    assert message.tool_calls == ()
    assert message.content == ""


def test_several_thinking_blocks_hold_no_call() -> None:
    draft = call("pay", {"eur": 7})
    message = read(f"<think>a {draft}</think><think>b</think>So. <think>{draft}</think>{call('pay', {'eur': 9})}")
    assert [each.arguments for each in message.tool_calls] == [{"eur": 9}]
    assert message.content == "So."


def test_one_bad_call_does_not_take_its_siblings_down() -> None:
    text = (
        '<tool_call>{"name":"add","arguments":{"a":1,"b":2}}</tool_call>'
        '<tool_call>{"name":"add","arguments":{"a":1,,}}</tool_call>'
        '<tool_call>{"name":"add","arguments":[1,2]}</tool_call>'
    )
    first, second, third = read(text, first=5).tool_calls
    assert first.arguments == {"a": 1, "b": 2}
    assert second.arguments is None
    assert second.parse_error is not None
    assert "not JSON" in second.parse_error
    assert third.name == "add"
    assert third.parse_error == "arguments must be a JSON object, got a list"
    assert [first.call_id, second.call_id, third.call_id] == ["call_5", "call_6", "call_7"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("null", "got null"),
        ("[]", "got a list"),
        ('"x"', "got a string"),
        ("7", "got a number"),
        ('{"arguments":{}}', "no name"),
        ('{"name":"","arguments":{}}', "no name"),
        ('{"name":3}', "no name"),
        ('{"name":"add","arguments":"x"}', "arguments are not JSON"),
        ('{"name":"add","arguments":"[1]"}', "got a list"),
        ('{"name":"add","arguments":true}', "got a boolean"),
        ('{"name":"add","arguments":{"a":NaN}}', "NaN"),
        ('{"name":"add","arguments":{"a":1e400}}', "out of range"),
        ('{"name":"add","parameters":{"a":1}}', "'parameters' in the place of 'arguments'"),
        ('{"name":"add","a":1,"b":2}', "'a' in the place of 'arguments'"),
        ('{"name":"add","arguments":{"a":-Infinity}}', "Infinity"),
        ('{"name":"add","arguments":"{\\"a\\": NaN}"}', "NaN"),
        ('{"name":"add","arguments":"\\"{}\\""}', "got a string"),
        ('{"name":"add","arguments":{"a":"\\ud800"}}', "surrogate"),
        ('{"name":"add","arguments":"{\\"a\\":\\"\\\\ud800\\"}"}', "surrogate"),
        ('{"name":"\\ud800","arguments":{}}', "surrogate"),
        ('{"name":"add","arguments":{"a":"x\ny"}}', "control character"),
        ("{'name':'add','arguments':{}}", "not JSON"),
        ('{"name":"add","arguments":{"a":1,}}', "not JSON"),
        ('{"name":"add"},{"name":"add"}', "not JSON"),
        ('{"type":"function","function":{"name":"add","arguments":{}}}', "no name"),
        ("{}", "no name"),
        ("[" * 100_000, "nested"),
        ('{"name":"add","arguments":{"a":' + "9" * 5000 + "}}", "not JSON"),
        ("", "not JSON"),
        ('{"name":"add"} and more', "not JSON"),
    ],
)
def test_what_cannot_be_read_is_a_call_with_a_reason_and_stays_in_the_content(body: str, reason: str) -> None:
    text = f"<tool_call>{body}</tool_call>"
    message = read(text)
    (broken,) = message.tool_calls
    assert broken.arguments is None
    assert reason in str(broken.parse_error)
    assert message.content == text


def test_a_call_that_is_cut_off_is_broken() -> None:
    (broken,) = read('Let me see. <tool_call>{"name":"add","argum').tool_calls
    assert "cut off" in str(broken.parse_error)
    (unclosed,) = read('<tool_call>{"name":"add","arguments":{}}').tool_calls
    assert "cut off" in str(unclosed.parse_error)


def test_a_broken_call_ends_where_the_next_begins() -> None:
    broken, good = read(f'<tool_call>{{"name":"add", <tool_call>{call("add", {"a": 1})[11:]}').tool_calls
    assert broken.parse_error is not None
    assert good.arguments == {"a": 1}


@pytest.mark.parametrize("arguments", [None, "", {}, "{}"])
def test_no_arguments_are_an_empty_object(arguments: object) -> None:
    (given,) = read(call("now", arguments)).tool_calls
    assert given.arguments == {}
    (absent,) = read('<tool_call>{"name":"now"}</tool_call>').tool_calls
    assert absent.arguments == {}


def test_arguments_may_be_the_json_text_of_an_object() -> None:
    (given,) = read(call("find", '{"q":"Zürich \\"HB\\""}')).tool_calls
    assert given.arguments == {"q": 'Zürich "HB"'}


def test_any_text_in_arguments_survives() -> None:
    arguments = {"город": "Łódź", "emoji": "🧪", "raw": "\\u00e9 stays literal", "tag": "</tool_call> <tool_call>"}
    (given,) = read(call("say", arguments)).tool_calls
    assert given.arguments == arguments


def test_escapes_of_whole_letters_are_read() -> None:
    (given,) = read('<tool_call>{"name":"say","arguments":{"t":"\\ud83e\\uddea \\u00e9 \\/"}}</tool_call>').tool_calls
    assert given.arguments == {"t": "🧪 é /"}


def test_a_call_may_be_spread_over_lines() -> None:
    body = json.dumps({"name": "add", "arguments": {"a": [1, {"b": None}]}}, indent=2)
    for text in (
        f"<tool_call>\n{body}\n</tool_call>",
        f"  <tool_call>\r\n{body}\r\n\t</tool_call>\n",
        f"\ufeff{call('x', {})}",
    ):
        (given,) = read(text).tool_calls
        assert given.parse_error is None
    assert read(f"<tool_call>\n{body}\n</tool_call>").content == ""


def test_arguments_may_be_huge() -> None:
    (given,) = read(call("say", {"text": "x" * 2_000_000})).tool_calls
    assert given.arguments is not None
    assert len(given.arguments["text"]) == 2_000_000


def test_tags_that_are_doubled_make_one_call_and_an_error() -> None:
    broken, good = read(f"<tool_call>{call('add', {'a': 1})}</tool_call>").tool_calls
    assert (broken.arguments, good.arguments) == (None, {"a": 1})
    (again,) = read(f"{call('add', {'a': 1})}</tool_call>").tool_calls
    assert again.arguments == {"a": 1}


def test_the_same_call_twice_is_two_calls() -> None:
    first, second = read(call("add", {"a": 1}) * 2, first=3).tool_calls
    assert (first.call_id, second.call_id) == ("call_3", "call_4")
    assert first.arguments == second.arguments


def test_tags_of_thinking_within_arguments_are_the_call_s_own() -> None:
    arguments = {"text": "<think>a</think> </think>"}
    for before in ("", "<think>b</think>\n\n", "So: "):
        (given,) = read(before + call("say", arguments)).tool_calls
        assert given.arguments == arguments


def test_a_call_right_after_a_fence_counts() -> None:
    (given,) = read(f"```python\nx = 1\n```{call('run', {'code': 'x'})}").tool_calls
    assert given.arguments == {"code": "x"}


@pytest.mark.parametrize(
    "text", ["<tool_call>" * 5000, "x<think>" * 5000, '<tool_call>{"' * 5000, "<tool_call>[1," * 5000, "`x`` " * 5000]
)
def test_an_answer_that_repeats_itself_is_read(text: str) -> None:
    assert all(each.parse_error for each in read(text).tool_calls)


def test_a_list_of_objects_is_several_calls() -> None:
    text = '<tool_call>[{"name": "add", "arguments": {"a": 1}}, 3]</tool_call>'
    first, second = read(text).tool_calls
    assert first.arguments == {"a": 1}
    assert "got a number" in str(second.parse_error)


@pytest.mark.parametrize(
    "text",
    [
        'Done.\n```json\n{"name":"demo-pkg","version":"2.1.0"}\n```\n',
        f"Write it so:\n```\n{call('pay', {'eur': 9})}\n```\nThat is all.",
        f"> ```\n> {call('pay', {'eur': 9})}\n> ```",
        f"- so:\n  ```json\n  {call('pay', {'eur': 9})}\n  ```\n- done",
        '```tool_call\n{"name": "pay", "arguments": {"eur": 9}}\n```',
        '{"name": "pay", "arguments": {"eur": 9}}',
        f"~~~~ text\n{call('pay', {'eur': 9})}\n~~~\nstill code\n~~~~",
        f"```\n{call('pay', {'eur': 9})}",
        f"The form is `{call('pay', {'eur': 9})}`, on one line.",
        f"The form is ```{call('pay', {'eur': 9})}``` here.",
        "Put it between `<tool_call>` and `</tool_call>`.",
        "   Answer with spaces, and a lone ` tick. \n",
        "The <think> tag, on its own.",
        "",
    ],
)
def test_code_and_prose_hold_no_call_and_are_left_as_they_are(text: str) -> None:
    message = read(text)
    assert message.tool_calls == ()
    assert message.content == text
    assert message.reasoning is None


def test_a_call_after_code_counts() -> None:
    message = read(f"```\n{call('pay', {'eur': 1})}\n```\n{call('pay', {'eur': 2})}")
    assert [each.arguments for each in message.tool_calls] == [{"eur": 2}]
    assert "```" in message.text


def test_ticks_within_arguments_open_no_code() -> None:
    message = read(call("run", {"code": "`a`\n```\nx"}) + call("run", {"code": "b"}))
    assert [each.arguments for each in message.tool_calls] == [{"code": "`a`\n```\nx"}, {"code": "b"}]


def test_a_stray_tick_swallows_no_call() -> None:
    message = read(f"Use a ` here.\n{call('pay', {'eur': 2})}\nand a ` there.")
    assert len(message.tool_calls) == 1


def test_a_back_tick_within_a_call_closes_no_code() -> None:
    (given,) = read(f"It`s so: {call('say', {'text': 'a`b'})}").tool_calls
    assert given.arguments == {"text": "a`b"}
    first, second = read(f"A ` here {call('say', {'text': 'x'})} {call('say', {'text': 'a`b'})}").tool_calls
    assert (first.arguments, second.arguments) == ({"text": "x"}, {"text": "a`b"})


def test_a_call_may_say_its_own_id_and_type() -> None:
    (given,) = read('<tool_call>{"id":"x","type":"function","name":"now"}</tool_call>').tool_calls
    assert (given.call_id, given.arguments) == ("call_0", {})


def test_a_position_in_code_is_known() -> None:
    text = "a `b` c\n```\nd\n```\ne"
    assert [is_in_code(text, text.index(letter)) for letter in "abcde"] == [False, True, False, True, False]

"""The arguments of a call: JSON, read strictly, every character kept."""

import json

import pytest

from driftgym.envs.arguments import read_arguments


@pytest.mark.parametrize("raw", [None, "", "  ", "{}", {}])
def test_no_arguments_are_an_empty_object(raw):
    assert read_arguments(raw) == {}


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ('{"a":1,,}', "not JSON"),
        ("[1,2]", "got a list"),
        ('"x"', "got a string"),
        ("null", "got null"),
        ("3", "got a number"),
        ("[" * 100_000, "not JSON"),
        ('{"a": NaN}', "NaN is not a JSON value"),
        ('{"a": 1e999}', "out of range"),
        ([1], "got a list"),
        (True, "got a boolean"),
    ],
)
def test_unreadable_arguments_say_why(raw, told):
    with pytest.raises(ValueError, match=told):
        read_arguments(raw)


def test_arguments_keep_their_characters():
    arguments = {"город": "Łódź", "emoji": "🧪", "raw": "\\u00e9 stays literal"}
    assert read_arguments(json.dumps(arguments)) == arguments
    assert read_arguments(json.dumps(arguments, ensure_ascii=False)) == arguments

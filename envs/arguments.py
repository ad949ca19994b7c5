"""The arguments of a tool call as a model wrote them: JSON, read strictly."""

import json
import math
from typing import Any


def read_arguments(value: object) -> dict[str, Any]:
    """A call's arguments as an object: from an object, from the JSON text of one, {} from None and from "".

    >>> read_arguments('{"person": "Ann"}'), read_arguments(None)
    ({'person': 'Ann'}, {})

    Raises:
        ValueError: it is none of these; the message is for the agent to read.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    if isinstance(value, str):
        try:
            value = JSON_DECODER.decode(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"arguments are not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"arguments must be a JSON object, got {json_type(value)}")
    return value


def json_type(value: object) -> str:
    """What JSON calls a value of this type.

    >>> json_type([1])
    'a list'
    """
    names = {"list": "a list", "str": "a string", "int": "a number", "float": "a number", "bool": "a boolean"}
    return names.get(type(value).__name__, "null" if value is None else "an object")


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON value")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:80]} is out of range")
    return value


JSON_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
"""Refuses what Python reads and JSON does not know: NaN, infinities, numbers that would become one."""

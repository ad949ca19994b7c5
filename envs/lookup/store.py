"""The worlds of Lookup: people, their attributes, and a question whose words do not name the tool that answers it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from driftgym.envs.tools import ToolSchema

Level = Literal["one_call", "two_calls"]
Wording = Literal["oblique", "plain"]
Fault = Literal["hang", "raise", "flood"]

NAMES = (
    "Ada", "Amy", "Ana", "Ben", "Bob", "Cem", "Dan", "Eli", "Eva", "Fay",
    "Gil", "Gus", "Hal", "Ian", "Ida", "Ivy", "Jan", "Jim", "Joe", "Kai",
    "Kim", "Lea", "Leo", "Liz", "Max", "Mia", "Ned", "Nia", "Oda", "Pam",
    "Pia", "Ray", "Rob", "Roy", "Sam", "Sue", "Tim", "Tom", "Uma", "Zoe",
)  # fmt: skip

_PERSON = {
    "type": "object",
    "properties": {"person": {"type": "string"}},
    "required": ["person"],
    "additionalProperties": False,
}
_PERSONS = {
    "type": "object",
    "properties": {"persons": {"type": "array", "items": {"type": "string"}, "minItems": 1}},
    "required": ["persons"],
    "additionalProperties": False,
}
_SCHEMAS = {
    name: ToolSchema(name=name, description=description, parameters=parameters)
    for name, description, parameters in (
        ("get_age", "Age in years.", _PERSON),
        ("get_room", "Room number.", _PERSON),
        ("get_desk", "Desk number.", _PERSON),
        ("get_phone", "Phone extension.", _PERSON),
        ("get_oldest", "Oldest of persons.", _PERSONS),
        ("get_youngest", "Youngest of persons.", _PERSONS),
    )
}
TOOLS: Mapping[Level, tuple[ToolSchema, ...]] = {
    "one_call": tuple(_SCHEMAS[name] for name in ("get_age", "get_room", "get_desk", "get_phone")),
    "two_calls": tuple(_SCHEMAS[name] for name in ("get_oldest", "get_youngest", "get_room", "get_desk")),
}

_OBLIQUE: Mapping[str, tuple[str, ...]] = {
    "get_age": (
        "How old is {person}?",
        "How many years has {person} lived?",
        "Which birthday did {person} last celebrate?",
    ),
    "get_room": (
        "Which door belongs to {person}?",
        "Where do I knock for {person}?",
        "Behind which door is {person}?",
    ),
    "get_desk": (
        "Which table belongs to {person}?",
        "At which table does {person} sit?",
        "Which seat is taken by {person}?",
    ),
    "get_phone": (
        "What do I dial for {person}?",
        "How can I call {person}?",
        "Which number rings {person}?",
    ),
}
_PLAIN: Mapping[str, tuple[str, ...]] = {
    "get_age": ("What is the age of {person}?",),
    "get_room": ("What is the room of {person}?",),
    "get_desk": ("What is the desk of {person}?",),
    "get_phone": ("What is the phone of {person}?",),
}
_SELECTIONS: Mapping[Wording, Mapping[str, tuple[str, ...]]] = {
    "oblique": {
        "get_oldest": ("the senior of {persons}", "the first-born of {persons}"),
        "get_youngest": ("the junior of {persons}", "the last-born of {persons}"),
    },
    "plain": {"get_oldest": ("the oldest of {persons}",), "get_youngest": ("the youngest of {persons}",)},
}
_WORDINGS: Mapping[Wording, Mapping[str, tuple[str, ...]]] = {"oblique": _OBLIQUE, "plain": _PLAIN}
_NUM_SELECTED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededCall:
    """A call that the question needs.

    >>> NeededCall(tool="get_age", arguments={"person": "Ada"}, result="41").result
    '41'
    """

    tool: str
    """The right tool."""
    arguments: Mapping[str, Any]
    """The right arguments."""
    result: str
    """What it then returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What one episode is about.

    >>> world = draw_world(seed=3, level="one_call", num_people=8)
    >>> world.answer == world.needed[-1].result
    True
    """

    records: Mapping[str, Mapping[str, int]]
    """Person to attribute to value; no value occurs twice."""
    question: str
    """What the agent is asked."""
    people: tuple[str, ...]
    """Whom the question names."""
    needed: tuple[NeededCall, ...]
    """The calls that it takes, in order."""

    @property
    def answer(self) -> str:
        """The right answer: digits."""
        return self.needed[-1].result


def draw_world(*, seed: int, level: Level, num_people: int, wording: Wording = "oblique") -> World:
    """The world of `seed`: people, values of two digits (age, desk) and three (room, phone), and a question."""
    rng = np.random.default_rng([0, seed])
    names = [NAMES[index] for index in rng.permutation(len(NAMES))[:num_people]]
    short = (10 + rng.permutation(90)[: 2 * num_people]).tolist()
    long = (100 + rng.permutation(900)[: 2 * num_people]).tolist()
    records = {
        name: {"age": short.pop(), "room": long.pop(), "desk": short.pop(), "phone": long.pop()} for name in names
    }
    if level == "one_call":
        return _ask_for_one(records, names[0], rng, wording=wording)
    return _ask_for_selected(records, tuple(names[:_NUM_SELECTED]), rng, wording=wording)


def _ask_for_one(
    records: Mapping[str, Mapping[str, int]], person: str, rng: np.random.Generator, *, wording: Wording
) -> World:
    wordings = _WORDINGS[wording]
    tool = _pick(tuple(wordings), rng)
    return World(
        records=records,
        question=_pick(wordings[tool], rng).format(person=person),
        people=(person,),
        needed=(_attribute_call(records, tool, person),),
    )


def _ask_for_selected(
    records: Mapping[str, Mapping[str, int]], people: tuple[str, ...], rng: np.random.Generator, *, wording: Wording
) -> World:
    selections = _SELECTIONS[wording]
    selector = _pick(tuple(selections), rng)
    choose = max if selector == "get_oldest" else min
    chosen = choose(people, key=lambda person: records[person]["age"])
    tool = _pick(("get_room", "get_desk"), rng)
    persons = f"{', '.join(people[:-1])}, {people[-1]}"
    selection = _pick(selections[selector], rng).format(persons=persons)
    return World(
        records=records,
        question=_pick(_WORDINGS[wording][tool], rng).format(person=selection),
        people=people,
        needed=(
            NeededCall(tool=selector, arguments={"persons": list(people)}, result=chosen),
            _attribute_call(records, tool, chosen),
        ),
    )


def _attribute_call(records: Mapping[str, Mapping[str, int]], tool: str, person: str) -> NeededCall:
    value = records[person][tool.removeprefix("get_")]
    return NeededCall(tool=tool, arguments={"person": person}, result=str(value))


def _pick(options: tuple[str, ...], rng: np.random.Generator) -> str:
    return options[int(rng.integers(len(options)))]


def draw_fault(*, seed: int, shares: Mapping[Fault, float]) -> Fault | None:
    """The fault that the tools of the episode of `seed` have, if any: each in its share of the seeds."""
    if not shares:
        return None
    draw = np.random.default_rng([1, seed]).random()
    for fault, share in shares.items():
        draw -= share
        if draw < 0:
            return fault
    return None


class LatencyDraws:
    """How long the calls of one episode take: constant, or lognormal around the mean."""

    def __init__(self, *, seed: int, mean_s: float, sigma: float) -> None:
        """Draws of the episode of `seed`.

        Args:
            seed: the episode's.
            mean_s: the mean, in seconds.
            sigma: standard deviation of the logarithm; 0 makes every call take the mean, 1.5 gives a heavy tail.
        """
        self._mean_s = mean_s
        self._sigma = sigma
        self._rng = np.random.default_rng([2, seed]) if mean_s and sigma else None

    def next_s(self) -> float:
        """The next call's latency, in seconds."""
        if self._rng is None:
            return self._mean_s
        # The mean of exp(N(mu, sigma^2)) is exp(mu + sigma^2 / 2).
        mu = np.log(self._mean_s) - self._sigma**2 / 2
        return float(self._rng.lognormal(mu, self._sigma))

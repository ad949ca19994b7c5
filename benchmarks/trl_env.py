"""One task for both sides of `trl_side_by_side.py`: the one-call level of Lookup, as TRL's environments are and as
driftgym's are.

Both ask the same questions for the same seeds, read the same store, wait for the same draws and give the same reward.
The tools' schemas are those that transformers derives from the methods below, so that both models read the same prompt,
token by token. Neither side has a box: a tool is a function in the process that trains.
"""

import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
from slow_lookup import Latency, SlowLookupEnv, latency_draws

from driftgym.envs.lookup.box_tools import Store
from driftgym.envs.lookup.env import is_answer
from driftgym.envs.lookup.store import World, draw_world
from driftgym.envs.tools import ToolSchema

ENV_ID = "trl_env:TrlLookup-v0"
NUM_PEOPLE = 8


class LookupTools:
    """What TRL's `environment_factory` makes: `reset` gives the question, every other public method is a tool."""

    def __init__(self, latency: Latency) -> None:
        """No episode yet."""
        self.latency: Latency = latency
        self.world: World | None = None
        self.results: list[tuple[str, str]] = []

    def reset(self, *, seed: int, **_: Any) -> str:
        """The question of `seed`; TRL gives every column, and puts what this returns into the prompt."""
        self.world = draw_world(seed=seed, level="one_call", num_people=NUM_PEOPLE)
        self.results = []
        self._store = Store()
        self._store.load({name: dict(record) for name, record in self.world.records.items()})
        self._draws = latency_draws(self.latency, seed=seed)
        return self.world.question

    def get_age(self, person: str):  # type: ignore[no-untyped-def]  # a type would stand in the schema
        """Age in years.

        Args:
            person: A name.
        """
        return self._call("get_age", person)

    def get_room(self, person: str):  # type: ignore[no-untyped-def]
        """Room number.

        Args:
            person: A name.
        """
        return self._call("get_room", person)

    def get_desk(self, person: str):  # type: ignore[no-untyped-def]
        """Desk number.

        Args:
            person: A name.
        """
        return self._call("get_desk", person)

    def get_phone(self, person: str):  # type: ignore[no-untyped-def]
        """Phone extension.

        Args:
            person: A name.
        """
        return self._call("get_phone", person)

    def _call(self, tool: str, person: str) -> str:
        """Takes the time of the next draw; what the store raises becomes the tool's result, by TRL."""
        time.sleep(self._draws.next_s())
        result = self._store.call(tool, {"person": person})
        self.results.append((tool, result))
        return result


TOOL_NAMES = ("get_age", "get_room", "get_desk", "get_phone")


@functools.cache
def tool_schemas() -> tuple[ToolSchema, ...]:
    """The tools as TRL shows them to a model, in its order: that of the alphabet."""
    from transformers.utils import get_json_schema  # slow to import, and needed once

    shown = [get_json_schema(getattr(LookupTools, name))["function"] for name in sorted(TOOL_NAMES)]
    return tuple(ToolSchema(name=f["name"], description=f["description"], parameters=f["parameters"]) for f in shown)


def grade(environment: LookupTools, messages: Sequence[Mapping[str, Any]]) -> float:
    """What `LookupEnv.grade` gives: 1 when the last message, which calls no tool, is the right answer and the call that
    the question needs was made; else 0."""
    assert environment.world is not None
    last = messages[-1] if messages else {"role": "none"}
    if last["role"] != "assistant" or last.get("tool_calls"):
        return 0.0
    needed = environment.world.needed[-1]
    has_looked = (needed.tool, needed.result) in environment.results
    return float(has_looked and is_answer(str(last.get("content") or ""), environment.world.answer))


class TrlLookupEnv(SlowLookupEnv):
    """The same for driftgym: `SlowLookupEnv`, whose tools are shown as TRL shows them."""

    @property
    def tools(self) -> tuple[ToolSchema, ...]:
        """As TRL shows them."""
        return tool_schemas()


if "TrlLookup-v0" not in gymnasium.registry:
    gymnasium.register("TrlLookup-v0", entry_point="trl_env:TrlLookupEnv")

"""Who belongs to a pool: engines join, are lost, come back and leave."""

import asyncio
import itertools
from collections.abc import Callable

from driftgym.agents.generators.base import Generator
from driftgym.agents.generators.members import Member
from driftgym.agents.generators.restarts import (
    BEHIND,
    JOINED,
    LEFT,
    LOST,
    RESTARTED,
    RETURNED,
    Background,
    OnEvent,
    close_quietly,
)
from driftgym.errors import GeneratorError


class Roster:
    """The engines of a pool. Each change is told to `on_event` and to `on_change`."""

    def __init__(
        self,
        *,
        background: Background,
        on_event: OnEvent,
        on_change: Callable[[], None],
        replace: Callable[[], None],
        recover: Callable[[Member], None],
        is_coming: Callable[[], bool],
    ) -> None:
        """Nobody belongs to it.

        Args:
            background: where lost engines are closed.
            on_event: told what happened, in words.
            on_change: called after each change, for those who wait for an engine.
            replace: starts another engine in the place of one.
            recover: tries to bring an engine back that is out.
            is_coming: tells whether an engine is being started.
        """
        self.members: list[Member] = []
        """All of them, also those that are out; the same list for ever."""
        self.is_closed = False
        self._names = map(str, itertools.count())
        self._background = background
        self._on_event = on_event
        self._on_change = on_change
        self._replace = replace
        self._recover = recover
        self._is_coming = is_coming

    @property
    def present(self) -> list[Member]:
        """Those that are in."""
        return [member for member in self.members if member.is_in]

    @property
    def outages(self) -> str:
        """Why each of those that are out is out."""
        return "; ".join(f"{each.name}: {each.outage}" for each in self.members if each.is_out) or "none is left"

    def check_any(self) -> None:
        """Raises GeneratorError when none is left, and none is being started."""
        if not (self.members or self._is_coming()):
            raise GeneratorError("no generator is left")

    def named(self, name: str) -> Member:
        """The one of that name. Raises KeyError."""
        for member in self.members:
            if member.name == name and not member.is_leaving:
                return member
        known = ", ".join(member.name for member in self.members) or "none"
        raise KeyError(f"no generator {name}; there are: {known}")

    def new_name(self, wish: str | None = None) -> str:
        """A name that nobody has. Raises ValueError when `wish` is taken."""
        taken = {member.name for member in self.members}
        if wish is not None and wish in taken:
            raise ValueError(f"there is a generator {wish} already")
        return wish if wish is not None else next(name for name in self._names if name not in taken)

    def admit(self, member: Member, *, in_place_of_lost: bool = False) -> None:
        """It joins, with the latest weights."""
        self.members.append(member)
        event, how = (RESTARTED, "joins in the place of a lost one") if in_place_of_lost else (JOINED, "joins")
        self._on_event(event, f"generator {member.name} {how}, with weights {member.policy_version}")
        self._on_change()

    def lose(self, member: Member, error: GeneratorError) -> None:
        """It does not answer. One that can be replaced is given up; another one is asked until it answers again."""
        if member not in self.members or member.is_leaving or (member.is_out and not member.is_replaceable):
            return
        member.outage = str(error)
        member.is_out = True
        member.num_misses = max(member.num_misses, 1)
        self._on_event(LOST, f"generator {member.name} is taken out, {len(self.present)} are left: {error}")
        if member.is_replaceable:
            self.drop(member)
            if not self.is_closed:
                self._replace()
        else:
            self._recover(member)
        member.interrupt()
        self._on_change()

    def put_behind(self, member: Member, error: GeneratorError) -> None:
        """It missed weights, and is out until it has them. What is under way there ends as it would."""
        if member not in self.members or not member.is_in:
            return
        member.outage = str(error)
        member.is_out = True
        self._on_event(BEHIND, f"generator {member.name} is out until it has the latest weights: {error}")
        self._recover(member)
        self._on_change()

    def let_back(self, member: Member) -> None:
        """It answers again, and has the latest weights."""
        if member not in self.members or not member.is_out or member.is_leaving:
            return
        member.is_out = False
        member.num_misses = member.num_failed = 0
        member.epoch += 1
        self._on_event(RETURNED, f"generator {member.name} is back, with weights {member.policy_version}")
        self._on_change()

    def drop(self, member: Member) -> asyncio.Task[None]:
        """It belongs to it no more. Returns the task that closes it."""
        member.is_leaving = True
        if member in self.members:
            self.members.remove(member)
        return self._background.start(close_quietly(member.generator))

    def tell_left(self, member: Member) -> None:
        """Says that it left as it was asked to."""
        self._on_event(LEFT, f"generator {member.name} leaves, {len(self.present)} are left")
        self._on_change()

    def empty(self) -> list[Generator]:
        """Takes all out, for the pool's end."""
        self.is_closed = True
        members = tuple(self.members)
        self.members.clear()
        return [member.generator for member in members]

"""Where a request goes: sessions stay, new ones go to the least loaded engine, and ties are spread."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from driftgym.agents.generators.base import Generator

_MAX_SESSIONS = 65536
_OVERLOAD_FACTOR = 2
_OVERLOAD_REQUESTS = 8


class Member:
    """One engine of a pool, and what the pool knows of it."""

    __slots__ = ("generator", "look", "name", "num_assigned", "num_running", "policy_version")

    def __init__(self, generator: Generator, *, name: str, policy_version: int) -> None:
        self.generator = generator
        self.name = name
        """How log lines call it."""
        self.policy_version = policy_version
        """The weights that it has, as far as the pool brought it any."""
        self.num_running = 0
        """Requests of the pool that are under way there."""
        self.num_assigned = 0
        """Sessions that were given to it so far."""
        self.look: asyncio.Task[None] | None = None
        """Finds out whether it still lives; None before the first request that failed there."""


class Router:
    """Remembers which session is where; the least recently used are forgotten past some ten thousands."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, Member] = OrderedDict()

    def route(self, session_id: str, members: Sequence[Member]) -> Member:
        """The one of `members` for a request of `session_id`."""
        least = min(members, key=lambda member: (member.num_running, member.num_assigned))
        member = self._sessions.get(session_id)
        if member is None or member not in members or _is_overloaded(member, least):
            member = least
            member.num_assigned += 1
        self._sessions[session_id] = member
        self._sessions.move_to_end(session_id)
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return member


def _is_overloaded(member: Member, least: Member) -> bool:
    """True when moving a session pays for reading its prompt anew."""
    return member.num_running > _OVERLOAD_FACTOR * least.num_running + _OVERLOAD_REQUESTS

"""Where a slice goes: sessions stay, new ones go to the least loaded engine, and ties are spread."""

from collections import OrderedDict
from collections.abc import Sequence

from driftgym.agents.generators.asks import Ask
from driftgym.agents.generators.members import Member

_MAX_SESSIONS = 65536
_OVERLOAD_FACTOR = 2
_OVERLOAD_REQUESTS = 8


class Router:
    """Remembers which session is where; the least recently used are forgotten past some ten thousands."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, Member] = OrderedDict()

    def route(self, session_id: str, members: Sequence[Member]) -> Member:
        """The one of `members` for a request of `session_id`."""
        least = members[0]
        if len(members) > 1:
            least = min(members, key=lambda member: (member.num_running, member.num_assigned))
        member = self._sessions.get(session_id)
        if member is None or (member is not least and (member not in members or _is_overloaded(member, least))):
            member = least
            member.num_assigned += 1
        self._sessions[session_id] = member
        self._sessions.move_to_end(session_id)
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return member


def candidates(ask: Ask, members: Sequence[Member]) -> list[Member]:
    """Those of `members` that the next slice of `ask` can go to.

    They have room and the version. Where there is a choice: none that is doubted or was slow for this request, and
    none of older weights than its latest token.
    """
    fit = [
        member
        for member in members
        if member.takes(ask.home)
        and member.policy_version >= ask.min_policy_version
        and not ask.shuns(member)
        and (member.has_room or member is ask.member)
    ]
    if len(fit) > 1:
        fit = [member for member in fit if not (member.is_doubted or member in ask.slow)] or fit
        fit = [member for member in fit if member.policy_version >= ask.last_version] or fit
    return fit


def _is_overloaded(member: Member, least: Member) -> bool:
    """True when moving a session pays for reading its prompt anew."""
    return member.num_running > _OVERLOAD_FACTOR * least.num_running + _OVERLOAD_REQUESTS

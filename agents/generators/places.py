"""Places at the engines: who has one, and who waits for one."""

import asyncio
import bisect

from driftgym.agents.generators.asks import Ask, Wait
from driftgym.agents.generators.members import Member
from driftgym.agents.generators.roster import Roster
from driftgym.agents.generators.routing import Router, candidates
from driftgym.agents.generators.traffic import Stopwatch
from driftgym.errors import GeneratorError


class Places:
    """Gives each slice a place at an engine.

    Consumes requests; each waits, in the order in which the requests arrived, for an engine that it can go to and
    that has room; unblocked by the end of another slice, by a change among the engines, by its deadline, by its
    abort, or by `close`. No request waits for a place that it could have: `serve` is called at each such change.
    """

    def __init__(self, roster: Roster) -> None:
        """Nobody has a place."""
        self._roster = roster
        self._members = roster.members
        self._router = Router()
        self._waiting: list[Ask] = []
        self._is_closed = False
        self.held = Stopwatch()
        """Runs while nobody gets a place."""
        self._is_paused = False
        self._is_lent = False
        self._is_clock_stopped = False
        self._emptied = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        """Requests without a place."""
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        """True when nobody has a place, or waits for one."""
        return not (self._waiting or any(member.num_running for member in self._members))

    @property
    def is_closed(self) -> bool:
        """True from `close` on."""
        return self._is_closed

    def hold(self, is_held: bool) -> None:
        """Gives nobody a place while `is_held`: the pool is paused."""
        self._is_paused = is_held
        self._note_hold()

    async def lend(self) -> None:
        """Gives nobody a place from now on; returns when nobody has one. The clocks of those who wait stand still."""
        self._is_lent = self._is_clock_stopped = True
        self._note_hold()
        while any(member.num_running for member in self._members):
            self._emptied.clear()
            await self._emptied.wait()

    def go_on(self, *, gives_places: bool) -> None:
        """Ends `lend`: the clocks go on, and, where `gives_places`, places are given again."""
        self._is_lent = self._is_lent and not gives_places
        self._is_clock_stopped = False
        self._note_hold()

    @property
    def _is_held(self) -> bool:
        return self._is_paused or self._is_lent

    def _note_hold(self) -> None:
        self.held.run(self._is_held)
        for ask in self._waiting:
            if ask.wait is not None:
                ask.wait.stand_still(self._is_clock_stopped)
        self.serve()

    async def take(self, ask: Ask) -> Member:
        """A place for the next slice of `ask`; the one that it has, unless another engine is the better choice.

        Raises:
            GeneratorError: no engine is left for it, or none had a place by its deadline.
        """
        held = ask.member
        member = self._reserve(ask)
        if member is None:
            self.give_back(ask)
            member = await self._wait(ask)
        elif held is not None and held is not member:
            self._free(held)
        ask.member = member
        return member

    def give_back(self, ask: Ask) -> None:
        """Frees the place of `ask`; nothing happens when it has none."""
        member, ask.member = ask.member, None
        if member is not None:
            self._free(member)

    def _free(self, member: Member) -> None:
        member.num_running -= 1
        member.note_empty()
        self._emptied.set()
        if self._waiting:
            self.serve()

    def _reserve(self, ask: Ask) -> Member | None:
        fit = [] if self._is_held or self._is_closed else candidates(ask, self._members)
        if not fit:
            return None
        member = self._router.route(ask.session_id, fit)
        if member is not ask.member:
            member.num_running += 1
        return member

    def has_other(self, ask: Ask) -> bool:
        """True when its slice could go on at another engine, which was not too slow for it before."""
        return any(m is not ask.member and m not in ask.slow for m in candidates(ask, self._members))

    async def _wait(self, ask: Ask) -> Member:
        self._raise_if_hopeless(ask)
        waiter: asyncio.Future[Member] = asyncio.get_running_loop().create_future()
        ask.waiter = waiter
        bisect.insort(self._waiting, ask, key=lambda each: each.order)
        try:
            async with asyncio.timeout(ask.remaining_s) as limit:
                ask.wait = Wait(ask, limit)
                ask.wait.stand_still(self._is_clock_stopped)
                return await waiter
        except BaseException as error:
            if waiter.cancelled() or not waiter.done() or waiter.exception() is not None:
                self._waiting.remove(ask)
            else:
                self._free(waiter.result())  # it came together with the end of the wait
            if isinstance(error, TimeoutError):
                raise ask.error or GeneratorError(self._why_none(ask)) from None
            raise
        finally:
            ask.waiter = None
            if ask.wait is not None:
                ask.wait.end()
                ask.wait = None

    def serve(self) -> None:
        """Gives free places to those who wait, in order; tells those who wait in vain."""
        if self._is_held:
            return
        for ask in tuple(self._waiting):
            assert ask.waiter is not None
            if not any(member.is_open for member in self._members):
                return
            member = None if ask.waiter.done() else self._reserve(ask)
            if member is not None:
                self._waiting.remove(ask)
                ask.waiter.set_result(member)

    def settle(self) -> None:
        """As `serve`, after a change among the engines; it also tells those that wait in vain now."""
        self.serve()
        for ask in tuple(self._waiting):
            try:
                self._raise_if_hopeless(ask)
            except GeneratorError as error:
                self.wake(ask, error)

    def wake(self, ask: Ask, error: GeneratorError) -> None:
        """Ends its wait with `error`; nothing happens when it waits for no place."""
        if ask.waiter is not None and not ask.waiter.done():
            ask.waiter.set_exception(error)

    def _raise_if_hopeless(self, ask: Ask) -> None:
        """An engine that lives and failed it is reason enough to give up, once no other one is left to be asked.

        Those that are out may come back: they are waited for when every one that was asked is out, too.
        """
        if self._is_closed:
            raise GeneratorError("the pool is closed")
        present = [member for member in self._members if member.is_in]
        if any(not ask.shuns(member) for member in present):
            return
        if ask.error is not None and any(not member.is_doubted for member in present):
            raise ask.error
        try:
            self._roster.check_any()
        except GeneratorError as error:
            raise ask.error or error from None

    def _why_none(self, ask: Ask) -> str:
        present = [member for member in self._members if member.is_in]
        if not present:
            return f"no generator answers ({self._roster.outages})"
        if all(member.policy_version < ask.min_policy_version for member in present):
            return f"no generator came to version {ask.min_policy_version} in time"
        return f"request {ask.request_id} got no place at a generator by its deadline"

    def close(self) -> None:
        """Nobody gets a place any more."""
        self._is_closed = True
        self.settle()

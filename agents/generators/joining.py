"""Engines join a pool and leave it, while it runs; a pause is for all of them."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from driftgym.agents.generators.base import Generator
from driftgym.agents.generators.members import Member
from driftgym.agents.generators.places import Places
from driftgym.agents.generators.restarts import close_quietly
from driftgym.agents.generators.rolling import Weights
from driftgym.agents.generators.roster import Roster
from driftgym.errors import GeneratorError

_LOGGER = logging.getLogger(__name__)


class Joining:
    """Lets engines in once they are as the others are, and out again."""

    def __init__(self, roster: Roster, weights: Weights, places: Places, *, max_concurrency: int | None) -> None:
        """`max_concurrency`: slices that one engine has at once."""
        self._roster = roster
        self._weights = weights
        self._places = places
        self._max_concurrency = max_concurrency
        self._is_paused = False

    def begin_with(self, generator: Generator, *, policy_version: int, is_replaceable: bool) -> None:
        """It is there from the start."""
        self._roster.members.append(self._member(generator, policy_version, is_replaceable, name=None))

    def _member(self, generator: Generator, policy_version: int, is_replaceable: bool, *, name: str | None) -> Member:
        return Member(
            generator,
            name=self._roster.new_name(name),
            policy_version=policy_version,
            max_concurrency=self._max_concurrency,
            is_replaceable=is_replaceable,
        )

    async def add(self, generator: Generator, *, name: str | None) -> str:
        """See `GeneratorPool.add`."""
        member = self._member(generator, -1, False, name=name)
        await self._join(member, in_place_of_lost=False)
        return member.name

    async def replace_lost(self, generator: Generator) -> None:
        """It joins in the place of one that was lost. Raises GeneratorError when it does not follow."""
        await self._join(self._member(generator, -1, True, name=None), in_place_of_lost=True)

    async def _join(self, member: Member, *, in_place_of_lost: bool) -> None:
        try:
            member.seen_busy_s = await _busy_s(member)
            await self.catch_up(member)
            if self._roster.is_closed:
                raise GeneratorError("the pool is closed")
        except BaseException:
            await asyncio.shield(close_quietly(member.generator))
            raise
        self._roster.admit(member, in_place_of_lost=in_place_of_lost)

    async def catch_up(self, member: Member) -> None:
        """It gets weights, and is paused, as the others have it; nothing is awaited after the last look at either.

        Raises:
            GeneratorError: it does not follow.
        """
        is_paused: bool | None = None
        while is_paused != self._is_paused or member.policy_version != self._weights.latest_version:
            await self._weights.catch_up(member)
            if is_paused != self._is_paused:
                is_paused = self._is_paused
                await (member.generator.pause() if is_paused else member.generator.resume())

    async def remove(self, name: str, *, drain: bool, timeout_s: float) -> None:
        """See `GeneratorPool.remove`."""
        member = self._roster.named(name)
        member.is_leaving = True
        self._places.settle()
        emptying = member.empty(of_requests=False) if drain else _hurry_out(member)
        try:
            async with asyncio.timeout(timeout_s):
                await emptying
        except TimeoutError:
            _LOGGER.warning("generator %s had slices under way after %g s; they are cut off", name, timeout_s)
        finally:
            member.interrupt()
            closing = self._roster.drop(member)
            self._roster.tell_left(member)
        await asyncio.wait((closing,))

    async def pause(self) -> None:
        """Stops all, and gives nobody a place; lets all go on when it fails or is broken off."""
        self._is_paused = True
        self._places.hold(True)
        try:
            await self._tell_all(lambda generator: generator.pause())
        except BaseException:
            with contextlib.suppress(GeneratorError):
                await asyncio.shield(self.resume())
            raise

    async def resume(self) -> None:
        """Lets all go on."""
        self._is_paused = False
        try:
            await self._tell_all(lambda generator: generator.resume())
        finally:
            self._places.hold(self._is_paused)

    async def _tell_all(self, call: Callable[[Generator], Awaitable[None]]) -> None:
        """Calls all engines that are in; one that fails is out. Raises GeneratorError when none is left."""

        async def tell(member: Member) -> None:
            try:
                await call(member.generator)
            except GeneratorError as error:
                self._roster.lose(member, error)

        await asyncio.gather(*(tell(member) for member in self._roster.present))
        self._roster.check_any()


async def _hurry_out(member: Member) -> None:
    await member.hurry()
    await member.empty(of_requests=False)


async def _busy_s(member: Member) -> float:
    """Its busy seconds; 0 of one whose weights have no name yet."""
    try:
        return (await member.generator.health()).busy_s
    except GeneratorError:
        return 0.0

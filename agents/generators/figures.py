"""How a pool stands, as one engine."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

from driftgym.agents.generators.base import Generator, GeneratorHealth, GeneratorLoad, WeightVersion
from driftgym.agents.generators.members import Member
from driftgym.agents.generators.parking import Parking
from driftgym.agents.generators.places import Places
from driftgym.agents.generators.roster import Roster
from driftgym.errors import GeneratorError

_AnswerT = TypeVar("_AnswerT")


class Figures:
    """Sums over the engines that are in. One that does not answer is left out, and is not taken out for it."""

    def __init__(self, roster: Roster, places: Places, parking: Parking, *, timeout_s: float) -> None:
        """Each engine has `timeout_s` to answer."""
        self._roster = roster
        self._places = places
        self._parking = parking
        self._timeout_s = timeout_s
        self._busy_s = 0.0

    async def health(self, *, min_version: int) -> GeneratorHealth:
        """See `GeneratorPool.health`."""
        answers = await self._ask(lambda generator: generator.health())
        for member, health in answers.items():
            self._busy_s += max(0.0, health.busy_s - member.seen_busy_s) / len(self._roster.present or answers)
            member.seen_busy_s = health.busy_s
        healths = list(answers.values())
        return GeneratorHealth(
            version=WeightVersion(incarnation=healths[0].version.incarnation, policy_version=min_version),
            num_running=sum(health.num_running for health in healths),
            num_queued=sum(health.num_queued for health in healths) + self._num_waiting,
            busy_s=self._busy_s,
        )

    async def load(self) -> GeneratorLoad:
        """See `GeneratorPool.load`."""
        loads = (await self._ask(lambda generator: generator.load())).values()
        return GeneratorLoad(
            num_running=sum(load.num_running for load in loads),
            num_queued=sum(load.num_queued for load in loads) + self._num_waiting,
        )

    async def _ask(self, question: Callable[[Generator], Awaitable[_AnswerT]]) -> dict[Member, _AnswerT]:
        """What those answer that do. Raises GeneratorError when none does."""
        answers: dict[Member, _AnswerT] = {}

        async def ask(member: Member) -> None:
            with contextlib.suppress(GeneratorError, TimeoutError):
                async with asyncio.timeout(self._timeout_s):
                    answers[member] = await question(member.generator)

        await asyncio.gather(*(ask(member) for member in self._roster.present))
        if not answers:
            raise GeneratorError(f"no generator answers ({self._roster.outages})")
        return answers

    @property
    def _num_waiting(self) -> int:
        return self._places.num_waiting + self._parking.num_waiting

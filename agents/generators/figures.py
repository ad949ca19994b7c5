"""How a pool stands, as one engine."""

import asyncio

from driftgym.agents.generators.base import GeneratorHealth, GeneratorLoad, WeightVersion
from driftgym.agents.generators.members import Member
from driftgym.agents.generators.parking import Parking
from driftgym.agents.generators.places import Places
from driftgym.agents.generators.roster import Roster
from driftgym.errors import GeneratorError


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
        present = self._roster.present
        answers = await asyncio.gather(*(self._ask(member) for member in present))
        healths = [health for health in answers if health is not None]
        if not healths:
            raise GeneratorError(f"no generator answers ({self._roster.outages})")
        for member, health in zip(present, answers, strict=True):
            if health is not None:
                self._busy_s += max(0.0, health.busy_s - member.seen_busy_s) / len(present)
                member.seen_busy_s = health.busy_s
        return GeneratorHealth(
            version=WeightVersion(incarnation=healths[0].version.incarnation, policy_version=min_version),
            num_running=sum(health.num_running for health in healths),
            num_queued=sum(health.num_queued for health in healths) + self._num_waiting,
            busy_s=self._busy_s,
        )

    async def _ask(self, member: Member) -> GeneratorHealth | None:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await member.generator.health()
        except (GeneratorError, TimeoutError):
            return None

    async def load(self) -> GeneratorLoad:
        """See `GeneratorPool.load`."""
        loads = await asyncio.gather(*(member.generator.load() for member in self._roster.present))
        return GeneratorLoad(
            num_running=sum(load.num_running for load in loads),
            num_queued=sum(load.num_queued for load in loads) + self._num_waiting,
        )

    @property
    def _num_waiting(self) -> int:
        return self._places.num_waiting + self._parking.num_waiting

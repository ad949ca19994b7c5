"""One engine of a pool, and what the pool knows of it."""

import asyncio
from typing import Protocol

from driftgym.agents.generators.base import Generator
from driftgym.agents.generators.traffic import Stopwatch
from driftgym.errors import GeneratorError

ABORT_S = 3.0
"""An engine that was told to abort gives what it has within that, or is taken for hung."""


class Tenant(Protocol):
    """A slice that is under way at an engine."""

    def interrupt(self) -> None:
        """Ends it here and now; what the engine wrote of it is lost."""
        ...

    def expect_end(self) -> None:
        """The engine was told to give what it has: interrupts it unless it does so within `ABORT_S`."""
        ...

    async def hurry(self) -> None:
        """Has the engine give what it has; where it does not, it is interrupted."""
        ...


class Member:
    """One engine: whether it takes slices, how many it has, and which weights. Changed by the modules around the pool.

    It is *in* while it takes slices; *updating* while it is given weights, and takes none meanwhile; *out* from a loss
    or a missed update until it has come back; *leaving* from `GeneratorPool.remove` on.
    """

    __slots__ = (
        "changing",
        "emptied",
        "epoch",
        "generator",
        "halted",
        "is_doubted",
        "is_draining",
        "is_leaving",
        "is_out",
        "is_replaceable",
        "is_updating",
        "look",
        "max_concurrency",
        "name",
        "num_assigned",
        "num_bound",
        "num_failed",
        "num_misses",
        "num_running",
        "outage",
        "policy_version",
        "seen_busy_s",
        "tenants",
    )

    def __init__(
        self,
        generator: Generator,
        *,
        name: str,
        policy_version: int,
        max_concurrency: int | None = None,
        is_replaceable: bool = False,
    ) -> None:
        """It is in.

        Args:
            generator: the engine.
            name: how log lines call it.
            policy_version: of the weights that it has.
            max_concurrency: slices that it has at once at most; None does not bound them.
            is_replaceable: another one is started in its place when it is lost.
        """
        self.generator = generator
        self.name = name
        self.policy_version = policy_version
        self.max_concurrency = max_concurrency
        self.is_replaceable = is_replaceable
        self.is_out = False
        self.is_leaving = False
        self.is_updating = False
        self.is_draining = False
        """While updating: it still takes the slices of requests that have begun here."""
        self.is_doubted = False
        """A request failed here, and it is being asked whether it lives: others are preferred."""
        self.epoch = 0
        """How often it came back: what is held against it is held against an epoch."""
        self.num_running = 0
        """Places taken: slices of the pool that are under way here, or about to be."""
        self.num_assigned = 0
        """Sessions that were given to it so far."""
        self.num_bound = 0
        """Requests under way whose latest token was written here."""
        self.num_misses = 0
        """Times in a row that it did not say how it stands."""
        self.num_failed = 0
        """Times in a row that it failed a request; those that come together are one."""
        self.seen_busy_s = 0.0
        """Its busy seconds, as far as the pool has counted them."""
        self.outage = ""
        """Why it is out."""
        self.tenants: set[Tenant] = set()
        """The slices that are under way here."""
        self.halted = Stopwatch()
        """Runs while it is given weights."""
        self.look: asyncio.Task[None] | None = None
        """Finds out whether it still lives; None before the first request that failed here."""
        self.changing = asyncio.Lock()
        """Held by whoever gives it weights."""
        self.emptied = asyncio.Event()
        """Set whenever it may have become empty."""

    @property
    def is_in(self) -> bool:
        """True while it belongs to those that answer requests, also while it is given weights."""
        return not (self.is_out or self.is_leaving)

    @property
    def has_room(self) -> bool:
        """True when it may be given one more slice."""
        return self.max_concurrency is None or self.num_running < self.max_concurrency

    @property
    def is_open(self) -> bool:
        """True when some request may be given a place here."""
        return self.is_in and self.has_room and (self.is_draining or not self.is_updating)

    def takes(self, home: "Member | None") -> bool:
        """True when it takes slices of a request whose latest token was written at `home`."""
        if self.is_updating:
            return self.is_draining and home is self and self.is_in
        return self.is_in

    def note_empty(self) -> None:
        """Wakes those who wait until it is empty."""
        if not (self.num_running and self.num_bound):
            self.emptied.set()

    async def empty(self, *, of_requests: bool) -> None:
        """Waits until no slice is under way here, and with `of_requests` no request that goes on here either."""
        while self.num_running or (of_requests and self.num_bound):
            self.emptied.clear()
            await self.emptied.wait()

    async def hurry(self, *tenants: Tenant, request_id: str | None = None) -> None:
        """Has slices that are under way here end soon, with what they have: one call ends the one or all.

        Args:
            tenants: whose request `request_id` is; none are all.
            request_id: None is all.
        """
        hurried = tenants or tuple(self.tenants)
        for tenant in hurried:
            tenant.expect_end()
        try:
            async with asyncio.timeout(ABORT_S):
                await self.generator.abort(request_id)
        except (GeneratorError, TimeoutError):
            for tenant in hurried:
                tenant.interrupt()

    def interrupt(self) -> None:
        """Sends the slices that are under way here elsewhere, at once."""
        for tenant in tuple(self.tenants):
            tenant.interrupt()

"""Partial rollouts: answers that have had their share of an iteration wait for the next one, without an engine."""

import asyncio
import contextlib

from driftgym.agents.generators.asks import Ask
from driftgym.agents.generators.places import Places
from driftgym.agents.generators.restarts import Background
from driftgym.agents.generators.traffic import PARKED, Stopwatch
from driftgym.errors import GeneratorError


class Parking:
    """Holds requests that got `iteration_tokens` tokens in this iteration.

    Consumes requests between two slices; each waits for the next iteration; unblocked by `next_iteration`, by its
    abort, by `close`, after `max_parked_s`, or when the engines have had nothing else to do for `idle_s`: the weights
    that all wait for may be waiting for them. The time is added to the request's deadline.
    """

    def __init__(
        self,
        places: Places,
        *,
        iteration_tokens: int | None,
        max_parked_s: float,
        idle_s: float,
        background: Background,
    ) -> None:
        """Nothing is parked; `iteration_tokens` None parks nothing."""
        self._places = places
        self._iteration_tokens = iteration_tokens
        self._max_parked_s = max_parked_s
        self._idle_s = idle_s
        self._background = background
        self._parked: dict[Ask, asyncio.Event] = {}
        self._minding: asyncio.Task[None] | None = None
        self.iteration = 0
        """Counts iterations, from 0."""
        self.num_parked = 0
        """How often a request was parked."""

    @property
    def num_waiting(self) -> int:
        """Requests that are parked now."""
        return len(self._parked)

    def num_allowed(self, ask: Ask) -> int:
        """Tokens that `ask` may still get in this iteration, within its budget; 0 when it is to be parked."""
        if self._iteration_tokens is None:
            return ask.num_left
        had = ask.num_in_iteration if ask.iteration == self.iteration else 0
        return min(ask.num_left, self._iteration_tokens - had)

    async def park(self, ask: Ask) -> None:
        """Waits with `ask`, which gives its place back, until it goes on. Raises GeneratorError after `close`."""
        if self._places.is_closed:  # nobody would wake it
            raise GeneratorError("the pool is closed")
        ask.settle(None)
        self._places.give_back(ask)
        self.num_parked += 1
        event = self._parked[ask] = asyncio.Event()
        if self._minding is None or self._minding.done():
            self._minding = self._background.start(self._mind())
        watches = [watch for watch in (Stopwatch(), PARKED.get()) if watch is not None]
        for watch in watches:
            watch.run(True)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._max_parked_s):
                    await event.wait()
        finally:
            del self._parked[ask]
            for watch in watches:
                watch.run(False)
            ask.deadline_s += watches[0].seconds
        ask.iteration = -1  # a new share, also where no new iteration has begun

    def next_iteration(self) -> None:
        """Begins an iteration: all that is parked goes on."""
        self.iteration += 1
        self.wake_all()

    def wake(self, ask: Ask) -> None:
        """`ask` goes on; nothing happens when it is not parked."""
        if (event := self._parked.get(ask)) is not None:
            event.set()

    def wake_all(self) -> None:
        """All that is parked goes on."""
        for event in self._parked.values():
            event.set()

    async def _mind(self) -> None:
        """Lets all go on when nothing else is under way at two looks in a row."""
        num_idle = 0
        while self._parked and not self._places.is_closed:
            await asyncio.sleep(self._idle_s / 2)
            num_idle = num_idle + 1 if self._places.is_idle else 0
            if num_idle > 2:
                self.wake_all()
                num_idle = 0

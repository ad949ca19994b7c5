"""The queue of those who wait for a box of a pool."""

import asyncio
import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from driftgym.sandboxes.pool_state import Shelf, Slot


@dataclass(slots=True, eq=False, kw_only=True)
class Waiter:
    """A request for a box. Served by its number."""

    number: int
    """Its place in the queue."""
    shelf: Shelf
    """The kind of box."""
    future: "asyncio.Future[Slot]"
    """Gets the box, or why there is none."""

    def take_back(self) -> Slot | None:
        """The box that it was given and never saw."""
        if self.future.done() and not self.future.cancelled() and self.future.exception() is None:
            return self.future.result()
        return None


class Queue:
    """Requests in the order of their numbers: one that comes again with its number has its old place."""

    def __init__(self) -> None:
        self._waiters: list[Waiter] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiters)

    def __iter__(self) -> Iterator[Waiter]:
        """Those who still wait, in their order; they may leave meanwhile."""
        # A future that is done was given up by who waits for it, which will leave in a moment.
        return iter([waiter for waiter in self._waiters if not waiter.future.done()])

    def next_number(self) -> int:
        """A place at the end."""
        return next(self._numbers)

    def join(self, number: int, shelf: Shelf) -> Waiter:
        """A request for a box of `shelf`."""
        waiter = Waiter(number=number, shelf=shelf, future=asyncio.get_running_loop().create_future())
        bisect.insort(self._waiters, waiter, key=lambda each: each.number)
        shelf.num_waiting += 1
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """It waits no longer. Nothing happens when it had left."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            waiter.shelf.num_waiting -= 1

    def refuse_first(self, shelf: Shelf, error: Exception) -> bool:
        """Tells who has waited longest for a box of `shelf` why there is none. False when nobody does."""
        waiter = next((waiter for waiter in self if waiter.shelf is shelf), None)
        if waiter is None:
            return False
        self.leave(waiter)
        waiter.future.set_exception(error)
        return True

    def refuse_all(self, make_error: type[Exception], text: str) -> None:
        """Tells everybody why there is no box, each with an error of its own."""
        for waiter in self:
            self.leave(waiter)
            waiter.future.set_exception(make_error(text))

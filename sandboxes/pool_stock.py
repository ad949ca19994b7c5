"""`Stock`: the boxes of a pool, and the queue of those who wait for one."""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from driftgym.errors import SandboxError
from driftgym.sandboxes.base import PoolConfig, Sandbox, SandboxProvider, SandboxSpec
from driftgym.sandboxes.pool_queue import Queue, Waiter
from driftgym.sandboxes.pool_state import PoolStats, Room, Shelf, Shelves, Slot

_RESET_TIMEOUT_S = 10.0
"""A box that takes longer to come back clean is thrown away; it usually takes some milliseconds."""
_PING_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 15.0
_CLOSED = "the pool of boxes is closed"

_logger = logging.getLogger(__name__)


class Stock:
    """Takes boxes from a provider and keeps some ready.

    There is no loop that looks after it. Whatever happens (a request, a box that started, came back clean, is
    gone, or failed) calls `_pump`, which does what can now be done: hands ready boxes to the requests in their order,
    begins the starts that are missing, makes room by removing ready boxes that nobody asks for, and, when every
    request is provided for, starts boxes ahead. A request that finds no room blocks those behind it, so that a large
    box is not starved by small ones.
    """

    def __init__(self, provider: SandboxProvider, config: PoolConfig, *, max_concurrent_starts: int) -> None:
        self._provider = provider
        self._num_warm = config.num_warm
        self._max_starts = max_concurrent_starts
        self._room = Room(max_boxes=config.max_boxes, max_memory_bytes=config.max_memory_bytes)
        self._shelves = Shelves()
        self._slots: set[Slot] = set()
        self._queue = Queue()
        self._working: set[asyncio.Task[None]] = set()
        self._removals = _Removals(on_gone=self._end_removal, max_at_once=2 * max_concurrent_starts)
        self._num_started = self._num_failed_starts = self._num_reused = 0
        self._num_discarded = self._num_unhealthy = 0
        self._is_closed = False

    @property
    def stats(self) -> PoolStats:
        """The stock at this moment."""
        return PoolStats(
            num_warm=sum(len(shelf.idle) for shelf in self._shelves),
            num_leased=sum(shelf.num_out for shelf in self._shelves),
            num_starting=self._shelves.num_starting,
            num_resetting=sum(shelf.num_resetting for shelf in self._shelves),
            num_closing=self._room.num_leaving,
            num_waiting=len(self._queue),
            memory_bytes=self._room.memory_bytes,
            num_started=self._num_started,
            num_failed_starts=self._num_failed_starts,
            num_reused=self._num_reused,
            num_discarded=self._num_discarded,
            num_unhealthy=self._num_unhealthy,
        )

    async def take(self, spec: SandboxSpec, *, timeout_s: float) -> Slot:
        """A box that is alive and has met nobody. Waits for those who asked earlier, and for room.

        Raises:
            SandboxError: the stock is closed, a start failed, there is never room for such a box, or none became
                free within `timeout_s`.
        """
        self._room.check(spec)
        number = self._queue.next_number()
        try:
            async with asyncio.timeout(timeout_s):
                slot = await self._wait(number, self._shelves.ask(spec, timeout_s=timeout_s))
                while not await self._is_sound(slot):
                    slot = await self._wait(number, self._shelves.ask(spec, timeout_s=timeout_s))
        except TimeoutError:
            raise SandboxError(f"no box free within {timeout_s:g} s ({_words(self.stats)})") from None
        return slot

    def put_back(self, slot: Slot) -> None:
        """Takes back a box that nothing was done in."""
        if slot in self._slots:
            slot.shelf.num_out -= 1
            self._make_idle(slot)

    def recycle(self, slot: Slot) -> None:
        """Cleans a box that was used, in the background; it comes back into service, or is thrown away."""
        if slot not in self._slots:
            return
        slot.shelf.num_out -= 1
        slot.shelf.num_resetting += 1
        _begin(self._reset(slot), self._working)

    def discard(self, slot: Slot) -> None:
        """Throws away a box that was handed out, in the background. Nothing happens when that was done before."""
        if slot in self._slots:
            slot.shelf.num_out -= 1
            self._remove(slot)
            self._pump()

    async def close(self) -> None:
        """Refuses who waits, ends what is under way, removes every box. Bounded as the removal of a box is."""
        self._is_closed = True
        self._queue.refuse_all(SandboxError, _CLOSED)
        await _cancel(self._working, grace_s=0.0)
        for slot in list(self._slots):
            self._remove(slot)
        await self._removals.close()
        self._shelves.clear()

    async def _wait(self, number: int, shelf: Shelf) -> Slot:
        if self._is_closed:
            raise SandboxError(_CLOSED)
        waiter = self._queue.join(number, shelf)
        self._pump()
        try:
            return await waiter.future
        except BaseException:
            given = waiter.take_back()
            if given is not None:
                self.put_back(given)
            self._queue.leave(waiter)
            self._pump()
            raise

    async def _is_sound(self, slot: Slot) -> bool:
        """Asks a box that was idle for a sign of life; one that gives none is thrown away."""
        if slot not in self._slots:
            return False  # the stock is being closed
        if slot.is_untried:
            return True
        try:
            is_alive = await _is_alive(slot.box)
        except BaseException:
            self.put_back(slot)
            raise
        if not is_alive:
            self._num_unhealthy += 1
            self.discard(slot)
        return is_alive and slot in self._slots

    def _pump(self) -> None:
        """Does all that can now be done."""
        if self._is_closed:
            return
        for dusty in self._shelves.tidy():
            self._remove(dusty)
        if self._serve():
            self._refill()

    def _serve(self) -> bool:
        """Provides for the requests in their order. False when one of them has to wait for room."""
        coming: dict[int, int] = {}
        for waiter in self._queue:
            shelf = waiter.shelf
            if shelf.idle:
                self._hand(shelf.idle.pop(), waiter)
                continue
            num_coming = coming.setdefault(id(shelf), shelf.num_coming)
            if num_coming:
                coming[id(shelf)] -= 1
            elif not self._make_room(shelf.spec.memory_bytes):
                return False
            elif self._may_start:
                self._begin_start(shelf)
        return True

    def _hand(self, slot: Slot, waiter: Waiter) -> None:
        self._queue.leave(waiter)
        slot.shelf.num_out += 1
        waiter.future.set_result(slot)

    @property
    def _may_start(self) -> bool:
        # Removing must keep up: else the boxes that wait for it, whose commands still run, would become ever more.
        return self._shelves.num_starting < self._max_starts and self._room.num_leaving < 2 * self._max_starts

    def _make_room(self, num_bytes: int) -> bool:
        """True when there is room. Otherwise removes boxes that are ready, the oldest first, as far as that helps."""
        if self._room.has(num_bytes):
            return True
        for shelf in self._shelves:
            while shelf.idle and not self._room.will_have(num_bytes):
                self._remove(shelf.idle.pop(0))
        return False

    def _refill(self) -> None:
        """Starts boxes ahead of the next requests, where there is room without taking it from others."""
        now_s = asyncio.get_running_loop().time()
        for shelf in self._shelves:
            num_missing = self._num_warm - (len(shelf.idle) + shelf.num_coming - shelf.num_waiting)
            if not shelf.is_used or not shelf.may_refill(now_s):
                continue
            while num_missing > 0 and self._may_start and self._room.has(shelf.spec.memory_bytes):
                self._begin_start(shelf)
                num_missing -= 1

    def _begin_start(self, shelf: Shelf) -> None:
        self._room.enter(shelf.spec.memory_bytes)
        shelf.num_starting += 1
        _begin(self._start(shelf), self._working)

    async def _start(self, shelf: Shelf) -> None:
        slot: Slot | None = None
        try:
            slot = Slot(shelf=shelf, box=await self._provider.start(shelf.spec, timeout_s=shelf.timeout_s))
        except Exception as error:  # told to who waits; without anybody, said
            self._tell_failure(shelf, error)
        finally:
            shelf.num_starting -= 1
            if slot is None:
                self._room.leave(shelf.spec.memory_bytes, was_leaving=False)
        if slot is None:
            self._pump()
            return
        shelf.num_failures = 0
        self._num_started += 1
        self._slots.add(slot)
        self._make_idle(slot)

    def _tell_failure(self, shelf: Shelf, error: Exception) -> None:
        self._num_failed_starts += 1
        shelf.note_failure(asyncio.get_running_loop().time())
        if not self._queue.refuse_first(shelf, error):
            _logger.warning("a box could not be started ahead: %s: %s", type(error).__name__, error)

    async def _reset(self, slot: Slot) -> None:
        is_clean = False
        try:
            is_clean = await is_clean_again(slot.box)
        finally:
            slot.shelf.num_resetting -= 1
            if not is_clean:
                self._remove(slot)
                self._pump()
        if is_clean:
            self._num_reused += 1
            self._make_idle(slot)

    def _make_idle(self, slot: Slot) -> None:
        """The box is ready. Whoever waits for it gets it now."""
        if self._is_closed:
            self._remove(slot)
            return
        slot.shelf.idle.append(slot)
        self._pump()
        slot.is_untried = slot.is_untried and slot not in slot.shelf.idle

    def _remove(self, slot: Slot) -> None:
        """Closes a box in the background. Its place on the shelf has been given up already."""
        self._slots.discard(slot)
        self._num_discarded += 1
        self._room.begin_leaving(slot.shelf.spec.memory_bytes)
        self._removals.begin(slot)

    def _end_removal(self, slot: Slot) -> None:
        self._room.leave(slot.shelf.spec.memory_bytes, was_leaving=True)
        self._pump()


class _Removals:
    """Closes boxes in the background: few at a time, and each within a deadline."""

    def __init__(self, *, on_gone: Callable[[Slot], None], max_at_once: int) -> None:
        self._on_gone = on_gone
        self._turns = asyncio.Semaphore(max_at_once)
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, slot: Slot) -> None:
        """Closes the box of `slot`, then tells."""
        _begin(self._close_box(slot), self._tasks)

    async def close(self) -> None:
        """Waits for all; gives up those that take too long."""
        await _cancel(self._tasks, grace_s=_CLOSE_TIMEOUT_S)

    async def _close_box(self, slot: Slot) -> None:
        try:
            async with self._turns, asyncio.timeout(_CLOSE_TIMEOUT_S):
                await slot.box.close()
        except Exception as error:  # the box is the reaper's then; the pool goes on
            _logger.warning("closing a box failed: %s: %s", type(error).__name__, error)
        finally:
            self._on_gone(slot)


async def _is_alive(box: Sandbox) -> bool:
    try:
        await box.ping(timeout_s=_PING_TIMEOUT_S)
    except SandboxError as error:
        _logger.info("a box that was kept ready is lost: %s", error)
        return False
    return True


async def is_clean_again(box: Sandbox) -> bool:
    """Cleans a box. False when it does not come back clean, or not soon."""
    try:
        async with asyncio.timeout(_RESET_TIMEOUT_S):
            await box.reset()
    except (SandboxError, TimeoutError) as error:
        _logger.info("a box did not come back clean and is thrown away: %s", error)
        return False
    return True


def _begin(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    """Does `work` in the background; `tasks` holds it until it has ended."""
    task = asyncio.ensure_future(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


async def _cancel(tasks: Collection[asyncio.Task[None]], *, grace_s: float) -> None:
    """Gives `tasks` time to end, then cancels those that have not; waits for these, but not forever."""
    await asyncio.sleep(0)  # a task that is cancelled before it has begun would not clean up
    if tasks and grace_s:
        await asyncio.wait(tasks, timeout=grace_s)
    for task in list(tasks):
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_CLOSE_TIMEOUT_S)


def _words(stats: PoolStats) -> str:
    return (
        f"{stats.num_leased} in use, {stats.num_starting} starting, {stats.num_resetting} being cleaned, "
        f"{stats.num_closing} being removed; raise sandbox.pool.max_boxes or max_memory_bytes if all are in use"
    )

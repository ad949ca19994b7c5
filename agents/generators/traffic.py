"""What a client has under way at one engine: who was sent, who waits, and whose KV cache that rests on."""

import asyncio
import collections
import contextlib
import contextvars
import time
from collections.abc import AsyncIterator, Iterator


class NotSentError(Exception):
    """The request was aborted before it was sent."""


class Stopwatch:
    """Counts the seconds in which it runs."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._started_s: float | None = None

    @property
    def seconds(self) -> float:
        """So far."""
        return self._total_s + (0.0 if self._started_s is None else time.monotonic() - self._started_s)

    def run(self, should_run: bool) -> None:
        """Starts it, or stops it; nothing changes when it is so already."""
        if not should_run:
            self._total_s, self._started_s = self.seconds, None
        elif self._started_s is None:
            self._started_s = time.monotonic()


PARKED: contextvars.ContextVar[Stopwatch | None] = contextvars.ContextVar("parked", default=None)
"""Runs while a request of this context is parked, or waits for somebody else's turn. Whoever bounds a request sets one,
and moves its limit by as much: a request waits so through nobody's fault, and as long as that takes."""


class Request:
    """One request of the client: waiting, then sent."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.is_aborted = False
        self.is_void = False  # an update failed while it was under way: nobody knows which weights wrote it
        self.kept_version: int | None = None  # the oldest whose KV it goes on with, since an update that kept the cache
        self.cached_version: int | None = None  # the oldest whose KV was in the engine's cache when it was sent
        self.num_updates = 0  # that the engine had taken when it was sent
        self.sent_s = 0.0  # on time.monotonic()
        self.halted_s = 0.0  # the engine's halted seconds when it was sent
        self.waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Lets it look again whether it may be sent."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class Traffic:
    """The requests of one client at one engine.

    Consumes requests; each waits, in order of arrival, for one of `max_concurrency` places and until nobody holds
    the traffic; unblocked by the end of another, by the end of the hold, by its own abort, or by `close`.
    """

    def __init__(self, *, max_concurrency: int) -> None:
        """Nothing is under way."""
        self._max_concurrency = max_concurrency
        self._queue: collections.deque[Request] = collections.deque()
        self._sent: set[Request] = set()
        self._emptied = asyncio.Event()
        self._num_holds = 0
        self._is_halted = False
        self._is_closed = False
        self._cached_version: int | None = None
        self.num_updates = 0
        self.busy = Stopwatch()  # runs while a request is under way and decoding is not halted
        self.halted = Stopwatch()

    @property
    def num_waiting(self) -> int:
        """Requests that were not sent yet."""
        return len(self._queue)

    @contextlib.asynccontextmanager
    async def sending(self, request_id: str) -> AsyncIterator[Request]:
        """Within it the request counts as sent. Raises NotSentError when it is aborted before."""
        request = Request(request_id)
        await self._enter(request)
        try:
            yield request
        finally:
            self._sent.discard(request)
            self._note()
            self._wake_first()

    async def _enter(self, request: Request) -> None:
        self._queue.append(request)
        try:
            while not self._may_send(request):
                request.waiter = asyncio.get_running_loop().create_future()
                await request.waiter
        except BaseException:
            self._queue.remove(request)
            self._wake_first()
            raise
        self._queue.remove(request)
        request.sent_s, request.halted_s = time.monotonic(), self.halted.seconds
        request.num_updates, request.cached_version = self.num_updates, self._cached_version
        self._sent.add(request)
        self._note()
        self._wake_first()

    def _may_send(self, request: Request) -> bool:
        if request.is_aborted:
            raise NotSentError
        if self._is_closed:
            return True  # and finds the connections closed
        return not self._num_holds and self._queue[0] is request and len(self._sent) < self._max_concurrency

    def _wake_first(self) -> None:
        if self._queue:
            self._queue[0].wake()

    def _note(self) -> None:
        self.busy.run(bool(self._sent) and not self._is_halted)
        if not self._sent:
            self._emptied.set()

    def halt(self, is_halted: bool) -> None:
        """Says whether the engine is paused: the clocks of the requests stand still while it is."""
        self._is_halted = is_halted
        self.halted.run(is_halted)
        self._note()

    def hold(self) -> None:
        """Sends nothing until `release`."""
        self._num_holds += 1

    def release(self) -> None:
        """Takes one `hold` back."""
        self._num_holds -= 1
        self._wake_first()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within it nothing is sent."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    async def empty(self) -> None:
        """Waits until nothing is under way. Ends only when somebody holds the traffic."""
        while self._sent:
            self._emptied.clear()
            await self._emptied.wait()

    def abort(self, request_id: str | None) -> list[Request]:
        """Ends those that wait with NotSentError. Returns those that were sent. None names all."""
        named = [each for each in (*self._queue, *self._sent) if request_id in (None, each.request_id)]
        for request in named:
            request.is_aborted = True
            request.wake()
        return [request for request in named if request in self._sent]

    def is_sent(self, request: Request) -> bool:
        """True while it is under way."""
        return request in self._sent

    def updated(self, *, kept_version: int | None) -> None:
        """The engine has taken weights. `kept_version`: of the weights before, when their KV was kept."""
        self.num_updates += 1
        if kept_version is None:
            self._cached_version = None
            return
        self._cached_version = older(self._cached_version, kept_version)
        for request in self._sent:
            request.kept_version = older(request.kept_version, self._cached_version)

    def void(self) -> None:
        """The engine has failed to take weights: what is under way there is of weights that nobody knows."""
        for request in self._sent:
            request.is_void = True

    def close(self) -> None:
        """Lets all go on that wait, now and later: what they ask next tells them."""
        self._is_closed = True
        for request in self._queue:
            request.wake()


def older(first: int | None, second: int | None) -> int | None:
    """The lower version; None is none."""
    return min((each for each in (first, second) if each is not None), default=None)

"""The loop of one request: slice after slice, wherever there is a place, until its answer is whole."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from driftgym.agents.generators.asks import Ask
from driftgym.agents.generators.members import ABORT_S, Member
from driftgym.agents.generators.parking import Parking
from driftgym.agents.generators.places import Places
from driftgym.agents.generators.restarts import Background
from driftgym.agents.generators.watch import Watch
from driftgym.errors import GeneratorError
from driftgym.types import Completion, FinishReason

_GRACE_S = 1.0  # an engine's client keeps the deadline itself, and cleans up; past this it is cut off
_MAX_EMPTY = 2
_MAX_SHARES = 4.0
_SHORTEST_WAIT_S = 0.2


@dataclass(slots=True, kw_only=True)
class SliceCounts:
    """How often what happened to the slices of a pool.

    >>> SliceCounts(num_slices=3).num_retried
    0
    """

    num_slices: int = 0
    """Slices that an engine was asked for."""
    num_retried: int = 0
    """Slices that were lost with their engine, or failed there, and were asked for again."""
    num_moved: int = 0
    """Times that a request went on at another engine than before."""
    num_slow: int = 0
    """Slices that were cut short, their tokens kept, since another engine may be faster."""


class Slicer:
    """Runs requests in slices of `chunk_tokens`.

    A slice that fails is asked for again, at another engine, from the tokens received before it: a request loses at
    most the slice that was under way. One that an engine ends by itself (`abort`, of which nobody spoke) goes on from
    what it gave. A slice may take half of what is left until the deadline, and at most four times its share of that;
    then, if another engine has a place, the slow one is told to abort, and the request goes on there with what came.
    Time for which the engine is paused or takes weights is not counted.
    """

    def __init__(
        self,
        places: Places,
        parking: Parking,
        watch: Watch,
        *,
        chunk_tokens: int | None,
        newest_version: Callable[[], int | None],
        background: Background,
    ) -> None:
        """Runs nothing yet.

        Args:
            places: where slices are run.
            parking: holds requests between iterations.
            watch: is told of engines that fail.
            chunk_tokens: the length of a slice; None asks for whole answers.
            newest_version: of the weights that engines can have; None while nobody knows.
            background: where slow slices are hurried.
        """
        self._places = places
        self._parking = parking
        self._watch = watch
        self._chunk_tokens = chunk_tokens
        self._newest_version = newest_version
        self.background = background
        self.counts = SliceCounts()

    async def run(self, ask: Ask) -> Completion:
        """The whole answer to `ask`.

        Raises:
            GeneratorError: no engine gave it by the deadline, or none is left.
            ValueError: the prompt is wrong.
        """
        last: Member | None = None
        try:
            while not ask.is_aborted:
                num_tokens = self._parking.num_allowed(ask)
                if num_tokens < 1:
                    await self._parking.park(ask)
                    continue
                member = await self._place(ask)
                if member is None or ask.is_aborted:  # the abort may have come together with the place
                    continue
                if last is not None and member is not last:
                    ask.num_moved += 1
                    self.counts.num_moved += 1
                last = member
                if self._chunk_tokens is not None:
                    num_tokens = min(num_tokens, self._chunk_tokens)
                part = await self._slice(ask, member, num_tokens)
                if part is not None and self._is_last(ask, part, num_tokens):
                    return ask.completion(self._reason(ask, part))
            return ask.completion("abort")
        finally:
            ask.settle(None)
            self._places.give_back(ask)

    def halted_s(self, member: Member) -> float:
        """Seconds so far in which slices at `member` stood still through no fault of its own."""
        return self._places.held.seconds + member.halted.seconds

    def is_too_slow(self, ask: Ask, member: Member) -> bool:
        """Whether the slice under way there, whose time is over, goes on elsewhere; counts it, and has it looked at."""
        slow = GeneratorError(f"generation request {ask.request_id} takes long")
        self._watch.look(member, slow, has_failed=False)
        if not self._places.has_other(ask):
            return False
        ask.slow.add(member)
        self.counts.num_slow += 1
        return True

    async def _place(self, ask: Ask) -> Member | None:
        """A place for the next slice; None when the request was aborted while it waited."""
        try:
            return await self._places.take(ask)
        except GeneratorError:
            if ask.is_aborted and not self._places.is_closed:
                return None
            raise

    def _is_last(self, ask: Ask, part: Completion, num_tokens: int) -> bool:
        """True when the answer is whole with `part`, which was to have `num_tokens`."""
        ask.add(part, iteration=self._parking.iteration)
        if part.finish_reason == "abort":
            if ask.is_aborted:
                return True
            self._note_unasked_abort(ask, part)
            return ask.num_left < 1
        # An engine that stops short of what it was asked for, without a stop token, will not write more.
        return part.finish_reason == "stop" or ask.num_left < 1 or len(part.token_ids) < num_tokens

    def _reason(self, ask: Ask, part: Completion) -> FinishReason:
        """Why the answer ends with `part`. An engine may end a slice by itself after its last token."""
        return "length" if part.finish_reason == "abort" and not ask.is_aborted else part.finish_reason

    def _note_unasked_abort(self, ask: Ask, part: Completion) -> None:
        ask.num_empty += not len(part.token_ids)
        if ask.num_empty > _MAX_EMPTY and ask.member is not None:
            ask.num_empty = 0
            self._fail(ask, ask.member, GeneratorError(f"request {ask.request_id} was aborted without a token"))

    async def _slice(self, ask: Ask, member: Member, num_tokens: int) -> Completion | None:
        """What the engine wrote of the next slice; None when it failed, and may be tried elsewhere."""
        ask.num_sent += 1
        self.counts.num_slices += 1
        slice_ = _Slice(self, ask, member, limit_s=_slice_limit_s(ask, num_tokens))
        error: GeneratorError
        try:
            async with asyncio.timeout(ask.remaining_s + _GRACE_S) as limit:
                with slice_.begin(limit):
                    part = await member.generator.generate(
                        ask.prompt(),
                        ask.slice_sampling(num_tokens),
                        request_id=ask.wire_id,
                        session_id=ask.session_id,
                        deadline_s=ask.deadline_s,
                        min_policy_version=ask.min_policy_version,
                    )
                    self._check_versions(part, member)
                    member.num_failed = 0
                    return part
        except GeneratorError as caught:
            error = caught
        except TimeoutError:
            reason = "was taken from" if slice_.is_interrupted else "got no answer by its deadline from"
            error = GeneratorError(f"generation request {ask.request_id} {reason} generator {member.name}")
        if not (slice_.is_interrupted and ask.is_aborted):
            self._fail(ask, member, error)
        return None

    def _check_versions(self, part: Completion, member: Member) -> None:
        """Raises GeneratorError for tokens of weights that nobody has published: no lag could be told of them."""
        newest = self._newest_version()
        if newest is not None and (part.policy_versions > newest).any():
            said = int(part.policy_versions.max())
            raise GeneratorError(f"generator {member.name} tells of version {said}; the newest is {newest}")

    def _fail(self, ask: Ask, member: Member, error: GeneratorError) -> None:
        """Holds it against the engine, and has that looked at. Raises `error` when the deadline has passed."""
        ask.shun(member, error)
        self._places.give_back(ask)
        if self._places.is_closed:
            raise error
        self._watch.look(member, error)
        if ask.remaining_s <= 0:
            raise error
        self.counts.num_retried += 1


class _Slice:
    """One slice that an engine is writing. Within it, it can be hurried or interrupted."""

    def __init__(self, slicer: Slicer, ask: Ask, member: Member, *, limit_s: float) -> None:
        self._slicer = slicer
        self._ask = ask
        self._member = member
        self._limit_s = limit_s
        self._wire_id = ask.wire_id
        self._timeout: asyncio.Timeout | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._halted_s = 0.0
        self.is_interrupted = False

    def begin(self, timeout: asyncio.Timeout) -> "_Slice":
        """To be entered next; `timeout` is the block's, and is what interrupts it."""
        self._timeout = timeout
        return self

    def __enter__(self) -> None:
        self._halted_s = self._slicer.halted_s(self._member)
        self._ask.under_way = self
        self._member.tenants.add(self)
        self._look_after(self._limit_s)

    def __exit__(self, *_: object) -> None:
        self._timeout = None
        self._ask.under_way = None
        self._member.tenants.discard(self)
        for timer in self._timers:
            timer.cancel()

    def _look_after(self, delay_s: float) -> None:
        self._timers = [asyncio.get_running_loop().call_later(delay_s, self._look)]

    def _look(self) -> None:
        """Its time is over, unless it stood still for some of it, or no other engine could go on."""
        before_s, self._halted_s = self._halted_s, self._slicer.halted_s(self._member)
        left_s = self._ask.remaining_s
        if self._halted_s > before_s:
            self._look_after(self._halted_s - before_s)
        elif self._slicer.is_too_slow(self._ask, self._member):
            self._slicer.background.start(self.hurry())
        elif left_s > _SHORTEST_WAIT_S:
            self._look_after(max(left_s / 2, _SHORTEST_WAIT_S))

    def interrupt(self) -> None:
        """See `Tenant`."""
        if self._timeout is not None and not self._timeout.expired():
            self.is_interrupted = True
            self._timeout.reschedule(asyncio.get_running_loop().time())

    def expect_end(self) -> None:
        """See `Tenant`."""
        self._timers.append(asyncio.get_running_loop().call_later(ABORT_S, self.interrupt))

    async def hurry(self) -> None:
        """See `Tenant`."""
        await self._member.hurry(self, request_id=self._wire_id)


def _slice_limit_s(ask: Ask, num_tokens: int) -> float:
    """How long a slice of `num_tokens` may take: see `Slicer`."""
    share = num_tokens / ask.num_left
    return max(0.0, ask.remaining_s) * min(0.5, _MAX_SHARES * share)

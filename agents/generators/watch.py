"""Whether the engines of a pool live: looked at in turn, at once where a request failed, and while they are out."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from driftgym.agents.generators.base import WeightVersion
from driftgym.agents.generators.members import Member
from driftgym.agents.generators.restarts import Background
from driftgym.agents.generators.roster import Roster
from driftgym.errors import GeneratorError

_LOOK_PAUSE_S = 0.1
_LONGEST_DOUBT_S = 5.0
_LONGEST_PAUSE_S = 60.0
_MAX_CATCH_UPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """How engines are watched. An engine goes out after several misses and comes back after several answers.

    >>> WatchOptions(interval_s=1.0).num_failures_out
    3
    """

    interval_s: float = 5.0
    """Between two looks at an engine."""
    timeout_s: float = 5.0
    """An engine that does not say within this how it stands has missed."""
    num_failures_out: int = 3
    """So many misses in a row take it out."""
    num_successes_in: int = 2
    """So many answers in a row let it back in, once it has the latest weights."""


class Watch:
    """Looks at the engines that are in, and takes out those that are gone.

    Consumes the time and the failures of requests; waits for the engines' answers; each is bounded by
    `options.timeout_s`.
    """

    def __init__(
        self,
        roster: Roster,
        *,
        options: WatchOptions,
        background: Background,
        on_change: Callable[[], None],
        are_right: Callable[[Member, WeightVersion], bool],
    ) -> None:
        """Looks at nothing before `start`, but where a request fails.

        Args:
            roster: whose engines.
            options: how often, and how patient.
            background: where looks run.
            on_change: called when an engine is doubted no more.
            are_right: tells whether an engine has the weights that it should have.
        """
        self._roster = roster
        self._options = options
        self._background = background
        self._on_change = on_change
        self._are_right = are_right
        self._rounds: asyncio.Task[None] | None = None
        self._is_closed = False

    def start(self) -> None:
        """Looks at all engines from now on, every `options.interval_s`; nothing happens when it does already."""
        if self._rounds is None and not self._is_closed:
            self._rounds = asyncio.get_running_loop().create_task(self._go_round(), name="watch over generators")

    async def close(self) -> None:
        """Ends the rounds."""
        self._is_closed = True
        if self._rounds is not None:
            self._rounds.cancel()
            await asyncio.wait((self._rounds,))

    def look(self, member: Member, error: GeneratorError, *, has_failed: bool = True) -> None:
        """Finds out at once whether an engine still lives, after `error`: one look for all that fail at once.

        An engine that says that it is well, and fails again and again, stays doubted for longer each time.
        """
        if not member.is_in or (member.look is not None and not member.look.done()):
            return
        member.num_failed += has_failed
        member.is_doubted = True
        member.look = self._background.start(self._look(member, error))

    async def _look(self, member: Member, error: GeneratorError) -> None:
        try:
            while not await self._is_well(member, error) and member.is_in:  # noqa: ASYNC110  # it has no event
                await asyncio.sleep(_LOOK_PAUSE_S)
            if member.num_failed > 1:
                await asyncio.sleep(min(_LOOK_PAUSE_S * 2 ** min(member.num_failed, 16), _LONGEST_DOUBT_S))
        finally:
            member.is_doubted = False
            self._on_change()

    async def _go_round(self) -> None:
        while True:
            await asyncio.sleep(self._options.interval_s)
            idle = [member for member in self._roster.members if member.is_in and not member.is_doubted]
            await asyncio.gather(*(self._is_well(member, None) for member in idle))

    async def _is_well(self, member: Member, cause: GeneratorError | None) -> bool:
        """Asks once; the last of several misses takes it out. While it is given weights it need not answer."""
        known = member.policy_version
        try:
            async with asyncio.timeout(self._options.timeout_s):
                health = await member.generator.health()
        except (GeneratorError, TimeoutError) as error:
            if member.is_updating or not member.is_in:
                return False
            member.num_misses += 1
            if member.num_misses >= self._options.num_failures_out:
                self._roster.lose(member, cause or _as_generator_error(error))
            return False
        member.num_misses = 0
        is_settled = known == member.policy_version and member.is_in and not member.is_updating
        if is_settled and not self._are_right(member, health.version):
            reason = f"it has weights {health.version}, and was given {known}: it is not ours alone, or began anew"
            self._roster.put_behind(member, GeneratorError(reason))
        return True


class Recovery:
    """Brings engines that are out back in: each has a task that looks until it answers, and gives it weights."""

    def __init__(
        self,
        roster: Roster,
        *,
        options: WatchOptions,
        background: Background,
        catch_up: Callable[[Member], Awaitable[None]],
    ) -> None:
        """`catch_up` brings an engine to the latest weights, or raises GeneratorError."""
        self._roster = roster
        self._options = options
        self._background = background
        self._catch_up = catch_up

    def start(self, member: Member) -> None:
        """Works on `member`, which is out, beside the caller."""
        self._background.start(self._recover(member))

    async def _recover(self, member: Member) -> None:
        """Pauses grow with each time that it does not take the weights."""
        options = self._options
        between_s = min(1.0, options.interval_s)
        num_tries = 0
        while member.is_out and not member.is_leaving:
            if not await self._is_well(member, between_s=between_s):
                return
            try:
                await self._catch_up(member)
                self._roster.let_back(member)
                return
            except GeneratorError as error:
                num_tries += 1
                member.outage = str(error)
            if member.is_replaceable and num_tries >= _MAX_CATCH_UPS:
                self._roster.lose(member, GeneratorError(member.outage))
                return
            await asyncio.sleep(min(between_s * 2**num_tries, _LONGEST_PAUSE_S))

    async def _is_well(self, member: Member, *, between_s: float) -> bool:
        """Waits until it has answered often enough in a row, at once where it never missed; False when it is lost."""
        num_answers = 0
        while member.is_out and not member.is_leaving:
            try:
                async with asyncio.timeout(self._options.timeout_s):
                    await member.generator.load()
            except (GeneratorError, TimeoutError) as error:
                num_answers = 0
                self._note_miss(member, _as_generator_error(error))
                await asyncio.sleep(self._options.interval_s)
                continue
            num_answers += 1
            if num_answers >= (self._options.num_successes_in if member.num_misses else 1):
                return True
            await asyncio.sleep(between_s)
        return False

    def _note_miss(self, member: Member, error: GeneratorError) -> None:
        member.num_misses += 1
        member.outage = str(error)
        if member.is_replaceable and member.num_misses >= self._options.num_failures_out:
            self._roster.lose(member, error)


def _as_generator_error(error: GeneratorError | TimeoutError) -> GeneratorError:
    return error if isinstance(error, GeneratorError) else GeneratorError("it does not say in time how it stands")

"""Several engines as one: where a request goes, what happens when an engine dies, and who has which weights.

A session stays on one engine, where its prefix lies, while that one is not overloaded; a new session goes to the
engine with the fewest requests under way, then to the one that was given the fewest so far. An engine that does not
answer any more, or that fails to take weights, is taken out, which is reported; its requests are sent to another
one, and `restart` is asked for a new one.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from driftgym.agents.generators.base import Generator, GeneratorHealth, WeightUpdateMode, WeightVersion
from driftgym.agents.generators.restarts import LOST, RESTARTED, Background, OnEvent, Restart, Restarts, close_quietly
from driftgym.agents.generators.routing import Member, Router
from driftgym.errors import GeneratorError
from driftgym.types import Completion, SamplingParams, WeightUpdate

_LOGGER = logging.getLogger(__name__)
_HEALTH_S = 5.0


def _log_event(_event: str, text: str) -> None:
    _LOGGER.warning("%s", text)


class GeneratorPool:
    """Implements `Generator` over one or more engines; the module says where requests go and what becomes of a loss."""

    def __init__(
        self,
        generators: Sequence[Generator],
        *,
        policy_version: int,
        restart: Restart | None = None,
        restart_timeout_s: float = 60.0,
        max_restarts: int = 3,
        on_event: OnEvent = _log_event,
    ) -> None:
        """Takes over the generators: `close` closes them.

        Args:
            generators: one at least.
            policy_version: of the weights that all of them have.
            restart: called for each engine that is lost, again when it fails; None goes on without it.
            restart_timeout_s: bounds one call of `restart`.
            max_restarts: so many calls of `restart` in all; engines lost after them are not replaced.
            on_event: told of every loss and replacement; by default they are logged.
        """
        if not generators:
            raise ValueError("a pool needs a generator")
        self._names = map(str, itertools.count())
        self._members = [Member(each, name=next(self._names), policy_version=policy_version) for each in generators]
        self._num_places = len(generators)
        self._latest_version = policy_version
        self._latest_update: WeightUpdate | None = None
        self._router = Router()
        self._restart_timeout_s = restart_timeout_s
        self._on_event = on_event
        self._changed = asyncio.Event()
        self._updating = asyncio.Lock()
        self._restarts = Restarts(
            restart,
            timeout_s=restart_timeout_s,
            max_restarts=max_restarts,
            let_in=self._let_in,
            on_event=on_event,
            on_end=self._changed.set,
        )
        self._aside = Background(self._changed.set)
        self._last_busy_s: dict[str, float] = {}
        self._is_paused = False
        self._is_closed = False
        self.num_retried = 0  # requests that were sent to another engine after one failed

    @property
    def min_version(self) -> int:
        """The lowest version that the pool answers with from now on."""
        return min((member.policy_version for member in self._members), default=self._latest_version)

    @property
    def latest_update(self) -> WeightUpdate | None:
        """The weights that the pool was given last; None when its generators still have those they came with."""
        return self._latest_update

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        session_id: str,
        deadline_s: float,
        min_policy_version: int = 0,
    ) -> Completion:
        """As `Generator.generate`. Waits, by its deadline, for an engine that has the version."""
        failed: list[Member] = []
        error: GeneratorError | None = None
        while True:
            member = await self._choose(session_id, min_policy_version, failed, deadline_s, error)
            member.num_running += 1
            try:
                return await member.generator.generate(
                    prompt_token_ids,
                    sampling,
                    request_id=request_id,
                    session_id=session_id,
                    deadline_s=deadline_s,
                    min_policy_version=min_policy_version,
                )
            except GeneratorError as caught:
                error = caught
            finally:
                member.num_running -= 1
            failed.append(member)
            if self._is_closed:
                raise error
            look = self._look_at(member, error)
            if time.monotonic() >= deadline_s:
                raise error
            await asyncio.wait((look,))
            self.num_retried += 1

    async def _choose(
        self,
        session_id: str,
        min_policy_version: int,
        failed: Sequence[Member],
        deadline_s: float,
        error: GeneratorError | None,
    ) -> Member:
        """The engine for a request, waiting for one that has the version, or that is being started.

        Raises:
            GeneratorError: none is left, or none came by the deadline.
        """
        while True:
            fit = [m for m in self._members if m.policy_version >= min_policy_version and m not in failed]
            if fit:
                return self._router.route(session_id, fit)
            others = [m for m in self._members if m not in failed]
            if self._is_closed or not (others or self._restarts.tasks.is_busy):
                raise error or GeneratorError("no generator is left")
            try:
                await self._wait_for_change(deadline_s)
            except TimeoutError:
                raise error or GeneratorError(f"no generator came to version {min_policy_version} in time") from None

    def _look_at(self, member: Member, error: GeneratorError) -> asyncio.Task[None]:
        """Finds out whether an engine still lives, after a request that failed: one task for all that fail at once."""
        if member.look is None or member.look.done():
            member.look = self._aside.start(self._take_out_if_dead(member, error))
        return member.look

    async def _take_out_if_dead(self, member: Member, error: GeneratorError) -> None:
        """An engine that does not say how it stands is gone."""
        try:
            async with asyncio.timeout(_HEALTH_S):
                await member.generator.health()
        except (GeneratorError, TimeoutError):
            self._take_out(member, error)

    def _take_out(self, member: Member, error: GeneratorError) -> None:
        if member not in self._members:
            return
        self._members.remove(member)
        self._on_event(LOST, f"generator {member.name} is taken out, {len(self._members)} are left: {error}")
        self._aside.start(close_quietly(member.generator))
        if not self._is_closed:
            self._restarts.replace()
        self._changed.set()

    async def _let_in(self, generator: Generator) -> None:
        """Makes it one of the pool, once it has the latest weights."""
        async with self._updating:
            version = (await generator.health()).version.policy_version
            if version < self._latest_version:
                if self._latest_update is None:
                    raise GeneratorError(f"it has weights {version}, the others {self._latest_version}")
                await generator.update_weights(self._latest_update, mode="in_flight", timeout_s=self._restart_timeout_s)
                version = self._latest_version
            is_paused = False
            while is_paused != self._is_paused:  # which may change while the engine is told
                is_paused = self._is_paused
                await (generator.pause() if is_paused else generator.resume())
            member = Member(generator, name=next(self._names), policy_version=version)
            self._members.append(member)
        self._on_event(RESTARTED, f"generator {member.name} joins in the place of a lost one, with weights {version}")

    async def abort(self, request_id: str | None = None) -> None:
        """As `Generator.abort`."""
        await self._each(lambda member: member.generator.abort(request_id))

    async def pause(self) -> None:
        """As `Generator.pause`."""
        self._is_paused = True
        await self._each(lambda member: member.generator.pause())

    async def resume(self) -> None:
        """As `Generator.resume`."""
        self._is_paused = False
        await self._each(lambda member: member.generator.resume())

    async def update_weights(
        self, update: WeightUpdate, *, mode: WeightUpdateMode, keep_kv: bool = False, timeout_s: float
    ) -> None:
        """Brings every engine to the version; one that fails is taken out, which is reported.

        Raises:
            GeneratorError: none took the weights, and no new engine came in time.
        """
        deadline_s = time.monotonic() + timeout_s
        async with self._updating:
            self._latest_version, self._latest_update = update.policy_version, update

            async def bring(member: Member) -> None:
                await member.generator.update_weights(update, mode=mode, keep_kv=keep_kv, timeout_s=timeout_s)
                member.policy_version = update.policy_version
                self._changed.set()

            await self._each(bring)
        await self._wait_for_a_member(deadline_s)

    async def _each(self, call: Callable[[Member], Awaitable[None]]) -> None:
        """Runs `call` on all engines at once, and takes out those on which it fails. Raises when none is left."""
        members = list(self._members)
        results = await asyncio.gather(*(call(member) for member in members), return_exceptions=True)
        for member, result in zip(members, results, strict=True):
            if isinstance(result, GeneratorError):
                self._take_out(member, result)
            elif isinstance(result, BaseException):
                raise result
        if not (self._members or self._restarts.tasks.is_busy):
            raise GeneratorError("no generator is left")

    async def _wait_for_a_member(self, deadline_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            while not self._members and self._restarts.tasks.is_busy:
                await self._wait_for_change(deadline_s)
        if not self._members:
            raise GeneratorError("no generator is left, and none could be started in time")

    async def _wait_for_change(self, deadline_s: float) -> None:
        self._changed.clear()
        async with asyncio.timeout(deadline_s - time.monotonic()):
            await self._changed.wait()

    async def health(self) -> GeneratorHealth:
        """The pool as one engine: the lowest version, sums of requests, and the mean of the busy seconds.

        One that does not answer counts with its busy seconds so far; its requests find out whether it is dead or slow.
        """
        healths: list[GeneratorHealth] = []

        async def ask(member: Member) -> None:
            with contextlib.suppress(GeneratorError):
                health = await member.generator.health()
                self._last_busy_s[member.name] = health.busy_s
                healths.append(health)

        await self._each(ask)
        if not healths:
            raise GeneratorError("no generator answers")
        busy_s = sum(self._last_busy_s.values()) / self._num_places
        return _combined(healths, policy_version=self.min_version, busy_s=busy_s)

    async def close(self) -> None:
        """Closes every engine. Requests under way raise GeneratorError."""
        self._is_closed = True
        self._changed.set()
        await asyncio.shield(self._close_all())

    async def _close_all(self) -> None:
        self._restarts.tasks.cancel()
        members, self._members = self._members, []
        await asyncio.gather(*(close_quietly(member.generator) for member in members))
        await self._restarts.tasks.wait()
        await self._aside.wait()


def _combined(healths: Sequence[GeneratorHealth], *, policy_version: int, busy_s: float) -> GeneratorHealth:
    return GeneratorHealth(
        version=WeightVersion(incarnation=healths[0].version.incarnation, policy_version=policy_version),
        num_running=sum(health.num_running for health in healths),
        num_queued=sum(health.num_queued for health in healths),
        busy_s=busy_s,
    )

"""Several engines as one. `GeneratorPool` only wires; what it is made of:

`slices` runs a request slice after slice, `places` and `routing` say where, `parking` holds what has had its share of
an iteration, `watch` finds out who lives, `roster` and `joining` know who belongs, `rolling` brings weights, `figures`
tells how it all stands, and `wiring` puts these together.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Sequence

from driftgym.agents.generators.asks import Ask
from driftgym.agents.generators.base import (
    Generator,
    GeneratorHealth,
    GeneratorLoad,
    Scores,
    WeightUpdateMode,
)
from driftgym.agents.generators.restarts import OnEvent, Restart, close_quietly
from driftgym.agents.generators.slices import SliceCounts
from driftgym.agents.generators.watch import WatchOptions
from driftgym.agents.generators.wiring import PoolOptions, PoolParts
from driftgym.errors import GeneratorError
from driftgym.types import Completion, SamplingParams, WeightUpdate

_LOGGER = logging.getLogger(__name__)
_REMOVE_S = 60.0


def _log_event(_event: str, text: str) -> None:
    _LOGGER.warning("%s", text)


class GeneratorPool:
    """Implements `Generator` over one or more engines, which may come and go.

    A session (an episode) stays on one engine, where its prefix lies, unless that one is overloaded, out, full or
    being given weights; a new one goes to the engine with the fewest slices under way. See `Slicer` for what becomes
    of requests whose engine dies, `Parking` for partial rollouts, `Weights` for updates.
    """

    def __init__(
        self,
        generators: Sequence[Generator],
        *,
        policy_version: int,
        came_with: WeightUpdate | None = None,
        chunk_tokens: int | None = None,
        iteration_tokens: int | None = None,
        max_concurrency: int | None = None,
        max_paused_share: float = 1.0,
        max_parked_s: float = 1800.0,
        idle_s: float = 1.0,
        watch: WatchOptions | None = None,
        restart: Restart | None = None,
        restart_timeout_s: float = 60.0,
        max_restarts: int = 3,
        on_event: OnEvent = _log_event,
    ) -> None:
        """Takes over the generators: `close` closes them.

        Args:
            generators: one at least. They are named 0, 1, ...
            policy_version: of the weights that all of them have.
            came_with: where those weights are, for engines that join before the first update.
            chunk_tokens: the length of a slice; None asks for whole answers.
            iteration_tokens: a request that got so many tokens in one iteration waits for the next; None: never.
            max_concurrency: slices under way at one engine at most; more wait here, which counts as queued.
            max_paused_share: of the engines, at most so many are given weights at once; one at least.
            max_parked_s: a request waits at most so long for the next iteration, then goes on.
            idle_s: so do all that wait when the engines have had nothing else to do for so long.
            watch: how engines are watched; None takes the defaults.
            restart: called for each of `generators` that is lost, again when it fails. None waits for their return.
            restart_timeout_s: bounds one call of `restart`, and one engine's catching up with the weights.
            max_restarts: so many calls of `restart` in all.
            on_event: told of every loss, return and replacement; by default they are logged.
        """
        if not generators:
            raise ValueError("a pool needs a generator")
        options = PoolOptions(
            policy_version=policy_version,
            came_with=came_with,
            chunk_tokens=chunk_tokens,
            iteration_tokens=iteration_tokens,
            max_concurrency=max_concurrency,
            max_paused_share=max_paused_share,
            max_parked_s=max_parked_s,
            idle_s=idle_s,
            watch=watch or WatchOptions(),
            restart=restart,
            restart_timeout_s=restart_timeout_s,
            max_restarts=max_restarts,
            on_event=on_event,
        )
        self._parts = PoolParts(options, on_change=self._settle)
        self._changed = asyncio.Event()
        self._orders = itertools.count()
        self._asks: set[Ask] = set()
        for each in generators:
            self._parts.joining.begin_with(each, policy_version=policy_version, is_replaceable=restart is not None)

    @property
    def min_version(self) -> int:
        """The lowest version that the pool answers with from now on."""
        return min(
            (member.policy_version for member in self._parts.roster.present), default=self._parts.weights.latest_version
        )

    @property
    def latest_update(self) -> WeightUpdate | None:
        """The latest weights; None when the engines still have those that they came with, and nobody said which."""
        return self._parts.weights.latest_update

    @property
    def latest_full(self) -> WeightUpdate | None:
        """The latest weights that an engine can be started with; the pool brings it up from there when it joins."""
        return self._parts.weights.latest_full

    @property
    def counts(self) -> SliceCounts:
        """How often what happened to the slices, since the start."""
        return self._parts.slicer.counts

    @property
    def num_parked(self) -> int:
        """How often a request was parked, since the start."""
        return self._parts.parking.num_parked

    @property
    def names(self) -> tuple[str, ...]:
        """The engines that answer requests; one that is out is not among them."""
        return tuple(member.name for member in self._parts.roster.present)

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
        """As `Generator.generate`. Waits, by its deadline, for an engine that has the version and room.

        With a seed, each slice is drawn with a seed of its own, made from it and the number of tokens so far; the
        tokens are therefore other ones than those of the same request in one piece. `latency_s` is the sum of the
        slices' own; a deadline moves by the time that its request was parked.
        """
        self._parts.watch.start()
        ask = Ask(
            prompt_token_ids,
            sampling,
            request_id=request_id,
            session_id=session_id,
            deadline_s=deadline_s,
            min_policy_version=min_policy_version,
            order=next(self._orders),
        )
        self._asks.add(ask)
        try:
            return await self._parts.slicer.run(ask)
        finally:
            self._asks.discard(ask)

    async def score(self, token_ids: Sequence[int], *, num_given: int, deadline_s: float) -> Scores:
        """As `Generator.score`; an engine that fails is followed by another one."""
        error = GeneratorError("no generator answers")
        for member in sorted(self._parts.roster.present, key=lambda each: (each.is_updating, each.num_running)):
            try:
                return await member.generator.score(token_ids, num_given=num_given, deadline_s=deadline_s)
            except GeneratorError as caught:
                error = caught
                self._parts.watch.look(member, error)
                if time.monotonic() >= deadline_s:
                    break
        raise error

    async def abort(self, request_id: str | None = None) -> None:
        """As `Generator.abort`; also requests that wait or are parked."""
        named = [ask for ask in self._asks if request_id in (None, ask.request_id)]
        for ask in named:
            ask.is_aborted = True
            self._parts.places.wake(ask, GeneratorError("aborted"))
            self._parts.parking.wake(ask)
        if request_id is None:
            await asyncio.gather(*(member.hurry() for member in self._parts.roster.members if member.tenants))
        else:
            await asyncio.gather(*(ask.under_way.hurry() for ask in named if ask.under_way is not None))

    def next_iteration(self) -> None:
        """Begins an iteration: requests that were parked go on, and each may get `iteration_tokens` more."""
        self._parts.parking.next_iteration()

    async def pause(self) -> None:
        """As `Generator.pause`; new requests wait here."""
        await self._parts.joining.pause()

    async def resume(self) -> None:
        """As `Generator.resume`."""
        await self._parts.joining.resume()

    async def update_weights(
        self, update: WeightUpdate, *, mode: WeightUpdateMode, keep_kv: bool = False, timeout_s: float
    ) -> None:
        """Brings every engine to the version, a share of them at once; one that fails is out until it caught up.

        Meanwhile new slices go to the other engines, and wait when there is none. With `drain` the requests that have
        begun at an engine end there with the old weights, all their slices, parked ones excepted.

        Raises:
            GeneratorError: none took the weights, and none caught up or was started in time.
            ValueError: `keep_kv` without `in_flight`.
        """
        self._parts.watch.start()
        deadline_s = time.monotonic() + timeout_s
        await self._parts.weights.update(update, mode=mode, keep_kv=keep_kv, deadline_s=deadline_s)
        try:
            async with asyncio.timeout(deadline_s - time.monotonic()):
                await self._until_one_is_in()
        except TimeoutError:
            outages = self._parts.roster.outages
            raise GeneratorError(f"no generator has weights {update.policy_version} in time ({outages})") from None

    async def _until_one_is_in(self) -> None:
        while not self._parts.roster.present:
            self._parts.roster.check_any()
            self._changed.clear()
            await self._changed.wait()

    def _settle(self) -> None:
        """Something changed among the engines: those who wait look again."""
        self._changed.set()
        self._parts.places.settle()

    async def add(self, generator: Generator, *, name: str | None = None) -> str:
        """Takes another engine over, once it has the latest weights; returns its name.

        Raises:
            ValueError: the name is taken.
            GeneratorError: it does not answer or does not take the weights; it is closed then.
        """
        return await self._parts.joining.add(generator, name=name)

    async def remove(self, name: str, *, drain: bool = True, timeout_s: float = _REMOVE_S) -> None:
        """Gives an engine up, and closes it. Its requests go on at others, from the tokens that they have.

        Args:
            name: as `add` returned it, or `names` tells it.
            drain: slices under way there end first; without it, they end at once, with what they have.
            timeout_s: bounds that; slices that are still there are cut off, and asked for again elsewhere.

        Raises:
            KeyError: there is none of that name.
        """
        await self._parts.joining.remove(name, drain=drain, timeout_s=timeout_s)

    async def health(self) -> GeneratorHealth:
        """The pool as one engine: the lowest version, sums of requests, the mean busy seconds. Those out are left out.

        Raises GeneratorError when none answers.
        """
        return await self._parts.figures.health(min_version=self.min_version)

    async def load(self) -> GeneratorLoad:
        """As `Generator.load`: sums over the engines that are in, and the requests that wait or are parked here."""
        return await self._parts.figures.load()

    async def close(self) -> None:
        """Closes every engine. Requests under way raise GeneratorError."""
        self._parts.places.close()
        self._parts.parking.wake_all()
        await asyncio.shield(self._close_all())

    async def _close_all(self) -> None:
        generators = self._parts.roster.empty()
        self._parts.restarts.tasks.cancel()
        self._parts.work.cancel()
        await self._parts.watch.close()
        await asyncio.gather(*(close_quietly(generator) for generator in generators))
        await self._parts.restarts.tasks.wait()
        await self._parts.work.wait()
        await self._parts.aside.wait()

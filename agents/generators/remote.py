"""The client of one engine over HTTP, whatever it speaks: who is sent when, deadlines, pauses, and new weights."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from driftgym.agents.generators.answers import empty_completion, parse_answer, parse_scores
from driftgym.agents.generators.base import (
    GeneratorHealth,
    GeneratorLoad,
    Scores,
    WeightUpdateMode,
    WeightVersion,
)
from driftgym.agents.generators.controls import ControlCalls, EngineControls, PauseMode
from driftgym.agents.generators.engine_info import EngineInfo
from driftgym.agents.generators.http import EngineHttp
from driftgym.agents.generators.traffic import NotSentError, Request, Traffic
from driftgym.agents.generators.vocabulary import checked_ids
from driftgym.errors import GeneratorError
from driftgym.types import Completion, SamplingParams, WeightUpdate

_UNKNOWN = "its weights are unknown since an update failed; update it"


class OwnedServer(Protocol):
    """A server that a client started, and ends."""

    async def close(self, *, timeout_s: float) -> None:
        """Ends the server."""
        ...


class EngineWire(Protocol):
    """The calls of one kind of engine that sample, score and take weights. All raise GeneratorError.

    Answers have the form of SGLang's `/generate`: `output_ids` and `meta_info`; see `answers`.
    """

    async def generate(self, ids: list[int], sampling: SamplingParams, *, request_id: str) -> Mapping[str, Any]:
        """Samples one answer."""
        ...

    async def score(self, ids: list[int], *, start: int, request_id: str) -> Mapping[str, Any]:
        """Scores `ids`: `meta_info.input_token_logprobs` at least from position `start` + 1 on.

        The engine computes anew from `start` on, without its cache of prefixes.
        """
        ...

    async def plan(self, update: WeightUpdate, version: WeightVersion) -> Mapping[str, Any]:
        """What `take` is given: the folder under `model_path`, and what else the engine asks for.

        Raises before anything is changed where the engine does not take such weights.
        """
        ...

    async def take(self, plan: Mapping[str, Any], *, flushes: bool) -> None:
        """Has the engine read the weights, and drop its KV cache when it `flushes`."""
        ...


class RemoteGenerator:
    """One engine behind a URL. Answers of another life of the run, or of unknown weights, are refused.

    Requests wait here, not at the engine, while it is paused or takes weights: so each is sent to known weights, and
    an engine that drains is given nothing new.
    """

    def __init__(
        self,
        http: EngineHttp,
        *,
        info: EngineInfo,
        wire: EngineWire,
        calls: ControlCalls,
        incarnation: int,
        max_concurrency: int,
        server: OwnedServer | None,
        close_timeout_s: float,
    ) -> None:
        """Takes no connection yet.

        Args:
            http: the connections, given up by `close`.
            info: asks the engine what it is.
            wire: asks the engine for answers, and gives it weights.
            calls: pauses the engine, and aborts its requests.
            incarnation: the life of the run; answers and weights of another are refused.
            max_concurrency: as many generations can be under way at once; more wait here, which counts as queued.
            server: ended by `close`.
            close_timeout_s: bounds the end of `server`.
        """
        self._http = http
        self.url = http.url
        self._incarnation = incarnation
        self._info = info
        self._wire = wire
        self._traffic = Traffic(max_concurrency=max_concurrency)
        self._controls = EngineControls(http, self._traffic, calls=calls)
        self._server = server
        self._close_timeout_s = close_timeout_s
        self._updating = asyncio.Lock()
        self._is_paused = False
        self._is_unknown = False  # which weights it has: an update failed
        self._is_loading = False  # an update has it stand still, and lets it go on when it ends

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

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
        """As `Generator.generate`. Engines find shared prefixes by the tokens, so `session_id` is not sent."""
        del session_id
        async with self._by_deadline(request_id, deadline_s):
            vocab_size = await self._info.vocab_size()
            ids = checked_ids(prompt_token_ids, vocab_size)
            try:
                async with self._sending(request_id) as request:
                    reply = await self._wire.generate(ids, sampling, request_id=request_id)
            except NotSentError:
                return empty_completion(request_id)
        if request.is_void:
            raise GeneratorError(f"{self.url}: request {request_id} is of unknown weights, since an update failed")
        completion = parse_answer(
            reply,
            request_id=request_id,
            incarnation=self._incarnation,
            vocab_size=vocab_size,
            elapsed_s=time.monotonic() - request.sent_s,
            halted_s=self._traffic.halted.seconds - request.halted_s,
            had_update=self._traffic.num_updates != request.num_updates,
            kept_version=request.kept_version,
            cached_version=request.cached_version,
        )
        if len(completion.policy_versions) and completion.policy_versions.min() < min_policy_version:
            oldest = int(completion.policy_versions.min())
            raise GeneratorError(f"{self.url}: tokens of version {oldest}, at least {min_policy_version} was asked for")
        return completion

    async def score(self, token_ids: Sequence[int], *, num_given: int, deadline_s: float) -> Scores:
        """As `Generator.score`. Never rests on a KV cache of older weights."""
        request_id = f"score-{time.monotonic_ns()}-{id(token_ids)}"
        async with self._by_deadline(request_id, deadline_s):
            vocab_size = await self._info.vocab_size()
            ids = checked_ids(token_ids, vocab_size)
            if not 1 <= num_given < len(ids):
                raise ValueError(f"the prompt has {len(ids)} ids and {num_given} are given: nothing to score")
            try:
                async with self._sending(request_id) as request:
                    is_cache_old = request.cached_version is not None
                    start = 0 if is_cache_old else num_given - 1
                    reply = await self._wire.score(ids, start=start, request_id=request_id)
            except NotSentError:
                raise GeneratorError(f"{self.url}: the scoring was aborted") from None
        if self._traffic.num_updates != request.num_updates:
            raise GeneratorError(f"{self.url}: the weights changed while it scored")
        return parse_scores(
            reply, token_ids=ids, num_given=num_given, incarnation=self._incarnation, vocab_size=vocab_size
        )

    @contextlib.asynccontextmanager
    async def _by_deadline(self, request_id: str, deadline_s: float) -> AsyncIterator[None]:
        """Bounds a request. One that nobody waits for any more is aborted, since it would take room from others."""
        try:
            async with asyncio.timeout(deadline_s - time.monotonic()):
                yield
        except TimeoutError:
            await self._controls.abort_quietly(request_id)
            raise GeneratorError(f"{self.url}: request {request_id} got no answer by its deadline") from None
        except asyncio.CancelledError:
            self._controls.abort_aside(request_id)
            raise

    @contextlib.asynccontextmanager
    async def _sending(self, request_id: str) -> AsyncIterator[Request]:
        async with self._traffic.sending(request_id) as request:
            if self._is_unknown:
                raise GeneratorError(f"{self.url}: {_UNKNOWN}")
            yield request

    async def abort(self, request_id: str | None = None) -> None:
        """As `Generator.abort`."""
        await self._controls.abort(request_id)

    async def pause(self) -> None:
        """As `Generator.pause`. Running requests lose their KV, so that weights can be taken in the meantime."""
        if not self._is_paused:
            self._is_paused = True
            self._traffic.hold()
        try:
            await self._controls.halt("retract")
        except BaseException:
            await asyncio.shield(self.resume())
            raise

    async def resume(self) -> None:
        """As `Generator.resume`. While it takes weights, decoding goes on when it has them."""
        was_paused, self._is_paused = self._is_paused, False
        try:
            if not self._is_loading:
                await self._controls.go_on()
        finally:
            if was_paused:
                self._traffic.release()

    async def update_weights(
        self, update: WeightUpdate, *, mode: WeightUpdateMode, keep_kv: bool = False, timeout_s: float
    ) -> None:
        """As `Generator.update_weights`.

        After a failure no request is answered until an update succeeds: an engine that refuses may have changed its
        weights, or some of them, or have kept a cache of the old ones.
        """
        if keep_kv and mode != "in_flight":
            raise ValueError(f"keep_kv goes with in_flight alone, not with {mode}")
        version = WeightVersion(incarnation=update.incarnation, policy_version=update.policy_version)
        if update.incarnation != self._incarnation:
            raise GeneratorError(f"{self.url}: weights {version} are of another life, this is {self._incarnation}")
        try:
            async with asyncio.timeout(timeout_s), self._updating:
                await self._update(update, version, mode=mode, keep_kv=keep_kv)
        except TimeoutError:
            raise GeneratorError(f"{self.url}: weights {version} were not taken within {timeout_s} s") from None

    async def _update(
        self, update: WeightUpdate, version: WeightVersion, *, mode: WeightUpdateMode, keep_kv: bool
    ) -> None:
        with self._traffic.held():
            plan = await self._wire.plan(update, version)
            kept = await self._info.version_to_keep(self._incarnation) if keep_kv and not self._is_unknown else None
            if mode == "drain":
                await self._traffic.empty()
                await self._load(plan, version, kept_version=None)
                return
            self._is_loading = True
            pause: PauseMode = "abort" if mode == "abort_resume" else "retract" if kept is None else "in_place"
            try:
                # An engine that its owner paused stands still already; only running requests are still to be ended.
                if not self._is_paused or mode == "abort_resume":
                    await self._controls.halt(pause)
                await self._load(plan, version, kept_version=None if kept is None else kept.policy_version)
            finally:
                self._is_loading = False
                if not self._is_paused:
                    await asyncio.shield(self._controls.go_on())

    async def _load(self, plan: Mapping[str, Any], version: WeightVersion, *, kept_version: int | None) -> None:
        self._is_unknown = True
        self._traffic.updated(kept_version=kept_version)
        try:
            await self._wire.take(plan, flushes=kept_version is None)
            # The reply could come from a server that did nothing; what it now reports is what its tokens will carry.
            reported = await self._info.reported_version()
            if reported != str(version):
                raise GeneratorError(f"{self.url}: took weights {version} and reports {reported!r}")
            await self._info.learn_from(str(plan["model_path"]))
        except BaseException:
            self._traffic.void()
            raise
        self._is_unknown = False

    async def health(self) -> GeneratorHealth:
        """As `Generator.health`. After an update that failed, the version is not known, and it raises GeneratorError.

        Of a server that does not report `busy_s`, the seconds in which this client had a request under way.
        """
        async with self._controls.within_limit():
            version = await self._info.version()
            load = await self._info.load()
        if self._is_unknown and not self._updating.locked():
            raise GeneratorError(f"{self.url}: {_UNKNOWN}")
        return GeneratorHealth(
            version=version,
            num_running=load.num_running,
            num_queued=load.num_queued,
            busy_s=self._traffic.busy.seconds if load.busy_s is None else load.busy_s,
        )

    async def load(self) -> GeneratorLoad:
        """As `Generator.load`; requests that wait here for a place count as queued."""
        async with self._controls.within_limit():
            load = await self._info.load()
        return GeneratorLoad(num_running=load.num_running, num_queued=load.num_queued + self._traffic.num_waiting)

    async def close(self) -> None:
        """As `Generator.close`. Generations under way end with GeneratorError."""
        server, self._server = self._server, None
        self._traffic.close()
        await self._http.close()
        await self._controls.close()
        if server is not None:
            await asyncio.shield(server.close(timeout_s=self._close_timeout_s))

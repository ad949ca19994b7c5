"""The fake twin of an engine: answers from a script, with latency, versions, pauses and failures on demand."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from driftgym.agents.generators.base import GeneratorHealth, GeneratorLoad, Scores, WeightUpdateMode, WeightVersion
from driftgym.agents.generators.traffic import Stopwatch
from driftgym.errors import GeneratorError
from driftgym.types import Completion, FinishReason, SamplingParams, WeightUpdate, float32_array, int32_array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScriptedRequest:
    """What a script is asked.

    >>> ScriptedRequest(prompt_token_ids=[1], sampling=SamplingParams(), request_id="r", session_id="s").session_id
    's'
    """

    prompt_token_ids: Sequence[int]
    """[P] the whole prompt."""
    sampling: SamplingParams
    """How tokens would be drawn."""
    request_id: str
    """The request's id."""
    session_id: str
    """The episode's id."""


Script = Callable[[ScriptedRequest], Sequence[int]]
"""Gives the token ids of an answer; they are cut at the first stop token and at the token budget."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Answer:
    """An answer that is being written; it grows.

    >>> _Answer(request_id="r").is_aborted
    False
    """

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    kv_version: int = 0
    is_aborted: bool = False
    queue_s: float = 0.0

    def completion(self, *, finish_reason: FinishReason, logprob: float, latency_s: float) -> Completion:
        """It, as far as it was written."""
        rests_on_older = bool(self.policy_versions) and self.kv_version < max(self.policy_versions)
        return Completion(
            request_id=self.request_id,
            token_ids=int32_array(self.token_ids),
            logprobs=float32_array([logprob] * len(self.token_ids)),
            policy_versions=int32_array(self.policy_versions),
            kv_min_policy_version=self.kv_version if rests_on_older else None,
            finish_reason="abort" if self.is_aborted else finish_reason,
            latency_s=max(0.0, latency_s - self.queue_s),
        )


class _Gate:
    """An event that those wait for whose answer is not aborted."""

    def __init__(self) -> None:
        """Open."""
        self._opened = asyncio.Event()
        self._opened.set()

    def is_set(self) -> bool:
        """True while it is open."""
        return self._opened.is_set()

    def set(self) -> None:
        """Opens it."""
        self._opened.set()

    def clear(self) -> None:
        """Closes it."""
        self._opened.clear()

    def nudge(self) -> None:
        """Lets those that wait look whether they were aborted."""
        if not self._opened.is_set():
            self._opened.set()
            self._opened.clear()

    async def wait(self, answer: _Answer | None = None) -> None:
        """Until it is open, or `answer` is aborted; the time is added to that of `answer`."""
        began = time.monotonic()
        while not (self._opened.is_set() or (answer is not None and answer.is_aborted)):
            await self._opened.wait()
        if answer is not None:
            answer.queue_s += time.monotonic() - began


class ScriptedGenerator:
    """Implements `Generator` without a model. Every token has the same log-prob.

    It has a KV cache as an engine does: that of a session's prompt and tokens, until an update drops it.
    """

    def __init__(
        self,
        script: Script | Iterable[Sequence[int]],
        *,
        policy_version: int = 0,
        incarnation: int = 0,
        token_latency_s: float = 0.0,
        logprob: float = -1.0,
        vocab_size: int = 2**31 - 1,
    ) -> None:
        """Takes a function, or the answers in the order of the requests.

        Args:
            script: where the tokens come from. An iterable that is used up is an engine that is gone.
            policy_version, incarnation: of the weights that it starts with.
            token_latency_s: the time that each token takes; 0 answers at once.
            logprob: of every token.
            vocab_size: prompt ids from there on are refused.
        """
        self.requests: list[ScriptedRequest] = []
        """Every request so far, in order."""
        self.is_closed = False
        self._script = script if callable(script) else _in_order(iter(script))
        self._version = WeightVersion(incarnation=incarnation, policy_version=policy_version)
        self._token_latency_s = token_latency_s
        self._logprob = logprob
        self._vocab_size = vocab_size
        self._running: set[_Answer] = set()
        self._waiting: set[_Answer] = set()
        self._kv_versions: dict[str, int] = {}  # of each session, the oldest version whose KV is cached
        self._num_failures = 0
        self._is_dead = False
        self._is_hung = False
        self._goes_on = _Gate()
        self._admits = _Gate()
        self._ended = asyncio.Event()
        self._busy = Stopwatch()

    @property
    def num_running(self) -> int:
        """Answers that are being written."""
        return len(self._running)

    def fail_next(self, num_requests: int = 1) -> None:
        """The next so many requests, or weight updates, raise GeneratorError."""
        self._num_failures = num_requests

    def kill(self) -> None:
        """The engine is gone: everything under way, and everything from now on, raises GeneratorError."""
        self._is_dead = True
        self._goes_on.set()
        self._ended.set()

    def hang(self) -> None:
        """The engine stands still: requests and `health` get no answer any more."""
        self._is_hung = True
        self._goes_on.clear()

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
        """As `Generator.generate`."""
        self._check(prompt_token_ids)
        started, answer = time.monotonic(), _Answer(request_id=request_id)
        if started >= deadline_s:
            raise GeneratorError(_late(answer))
        if not self._admits.is_set():
            await self._wait_for_drain(answer, deadline_s)
        if answer.is_aborted:
            return answer.completion(finish_reason="abort", logprob=self._logprob, latency_s=0.0)
        if self._version.policy_version < min_policy_version:
            raise GeneratorError(f"has version {self._version}, at least {min_policy_version} was asked for")
        request = ScriptedRequest(
            prompt_token_ids=prompt_token_ids, sampling=sampling, request_id=request_id, session_id=session_id
        )
        self.requests.append(request)
        planned, finish = _cut(self._script(request), sampling)
        answer.kv_version = self._kv_versions.setdefault(session_id, self._version.policy_version)
        if self._token_latency_s == 0.0 and self._goes_on.is_set():
            answer.token_ids, answer.policy_versions = planned, [self._version.policy_version] * len(planned)
        else:
            await self._write_slowly(planned, answer, deadline_s)
        self._kv_versions.setdefault(session_id, answer.kv_version)
        return answer.completion(finish_reason=finish, logprob=self._logprob, latency_s=time.monotonic() - started)

    def _check(self, prompt_token_ids: Sequence[int]) -> None:
        if len(prompt_token_ids) == 0:
            raise ValueError("the prompt is empty")
        if min(prompt_token_ids) < 0 or max(prompt_token_ids) >= self._vocab_size:
            raise ValueError(f"the prompt has ids outside of the vocabulary of {self._vocab_size}")
        self._raise_failure()

    def _raise_failure(self) -> None:
        self._raise_if_gone()
        if self._num_failures:
            self._num_failures -= 1
            raise GeneratorError("the scripted generator fails as it was told")

    def _raise_if_gone(self) -> None:
        if self._is_dead or self.is_closed:
            raise GeneratorError("the scripted generator is gone")

    async def _wait_for_drain(self, answer: _Answer, deadline_s: float) -> None:
        self._waiting.add(answer)
        try:
            await self._within(self._admits.wait(answer), deadline_s - time.monotonic(), _late(answer))
        finally:
            self._waiting.discard(answer)

    async def _write_slowly(self, planned: list[int], answer: _Answer, deadline_s: float) -> None:
        self._running.add(answer)
        self._busy.run(True)
        self._ended.clear()
        try:
            await self._within(self._write(planned, answer), deadline_s - time.monotonic(), _late(answer))
        finally:
            self._running.discard(answer)
            if not self._running:
                self._busy.run(False)
                self._ended.set()

    async def _write(self, planned: list[int], answer: _Answer) -> None:
        for token_id in planned:
            await self._wait_to_go_on(answer)
            await asyncio.sleep(self._token_latency_s)
            await self._wait_to_go_on(answer)
            if answer.is_aborted:
                return
            answer.token_ids.append(token_id)
            answer.policy_versions.append(self._version.policy_version)

    async def _wait_to_go_on(self, answer: _Answer) -> None:
        await self._goes_on.wait(answer)
        self._raise_if_gone()

    async def _within(self, waiting: Awaitable[object], limit_s: float, what: str) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await waiting
        except TimeoutError:
            raise GeneratorError(what) from None
        self._raise_if_gone()

    async def score(self, token_ids: Sequence[int], *, num_given: int, deadline_s: float) -> Scores:
        """As `Generator.score`; every token has the same log-prob."""
        self._check(token_ids)
        if not 1 <= num_given < len(token_ids):
            raise ValueError(f"the prompt has {len(token_ids)} ids and {num_given} are given: nothing to score")
        if not self._goes_on.is_set():
            await self._within(self._goes_on.wait(), deadline_s - time.monotonic(), "not scored by its deadline")
        return Scores(logprobs=float32_array([self._logprob] * (len(token_ids) - num_given)), version=self._version)

    async def abort(self, request_id: str | None = None) -> None:
        """As `Generator.abort`."""
        self._raise_if_gone()
        self._abort(request_id)

    def _abort(self, request_id: str | None) -> None:
        for answer in (*self._running, *self._waiting):
            answer.is_aborted = answer.is_aborted or request_id in (None, answer.request_id)
        self._goes_on.nudge()
        self._admits.nudge()

    async def pause(self) -> None:
        """As `Generator.pause`."""
        self._raise_if_gone()
        self._goes_on.clear()

    async def resume(self) -> None:
        """As `Generator.resume`."""
        self._raise_if_gone()
        self._goes_on.set()

    async def update_weights(
        self, update: WeightUpdate, *, mode: WeightUpdateMode, keep_kv: bool = False, timeout_s: float
    ) -> None:
        """As `Generator.update_weights`."""
        if keep_kv and mode != "in_flight":
            raise ValueError(f"keep_kv goes with in_flight alone, not with {mode}")
        self._raise_failure()
        if update.incarnation != self._version.incarnation:
            raise GeneratorError(f"weights of life {update.incarnation}, this is {self._version.incarnation}")
        if self._is_hung:
            await self._within(self._goes_on.wait(), timeout_s, f"not updated within {timeout_s} s")
        if mode == "drain" and self.num_running:
            await self._drain(timeout_s)
        if mode == "abort_resume":
            self._abort(None)
        self._version = WeightVersion(incarnation=update.incarnation, policy_version=update.policy_version)
        if not keep_kv:
            self._drop_cache()

    async def _drain(self, timeout_s: float) -> None:
        self._admits.clear()
        try:
            await self._within(self._ended.wait(), timeout_s, f"not drained within {timeout_s} s")
        finally:
            self._admits.set()

    def _drop_cache(self) -> None:
        """Running requests read all that they have anew."""
        self._kv_versions.clear()
        for answer in self._running:
            answer.kv_version = self._version.policy_version

    async def load(self) -> GeneratorLoad:
        """As `Generator.load`."""
        health = await self.health()
        return GeneratorLoad(num_running=health.num_running, num_queued=health.num_queued)

    async def health(self) -> GeneratorHealth:
        """As `Generator.health`."""
        self._raise_if_gone()
        if self._is_hung:
            await self._goes_on.wait()
            self._raise_if_gone()
        return GeneratorHealth(
            version=self._version,
            num_running=len(self._running),
            num_queued=len(self._waiting),
            busy_s=self._busy.seconds,
        )

    async def close(self) -> None:
        """As `Generator.close`."""
        self.is_closed = True
        self._goes_on.set()
        self._ended.set()


def _late(answer: _Answer) -> str:
    return f"request {answer.request_id} got no answer by its deadline"


def _in_order(answers: Iterator[Sequence[int]]) -> Script:
    def script(_request: ScriptedRequest) -> Sequence[int]:
        try:
            return next(answers)
        except StopIteration:
            raise GeneratorError("the script has no answers left") from None

    return script


def _cut(token_ids: Sequence[int], sampling: SamplingParams) -> tuple[list[int], FinishReason]:
    cut = [int(token_id) for token_id in token_ids[: sampling.max_tokens]]
    for index, token_id in enumerate(cut):
        if token_id in sampling.stop_token_ids:
            return cut[: index + 1], "stop"
    return cut, "length"

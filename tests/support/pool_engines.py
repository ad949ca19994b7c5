"""Scripted engines for pools: what an answer must be is known, wherever its slices were written."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from driftgym.agents.generators.base import GeneratorHealth, GeneratorLoad
from driftgym.agents.generators.pool import GeneratorPool
from driftgym.agents.generators.scripted import ScriptedGenerator, ScriptedRequest
from driftgym.agents.generators.watch import WatchOptions
from driftgym.errors import GeneratorError
from driftgym.types import Completion, SamplingParams, WeightUpdate

STOP_ID = 999
QUICK = WatchOptions(interval_s=0.05, timeout_s=0.2, num_failures_out=2, num_successes_in=2)
"""A watch for tests: an engine that is gone is out within a fraction of a second."""


def answer(key: int, length: int) -> list[int]:
    """The `length` tokens of the answer to the prompt `[key, length]`."""
    return [(31 * key + index) % 97 for index in range(length - 1)] + [STOP_ID]


def go_on(request: ScriptedRequest) -> list[int]:
    """The script: the rest of the answer, from the tokens in the prompt. Those must be the answer's beginning."""
    key, length, *written = request.prompt_token_ids
    whole = answer(key, length)
    if whole[: len(written)] != written:
        raise AssertionError(f"request {request.request_id} came back with tokens that nobody wrote: {written}")
    return whole[len(written) :]


class Engine(ScriptedGenerator):
    """An engine that can come back after it was killed, as a server does that somebody starts anew."""

    def __init__(self, *, token_latency_s: float = 0.0, policy_version: int = 0) -> None:
        super().__init__(go_on, token_latency_s=token_latency_s, policy_version=policy_version)
        self.peak_running = 0
        self.num_looks = 0

    @property
    def lengths(self) -> list[int]:
        """How many tokens each slice was asked for."""
        return [request.sampling.max_tokens for request in self.requests]

    def revive(self, *, policy_version: int = 0) -> None:
        """It is there again, with the weights that it was started with."""
        self._is_dead = False
        self._is_hung = False
        self._goes_on.set()
        self._version = type(self._version)(incarnation=0, policy_version=policy_version)

    async def generate(self, *arguments: object, **options: object) -> Completion:
        """As `Generator.generate`."""
        self.peak_running = max(self.peak_running, self.num_running + 1)
        return await super().generate(*arguments, **options)  # type: ignore[arg-type]

    async def health(self) -> GeneratorHealth:
        """As `Generator.health`."""
        self.num_looks += 1
        return await super().health()

    async def load(self) -> GeneratorLoad:
        """As `Generator.load`."""
        health = await super().health()
        return GeneratorLoad(num_running=health.num_running, num_queued=0)


class Events:
    """What a pool told."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.texts: list[str] = []

    def __call__(self, name: str, text: str) -> None:
        self.names.append(name)
        self.texts.append(text)


def weights(version: int) -> WeightUpdate:
    """A full publication of that version."""
    return WeightUpdate(policy_version=version, incarnation=0, location="/w", checksum="sha256:0")


def ask(
    pool: GeneratorPool,
    key: int = 1,
    length: int = 5,
    *,
    session_id: str | None = None,
    timeout_s: float = 20.0,
    max_tokens: int = 1000,
    seed: int | None = None,
    min_policy_version: int = 0,
) -> Awaitable[Completion]:
    """Asks for the answer to `[key, length]`; the request's id is the key."""
    return pool.generate(
        [key, length],
        SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP_ID,), seed=seed),
        request_id=f"r{key}",
        session_id=session_id or f"s{key}",
        deadline_s=time.monotonic() + timeout_s,
        min_policy_version=min_policy_version,
    )


def check(completion: Completion, key: int, length: int) -> None:
    """It is exactly the answer."""
    assert completion.request_id == f"r{key}"
    assert completion.finish_reason == "stop"
    assert completion.token_ids.tolist() == answer(key, length)
    assert len(completion.logprobs) == len(completion.policy_versions) == length


async def expect_failure(asked: Awaitable[Completion], *, match: str) -> None:
    """It ends with a GeneratorError that says `match`."""
    with pytest.raises(GeneratorError, match=match):
        await asked


async def until(is_so: Callable[[], bool], *, timeout_s: float = 10.0) -> None:
    """Waits until `is_so()`."""
    async with asyncio.timeout(timeout_s):
        while not is_so():  # noqa: ASYNC110  # polls what has no event
            await asyncio.sleep(0.005)

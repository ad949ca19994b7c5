"""The Docker engine is killed, restarted, or hangs: nothing waits for it beyond a deadline, and boxes start again."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Iterator
from typing import Literal

import pytest
import pytest_asyncio
from private_engine import PrivateEngine, private_engine

from driftgym.errors import SandboxError
from driftgym.sandboxes.base import ExecResult, PoolConfig, SandboxSpec
from driftgym.sandboxes.docker_engine import SILENCE_S
from driftgym.sandboxes.docker_provider import DockerProvider
from driftgym.sandboxes.images import BASE_IMAGE
from driftgym.sandboxes.pool import SandboxPool

pytestmark = [pytest.mark.docker, pytest.mark.slow]
START_TIMEOUT_S = 60.0
PATIENCE_S = 30.0
"""For what other load on the machine may delay; longer than any bound that is tested."""


@pytest.fixture(scope="module")
def engine() -> Iterator[PrivateEngine]:
    """An engine that may be killed."""
    with private_engine(BASE_IMAGE) as engine:
        yield engine


@pytest_asyncio.fixture
async def provider(engine: PrivateEngine, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DockerProvider]:
    monkeypatch.setenv("DOCKER_HOST", engine.host)
    provider = await DockerProvider.open(timeout_s=10)
    yield provider
    await provider.close()


@contextlib.contextmanager
def hung(engine: PrivateEngine) -> Iterator[None]:
    """The engine neither answers nor hangs up."""
    engine.send(signal.SIGSTOP)
    try:
        yield
    finally:
        engine.send(signal.SIGCONT)


async def nothing_is_left(engine: PrivateEngine) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while engine.containers() or engine.processes_in_containers():  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_restart_during_sixteen_commands(
    engine: PrivateEngine, provider: DockerProvider, number: signal.Signals
) -> None:
    boxes = await asyncio.gather(*(provider.start(SandboxSpec(), timeout_s=START_TIMEOUT_S) for _ in range(4)))
    calls = [
        asyncio.ensure_future(box.exec(f"echo begun; sleep {length_s}", timeout_s=60))
        for box in boxes
        for length_s in (0.1, 0.5, 30, 40)
    ]
    await asyncio.sleep(0.4)
    starting = asyncio.ensure_future(provider.start(SandboxSpec(), timeout_s=10))
    await asyncio.sleep(0.1)
    engine.send(number)
    await asyncio.to_thread(engine.wait)
    async with asyncio.timeout(PATIENCE_S):
        results = await asyncio.gather(*calls, starting, return_exceptions=True)
    await asyncio.to_thread(engine.start)
    *outcomes, start = results
    assert [outcome for outcome in outcomes if not isinstance(outcome, ExecResult | SandboxError)] == []
    assert len([outcome for outcome in outcomes if isinstance(outcome, SandboxError)]) >= 8
    assert isinstance(start, SandboxError) or await is_lost(start)
    for box in boxes:
        with pytest.raises(SandboxError):
            await box.exec("true")
        await box.close()
    after = await provider.start(SandboxSpec(), timeout_s=START_TIMEOUT_S)
    assert (await after.exec("echo on")).stdout == "on\n"
    await after.close()
    await nothing_is_left(engine)


@pytest.mark.parametrize("reuse", ["reset", "fresh"])
async def test_pool_recovers_from_a_restart_during_sixteen_commands(
    engine: PrivateEngine, provider: DockerProvider, reuse: Literal["reset", "fresh"]
) -> None:
    async with SandboxPool(provider, PoolConfig(reuse=reuse, num_warm=2, max_boxes=8)) as pool:
        boxes = await asyncio.gather(*(pool.start(SandboxSpec(), timeout_s=START_TIMEOUT_S) for _ in range(4)))
        calls = [
            asyncio.ensure_future(box.exec(f"echo begun; sleep {length_s}", timeout_s=60))
            for box in boxes
            for length_s in (0.1, 0.5, 30, 40)
        ]
        async with asyncio.timeout(START_TIMEOUT_S):
            while pool.stats.num_warm < 2:  # noqa: ASYNC110 - nobody tells of it
                await asyncio.sleep(0.05)
        engine.send(signal.SIGKILL)
        await asyncio.to_thread(engine.wait)
        async with asyncio.timeout(PATIENCE_S):
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [outcome for outcome in outcomes if not isinstance(outcome, ExecResult | SandboxError)] == []
        waiting = asyncio.ensure_future(pool.start(SandboxSpec(), timeout_s=START_TIMEOUT_S))
        await asyncio.to_thread(engine.start)
        for box in boxes:  # two come clean by a new box in the place of the lost one, two are given back
            await (box.reset() if box in boxes[:2] else box.close())
        with contextlib.suppress(SandboxError):  # asked for while there was no engine
            await (await waiting).close()
        again = await asyncio.gather(*(pool.start(SandboxSpec(), timeout_s=START_TIMEOUT_S) for _ in range(4)))
        for box in (*boxes[:2], *again):
            assert (await box.exec("echo on")).stdout == "on\n"
            await box.close()
    await nothing_is_left(engine)


async def is_lost(box: object) -> bool:
    """True for a box that was started in time, and is gone with the engine."""
    assert hasattr(box, "exec")
    try:
        await box.exec("true")
    except SandboxError:
        return True
    return False


async def test_engine_that_is_gone_is_a_typed_error(engine: PrivateEngine, provider: DockerProvider) -> None:
    engine.send(signal.SIGKILL)
    await asyncio.to_thread(engine.wait)
    try:
        for call in (provider.start(SandboxSpec(), timeout_s=5), provider.list(), provider.sweep()):
            with pytest.raises(SandboxError):
                await call
        with pytest.raises(SandboxError):
            await DockerProvider.open(timeout_s=5)
    finally:
        await asyncio.to_thread(engine.start)
    assert await provider.list() == []


async def test_calls_to_an_engine_that_hangs_end_by_their_deadline(
    engine: PrivateEngine, provider: DockerProvider
) -> None:
    box = await provider.start(SandboxSpec(), timeout_s=START_TIMEOUT_S)
    with hung(engine):
        began = time.monotonic()
        calls = [
            asyncio.ensure_future(call)
            for call in (
                box.exec("true", timeout_s=1),
                provider.start(SandboxSpec(), timeout_s=1),
                DockerProvider.open(timeout_s=1),
                provider.remove(box.sandbox_id),
            )
        ]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, SandboxError)
        await box.close()
        assert time.monotonic() - began < PATIENCE_S + SILENCE_S
    await nothing_is_left(engine)  # the start that nobody waited for is undone as well


async def test_provider_closes_while_the_engine_hangs(engine: PrivateEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", engine.host)
    provider = await DockerProvider.open(timeout_s=10)
    box = await provider.start(SandboxSpec(), timeout_s=START_TIMEOUT_S)
    with hung(engine):
        pending = asyncio.ensure_future(provider.start(SandboxSpec(), timeout_s=START_TIMEOUT_S))
        await asyncio.sleep(0.2)
        async with asyncio.timeout(PATIENCE_S + SILENCE_S):
            await provider.close()
        with pytest.raises(SandboxError, match="closed"):
            await pending
    with pytest.raises(SandboxError):
        await box.exec("true")

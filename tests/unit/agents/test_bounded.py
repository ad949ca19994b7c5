import asyncio
import time

import pytest

from driftgym.agents.bounded import DeadlinePassed, EpisodeClock, bounded


async def test_a_result_and_an_error_come_through() -> None:
    async def give() -> int:
        return 3

    async def fail() -> int:
        raise KeyError("x")

    assert await bounded(give(), limit_s=1.0, what="it") == 3
    with pytest.raises(KeyError):
        await bounded(fail(), limit_s=1.0, what="it")


async def test_a_hanging_call_is_cancelled_at_its_limit() -> None:
    ended = asyncio.Event()

    async def hang() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    with pytest.raises(DeadlinePassed, match="it did not end"):
        await bounded(hang(), limit_s=0.05, what="it")
    assert ended.is_set()


@pytest.mark.parametrize("limit_s", [0.0, -1.0])
async def test_no_time_at_all_is_a_deadline_that_passed(limit_s: float) -> None:
    with pytest.raises(DeadlinePassed):
        await bounded(asyncio.sleep(60), limit_s=limit_s, what="it")


@pytest.mark.slow
async def test_a_call_that_ignores_its_cancellation_is_left_to_itself() -> None:
    release = asyncio.Event()

    async def stubborn() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    started_s = time.monotonic()
    with pytest.raises(DeadlinePassed):
        await bounded(stubborn(), limit_s=0.05, what="it")
    assert time.monotonic() - started_s < 30
    release.set()
    await asyncio.sleep(0)


async def test_a_cancellation_from_outside_reaches_the_call_and_goes_on() -> None:
    ended = asyncio.Event()

    async def hang() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    outer = asyncio.create_task(bounded(hang(), limit_s=60.0, what="it"))
    await asyncio.sleep(0.01)
    outer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await outer
    assert ended.is_set()


async def test_a_call_that_cancels_itself_is_an_error_not_a_cancellation() -> None:
    async def give_up() -> None:
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="cancelled itself"):
        await bounded(give_up(), limit_s=1.0, what="it")


def test_the_clock_stands_still_for_what_is_credited() -> None:
    clock = EpisodeClock(limit_s=1.0)
    clock.credit(5.0)
    assert 5.0 < clock.remaining_s <= 6.0
    clock.credit(-3.0)
    assert clock.remaining_s > 5.0

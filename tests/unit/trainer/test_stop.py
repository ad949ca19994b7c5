"""Waits that give way to the wish to stop."""

import asyncio

import pytest

from driftgym.trainer.stop import RunInterruptedError, Stop


async def test_work_that_ends_first_gives_its_result() -> None:
    assert await Stop().or_stop(asyncio.sleep(0, result=7)) == 7


async def test_a_stop_cancels_the_work_and_waits_for_it() -> None:
    stop = Stop()
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            ended.append("cleaned up")

    asyncio.get_running_loop().call_later(0.02, stop.request)
    with pytest.raises(RunInterruptedError):
        await stop.or_stop(work())
    assert ended == ["cleaned up"]
    assert stop.is_requested


async def test_what_went_wrong_says_more_than_the_wish_to_stop() -> None:
    async def work() -> None:
        raise ValueError("boom")

    stop = Stop()
    with pytest.raises(ValueError, match="boom"):
        await stop.or_stop(work())
    stop.request()
    with pytest.raises((ValueError, RunInterruptedError)):
        await stop.or_stop(work())


async def test_a_cancelled_wait_cancels_the_work() -> None:
    work = asyncio.create_task(Stop().or_stop(asyncio.sleep(60)))
    await asyncio.sleep(0.01)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work

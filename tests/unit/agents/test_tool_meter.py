"""The meter of tools: what is busy, what is running, and that an end is seen however it came."""

import asyncio

import pytest

from driftgym.agents.tool_meter import ToolMeter, ToolTime


def test_two_at_once_are_busy_once_and_running_twice() -> None:
    meter = ToolMeter()
    with meter.running():
        first = meter.time
        with meter.running():
            second = meter.time
            third = meter.time
    assert first.running_s == pytest.approx(first.busy_s)
    both = third - second
    assert both.running_s == pytest.approx(2 * both.busy_s)
    ended = meter.time
    assert meter.time == ended, "nothing is running any more"


async def test_a_tool_that_is_cancelled_has_ended() -> None:
    meter = ToolMeter()

    async def hang() -> None:
        with meter.running():
            await asyncio.Event().wait()

    task = asyncio.create_task(hang())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    ended = meter.time
    assert ended.busy_s > 0
    assert meter.time == ended


def test_times_add_up() -> None:
    time = ToolTime(busy_s=1.0, running_s=3.0)
    assert time + time - time == time

"""Calls in the order of their submission: what failures, cancellations and a close leave of it."""

import asyncio
import gc
from typing import Any

import pytest

from driftgym.errors import NotDoneError, TrainingError
from driftgym.trainer.call_order import CallOrder


class Calls:
    """Calls that note when they begin and end."""

    def __init__(self) -> None:
        self.order = CallOrder()
        self.seen: list[str] = []
        self.begun = asyncio.Event()

    def submit(self, name: str, *, error: Exception | None = None, is_repeated: bool = False) -> asyncio.Future[str]:
        async def call() -> str:
            self.seen.append(f"{name} begins")
            self.begun.set()
            await asyncio.sleep(0.001)
            self.seen.append(f"{name} ends")
            if error is not None:
                raise error
            return name

        return self.order.submit(call, name=name, is_repeated=is_repeated)


async def test_calls_run_one_after_the_other_in_their_order() -> None:
    calls = Calls()
    futures = [calls.submit(name) for name in "abc"]
    assert calls.seen == [], "nothing is waited for"
    assert await futures[2] == "c"
    assert calls.seen == [f"{name} {when}" for name in "abc" for when in ("begins", "ends")]
    assert [future.result() for future in futures] == list("abc")


async def test_an_error_is_that_calls_alone() -> None:
    calls = Calls()
    first, second = calls.submit("a", error=TrainingError("x")), calls.submit("b")
    assert await second == "b"
    with pytest.raises(TrainingError, match="x"):
        await first


async def test_whoever_stops_waiting_takes_nothing_back() -> None:
    calls = Calls()
    running, waiting, last = (calls.submit(name) for name in "abc")
    await asyncio.sleep(0)
    running.cancel()
    waiting.cancel()
    await last
    assert "a ends" in calls.seen
    assert "b ends" in calls.seen


async def test_a_close_lets_the_running_call_end_and_does_no_other() -> None:
    calls = Calls()
    running, waiting = calls.submit("a"), calls.submit("b")
    await calls.begun.wait()
    calls.order.stop()
    await calls.order.settle()
    assert running.result() == "a"
    with pytest.raises(NotDoneError, match="b was not done: the learner was closed"):
        await waiting
    with pytest.raises(NotDoneError):
        await calls.submit("c")
    assert calls.seen == ["a begins", "a ends"]


async def test_only_errors_that_are_said_nowhere_else_are_logged() -> None:
    contexts: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: contexts.append(context))
    calls = Calls()
    calls.submit("a", error=TrainingError("said again by b"), is_repeated=True)
    calls.submit("b", error=NotDoneError("a failed"))
    calls.submit("c", error=TrainingError("said by nobody"))
    await calls.submit("d")
    gc.collect()
    assert [str(context["exception"]) for context in contexts] == ["said by nobody"]


async def test_a_call_knows_whether_another_one_waits_for_its_end() -> None:
    calls = CallOrder()
    seen: list[bool] = []

    async def look() -> None:
        await asyncio.sleep(0)
        seen.append(calls.is_followed)

    await asyncio.gather(*(calls.submit(look, name=f"{index}") for index in range(3)))
    await calls.submit(look, name="alone")
    assert seen == [True, True, False, False]

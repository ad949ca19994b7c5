import asyncio
import threading
import time

import pytest

from driftgym.envs.bridge import run_blocking
from driftgym.errors import EnvError


async def _value():
    return threading.current_thread().name


def test_one_loop_for_all_calls():
    names = {run_blocking(_value(), timeout_s=5, what="value") for _ in range(3)}
    assert names == {"driftgym-env-bridge"}


def test_deadline_cancels_the_work():
    cancelled = threading.Event()

    async def hang():
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    with pytest.raises(EnvError, match=r"thing: not done within 0\.05 s"):
        run_blocking(hang(), timeout_s=0.05, what="thing")
    assert cancelled.wait(5)


def test_deadline_holds_when_the_loop_itself_is_blocked():
    async def block():
        time.sleep(0.5)  # noqa: ASYNC251 - what a careless environment does

    with pytest.raises(EnvError, match="not done"):
        run_blocking(block(), timeout_s=0.05, what="thing")
    assert run_blocking(_value(), timeout_s=5, what="value")


def test_errors_come_through():
    async def fail():
        raise KeyError("x")

    with pytest.raises(KeyError):
        run_blocking(fail(), timeout_s=5, what="thing")


def test_a_timeout_of_the_work_is_not_taken_for_the_deadline():
    async def fail():
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        run_blocking(fail(), timeout_s=5, what="thing")


def test_called_from_its_own_loop_is_refused():
    async def nested():
        return run_blocking(_value(), timeout_s=5, what="env.step")

    with pytest.raises(EnvError, match=r"env\.step.*own event loop"):
        run_blocking(nested(), timeout_s=5, what="outer")


async def test_called_from_another_loop_works():
    assert run_blocking(_value(), timeout_s=5, what="value")

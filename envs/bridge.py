"""The bridge from Gymnasium's synchronous methods to the async core: one background event loop per process.

`run_blocking` hands a coroutine to that loop and waits for its result, by a deadline. The loop is started at the
first use, in a daemon thread, and once more in a forked child, where the parent's thread does not exist.
"""

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from driftgym.errors import EnvError

_ResultT = TypeVar("_ResultT")


class _LoopThread:
    """An event loop that runs in a thread of its own until the process ends."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, name="driftgym-env-bridge", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()


_start_lock = threading.Lock()
_loop_thread: _LoopThread | None = None


def _started() -> _LoopThread:
    global _loop_thread
    with _start_lock:
        if _loop_thread is None or _loop_thread.pid != os.getpid():
            _loop_thread = _LoopThread()
        return _loop_thread


def run_blocking(coroutine: Coroutine[Any, Any, _ResultT], *, timeout_s: float, what: str) -> _ResultT:
    """The result of `coroutine`, run on the background loop; the calling thread waits.

    Args:
        coroutine: what to run. It is cancelled when the wait ends early.
        timeout_s: how long to wait.
        what: names the work in errors.

    Raises:
        EnvError: not done within `timeout_s`, or called from the background loop itself, which would wait for
            itself for ever.
    """
    bridge = _started()
    if threading.current_thread() is bridge.thread:
        coroutine.close()
        raise EnvError(
            f"{what}: a synchronous method was called from the environments' own event loop; await the async one"
        )
    future = asyncio.run_coroutine_threadsafe(coroutine, bridge.loop)
    try:
        done, _ = concurrent.futures.wait([future], timeout=timeout_s)
        if not done:
            raise EnvError(f"{what}: not done within {timeout_s:g} s")
        return future.result()
    finally:
        future.cancel()

"""`EngineThread`: a served engine in a thread of its own, for a process whose main thread trains the same model.

The thread runs the asyncio loop that answers HTTP and steps the engine. The main thread takes turns with it: between
`hold` and `let_go` the engine computes nothing, while HTTP is still answered and requests wait.
"""

import asyncio
import concurrent.futures
import os
import threading
import traceback
from collections.abc import Coroutine
from typing import Any, TypeVar

import torch

from driftgym.agents.generators.embedded.server import listening, run_until
from driftgym.agents.generators.embedded.shared import SharedEngine, SharedEngineLoop
from driftgym.errors import ConfigError

_Value = TypeVar("_Value")


class EngineThread:
    """Serves a `SharedEngine`. Made by `start`; all methods are for one other thread."""

    def __init__(self, engine: SharedEngine, *, model_path: str, num_threads: int) -> None:
        """Starts nothing; see `start`."""
        self._engine = engine
        self._model_path = model_path
        self._num_threads = num_threads
        self._url: concurrent.futures.Future[str] = concurrent.futures.Future()
        # Daemonic: a process whose main thread has failed ends.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._asyncio: asyncio.AbstractEventLoop
        self._loop: SharedEngineLoop
        self._stop: asyncio.Event

    @classmethod
    def start(cls, engine: SharedEngine, *, model_path: str, num_threads: int) -> "EngineThread":
        """Serves `engine` on a free port of this machine.

        Args:
            engine: touched by nobody else from now on.
            model_path: what it says of its model.
            num_threads: that its computations use on a CPU.

        Raises:
            ConfigError: it cannot listen.
        """
        # A thread that has not asked for its number of threads yet takes the one that any thread set last.
        torch.get_num_threads()
        started = cls(engine, model_path=model_path, num_threads=num_threads)
        started._thread.start()
        started._url.result()
        return started

    @property
    def url(self) -> str:
        """The server's root."""
        return self._url.result()

    def hold(self) -> None:
        """Waits until the running requests have ended. Nothing is computed from then on; further requests wait."""
        self._call(self._loop.hold())

    def weights_changed(self, version: str) -> None:
        """Between `hold` and `let_go`: the weights will be named `version`. Until they are, requests wait."""
        self._call(self._loop.weights_changed(version))

    def let_go(self) -> None:
        """Lets it compute again."""
        self._call(self._loop.let_go())

    def close(self, *, timeout_s: float) -> None:
        """Ends it, within `timeout_s`. Requests under way get no answer."""
        if self._thread.is_alive():
            self._asyncio.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout_s)

    def _call(self, work: Coroutine[Any, Any, _Value]) -> _Value:
        return asyncio.run_coroutine_threadsafe(work, self._asyncio).result()

    def _run(self) -> None:
        try:
            torch.set_num_threads(self._num_threads)
            torch.get_num_threads()
            asyncio.run(self._serve())
        except ConfigError as error:
            self._url.set_exception(error)
        except BaseException:
            # Whoever waits for an answer, or for its turn, would wait for ever; the end of the process tells all.
            traceback.print_exc()
            os._exit(1)

    async def _serve(self) -> None:
        self._asyncio = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._loop = SharedEngineLoop(self._engine)
        async with listening(self._loop, model_path=self._model_path) as url:
            self._url.set_result(url)
            await run_until(self._stop, self._loop)

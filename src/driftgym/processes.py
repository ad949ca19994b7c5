"""A child Python process that answers calls: the learner, and foreign environments, live in one.

`ChildProcess` starts `python -m MODULE` and exchanges length-prefixed pickles with it over its standard input
and output, one call at a time in the order they were made. The child runs `serve_calls`. A child whose parent
is gone ends, also in the middle of a call, so `kill -9` of the parent leaves none behind. Both sides are the same
code base on the same machine: pickle is used for its arrays, and never for anything that an agent wrote.
"""

import asyncio
import contextlib
import gc
import os
import pickle
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any

from driftgym.errors import DriftgymError

_HEADER = struct.Struct(">Q")
_PARENT_CHECK_S = 0.5


class ChildDiedError(DriftgymError):
    """The child process ended, or was killed, before it answered."""


class ChildCallError(DriftgymError):
    """The called function raised; the message is the child's traceback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What the child sends in the place of a result.

    >>> Failure(error=ValueError("x"), traceback="...").traceback
    '...'
    """

    error: Exception | None
    """The exception where it can be pickled and is one of driftgym's own; None otherwise."""
    traceback: str
    """The child's traceback."""


class ChildProcess:
    """One child process and the calls to it. Use `start`, then `call`, then `close`."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self._process = process
        self._name = name
        self._turn = asyncio.Lock()

    @classmethod
    async def start(
        cls, module: str, *arguments: str, name: str | None = None, env: Mapping[str, str] | None = None
    ) -> "ChildProcess":
        """Starts `python -m module *arguments` with `env` added to the environment."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            module,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **(env or {})},
            start_new_session=True,  # ctrl-C goes to the parent, which closes its children in order
        )
        return cls(process, name or module)

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """True while the child runs."""
        return self._process.returncode is None

    async def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        """The result of `method(*args, **kwargs)` in the child. Waits for earlier calls first.

        A call that is cancelled, or that runs past `timeout_s`, kills the child: its answer would otherwise be
        taken for that of the next call.

        Raises:
            ChildDiedError: the child is gone.
            ChildCallError: the function raised something that is not an error of driftgym.
            DriftgymError: the function raised it.
            TimeoutError: no answer within `timeout_s`.
        """
        async with self._turn:
            answered = False
            try:
                async with asyncio.timeout(timeout_s):
                    result = await self._exchange((method, args, kwargs))
                answered = True
            finally:
                if not answered:
                    self.kill()
        if isinstance(result, Failure):
            if result.error is not None:
                raise result.error
            raise ChildCallError(f"{self._name}: {method} failed\n{result.traceback}")
        return result

    async def _exchange(self, request: Any) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        payload = pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL)
        try:
            stdin.write(_HEADER.pack(len(payload)) + payload)
            await stdin.drain()
            (size,) = _HEADER.unpack(await stdout.readexactly(_HEADER.size))
            return pickle.loads(await stdout.readexactly(size))
        except (ConnectionError, asyncio.IncompleteReadError):
            code = await self._process.wait()
            raise ChildDiedError(f"{self._name} (pid {self.pid}) ended with exit code {code}") from None

    async def ended(self) -> int:
        """Waits until the child has ended, for whatever reason; its exit code."""
        return await self._process.wait()

    def kill(self) -> None:
        """Kills the child at once, and what it started in its session; nothing happens when it has already ended."""
        kill_session(self._process)

    async def close(self, *, timeout_s: float) -> None:
        """Ends the child: closes its input, which it takes as the end; kills it past `timeout_s`."""
        await end_session(self._process, timeout_s=timeout_s)


def kill_session(process: asyncio.subprocess.Process) -> None:
    """Kills a process that leads a session, and what it started in it; nothing happens when all have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def end_session(process: asyncio.subprocess.Process, *, timeout_s: float) -> None:
    """Ends a process that leads a session: closes its input, which it takes as the end; kills all past `timeout_s`."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await process.wait()
    finally:  # also when the waiting was cancelled
        kill_session(process)
    await process.wait()


def collect_garbage_rarely() -> None:
    """Has Python look for cyclic garbage less often, in a process that is this program's own.

    Thousands of tasks in flight hold objects that live for seconds: by the defaults a third of the CPU of such a
    process goes into looking through them in vain. What is in no cycle, which is nearly all, is freed at once anyway.
    """
    gc.set_threshold(20_000, 20, 10)


def serve_calls(
    methods: Mapping[str, Callable[..., Any]], *, ends_after: Callable[[Exception], bool] = lambda error: False
) -> None:
    """The child's side: answers calls from standard input until it ends.

    What the functions print goes to standard error, since standard output carries the answers; what they read from
    standard input is empty, since that carries the calls.

    Args:
        methods: by name.
        ends_after: true for an error that a function raised when the process is to end, once it has been told.
    """
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), name="parent", daemon=True).start()
    requests = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    while (request := read_frame(requests)) is not None:
        method, args, kwargs = pickle.loads(request)
        is_last = False
        try:
            payload = pickle.dumps(methods[method](*args, **kwargs), protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            known = error if isinstance(error, DriftgymError) else None
            is_last = ends_after(error)
            payload = pickle.dumps(Failure(error=known, traceback=traceback.format_exc()))
        try:
            write_frame(answers, payload)
        except BrokenPipeError:
            os._exit(1)  # the parent is gone, which is no fault to report
        if is_last:
            os._exit(1)


def _end_with_parent(parent: int) -> None:
    """Ends this process when the parent is gone: a call in progress may never come to read the end of its input."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os._exit(1)


def write_frame(stream: IO[bytes], payload: bytes) -> None:
    """Writes one request or answer, and flushes. Raises BrokenPipeError when nobody reads any more."""
    stream.write(_HEADER.pack(len(payload)) + payload)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes | None:
    """The next request or answer; None at the end of the stream."""
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    (size,) = _HEADER.unpack(header)
    payload = stream.read(size)
    return payload if len(payload) == size else None

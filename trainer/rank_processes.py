"""The further processes of a learner, seen from the first: each call is carried to all, and has one outcome. No torch.

The first process starts them in its own session, so that whoever kills the learner kills them too; they end when it is
gone, also in the middle of a call, as every child that runs `serve_calls` does. Processes that differ in what a call
came to, or of which one is lost, cannot go on: the others are killed, and the call says why.
"""

import contextlib
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from driftgym.errors import DriftgymError, NotDoneError
from driftgym.processes import ChildDiedError, Failure, read_frame, write_frame

_T = TypeVar("_T")
_SETTLE_S = 30.0  # after an error in this process: those that do not answer by then wait for this one, in vain
_END_S = 5.0
_FIRST_ALONE = frozenset({"publish", "save"})  # in which the first may fail after the others have given their part


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """Comes in the place of an answer."""

    exit_code: int


class _Process:
    """One further process. A thread reads its answers, so that waiting for one can be bounded."""

    def __init__(self, module: str, *, rank: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.name = f"process {rank} of the learner (pid {self._process.pid})"
        """For people; the first is 0."""
        self.answered_at_s = 0.0
        """When its last answer came, on the monotonic clock."""
        self._reader = threading.Thread(target=self._read, name=f"rank-{rank}", daemon=True)
        self._reader.start()

    def send(self, request: bytes) -> None:
        """Gives it a call. Where it is gone, that is its answer."""
        assert self._process.stdin is not None
        try:
            write_frame(self._process.stdin, request)
        except (BrokenPipeError, ValueError):  # it is gone, or its input was closed
            return

    def answer(self, *, timeout_s: float | None) -> Any:
        """What it answers to the call: a result, a Failure, or `_Ended`; `_SILENT` where nothing comes in time."""
        try:
            return self._answers.get(timeout=timeout_s)
        except queue.Empty:
            return _SILENT

    def close_input(self) -> None:
        """Which it takes as the end."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def end(self, *, timeout_s: float) -> None:
        """Waits for its end; kills it past `timeout_s`."""
        try:
            self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._reader.join()

    def _read(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        with stdout:
            while (payload := read_frame(stdout)) is not None:
                self._take(pickle.loads(payload))
        self._take(_Ended(exit_code=self._process.wait()))

    def _take(self, answer: Any) -> None:
        self.answered_at_s = time.monotonic()
        self._answers.put(answer)


_SILENT = object()


class RankProcesses:
    """All further processes of a learner. Made by `start`, ended by `close`."""

    def __init__(self, processes: Sequence[_Process], *, settle_s: float) -> None:
        self._processes = tuple(processes)
        self._settle_s = settle_s
        self._lost: str | None = None

    @classmethod
    def start(cls, module: str, *, num: int, settle_s: float = _SETTLE_S) -> "RankProcesses":
        """Starts `python -m module RANK` for the ranks 1 to `num`; they answer calls by `serve_calls`.

        Args:
            module: what they run.
            num: how many.
            settle_s: after an error in this process, how long all of them together may take to answer.
        """
        return cls([_Process(module, rank=rank) for rank in range(1, num + 1)], settle_s=settle_s)

    def carry(self, method: str, call: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """The result of `call` here, while each other process answers `method` with the same arguments.

        Raises:
            ChildDiedError: a process ended, failed on its own, or is out of step; all are killed.
            NotDoneError: that happened in an earlier call.
            Exception: what `call` raised, and the others with it.
        """
        if self._lost is not None:
            raise NotDoneError(f"{method} was not done: {self._lost}")
        request = pickle.dumps((method, args, kwargs), protocol=pickle.HIGHEST_PROTOCOL)
        for process in self._processes:
            process.send(request)
        error: Exception | None = None
        try:
            result = call(*args, **kwargs)
        except Exception as caught:
            error = caught
        answers = self._answers(settle_s=None if error is None else self._settle_s)
        self._lost = self._why_lost(method, error, answers)
        if self._lost is not None:
            self.close(timeout_s=0.0)
            raise ChildDiedError(self._lost) from error
        if error is not None:
            raise error
        return result

    def close(self, *, timeout_s: float = _END_S) -> None:
        """Ends them; kills those that have not ended within `timeout_s`."""
        for process in self._processes:
            process.close_input()
        for process in self._processes:
            process.end(timeout_s=timeout_s)

    def _answers(self, *, settle_s: float | None) -> list[Any]:
        """What each answers; all of them have `settle_s` for it, or the time that they take."""
        if settle_s is None:
            return [process.answer(timeout_s=None) for process in self._processes]
        deadline_s = time.monotonic() + settle_s
        return [process.answer(timeout_s=max(0.0, deadline_s - time.monotonic())) for process in self._processes]

    def _why_lost(self, method: str, error: Exception | None, answers: Sequence[Any]) -> str | None:
        """Why the processes cannot go on together; None when they can."""
        answered = sorted(zip(self._processes, answers, strict=True), key=lambda each: each[0].answered_at_s)
        named = [(process.name, answer) for process, answer in answered]  # others fail after the one that is the cause
        for name, answer in named:
            if isinstance(answer, _Ended):
                return f"{name} {_how(answer.exit_code)}"
        for name, answer in named:
            if isinstance(answer, Failure) and answer.error is None:
                return f"{name} failed in {method}\n{answer.traceback}"
        if error is not None and not isinstance(error, DriftgymError) and method not in _FIRST_ALONE:
            return f"process 0 of the learner failed in {method}\n{''.join(traceback.format_exception(error))}"
        for name, answer in named:
            may_differ = error is not None and method in _FIRST_ALONE and answer is not _SILENT
            if isinstance(answer, Failure) != (error is not None) and not may_differ:
                return f"{name} and the first came to different ends in {method}: {_ends(error, answer)}"
        return None


def _how(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    return f"was killed by {signal.Signals(-exit_code).name}"


def _ends(error: Exception | None, answer: Any) -> str:
    theirs = answer.error if isinstance(answer, Failure) else "no answer" if answer is _SILENT else "done"
    return f"{theirs}, and {error or 'done'}"

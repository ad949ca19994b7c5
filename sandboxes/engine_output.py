"""Where the output of a command goes that the Docker engine runs: counted as it comes, and kept within bounds."""

import asyncio
from typing import IO

from driftgym.sandboxes.base import ExecResult
from driftgym.sandboxes.engine_exec import ExecState
from driftgym.sandboxes.engine_stream import STDOUT
from driftgym.sandboxes.toolbox_sandbox import decode_output

MAX_WORDS_BYTES = 4096
"""What a tool may complain."""


class Output:
    """Standard output and error of a command, each kept up to a limit and counted beyond."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.stdout = bytearray()
        self.stderr = bytearray()
        self._num_dropped = {True: 0, False: 0}

    def take(self, kind: int, data: "memoryview[int]") -> None:
        """Keeps what still fits."""
        kept = self.stdout if kind == STDOUT else self.stderr
        num_kept = max(0, min(len(data), self._max_bytes - len(kept)))
        if num_kept:
            kept += data[:num_kept]
        self._num_dropped[kind == STDOUT] += len(data) - num_kept

    @property
    def words(self) -> str:
        """Standard error as text."""
        return self.stderr.decode("utf-8", "replace").strip()

    def result(self, state: ExecState | None, *, duration_s: float, oom_killed: bool) -> ExecResult:
        """What a command did that ended with `state`, or was killed at its deadline."""
        num_dropped = sum(self._num_dropped.values())
        return ExecResult(
            exit_code=None if state is None else state.outcome,
            stdout=decode_output(bytes(self.stdout), is_cut=self._num_dropped[True] > 0),
            stderr=decode_output(bytes(self.stderr), is_cut=self._num_dropped[False] > 0),
            duration_s=duration_s,
            timed_out=state is None,
            oom_killed=oom_killed,
            output_truncated=num_dropped > 0,
            num_dropped_bytes=num_dropped,
        )


class Spool:
    """Takes an archive into a temporary file, up to a length."""

    def __init__(self, archive: IO[bytes], *, max_bytes: int) -> None:
        self._archive = archive
        self._num_left = max_bytes
        self._errors = Output(MAX_WORDS_BYTES)
        self.full: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Ends when more has come than fits, or with the OSError for which it could not be kept."""

    @property
    def words(self) -> str:
        """Standard error as text."""
        return self._errors.words

    def take(self, kind: int, data: "memoryview[int]") -> None:
        """Keeps what still fits."""
        if kind != STDOUT:
            self._errors.take(kind, data)
            return
        if self.full.done():
            return
        self._num_left -= len(data)
        if self._num_left < 0:
            self.full.set_result(None)
            return
        try:
            self._archive.write(data)
        except OSError as error:  # no space: raised here, it would end the stream, and nobody would be told
            self.full.set_exception(error)
            self.full.exception()  # whoever asked may not be there any more

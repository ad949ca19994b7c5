"""The console: plain lines where nobody watches, a live view on a terminal.

`ConsoleSink` is a sink as any other: a terminal that stands still, a pipe that nobody reads and one that is closed do
not touch the run. What it prints is in `console_view`.
"""

import functools
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from driftgym.console_view import LiveView, step_line
from driftgym.sinks import Row, within

_PRINT_S = 2.0
_REFRESH_PER_S = 2


class ConsoleSink:
    """Rows for people: a live view on a terminal, with news in lines above it; plain lines elsewhere."""

    def __init__(self, *, max_steps: int, past: Sequence[Row] = (), stream: TextIO | None = None) -> None:
        """Nothing is printed yet.

        Args:
            max_steps: the run's end, as a step.
            past: rows of earlier lives of the run; the view's curve begins with them.
            stream: None prints to standard output.
        """
        self._max_steps = max_steps
        self._past = past
        self._stream = sys.stdout if stream is None else stream
        self._printer: _Lines | _Live | None = None

    @property
    def _begun(self) -> "_Lines | _Live":
        """What prints, made by the first call: by the sink's own thread, where the terminal may hold it up."""
        if self._printer is None:
            if _is_terminal(self._stream):
                self._printer = _Live(self._stream, max_steps=self._max_steps, past=self._past)
            else:
                self._printer = _Lines(self._stream)
        return self._printer

    def write(self, row: Row) -> None:
        """The figures of the view; elsewhere a line for the step."""
        self._begun.write(row)

    def say(self, text: str) -> None:
        """A line of its own."""
        self._begun.say(text)

    def show(self, text: str) -> None:
        """The last line of the view; nothing elsewhere."""
        self._begun.show(text)

    def close(self) -> None:
        """The view stands still from here on."""
        if self._printer is not None:
            self._printer.close()


def _own_handle(stream: TextIO) -> int | None:
    """The file behind `stream`, under a handle of its own; None for a stream in memory.

    A write that blocks holds the lock of the stream, and that of standard output would hold up the end of the program.
    """
    stream.flush()
    try:
        return os.dup(stream.fileno())
    except io.UnsupportedOperation:
        return None


class _Lines:
    """Plain lines."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._file = _own_handle(stream)

    def write(self, row: Row) -> None:
        self.say(step_line(row))

    def say(self, text: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        data = (text + "\n").encode(encoding, "backslashreplace")
        if self._file is None:
            self._stream.write(data.decode(encoding))
        while self._file is not None and data:
            data = data[os.write(self._file, data) :]

    def show(self, text: str) -> None:
        """Nothing: it would soon be out of date."""

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)


class _Live:
    """A view that is painted anew twice a second, under a growing list of news."""

    def __init__(self, stream: TextIO, *, max_steps: int, past: Sequence[Row]) -> None:
        from rich.live import Live

        handle = _own_handle(stream)
        self._file = None
        if handle is not None:
            self._file = os.fdopen(handle, "w", encoding=stream.encoding, errors="backslashreplace")
        self._view = LiveView(max_steps=max_steps, past=past)
        self._live = Live(
            console=_terminal(self._file or stream),
            get_renderable=lambda: self._view,
            refresh_per_second=_REFRESH_PER_S,
            redirect_stderr=sys.stderr is not None and sys.stderr.isatty(),  # a file keeps what is meant for it
        )
        self._live.start(refresh=True)

    def write(self, row: Row) -> None:
        self._view.write(row)

    def say(self, text: str) -> None:
        self._live.console.print(text, markup=False)

    def show(self, text: str) -> None:
        self._view.show(text)

    def close(self) -> None:
        self._view.show("")
        self._live.stop()
        if self._file is not None:
            self._file.close()


@functools.cache
def _terminal_type() -> Any:
    """The console of rich, which is imported where it is used, without what it does to a program."""
    from rich.console import Console

    class Terminal(Console):
        """Raises where nobody reads, instead of ending the program; leaves the cursor as it is, which a program that
        is killed could not bring back."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

        def show_cursor(self, show: bool = True) -> bool:
            return False

    return Terminal


def _terminal(stream: TextIO) -> Any:
    return _terminal_type()(file=stream, highlight=False, soft_wrap=True)


def _is_terminal(stream: TextIO) -> bool:
    return stream is not None and stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def print_in_time(text: str, *, to_stderr: bool = False) -> bool:
    """Prints a line; gives up after two seconds where nobody reads, and at once where nobody can.

    Returns:
        True when it was printed.
    """

    def act() -> None:
        print(text, file=sys.stderr if to_stderr else sys.stdout, flush=True)

    return within(_PRINT_S, act)


def print_table_in_time(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Prints a table to standard output, as `print_in_time` does."""

    def act() -> None:
        from rich.table import Table

        table = Table(*columns)
        for row in rows:
            table.add_row(*row)
        _terminal(sys.stdout).print(table)

    return within(_PRINT_S, act)


def flush_in_time() -> bool:
    """Flushes standard output and error. False where nobody reads: an ordinary end of the program would wait there.

    Where nobody can read any more, what is left goes nowhere, so that nothing fails at the end of the program.
    """

    def act() -> None:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                _flush(stream)

    return within(_PRINT_S, act)


def _flush(stream: TextIO) -> None:
    try:
        stream.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)

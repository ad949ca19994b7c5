"""Commands for the engine's exec: what is refused before it is asked, and what its answers mean."""

import asyncio
import errno
from pathlib import Path

import pytest

from driftgym.sandboxes.engine_exec import Command, ExecState, StartError, late_reason
from driftgym.sandboxes.engine_output import Output, Spool
from driftgym.sandboxes.engine_process import LineReader
from driftgym.sandboxes.engine_scripts import absolute_path, error_of
from driftgym.sandboxes.engine_stream import STDERR, STDOUT


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "no program"),
        ([""], "no program"),
        (["echo", "a\0b"], "null byte"),
        (["echo", "\ud800"], "no text"),
        (["echo", "x" * 131_072], "too long"),
        (["echo", *["x" * 100_000] * 20], "too long"),
    ],
)
def test_commands_that_cannot_be(argv: list[str], words: str) -> None:
    with pytest.raises(StartError, match=words):
        Command.checked(argv, cwd="/", env={})


def test_environment_and_folder_of_a_command() -> None:
    command = Command.checked(["x"], cwd="sub", env={"LANG": "de", "A": "=b"})
    assert command.cwd == "/work/sub"
    assert set(command.env) == {"LANG=de", "HOME=/work", "TMPDIR=/tmp", "A==b"}
    for name in ("", "A=B", "A\0"):
        with pytest.raises(StartError):
            Command.checked(["x"], cwd="/", env={name: "x"})


@pytest.mark.parametrize(
    ("code", "outcome"), [(0, 0), (1, 1), (127, 127), (128, 128), (137, -9), (192, -64), (255, 255)]
)
def test_exit_codes_tell_signals(code: int, outcome: int) -> None:
    assert ExecState(has_started=True, exit_code=code).outcome == outcome


def test_late_reasons_are_those_of_the_engine_alone() -> None:
    state = ExecState(has_started=True, exit_code=1)
    assert late_reason(state, stdout=b"", stderr=b"exec /x: argument list too long\n") is not None
    assert late_reason(state, stdout=b"x", stderr=b"exec /x: argument list too long\n") is None
    assert late_reason(state, stdout=b"", stderr=b"exec /x: something else\n") is None
    ended = ExecState(has_started=True, exit_code=2)
    assert late_reason(ended, stdout=b"", stderr=b"exec /x: argument list too long\n") is None


def test_errors_are_read_from_the_words_of_tools() -> None:
    for words, number in {
        "sh: can't create /work/x: Permission denied": errno.EACCES,
        "mkdir: cannot create directory '/sys/x': Read-only file system\n": errno.EROFS,
        "sh: 3: cannot create /x/y: Directory nonexistent": errno.ENOENT,
        "tar: write error: No space left on device\ntar: giving up": errno.ENOSPC,
        "": errno.EIO,
        "something odd": errno.EIO,
    }.items():
        error = error_of(words, "/the/path")
        assert (error.errno, error.filename) == (number, "/the/path")
    assert isinstance(error_of("cat: x: No such file or directory", "x"), FileNotFoundError)


def test_paths() -> None:
    assert absolute_path("a/b") == "/work/a/b"
    assert absolute_path("/etc") == "/etc"
    for path in ("a\0b", "\ud800", "x" * 5000):
        with pytest.raises(OSError, match="Errno"):
            absolute_path(path)


def test_output_is_counted_and_cut_for_each_stream() -> None:
    output = Output(5)
    for piece in ("aé", "€uro"):
        output.take(STDOUT, memoryview(piece.encode()))
    output.take(STDERR, memoryview(b"12345"))
    result = output.result(None, duration_s=1.0, oom_killed=False)
    assert (result.stdout, result.stderr, result.num_dropped_bytes) == ("aé", "12345", 4)
    assert result.timed_out
    assert result.output_truncated
    output = Output(-1)
    output.take(STDOUT, memoryview(b"12345"))
    assert (bytes(output.stdout), output.result(None, duration_s=1.0, oom_killed=False).num_dropped_bytes) == (b"", 5)


async def test_archive_that_cannot_be_kept_is_told_to_who_waits() -> None:
    with Path("/dev/full").open("wb", buffering=0) as disk:  # noqa: ASYNC230 (no disk is behind it)
        spool = Spool(disk, max_bytes=100)
        for _ in range(2):
            spool.take(STDOUT, memoryview(b"x"))
        with pytest.raises(OSError, match="No space left"):
            await spool.full


async def ask(reader: LineReader, *pieces: bytes, max_bytes: int = 100) -> tuple[bytes, int]:
    answer = reader.question(max_bytes=max_bytes)
    for piece in pieces:
        assert not answer.done()
        reader.feed(memoryview(piece))
    return await asyncio.wait_for(answer, timeout=10)


async def test_lines_are_cut_and_kept_for_the_next_question() -> None:
    reader = LineReader()
    assert await ask(reader, b"on", b"e\ntw") == (b"one", 0)
    assert await ask(reader, b"o\n") == (b"two", 0)
    reader.feed(memoryview(b"early\nlate\nrest"))
    assert await ask(reader) == (b"early", 0)
    assert await ask(reader) == (b"late", 0)
    assert await ask(reader, b"\n") == (b"rest", 0)
    assert await ask(reader, b"x" * 60, b"x" * 60, b"\ny", max_bytes=100) == (b"x" * 100, 20)
    assert await ask(reader, b"\n", max_bytes=0) == (b"", 1)
    assert not reader.is_full
    reader.feed(memoryview(b"z" * 70_000))
    assert reader.is_full

"""What every box keeps, over every implementation; what needs real programs is in `test_sandbox_programs`."""

import asyncio

import pytest

from driftgym.errors import SandboxError
from driftgym.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec


async def test_exec_returns_output_and_exit_code(box: Sandbox) -> None:
    result = await box.exec(["echo", "hello", "there"])
    assert (result.exit_code, result.stdout, result.stderr) == (0, "hello there\n", "")
    assert not any((result.timed_out, result.oom_killed, result.output_truncated))
    assert 0 <= result.duration_s < 60


async def test_non_zero_exit_is_a_value(box: Sandbox) -> None:
    assert (await box.exec(["false"])).exit_code == 1


async def test_standard_error_is_apart(box: Sandbox) -> None:
    result = await box.exec(["cat", "missing.txt"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "missing.txt" in result.stderr


async def test_missing_program_is_127_with_the_reason(box: Sandbox) -> None:
    result = await box.exec(["no-such-program"])
    assert result.exit_code == 127
    assert "no-such-program" in result.stderr


async def test_what_cannot_be_a_command_is_127_with_words(box: Sandbox) -> None:
    for argv in ([], [""], ["", "x"]):
        result = await box.exec(argv)
        assert (result.exit_code, result.stdout) == (127, "")
        assert result.stderr == "cannot start: there is no program to start"
    for name in ("", "A=B"):
        result = await box.exec(["true"], env={name: "x"})
        assert (result.exit_code, result.stdout) == (127, "")
        assert result.stderr == "cannot start: a variable's name is empty, or holds '='"
    with pytest.raises(SandboxError, match="there is no program to start"):
        await box.spawn([])
    with pytest.raises(SandboxError, match="a variable's name is empty"):
        await box.spawn(["cat"], env={"": "x"})


async def test_stdin_and_env_reach_the_command(box: Sandbox) -> None:
    assert (await box.exec(["cat"], stdin=b"from outside")).stdout == "from outside"
    assert "COLOUR=blue" in (await box.exec(["env"], env={"COLOUR": "blue"})).stdout.splitlines()


async def test_output_is_cut_exactly_beyond_the_limit(box: Sandbox) -> None:
    for size, num_dropped in ((99, 0), (100, 0), (101, 1), (300_000, 299_900)):
        result = await box.exec(["cat"], stdin=b"x" * size, max_output_bytes=100)
        assert len(result.stdout) == min(size, 100)
        assert result.output_truncated == (num_dropped > 0)
        assert result.num_dropped_bytes == num_dropped


async def test_cut_output_never_ends_within_a_character(box: Sandbox) -> None:
    result = await box.exec(["cat"], stdin="aé€".encode(), max_output_bytes=5)
    assert result.stdout == "aé"
    assert result.output_truncated


async def test_undecodable_output_is_replaced(box: Sandbox) -> None:
    assert (await box.exec(["cat"], stdin=b"a\xffb\xe2\x82")).stdout == "a\ufffdb\ufffd"


async def test_deadline_ends_a_command_and_leaves_the_box_usable(box: Sandbox) -> None:
    result = await box.exec(["sleep", "60"], timeout_s=0.2)
    assert result.timed_out
    assert result.exit_code is None
    assert not result.oom_killed
    assert result.duration_s < 30
    assert (await box.exec(["echo", "on"])).stdout == "on\n"


async def test_many_commands_at_once_keep_their_output_apart(box: Sandbox) -> None:
    results = await asyncio.gather(*(box.exec(["cat"], stdin=f"{i}".encode(), timeout_s=60) for i in range(32)))
    assert [result.stdout for result in results] == [str(i) for i in range(32)]


async def test_cancelled_command_leaves_the_box_usable(box: Sandbox) -> None:
    task = asyncio.ensure_future(box.exec(["sleep", "60"], timeout_s=60))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await box.exec(["echo", "on"])).stdout == "on\n"


async def test_files_are_written_and_read(box: Sandbox) -> None:
    content = bytes(range(256)) * 1000
    await box.write_file("/work/a/b/data.bin", content)
    assert await box.read_file("/work/a/b/data.bin") == content
    assert await box.read_file("a/b/data.bin") == content
    await box.write_file("note.txt", b"short")
    await box.write_file("note.txt", b"")
    assert await box.read_file("/work/note.txt") == b""
    await box.write_file("note.txt", b"seen by commands")
    assert (await box.exec(["cat", "note.txt"])).stdout == "seen by commands"


async def test_file_errors_have_their_types(box: Sandbox) -> None:
    with pytest.raises(FileNotFoundError):
        await box.read_file("/work/missing")
    await box.write_file("ten", b"0123456789")
    assert await box.read_file("ten", max_bytes=10) == b"0123456789"
    with pytest.raises(ValueError, match="longer than 9 bytes"):
        await box.read_file("ten", max_bytes=9)
    with pytest.raises(OSError, match=r"/sys/driftgym"):
        await box.write_file("/sys/driftgym", b"x")


async def test_process_answers_line_by_line(box: Sandbox) -> None:
    process = await box.spawn(["cat"])
    assert process.is_alive
    for word in ("one", "two", "ünï", ""):
        assert (await process.ask(word, timeout_s=10)).text == word
    answers = await asyncio.gather(*(process.ask(str(i), timeout_s=10) for i in range(8)))
    assert [answer.text for answer in answers] == [str(i) for i in range(8)]
    with pytest.raises(ValueError, match="one line"):
        await process.ask("two\nlines", timeout_s=10)
    await process.kill()
    await process.kill()
    assert not process.is_alive
    with pytest.raises(SandboxError):
        await process.ask("three", timeout_s=10)


async def test_reply_is_cut_beyond_its_limit(box: Sandbox) -> None:
    process = await box.spawn(["cat"])
    for size, num_dropped in ((9, 0), (10, 0), (11, 1), (200_000, 199_990)):
        reply = await process.ask("x" * size, timeout_s=10, max_reply_bytes=10)
        assert len(reply.text) == min(size, 10)
        assert reply.truncated == (num_dropped > 0)
        assert reply.num_dropped_bytes == num_dropped
    assert (await process.ask("é" * 10, timeout_s=10, max_reply_bytes=3)).text == "é"


async def test_process_that_does_not_answer_is_killed_at_the_deadline(box: Sandbox) -> None:
    process = await box.spawn(["sleep", "60"])
    with pytest.raises(TimeoutError):
        await process.ask("anybody?", timeout_s=0.2)
    assert not process.is_alive
    with pytest.raises(SandboxError):
        await process.ask("anybody?", timeout_s=0.2)
    assert (await box.exec(["echo", "on"])).stdout == "on\n"


async def test_cancelled_question_ends_the_process(box: Sandbox) -> None:
    process = await box.spawn(["sleep", "60"])
    task = asyncio.ensure_future(process.ask("anybody?", timeout_s=60))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not process.is_alive


async def test_program_that_cannot_be_started_is_a_sandbox_error(box: Sandbox) -> None:
    with pytest.raises(SandboxError, match="no-such-program"):
        await box.spawn(["no-such-program"])
    assert (await box.exec(["echo", "on"])).stdout == "on\n"


async def test_reset_ends_processes_and_removes_files(box: Sandbox) -> None:
    process = await box.spawn(["cat"])
    await process.ask("hi", timeout_s=10)
    await box.write_file("/work/deep/er/file", b"x")
    await box.reset()
    assert not process.is_alive
    with pytest.raises(FileNotFoundError):
        await box.read_file("/work/deep/er/file")
    again = await box.spawn(["cat"])
    assert (await again.ask("clean", timeout_s=10)).text == "clean"
    await box.reset()
    await box.reset()


async def test_closed_box_raises_and_closes_twice(box: Sandbox) -> None:
    process = await box.spawn(["cat"])
    await asyncio.gather(box.close(), box.close())
    await box.close()
    assert not process.is_alive
    with pytest.raises(SandboxError):
        await box.exec(["true"])
    with pytest.raises(SandboxError):
        await box.read_file("x")
    with pytest.raises(SandboxError):
        await box.write_file("x", b"")
    with pytest.raises(SandboxError):
        await box.spawn(["cat"])
    with pytest.raises(SandboxError):
        await box.reset()
    with pytest.raises(SandboxError):
        await process.ask("x", timeout_s=1)


async def test_provider_lists_removes_and_closes(provider: SandboxProvider, spec: SandboxSpec) -> None:
    boxes = await asyncio.gather(*(provider.start(spec, timeout_s=60) for _ in range(3)))
    infos = {info.sandbox_id: info for info in await provider.list()}  # an engine may have boxes of others too
    assert all(infos[box.sandbox_id].owner_is_alive for box in boxes)
    assert len({box.sandbox_id for box in boxes}) == 3
    removed = boxes[0].sandbox_id
    await provider.remove(removed)
    await provider.remove(removed)
    assert removed not in {info.sandbox_id for info in await provider.list()}
    await provider.close()
    await provider.close()
    for box in boxes:
        with pytest.raises(SandboxError):
            await box.exec(["true"])
    with pytest.raises(SandboxError, match="closed"):
        await provider.start(spec, timeout_s=60)


async def test_call_under_way_ends_when_its_box_is_closed(real_box: Sandbox) -> None:
    call = asyncio.ensure_future(real_box.exec(["sleep", "60"], timeout_s=60))
    await asyncio.sleep(0.1)
    await real_box.close()
    with pytest.raises(SandboxError):
        await call

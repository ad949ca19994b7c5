"""What every box that runs real programs keeps: process trees, floods, nonsense, and a killed owner."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from driftgym.errors import SandboxError
from driftgym.sandboxes.base import MIB, Sandbox, SandboxProvider, SandboxSpec

LINE_SERVER = """
while IFS= read -r word; do
  case $word in
    die) exit 3;;
    flood) head -c 20000000 /dev/zero | tr '\\0' y;;
    endless) tr '\\0' z </dev/zero;;
    close) exec >&-; sleep 60;;
    two) echo first;;
    bytes) printf '\\377\\376';;
  esac
  echo "$word"
done
"""
SERVER_ARGV = ("sh", "-c", LINE_SERVER)


async def marked_processes(box: Sandbox, mark: str) -> str:
    """Which processes that the box can see have `mark` on their command line."""
    script = (
        "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' <$f 2>/dev/null; echo; done"
        f" | grep '{mark[0]}[{mark[1]}]{mark[2:]}'"
    )
    return (await box.exec(script)).stdout


async def until_none_left(box: Sandbox, mark: str) -> None:
    """Waits for the kernel to finish with processes that have been killed."""
    for _ in range(100):
        if not await marked_processes(box, mark):
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"still there: {await marked_processes(box, mark)}")


async def test_shell_line_runs_in_its_folder_with_its_environment(real_box: Sandbox) -> None:
    await real_box.write_file("sub/x", b"")
    result = await real_box.exec('ls; echo "$COLOUR" >&2; exit 7', cwd="/work/sub", env={"COLOUR": "ré d"})
    assert (result.exit_code, result.stdout, result.stderr) == (7, "x\n", "ré d\n")
    missing = await real_box.exec("true", cwd="/work/nowhere")
    assert missing.exit_code == 127
    assert "nowhere" in missing.stderr


async def test_exit_by_signal_is_negative(real_box: Sandbox) -> None:
    assert (await real_box.exec("kill -KILL $$")).exit_code == -signal.SIGKILL


async def test_pipelines_end_when_their_reader_does(real_box: Sandbox) -> None:
    assert (await real_box.exec("yes | head -n 1")).stdout == "y\n"


async def test_odd_commands_are_answers_and_not_crashes(real_box: Sandbox) -> None:
    for argv in ([], [""], ["echo", "a\0b"], ["echo", "\ud800"], ["/work"], ["echo", "x" * 3_000_000]):
        assert (await real_box.exec(argv)).exit_code == 127
    assert (await real_box.exec("echo on")).stdout == "on\n"


@pytest.mark.parametrize(
    "script",
    [
        "trap '' TERM INT HUP; sleep 6161",
        "(setsid sh -c 'sleep 6161 & sleep 6161' &) ; sleep 6161",
        "env -i setsid sh -c '(sleep 6161 &) ; sleep 6161' & sleep 6161",
        "sh -c '(setsid sh -c \"(sleep 6161 &) ; exec setsid sleep 6161\" &) ; exit 0' ; sleep 6161",
    ],
    ids=["ignores-term", "setsid", "empty-environment", "double-fork"],
)
async def test_deadline_kills_the_whole_tree(real_box: Sandbox, script: str) -> None:
    result = await real_box.exec(script, timeout_s=1.5)
    assert result.timed_out
    await until_none_left(real_box, "6161")
    assert (await real_box.exec("echo on")).stdout == "on\n"


async def test_deadline_spares_what_others_have_started(real_box: Sandbox) -> None:
    process = await real_box.spawn(SERVER_ARGV)
    other = asyncio.ensure_future(real_box.exec("sleep 1.5; echo finished"))
    assert (await real_box.exec("sleep 60", timeout_s=0.3)).timed_out
    assert (await process.ask("still", timeout_s=10)).text == "still"
    assert (await other).stdout == "finished\n"


async def test_cancelled_command_is_killed(real_box: Sandbox) -> None:
    task = asyncio.ensure_future(real_box.exec("sleep 6262", timeout_s=60))
    await asyncio.sleep(0.3)
    assert await marked_processes(real_box, "6262")
    task.cancel()
    await until_none_left(real_box, "6262")


async def test_background_process_does_not_hold_the_answer(real_box: Sandbox) -> None:
    result = await real_box.exec("sleep 6363 & yes & echo started; exit 0", timeout_s=20)
    assert result.exit_code == 0
    assert not result.timed_out
    assert await marked_processes(real_box, "6363")
    await real_box.reset()
    await until_none_left(real_box, "6363")


async def test_input_that_nobody_reads_does_not_hold_the_answer(real_box: Sandbox) -> None:
    result = await real_box.exec("exec <&-; echo ignored", stdin=b"x" * 5_000_000)
    assert result.stdout == "ignored\n"


async def test_flood_is_counted_and_dropped(real_box: Sandbox) -> None:
    line = "head -c 100000000 /dev/zero | tr '\\0' x; echo end >&2; exit 3"
    result = await real_box.exec(line, timeout_s=60, max_output_bytes=1 * MIB)
    assert result.exit_code == 3
    assert len(result.stdout) == 1 * MIB
    assert result.num_dropped_bytes == 100_000_000 - 1 * MIB
    assert result.stderr == "end\n"
    status = await real_box.exec("cat /proc/$PPID/status")  # of the toolbox, where there is one
    for words in (line.split() for line in status.stdout.splitlines()):
        assert words[0] not in ("VmHWM:", "VmRSS:") or int(words[1]) < 60_000, "the toolbox has kept the flood"


async def test_endless_flood_ends_at_the_deadline(real_box: Sandbox) -> None:
    result = await real_box.exec("yes", timeout_s=2.0, max_output_bytes=1000)
    assert result.timed_out
    assert len(result.stdout) == 1000
    assert result.num_dropped_bytes > 1000


async def test_process_death_is_told(real_box: Sandbox) -> None:
    process = await real_box.spawn(SERVER_ARGV)
    assert (await process.ask("hello", timeout_s=10)).text == "hello"
    with pytest.raises(SandboxError):
        await process.ask("die", timeout_s=10)
    assert not process.is_alive


async def test_process_that_closes_its_output_is_gone(real_box: Sandbox, real_kind: str) -> None:
    process = await real_box.spawn(SERVER_ARGV)
    # The engine does not tell that a process has closed its output: only the deadline does then.
    kind_of_error, timeout_s = (TimeoutError, 2) if real_kind == "engine-exec" else (SandboxError, 30)
    with pytest.raises(kind_of_error):
        await process.ask("close", timeout_s=timeout_s)
    assert not process.is_alive


async def test_flooded_reply_is_cut_and_the_next_is_right(real_box: Sandbox) -> None:
    process = await real_box.spawn(SERVER_ARGV)
    reply = await process.ask("flood", timeout_s=60, max_reply_bytes=1000)
    assert reply.text == "y" * 1000
    assert reply.num_dropped_bytes == 20_000_000 + len("flood") - 1000
    assert (await process.ask("next", timeout_s=10)).text == "next"
    assert (await process.ask("bytes", timeout_s=10)).text == "\ufffd\ufffdbytes"
    assert (await process.ask("two", timeout_s=10)).text == "first"
    assert (await process.ask("late", timeout_s=10)).text == "two"
    assert (await process.ask("later", timeout_s=10)).text == "late"
    assert (await process.ask("next", timeout_s=10)).text == "later"
    await process.kill()
    process = await real_box.spawn(SERVER_ARGV)
    with pytest.raises(TimeoutError):
        await process.ask("endless", timeout_s=0.5, max_reply_bytes=1000)
    assert (await real_box.exec("echo on")).stdout == "on\n"


EAGER = """
echo early
while IFS= read -r line; do echo ${#line}; done
"""


async def test_question_is_written_whole_though_the_answer_came_early(real_box: Sandbox) -> None:
    process = await real_box.spawn(["sh", "-c", EAGER])
    assert (await process.ask("x" * 99_999, timeout_s=10)).text == "early"
    assert (await process.ask("y" * 9, timeout_s=30)).text == "99999"
    assert (await process.ask("", timeout_s=10)).text == "9"


async def test_deadline_without_end_is_no_harm(real_box: Sandbox) -> None:
    for timeout_s in (1e9, float("inf")):
        assert (await real_box.exec("echo on", timeout_s=timeout_s)).stdout == "on\n"
    process = await real_box.spawn(["cat"])
    assert (await process.ask("on", timeout_s=float("inf"))).text == "on"


@pytest.mark.parametrize(
    "path",
    ["a\0b", "\ud800", "x" * 5000, "/work/" + "d/" * 3000 + "x"],
    ids=["null", "surrogate", "long", "deep"],
)
async def test_path_that_cannot_be_is_an_answer_and_no_lost_box(real_box: Sandbox, path: str) -> None:
    with pytest.raises(FileNotFoundError):
        await real_box.read_file(path)
    with pytest.raises(OSError, match=r"Errno"):
        await real_box.write_file(path, b"x")
    assert (await real_box.exec("echo on")).stdout == "on\n"


async def test_only_regular_files_are_read_and_written(real_box: Sandbox) -> None:
    await real_box.exec("mkfifo fifo; mkdir folder; ln -s /dev/zero zero; ln -s loop loop")
    for name in ("fifo", "folder", "zero", "loop"):
        with pytest.raises(FileNotFoundError):
            await real_box.read_file(name)
        with pytest.raises(OSError, match=name):
            await real_box.write_file(name, b"x")
    assert b"Name:" in await real_box.read_file("/proc/self/status")


DEEP_FOLDERS = """
chain=; n=0
while [ $n -lt 750 ]; do chain=${chain}deep/; n=$((n+1)); done
mkdir -p one/$chain two/$chain three/$chain/$(printf '%0250d' 7)
mv three two/$chain && mv two one/$chain
"""
"""A tree deeper than any path that the kernel takes."""


async def test_reset_empties_what_was_made_hard_to_remove(real_box: Sandbox) -> None:
    assert (await real_box.exec(DEEP_FOLDERS, timeout_s=60)).exit_code == 0
    await real_box.exec(
        "mkdir -p a/b 'odd name' ..odd -- -rf .h; echo x >a/b/c; touch '*' '\n'; ln -s / root; mkfifo p;"
        "echo t >$TMPDIR/t; mkdir $TMPDIR/locked; echo s >/dev/shm/s; chmod 0 $TMPDIR/locked a/b a; chmod 0 .;"
        "(setsid sleep 6464 &)"
    )
    await real_box.reset()
    await until_none_left(real_box, "6464")
    listed = await real_box.exec("find . $TMPDIR -mindepth 1 -exec echo left: {} +; touch again")
    assert (listed.exit_code, listed.stdout) == (0, "")


async def test_provider_starts_many_at_once(real_provider: SandboxProvider, real_spec: SandboxSpec) -> None:
    boxes = await asyncio.gather(*(real_provider.start(real_spec, timeout_s=60) for _ in range(6)))
    results = await asyncio.gather(*(box.exec(f"echo {i} >mine; cat mine") for i, box in enumerate(boxes)))
    assert [result.stdout for result in results] == [f"{i}\n" for i in range(6)]
    await asyncio.gather(*(box.close() for box in boxes))


OWNER = """
import asyncio, sys
from driftgym.sandboxes.base import SandboxConfig, SandboxSpec
from driftgym.sandboxes.providers import open_provider

async def main():
    config = SandboxConfig(kind=sys.argv[1], spec=SandboxSpec.model_validate_json(sys.argv[2]))
    provider = await open_provider(config, say=lambda text: None, run_id="owner-test")
    boxes = [await provider.start(config.spec, timeout_s=60) for _ in range(2)]
    for box in boxes:
        await box.exec("(setsid sleep 6565 &)")
    print(*(box.sandbox_id for box in boxes), flush=True)
    await boxes[0].exec("sleep 6565", timeout_s=100)

asyncio.run(main())
"""


@pytest.mark.slow
async def test_killed_owner_leaves_nothing(real_provider: SandboxProvider, real_spec: SandboxSpec) -> None:
    with start_owner(real_provider.kind, real_spec) as owner:
        assert owner.stdout is not None
        sandbox_ids = (await asyncio.to_thread(owner.stdout.readline)).split()
        folders = process_folders(sandbox_ids)
        owner.kill()
    assert len(sandbox_ids) == 2
    for _ in range(100):
        left = {info.sandbox_id for info in await real_provider.list()} & set(sandbox_ids)
        if not (left or sleepers() or any(folder.exists() for folder in folders)):
            return
        await asyncio.sleep(0.1)
    pytest.fail(f"left: boxes {left}, processes {sleepers()}, folders {folders}")


def start_owner(kind: str, spec: SandboxSpec) -> "subprocess.Popen[str]":
    """A process that owns two boxes, and prints their ids."""
    argv = [sys.executable, "-P", "-c", OWNER, kind, spec.model_dump_json()]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def process_folders(sandbox_ids: list[str]) -> list[Path]:
    """The work folders of process boxes: where their toolbox's settings say."""
    folders = []
    for sandbox_id in sandbox_ids:
        if sandbox_id.startswith("process-"):
            command = Path(f"/proc/{sandbox_id.removeprefix('process-')}/cmdline").read_text()
            folders.append(Path(command.split('"work_dir": "')[1].split('"')[0]))
    return folders


def sleepers() -> list[int]:
    """The processes of the owner's commands, of this machine and of containers on it."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "cmdline").read_bytes() == b"sleep\x006565\x00" and os.stat(folder):
                found.append(int(folder.name))
    return found

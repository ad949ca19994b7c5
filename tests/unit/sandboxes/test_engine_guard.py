"""The main process of boxes without Python: its script in a real shell, and the owner's side against nonsense."""

import asyncio
import shutil
import subprocess
import tracemalloc
from pathlib import Path

import pytest

from driftgym.errors import SandboxError
from driftgym.sandboxes.engine_guard import Guard, guard_command

SHELLS = [pytest.param([path], id=name) for name in ("dash", "bash") if (path := shutil.which(name)) is not None]
if (busybox := shutil.which("busybox")) is not None:
    SHELLS.append(pytest.param([busybox, "sh"], id="busybox"))


def start(shell: list[str], folder: Path, *, dead_man_s: float = 60.0) -> "subprocess.Popen[str]":
    argv = shell + guard_command(dead_man_s=dead_man_s, folders=[str(folder)])[1:]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("shell", SHELLS)
def test_script_answers_kills_one_group_and_ends_with_its_input(shell: list[str], tmp_path: Path) -> None:
    group = 1 << 21
    sleepers = [subprocess.Popen(["sleep", "600"], group=group + index) for index in (0, 0, 1)]
    with start(shell, tmp_path) as guard:
        assert guard.stdin is not None
        assert guard.stdout is not None
        guard.stdin.write(f"1 ping 0\n2 oom 0\n3 kill {group}\n4 kill {group + 7}\n0 beat\n")
        guard.stdin.flush()
        answers = [guard.stdout.readline().split() for _ in range(5)]
        guard.stdin.close()
        assert guard.stdout.read() == ""
    assert [answer[0] for answer in answers] == ["1", "2", "3", "4", "0"]
    assert (answers[0], answers[2], answers[3]) == (["1", "0"], ["3", "2"], ["4", "0"])
    assert [sleeper.wait(timeout=60) for sleeper in sleepers[:2]] == [-9, -9]
    assert sleepers[2].poll() is None
    sleepers[2].kill()
    sleepers[2].wait()
    assert tmp_path.stat().st_mode & 0o7777 == 0o1777


@pytest.mark.parametrize("shell", [shell for shell in SHELLS if shell.id != "dash"])
def test_silence_ends_the_script(shell: list[str], tmp_path: Path) -> None:
    with start(shell, tmp_path, dead_man_s=1) as guard:
        assert guard.stdout is not None
        assert guard.stdout.read() == ""  # until it ends; its input is open all the time
        assert guard.wait(timeout=60) is not None


async def test_owner_gives_signs_of_life() -> None:
    written: list[bytes] = []
    guard = Guard(name="box", write=written.append, dead_man_s=0.04)
    starting = asyncio.ensure_future(guard.start())
    await asyncio.sleep(0.2)
    assert written.count(b"0 beat\n") >= 3
    guard.feed(b"0 0\n0 0\n1 ")
    guard.feed(b"0\n")
    await starting
    guard.lose("closed")
    number = len(written)
    await asyncio.sleep(0.05)
    assert len(written) == number


async def test_every_wait_ends_when_the_box_is_lost() -> None:
    guard = Guard(name="box", write=lambda data: None, dead_man_s=60)
    called: list[int] = []
    guard.on_lost(lambda: called.append(1))
    waits = [asyncio.ensure_future(guard.ask("ping")) for _ in range(3)]
    await asyncio.sleep(0)
    guard.lose("its engine is gone")
    guard.lose("closed")
    for wait in waits:
        with pytest.raises(SandboxError, match="its engine is gone"):
            await wait
    with pytest.raises(SandboxError, match="its engine is gone"):
        await guard.ask("ping")
    assert called == [1]


async def test_silence_loses_the_box() -> None:
    guard = Guard(name="box", write=lambda data: None, dead_man_s=60)
    with pytest.raises(SandboxError, match="no answer to kill"):
        await guard.ask("kill", 7, timeout_s=0.01)
    assert guard.lost.done()


@pytest.mark.parametrize("data", [b"nonsense\n", b"1\n", b"1 2 3\n", b"\xff\xfe\n", b"1 x\n", b"1" * 10_000])
async def test_nonsense_loses_the_box(data: bytes) -> None:
    guard = Guard(name="box", write=lambda data: None, dead_man_s=60)
    wait = asyncio.ensure_future(guard.ask("ping"))
    await asyncio.sleep(0)
    guard.feed(data)
    with pytest.raises(SandboxError, match="no guard"):
        await wait


async def test_nothing_is_kept_of_what_comes_after_the_loss() -> None:
    guard = Guard(name="box", write=lambda data: None, dead_man_s=60)
    guard.lose("closed")
    tracemalloc.start()
    for _ in range(50):
        guard.feed(b"x" * 1_000_000)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 2_000_000

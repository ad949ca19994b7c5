"""A child that answers calls: what becomes of it when its parent is killed, and when closing it is cancelled."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from driftgym.processes import ChildDiedError, ChildProcess

CHILD = """
import os, subprocess, sys, time
from driftgym.processes import serve_calls

def grandchild():
    return subprocess.Popen(["sleep", "600"]).pid

serve_calls({
    "pid": os.getpid, "sleep": time.sleep, "end": lambda: os._exit(3), "read": sys.stdin.read, "grandchild": grandchild,
})
"""
PARENT = """
import asyncio
from driftgym.processes import ChildProcess

async def main():
    child = await ChildProcess.start("a_child")
    print(await child.call("pid", timeout_s=30), flush=True)
    await child.call("sleep", 600, timeout_s=600)

asyncio.run(main())
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """In which `python -m a_child` answers calls."""
    (tmp_path / "a_child.py").write_text(CHILD)
    return {"PYTHONPATH": str(tmp_path)}


def is_gone(pid: int) -> bool:
    """True when the process has ended; one that nobody waited for yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 20
    while not is_gone(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.05)


def test_a_child_ends_with_its_killed_parent_in_the_middle_of_a_call(environment: dict[str, str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=os.environ | environment
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    wait_until_gone(pid)


async def test_closing_waits_for_a_call_and_then_kills(environment: dict[str, str]) -> None:
    child = await ChildProcess.start("a_child", env=environment)
    call = asyncio.create_task(child.call("sleep", 600, timeout_s=600))
    await asyncio.sleep(0.1)
    await child.close(timeout_s=0.2)
    assert not child.is_alive
    with pytest.raises(ChildDiedError):
        await call


async def test_a_close_that_is_cancelled_leaves_no_process(environment: dict[str, str]) -> None:
    child = await ChildProcess.start("a_child", env=environment)
    call = asyncio.create_task(child.call("sleep", 600, timeout_s=600))
    await asyncio.sleep(0.1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await child.close(timeout_s=600)
    with pytest.raises(ChildDiedError):
        await call
    assert is_gone(child.pid)


async def test_a_child_that_ends_in_a_call_is_said_with_its_exit_code(environment: dict[str, str]) -> None:
    child = await ChildProcess.start("a_child", name="worker", env=environment)
    with pytest.raises(ChildDiedError, match=r"worker \(pid \d+\) ended with exit code 3"):
        await child.call("end", timeout_s=30)
    await child.close(timeout_s=5)


async def test_what_a_call_reads_from_standard_input_is_empty(environment: dict[str, str]) -> None:
    child = await ChildProcess.start("a_child", env=environment)
    assert await child.call("read", timeout_s=30) == ""
    assert await child.call("pid", timeout_s=30) == child.pid
    await child.close(timeout_s=5)


async def test_what_a_child_started_ends_with_it(environment: dict[str, str]) -> None:
    child = await ChildProcess.start("a_child", env=environment)
    grandchild = await child.call("grandchild", timeout_s=30)
    assert not is_gone(grandchild)
    await child.close(timeout_s=5)
    wait_until_gone(grandchild)

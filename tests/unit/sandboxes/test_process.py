"""What a process box keeps and does not keep from its owner's machine."""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from driftgym.errors import SandboxError
from driftgym.sandboxes.base import MIB, SandboxSpec
from driftgym.sandboxes.process import ProcessSandbox
from driftgym.sandboxes.reaper import process_start_time
from driftgym.sandboxes.toolbox_system import processes_below


@pytest_asyncio.fixture
async def box() -> AsyncIterator[ProcessSandbox]:
    spec = SandboxSpec(memory_bytes=128 * MIB, work_dir_bytes=1 * MIB, max_open_files=40)
    box = await ProcessSandbox.start(spec, timeout_s=60)
    yield box
    await box.close()


async def test_owner_s_environment_is_not_passed_on(box: ProcessSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    other = await ProcessSandbox.start(SandboxSpec(), timeout_s=60)
    try:
        environment = (await other.exec(["env"])).stdout
    finally:
        await other.close()
    assert "SECRET_TOKEN" not in environment
    assert {line.split("=")[0] for line in environment.split()} <= {
        "PATH",
        "LANG",
        "HOME",
        "TMPDIR",
        "DRIFTGYM_CALL",
        "LC_CTYPE",
    }


async def test_resource_limits_hold(box: ProcessSandbox) -> None:
    memory = await box.exec(["python3", "-c", "bytearray(1 << 30)"])
    assert "MemoryError" in memory.stderr
    files = await box.exec(["python3", "-c", "[open('/dev/null') for _ in range(60)]"])
    assert "Too many open files" in files.stderr
    assert (await box.exec("head -c 3000000 /dev/zero >big")).exit_code != 0
    with pytest.raises(OSError, match="big"):
        await box.write_file("big", b"x" * 3_000_000)


async def test_killed_toolbox_is_a_sandbox_error(box: ProcessSandbox) -> None:
    process = await box.spawn(["cat"])
    call = asyncio.ensure_future(box.exec("sleep 5", timeout_s=60))
    await asyncio.sleep(0.1)
    os.kill(box.pid, signal.SIGKILL)
    with pytest.raises(SandboxError, match="the toolbox has ended"):
        await call
    assert not process.is_alive
    with pytest.raises(SandboxError):
        await box.exec("true")
    await box.close()


async def test_terminated_toolbox_takes_everything_along(box: ProcessSandbox) -> None:
    folder = (await box.exec("pwd; (setsid sleep 50 >/dev/null 2>&1 &)")).stdout.strip()
    os.kill(box.pid, signal.SIGTERM)
    with pytest.raises(SandboxError):
        await box.exec("sleep 5")
    for _ in range(100):
        if not os.path.exists(folder):  # noqa: ASYNC240
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"{folder} is still there")


async def test_closed_box_is_gone(box: ProcessSandbox) -> None:
    process = await box.spawn(["cat"])
    await process.ask("x", timeout_s=10)
    await box.close()
    assert process_start_time(box.pid) is None


@pytest.mark.slow
async def test_stopped_toolbox_is_killed_at_close_with_all_that_it_has_started(box: ProcessSandbox) -> None:
    shell = int((await box.exec("echo $$; exec >&-; (setsid sleep 77 &)")).stdout)
    left = [pid for pid in processes_below(box.pid) if pid != shell]
    assert left
    folder = (await box.exec("pwd")).stdout.strip()
    os.kill(box.pid, signal.SIGSTOP)
    await box.close()
    assert [process_start_time(pid) for pid in (box.pid, *left)] == [None] * (1 + len(left))
    assert not os.path.exists(folder)  # noqa: ASYNC240


async def test_machine_without_space_is_a_sandbox_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(SandboxError, match="cannot be started on this machine"):
        await ProcessSandbox.start(SandboxSpec(), timeout_s=60)


async def test_machine_without_processes_is_a_sandbox_error_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    with pytest.raises(SandboxError, match="no-python"):
        await ProcessSandbox.start(SandboxSpec(), timeout_s=60)
    assert os.listdir(tmp_path) == []

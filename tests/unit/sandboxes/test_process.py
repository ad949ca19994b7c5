"""What a process box keeps and does not keep from its owner's machine."""

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from driftgym.errors import SandboxError
from driftgym.sandboxes.base import MIB, SandboxSpec
from driftgym.sandboxes.owners import process_start_time
from driftgym.sandboxes.process import ProcessSandbox
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


async def test_killed_toolbox_leaves_no_command(box: ProcessSandbox) -> None:
    shell = asyncio.ensure_future(box.exec("sleep 73 & sleep 73", timeout_s=60))
    background = await box.exec("exec >&- 2>&-; (setsid sleep 73 &)")
    assert background.exit_code == 0
    for _ in range(100):
        if len(started := list(processes_below(box.pid))) >= 4:
            break
        await asyncio.sleep(0.02)
    os.kill(box.pid, signal.SIGKILL)
    with pytest.raises(SandboxError):
        await shell
    await box.close()
    for _ in range(100):
        if not any(process_start_time(pid) for pid in started):
            return
        await asyncio.sleep(0.02)
    pytest.fail("commands are still there")


@pytest.mark.parametrize("is_stopped", [True, False], ids=["owner stops", "owner idles"])
async def test_box_ends_when_its_owner_falls_silent_and_only_then(is_stopped: bool) -> None:
    box = await ProcessSandbox.start(SandboxSpec(dead_man_s=0.6), timeout_s=60)
    try:
        if is_stopped:
            time.sleep(2.0)  # noqa: ASYNC251 (this is what is tested)
            with pytest.raises(SandboxError, match="silent"):
                await box.exec("true")
        else:
            await asyncio.sleep(2.0)
            assert (await box.exec("echo on")).stdout == "on\n"
    finally:
        await box.close()


async def test_much_input_and_output_goes_through(box: ProcessSandbox) -> None:
    data = os.urandom(5_000_000)
    result = await box.exec(["wc", "-c"], stdin=data, timeout_s=60)
    assert result.stdout.split() == ["5000000"]
    both = await box.exec("cat >&2; head -c 300000 /dev/zero", stdin=b"e" * 700_000, timeout_s=60)
    assert (both.stdout, both.stderr) == ("\0" * 300_000, "e" * 700_000)
    cut = await box.exec("cat >&2; head -c 300000 /dev/zero", stdin=b"e" * 700_000, max_output_bytes=250_000)
    assert (len(cut.stdout), len(cut.stderr), cut.num_dropped_bytes) == (250_000, 250_000, 500_000)


async def test_output_has_the_spec_s_bound_unless_the_call_says() -> None:
    box = await ProcessSandbox.start(SandboxSpec(max_output_bytes=10), timeout_s=60)
    try:
        assert (await box.exec("echo 0123456789abc")).stdout == "0123456789"
        assert (await box.exec("echo 0123456789abc", max_output_bytes=12)).stdout == "0123456789ab"
    finally:
        await box.close()


async def test_stopped_box_does_not_answer_a_ping_and_is_lost(box: ProcessSandbox) -> None:
    await box.ping(timeout_s=10)
    os.kill(box.pid, signal.SIGSTOP)
    with pytest.raises(SandboxError, match="no answer to ping"):
        await box.ping(timeout_s=0.2)
    with pytest.raises(SandboxError):
        await box.exec("true")
    os.kill(box.pid, signal.SIGCONT)


async def test_cancelled_download_and_upload_leave_the_box_usable(box: ProcessSandbox, tmp_path: Path) -> None:
    await box.exec("mkdir big; for i in $(seq 200); do echo x >big/$i; done; head -c 900000 /dev/zero >big/zero")
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "zero").write_bytes(bytes(900_000))
    for delay_s in (0.0, 0.001, 0.01, 0.03):
        copies = [
            asyncio.ensure_future(box.download("/work/big", tmp_path / "to")),
            asyncio.ensure_future(box.upload(tmp_path / "from", "/work/there")),
        ]
        await asyncio.sleep(delay_s)
        for copy in copies:
            copy.cancel()
        await asyncio.gather(*copies, return_exceptions=True)
    await box.upload(tmp_path / "from", "/work/there")
    await box.download("/work/there", tmp_path / "back")
    assert (tmp_path / "back" / "zero").read_bytes() == bytes(900_000)

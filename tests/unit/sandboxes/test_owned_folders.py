"""Temporary folders of owners that were killed are found and removed, and nobody else's."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from driftgym.sandboxes.base import SandboxConfig
from driftgym.sandboxes.owned_folders import left_over_folders, owned_prefix, sweep_folders
from driftgym.sandboxes.owners import process_start_time
from driftgym.sandboxes.providers import open_provider

OWNER = """
import asyncio, os
from driftgym.sandboxes.base import SandboxSpec
from driftgym.sandboxes.process import ProcessSandbox
async def main():
    box = await ProcessSandbox.start(SandboxSpec(), timeout_s=60)
    left = await box.exec("exec >&- 2>&-; (setsid sleep 300 & echo $! >pid)")
    print(box.pid, (await box.exec("cat pid")).stdout.strip(), flush=True)
    await asyncio.sleep(300)
asyncio.run(main())
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go, for this process and those that it starts."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def dead_prefix() -> str:
    """What a process that has ended began the name of its folder `work` with."""
    program = "from driftgym.sandboxes.owned_folders import owned_prefix; print(owned_prefix('work'))"
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def owner(temporary: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process with a box in which something runs in the background."""
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def gone(*pids: int) -> bool:
    """Whether all of them end within seconds."""
    for _ in range(200):
        if not any(process_start_time(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def make(folder: Path, prefix: str) -> Path:
    return Path(tempfile.mkdtemp(prefix=prefix, dir=folder))


def test_what_kill_9_of_everything_leaves_is_removed_with_what_still_runs(
    owner: "subprocess.Popen[str]", temporary: Path
) -> None:
    assert owner.stdout is not None
    toolbox, left = (int(pid) for pid in owner.stdout.readline().split())
    folders = sorted(temporary.glob("driftgym-*"))
    assert [folder.name.split("-")[1] for folder in folders] == ["tmp", "work"]
    assert sweep_folders() == 0, "its owner lives"
    os.kill(toolbox, signal.SIGSTOP)
    owner.kill()
    owner.wait()
    os.kill(toolbox, signal.SIGKILL)
    assert gone(toolbox)
    assert process_start_time(left) is not None
    assert sorted(left_over_folders()) == folders
    assert sweep_folders() == 2
    assert not list(temporary.glob("driftgym-*"))
    assert gone(left)


def test_folders_of_a_living_owner_and_of_nobody_s_stay(temporary: Path, dead_prefix: str) -> None:
    host, pid, started = dead_prefix.removesuffix("-").split("-")[2:]
    other = "0" * 12 if host[0] != "0" else "1" * 12
    kept = [
        make(temporary, owned_prefix("work")),
        make(temporary, owned_prefix("image")),
        make(temporary, "driftgym-work-"),
        make(temporary, f"driftgym-work-{other}-{pid}-{started}-"),
        make(temporary, f"driftgym-runs-{host}-{pid}-{started}-"),
        make(temporary, f"my-{dead_prefix}"),
        temporary / f"{dead_prefix}abcdefgh.bak",
        temporary / f"{dead_prefix}abcdefg",
        temporary / f"{dead_prefix}filefile",
        temporary / f"{dead_prefix}linklink",
    ]
    kept[6].mkdir()
    kept[7].mkdir()
    kept[8].write_text("a file")
    kept[9].symlink_to(kept[0])
    assert left_over_folders() == []
    assert sweep_folders() == 0
    assert all(path.exists() for path in kept)


def test_a_process_id_that_is_used_again_is_another_owner(temporary: Path) -> None:
    *rest, pid, started, _ = owned_prefix("tmp").split("-")
    folder = make(temporary, "-".join([*rest, pid, str(int(started) - 1), ""]))
    assert left_over_folders() == [folder]


def test_several_may_sweep_at_once(temporary: Path, dead_prefix: str) -> None:
    for _ in range(30):
        (make(temporary, dead_prefix) / "deep" / "er").mkdir(parents=True)
    mine = make(temporary, owned_prefix("work"))
    with ThreadPoolExecutor(4) as threads:
        counts = list(threads.map(lambda _: sweep_folders(), range(4)))
    assert max(counts) <= 30
    assert list(temporary.iterdir()) == [mine]


async def test_whoever_opens_process_boxes_sweeps_first(temporary: Path, dead_prefix: str) -> None:
    make(temporary, dead_prefix)
    said: list[str] = []
    pool = await open_provider(SandboxConfig(kind="process"), say=said.append)
    await pool.close()
    assert "boxes: removed 1 folders of owners that are dead" in said
    assert os.listdir(temporary) == []


def test_no_folder_of_temporary_files_is_no_fault(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "none"))
    assert sweep_folders() == 0

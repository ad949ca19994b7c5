"""What a power failure would leave: told by the order in which the system is asked to write, to flush and to rename.

The system calls of a child are looked at. What was not flushed when a name came to be may be missing behind that name.
"""

import errno
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from driftgym.trainer.durable import flush_files, flush_to_disk

CALLS = "fsync,fdatasync,rename,renameat,renameat2,link,linkat,write,pwrite64"
PROGRAM = """
import asyncio, sys
from pathlib import Path
from driftgym.trainer.journal import Journal
from driftgym.trainer.lineage import write_checkpoint
from driftgym.trainer.run_config import RunConfig, make_run_dir
from driftgym.trainer.scripted import ScriptedEngines, ScriptedRollouts, ScriptedTrainingClient
from driftgym.types import Task

async def main(run_dir):
    data = {"name": "r", "run_dir": str(run_dir), "model": {"path": "m"}, "env": {"id": "e"}}
    make_run_dir(RunConfig.model_validate(data))
    journal, client = Journal.open(run_dir), ScriptedTrainingClient()
    journal.begin_life()
    (run_dir / "metrics.jsonl").write_text("{}")
    play = ScriptedRollouts(ScriptedEngines(), group_size=2)
    journal.issue(group_id="g000000", task_index=0, group_size=2, min_policy_version=0)
    group = await play(Task(task_id="t", env_id="e"), group_id="g000000", min_policy_version=0)
    journal.write_trajectories(group)
    journal.finish(group, failed=False)
    await write_checkpoint(run_dir, client, journal, policy_version=0)
    await client.close()
    journal.close()

asyncio.run(main(Path(sys.argv[1])))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A system call: its kind, and the file that it is about; of a rename the new name."""

    kind: str
    path: str


def traced(folder: Path) -> list[Call]:
    """The calls of the program that are about files below `folder`, in order; by names relative to it."""
    if shutil.which("strace") is None or subprocess.run(["strace", "-o", "/dev/null", "true"]).returncode:
        pytest.skip("nothing here can look at the system calls of a process")
    trace = folder / "trace"
    run_dir = folder / "runs" / "run"
    traced_by = ["strace", "-f", "-y", "-s", "0", "-e", f"trace={CALLS}", "-o", str(trace)]
    subprocess.run([*traced_by, sys.executable, "-c", PROGRAM, str(run_dir)], check=True, timeout=100)
    calls = []
    for line in trace.read_text().splitlines():
        if (match := re.match(r"\d+\s+(\w+)\((.*?)\)?\s+(?:=|<unfinished)", line)) is None:
            continue
        names = re.findall(re.escape(str(folder)) + r"(/[^>\",]*)?", match[2])
        if names:
            kind = "flush" if "sync" in match[1] else "write" if "write" in match[1] else "name"
            calls.append(Call(kind=kind, path=names[-1].lstrip("/")))
    return calls


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[Call]:
    return traced(tmp_path_factory.mktemp("traced"))


def place(calls: list[Call], kind: str, path: str) -> int:
    """Where the last such call stands."""
    return max(index for index, call in enumerate(calls) if call == Call(kind=kind, path=path))


CHECKPOINTS = "runs/run/checkpoints"
PARTIAL = f"{CHECKPOINTS}/.partial-00000000"
LEARNER = f"{PARTIAL}/learner"


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        f"{PARTIAL}/state.json",
        f"{PARTIAL}/manifest.json.partial",
        PARTIAL,
        LEARNER,
        "runs/run/metrics.jsonl",
        "runs/run/trajectories/g000000.json.gz",
        "runs/run/trajectories",
        "runs/run/journal.sqlite-wal",
        "runs/run",
        "runs",
    ],
)
def test_all_that_a_checkpoint_rests_on_is_on_the_disk_before_it_has_its_name(calls: list[Call], path: str) -> None:
    named = place(calls, "name", f"{CHECKPOINTS}/00000000")
    flushed = place(calls, "flush", path)
    assert flushed < named
    assert not [call for call in calls[flushed:named] if call == Call(kind="write", path=path)]
    assert place(calls, "flush", CHECKPOINTS) > named, "and then the name is"


@pytest.mark.slow
def test_a_part_that_is_sealed_on_its_own_is_too(calls: list[Call]) -> None:
    before = [f"{PARTIAL}/.partial-learner/{name}" for name in ("state.json", "manifest.json.partial")]
    named = place(calls, "name", LEARNER)
    assert all(place(calls, "flush", path) < named for path in before)
    assert place(calls, "flush", f"{PARTIAL}/.partial-learner") < named < place(calls, "flush", PARTIAL)


@pytest.mark.slow
def test_trajectories_come_before_the_journal_that_speaks_of_them(calls: list[Call]) -> None:
    written = place(calls, "flush", "runs/run/trajectories")
    assert place(calls, "flush", "runs/run/trajectories/g000000.json.gz") < written
    assert written < place(calls, "flush", "runs/run/journal.sqlite-wal")


@pytest.mark.slow
def test_what_is_recorded_between_checkpoints_waits_for_no_disk(calls: list[Call]) -> None:
    """A life's number is flushed at once, since no other life may get it."""
    log = "runs/run/journal.sqlite-wal"
    named = place(calls, "name", "runs/run/trajectories/g000000.json.gz")
    number = [index for index, call in enumerate(calls[:named]) if call == Call(kind="flush", path=log)]
    assert number
    assert Call(kind="write", path=log) in calls[number[-1] : named], "the group was issued since"


@pytest.mark.slow
def test_the_configuration_of_a_run_is_there_whole(calls: list[Call]) -> None:
    named = next(i for i, call in enumerate(calls) if call.kind == "name" and "config.resolved.yaml" in call.path)
    assert [call for call in calls[:named] if call.kind == "flush" and "config.resolved.yaml" in call.path]


def test_what_is_not_there_cannot_be_flushed(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        flush_to_disk(tmp_path, tmp_path / "none")
    assert caught.value.errno == errno.ENOENT


def test_of_many_files_those_that_were_removed_are_passed_over(tmp_path: Path) -> None:
    files = [tmp_path / "folder" / str(number) for number in range(40)]
    files[0].parent.mkdir()
    for file in files[:-1]:
        file.touch()
    flush_files(tmp_path / "folder", files)
    flush_files(tmp_path / "none", [])
    with pytest.raises(FileNotFoundError, match="none"):
        flush_files(tmp_path / "none", files)


def test_what_has_nothing_to_flush_is_flushed() -> None:
    """A file that is no file on a disk refuses the call; nothing of it can be lost."""
    flush_to_disk(Path("/proc/self/status"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_folder_that_may_only_be_written_to_is_passed_over_and_a_file_is_not(tmp_path: Path) -> None:
    folder, file = tmp_path / "folder", tmp_path / "file"
    folder.mkdir(mode=0o300)
    file.touch(mode=0o200)
    flush_to_disk(folder)
    with pytest.raises(PermissionError):
        flush_to_disk(folder, file)

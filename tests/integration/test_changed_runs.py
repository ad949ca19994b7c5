"""Runs that go on after somebody changed their folder or their configuration by hand, and two that begin as one."""

import asyncio
import contextlib
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import scripted_run as scripted

from driftgym.errors import ConfigError, DriftgymError, TrainingError
from driftgym.trainer.run_config import RESOLVED_NAME

PROGRAM = Path(scripted.__file__)


@pytest.fixture(scope="module")
def broken_off(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that failed in step 11, with checkpoints of steps 6 and 9."""
    folder = tmp_path_factory.mktemp("broken-off")
    with pytest.raises(TrainingError, match="the learner is gone"):
        asyncio.run(scripted.begin(scripted.run_config(folder), scripted.ScriptedParts(fail_at_step=11)))
    return folder / "run"


@pytest.fixture
def run_dir(broken_off: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(broken_off, tmp_path / "run"))


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def checkpoint(run_dir: Path, name: str) -> Path:
    return run_dir / "checkpoints" / name


def copy_under_a_higher_number(run_dir: Path) -> None:
    shutil.copytree(checkpoint(run_dir, "00000006"), checkpoint(run_dir, "backup-00000099"))


def rename_the_older_one(run_dir: Path) -> None:
    checkpoint(run_dir, "00000006").rename(checkpoint(run_dir, "00000099"))


def rename_the_newer_one(run_dir: Path) -> None:
    checkpoint(run_dir, "00000009").rename(checkpoint(run_dir, "00000003"))


def rename_it_as_the_next(run_dir: Path) -> None:
    checkpoint(run_dir, "00000009").rename(checkpoint(run_dir, "00000012"))


def keep_it_as_the_best(run_dir: Path) -> None:
    checkpoint(run_dir, "00000009").rename(checkpoint(run_dir, "best-9"))


def move_it_and_link(run_dir: Path) -> None:
    checkpoint(run_dir, "00000009").rename(run_dir / "elsewhere")
    checkpoint(run_dir, "00000009").symlink_to(run_dir / "elsewhere")


def link_the_latest(run_dir: Path) -> None:
    checkpoint(run_dir, "latest").symlink_to("00000009")
    checkpoint(run_dir, "latest-9").symlink_to("00000009")


def copy_beside(run_dir: Path) -> None:
    shutil.copytree(checkpoint(run_dir, "00000009"), checkpoint(run_dir, "backup-9"))


@pytest.mark.parametrize(
    ("change", "left"),
    [
        (copy_under_a_higher_number, ["00000009", "00000012", "backup-00000099"]),
        (rename_the_older_one, [".lost-00000099", "00000009", "00000012"]),
        (rename_the_newer_one, ["00000009", "00000012"]),
        (rename_it_as_the_next, ["00000009", "00000012"]),
        (keep_it_as_the_best, ["00000006", "00000012", "best-9"]),
        (move_it_and_link, ["00000009", "00000012"]),
        (link_the_latest, ["00000009", "00000012", "latest", "latest-9"]),
        (copy_beside, ["00000009", "00000012", "backup-9"]),
    ],
)
async def test_the_newest_checkpoint_is_taken_whatever_it_and_others_are_called(
    run_dir: Path, change: Callable[[Path], None], left: list[str]
) -> None:
    """Of step 9, so that step 10 alone is lost."""
    change(run_dir)
    await scripted.go_on(run_dir, scripted.ScriptedParts())
    assert [row["step"] for row in scripted.rows(run_dir, "metrics.lost.jsonl")] == [10]
    scripted.assert_exactly_once(run_dir, steps=12, groups_per_step=2)
    assert names(run_dir) == left


async def test_trajectories_that_are_not_those_of_their_group_are_played_again(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As when files were copied over others: none is trained twice, and none is waited for without end."""
    with contextlib.closing(sqlite3.connect(run_dir / "journal.sqlite")) as journal:
        unconsumed = journal.execute("SELECT group_id FROM groups WHERE state = 'trained' AND step > 9")
        first, second = (run_dir / "trajectories" / f"{group_id}.json.gz" for (group_id,) in unconsumed)
    shutil.copy(first, second)
    await scripted.go_on(run_dir, scripted.ScriptedParts())
    scripted.assert_exactly_once(run_dir, steps=12, groups_per_step=2)
    assert "are not those that the journal tells of; the group is played again" in capsys.readouterr().err


@pytest.mark.parametrize("kept", [None, 0, 4])
async def test_rows_that_the_file_of_metrics_has_lost_come_back(run_dir: Path, kept: int | None) -> None:
    """As after a power failure, or by hand: the journal has them too."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    if kept is None:
        path.unlink()
    else:
        path.write_bytes(b"".join(lines[:kept] + lines[kept + 3 :]))
    await scripted.go_on(run_dir, scripted.ScriptedParts())
    scripted.assert_exactly_once(run_dir, steps=12, groups_per_step=2)
    again = [line for line in path.read_bytes().splitlines(keepends=True)[:9] if line not in lines]
    assert len(again) == (9 if kept is None else 3)
    assert all("reward_mean" in row and row["incarnation"] == 1 for row in scripted.rows(run_dir)[:9])


def is_a_folder(run_dir: Path, *, name: str) -> None:
    (run_dir / name).unlink()
    (run_dir / name).mkdir()


def is_a_file(run_dir: Path, *, name: str) -> None:
    shutil.rmtree(run_dir / name)
    (run_dir / name).write_text("")


def journal_holds(run_dir: Path, *, of: Callable[[bytes], bytes]) -> None:
    path = run_dir / "journal.sqlite"
    path.write_bytes(of(path.read_bytes()))


def journal_is_gone(run_dir: Path) -> None:
    (run_dir / "journal.sqlite").unlink()


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (partial(is_a_folder, name="run.lock"), ConfigError, r"run\.lock: cannot be written \(Is a directory\)"),
        (partial(is_a_file, name="checkpoints"), ConfigError, r"checkpoints: cannot be taken up \(File exists\)"),
        (
            partial(is_a_folder, name="metrics.jsonl"),
            ConfigError,
            r"metrics\.jsonl: cannot be taken up \(Is a directory\)",
        ),
        (partial(is_a_file, name="trajectories"), TrainingError, r"trajectories: cannot be written \(File exists\)"),
        (
            partial(journal_holds, of=lambda data: data[:4096] + b"\x0d" * (len(data) - 4096)),
            TrainingError,
            r"journal\.sqlite: cannot be opened as a journal",
        ),
        (
            partial(journal_holds, of=lambda data: data[: len(data) // 2]),
            TrainingError,
            r"journal\.sqlite: cannot be opened as a journal",
        ),
        (journal_is_gone, TrainingError, "the journal ends at step 0, before checkpoint 9"),
    ],
    ids=["lock", "checkpoints", "metrics", "trajectories", "overwritten journal", "cut journal", "no journal"],
)
async def test_what_cannot_be_gone_on_with_is_said_and_costs_no_checkpoint(
    run_dir: Path, change: Callable[[Path], None], kind: type[DriftgymError], message: str
) -> None:
    for leftover in (run_dir / "journal.sqlite-wal", run_dir / "journal.sqlite-shm"):
        assert not leftover.exists(), "all is in the journal itself"
    change(run_dir)
    with pytest.raises(kind, match=message):
        await scripted.go_on(run_dir, scripted.ScriptedParts())
    if (run_dir / "checkpoints").is_dir():
        assert names(run_dir) == ["00000006", "00000009"]


def change_value(run_dir: Path, before: str, after: str) -> None:
    text = (run_dir / RESOLVED_NAME).read_text()
    assert before in text
    (run_dir / RESOLVED_NAME).write_text(text.replace(before, after))


async def test_groups_may_become_larger_in_a_later_life_and_are_counted_as_they_are(run_dir: Path) -> None:
    change_value(run_dir, "group_size: 3", "group_size: 5")
    change_value(run_dir, "max_steps: 12", "max_steps: 20")
    parts = scripted.ScriptedParts()
    result = await scripted.go_on(run_dir, parts)
    scripted.assert_exactly_once(run_dir, steps=20, groups_per_step=2)
    summary = result.summary
    played = {trajectory_id for step in parts.client.trained for trajectory_id in step}
    sizes = Counter(trajectory_id.split("-")[0] for trajectory_id in played)
    assert set(sizes.values()) == {3, 5}, "what was finished before is trained as it was played"
    assert summary["episodes_trained"] == 9 * 2 * 3 + len(played)
    assert summary["episodes_started"] == summary["episodes_finished"] >= summary["episodes_trained"]


@pytest.mark.parametrize(("max_lag", "on_lag"), [(1, "wait"), (1, "mask"), (1, "drop")])
async def test_a_narrower_bound_in_a_later_life_is_kept(run_dir: Path, max_lag: int, on_lag: str) -> None:
    change_value(run_dir, "max_lag: 4", f"max_lag: {max_lag}")
    change_value(run_dir, "on_lag: wait", f"on_lag: {on_lag}")
    result = await scripted.go_on(run_dir, scripted.ScriptedParts())
    assert result.summary["steps"] == 12
    assert max(row["lag_max"] for row in result.rows[9:]) <= max_lag


async def test_an_end_that_is_moved_to_before_the_checkpoint_is_reached(run_dir: Path) -> None:
    change_value(run_dir, "max_steps: 12", "max_steps: 5")
    result = await scripted.go_on(run_dir, scripted.ScriptedParts())
    assert (result.summary["steps"], result.summary["policy_version"]) == (9, 9), "nothing is undone"


async def test_what_failed_first_ends_the_run_also_where_no_summary_can_be_written(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir / "summary.json").unlink()
    (run_dir / "summary.json").mkdir()
    with pytest.raises(TrainingError, match="the learner is gone"):
        await scripted.go_on(run_dir, scripted.ScriptedParts(fail_at_step=11))
    assert "summary.json: cannot be written (Is a directory)" in capsys.readouterr().err
    with pytest.raises(TrainingError, match=r"summary.json: cannot be written"):
        await scripted.go_on(run_dir, scripted.ScriptedParts())
    scripted.assert_exactly_once(run_dir, steps=12, groups_per_step=2)


BEGIN = """
import importlib.util, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("scripted_run", sys.argv[1])
scripted = importlib.util.module_from_spec(spec)
spec.loader.exec_module(scripted)
from driftgym.errors import ConfigError
from driftgym.trainer.run_config import make_run_dir
config = scripted.run_config(Path(sys.argv[2]), f"run_dir={sys.argv[3]}", f"seed={sys.argv[4]}")
print("ready", flush=True)
sys.stdin.readline()
try:
    make_run_dir(config)
    print(f"has it, with seed {sys.argv[4]}")
except ConfigError as error:
    print(error)
"""


@pytest.mark.slow
def test_of_two_that_begin_one_run_at_once_one_has_it_and_its_configuration_stands(tmp_path: Path) -> None:
    folders = [tmp_path / str(seed) for seed in range(4)]
    run_dir = tmp_path / "run"
    processes = []
    for seed, folder in enumerate(folders):
        folder.mkdir()
        command = [sys.executable, "-P", "-c", BEGIN, str(PROGRAM), str(folder), str(run_dir), str(seed)]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    said = [process.communicate(timeout=60)[0] for process in processes]
    winners = [seed for seed, text in enumerate(said) if text == f"has it, with seed {seed}\n"]
    assert len(winners) == 1
    assert f"seed: {winners[0]}\n" in (run_dir / RESOLVED_NAME).read_text()
    assert all("holds a run already" in text for seed, text in enumerate(said) if seed != winners[0])
    assert [path.name for path in run_dir.iterdir() if path.name.endswith(".tmp")] == []

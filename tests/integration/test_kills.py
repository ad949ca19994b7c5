"""Runs that are killed and go on: the real one, by the benchmark with a kill of each kind; scripted ones at moments
that are too short to be hit."""

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import scripted_run as scripted

from driftgym.errors import ConfigError, TrainingError
from driftgym.trainer.journal import Journal
from driftgym.trainer.publications import is_published
from driftgym.trainer.run import live
from driftgym.trainer.run_config import make_run_dir
from driftgym.trainer.stop import Stop

ROOT = Path(__file__).resolve().parents[2]
BENCHMARK = ROOT / "benchmarks" / "kills.py"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_whose_processes_are_killed_trains_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """Trainer, generator, learner and everything, once each."""
    result = tmp_path / "result.json"
    finished = subprocess.run(
        [sys.executable, str(BENCHMARK), "--quick", "--json", str(result), "--folder", str(tmp_path / "runs")],
        env={name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    figures = json.loads(result.read_text())
    assert {kill["target"] for kill in figures["kills"]} == {"trainer", "generator", "learner", "everything"}
    assert [line for line in figures["budgets"] if not line["ok"]] == [], finished.stdout


async def test_a_kill_before_the_last_weights_are_published_leaves_them_to_the_next_life(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    await scripted.begin(scripted.run_config(tmp_path), scripted.ScriptedParts())
    shutil.rmtree(run_dir / "weights")
    parts = scripted.ScriptedParts()
    result = await scripted.go_on(run_dir, parts)
    assert parts.client.trained == []
    assert parts.rollouts.played == []
    assert is_published(run_dir / "weights", policy_version=12)
    assert result.summary["steps"] == 12
    scripted.assert_exactly_once(run_dir, steps=12, groups_per_step=2)


async def test_a_kill_between_a_steps_row_and_its_record_loses_neither(tmp_path: Path) -> None:
    """The journal refuses step 5, as if the process had ended there: the row of that step is among the lost ones."""
    config = scripted.run_config(tmp_path)
    run_dir = make_run_dir(config)
    Journal.open(run_dir).close()
    with contextlib.closing(sqlite3.connect(run_dir / "journal.sqlite")) as journal:
        journal.execute(
            "CREATE TRIGGER cut BEFORE INSERT ON steps WHEN NEW.step = 5 BEGIN SELECT RAISE(ABORT, 'cut'); END"
        )
    with pytest.raises(TrainingError, match="the journal cannot be written: cut"):
        await live(config, run_dir, stop=Stop(), start=scripted.ScriptedParts())
    with contextlib.closing(sqlite3.connect(run_dir / "journal.sqlite")) as journal:
        journal.execute("DROP TRIGGER cut")
    await scripted.go_on(run_dir, scripted.ScriptedParts())
    scripted.assert_exactly_once(run_dir, steps=12, groups_per_step=2)
    assert [row["step"] for row in scripted.rows(run_dir, "metrics.lost.jsonl")] == [4, 5]


async def test_a_kill_while_the_folder_is_made_leaves_a_run_to_go_on_with_or_nothing_in_the_way(
    tmp_path: Path,
) -> None:
    config = scripted.run_config(tmp_path, "trainer.max_steps=3")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.resolved.yaml.tmp").write_text("na")
    make_run_dir(config)
    assert sorted(path.name for path in run_dir.iterdir()) == ["checkpoints", "config.resolved.yaml", "trajectories"]
    for name in ("checkpoints", "trajectories"):
        (run_dir / name).rmdir()
    await scripted.go_on(run_dir, scripted.ScriptedParts())
    scripted.assert_exactly_once(run_dir, steps=3, groups_per_step=2)


async def test_a_run_whose_checkpoints_are_all_damaged_is_left_as_it_is(tmp_path: Path) -> None:
    """It says so, file by file, instead of playing all of it again; one that is put back is gone on from."""
    run_dir = tmp_path / "run"
    await scripted.begin(scripted.run_config(tmp_path), scripted.ScriptedParts())
    checkpoints = run_dir / "checkpoints"
    shutil.copytree(checkpoints, tmp_path / "copies")
    (checkpoints / "00000009" / "state.json").write_text("{}")
    (checkpoints / "00000012" / "learner" / "state.json").unlink()
    before = sorted(path.name for path in run_dir.rglob("*"))
    with pytest.raises(ConfigError) as caught:
        await scripted.go_on(run_dir, scripted.ScriptedParts())
    message = str(caught.value)
    assert "\n" not in message
    assert "00000009/state.json is damaged" in message
    assert "00000012/learner/state.json is missing" in message
    assert {path.name for path in run_dir.rglob("*")} - {"run.lock"} == set(before) - {"run.lock"}
    shutil.rmtree(checkpoints / "00000009")
    shutil.copytree(tmp_path / "copies" / "00000009", checkpoints / "00000009")
    await scripted.go_on(run_dir, scripted.ScriptedParts())
    scripted.assert_exactly_once(run_dir, steps=12, groups_per_step=2)
    assert [row["step"] for row in scripted.rows(run_dir, "metrics.lost.jsonl")] == [10, 11, 12]

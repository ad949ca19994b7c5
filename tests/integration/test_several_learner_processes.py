"""`driftgym train` with a learner of two processes: runs through, is gone on with by one, and leaves nothing behind."""

import contextlib
import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from driftgym.config import dump_config
from driftgym.trainer.run_config import RESOLVED_NAME, load_resolved

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[2]
SHORT = (
    *("demonstrations.num_episodes=64", "warmup.num_steps=20", "trainer.groups_per_step=2", "trainer.group_size=4"),
    *("trainer.max_in_flight_groups=4", "trainer.checkpoint_every_steps=2", "learner.num_processes=2"),
)


def train(mark: str, *words: str) -> None:
    """Runs the command, which must succeed; its processes carry `mark` in their environment."""
    command = [sys.executable, "-P", "-m", "driftgym.cli", "train", *words]
    finished = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "DRIFTGYM_TEST_MARK": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout


def marked(mark: str) -> list[int]:
    """The ids of the processes that carry `mark`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def test_a_run_with_two_processes_is_gone_on_with_by_one(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    mark = str(uuid.uuid4())
    train(mark, "configs/quickstart.yaml", *SHORT, f"run_dir={run_dir}", "trainer.max_steps=4")
    config, _ = load_resolved(run_dir)
    learner = config.learner.model_copy(update={"num_processes": 1})
    trainer = config.trainer.model_copy(update={"max_steps": 6})
    changed = config.model_copy(update={"learner": learner, "trainer": trainer})
    (run_dir / RESOLVED_NAME).write_text(dump_config(changed))
    train(mark, "--resume", str(run_dir))
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["incarnation"]) for row in rows] == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (6, 2)]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["episodes_trained"] == 6 * 2 * 4
    assert summary["ratio_mean_at_lag0"] == pytest.approx(1.0, abs=1e-3)
    assert any((run_dir / "weights").glob("2-6/model.safetensors"))
    deadline = time.monotonic() + 20
    while marked(mark):
        assert time.monotonic() < deadline
        time.sleep(0.1)

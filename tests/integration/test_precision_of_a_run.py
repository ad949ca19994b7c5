"""`driftgym train` in bfloat16: learner and generators round alike, and what is trained stays float32."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[2]
_SHORT = (
    *("sandbox.kind=process", "demonstrations.num_episodes=64", "warmup.num_steps=20", "trainer.max_steps=4"),
    *("trainer.groups_per_step=2", "trainer.group_size=4", "trainer.max_in_flight_groups=4"),
    *("trainer.checkpoint_every_steps=2", "trainer.publish_every_steps=1"),
)


def _train(*words: str) -> str:
    """What the run prints."""
    command = [sys.executable, "-P", "-m", "driftgym.cli", "train", *words]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    (path,) = folder.rglob("weights.safetensors")
    return safetensors.torch.load_file(path)


def test_a_run_in_bfloat16(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    said = _train("configs/quickstart.yaml", "model.dtype=bfloat16", f"run_dir={run_dir}", *_SHORT)
    assert "the learner has started: decoder in bfloat16, weights that are trained in float32;" in said
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["policy_version"] == 4
    assert summary["ratio_mean_at_lag0"] == pytest.approx(1.0, abs=1e-2)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    mismatches = [row["learner/mismatch_at_lag0"] for row in rows if "learner/mismatch_at_lag0" in row]
    assert mismatches
    assert 0.0 < max(mismatches) < 0.02
    newest = max((run_dir / "checkpoints").iterdir(), key=lambda path: path.stat().st_mtime)
    assert {tensor.dtype for tensor in _weights(newest).values()} == {torch.float32}

"""Each combination of mode, weight update, partial rollouts and placement that docs/runs.md says yes to, through a run.

Those without a placement of their own are played with scripted engines behind the real pool; the others, and each mode
once, with the real model, learner and engine.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHORT = (
    *("demonstrations.num_episodes=64", "warmup.num_steps=20", "trainer.groups_per_step=2", "trainer.group_size=4"),
    *("trainer.max_in_flight_groups=6", "trainer.checkpoint_every_steps=5", "trainer.max_steps=20"),
)
MODES: dict[str, tuple[str, ...]] = {
    "sync": ("trainer.mode=sync", "trainer.max_lag=0"),
    "one_step_off": ("trainer.mode=one_step_off", "trainer.max_lag=1"),
    "async": ("trainer.max_lag=3",),
}
MAX_LAG = {"sync": 0, "one_step_off": 1, "async": 3}
ITERATION_TOKENS = 20
SCRIPTED = [
    ("sync", "drain", False),
    *(
        (mode, update, is_partial)
        for mode in ("one_step_off", "async")
        for update in ("drain", "abort_resume", "in_flight", "in_flight keep_kv")
        for is_partial in (False, True)
    ),
]


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


loop = _module("test_new_weights_in_the_loop")


@pytest.mark.parametrize(("mode", "update", "is_partial"), SCRIPTED)
async def test_a_combination_trains_every_episode_once_within_its_bound(
    tmp_path: Path, mode: str, update: str, is_partial: bool
) -> None:
    """Twelve steps, looked at token by token: what was trained is what the engines wrote, at the versions they had."""
    weight_update, _, keep_kv = update.partition(" ")
    overrides = [*MODES[mode], f"trainer.weight_update={weight_update}", "trainer.publish_every_steps=1"]
    overrides += ["generator.keep_kv=true"] if keep_kv else []
    overrides += [f"generator.iteration_tokens={ITERATION_TOKENS}"] if is_partial else []
    parts, trained = await loop.run(tmp_path, *overrides)
    assert parts.engines[0].modes == {f"{weight_update} {bool(keep_kv)}"}
    assert (parts.pool.num_parked > 0) == is_partial
    spans = {loop.num_versions(trajectory) for trajectory in trained.values()}
    assert max(spans) <= MAX_LAG[mode] + 1
    if weight_update == "drain" and not is_partial:
        assert spans == {1}


def train(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "driftgym.cli", "train", *words]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def quickstart(run_dir: Path, *overrides: str) -> subprocess.Popen[str]:
    settled = ("trainer.publish_every_steps=1", "trainer.weight_update=drain")
    return train("configs/quickstart.yaml", *SHORT, *settled, f"run_dir={run_dir}", *overrides)


def rows(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def finished(process: subprocess.Popen[str], run_dir: Path, *, max_lag: int) -> dict[str, Any]:
    """The summary of a run that came to its end within the bound; what it generated, its learner reproduces."""
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    assert [row["step"] for row in rows(run_dir)] == list(range(1, 21))
    assert (summary["steps"], summary["errors"]["env"], summary["errors"]["infra"]) == (20, 0, 0)
    assert summary["lag_max"] <= max_lag
    assert "generator_lost" not in summary["events"]
    assert "generator_behind" not in summary["events"]
    for row in rows(run_dir):
        if row["num_lag0_tokens"]:
            assert row["lag0_ratio_sum"] / row["num_lag0_tokens"] == pytest.approx(1.0, abs=1e-3)
    return summary


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("mode", ["sync", "one_step_off", "async"])
def test_each_mode_with_the_real_model(tmp_path: Path, mode: str) -> None:
    run_dir = tmp_path / "run"
    summary = finished(quickstart(run_dir, *MODES[mode]), run_dir, max_lag=MAX_LAG[mode])
    if mode == "sync":
        assert summary["lag_max"] == 0
        assert summary["ratio_mean_at_lag0"] == pytest.approx(1.0, abs=1e-4)
    else:
        assert summary["lag_max"] >= 1, "rollouts and steps overlap"


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("mode", "is_partial"),
    [("sync", False), ("one_step_off", False), ("one_step_off", True), ("async", False), ("async", True)],
)
def test_colocated_in_each_mode(tmp_path: Path, mode: str, is_partial: bool) -> None:
    """One process, one copy of the weights; nothing is written between the first publication and the last."""
    run_dir = tmp_path / "run"
    partial = ("generator.iteration_tokens=8",) if is_partial else ()
    process = quickstart(run_dir, "trainer.placement=colocated", *MODES[mode], *partial)
    finished(process, run_dir, max_lag=MAX_LAG[mode])
    assert sorted(path.name for path in (run_dir / "weights").iterdir()) == ["1-0", "1-20"]


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_colocated_with_adapters(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    lora = ("model.lora={rank: 4, alpha: 32}", "learner.optimizer.learning_rate=5.0e-3")
    finished(quickstart(run_dir, "trainer.placement=colocated", *MODES["async"], *lora), run_dir, max_lag=3)


def child_running(module: str, *, parent: int) -> int:
    """The process id of a child of `parent` that runs `module`."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().decode().split("\0")
            ppid = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if ppid == parent and module in words:
            return int(path.name)
    raise AssertionError(f"no {module} below {parent}")


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_the_death_of_a_colocated_learner_ends_the_run_which_goes_on_when_resumed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = quickstart(run_dir, "trainer.placement=colocated", *MODES["async"])
    deadline = time.monotonic() + 300
    while len(rows(run_dir)) < 7:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(child_running("driftgym.trainer.colocated", parent=process.pid), signal.SIGKILL)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 1, output
    assert "the learner is gone" in output
    finished(train("--resume", str(run_dir)), run_dir, max_lag=3)
    assert {row["incarnation"] for row in rows(run_dir)} == {1, 2}

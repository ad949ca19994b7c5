"""`driftgym train` as a user runs it: the real model, generator server, learner and boxes, in a short quickstart."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from docker_engine import open_docker

from driftgym.sandboxes.base import SandboxInfo
from driftgym.sandboxes.docker import Engine
from driftgym.sandboxes.reaper import list_boxes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[2]
SHORT = (
    *("demonstrations.num_episodes=64", "warmup.num_steps=20", "trainer.groups_per_step=2"),
    *("trainer.group_size=4", "trainer.max_in_flight_groups=4", "trainer.checkpoint_every_steps=2"),
)


def train(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "driftgym.cli", "train", *words]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def quickstart(run_dir: Path, *overrides: str) -> subprocess.Popen[str]:
    return train("configs/quickstart.yaml", *SHORT, f"run_dir={run_dir}", *overrides)


def rows(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 200
    while len(rows(run_dir)) < step:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)


def commands_with(text: str) -> list[str]:
    """The command lines of running processes that contain `text`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in words:
            found.append(words)
    return found


def wait_until_gone(text: str) -> None:
    deadline = time.monotonic() + 30
    while commands_with(text):
        assert time.monotonic() < deadline, commands_with(text)
        time.sleep(0.2)


def test_a_short_run_trains_and_says_what_it_came_to(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = quickstart(run_dir, "trainer.max_steps=6")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "mean reward" in output
    assert output.rstrip().endswith(f"run: {run_dir}")
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["policy_version"]) == (6, 6)
    assert summary["ratio_mean_at_lag0"] == pytest.approx(1.0, abs=1e-3)
    assert 0 <= summary["lag_mean"] <= summary["lag_max"] <= 8
    assert 0 <= summary["generator_idle_fraction"] < 1
    assert summary["errors"]["env"] == summary["errors"]["infra"] == 0
    assert [row["step"] for row in rows(run_dir)] == list(range(1, 7))
    assert any((run_dir / "weights").glob("1-6/model.safetensors"))
    wait_until_gone(str(run_dir))


def test_a_killed_run_goes_on_with_the_same_weights(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = quickstart(run_dir, "trainer.max_steps=8")
    wait_for_step(run_dir, 3, process)
    process.kill()
    process.communicate(timeout=60)
    wait_until_gone(str(run_dir))
    resumed = train("--resume", str(run_dir))
    output, _ = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, output
    kept = rows(run_dir)
    assert [row["step"] for row in kept] == list(range(1, 9))
    assert {row["incarnation"] for row in kept} == {1, 2}
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["episodes_trained"] == 8 * 2 * 4
    # The first batch of the second life is scored by the learner as its new generator wrote it.
    lag0 = [row for row in kept if row["incarnation"] == 2 and row["num_lag0_tokens"]]
    assert all(row["lag0_ratio_sum"] / row["num_lag0_tokens"] == pytest.approx(1.0, abs=1e-3) for row in lag0)


async def boxes_of(process: subprocess.Popen[str]) -> list[SandboxInfo]:
    engine = await Engine.connect(timeout_s=10.0)
    try:
        return [box for box in await list_boxes(engine) if f":{process.pid}:" in box.owner]
    finally:
        await engine.close()


@pytest.fixture
async def base_image() -> None:
    provider = await open_docker()
    await provider.close()


@pytest.mark.docker
@pytest.mark.usefixtures("base_image")
async def test_docker_boxes_are_reused_and_none_is_left(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = quickstart(run_dir, "sandbox.kind=docker", "trainer.max_steps=5")
    wait_for_step(run_dir, 2, process)
    assert 0 < len(await boxes_of(process)) <= 18  # one for each of 16 slots, and two kept warm
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "boxes: Docker" in output
    assert await boxes_of(process) == []


@pytest.mark.docker
@pytest.mark.usefixtures("base_image")
async def test_ctrl_c_with_docker_boxes_ends_cleanly_and_leaves_none(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = quickstart(run_dir, "sandbox.kind=docker", "trainer.max_steps=500")
    wait_for_step(run_dir, 2, process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert f"driftgym train --resume {run_dir}" in output
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == len(rows(run_dir))
    assert await boxes_of(process) == []
    wait_until_gone(str(run_dir))

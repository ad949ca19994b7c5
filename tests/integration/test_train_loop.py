"""The loop from its configuration to its summary, with scripted parts: lag, failures, stopping, killing, resuming."""

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import scripted_run as scripted

from driftgym.errors import ConfigError, GeneratorError, TrainingError
from driftgym.trainer.lineage import lock_run
from driftgym.trainer.records import read_group
from driftgym.trainer.scripted import Play
from driftgym.trainer.stop import Stop
from driftgym.types import TrajectoryStatus

PROGRAM = Path(scripted.__file__)

SUMMARY_KEYS = {
    *("steps", "policy_version", "episodes_started", "episodes_finished", "episodes_trained"),
    *("reward_first_mean", "reward_last_mean", "lag_mean", "lag_p99", "lag_max", "generator_idle_fraction"),
    *("trainer_idle_fraction", "tool_busy_fraction", "ratio_mean_at_lag0", "errors", "wall_s", "events", "run_dir"),
}


async def test_a_run_ends_after_max_steps_with_everything_in_its_folder(tmp_path: Path) -> None:
    parts = scripted.ScriptedParts(step_s=0.01)
    result = await scripted.begin(scripted.run_config(tmp_path), parts)
    run_dir = tmp_path / "run"
    assert not result.is_interrupted
    scripted.assert_exactly_once(run_dir, steps=12, groups_per_step=2)
    assert json.loads((run_dir / "summary.json").read_text()) == result.summary
    assert set(result.summary) == SUMMARY_KEYS
    assert (result.summary["steps"], result.summary["policy_version"]) == (12, 12)
    assert result.summary["episodes_started"] == result.summary["episodes_trained"] == 12 * 2 * 3
    assert result.summary["errors"] == {"env": 0, "infra": 0, "policy": 0}
    assert 0 <= result.summary["lag_mean"] <= result.summary["lag_p99"] <= result.summary["lag_max"] <= 4
    assert result.summary["ratio_mean_at_lag0"] == pytest.approx(1.0)
    assert result.summary["generator_idle_fraction"] < 0.5 < 1 - result.summary["trainer_idle_fraction"] * 0.1
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == ["00000009", "00000012"]
    assert len(list((run_dir / "trajectories").iterdir())) == 24
    assert "1-00000012" in {path.name for path in (run_dir / "weights").iterdir()}
    group = read_group(run_dir / "trajectories" / "g000003.json.gz")
    assert [t.reward for t in group.trajectories] == [0.0, 1.0, 2.0]
    assert parts.client.is_closed


async def test_every_step_says_what_it_trained(tmp_path: Path) -> None:
    await scripted.begin(scripted.run_config(tmp_path), scripted.ScriptedParts(step_s=0.01))
    rows = scripted.rows(tmp_path / "run")
    for row in rows:
        assert row["policy_version"] == row["step"]
        assert 0 <= row["lag_mean"] <= row["lag_max"] <= 4
        assert row["num_tokens_trained"] == 2 * 3 * 2 * 4
        assert row["episodes_started"] >= row["episodes_finished"] >= row["episodes_trained"] == row["step"] * 6
        assert row["incarnation"] == 1
        assert row["dropped_metrics"] == 0
    # Tasks 0 and 5 are worth nothing whoever plays them: no gradient, but they count.
    assert sum(row["groups_zero_variance"] for row in rows) == 5


async def test_the_slow_group_is_trained_within_its_bound_and_in_a_bounded_number_of_steps(tmp_path: Path) -> None:
    """Ten tasks as short as a step, one that takes six of them, a limit of 2: `wait` trains it and keeps the bound."""

    def slow_first(index: int, member: int) -> Play:
        return Play(duration_s=0.3 if index == 0 else 0.01)

    config = scripted.run_config(
        tmp_path, "trainer.max_lag=2", "trainer.publish_every_steps=1", "trainer.max_steps=20", "trainer.group_size=1"
    )
    result = await scripted.begin(config, scripted.ScriptedParts(script=slow_first, step_s=0.05))
    assert scripted.trained_groups(tmp_path / "run")["g000000"] <= 3
    assert result.summary["lag_max"] <= 2


async def test_a_long_wait_says_what_it_waits_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = scripted.run_config(tmp_path, "trainer.max_steps=1", "limits.generation_s=0.1")
    await scripted.begin(config, scripted.ScriptedParts(script=lambda *_: Play(duration_s=0.5)))
    assert "waiting for groups: 0/2 finished, 2 being played" in capsys.readouterr().out


async def test_drop_says_what_it_dropped_and_how_it_leans_to_short_episodes(tmp_path: Path) -> None:
    def long_every_third(index: int, member: int) -> Play:
        is_long = index % 3 == 0
        return Play(duration_s=0.25 if is_long else 0.01, num_tokens=20 if is_long else 4)

    config = scripted.run_config(
        tmp_path,
        *("trainer.on_lag=drop", "trainer.max_lag=1", "trainer.publish_every_steps=1", "trainer.max_steps=25"),
    )
    result = await scripted.begin(config, scripted.ScriptedParts(script=long_every_third, step_s=0.02))
    assert result.summary["lag_max"] <= 1
    assert result.summary["events"]["groups_dropped"] >= 1
    assert scripted.rows(tmp_path / "run")[-1]["trained_length_ratio"] < 1


async def test_mask_trains_what_is_young_enough_and_says_what_it_masked(tmp_path: Path) -> None:
    config = scripted.run_config(
        tmp_path,
        *("trainer.on_lag=mask", "trainer.max_lag=1", "trainer.publish_every_steps=1", "trainer.max_steps=15"),
    )
    result = await scripted.begin(config, scripted.ScriptedParts(script=lambda *_: Play(duration_s=0.12), step_s=0.02))
    rows = scripted.rows(tmp_path / "run")
    assert result.summary["lag_max"] <= 1
    assert sum(row["num_tokens_masked"] for row in rows) > 0
    shares = [row["masked_share_by_turn"] for row in rows if row["masked_share_by_turn"]]
    assert all(first >= second for first, second in shares), "the first turn is the older one"
    assert all(row["reward_mean"] == 1.0 for row in rows)


async def test_sync_trains_only_on_the_newest_version(tmp_path: Path) -> None:
    settled = ("trainer.max_lag=0", "trainer.publish_every_steps=1")
    config = scripted.run_config(tmp_path, "trainer.mode=sync", *settled)
    parts = scripted.ScriptedParts(step_s=0.01, update_s=0.01)
    result = await scripted.begin(config, parts)
    assert result.summary["lag_max"] == 0
    taken = [(update.policy_version, update.mode) for update in parts.engines.updates]
    assert taken == [(version, "drain") for version in range(1, 12)]


async def test_in_flight_updates_overlap_with_the_next_steps(tmp_path: Path) -> None:
    parts = scripted.ScriptedParts(step_s=0.01, update_s=0.1)
    result = await scripted.begin(scripted.run_config(tmp_path, "trainer.max_lag=8"), parts)
    assert (parts.engines.updates[0].policy_version, parts.engines.updates[0].mode) == (2, "in_flight")
    assert 1 <= result.summary["lag_max"] <= 8


async def test_failures_are_isolated_counted_and_never_trained(tmp_path: Path) -> None:
    """Of ten episodes one ends in the environment's fault, one in the infrastructure's; two groups fail as a whole."""

    def faulty(index: int, member: int) -> Play:
        if index == 4:
            return Play(raises=RuntimeError("a bug of the runner's own"))
        if index == 6:
            return Play(status=TrajectoryStatus.INFRA_ERROR)
        status = {(1, 1): TrajectoryStatus.ENV_ERROR, (2, 0): TrajectoryStatus.INFRA_ERROR}.get((index, member))
        return Play(status=status or TrajectoryStatus.COMPLETED, duration_s=0.01)

    result = await scripted.begin(scripted.run_config(tmp_path), scripted.ScriptedParts(script=faulty))
    assert result.summary["errors"] == {"env": 1, "infra": 1 + 3 + 3, "policy": 0}
    assert result.summary["events"]["groups_failed"] == 2
    assert result.summary["episodes_trained"] == 12 * 6 - 2
    assert result.summary["reward_first_mean"] == result.summary["reward_last_mean"] == 1.0
    scripted.assert_exactly_once(tmp_path / "run", steps=12, groups_per_step=2)
    assert not {"g000004", "g000006"} & set(scripted.trained_groups(tmp_path / "run"))


async def test_a_run_in_which_nothing_is_scored_any_more_stops_with_the_reason(tmp_path: Path) -> None:
    def dead_after_ten(index: int, member: int) -> Play:
        return Play(status=TrajectoryStatus.COMPLETED if index < 10 else TrajectoryStatus.INFRA_ERROR)

    with pytest.raises(TrainingError, match="no scored episode; the last error: scripted infra_error"):
        await scripted.begin(scripted.run_config(tmp_path), scripted.ScriptedParts(script=dead_after_ten))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["errors"]["infra"] >= 8 * 3
    assert summary["steps"] >= 1


async def test_a_dead_learner_ends_the_run_and_everything_written_stays(tmp_path: Path) -> None:
    parts = scripted.ScriptedParts(fail_at_step=8)
    with pytest.raises(TrainingError, match="the learner is gone"):
        await scripted.begin(scripted.run_config(tmp_path), parts)
    run_dir = tmp_path / "run"
    assert [row["step"] for row in scripted.rows(run_dir)] == list(range(1, 8))
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 7
    assert parts.client.is_closed
    result = await scripted.go_on(run_dir, scripted.ScriptedParts())
    assert result.summary["steps"] == 12
    scripted.assert_exactly_once(run_dir, steps=12, groups_per_step=2)
    assert [row["step"] for row in scripted.rows(run_dir, "metrics.lost.jsonl")] == [7]
    assert [row["incarnation"] for row in scripted.rows(run_dir)] == [1] * 6 + [2] * 6


class BrokenEngines(scripted.ScriptedParts):  # type: ignore[misc, name-defined]
    """Engines that are gone when they should take weights."""

    async def __call__(self, *arguments: Any) -> Any:
        """See ScriptedParts."""
        parts = await super().__call__(*arguments)

        class Gone(type(self.engines)):  # type: ignore[misc]
            async def update_weights(self, *_: Any, **__: Any) -> None:
                raise GeneratorError("no generator is left")

        self.engines.__class__ = Gone
        return parts


async def test_weights_that_are_not_taken_in_time_end_the_run_whatever_the_engines_raise(tmp_path: Path) -> None:
    parts = scripted.ScriptedParts(update_s=60)
    config = scripted.run_config(tmp_path, "trainer.max_lag=1", "limits.weight_update_s=0.2")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(20):
            await scripted.begin(config, parts)
    assert parts.client.is_closed
    assert 2 <= json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] <= 4


async def test_generators_that_are_gone_end_the_run_instead_of_letting_it_wait(tmp_path: Path) -> None:
    with pytest.raises(GeneratorError, match="no generator is left"):
        await scripted.begin(scripted.run_config(tmp_path), BrokenEngines())


async def test_tasks_that_run_out_are_said(tmp_path: Path) -> None:
    """Seven tasks for twelve steps of two: the last batch is short, and the run says that it ended early."""
    with pytest.raises(TrainingError, match="tasks ran out after step 4 of 12"):
        await scripted.begin(scripted.run_config(tmp_path), scripted.ScriptedParts(num_tasks=7))
    steps = scripted.trained_groups(tmp_path / "run")
    assert sorted(steps.values()) == [1, 1, 2, 2, 3, 3, 4]


async def test_a_stop_lets_the_step_end_and_leaves_a_checkpoint(tmp_path: Path) -> None:
    stop = Stop()
    asyncio.get_running_loop().call_later(0.4, stop.request)
    parts = scripted.ScriptedParts(step_s=0.03)
    config = scripted.run_config(tmp_path, "trainer.max_steps=500", "trainer.checkpoint_every_steps=500")
    result = await scripted.begin(config, parts, stop=stop)
    steps = result.summary["steps"]
    assert result.is_interrupted
    assert 1 <= steps < 500
    assert (tmp_path / "run" / "checkpoints" / f"{steps:08d}").is_dir()
    assert parts.client.is_closed
    stop = Stop()
    asyncio.get_running_loop().call_later(0.4, stop.request)
    result = await scripted.go_on(tmp_path / "run", scripted.ScriptedParts(step_s=0.03), stop=stop)
    assert result.summary["steps"] > steps
    scripted.assert_exactly_once(tmp_path / "run", steps=result.summary["steps"], groups_per_step=2)
    assert not (tmp_path / "run" / "metrics.lost.jsonl").exists(), "a clean stop loses nothing"


async def test_a_run_that_is_done_stays_done_when_resumed(tmp_path: Path) -> None:
    first = await scripted.begin(scripted.run_config(tmp_path), scripted.ScriptedParts())
    parts = scripted.ScriptedParts()
    again = await scripted.go_on(tmp_path / "run", parts)
    assert not hasattr(parts, "rollouts"), "nothing is started"
    assert not again.is_interrupted
    timed = {"wall_s", "trainer_idle_fraction", "generator_idle_fraction"}
    assert {k: v for k, v in again.summary.items() if k not in timed} == {
        k: v for k, v in first.summary.items() if k not in timed
    }


async def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    await scripted.begin(scripted.run_config(tmp_path), scripted.ScriptedParts())
    (run_dir / "checkpoints" / "00000012" / "state.json").write_text("{}")
    result = await scripted.go_on(run_dir, scripted.ScriptedParts())
    assert result.summary["steps"] == 12
    scripted.assert_exactly_once(run_dir, steps=12, groups_per_step=2)
    assert [row["step"] for row in scripted.rows(run_dir, "metrics.lost.jsonl")] == [10, 11, 12]


async def test_a_damaged_trajectory_file_is_played_again(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with pytest.raises(TrainingError):
        await scripted.begin(scripted.run_config(tmp_path), scripted.ScriptedParts(fail_at_step=6))
    for path in (run_dir / "trajectories").iterdir():
        path.write_bytes(path.read_bytes()[:20])
    parts = scripted.ScriptedParts()
    await scripted.go_on(run_dir, parts)
    scripted.assert_exactly_once(run_dir, steps=12, groups_per_step=2)
    for group_id, step in scripted.trained_groups(run_dir).items():
        if step > 3:
            read_group(run_dir / "trajectories" / f"{group_id}.json.gz")


async def test_two_processes_cannot_run_the_same_run(tmp_path: Path) -> None:
    config = scripted.run_config(tmp_path)
    await scripted.begin(config, scripted.ScriptedParts())
    lock = lock_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="another process"):
        await scripted.go_on(tmp_path / "run", scripted.ScriptedParts())
    os.close(lock)
    with pytest.raises(ConfigError, match="holds a run already"):
        await scripted.begin(config, scripted.ScriptedParts())


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes of a test, ended with it."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def start(
    run_dir: Path, *arguments: str, processes: list[subprocess.Popen[bytes]], **environment: str
) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-P", str(PROGRAM), str(run_dir), *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=os.environ | environment,
    )
    processes.append(process)
    return process


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        rows = (run_dir / "metrics.jsonl").read_bytes().splitlines() if (run_dir / "metrics.jsonl").exists() else []
        if len(rows) >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} did not come; exit code {process.poll()}")


def wait_for_life(run_dir: Path, life: int, process: subprocess.Popen[bytes]) -> None:
    """Waits until groups of this life have been played, so that a step begins."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.closing(sqlite3.connect(run_dir / "journal.sqlite")) as journal:
            query = "SELECT COUNT(*) FROM groups WHERE incarnation = ? AND state != 'issued'"
            if journal.execute(query, (life,)).fetchone()[0] >= 2:
                return
        time.sleep(0.05)
    raise AssertionError(f"life {life} did not begin; exit code {process.poll()}")


@pytest.mark.slow
def test_kill_9_again_and_again_and_every_group_is_trained_exactly_once(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    run_dir = tmp_path / "run"
    arguments: tuple[str, ...] = ("trainer.max_steps=40", "trainer.checkpoint_every_steps=5")
    for kill_at in (3, 9, 17, 26):
        process = start(run_dir, *arguments, processes=processes)
        wait_for_step(run_dir, kill_at, process)
        process.kill()
        process.wait()
        arguments = ("--resume",)
    last = start(run_dir, "--resume", processes=processes)
    assert last.wait(timeout=60) == 0
    scripted.assert_exactly_once(run_dir, steps=40, groups_per_step=2)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["episodes_trained"] == 40 * 6
    assert summary["lag_max"] <= 4
    incarnations = [row["incarnation"] for row in scripted.rows(run_dir)]
    assert incarnations == sorted(incarnations)
    assert incarnations[-1] == 5
    lost = scripted.rows(run_dir, "metrics.lost.jsonl")
    assert all(row["step"] <= 30 for row in lost)


HUNG_WANDB = """
import threading
Settings = dict
def init(**options):
    threading.Event().wait()
"""


@pytest.mark.slow
def test_a_metric_sink_that_never_returns_is_given_up_and_what_it_lost_is_in_the_summary(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "wandb.py").write_text(HUNG_WANDB)
    run_dir = tmp_path / "run"
    process = start(run_dir, "metrics.wandb_project=p", processes=processes, PYTHONPATH=str(tmp_path / "lib"))
    assert process.wait(timeout=60) == 0
    assert json.loads((run_dir / "summary.json").read_text())["events"]["dropped_metrics"] == 12
    scripted.assert_exactly_once(run_dir, steps=12, groups_per_step=2)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_cleanly_and_a_second_one_at_once(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]], number: signal.Signals
) -> None:
    run_dir = tmp_path / "run"
    process = start(run_dir, "trainer.max_steps=100000", processes=processes)
    wait_for_step(run_dir, 3, process)
    process.send_signal(number)
    assert process.wait(timeout=30) == 130
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (run_dir / "checkpoints" / f"{summary['steps']:08d}").is_dir()
    slow = start(run_dir, "--resume", "--step-s=30", processes=processes)
    wait_for_life(run_dir, 2, slow)
    slow.send_signal(number)
    time.sleep(0.7)
    assert slow.poll() is None, "a step is in progress"
    slow.send_signal(number)
    assert slow.wait(timeout=10) == 130

"""Runs whose sinks are slow, stuck or refuse rows, whose output nobody reads, and which are killed between two rows."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scripted_run as scripted

from driftgym.errors import TrainingError
from driftgym.sinks import Row
from driftgym.trainer.run import RunResult, live
from driftgym.trainer.run_config import load_resolved, make_run_dir
from driftgym.trainer.scripted_rollouts import Pace, PacedParts, paced_config
from driftgym.trainer.stop import Stop

PROGRAM = Path(scripted.__file__)
MODEL = Path(__file__).parents[2] / "configs" / "models" / "tiny-qwen3"


class NondecreasingSink:
    """Refuses a step below one that it has seen, as some services do; keeps the rest."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def write(self, row: Row) -> None:
        if self.rows and row["step"] < self.rows[-1]["step"]:
            raise ValueError("step decreases")
        self.rows.append(row)

    def say(self, text: str) -> None:
        pass

    show = say

    def close(self) -> None:
        pass


class SleepingSink(NondecreasingSink):
    """Sleeps in every call, until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def write(self, row: Row) -> None:
        self.let_go.wait(3.0)
        super().write(row)

    def say(self, text: str) -> None:
        self.let_go.wait(3.0)

    show = say


class StuckSink(SleepingSink):
    """Returns from nothing, the end included, until it is let go."""

    def write(self, row: Row) -> None:
        self.let_go.wait()

    def close(self) -> None:
        self.let_go.wait()


class RefusingSink(NondecreasingSink):
    """Raises whatever it is asked for, the end included."""

    def write(self, row: Row) -> None:
        raise ConnectionError("no route to host")

    say = show = write  # type: ignore[assignment]

    def close(self) -> None:
        raise ConnectionError("no route to host")


async def play(tmp_path: Path, *sinks: Any, overrides: Sequence[str] = (), **parts: Any) -> RunResult:
    config = scripted.run_config(tmp_path, "limits.close_s=0.5", *overrides)
    start = scripted.ScriptedParts(step_s=0.01, **parts)
    return await live(config, make_run_dir(config), stop=Stop(), start=start, sinks=sinks)


@pytest.mark.parametrize("sink_type", [SleepingSink, StuckSink])
async def test_a_run_ends_while_its_sink_is_still_at_the_first_row(
    tmp_path: Path, sink_type: type[SleepingSink]
) -> None:
    sink, good = sink_type(), NondecreasingSink()
    try:
        result = await play(tmp_path, sink, good)
        assert sink.rows == []
        assert [row["step"] for row in good.rows] == list(range(1, 13))
        scripted.assert_exactly_once(tmp_path / "run", steps=12, groups_per_step=2)
        assert result.summary["events"]["dropped_metrics"] == 12
        assert json.loads((tmp_path / "run" / "summary.json").read_text()) == result.summary
    finally:
        sink.let_go.set()


async def test_twenty_steps_are_the_same_beside_sinks_that_sleep_refuse_and_never_return(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case I4: each of the three loses its rows, which are counted; the run, its file and other sinks lose none."""
    sleeping, refusing, stuck, good = SleepingSink(), RefusingSink(), StuckSink(), NondecreasingSink()
    try:
        result = await play(tmp_path, sleeping, refusing, stuck, good, overrides=["trainer.max_steps=20"])
        assert [row["step"] for row in good.rows] == list(range(1, 21))
        scripted.assert_exactly_once(tmp_path / "run", steps=20, groups_per_step=2)
        assert sleeping.rows == stuck.rows == []
        assert result.summary["events"]["dropped_metrics"] == 3 * 20
        assert 1 <= good.rows[-1]["dropped_metrics"] < 20, "those of the one that refuses, so far"
        assert "RefusingSink failed: ConnectionError: no route to host" in capsys.readouterr().out
    finally:
        sleeping.let_go.set()
        stuck.let_go.set()


async def test_after_a_crash_at_12_a_run_goes_on_from_10_and_no_figure_is_refused(tmp_path: Path) -> None:
    """Case I2: x is the trainer's step; steps 11 and 12 of the first life are told apart from those of the second."""
    first, second = NondecreasingSink(), NondecreasingSink()
    overrides = ["trainer.checkpoint_every_steps=5", "trainer.max_steps=15"]
    with pytest.raises(TrainingError, match="the learner is gone"):
        await play(tmp_path, first, fail_at_step=13, overrides=overrides)
    config, run_dir = load_resolved(tmp_path / "run")
    result = await live(config, run_dir, stop=Stop(), start=scripted.ScriptedParts(), sinks=[second])
    assert [row["step"] for row in first.rows] == list(range(1, 13))
    assert [row["step"] for row in second.rows] == list(range(11, 16))
    for row in (*first.rows, *second.rows):
        assert row["step"] == row["policy_version"]
        assert row["episodes_finished"] > 0, "what rollouts count stands in the same row"
        assert row["dropped_metrics"] == 0
    stands = [(row["step"], row["incarnation"]) for row in scripted.rows(run_dir)]
    assert stands == [(step, 1 if step <= 10 else 2) for step in range(1, 16)]
    lost = [(row["step"], row["incarnation"]) for row in scripted.rows(run_dir, "metrics.lost.jsonl")]
    assert lost == [(11, 1), (12, 1)]
    assert "dropped_metrics" not in result.summary["events"]


async def test_no_row_is_refused_over_a_crash_between_a_row_and_its_checkpoint(tmp_path: Path) -> None:
    """Steps 10 and 11 come after the checkpoint of step 9 and are lost with their life; their rows are kept apart."""
    first, second = NondecreasingSink(), NondecreasingSink()
    with pytest.raises(TrainingError, match="the learner is gone"):
        await play(tmp_path, first, fail_at_step=12)
    config, run_dir = load_resolved(tmp_path / "run")
    result = await live(config, run_dir, stop=Stop(), start=scripted.ScriptedParts(), sinks=[second])
    assert [row["step"] for row in first.rows] == list(range(1, 12))
    assert [(row["step"], row["incarnation"]) for row in second.rows] == [(10, 2), (11, 2), (12, 2)]
    rows = scripted.rows(run_dir)
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row["incarnation"] for row in rows] == [1] * 9 + [2] * 3
    lost = scripted.rows(run_dir, "metrics.lost.jsonl")
    assert [(row["step"], row["incarnation"]) for row in lost] == [(10, 1), (11, 1)]
    assert "dropped_metrics" not in result.summary["events"]


async def test_the_time_of_tools_is_told_and_goes_on_over_a_resume(tmp_path: Path) -> None:
    trainer = {"max_steps": 6, "groups_per_step": 2, "max_in_flight_groups": 4, "max_lag": 4}
    config = paced_config(tmp_path / "run", trainer)
    parts = PacedParts(model=MODEL, pace=Pace(turn_s=0.05, tokens_per_turn=4), duration_s=lambda _: 0.1)
    result = await live(config, make_run_dir(config), stop=Stop(), start=parts)
    assert_tools_agree(result.rows[-1], at_most=4)
    assert 0 < result.summary["tool_busy_fraction"] <= 1
    text = (tmp_path / "run" / "config.resolved.yaml").read_text()
    (tmp_path / "run" / "config.resolved.yaml").write_text(text.replace("max_steps: 6", "max_steps: 9"))
    config, run_dir = load_resolved(tmp_path / "run")
    after = await live(config, run_dir, stop=Stop(), start=parts)
    assert_tools_agree(after.rows[-1], at_most=4)
    assert after.rows[-1]["tool_running_s"] > result.rows[-1]["tool_running_s"]
    busy_s = np.diff([row["tool_busy_s"] for row in after.rows])
    assert (busy_s >= 0).all()


def assert_tools_agree(row: Mapping[str, Any], *, at_most: int) -> None:
    """The shares are those of the sums; busy is what at least one tool was, running what each was."""
    assert 0 < row["tool_busy_s"] <= row["tool_running_s"] <= at_most * row["tool_busy_s"] * (1 + 1e-9)
    assert row["tool_busy_fraction"] == pytest.approx(row["tool_busy_s"] / row["loop_s"], rel=0.05)
    assert row["tools_running_mean"] == pytest.approx(row["tool_running_s"] / row["loop_s"], rel=0.05)


async def test_tools_that_nobody_measures_have_no_share(tmp_path: Path) -> None:
    result = await play(tmp_path)
    assert {row["tool_busy_fraction"] for row in result.rows} == {None}
    assert result.summary["tool_busy_fraction"] is None


COMMAND = """
import asyncio, importlib.util, sys
from pathlib import Path
from driftgym import cli
spec = importlib.util.spec_from_file_location("scripted_run", sys.argv.pop(1))
scripted = importlib.util.module_from_spec(spec)
spec.loader.exec_module(scripted)

@cli.app.command()
def play(folder: Path):
    parts = scripted.ScriptedParts(step_s=0.01)
    cli._print_result(asyncio.run(scripted.begin(scripted.run_config(folder, "limits.close_s=0.5"), parts)))

cli.main()
"""


@contextlib.contextmanager
def closed_pipe() -> Iterator[int]:
    """Nobody can read it any more."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@contextlib.contextmanager
def full_pipe() -> Iterator[int]:
    """Nobody reads it."""
    reader, writer = os.pipe()
    fill(writer)
    yield writer
    os.close(reader)
    os.close(writer)


@contextlib.contextmanager
def full_terminal() -> Iterator[int]:
    """Stands still, as after ctrl-S."""
    reader, writer = os.openpty()
    fill(writer)
    yield writer
    os.close(reader)
    os.close(writer)


def fill(file: int) -> None:
    os.set_blocking(file, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(file, b"." * 1024)
    os.set_blocking(file, True)


@pytest.mark.slow
@pytest.mark.parametrize("errors_too", [False, True], ids=["stdout", "stdout-and-stderr"])
@pytest.mark.parametrize("output", [closed_pipe, full_pipe, full_terminal])
def test_a_run_whose_output_nobody_reads_does_all_its_work_and_ends(
    tmp_path: Path, output: Callable[[], contextlib.AbstractContextManager[int]], errors_too: bool
) -> None:
    with output() as file:
        finished = subprocess.run(
            [sys.executable, "-P", "-c", COMMAND, str(PROGRAM), "play", str(tmp_path)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file if errors_too else subprocess.PIPE,
            env=os.environ | {"TERM": "xterm"},
            timeout=60,
            check=False,
        )
    assert finished.returncode == 0, finished.stderr
    assert not finished.stderr, "nothing failed at the end of the program"
    scripted.assert_exactly_once(tmp_path / "run", steps=12, groups_per_step=2)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 12


@pytest.mark.slow
def test_a_run_without_standard_output_does_all_its_work(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", COMMAND, str(PROGRAM), "play", str(tmp_path)]
    finished = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command], stderr=subprocess.PIPE, timeout=60, check=False
    )
    assert (finished.returncode, finished.stderr) == (0, b"")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "dropped_metrics" not in summary["events"]

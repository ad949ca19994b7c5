"""The hub: rows are never lost in the file, and a sink that is slow, broken or dead changes only a count."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from driftgym.errors import ConfigError, DriftgymError
from driftgym.metrics import JsonlWriter, Metrics, MetricsConfig, WandbSink, check_metrics, split_lost_rows


class ListSink:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.lines: list[str] = []
        self.is_closed = False

    def write(self, row: Any) -> None:
        self.rows.append(row)

    def say(self, text: str) -> None:
        self.lines.append(text)

    def show(self, text: str) -> None:
        self.lines.append(text)

    def close(self) -> None:
        self.is_closed = True


class RaisingSink(ListSink):
    """Refuses everything that it is asked for."""

    error: type[BaseException] = OSError

    def write(self, row: Any) -> None:
        raise self.error("no route to host")

    say = show = write

    def close(self) -> None:
        raise self.error("no route to host")


class ExitingSink(RaisingSink):
    """Wants to end the program, as libraries do."""

    error = SystemExit


class StuckSink(ListSink):
    """Never returns from one of its methods, until it is let go."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.is_stuck, self._let_go = threading.Event(), threading.Event()
        setattr(self, method, self._stick)

    def _stick(self, *_: Any) -> None:
        self.is_stuck.set()
        self._let_go.wait()

    def let_go(self) -> None:
        self._let_go.set()


@pytest.fixture
def stuck(request: pytest.FixtureRequest) -> Iterator[StuckSink]:
    sink = StuckSink(request.param)
    yield sink
    sink.let_go()


class DecreasingStepSink(ListSink):
    """Refuses a step below one that it has seen."""

    def write(self, row: Any) -> None:
        if self.rows and row["step"] < self.rows[-1]["step"]:
            raise ValueError("step decreases")
        super().write(row)


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come about")


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_row_reaches_the_file_and_every_sink(tmp_path: Path) -> None:
    sinks = [ListSink(), ListSink()]
    metrics = Metrics(JsonlWriter(tmp_path / "m.jsonl"), sinks)
    for step in range(1, 51):
        metrics.log({"step": step, "reward_mean": step / 10, "nested": {"a": [1, 2.5]}})
    metrics.say("news")
    metrics.close(timeout_s=5)
    assert [row["step"] for row in rows_of(tmp_path / "m.jsonl")] == list(range(1, 51))
    for sink in sinks:
        assert len(sink.rows) == 50
        assert sink.lines == ["news"]
        assert sink.is_closed
    assert metrics.dropped_metrics == 0


@pytest.mark.parametrize("sink_type", [RaisingSink, ExitingSink])
def test_a_sink_that_raises_changes_only_a_count(tmp_path: Path, sink_type: type[RaisingSink]) -> None:
    good = ListSink()
    metrics = Metrics(JsonlWriter(tmp_path / "m.jsonl"), [sink_type(), good])
    for step in range(20):
        metrics.log({"step": step})
        metrics.say("news")
        metrics.show("waiting")
    late = metrics.close(timeout_s=60)
    assert len(rows_of(tmp_path / "m.jsonl")) == len(good.rows) == 20
    assert metrics.dropped_metrics == 20
    told = [line for line in (*good.lines, *late) if line not in ("news", "waiting")]
    assert told == [f"{sink_type.__name__} failed: {sink_type.error.__name__}: no route to host"], (
        "once, with the reason"
    )


@pytest.mark.parametrize("stuck", ["write", "say", "show"], indirect=True)
def test_a_sink_that_never_returns_holds_up_nothing(tmp_path: Path, stuck: StuckSink) -> None:
    good = ListSink()
    metrics = Metrics(JsonlWriter(tmp_path / "m.jsonl"), [stuck, good])
    metrics.say("news")
    metrics.show("waiting")
    for step in range(20):
        metrics.log({"step": step})
    assert stuck.is_stuck.wait(60)
    num_taken = len(stuck.rows)
    metrics.close(timeout_s=1.0)
    assert len(rows_of(tmp_path / "m.jsonl")) == len(good.rows) == 20
    assert metrics.dropped_metrics == 20 - num_taken
    assert not stuck.is_closed
    assert good.is_closed


@pytest.mark.parametrize("stuck", ["close"], indirect=True)
def test_a_sink_that_never_ends_has_its_rows(tmp_path: Path, stuck: StuckSink) -> None:
    metrics = Metrics(JsonlWriter(tmp_path / "m.jsonl"), [stuck])
    metrics.log({"step": 1})
    metrics.close(timeout_s=1.0)
    assert len(stuck.rows) == 1
    assert metrics.dropped_metrics == 0


@pytest.mark.parametrize("stuck", ["write"], indirect=True)
def test_a_sink_that_comes_back_after_it_was_given_up_is_closed_and_counts_nothing_twice(
    tmp_path: Path, stuck: StuckSink
) -> None:
    metrics = Metrics(JsonlWriter(tmp_path / "m.jsonl"), [stuck])
    for step in range(3):
        metrics.log({"step": step})
    metrics.close(timeout_s=0.1)
    assert metrics.dropped_metrics == 3
    stuck.let_go()
    wait_until(lambda: stuck.is_closed)
    assert metrics.dropped_metrics == 3


@pytest.mark.parametrize("stuck", ["write"], indirect=True)
def test_news_displace_no_rows_and_only_the_newest_is_shown(tmp_path: Path, stuck: StuckSink) -> None:
    metrics = Metrics(JsonlWriter(tmp_path / "m.jsonl"), [stuck])
    metrics.log({"step": 0})
    assert stuck.is_stuck.wait(60)
    for number in range(1000):
        metrics.say("news")
        metrics.show(f"{number} finished")
    metrics.log({"step": 1})
    del stuck.write  # from here on, that of the class
    stuck.let_go()
    metrics.close(timeout_s=60)
    assert metrics.dropped_metrics == 0
    assert [row["step"] for row in stuck.rows] == [1]
    assert [line for line in stuck.lines if line != "news"] == ["999 finished"]
    assert stuck.is_closed


PROGRAM_WITH_A_DEAD_SINK = """
import threading, typer
from pathlib import Path
from driftgym import cli
from driftgym.metrics import JsonlWriter, Metrics

class DeadSink:
    def write(self, row):
        threading.Event().wait()

@cli.app.command()
def work(path: Path):
    threading.Thread(target=threading.Event().wait).start()  # as a library's that waits for its server
    metrics = Metrics(JsonlWriter(path), [DeadSink()])
    metrics.log({"step": 1})
    metrics.close(timeout_s=0.1)
    typer.echo("done")
    raise typer.Exit(3)

cli.main()
"""


def test_a_program_whose_sink_was_given_up_ends_all_the_same(tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM_WITH_A_DEAD_SINK, "work", str(tmp_path / "m.jsonl")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (finished.returncode, finished.stdout) == (3, "done\n"), finished.stderr


@pytest.mark.parametrize("stuck", ["write"], indirect=True)
def test_a_full_queue_drops_and_counts(tmp_path: Path, stuck: StuckSink) -> None:
    metrics = Metrics(JsonlWriter(tmp_path / "m.jsonl"), [stuck])
    for step in range(1000):
        metrics.log({"step": step})
    assert 700 <= metrics.dropped_metrics <= 744
    metrics.close(timeout_s=0.1)
    rows = rows_of(tmp_path / "m.jsonl")
    assert len(rows) == 1000
    assert rows[-1]["dropped_metrics"] > 0
    assert metrics.dropped_metrics == 1000


def test_steps_that_come_again_after_a_resume_are_marked_by_the_life_and_lost_ones_set_aside(tmp_path: Path) -> None:
    """Crash at 12, resume from 10: the file has each step once, the lost rows are kept apart, no row is refused."""
    path, lost = tmp_path / "m.jsonl", tmp_path / "lost.jsonl"
    first, second = DecreasingStepSink(), DecreasingStepSink()
    metrics = Metrics(JsonlWriter(path), [first])
    for step in range(1, 13):
        metrics.log({"step": step, "incarnation": 1})
        metrics.say("a rollout ended")
    metrics.close(timeout_s=5)
    assert split_lost_rows(path, lost, last_step=10) == 2
    metrics = Metrics(JsonlWriter(path), [second])
    for step in range(11, 15):
        metrics.log({"step": step, "incarnation": 2})
    metrics.close(timeout_s=5)
    assert metrics.dropped_metrics == 0
    assert [row["step"] for row in rows_of(path)] == list(range(1, 15))
    assert [(row["step"], row["incarnation"]) for row in rows_of(lost)] == [(11, 1), (12, 1)]


def test_a_torn_last_line_is_set_aside(tmp_path: Path) -> None:
    path, lost = tmp_path / "m.jsonl", tmp_path / "lost.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3, "rew')
    assert split_lost_rows(path, lost, last_step=9) == 1
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    assert lost.read_bytes() == b'{"step": 3, "rew\n'
    assert split_lost_rows(path, lost, last_step=9) == 0
    assert split_lost_rows(tmp_path / "none.jsonl", lost, last_step=9) == 0


def test_rows_that_a_kill_left_in_both_files_are_moved_once(tmp_path: Path) -> None:
    path, lost = tmp_path / "m.jsonl", tmp_path / "lost.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    lost.write_bytes(b'{"step": 9}\n{"step": 2}\n{"step": 3}\n')
    assert split_lost_rows(path, lost, last_step=1) == 2
    assert path.read_bytes() == b'{"step": 1}\n'
    assert lost.read_bytes() == b'{"step": 9}\n{"step": 2}\n{"step": 3}\n'


def test_a_row_is_among_the_lost_ones_once_also_when_more_are_lost_after_the_kill(tmp_path: Path) -> None:
    path, lost = tmp_path / "m.jsonl", tmp_path / "lost.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    lost.write_bytes(b'{"step": 3}\n')
    assert split_lost_rows(path, lost, last_step=1) == 2
    assert lost.read_bytes() == b'{"step": 3}\n{"step": 2}\n'
    assert sorted(each.name for each in tmp_path.iterdir()) == ["lost.jsonl", "m.jsonl"]


def test_figures_that_are_not_finite_are_null_in_the_file(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "m.jsonl")
    writer.write({"step": 1, "a": float("nan"), "b": [float("inf"), 1.0], "c": {"d": float("-inf")}})
    writer.close()
    writer.close()
    assert rows_of(tmp_path / "m.jsonl") == [{"step": 1, "a": None, "b": [None, 1.0], "c": {"d": None}}]


def test_values_of_other_libraries_and_half_characters_are_written_as_what_they_stand_for(tmp_path: Path) -> None:
    sink = ListSink()
    metrics = Metrics(JsonlWriter(tmp_path / "m.jsonl"), [sink])
    metrics.log(
        {
            "step": np.int64(1),
            "mean": np.float32(0.5),
            "nan": np.float32("nan"),
            "won": np.bool_(True),
            "each": np.array([1.0, np.inf]),
            "tensor": torch.tensor([1.0, 2.0], requires_grad=True),
            "path": Path("a"),
            "events/\ud800": "Zürich \ud800",
            "none": None,
        }
    )
    metrics.close(timeout_s=5)
    (row,) = rows_of(tmp_path / "m.jsonl")
    wanted = {"step": 1, "mean": 0.5, "nan": None, "won": True, "each": [1.0, None], "tensor": [1.0, 2.0], "path": "a"}
    wanted |= {"events/\ud800": "Zürich \ud800", "none": None, "dropped_metrics": 0}
    assert row == wanted
    assert sink.rows == [wanted]
    assert split_lost_rows(tmp_path / "m.jsonl", tmp_path / "lost.jsonl", last_step=1) == 0, "it can be read again"


class GreedySink(ListSink):
    """Takes figures out of the rows, in depth."""

    def write(self, row: Any) -> None:
        row.pop("step")
        row["nested"]["a"].clear()


def test_what_a_sink_does_to_a_row_is_no_loss_of_another(tmp_path: Path) -> None:
    sinks = [GreedySink(), ListSink()]
    metrics = Metrics(JsonlWriter(tmp_path / "m.jsonl"), sinks)
    row = {"step": 1, "nested": {"a": [1, 2]}}
    metrics.log(row)
    row["nested"]["a"].append(3)  # type: ignore[index]
    metrics.close(timeout_s=5)
    assert metrics.dropped_metrics == 0
    assert sinks[1].rows == [{"step": 1, "nested": {"a": [1, 2]}, "dropped_metrics": 0}]


class UnableToEndSink(ListSink):
    """Takes all rows, and does not come to its end with them."""

    def close(self) -> None:
        raise ConnectionError("the upload broke off")


class SpeechlessError(Exception):
    """Cannot even say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class SpeechlessSink(ListSink):
    """Refuses the first row with an error that cannot be printed."""

    def write(self, row: Any) -> None:
        if not self.lines:
            self.lines.append("refused")
            raise SpeechlessError
        super().write(row)


def test_a_sink_that_fails_at_its_end_is_said_when_no_sink_is_left_to_say_it_to(tmp_path: Path) -> None:
    metrics = Metrics(JsonlWriter(tmp_path / "m.jsonl"), [UnableToEndSink(), ListSink()])
    metrics.log({"step": 1})
    assert metrics.close(timeout_s=5) == ("UnableToEndSink failed: ConnectionError: the upload broke off",)


def test_an_error_that_cannot_be_printed_costs_a_sink_one_row(tmp_path: Path) -> None:
    sink, good = SpeechlessSink(), ListSink()
    metrics = Metrics(JsonlWriter(tmp_path / "m.jsonl"), [sink, good])
    for step in (1, 2, 3):
        metrics.log({"step": step})
    wait_until(lambda: len(sink.rows) == 2 and bool(good.lines))
    assert metrics.close(timeout_s=5) == ()
    assert (metrics.dropped_metrics, sink.is_closed) == (1, True)
    assert good.lines == ["SpeechlessSink failed: SpeechlessError"]


def test_no_line_is_in_neither_file(tmp_path: Path) -> None:
    path, lost = tmp_path / "m.jsonl", tmp_path / "lost.jsonl"
    path.write_bytes(b'{"step": NaN}\n{"step": 1}\n\n[2]\n{"step": "x"}\n{"step": 2}\n')
    assert split_lost_rows(path, lost, last_step=1) == 5
    assert path.read_bytes() == b'{"step": 1}\n'
    assert lost.read_bytes() == b'{"step": NaN}\n\n[2]\n{"step": "x"}\n{"step": 2}\n'


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DriftgymError, match="cannot be written"):
        JsonlWriter(tmp_path / "missing" / "m.jsonl")
    writer = JsonlWriter(Path("/dev/full"))
    with pytest.raises(DriftgymError, match="No space left"):
        writer.write({"step": 1})
    writer.close()


def test_wandb_that_is_not_installed_is_said_before_the_run() -> None:
    check_metrics(MetricsConfig())
    if importlib.util.find_spec("wandb") is None:
        with pytest.raises(ConfigError, match="pip install"):
            check_metrics(MetricsConfig(wandb_project="p"))
    else:
        check_metrics(MetricsConfig(wandb_project="p"))


@pytest.mark.slow
def test_wandb_online_without_a_key_is_said_before_the_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    code = "from driftgym.metrics import *; check_metrics(MetricsConfig(wandb_project='p', wandb_mode='online'))"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    for key, is_refused in ((None, True), ("x" * 40, False)):
        finished = subprocess.run(
            [sys.executable, "-P", "-c", code],
            env=environment | {"HOME": str(tmp_path)} | ({} if key is None else {"WANDB_API_KEY": key}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ("online needs a key" in finished.stderr) is is_refused, finished.stderr
        assert (finished.returncode != 0) is is_refused


@pytest.mark.slow
def test_wandb_offline_needs_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    sink = WandbSink(MetricsConfig(wandb_project="p"), run_dir=tmp_path, name="run", settings={"a": 1})
    metrics = Metrics(JsonlWriter(tmp_path / "m.jsonl"), [sink])
    for step in (1, 2, 2):
        metrics.log({"step": step, "reward_mean": 0.5, "lag_histogram": {"0": 3, "4": 2}})
    metrics.log({"step": 3, "reward_mean": None, "lag_histogram": {}, "masked_share_by_turn": []})
    metrics.log({"step": 4, "reward_mean": float("nan"), "lag_histogram": {str(lag): 1 for lag in range(2000)}})
    assert metrics.close(timeout_s=60) == ()
    assert metrics.dropped_metrics == 0
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))

"""The console: plain lines into whatever takes them, and a view for a terminal."""

import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import pytest
from rich.console import Console

from driftgym.console import ConsoleSink, print_in_time
from driftgym.console_view import Curve, LiveView, figure, step_line
from driftgym.metrics import JsonlWriter, Metrics
from driftgym.sinks import within

ROW: dict[str, Any] = {
    "step": 12,
    "reward_mean": 0.5,
    "lag_mean": 1.25,
    "lag_p99": 2,
    "lag_max": 3,
    "step_s": 0.1,
    "wait_s": 2.0,
    "tokens_per_s": 1234.5,
    "loop_s": 10.0,
    "episodes_trained": 96,
    "generator_idle_fraction": 0.04,
    "trainer_idle_fraction": 0.61,
    "tool_busy_fraction": 0.88,
    "tools_running_mean": 5.23,
    "errors_policy": 13,
    "errors_env": 0,
    "errors_infra": 2,
    "events/infra_retries": 7,
    "dropped_metrics": 0,
}
LINE = "step    12  reward 0.500  lag 1.2 (max 3)  step 0.10 s  wait 2.00 s  idle generator 4% trainer 61%"


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


def painted(view: LiveView, *, width: int = 100, encoding: str = "utf-8") -> list[str]:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Console(file=file, width=width, force_terminal=True, color_system=None).print(view)
    file.seek(0)
    return [line.rstrip() for line in file.read().splitlines()]


def test_lines_are_printed_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(max_steps=3, stream=stream)
    sink.say("starting [the] generator")
    sink.show("waiting for groups")
    sink.write(ROW | {"errors_infra": 0})
    sink.close()
    assert stream.getvalue().splitlines() == ["starting [the] generator", LINE]


def test_lines_are_printed_on_a_terminal_that_cannot_move_its_cursor(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    sink = ConsoleSink(max_steps=3, stream=terminal)
    sink.say("news")
    sink.close()
    assert terminal.getvalue() == "news\n"


def test_a_stream_that_cannot_write_a_character_gets_its_number(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w", encoding="ascii") as stream:
        sink = ConsoleSink(max_steps=3, stream=stream)
        sink.say("café")
        sink.close()
    assert (tmp_path / "out").read_text() == "caf\\xe9\n"


def test_what_was_printed_before_comes_first(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as stream:
        stream.write("before\n")
        sink = ConsoleSink(max_steps=3, stream=stream)
        sink.say("after")
        sink.close()
        assert (tmp_path / "out").read_text() == "before\nafter\n"


def piped(tmp_path: Path, spoil: Callable[[int, TextIO], None]) -> int:
    """How many of 300 rows are dropped by a console whose pipe was spoilt."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        metrics = Metrics(JsonlWriter(tmp_path / "m.jsonl"), [ConsoleSink(max_steps=300, stream=stream)])
        spoil(reader, stream)
        for step in range(300):
            metrics.log(ROW | {"step": step})
        metrics.close(timeout_s=1.0)
        assert len((tmp_path / "m.jsonl").read_text().splitlines()) == 300
        unblock(reader)
    return metrics.dropped_metrics


def unblock(reader: int) -> None:
    """The reader goes away, so that whoever waits for it ends."""
    try:
        os.close(reader)
    except OSError:
        return


def close_reader(reader: int, stream: TextIO) -> None:
    os.close(reader)


def fill(reader: int, stream: TextIO) -> None:
    os.set_blocking(stream.fileno(), False)
    try:
        while True:
            os.write(stream.fileno(), b"." * 4096)
    except BlockingIOError:
        os.set_blocking(stream.fileno(), True)


@pytest.mark.parametrize("spoil", [close_reader, fill])
def test_a_pipe_that_nobody_reads_changes_only_a_count(tmp_path: Path, spoil: Callable[[int, TextIO], None]) -> None:
    assert piped(tmp_path, spoil) == 300


def test_a_view_is_shown_on_a_terminal_with_news_above_it(terminal: Terminal) -> None:
    sink = ConsoleSink(max_steps=24, stream=terminal)
    sink.say("starting [the] generator")
    sink.show("waiting for groups [1/2]")
    sink.write(ROW)
    sink.show("training step 13")
    sink.close()
    printed = terminal.getvalue()
    assert "starting [the] generator\n" in printed
    assert "12/24" in printed
    assert "generator 4%" in printed
    assert LINE not in printed, "the view tells the figures: no line per step"
    assert printed.rfind("training step 13") < printed.rfind("12/24"), "the last view waits for nothing"
    assert "\x1b[?25l" not in printed, "the cursor is left as it is"


def test_the_view_tells_where_the_run_stands() -> None:
    view = LiveView(max_steps=60)
    for step in range(1, 13):
        view.write(ROW | {"step": step, "reward_mean": step / 12})
    view.show("waiting for groups: 3/8 finished, 5 being played")
    lines = dict(view.lines())
    assert lines == {
        "reward": "1.000  0.625 over 10 steps  ▂▂▃▃▄▅▅▆▆▇▇█",
        "lag": "1.2  p99 2  max 3",
        "idle": "generator 4%  trainer 61%  tools 12% (5.2 at once)",
        "rates": "1,234 tokens/s  9.60 episodes/s  step 0.10 s  wait 2.00 s",
        "errors": "policy 13  env 0  infra 2  retried 7",
        "now": "waiting for groups: 3/8 finished, 5 being played",
    }
    shown = painted(view)
    assert [line.split()[0] for line in shown] == ["step", *lines]
    assert shown[0].split()[-2:] == ["12/60", "0:00"]


def test_the_view_begins_with_what_stood_before_this_life() -> None:
    view = LiveView(max_steps=60, past=[ROW | {"step": step, "reward_mean": 1.0} for step in (1, 2, 3)])
    assert dict(view.lines())["reward"] == "1.000  1.000 over 3 steps  ███"
    assert "3/60" in painted(view)[0]


def test_the_view_bears_figures_that_are_missing() -> None:
    view = LiveView(max_steps=0)
    assert dict(view.lines()) == {"now": "starting"}
    view.write({"step": 1, "reward_mean": None, "lag_mean": float("nan"), "tool_busy_fraction": None})
    lines = dict(view.lines())
    assert lines["reward"] == "-  - over 0 steps  "
    assert lines["idle"] == "generator -  trainer -  tools - (- at once)"
    assert len(painted(view)) == 7


@pytest.mark.parametrize("width", [12, 40])
def test_the_view_fits_into_a_terminal_of_few_columns_and_few_characters(width: int) -> None:
    view = LiveView(max_steps=60, past=[ROW])
    view.show("waiting for groups: 3/8 finished, 5 being played")
    lines = painted(view, width=width, encoding="ascii")
    assert len(lines) == 7
    assert max(map(len, lines)) <= width


def test_a_curve_of_any_length_keeps_its_width_and_its_means() -> None:
    curve = Curve(width=8)
    for value in range(1000):
        curve.add(float(value))
        assert len(curve.draw()) <= 8
    means = curve.means()
    assert means == sorted(means)
    assert 4 <= len(means) <= 8
    assert means[0] == 63.5, "128 values a column"


def test_a_curve_takes_rewards_below_0_and_above_1() -> None:
    curve = Curve()
    for value in (-2.0, 0.0, 6.0):
        curve.add(value)
    assert curve.draw() == "▁▃█"


def test_a_step_line_tells_errors_and_bears_missing_figures() -> None:
    line = step_line({"step": 4, "reward_mean": None, "errors_env": 2, "generator_idle_fraction": None})
    assert "reward -" in line
    assert "errors env 2 infra 0" in line
    assert "idle generator - trainer -" in line
    assert figure(float("inf"), ".1f") == "-"


def test_output_ends_in_time_or_is_given_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_in_time("said")
    assert print_in_time("told", to_stderr=True)
    assert capsys.readouterr() == ("said\n", "told\n")
    let_go = threading.Event()
    assert not within(0.1, let_go.wait)
    let_go.set()

    def exits() -> None:
        raise SystemExit(1)

    assert not within(60, exits)

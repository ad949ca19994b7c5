"""Idle shares, length ratio, reward windows, and the tally."""

import pytest

from driftgym.agents.tool_meter import ToolMeter
from driftgym.trainer.summary import LengthRatio, RunClock, ratio_at_lag0, reward_windows
from driftgym.trainer.tally import Tally


def test_generator_idle_is_what_was_not_busy_between_two_looks() -> None:
    clock = RunClock({})
    assert clock.generator_idle_fraction is None
    clock.saw_busy(100.0, at=10.0)
    assert clock.generator_idle_fraction is None, "one look tells nothing"
    clock.saw_busy(103.0, at=14.0)
    assert clock.generator_idle_fraction == pytest.approx(0.25)


def test_a_generator_that_was_restarted_counts_from_zero() -> None:
    clock = RunClock({})
    clock.saw_busy(100.0, at=10.0)
    clock.saw_busy(1.0, at=14.0)
    assert clock.generator_idle_fraction == pytest.approx(0.75)


def test_a_report_of_more_than_the_time_that_passed_is_not_believed() -> None:
    clock = RunClock({})
    clock.saw_busy(0.0, at=10.0)
    clock.saw_busy(9.0, at=14.0)
    assert clock.generator_idle_fraction == 0.0


def test_time_goes_on_over_the_lives_of_a_run() -> None:
    row = {"wall_s": 100.0, "loop_s": 80.0, "total_step_s": 60.0, "generator_s": 80.0, "generator_busy_s": 40.0}
    clock = RunClock(row)
    assert clock.wall_s >= 100
    assert clock.trainer_idle_fraction == pytest.approx(0.25)
    assert clock.generator_idle_fraction == pytest.approx(0.5)
    clock.start_loop()
    clock.end_loop()
    assert clock.loop_s == pytest.approx(80.0, abs=0.5)


def test_figures_that_a_row_has_as_null_count_from_0() -> None:
    clock = RunClock(dict.fromkeys(RunClock({}).row()))
    assert (clock.step_s, clock.loop_s, clock.generator_s, clock.generator_busy_s) == (0.0, 0.0, 0.0, 0.0)
    assert clock.generator_idle_fraction is None


def test_the_time_of_tools_is_that_of_the_loop_alone_and_goes_on_over_the_lives_of_a_run() -> None:
    tools = ToolMeter()
    with tools.running():
        before = tools.time
        clock = RunClock({"loop_s": 10.0, "tool_busy_s": 2.0, "tool_running_s": 6.0})
        assert (clock.tool_busy_fraction, clock.tools_running_mean) == pytest.approx((0.2, 0.6))
        clock.start_loop(tools=tools)
        clock.end_loop()
    row = clock.row()
    assert 2.0 < row["tool_busy_s"] < 2.0 + tools.time.busy_s - before.busy_s
    assert row["tool_running_s"] - 6.0 == pytest.approx(row["tool_busy_s"] - 2.0)
    assert clock.row()["tool_busy_s"] == row["tool_busy_s"], "the loop has ended"


def test_tools_that_nobody_measures_have_no_share() -> None:
    clock = RunClock({})
    clock.start_loop()
    clock.end_loop()
    assert (clock.tool_busy_fraction, clock.tools_running_mean) == (None, None)


def test_the_length_ratio_goes_on_over_the_lives_of_a_run() -> None:
    assert LengthRatio({}).value is None
    ratio = LengthRatio({"length_sums": [40, 10, 200, 20]})
    assert ratio.value == pytest.approx(0.4)
    assert LengthRatio(ratio.row()).value == ratio.value


def test_the_ratio_at_lag_0_is_a_mean_over_tokens_and_null_without_any() -> None:
    rows = [{"num_lag0_tokens": 1, "lag0_ratio_sum": 1.3}, {"num_lag0_tokens": 3, "lag0_ratio_sum": 2.7}]
    assert ratio_at_lag0(rows) == pytest.approx(1.0)
    assert ratio_at_lag0([{"num_lag0_tokens": 0, "lag0_ratio_sum": 0.0}]) is None
    assert ratio_at_lag0([*rows, {"num_lag0_tokens": 9, "lag0_ratio_sum": None}]) == pytest.approx(1.0)


@pytest.mark.parametrize(("num_rows", "num_windows"), [(0, 0), (3, 3), (10, 10), (11, 6), (25, 9), (1000, 10)])
def test_reward_windows(num_rows: int, num_windows: int) -> None:
    rows = [{"step": step, "reward_mean": float(step) if step % 2 else None} for step in range(1, num_rows + 1)]
    windows = reward_windows(rows)
    assert len(windows) == num_windows
    if windows:
        assert (windows[0][0], windows[-1][1]) == (1, num_rows)
    assert reward_windows([{"step": 1, "reward_mean": None}]) == [(1, 1, None)]


def test_the_tally_tells_whose_fault_it_was() -> None:
    tally = Tally()
    tally.add(status="completed", events={"policy_error": 2, "unknown_tool": 1})
    tally.add(status="truncated_time", events={})
    tally.add(status="env_error", events={"tool_timeout": 1})
    tally.add(status="infra_error", events={})
    assert tally.errors == {"env": 1, "infra": 1, "policy": 2}
    assert tally.events == {"policy_error": 2, "tool_timeout": 1, "truncated_time": 1, "unknown_tool": 1}
    assert tally.row()["events/tool_timeout"] == 1
    assert tally.row()["errors_env"] == 1

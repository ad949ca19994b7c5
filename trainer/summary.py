"""What a run comes to: the row of a step, `summary.json`, and the reward table."""

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from driftgym.agents.tool_meter import ToolMeter, ToolTime
from driftgym.metrics import plain_row
from driftgym.trainer.buffer import Batch
from driftgym.trainer.credit import Credit, tells_apart
from driftgym.trainer.journal import Journal
from driftgym.trainer.staleness import LagHistogram, stale_by_turn

_NUM_WINDOWS = 10


class RunClock:
    """Where the time of a run went, over all its lives, in seconds.

    >>> RunClock({}).loop_s >= 0
    True
    """

    def __init__(self, last_row: Mapping[str, Any]) -> None:
        """Goes on from the last row that stands; {} at the beginning. What it has no figure of counts from 0."""
        self._wall_before_s = float(last_row.get("wall_s") or 0.0)
        self._loop_before_s = float(last_row.get("loop_s") or 0.0)
        self.step_s = float(last_row.get("total_step_s") or 0.0)
        self.generator_s = float(last_row.get("generator_s") or 0.0)
        self.generator_busy_s = float(last_row.get("generator_busy_s") or 0.0)
        self._tools_before = ToolTime(
            busy_s=float(last_row.get("tool_busy_s") or 0.0), running_s=float(last_row.get("tool_running_s") or 0.0)
        )
        self._tools: ToolMeter | None = None
        self._tools_at_start = self._tools_at_end = ToolTime()
        self._started = time.monotonic()
        self._loop_started: float | None = None
        self._loop_ended: float | None = None
        self._busy_before: tuple[float, float] | None = None

    def start_loop(self, *, tools: ToolMeter | None = None) -> None:
        """The parts are there: shares are counted from here, those of tools where `tools` measures them."""
        self._loop_started = time.monotonic()
        self._tools = tools
        self._tools_at_start = tools.time if tools is not None else ToolTime()

    def end_loop(self) -> None:
        """No further step: closing the parts is nobody's idleness."""
        self._loop_ended = time.monotonic()
        self._tools_at_end = self._tools.time if self._tools is not None else ToolTime()

    @property
    def wall_s(self) -> float:
        """All lives of the run, starting up included."""
        return self._wall_before_s + time.monotonic() - self._started

    @property
    def loop_s(self) -> float:
        """All loops, without starting up."""
        if self._loop_started is None:
            return self._loop_before_s
        return self._loop_before_s + (self._loop_ended or time.monotonic()) - self._loop_started

    def saw_busy(self, busy_s: float, *, at: float) -> None:
        """The generators reported that they were busy for `busy_s` since their start, at monotonic time `at`."""
        before, self._busy_before = self._busy_before, (at, busy_s)
        if before is not None and at > before[0]:
            elapsed_s = at - before[0]
            # A generator that was restarted counts from 0 again.
            busy_now_s = busy_s - before[1] if busy_s >= before[1] else busy_s
            self.generator_s += elapsed_s
            self.generator_busy_s += min(busy_now_s, elapsed_s)

    @property
    def trainer_idle_fraction(self) -> float | None:
        """The share of the loop's time outside a step; None before there is any."""
        return max(0.0, 1.0 - self.step_s / self.loop_s) if self.loop_s > 0 else None

    @property
    def generator_idle_fraction(self) -> float | None:
        """The share of the time observed in which no request was being decoded; None before there is any."""
        return 1.0 - self.generator_busy_s / self.generator_s if self.generator_s > 0 else None

    @property
    def _tool_time(self) -> ToolTime:
        """Of all loops."""
        if self._tools is None:
            return self._tools_before
        now = self._tools.time if self._loop_ended is None else self._tools_at_end
        return self._tools_before + now - self._tools_at_start

    @property
    def tool_busy_fraction(self) -> float | None:
        """The share of the loop's time with at least one tool at work; None where nobody measures it."""
        return self._tool_time.busy_s / self.loop_s if self._is_measured else None

    @property
    def tools_running_mean(self) -> float | None:
        """How many tools were at work, in the mean over the loop's time; None where nobody measures it."""
        return self._tool_time.running_s / self.loop_s if self._is_measured else None

    @property
    def _is_measured(self) -> bool:
        return self.loop_s > 0 and (self._tools is not None or self._tools_before.busy_s > 0)

    def row(self) -> dict[str, float]:
        """The sums that the next life goes on from."""
        tools = self._tool_time
        return {
            "tool_busy_s": tools.busy_s,
            "tool_running_s": tools.running_s,
            "wall_s": self.wall_s,
            "loop_s": self.loop_s,
            "total_step_s": self.step_s,
            "generator_s": self.generator_s,
            "generator_busy_s": self.generator_busy_s,
        }


class LengthRatio:
    """Mean sampled tokens of trained episodes over that of all episodes that steps were offered, dropped and
    filtered ones included.

    Below 1 it says that training leans to short episodes.

    >>> LengthRatio({}).value is None
    True
    """

    def __init__(self, last_row: Mapping[str, Any]) -> None:
        """Goes on from the last row that stands; {} at the beginning."""
        self._sums: list[int] = list(last_row.get("length_sums", (0, 0, 0, 0)))

    def add(self, batch: Batch) -> None:
        """Counts the scored episodes of `batch`."""
        for offset, groups in ((0, batch.groups), (2, batch.groups + batch.dropped + batch.filtered)):
            scored = [t for group in groups for t in group.trajectories if t.status.is_scored]
            self._sums[offset] += sum(t.num_sampled_tokens for t in scored)
            self._sums[offset + 1] += len(scored)

    @property
    def value(self) -> float | None:
        """The ratio; None before anything was trained."""
        trained_tokens, num_trained, tokens, num_offered = self._sums
        if not num_trained or not tokens:
            return None
        return (trained_tokens / num_trained) / (tokens / num_offered)

    def row(self) -> dict[str, Any]:
        """The ratio, and the sums that the next life goes on from."""
        return {"trained_length_ratio": self.value, "length_sums": list(self._sums)}


def batch_figures(
    batch: Batch, lags: LagHistogram, *, now: int, max_lag: int, credit: Credit = "episode"
) -> dict[str, Any]:
    """What the row of a step says of the batch that it trained, at policy version `now`.

    Filtered groups count in what was played (rewards, lengths, zero variance), not in what was trained.
    """
    taken = batch.groups + batch.filtered
    scored = [t for group in taken for t in group.trajectories if t.status.is_scored]
    rewards = [t.reward for t in scored if t.reward is not None]
    stale = stale_by_turn(batch.groups, now=now, max_lag=max_lag)
    return {
        "reward_mean": _mean(rewards),
        "lag_mean": lags.mean,
        "lag_p99": lags.p99,
        "lag_max": lags.max,
        "lag_histogram": {str(lag): num for lag, num in enumerate(lags.counts) if num},
        "num_tokens_trained": lags.num_tokens,
        "num_tokens_masked": sum(count for count, _ in stale),
        "masked_share_by_turn": [count / max(total, 1) for count, total in stale] if any(c for c, _ in stale) else [],
        "groups_trained": len(batch.groups),
        "groups_zero_variance": sum(not tells_apart(group, credit=credit) for group in taken),
        "groups_filtered": len(batch.filtered),
        "groups_dropped": len(batch.dropped),
        "turns_mean": _mean([t.num_turns for t in scored]),
        "tokens_mean": _mean([t.num_sampled_tokens for t in scored]),
    }


def ratio_at_lag0(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """The mean ratio of trainer over behaviour probability, over all tokens trained at lag 0; None without any."""
    total, ratio_sum = 0, 0.0
    for row in rows:
        if row["lag0_ratio_sum"] is not None:  # null where it was not finite
            total += int(row["num_lag0_tokens"])
            ratio_sum += float(row["lag0_ratio_sum"])
    return ratio_sum / total if total else None


def make_summary(journal: Journal, clock: RunClock, *, run_dir: Path, dropped_metrics: int) -> dict[str, Any]:
    """The content of `summary.json`, from the journal: of the lineage that stands, over all lives."""
    rows, counts, lags, rewards = journal.step_rows(), journal.counts(), journal.lags(), journal.rewards()
    tenth = max(1, math.ceil(len(rewards) / 10))
    return {
        "steps": len(rows),
        "policy_version": journal.last_step(),
        "episodes_started": counts.started,
        "episodes_finished": counts.finished,
        "episodes_trained": counts.trained,
        "reward_first_mean": _mean(rewards[:tenth]),
        "reward_last_mean": _mean(rewards[-tenth:]),
        "lag_mean": lags.mean,
        "lag_p99": lags.p99,
        "lag_max": lags.max,
        "generator_idle_fraction": clock.generator_idle_fraction,
        "trainer_idle_fraction": clock.trainer_idle_fraction,
        "tool_busy_fraction": clock.tool_busy_fraction,
        "ratio_mean_at_lag0": ratio_at_lag0(rows),
        "errors": journal.tally.errors,
        "wall_s": clock.wall_s,
        "events": journal.tally.events
        | _nonzero(groups_failed=counts.groups_failed, groups_dropped=counts.groups_dropped)
        | _nonzero(groups_filtered=counts.groups_filtered)
        | _nonzero(tasks_left_out=rows[-1].get("tasks_left_out", 0) if rows else 0)
        | _nonzero(dropped_metrics=dropped_metrics),
        "run_dir": str(run_dir),
    }


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Writes `summary` whole or not at all. Raises OSError."""
    temporary = path.with_name(path.name + ".tmp")
    text = json.dumps(plain_row(summary), indent=2, allow_nan=False)
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(path)


def reward_windows(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, int, float | None]]:
    """The run in at most ten windows of equal length: first step, last step, mean of the steps' mean rewards."""
    size = max(1, math.ceil(len(rows) / _NUM_WINDOWS))
    windows = [rows[start : start + size] for start in range(0, len(rows), size)]
    return [
        (w[0]["step"], w[-1]["step"], _mean([r["reward_mean"] for r in w if r["reward_mean"] is not None]))
        for w in windows
    ]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _nonzero(**counts: int) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}

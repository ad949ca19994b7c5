"""What the console says of a run: a line per step, or on a terminal a view that is painted anew while it goes on."""

import math
import time
from collections.abc import Sequence
from typing import Any

from driftgym.sinks import Row

_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.-=+*%#"
_CURVE_WIDTH = 40
_RECENT_STEPS = 10
_BAR_WIDTH = 24


def step_line(row: Row) -> str:
    """The step in one line: reward, lag, idle shares, and what went wrong so far.

    >>> step_line({"step": 3, "reward_mean": 0.25, "lag_mean": 1.0, "lag_max": 2, "step_s": 0.1, "wait_s": 0.0})
    'step     3  reward 0.250  lag 1.0 (max 2)  step 0.10 s  wait 0.00 s'
    """
    parts = [
        f"step {row['step']:5d}",
        f"reward {figure(row.get('reward_mean'), '.3f')}",
        f"lag {figure(row.get('lag_mean'), '.1f')} (max {row.get('lag_max', '-')})",
        f"step {figure(row.get('step_s'), '.2f')} s",
        f"wait {figure(row.get('wait_s'), '.2f')} s",
    ]
    if "generator_idle_fraction" in row:
        idle = (figure(row.get(f"{name}_idle_fraction"), ".0%") for name in ("generator", "trainer"))
        parts.append("idle generator {} trainer {}".format(*idle))
    troubles = {name: row.get(f"errors_{name}", 0) for name in ("env", "infra")}
    if any(troubles.values()):
        parts.append("errors " + " ".join(f"{name} {count}" for name, count in troubles.items()))
    return "  ".join(parts)


def figure(value: object, form: str) -> str:
    """`value` in the form `form`; a dash where there is none.

    >>> figure(0.25, ".0%"), figure(None, ".0%")
    ('25%', '-')
    """
    return format(value, form) if isinstance(value, (int, float)) and math.isfinite(value) else "-"


class Curve:
    """A series of any length in at most `width` columns, each the mean of as many of its values as the others.

    >>> curve = Curve(width=4)
    >>> for value in (0.0, 0.25, 0.5, 1.0):
    ...     curve.add(value)
    >>> curve.draw()
    '▁▃▅█'
    >>> curve.add(1.0)
    >>> curve.means()
    [0.125, 0.75, 1.0]
    """

    def __init__(self, *, width: int = _CURVE_WIDTH) -> None:
        """Empty."""
        self._width = width
        self._size = 1  # values of a column
        self._columns: list[list[float]] = []  # sum and number of each

    def add(self, value: float) -> None:
        """Goes on with `value`. When the width is full, columns are put together in pairs."""
        if self._columns and self._columns[-1][1] < self._size:
            self._columns[-1][0] += value
            self._columns[-1][1] += 1
            return
        if len(self._columns) == self._width:
            pairs = (self._columns[at : at + 2] for at in range(0, self._width, 2))
            self._columns = [[math.fsum(each) for each in zip(*pair, strict=True)] for pair in pairs]
            self._size *= 2
            self.add(value)
            return
        self._columns.append([value, 1])

    def means(self) -> list[float]:
        """Of the columns."""
        return [total / number for total, number in self._columns]

    def draw(self, bars: str = _BARS) -> str:
        """A character a column; the lowest stands for the lowest mean or 0, the highest for the highest or 1."""
        means = self.means()
        low, high = min(0.0, *means, 0.0), max(1.0, *means, 1.0)
        return "".join(bars[round((mean - low) / (high - low) * (len(bars) - 1))] for mean in means)


class LiveView:
    """The view: where the run stands, reward, lag, shares, rates, errors, and what is being waited for.

    Written by one thread and painted by another: each part of it is replaced whole.
    """

    def __init__(self, *, max_steps: int, past: Sequence[Row] = ()) -> None:
        """Shows what `past` came to, the rows of earlier lives of the run."""
        self._max_steps = max_steps
        self._curve = Curve()
        self._recent: tuple[float, ...] = ()
        self._row: Row = {}
        self._started_s = time.monotonic()
        self._shown = ("starting", self._started_s)
        for row in past:
            self.write(row)

    def write(self, row: Row) -> None:
        """The newest figures."""
        reward = row.get("reward_mean")
        if reward is not None and math.isfinite(reward):
            self._curve.add(reward)
            self._recent = (*self._recent, reward)[-_RECENT_STEPS:]
        self._row = row

    def show(self, text: str) -> None:
        """What is being done or waited for; "" takes the line away."""
        text_before, since_s = self._shown
        # What is counted in a text changes while one waits for the same thing: "3/8 finished", then "4/8 finished".
        is_same = text.partition(":")[0] == text_before.partition(":")[0]
        self._shown = (text, since_s if is_same else time.monotonic())

    def __rich_console__(self, console: Any, options: Any) -> Any:
        """The lines, as rich asks for them."""
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 2), expand=False)
        grid.add_column(no_wrap=True, overflow="crop", style="dim")
        grid.add_column(no_wrap=True, overflow="crop")
        grid.add_row("step", self._progress())
        for name, text in self.lines(bars=_ASCII_BARS if options.ascii_only else _BARS):
            grid.add_row(name, Text(text))
        yield grid

    def _progress(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        step, elapsed_s = self._row.get("step", 0), int(time.monotonic() - self._started_s)
        line = Table.grid(padding=(0, 2))
        for _ in range(3):
            line.add_column(no_wrap=True, overflow="crop")
        line.add_row(
            ProgressBar(total=max(self._max_steps, 1), completed=step, width=_BAR_WIDTH),
            Text(f"{step}/{self._max_steps}"),
            Text(f"{elapsed_s // 60}:{elapsed_s % 60:02d}"),
        )
        return line

    def lines(self, *, bars: str = _BARS) -> list[tuple[str, str]]:
        """Name and text of each line below the progress."""
        row = self._row
        lines = []
        if row:
            lines = [
                ("reward", self._reward(bars)),
                ("lag", _lag(row)),
                ("idle", _idle(row)),
                ("rates", _rates(row)),
                ("errors", _errors(row)),
            ]
        text, since_s = self._shown
        if text:
            waited_s = int(time.monotonic() - since_s)
            lines.append(("now", f"{text} ({waited_s} s)" if waited_s else text))
        return lines

    def _reward(self, bars: str) -> str:
        recent = math.fsum(self._recent) / len(self._recent) if self._recent else None
        mean = f"{figure(recent, '.3f')} over {len(self._recent)} steps"
        return f"{figure(self._row.get('reward_mean'), '.3f')}  {mean}  {self._curve.draw(bars)}"


def _count(row: Row, name: str) -> str:
    return figure(row.get(name), ",.0f")


def _lag(row: Row) -> str:
    return f"{figure(row.get('lag_mean'), '.1f')}  p99 {_count(row, 'lag_p99')}  max {_count(row, 'lag_max')}"


def _idle(row: Row) -> str:
    tools_busy = row.get("tool_busy_fraction")
    shares = {
        "generator": row.get("generator_idle_fraction"),
        "trainer": row.get("trainer_idle_fraction"),
        "tools": None if tools_busy is None else 1.0 - tools_busy,
    }
    text = "  ".join(f"{name} {figure(share, '.0%')}" for name, share in shares.items())
    return f"{text} ({figure(row.get('tools_running_mean'), '.1f')} at once)"


def _rates(row: Row) -> str:
    loop_s, trained = row.get("loop_s") or math.nan, row.get("episodes_trained", math.nan)
    return (
        f"{_count(row, 'tokens_per_s')} tokens/s  {figure(trained / loop_s, '.2f')} episodes/s  "
        f"step {figure(row.get('step_s'), '.2f')} s  wait {figure(row.get('wait_s'), '.2f')} s"
    )


def _errors(row: Row) -> str:
    counts = [f"{fault} {_count(row, f'errors_{fault}')}" for fault in ("policy", "env", "infra")]
    more = {"retried": row.get("events/infra_retries", 0), "metrics dropped": row.get("dropped_metrics", 0)}
    return "  ".join(counts + [f"{name} {count:,}" for name, count in more.items() if count])

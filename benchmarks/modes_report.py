"""Budgets, table and picture of `modes.py`, from the figures of its cells."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MARK = "<!-- table -->"
PICTURE = "modes.png"
IDLE_BUDGET = 0.1
_WINDOW = 10  # steps that a point of a curve is the mean of
_COLOURS = {"sync": "#b2182b", "one-step-off": "#e08214", "async": "#2166ac"}
_STYLES = {"drain": "-", "abort_resume": "--", "in_flight": ":"}
Row = Mapping[str, Any]

_HEADER = (
    "| mode | max_lag | weights | episodes in flight | episodes/s | generator idle | trainer idle "
    "| lag: mean, p99, max | steps | s to 0.8 |\n|---|---|---|---|---|---|---|---|---|---|"
)


def budgets_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What must hold: of the asynchronous cells the least idle, and what it had in flight."""
    cells = [row for row in rows if row["mode"] == "async" and row["generator_idle_fraction"] is not None]
    if not cells:
        return []
    best = min(cells, key=lambda row: row["generator_idle_fraction"])
    value = round(best["generator_idle_fraction"], 4)
    name = f"generator idle, async, tools of 0 to 5 s, {_episodes(best)} episodes in flight"
    return [{"name": name, "value": value, "budget": IDLE_BUDGET, "ok": value <= IDLE_BUDGET}]


def write_page(rows: Sequence[Row], *, page: Path) -> None:
    """Puts the table between the marks of `page`, and draws the picture beside it."""
    parts = page.read_text(encoding="utf-8").split(MARK)
    if len(parts) != 3:
        raise SystemExit(f"{page}: has not exactly two lines {MARK}")
    picture = f"![Reward over wall time by mode; idle generators over the episodes in flight]({PICTURE})"
    page.write_text(f"{parts[0]}{MARK}\n\n{table(rows)}\n\n{picture}\n\n{MARK}{parts[2]}", encoding="utf-8")
    draw(rows, page.with_name(PICTURE))


def table(rows: Sequence[Row]) -> str:
    """A line a cell, in Markdown."""
    return "\n".join((_HEADER, *map(_line, rows)))


def _line(row: Row) -> str:
    reached = row["seconds_to_goal"]
    cells = (
        row["mode"],
        str(row["max_lag"]),
        row["weights"],
        str(_episodes(row)),
        f"{row['episodes_per_s']:.1f}",
        f"{row['generator_idle_fraction']:.0%}",
        f"{row['trainer_idle_fraction']:.0%}",
        f"{row['lag_mean']:.1f}, {row['lag_p99']}, {row['lag_max']}",
        str(row["num_steps"]),
        "not reached" if reached is None else f"{reached:.0f}",
    )
    return f"| {' | '.join(cells)} |"


def _episodes(row: Row) -> int:
    from modes_run import GROUP_SIZE

    return int(row["in_flight"]) * GROUP_SIZE


def draw(rows: Sequence[Row], path: Path) -> None:
    """Reward over wall time of the modes; beside it, idle generators over what is in flight."""
    import matplotlib as mpl  # needed by the picture alone

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for row in rows:
        if row["mode"] == "async" and row["in_flight"] != 64:
            continue
        times, rewards = _smooth(row["points"])
        label = f"{row['mode']}, max_lag {row['max_lag']}, {row['weights']}"
        width = 2.4 if row["max_lag"] == 64 else 1.4
        left.plot(times, rewards, _STYLES[row["weights"]], color=_COLOURS[row["mode"]], label=label, linewidth=width)
    left.axhline(0.8, color="grey", linewidth=0.8)
    left.set(xlabel="seconds", ylabel=f"reward, mean of {_WINDOW} steps", ylim=(0, 1), title="Reward over wall time")
    left.set_xscale("log")
    left.legend(fontsize="xx-small", ncols=3, loc="lower right")
    swept = sorted(
        (row for row in rows if row["mode"] == "async" and row["weights"] == "in_flight" and row["max_lag"] == 64),
        key=_episodes,
    )
    right.plot([_episodes(row) for row in swept], [row["generator_idle_fraction"] for row in swept], "o-")
    right.axhline(IDLE_BUDGET, color="grey", linewidth=0.8)
    right.set(
        xlabel="episodes in flight",
        ylabel="generator idle, share of wall time",
        ylim=(0, 1),
        title="async, max_lag 64, in_flight",
    )
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _smooth(points: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """Running means over `_WINDOW` steps, at the end of the last."""
    ends = range(min(_WINDOW, len(points)), len(points) + 1)
    means = [
        (points[end - 1][0], sum(point[1] for point in points[max(0, end - _WINDOW) : end]) / min(_WINDOW, end))
        for end in ends
    ]
    return [time_s for time_s, _ in means], [reward for _, reward in means]

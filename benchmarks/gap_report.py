"""Budgets, table and picture of `gap_tolerance.py`, from the figures of its cells."""

import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from gap_cells import ALIKE_ON_POLICY, ARMS, GAPS, VARIANTS

Row = Mapping[str, Any]

MARK = "<!-- tables -->"
PICTURE = "gap-tolerance.png"
_COLOURS = {"robust": "#1b7837", "ppo": "#2166ac", "reinforce": "#b2182b", "positives only": "#e08214"}


def select(rows: Collection[Row], **wanted: Any) -> list[Row]:
    """The rows with these values, by seed."""
    found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    return sorted(found, key=lambda row: row["seed"])


def mean(rows: Sequence[Row], key: str) -> float | None:
    """The mean over seeds; None where there is no row."""
    return statistics.fmean(row[key] for row in rows) if rows else None


def steps(rows: Sequence[Row]) -> float | None:
    """The mean of the steps to 0.8; None where there is no row, or a seed that never got there."""
    reached = [row["steps_to_0.8"] for row in rows]
    return statistics.fmean(reached) if reached and None not in reached else None


def budgets_of(rows: Collection[Row]) -> list[dict[str, Any]]:
    """What must hold, as far as there are rows for it."""
    clean = {"reward": "clean", "level": "one_call"}
    budgets = []
    base = steps(select(rows, arm="robust", gap=0, **clean))
    for gap in (64, 256):
        here = select(rows, arm="robust", gap=gap, **clean)
        if here:
            budgets.append(_at_least(f"robust, clean, gap {gap}: final reward", mean(here, "final"), 0.95))
            ratio = None if base is None or steps(here) is None else steps(here) / base
            budgets.append(_at_most(f"robust, clean, gap {gap}: steps to 0.8 over those of gap 0", ratio, 1.25))
    noisy = {"reward": "noisy", "level": "one_call", "gap": 256}
    if here := select(rows, arm="robust", **noisy):
        budgets.append(_at_least("robust, noisy, gap 256: final reward", mean(here, "final"), 0.8))
    if here := select(rows, arm="reinforce", gap=64, **clean):
        budgets.append(_at_most("reinforce, clean, gap 64: final reward (it must fail)", mean(here, "final"), 0.5))
    if here := select(rows, arm="positives only", **noisy):
        budgets.append(
            _at_most("positives only, noisy, gap 256: final reward (it must fail)", mean(here, "final"), 0.5)
        )
    return budgets


def _at_least(name: str, value: float | None, budget: float) -> dict[str, Any]:
    return {"name": name, "value": _rounded(value), "budget": budget, "ok": value is not None and value >= budget}


def _at_most(name: str, value: float | None, budget: float) -> dict[str, Any]:
    return {"name": name, "value": _rounded(value), "budget": budget, "ok": value is not None and value <= budget}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def write_page(rows: Collection[Row], *, page: Path) -> None:
    """Puts the tables between the marks of `page`, and draws the picture beside it."""
    parts = page.read_text(encoding="utf-8").split(MARK)
    if len(parts) != 3:
        raise SystemExit(f"{page}: has not exactly two lines {MARK}")
    page.write_text(f"{parts[0]}{MARK}\n\n{tables(rows)}\n{MARK}{parts[2]}", encoding="utf-8")
    draw(rows, page.with_name(PICTURE))


def tables(rows: Collection[Row]) -> str:
    """The table of each reward and level that has rows, in Markdown."""
    kinds = {
        ("clean", "one_call"): "One call, clean reward",
        ("noisy", "one_call"): "One call, noisy reward",
        ("clean", "two_calls"): "Two calls, clean reward",
    }
    texts = []
    for (reward, level), title in kinds.items():
        here = select(rows, reward=reward, level=level)
        if here:
            texts.append(f"### {title}\n\n{_table(here)}")
    return "\n\n".join(texts) + "\n"


_HEADER = (
    "| objective | gap | seeds | final | best | lowest late | steps to 0.8 | area | collapsed | ESS | KL k3 |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


def _table(rows: Collection[Row]) -> str:
    lines = [_HEADER]
    for arm in (*ARMS, *VARIANTS):
        lines += [_line(arm, gap, here) for gap in GAPS if (here := _rows_of(rows, arm, gap))]
    return "\n".join(lines)


def _rows_of(rows: Collection[Row], arm: str, gap: int) -> list[Row]:
    """The cells of `arm` at `gap`, or those that stand for them where the arm has cells at all."""
    if gap == 0 and arm in ALIKE_ON_POLICY and select(rows, arm=arm):
        arm = "robust"
    return select(rows, arm=arm, gap=gap)


def _line(arm: str, gap: int, rows: Sequence[Row]) -> str:
    spread = (
        f" ({min(row['final'] for row in rows):.2f} to {max(row['final'] for row in rows):.2f})" if rows[1:] else ""
    )
    reached = [row["steps_to_0.8"] for row in rows]
    cells = [
        arm,
        str(gap),
        str(len(rows)),
        f"{mean(rows, 'final'):.2f}{spread}",
        f"{mean(rows, 'best'):.2f}",
        f"{min(row['lowest_late'] for row in rows):.2f}",
        ", ".join("never" if each is None else str(each) for each in reached),
        f"{mean(rows, 'auc'):.2f}",
        f"{sum(row['collapsed'] for row in rows)} of {len(rows)}",
        f"{statistics.fmean(row['drift']['ess'] for row in rows):.2f}",
        f"{statistics.fmean(row['drift']['kl_k3'] for row in rows):.2g}",
    ]
    return f"| {' | '.join(cells)} |"


def draw(rows: Collection[Row], path: Path) -> None:
    """The curves of seed 0 for every gap: clean above, noisy below."""
    import matplotlib as mpl  # needed by the picture alone

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(2, len(GAPS), figsize=(14, 6), sharex=True, sharey=True, layout="constrained")
    for line, reward in zip(grid, ("clean", "noisy"), strict=True):
        for axes, gap in zip(line, GAPS, strict=True):
            for arm in ARMS:
                here = select(rows, reward=reward, level="one_call", seed=0)
                for row in _rows_of(here, arm, gap):
                    axes.plot(
                        *zip(*row["curve"], strict=True),
                        label=arm,
                        color=_COLOURS.get(arm),
                        linewidth=2.2 if arm in _COLOURS else 0.9,
                        alpha=1.0 if arm in _COLOURS else 0.6,
                    )
            axes.set(title=f"gap {gap}, {reward} reward", ylim=(0, 1.02))
            axes.grid(alpha=0.3)
    for axes in grid[1]:
        axes.set_xlabel("optimizer step")
    for line in grid:
        line[0].set_ylabel("reward with current weights")
    handles = {
        label: handle for axes in grid.flat for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6)
    figure.savefig(path, dpi=110)
    plt.close(figure)

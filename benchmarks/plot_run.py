"""Draws the reward of a run over its optimizer steps.

python benchmarks/plot_run.py RUN --out docs/NAME.png --title "..."
"""

import argparse
import json
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt


def read_curve(run_dir: Path) -> tuple[list[int], list[float]]:
    """Steps, and the mean reward of the scored episodes that each trained."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["reward_mean"] is not None]
    return [row["step"] for row in rows], [row["reward_mean"] for row in rows]


def draw(run_dir: Path, out: Path, *, title: str) -> None:
    """Writes the picture to `out`."""
    steps, rewards = read_curve(run_dir)
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    axes.plot(steps, rewards, marker="o" if len(steps) <= 50 else None, color="#2a6f97")
    axes.set(xlabel="optimizer step", ylabel="mean reward", ylim=(0, 1.02), title=title)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    figure.savefig(out, dpi=120)


def main() -> None:
    """Reads the arguments and draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="The folder of a run.")
    parser.add_argument("--out", type=Path, required=True, help="The PNG to write.")
    parser.add_argument("--title", default="", help="Above the curve.")
    arguments = parser.parse_args()
    draw(arguments.run, arguments.out, title=arguments.title)


if __name__ == "__main__":
    main()

"""The modes of training against each other, with slow tools: sync, one-step-off, async; and how weights are taken.

Lookup-v0 at the quickstart's level, its model and its objective, with tools of 0 to 5 s and a heavy tail (see
slow_lookup.py). Each run ends a little after the reward of ten steps was 0.8. A cell that is in the file of results is
not run again; `--report` writes docs/modes.md and its picture from that file alone.

    python benchmarks/modes.py [--quick] [--json PATH] [--results FILE] [--only REGEX] [--report]
"""

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from modes_report import budgets_of, write_page
from modes_run import Cell, run_cell

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "modes.jsonl"
PAGE = ROOT / "docs" / "modes.md"
WEIGHTS = ("drain", "abort_resume", "in_flight")
MAX_STEPS = 300
QUICK_STEPS = {"sync": 3, "async": 60}


def full_matrix() -> list[Cell]:
    """The modes with the ways of taking weights, and then async with fewer and more groups in flight."""
    cells = [Cell(mode="sync", max_lag=0, weights="drain", in_flight=8, publish_every=1)]
    for weights in WEIGHTS:
        cells += [
            Cell(mode="one-step-off", max_lag=1, weights=weights, in_flight=16, publish_every=1),
            Cell(mode="async", max_lag=8, weights=weights, in_flight=64, publish_every=4),
            Cell(mode="async", max_lag=64, weights=weights, in_flight=64, publish_every=4),
        ]
    cells += [
        Cell(mode="async", max_lag=64, weights="in_flight", in_flight=in_flight, publish_every=4)
        for in_flight in (8, 16, 32, 128)
    ]
    return cells


def quick_matrix() -> list[Cell]:
    """The two ends."""
    wanted = ("sync/0/drain/8", "async/64/in_flight/64")
    return [cell for cell in full_matrix() if cell.name in wanted]


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """The figures of finished cells by the cell's name; of a cell that stands twice, the later."""
    if not path.is_file():
        return {}
    rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}"))
    return {row["name"]: row for row in rows}


def run(cells: Sequence[Cell], *, results: Path, is_quick: bool) -> None:
    """Runs the cells that `results` lacks, one after the other, and adds each to it as soon as it has ended."""
    missing = [cell for cell in cells if cell.name not in read_results(results)]
    if not missing:
        return
    results.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        from gap_cell import make_base  # torch is loaded for it alone

        base = Path(make_base(Path(scratch) / "base", level="one_call", seed=0).location)
        for number, cell in enumerate(missing, start=1):
            started_s = time.monotonic()
            steps = QUICK_STEPS[cell.mode] if is_quick else MAX_STEPS
            row = {"name": cell.name, **run_cell(cell, base=base, folder=Path(scratch), max_steps=steps)}
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            took_s = time.monotonic() - started_s
            print(f"[{number}/{len(missing)}, {took_s:.0f} s] {cell.name}: {in_short(row)}", flush=True)


def in_short(row: dict[str, Any]) -> str:
    """A line for people."""
    reached = row["seconds_to_goal"]
    return (
        f"{row['episodes_per_s']:.1f} episodes/s, idle generator {row['generator_idle_fraction']:.0%}, trainer "
        f"{row['trainer_idle_fraction']:.0%}, lag {row['lag_mean']:.1f}, "
        f"0.8 {'not reached' if reached is None else f'after {reached:.0f} s'} in {row['num_steps']} steps"
    )


def main(arguments: Iterable[str] | None = None) -> int:
    """Runs what is missing, prints the budgets, writes JSON and page. Returns 1 when a budget is not kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps of sync and of async")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--results", type=Path, help="finished cells: read and added to")
    parser.add_argument("--only", default="", metavar="REGEX", help="cells whose MODE/LAG/WEIGHTS/IN_FLIGHT matches")
    parser.add_argument("--report", action="store_true", help="runs nothing; writes the page from the results")
    given = parser.parse_args(None if arguments is None else list(arguments))
    with tempfile.TemporaryDirectory() as scratch:
        # A quick run measures anew, unless it is told where to go on.
        results = given.results or (Path(scratch) / "results.jsonl" if given.quick else RESULTS)
        matrix = quick_matrix() if given.quick else full_matrix()
        cells = [cell for cell in matrix if re.search(given.only, cell.name)]
        if not given.report:
            run(cells, results=results, is_quick=given.quick)
        found = read_results(results)
    rows = [found[cell.name] for cell in full_matrix() if cell.name in found]
    budgets = budgets_of(rows)
    for budget in budgets:
        print(f"{'ok  ' if budget['ok'] else 'MISS'} {budget['name']}: {budget['value']} (budget {budget['budget']})")
    if given.json:
        given.json.write_text(json.dumps({"cells": rows, "budgets": budgets}, indent=2) + "\n", encoding="utf-8")
    if given.report:
        write_page(rows, page=PAGE)
    return 0 if all(budget["ok"] for budget in budgets) else 1


if __name__ == "__main__":
    sys.exit(main())

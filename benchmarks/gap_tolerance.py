"""How each objective bears a gap between the weights that wrote the tokens and those that are trained.

The one-call level of the quickstart's task (and the level with two calls, for some): 4 prompts x 8 episodes a step, 600
steps at a learning rate of 2e-4, the behaviour weights held D optimizer steps back. A cell that is in the file of
results is not run again, so that the benchmark can be stopped and gone on with; `--report` writes the page and the
picture from that file alone.

    python benchmarks/gap_tolerance.py [--quick | --variants] [--json PATH] [--results FILE] [--workers N]
                                       [--only REGEX] [--report]
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gap_cells import Cell, chosen, full_matrix, quick_matrix, variant_matrix
from gap_report import budgets_of, write_page

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "gap_tolerance.jsonl"
PAGE = ROOT / "docs" / "gap-tolerance.md"


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """The figures of finished cells by the cell's name; of a cell that stands twice, the later."""
    if not path.is_file():
        return {}
    rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}"))
    return {row["name"]: row for row in rows}


def run(cells: Sequence[Cell], *, results: Path, workers: int) -> None:
    """Runs the cells that `results` lacks, and adds each to it as soon as it has ended."""
    missing = [cell for cell in cells if cell.name not in read_results(results)]
    if not missing:
        return
    results.parent.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"  # each worker has one core
    started_s = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ProcessPoolExecutor(workers, mp_context=context, max_tasks_per_child=1) as pool,
    ):
        bases = _make_bases(missing, folder=Path(folder), pool=pool)
        running = {pool.submit(_run, cell, bases[cell.level, cell.seed]): cell for cell in missing}
        for num, future in enumerate(concurrent.futures.as_completed(running), start=1):
            row = {"name": running[future].name, **future.result()}
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            took_s = time.monotonic() - started_s
            print(f"[{num}/{len(missing)}, {took_s:.0f} s] {row['name']}: {_in_short(row)}", flush=True)


def _make_bases(
    cells: Sequence[Cell], *, folder: Path, pool: concurrent.futures.Executor
) -> dict[tuple[str, int], Path]:
    """The weights after the warm-up, by level and seed."""
    needed = sorted({(cell.level, cell.seed) for cell in cells})
    made = {key: pool.submit(_make_base, folder / f"{key[0]}-{key[1]}", *key) for key in needed}
    return {key: future.result() for key, future in made.items()}


def _make_base(folder: Path, level: Any, seed: int) -> Path:
    from gap_cell import make_base  # torch is loaded in the workers alone

    return Path(make_base(folder, level=level, seed=seed).location)


def _run(cell: Cell, base: Path) -> dict[str, Any]:
    from gap_cell import run_cell

    return run_cell(cell, base=base)


def _in_short(row: dict[str, Any]) -> str:
    reached = row["steps_to_0.8"]
    return f"final {row['final']:.3f}, best {row['best']:.3f}, 0.8 after {reached} steps, {row['cpu_s']:.0f} s of CPU"


def main(arguments: Iterable[str] | None = None) -> int:
    """Runs what is missing, prints the budgets, writes JSON and page. Returns 1 when a budget is not kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed of the cells that the budgets are about")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--results", type=Path, help="finished cells: read and added to")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes, one core each")
    parser.add_argument("--only", default="", metavar="REGEX", help="cells whose ARM/GAP/REWARD/LEVEL/SEED matches")
    parser.add_argument("--variants", action="store_true", help="the variants of robust, in place of the objectives")
    parser.add_argument("--report", action="store_true", help="runs nothing; writes the page from the results")
    given = parser.parse_args(None if arguments is None else list(arguments))
    with tempfile.TemporaryDirectory() as scratch:
        # A quick run measures anew, unless it is told where to go on.
        results = given.results or (Path(scratch) / "results.jsonl" if given.quick else RESULTS)
        matrix = variant_matrix() if given.variants else quick_matrix() if given.quick else full_matrix()
        cells = chosen(matrix, given.only)
        if not given.report:
            run(cells, results=results, workers=given.workers)
        found = read_results(results)
        rows = {name: row for name, row in found.items() if name in {cell.name for cell in cells}}
    budgets = budgets_of(rows.values())
    for budget in budgets:
        print(f"{'ok  ' if budget['ok'] else 'MISS'} {budget['name']}: {budget['value']} (budget {budget['budget']})")
    if given.json:
        given.json.write_text(json.dumps({"cells": list(rows.values()), "budgets": budgets}, indent=2) + "\n")
    if given.report:
        write_page(found.values(), page=PAGE)
    return 0 if all(budget["ok"] for budget in budgets) else 1


if __name__ == "__main__":
    sys.exit(main())

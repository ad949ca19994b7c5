"""What a Docker box costs: commands through the toolbox, the warm pool, and boxes per second beside the engine's own.

The figures are those of `driftgym sandbox bench`; this holds them against their budgets.

    python benchmarks/sandboxes.py [--quick] [--runtime runsc] [--json PATH]
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from driftgym.errors import DriftgymError
from driftgym.sandboxes.base import SandboxSpec
from driftgym.sandboxes.bench import FULL, QUICK, measure
from driftgym.sandboxes.bench_figures import BenchFigures

EXEC_BUDGET_MS = 2.0
WARM_BUDGET_MS = 10.0
POOL_BUDGET_SHARE = 0.9


def budgets(figures: BenchFigures) -> list[dict[str, Any]]:
    """What each figure may be at most; the pool's share of the engine's rate, what it must be at least."""
    found = []
    if figures.toolbox is not None:
        exec_ms = figures.toolbox.exec_argv.p50_ms
        found.append(_budget("sandbox_toolbox_exec_p50_ms", exec_ms, EXEC_BUDGET_MS, ok=exec_ms <= EXEC_BUDGET_MS))
    warm_ms = figures.warm_acquire.p50_ms
    found.append(_budget("sandbox_warm_acquire_p50_ms", warm_ms, WARM_BUDGET_MS, ok=warm_ms <= WARM_BUDGET_MS))
    share = round(figures.rates.pool_share, 3)
    found.append(_budget("sandbox_pool_share_of_engine_rate", share, POOL_BUDGET_SHARE, ok=share >= POOL_BUDGET_SHARE))
    return found


def _budget(name: str, value: float, budget: float, *, ok: bool) -> dict[str, Any]:
    return {"name": name, "value": value, "budget": budget, "ok": ok}


def main() -> None:
    """Measures, prints, and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer calls: half a minute in the place of two")
    parser.add_argument("--runtime", help="the engine's runtime, as runsc (gVisor)")
    parser.add_argument("--json", type=Path, help="where the figures go")
    arguments = parser.parse_args()
    spec = SandboxSpec(runtime=arguments.runtime)
    plan = QUICK if arguments.quick else FULL
    try:
        figures = asyncio.run(measure(spec, plan=plan, on_progress=lambda text, share: None))
    except DriftgymError as error:
        sys.exit(f"{error}")
    found = budgets(figures)
    print(figures.describe())
    for each in found:
        print(f"{each['name']}: {each['value']} (budget {each['budget']}, {'ok' if each['ok'] else 'MISSED'})")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({**figures.as_dict(), "budgets": found}, indent=2) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()

"""driftgym beside TRL's `GRPOTrainer(environment_factory=...)`: the same model, tasks, tools, rewards and group sizes,
on the same cores one after the other, in one run.

Three latencies of the tools (see slow_lookup.py): `constant`, 0.5 s; `heavy_tail`, 0 to 5 s, the same draws on both
sides; `instant`, with which both train until the reward is 0.8. docs/trl.md says what is fair about it and what is not.

    python benchmarks/trl_side_by_side.py [--quick] [--json PATH] [--only LATENCY ...] [--trl-python PATH]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trl_settings as settings

HERE = Path(__file__).parent
GOAL = 0.8
THREADS = (1, 2)
RUN_S = 3600.0  # no part takes longer
Figures = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is run."""

    warmup_steps: int
    """Supervised, before both sides."""
    steps: Mapping[str, tuple[int, int]]
    """Optimizer steps by latency: TRL's, driftgym's. The same in a full run."""


FULL = Plan(warmup_steps=300, steps={"constant": (8, 8), "heavy_tail": (8, 8), "instant": (200, 200)})
QUICK = Plan(warmup_steps=100, steps={"constant": (1, 8), "instant": (4, 8)})


class Sides:
    """Runs either side as a process of its own, and reads its figures."""

    def __init__(self, *, scratch: Path, base: Path, trl_python: str, seed: int) -> None:
        """`base` holds the weights that both begin with."""
        self._scratch = scratch
        self._common = ["--base", str(base), "--seed", str(seed)]
        self._trl_python = trl_python

    def trl(self, latency: str, *, steps: int, threads: int) -> Figures:
        """TRL's."""
        command = [self._trl_python, "-W", "ignore", str(HERE / "trl_side.py"), "--threads", str(threads)]
        return self._run(command, latency, steps=steps)

    def driftgym(self, latency: str, *, steps: int) -> Figures:
        """driftgym's. With instant tools fewer episodes fill the generator, and newer weights write them."""
        in_flight = 16 if latency == "instant" else 64
        command = [sys.executable, str(HERE / "trl_driftgym.py"), "--in-flight", str(in_flight)]
        return self._run(command, latency, steps=steps)

    def _run(self, command: Sequence[str], latency: str, *, steps: int) -> Figures:
        out = self._scratch / "figures.json"
        arguments = [*command, *self._common, "--latency", latency, "--steps", str(steps), "--out", str(out)]
        log = self._scratch / "log.txt"
        with log.open("w", encoding="utf-8") as file:
            ended = subprocess.run(
                arguments, stdout=file, stderr=subprocess.STDOUT, env=environment(), timeout=RUN_S, check=False
            )
        if ended.returncode:
            raise SystemExit(f"{' '.join(arguments)} failed:\n{log.read_text(encoding='utf-8')[-4000:]}")
        figures: Figures = json.loads(out.read_text(encoding="utf-8"))
        return {**figures, "num_steps": steps, "seconds_to_goal": settings.seconds_to(figures["points"], GOAL)}


def environment() -> dict[str, str]:
    """Of both sides: driftgym is found also by an interpreter in which it is not installed."""
    paths = [str(HERE.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONSAFEPATH", "OMP_NUM_THREADS")}
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}


def faster_threads(sides: Sides) -> int:
    """TRL's best number of torch threads here: of each it makes two steps with instant tools."""
    rates = {threads: sides.trl("instant", steps=2, threads=threads)["episodes_per_s"] for threads in THREADS}
    return max(rates, key=lambda threads: rates[threads])


def race(plan: Plan, latencies: Sequence[str], sides: Sides) -> dict[str, Any]:
    """The figures of both sides, by latency."""
    threads = faster_threads(sides)
    print(f"TRL gets {threads} threads", flush=True)
    found: dict[str, Any] = {}
    for latency in latencies:
        trl_steps, own_steps = plan.steps[latency]
        trl = sides.trl(latency, steps=trl_steps, threads=threads)
        print(in_short("TRL", latency, trl), flush=True)
        own = sides.driftgym(latency, steps=own_steps)
        print(in_short("driftgym", latency, own), flush=True)
        found[latency] = {
            "trl": {**trl, "threads": threads},
            "driftgym": own,
            "episodes_per_s_ratio": own["episodes_per_s"] / trl["episodes_per_s"],
        }
    return found


def in_short(side: str, latency: str, figures: Figures) -> str:
    """A line for people."""
    reached = figures["seconds_to_goal"]
    return (
        f"{latency:<10} {side:<8} {figures['episodes_per_s']:7.2f} episodes/s ({figures['num_episodes']} episodes), "
        f"generator idle {figures['generator_idle_fraction']:.0%}, "
        f"reward {GOAL} {'not reached' if reached is None else f'after {reached:.0f} s'}"
    )


def budgets_of(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What must hold, of the latencies that were run."""
    wanted = (("constant", "0.5 s tools", 20.0), ("instant", "instant tools", 1.5))
    return [
        {
            "name": f"episodes per second over TRL's, {text}",
            "value": round(found[latency]["episodes_per_s_ratio"], 2),
            "budget": budget,
            "ok": found[latency]["episodes_per_s_ratio"] >= budget,
        }
        for latency, text, budget in wanted
        if latency in found
    ]


def make_base(folder: Path, *, num_steps: int, seed: int, python: str) -> Path:
    """The weights that both begin with, made in TRL's interpreter, which has the chat template."""
    command = [python, "-W", "ignore", str(HERE / "trl_model.py"), str(folder), "--steps", str(num_steps)]
    ended = subprocess.run(
        [*command, "--seed", str(seed)],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    if ended.returncode:
        raise SystemExit("the model could not be made")
    return Path(ended.stdout.strip().splitlines()[-1])


def main(arguments: Iterable[str] | None = None) -> int:
    """Runs both sides, prints the budgets, writes JSON. Returns 1 when a budget is not kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps, no heavy tail")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--only", nargs="+", choices=sorted(FULL.steps), help="these latencies")
    parser.add_argument("--trl-python", default=sys.executable, metavar="PATH", help="an interpreter that has TRL")
    parser.add_argument("--base", type=Path, help="a model folder made before, in the place of a new one")
    parser.add_argument("--seed", type=int, default=0, help="of weights, tasks and sampling")
    given = parser.parse_args(None if arguments is None else list(arguments))
    plan = QUICK if given.quick else FULL
    latencies = [name for name in plan.steps if given.only is None or name in given.only]
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        base = given.base or make_base(
            Path(folder) / "base", num_steps=plan.warmup_steps, seed=given.seed, python=given.trl_python
        )
        print(f"the model is made, {time.monotonic() - started:.0f} s", flush=True)
        sides = Sides(scratch=Path(folder), base=base, trl_python=given.trl_python, seed=given.seed)
        found = race(plan, latencies, sides)
    budgets = budgets_of(found)
    for budget in budgets:
        print(f"{'ok  ' if budget['ok'] else 'MISS'} {budget['name']}: {budget['value']} (budget {budget['budget']})")
    if given.json:
        given.json.write_text(json.dumps({**found, "budgets": budgets}, indent=2) + "\n", encoding="utf-8")
    return 0 if all(budget["ok"] for budget in budgets) else 1


if __name__ == "__main__":
    sys.exit(main())

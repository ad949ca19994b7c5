"""A run that is killed again and again, and what becomes of it.

A small `driftgym train` of the quickstart's model is killed by `kill -9` at twenty moments, drawn by a seed: the run's
own process, its generator, its learner, or all of its processes at once; while it starts, at a random time, while a
checkpoint or weights are being written, at a commit of the journal, while it closes, and after its last step. Each
time it goes on by `train --resume`, until it ends. Then its files are asked (`kill_checks.py`): was each member of each
group trained exactly once, as it was played; was the lag bound kept; are versions, lives and rows of metrics in order;
is anything left behind; and does training the same again give the same weights.

The final reward is `reward_last_mean` of the summary, of the last tenth of the episodes. That of the killed run must
lie in the 95 % prediction interval of undisturbed runs of other seeds: their mean, plus or minus t·s·sqrt(1 + 1/n).
All begin with the weights of one supervised warm-up.

    python benchmarks/kills.py [--quick] [--json PATH] [--seed N] [--undisturbed N] [--phases start,close]
"""

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kill_checks import Evidence, budget, checks, damage_checks, replay
from kill_run import CONFIG, ROOT, Kill, KilledRun, Moment, Phase, Target

PHASES: Mapping[Target, Sequence[Phase]] = {
    "trainer": ("start", "any", "checkpoint", "weights", "journal", "close"),
    "everything": ("start", "any", "checkpoint", "weights", "journal", "end"),
    "generator": ("start", "any", "weights", "close"),
    "learner": ("start", "any", "checkpoint", "weights"),
}
QUICK_PHASES: Mapping[Target, Sequence[Phase]] = {
    "learner": ("weights",),
    "trainer": ("checkpoint",),
    "generator": ("any",),
    "everything": ("any",),
}
TRIES = 3
STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""By number of runs: the 97.5 % quantile of Student's t."""
RUN = (
    *("warmup.num_steps=0", "trainer.groups_per_step=4", "trainer.group_size=8", "trainer.max_in_flight_groups=8"),
    *("trainer.max_lag=4", "trainer.publish_every_steps=1", "trainer.checkpoint_every_steps=2"),
    *("learner.optimizer.learning_rate=1e-3", "learner.optimizer.decay_steps=null"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is done."""

    phases: Mapping[Target, Sequence[Phase]]
    num_undisturbed: int
    warmup: Sequence[str]

    @property
    def num_kills(self) -> int:
        """In all."""
        return sum(map(len, self.phases.values()))

    @property
    def max_steps(self) -> int:
        """So many that the run is not over before the last kill: each may have two steps waited for and done again."""
        return 4 * self.num_kills


FULL = Plan(phases=PHASES, num_undisturbed=5, warmup=("warmup.num_steps=300",))
QUICK = Plan(
    phases=QUICK_PHASES,
    num_undisturbed=0,
    warmup=("warmup.num_steps=150", "demonstrations.num_episodes=600"),
)


def moments(phases: Mapping[Target, Sequence[Phase]], *, seed: int) -> list[Moment]:
    """In random order, but for the one after the last step, which is the last."""
    draw = random.Random(seed)
    kinds = [(target, phase) for target, names in phases.items() for phase in names]
    draw.shuffle(kinds)
    kinds.sort(key=lambda kind: kind[1] == "end")
    return [
        Moment(target=target, phase=phase, num_steps=draw.randint(0, 2), share=draw.random()) for target, phase in kinds
    ]


class Bench:
    """The runs, in one folder."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder = folder
        self._plan = plan
        self._temporary = folder / "tmp"
        self._temporary.mkdir(parents=True)

    @property
    def env(self) -> dict[str, str]:
        """For all runs."""
        return {"OMP_NUM_THREADS": "1", "TMPDIR": str(self._temporary)}

    @property
    def num_temporary(self) -> int:
        """Folders of boxes whose toolbox was killed with everything else."""
        return len(os.listdir(self._temporary))

    def warm_up(self) -> Path:
        """The model that all begin with."""
        self._train("base", *RUN, *self._plan.warmup, "trainer.max_steps=1", "trainer.checkpoint_every_steps=1")
        return self._folder / "base" / "weights" / "1-0"

    def undisturbed(self, model: Path, seed: int) -> float:
        """The final reward of a run that nobody disturbs."""
        name = f"undisturbed-{seed}"
        self._train(name, *run_of(model, seed=seed), f"trainer.max_steps={self._plan.max_steps}")
        summary = json.loads((self._folder / name / "summary.json").read_text(encoding="utf-8"))
        return float(summary["reward_last_mean"])

    def _train(self, name: str, *overrides: str) -> None:
        words = [CONFIG, *overrides, f"run_dir={self._folder / name}"]
        env = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"} | self.env
        with (self._folder / f"{name}.log").open("wb") as log:
            subprocess.run(
                [sys.executable, "-P", "-m", "driftgym.cli", "train", *words],
                cwd=ROOT,
                env=env,
                stdout=log,
                stderr=subprocess.STDOUT,
                check=True,
            )

    def killed(self, model: Path, *, seed: int) -> tuple[KilledRun, list[Kill]]:
        """The run that is killed, and its kills. A moment that did not come is tried again, a little earlier."""
        run = KilledRun(
            self._folder / "killed",
            run_of(model, seed=0),
            max_steps=self._plan.max_steps,
            log=self._folder / "killed.log",
            env=self.env,
        )
        kills: list[Kill] = []
        try:
            for moment in moments(self._plan.phases, seed=seed):
                kills += struck(run, moment)
            for _ in range(TRIES):
                if run.finish():
                    break
        finally:
            run.close()
        return run, kills


def run_of(model: Path, *, seed: int) -> tuple[str, ...]:
    """The overrides of a run that begins with `model`."""
    return (*RUN, f"model.path={model}", "model.init=pretrained", f"seed={seed}")


def struck(run: KilledRun, moment: Moment) -> list[Kill]:
    """The kill, if its moment came in one of several tries."""
    for attempt in range(TRIES):
        earlier = Moment(
            target=moment.target, phase=moment.phase, num_steps=moment.num_steps, share=moment.share / 2**attempt
        )
        if (kill := run.strike(earlier)) is not None:
            print(line_of(kill), flush=True)
            return [kill]
    print(f"{moment.target:10} {moment.phase:10} the run was over before it came", flush=True)
    return []


def line_of(kill: Kill) -> str:
    """For people."""
    end = "the run went on" if kill.exit_code is None else f"exit code {kill.exit_code}"
    half = ", ".join(kill.half_written[:3])
    moment = kill.moment
    return f"{moment.target:10} {moment.phase:10} step {kill.step:3}  {end:16} {half}"


def reward_budget(reward: float, undisturbed: Sequence[float]) -> dict[str, Any]:
    """How far the reward is from the mean of the undisturbed runs, against the half width of the interval."""
    num = len(undisturbed)
    half_width = STUDENT_T[num] * statistics.stdev(undisturbed) * math.sqrt(1 + 1 / num)
    return budget(
        "distance of the final reward from the mean of undisturbed runs",
        abs(reward - statistics.fmean(undisturbed)),
        half_width,
    )


def measure(folder: Path, plan: Plan, *, seed: int, model: Path | None) -> dict[str, Any]:
    """Everything."""
    started = time.monotonic()
    bench = Bench(folder, plan)
    model = bench.warm_up() if model is None else model.resolve()
    run, kills = bench.killed(model, seed=seed)
    evidence = Evidence.of(run.run_dir)
    summary = json.loads((run.run_dir / "summary.json").read_text(encoding="utf-8"))
    budgets = [
        budget("kills that did not come about", plan.num_kills - len(kills)),
        budget("exit codes that no kill explains", len(run.strange)),
        budget("processes and locks left behind", len(run.left)),
        *checks(evidence),
        *replay(evidence),
        *damage_checks(run.run_dir, folder / "damaged"),
    ]
    killed_s = time.monotonic() - started
    rewards = [bench.undisturbed(model, seed=1 + index) for index in range(plan.num_undisturbed)]
    if len(rewards) > 1:
        budgets.append(reward_budget(summary["reward_last_mean"], rewards))
    return {
        "kills": [kill_figures(kill) for kill in kills],
        "figures": {
            "lives": run.num_lives,
            "steps": summary["steps"],
            "steps_lost": lost_steps(run.run_dir),
            "reward_first_mean": summary["reward_first_mean"],
            "reward_last_mean": summary["reward_last_mean"],
            "reward_last_mean_undisturbed": rewards,
            "kills_by_exit_code": dict(Counter(str(kill.exit_code) for kill in kills)),
            "half_written": dict(Counter(name for kill in kills for name in half_kinds(kill))),
            "temporary_folders_left": bench.num_temporary,
            "strange": run.strange,
            "left": run.left,
            "killed_run_s": killed_s,
            "wall_s": time.monotonic() - started,
        },
        "budgets": budgets,
    }


def kill_figures(kill: Kill) -> dict[str, Any]:
    """For the JSON."""
    return {
        "target": kill.moment.target,
        "phase": kill.moment.phase,
        "step": kill.step,
        "exit_code": kill.exit_code,
        "half_written": kill.half_written,
    }


def half_kinds(kill: Kill) -> set[str]:
    """The folders in which something lay half written."""
    return {name.partition("/")[0] for name in kill.half_written}


def lost_steps(run_dir: Path) -> int:
    """Steps that were done, and then done again."""
    path = run_dir / "metrics.lost.jsonl"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def plan_of(arguments: argparse.Namespace) -> Plan:
    """What was asked for."""
    plan = QUICK if arguments.quick else FULL
    chosen = arguments.phases.split(",") if arguments.phases else None
    phases = {target: [p for p in names if chosen is None or p in chosen] for target, names in plan.phases.items()}
    num = plan.num_undisturbed if arguments.undisturbed is None else arguments.undisturbed
    return Plan(phases=phases, num_undisturbed=num, warmup=plan.warmup)


def main() -> None:
    """Measures, prints, and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one kill of each kind, no undisturbed runs")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--seed", type=int, default=0, help="draws the moments")
    parser.add_argument("--undisturbed", type=int, help="how many runs the final reward is compared with")
    parser.add_argument("--phases", help="only kills at these moments, as start,close")
    parser.add_argument("--model", type=Path, help="weights to begin with, in the place of a warm-up's")
    parser.add_argument("--folder", type=Path, help="where the runs are kept; not there yet")
    arguments = parser.parse_args()
    plan = plan_of(arguments)
    with tempfile.TemporaryDirectory(prefix="driftgym-kills-") as temporary:
        folder = (arguments.folder or Path(temporary) / "runs").resolve()
        folder.mkdir(parents=True)
        result = measure(folder, plan, seed=arguments.seed, model=arguments.model)
    print(json.dumps(result["figures"], indent=1))
    for line in result["budgets"]:
        print(
            f"{'ok    ' if line['ok'] else 'BROKEN'} {line['name']}: {line['value']:.6g} (at most {line['budget']:.6g})"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

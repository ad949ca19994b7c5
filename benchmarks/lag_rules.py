"""What each lag rule costs, in real runs: agent, pool, slots, producer, buffer, journal and `Trainer` as they are.

Scripted are the engine, the tool (it sleeps) and the learner (it sleeps, and keeps what it is given). Two tables:

- `wait`, `mask` and `drop` with lognormal and Pareto episode times, a long episode having many tokens: the largest lag
  that was trained, token by token, against the bound; trained over generated length; what is idle, masked, dropped.
- the cases of `throughput_vectors.json` that such a loop can be brought into, beside their closed forms and the
  figures of a simulation. Times are in the case's own unit.

    python benchmarks/lag_rules.py [--quick] [--json PATH] [--only TEXT]
"""

import argparse
import asyncio
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from driftgym.trainer.scripted_rollouts import paced_config
from driftgym.trainer.scripted_runs import Float64Array, PacedRun, PacedSetup, play_paced

HERE = Path(__file__).parent
MODEL = HERE.parent / "configs" / "models" / "tiny-qwen3"
VECTORS = HERE / "throughput_vectors.json"
NUM_TASKS = 20_000
OF_DRAWS = " of the draws"  # after a figure's name: the closed form's value for the times that were drawn
ENDINGS = ("", "_upper_bound", "_if_saturated")  # of names among the closed forms
UNBOUNDED = 10_000  # a lag that no run here reaches


def exponential(mean: float, *, seed: int = 0) -> Float64Array:
    """Exponential times of that mean."""
    return np.random.default_rng(seed).exponential(mean, NUM_TASKS)


def lognormal(mean: float, *, clip: float) -> Float64Array:
    """Lognormal times with sigma 1, of that mean before those above `clip` are cut to it."""
    return np.minimum(np.random.default_rng(0).lognormal(np.log(mean) - 0.5, 1.0, NUM_TASKS), clip)


def pareto(alpha: float, *, scale: float = 1.0, clip: float) -> Float64Array:
    """Pareto times from `scale` on; those above `clip` are cut to it."""
    return np.minimum(scale * (1.0 + np.random.default_rng(0).pareto(alpha, NUM_TASKS)), clip)


def rule_setups(*, is_quick: bool) -> Iterator[PacedSetup]:
    """Each rule with each kind of time: 32 in flight, 4 a step, a step of 0.1 units; a mean of 1 unit an episode."""
    num_steps, unit_s = (48, 0.25) if is_quick else (240, 0.5)
    kinds = {"lognormal": lognormal(1.0, clip=20.0), "Pareto": pareto(1.5, scale=0.37, clip=20.0)}
    for bound, (kind, times), on_lag in itertools.product(
        (8,) if is_quick else (8, 32, 128), kinds.items(), ("wait", "mask", "drop")
    ):
        trainer = {"on_lag": on_lag, "max_lag": bound, "groups_per_step": 4, "max_in_flight_groups": 32}
        yield PacedSetup(
            name=f"{on_lag}, {kind}, D = {bound}",
            times=times,
            trainer=trainer | {"max_steps": num_steps},
            steps=0.1,
            unit_s=unit_s,
            turn=0.25,
            generation_share=0.1,
            tokens_per_unit=16,
            skip=(8, 8),
        )


def rule_figures(run: PacedRun) -> dict[str, float]:
    """A line of the first table."""
    trained, offered = run.trained(), run.consumed()
    num_masked, num_trained = run.total("num_tokens_masked"), run.total("num_tokens_trained")
    return {
        "largest lag": run.max_lag,
        "mean lag": run.mean_lag,
        "trained/generated length": trained.num_tokens.mean() / offered.num_tokens.mean(),
        "tokens masked": num_masked / (num_masked + num_trained),
        "groups dropped": 1.0 - len(trained) / len(offered),
        "trainer idle": run.trainer_idle,
        "engine idle": run.engine_idle,
        "slots idle": run.slots_idle,
        "groups a unit": run.throughput,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A case of `throughput_vectors.json` as a run; `setup.name` is its id there.

    >>> Case(setup=PacedSetup(name="c", times=exponential(1.0), trainer={}), figures=lambda run: {}).note
    ''
    """

    setup: PacedSetup
    """The run."""
    figures: Callable[[PacedRun], Mapping[str, float]]
    """What was measured, by the names there."""
    note: str = ""
    """Where the loop is not what the closed form describes."""


def sync_case(name: str, times: Float64Array, *, size: int, max_steps: int, **options: Any) -> Case:
    """Each step waits for all episodes that it began."""

    def figures(run: PacedRun) -> dict[str, float]:
        waits = np.array([row["wait_s"] for row in run.rows]) / run.setup.unit_s
        used = float(run.lengths(run.trained()).sum() / (waits.sum() * run.setup.num_places))
        mean = float(waits.mean())
        measured = {"E_max": mean, "E_T": mean, "gen_slot_utilisation": used, "bubble_fraction": 1.0 - used}
        if run.setup.num_slots:
            return measured
        drawn = times[: size * max_steps].reshape(max_steps, size)
        longest = float(drawn.max(axis=1).mean())
        used = float(drawn.mean()) / longest
        of_draws = {"E_max": longest, "gen_slot_utilisation": used, "bubble_fraction": 1.0 - used}
        return measured | {name + OF_DRAWS: value for name, value in of_draws.items()}

    trainer = {"mode": "sync", "max_lag": 0, "groups_per_step": size, "max_in_flight_groups": size}
    return Case(
        setup=PacedSetup(name=name, times=times, trainer=trainer | {"max_steps": max_steps}, **options), figures=figures
    )


def capacity_case(kind: str, times: Float64Array, *, bound: int, max_steps: int = 40, unit_s: float = 0.5) -> Case:
    """As many groups as `wait` admits."""
    trainer = {"max_lag": bound, "groups_per_step": 32, "max_in_flight_groups": 32 * (bound + 1)}
    return Case(
        setup=PacedSetup(
            name=f"areal_cap_{kind}_eta{bound}",
            times=times,
            trainer=trainer | {"max_steps": max_steps},
            steps=1.0,
            unit_s=unit_s,
            skip=(4, bound + 1),
        ),
        figures=lambda run: {
            "throughput": run.throughput,
            "trainer_idle": run.trainer_idle,
            "mean_staleness": run.staleness.mean(),
            "max_staleness": run.staleness.max(),
        },
        note="the same admission; `wait` also keeps each group within the bound, which the simulated rule does not",
    )


def one_step_off_case() -> Case:
    """A bound of 1, steps that take about as long as their episodes."""
    times, longest = exponential(1.0), exponential(1.0)[: 24 * 64].reshape(24, 64).max(axis=1)
    step_of_draws = float(np.maximum(longest, 4.0)[2:-2].mean())
    trainer = {"max_lag": 1, "groups_per_step": 64, "max_in_flight_groups": 128, "max_steps": 24}
    return Case(
        setup=PacedSetup(
            name="one_step_off_exp_B64_Tt4",
            times=times,
            trainer=trainer,
            steps=4.0,
            unit_s=0.25,
            num_slots=64,
            skip=(2, 2),
        ),
        figures=lambda run: {
            "E_step": 64 / run.throughput,
            "E_step" + OF_DRAWS: step_of_draws,
            "trainer_idle": run.trainer_idle,
            "gen_slot_idle": run.slots_idle,
        },
        note="a batch begins with its weights, also before the one ahead of it has ended",
    )


def closed_net_case(num: int, *, max_steps: int) -> Case:
    """Single groups, trained one by one."""
    trainer = {"on_lag": "mask", "max_lag": UNBOUNDED, "groups_per_step": 1, "max_in_flight_groups": num - 1}
    return Case(
        setup=PacedSetup(
            name=f"closed_net_n{num}",
            times=exponential(1.0),
            trainer=trainer | {"max_steps": max_steps},
            steps=exponential(1 / 16, seed=1),
            unit_s=1.0,
            skip=(20, num),
        ),
        figures=lambda run: {"trainer_util": 1.0 - run.trainer_idle, "throughput": run.throughput},
        note="the group in training is not in flight: n - 1 are, also while the trainer is idle",
    )


def slots_case() -> Case:
    """Fewer slots than the trainer could use."""
    trainer = {"on_lag": "mask", "max_lag": 50, "groups_per_step": 32, "max_in_flight_groups": 160, "max_steps": 50}
    return Case(
        setup=PacedSetup(
            name="slots_limited_C48",
            times=exponential(2.0),
            trainer=trainer,
            steps=1.0,
            num_slots=48,
            skip=(4, 6),
        ),
        figures=lambda run: {
            "throughput": run.throughput,
            "trainer_idle": run.trainer_idle,
            "mean_staleness": run.staleness.mean(),
            "gen_slot_idle": run.slots_idle,
        },
    )


def discard_case(*, max_steps: int) -> Case:
    """`drop`, with nothing but their own length to make groups too old."""

    def figures(run: PacedRun) -> dict[str, float]:
        kept, finished = run.lengths(run.trained()), run.lengths(run.consumed())
        return {
            "kept_frac": len(kept) / len(finished),
            "mean_kept_len": kept.mean(),
            "wasted_gen_frac": 1.0 - kept.sum() / finished.sum(),
        }

    trainer = {"on_lag": "drop", "max_lag": 4, "groups_per_step": 32, "max_in_flight_groups": 144}
    return Case(
        setup=PacedSetup(
            name="discard_bias_exp_mu2_D4",
            times=exponential(2.0),
            trainer=trainer | {"max_steps": max_steps},
            steps=0.001,
            num_slots=72,
            skip=(8, 6),
        ),
        figures=figures,
        note="72 slots and instant steps: about 32 kept groups, hence one version, a unit, and no queue",
    )


def token_lag_case(kind: str, times: Float64Array) -> Case:
    """Versions that pass between a token, or its episode's first one, and the episode's end; means over tokens."""

    def figures(run: PacedRun) -> dict[str, float]:
        ends = run.step_began_at + np.array([row["step_s"] for row in run.result.rows])
        trained = run.trained()
        version = np.searchsorted(ends, trained.ended_at)
        queued = np.average(trained.step - 1 - version, weights=trained.num_tokens)
        snapshot = np.average(version - trained.oldest_version, weights=trained.num_tokens)
        lengths = run.setup.times[: len(run.episodes)][run.episodes.is_trained]
        of_draws = float((lengths**2).sum() / lengths.sum())
        return {
            "snapshot": float(snapshot),
            "inflight": run.mean_lag - float(queued),
            "snapshot" + OF_DRAWS: of_draws,
            "inflight" + OF_DRAWS: of_draws / 2,
        }

    trainer = {"on_lag": "mask", "max_lag": UNBOUNDED, "groups_per_step": 8, "max_in_flight_groups": 40}
    return Case(
        setup=PacedSetup(
            name=f"token_lag_{kind}",
            times=times,
            trainer=trainer | {"max_steps": 80},
            steps=1.0,
            num_slots=20,
            turn=0.5,
            generation_share=0.9,
            tokens_per_unit=8,
            skip=(8, 6),
        ),
        figures=figures,
        note="without the time in the queue; these means hang on the few longest episodes",
    )


def first_of_case() -> Case:
    """The first half of what is in flight makes the first step."""
    trainer = {"max_lag": 1, "groups_per_step": 32, "max_in_flight_groups": 64, "max_steps": 2}
    return Case(
        setup=PacedSetup(name="first_B_of_n_exp", times=exponential(1.0), trainer=trainer, unit_s=2.0, skip=(0, 1)),
        figures=lambda run: {"E_T": run.rows[0]["wait_s"] / run.setup.unit_s},
        note="a single step: its standard error is 0.12",
    )


def cases(*, is_quick: bool) -> list[Case]:
    """What can be set up. Not: processor sharing (the scripted engine writes each answer at its own pace), the split of
    accelerators (a calculation), draining whole episodes (a pool drains requests), 512 at once with one slot each."""
    if is_quick:
        return [
            sync_case("sync_exp_B8", exponential(1.0), size=8, max_steps=20, unit_s=0.2),
            capacity_case("exp", exponential(2.0), bound=4, max_steps=20, unit_s=0.2),
            discard_case(max_steps=30),
        ]
    long = lognormal(2.0, clip=1000.0)
    return [
        sync_case("sync_exp_B8", exponential(1.0), size=8, max_steps=80, unit_s=0.2),
        sync_case("sync_exp_B64", exponential(1.0), size=64, max_steps=25, unit_s=0.4),
        sync_case("sync_pareto2.5_B64", pareto(2.5, clip=1000.0), size=64, max_steps=25, unit_s=0.25),
        sync_case("sync_lognormal_s1_clip8_B64", lognormal(1.0, clip=8.0), size=64, max_steps=20, unit_s=0.4),
        sync_case("sync_exp_list_B512_K64", exponential(1.0), size=512, max_steps=3, num_slots=64),
        first_of_case(),
        one_step_off_case(),
        closed_net_case(16, max_steps=400),
        closed_net_case(32, max_steps=400),
        capacity_case("exp", exponential(2.0), bound=0, max_steps=16),
        *(capacity_case("exp", exponential(2.0), bound=bound) for bound in (1, 2, 4)),
        *(capacity_case("logn1", long, bound=bound) for bound in (1, 2, 4)),
        slots_case(),
        token_lag_case("exp", exponential(2.0)),
        token_lag_case("logn1", long),
        discard_case(max_steps=80),
    ]


def play(setup: PacedSetup) -> PacedRun:
    """Plays it in a folder that is removed."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(play_paced(setup, Path(folder) / "run", model=MODEL))


def budgets_of(run: PacedRun) -> list[dict[str, Any]]:
    """No token above the bound; and none trained or left out that the records do not say so of."""
    name, bound, num = run.setup.name, run.setup.max_lag, run.num_unexplained
    return [
        {"name": f"max_lag <= bound: {name}", "value": run.max_lag, "budget": bound, "ok": run.max_lag <= bound},
        {"name": f"tokens at odds with the records: {name}", "value": num, "budget": 0, "ok": num == 0},
    ]


def print_rules(figures: Mapping[str, Mapping[str, float]]) -> None:
    """The first table, in Markdown."""
    names = list(next(iter(figures.values())))
    print("| rule |", " | ".join(names), "|")
    print("|" + "---|" * (len(names) + 1))
    for name, row in figures.items():
        print(f"| {name} |", " | ".join(f"{row[key]:.3g}" for key in names), "|", flush=True)


def compared(case: Case, measured: Mapping[str, float], vectors: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each measured figure that the case of the vectors has, beside what is there."""
    vector = vectors[case.setup.name]
    closed, simulated = vector["closed_form"], vector["simulated"]
    return [
        {
            "figure": name,
            "measured": float(value),
            "of_draws": measured.get(name + OF_DRAWS),
            "closed_form": next((closed[each] for each in (name + end for end in ENDINGS) if each in closed), None),
            "simulated": simulated.get(name),
        }
        for name, value in measured.items()
        if name in closed or name in simulated
    ]


def print_case(case: Case, lines: Sequence[Mapping[str, Any]]) -> None:
    """Its lines of the second table, in Markdown."""
    for line in lines:
        shown = [line[key] for key in ("measured", "of_draws", "closed_form", "simulated")]
        cells = " | ".join("" if value is None else f"{value:.3g}" for value in shown)
        print(f"| {case.setup.name} | {line['figure']} | {cells} | {case.note} |", flush=True)


def main() -> None:
    """Measures, prints, and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short runs, one bound, three cases: two minutes at most")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--only", default="", help="only runs whose name contains this")
    arguments = parser.parse_args()
    vectors = {case["id"]: case for case in json.loads(VECTORS.read_text(encoding="utf-8"))["cases"]}
    for setup in (*rule_setups(is_quick=arguments.quick), *(case.setup for case in cases(is_quick=arguments.quick))):
        paced_config(Path("run"), setup.trainer)  # what is wrong with one is found before minutes of others
    rules: dict[str, dict[str, float]] = {}
    budgets: list[dict[str, Any]] = []
    for setup in rule_setups(is_quick=arguments.quick):
        if arguments.only in setup.name:
            run = play(setup)
            rules[setup.name] = {name: float(value) for name, value in rule_figures(run).items()}
            budgets += budgets_of(run)
    if rules:
        print_rules(rules)
    print("\n| case | figure | measured | closed form of the draws | closed form | simulated | |")
    print("|---|---|---|---|---|---|---|")
    lines: dict[str, Any] = {}
    for case in cases(is_quick=arguments.quick):
        if arguments.only in case.setup.name:
            run = play(case.setup)
            lines[case.setup.name] = compared(case, case.figures(run), vectors)
            budgets += budgets_of(run)
            print_case(case, lines[case.setup.name])
    broken = [budget["name"] for budget in budgets if not budget["ok"]]
    print(f"\n{len(budgets)} budgets, {len(broken)} broken {broken or ''}")
    if arguments.json:
        figures = {"rules": rules, "cases": lines, "budgets": budgets}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""driftgym's side of `trl_side_by_side.py`, in a process of its own: an asynchronous run, as `driftgym train` does it.

Learner and generator are processes of their own, with one thread each. Only the boxes are left out, since TRL has none:
the tools are functions in this process.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import trl_settings as settings
from trl_env import ENV_ID, NUM_PEOPLE

from driftgym.envs.lookup.scripted import ScriptedLookupProvider
from driftgym.trainer.parts import prepare, start_parts
from driftgym.trainer.run import live
from driftgym.trainer.run_config import RunConfig, make_run_dir
from driftgym.trainer.stop import Stop


def config_of(base: Path, given: argparse.Namespace, *, run_dir: Path) -> RunConfig:
    """The run."""
    max_context_tokens = 256
    return RunConfig.model_validate(
        {
            "name": "trl-side-by-side",
            "seed": given.seed,
            "run_dir": str(run_dir),
            "model": {"path": str(base)},
            "env": {"id": ENV_ID, "kwargs": {"latency": given.latency, "num_people": NUM_PEOPLE}},
            "sandbox": {"kind": "process", "pool": {"max_boxes": given.in_flight * settings.GROUP_SIZE}},
            "agent": {
                "renderer": "template",
                "max_tokens_per_turn": settings.MAX_TOKENS_PER_TURN,
                "max_context_tokens": max_context_tokens,
            },
            "rollout": {"max_turns": settings.MAX_TURNS},
            "generator": {
                "max_batch_size": given.in_flight * settings.GROUP_SIZE,
                "max_context_tokens": max_context_tokens,
            },
            "learner": {
                "objective": {"name": "ppo"},
                "optimizer": {"learning_rate": settings.LEARNING_RATE, "betas": settings.BETAS},
                "micro_batch_tokens": 16384,
            },
            "trainer": {
                "max_steps": given.steps,
                "groups_per_step": settings.GROUPS_PER_STEP,
                "group_size": settings.GROUP_SIZE,
                "max_lag": 8,
                "max_in_flight_groups": given.in_flight,
                "publish_every_steps": given.publish_every,
                "checkpoint_every_steps": given.steps,
            },
        }
    )


async def train(base: Path, given: argparse.Namespace, *, run_dir: Path) -> dict[str, Any]:
    """Trains `given.steps` steps from the weights in `base`."""
    config = config_of(base, given, run_dir=run_dir)
    async with contextlib.AsyncExitStack() as stack:
        prepared = await prepare(config, stack, say=print)
        prepared = dataclasses.replace(prepared, sandboxes=ScriptedLookupProvider())
        result = await live(config, make_run_dir(config), stop=Stop(), start=functools.partial(start_parts, prepared))
    rows = result.rows
    num_episodes = result.summary["episodes_trained"]
    return {
        "num_episodes": num_episodes,
        "wall_s": rows[-1]["loop_s"],
        "episodes_per_s": num_episodes / rows[-1]["loop_s"],
        "generator_idle_fraction": result.summary["generator_idle_fraction"],
        "trainer_idle_fraction": result.summary["trainer_idle_fraction"],
        "lag_mean": result.summary["lag_mean"],
        "lag_max": result.summary["lag_max"],
        "errors": result.summary["errors"],
        "points": [(row["loop_s"], row["reward_mean"] or 0.0) for row in rows],
    }


def main() -> int:
    """Trains and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, required=True, help="the weights to begin with")
    parser.add_argument("--latency", required=True, help="of the tools, see slow_lookup.py")
    parser.add_argument("--steps", type=int, required=True, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0, help="of tasks and sampling")
    parser.add_argument("--in-flight", type=int, default=32, help="groups in flight")
    parser.add_argument("--publish-every", type=int, default=4, help="steps between two publications")
    parser.add_argument("--out", type=Path, required=True, help="where the figures go")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        figures = asyncio.run(train(given.base, given, run_dir=Path(scratch) / "run"))
    given.out.write_text(json.dumps(figures) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

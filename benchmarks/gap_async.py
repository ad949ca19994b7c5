"""A cell of `gap_tolerance.py` through the real asynchronous path: `Trainer` with producer, buffer and journal, the
learner and an embedded server as processes of their own, HTTP between them. The server gets each publication D
publications late, so that the gap is D steps and what the pipeline adds.

    python benchmarks/gap_async.py [--gap 64] [--arm robust] [--seed 0] [--steps 600] [--json PATH]
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import shutil
import statistics
import sys
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import gap_cell
from gap_cells import ARMS, Cell, settings_of

from driftgym.agents.generators.base import GeneratorHealth, WeightUpdateMode
from driftgym.trainer.loop import Engines, Parts
from driftgym.trainer.parts import StartRequest, prepare, start_parts
from driftgym.trainer.run import live
from driftgym.trainer.run_config import RunConfig, make_run_dir
from driftgym.trainer.stop import Stop
from driftgym.types import WeightUpdate

SLACK = 8  # versions that the pipeline may add to the gap
WINDOW = 10


class LateEngines:
    """Generators that get every update `gap` updates late. Implements `driftgym.trainer.loop.Engines`."""

    def __init__(self, engines: Engines, *, gap: int, folder: Path) -> None:
        self._engines = engines
        self._gap = gap
        self._folder = folder
        self._waiting: deque[WeightUpdate] = deque()

    @property
    def min_version(self) -> int:
        """See Engines."""
        return self._engines.min_version

    async def update_weights(
        self, update: WeightUpdate, *, mode: WeightUpdateMode, keep_kv: bool = False, timeout_s: float
    ) -> None:
        """Keeps a copy of `update`, whose folder will be gone by then, and passes on the one that is old enough."""
        copy = self._folder / str(update.policy_version)
        await asyncio.to_thread(shutil.copytree, update.location, copy)
        self._waiting.append(dataclasses.replace(update, location=str(copy)))
        if len(self._waiting) > self._gap:
            late = self._waiting.popleft()
            await self._engines.update_weights(late, mode=mode, keep_kv=keep_kv, timeout_s=timeout_s)
            await asyncio.to_thread(shutil.rmtree, late.location)

    def next_iteration(self) -> None:
        """See Engines."""
        self._engines.next_iteration()

    async def health(self) -> GeneratorHealth:
        """See Engines."""
        return await self._engines.health()


def config_of(cell: Cell, *, run_dir: Path, num_steps: int) -> RunConfig:
    """The cell as a run's configuration."""
    agent = gap_cell.AGENT.model_dump(mode="json") | {"renderer": "compact"}
    return RunConfig.model_validate(
        {
            "name": "gap",
            "seed": cell.seed,
            "run_dir": str(run_dir),
            "model": {"path": str(gap_cell.MODEL), "init": "random"},
            "env": {"id": gap_cell.ENV_ID, "kwargs": {"level": cell.level}},
            "sandbox": {"kind": "process"},
            "agent": agent,
            "rollout": {"max_turns": gap_cell.ROLLOUT.max_turns},
            "generator": {"max_batch_size": 64, "max_context_tokens": 256},
            "demonstrations": {"num_episodes": 2000, "skill": gap_cell.SKILL[cell.level]},
            "warmup": {"num_steps": 300, "batch_size": 32},
            "learner": {
                "optimizer": {"learning_rate": gap_cell.LEARNING_RATE},
                "micro_batch_tokens": 16384,
                **settings_of(cell),
            },
            "trainer": {
                "max_steps": num_steps,
                "groups_per_step": gap_cell.NUM_PROMPTS,
                "group_size": gap_cell.GROUP_SIZE,
                "max_lag": cell.gap + SLACK,
                "max_in_flight_groups": 2 * gap_cell.NUM_PROMPTS,
                "publish_every_steps": 1,
                "checkpoint_every_steps": num_steps,
            },
        }
    )


async def train(cell: Cell, *, folder: Path, num_steps: int) -> dict[str, Any]:
    """The run's own figures; the weights that it ends with lie under `folder`/run/weights."""
    config = config_of(cell, run_dir=folder / "run", num_steps=num_steps)
    async with contextlib.AsyncExitStack() as stack:
        prepared = await prepare(config, stack, say=print)

        async def start(request: StartRequest, parts_stack: contextlib.AsyncExitStack) -> Parts:
            parts = await start_parts(prepared, request, parts_stack)
            late = LateEngines(parts.engines, gap=cell.gap, folder=folder / "late")
            return dataclasses.replace(parts, engines=late)

        result = await live(config, make_run_dir(config), stop=Stop(), start=start)
    rewards = [row["reward_mean"] for row in result.rows]
    return {
        **{name: result.summary[name] for name in ("lag_mean", "lag_p99", "lag_max", "wall_s", "errors")},
        "trained_steps_to_0.8": steps_to(rewards),
        "trained_last": last_mean(rewards),
    }


def last_mean(rewards: list[float]) -> float:
    """The mean training reward of the last 50 steps."""
    return statistics.fmean(rewards[-50:])


def steps_to(rewards: list[float], *, reward: float = 0.8) -> int | None:
    """The first step whose mean training reward over the last ten steps is `reward` at least."""
    for end in range(WINDOW, len(rewards) + 1):
        if sum(rewards[end - WINDOW : end]) / WINDOW >= reward:
            return end
    return None


def main() -> None:
    """Runs the cell both ways and prints the figures side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gap", type=int, default=64, help="optimizer steps")
    parser.add_argument("--arm", choices=sorted(ARMS), default="robust", help="which objective")
    parser.add_argument("--seed", type=int, default=0, help="of everything")
    parser.add_argument("--steps", type=int, default=gap_cell.NUM_STEPS, help="optimizer steps")
    parser.add_argument("--json", type=Path, help="where the figures go")
    given = parser.parse_args()
    cell = Cell(arm=given.arm, gap=given.gap, reward="clean", level="one_call", seed=given.seed)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        figures = asyncio.run(train(cell, folder=folder, num_steps=given.steps))
        newest = max((folder / "run" / "weights").iterdir(), key=lambda path: int(path.name.rpartition("-")[2]))
        figures["final"] = gap_cell.evaluate(newest, cell)
        base = Path(gap_cell.make_base(folder / "base", level=cell.level, seed=cell.seed).location)
        taking_turns = gap_cell.run_cell(cell, base=base, num_steps=given.steps)
    beside = {
        "trained_steps_to_0.8": steps_to(taking_turns["trained_rewards"]),
        "trained_last": last_mean(taking_turns["trained_rewards"]),
        "final": taking_turns["final"],
        "lag_max": cell.gap,
    }
    print(json.dumps({"asynchronous": figures, "taking turns": beside}, indent=2))
    if given.json:
        given.json.write_text(json.dumps({"asynchronous": figures, "taking_turns": beside, "budgets": []}, indent=2))


if __name__ == "__main__":
    sys.exit(main())

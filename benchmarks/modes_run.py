"""One cell of `modes.py`: a training run of `Trainer` with its producer, buffer and journal, its learner and its
generator, which are processes of their own. Only the boxes are left out: tools are functions that sleep.
"""

import asyncio
import contextlib
import dataclasses
import statistics
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slow_lookup import ENV_ID
from trl_settings import WINDOW, seconds_to

from driftgym.envs.lookup.scripted import ScriptedLookupProvider
from driftgym.trainer.loop import Parts
from driftgym.trainer.parts import StartRequest, prepare, start_parts
from driftgym.trainer.producer import PlayGroup
from driftgym.trainer.run import live
from driftgym.trainer.run_config import RunConfig, make_run_dir
from driftgym.trainer.stop import Stop
from driftgym.types import Task, TrajectoryGroup

GROUPS_PER_STEP = 8
GROUP_SIZE = 8
GOAL = 0.8
NEVER = 10_000  # steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run.

    >>> Cell(mode="async", max_lag=8, weights="in_flight", in_flight=64, publish_every=4).name
    'async/8/in_flight/64'
    """

    mode: str
    """As it is called in the table: sync, one-step-off, async."""
    max_lag: int
    """trainer.max_lag."""
    weights: str
    """trainer.weight_update."""
    in_flight: int
    """trainer.max_in_flight_groups."""
    publish_every: int
    """trainer.publish_every_steps."""

    @property
    def name(self) -> str:
        """Unique."""
        return f"{self.mode}/{self.max_lag}/{self.weights}/{self.in_flight}"


def config_of(cell: Cell, *, base: Path, run_dir: Path, seed: int) -> RunConfig:
    """The cell as a run's configuration: the quickstart's model and objective, tools of 0 to 5 s."""
    return RunConfig.model_validate(
        {
            "name": "modes",
            "seed": seed,
            "run_dir": str(run_dir),
            "model": {"path": str(base)},
            "env": {"id": ENV_ID, "kwargs": {"latency": "heavy_tail"}},
            "sandbox": {"kind": "process", "pool": {"max_boxes": cell.in_flight * GROUP_SIZE}},
            "agent": {"renderer": "compact", "max_tokens_per_turn": 32, "max_context_tokens": 256},
            "rollout": {"max_turns": 4},
            "generator": {"max_batch_size": 128, "max_context_tokens": 256},
            "learner": {
                "objective": {"name": "ppo"},
                "optimizer": {"learning_rate": 3e-4},
                "micro_batch_tokens": 16384,
            },
            "trainer": {
                "max_steps": NEVER,
                "groups_per_step": GROUPS_PER_STEP,
                "group_size": GROUP_SIZE,
                "max_lag": cell.max_lag,
                "max_in_flight_groups": cell.in_flight,
                "publish_every_steps": cell.publish_every,
                "weight_update": cell.weights,
                "checkpoint_every_steps": NEVER,
            },
        }
    )


class StopsAtGoal:
    """Plays groups, and stops the run once the reward of the last `WINDOW` steps' worth of them is well above `GOAL`,
    or so many were played. A run that its `max_steps` ends would play ever fewer at once before, and idle."""

    def __init__(self, play: PlayGroup, stop: Stop, *, max_groups: int) -> None:
        """Implements `PlayGroup` with `play`. The step that `max_groups` is in is not trained."""
        self._play = play
        self._stop = stop
        self._num_left = max_groups
        self._rewards: deque[float] = deque(maxlen=(WINDOW + 2) * GROUPS_PER_STEP)

    async def __call__(self, task: Task, *, group_id: str, min_policy_version: int) -> TrajectoryGroup:
        """See `PlayGroup`."""
        group = await self._play(task, group_id=group_id, min_policy_version=min_policy_version)
        rewards = [each.reward for each in group.trajectories if each.reward is not None]
        if rewards:
            self._rewards.append(statistics.fmean(rewards))
        is_reached = len(self._rewards) == self._rewards.maxlen and statistics.fmean(self._rewards) >= GOAL + 0.05
        self._num_left -= 1
        if is_reached or self._num_left <= 0:
            self._stop.request()
        return group


def run_cell(cell: Cell, *, base: Path, folder: Path, max_steps: int, seed: int = 0) -> dict[str, Any]:
    """Trains until the goal is reached, or `max_steps` steps' worth of groups was played, and gives the figures."""
    return asyncio.run(_run(cell, base=base, folder=folder, max_steps=max_steps, seed=seed))


async def _run(cell: Cell, *, base: Path, folder: Path, max_steps: int, seed: int) -> dict[str, Any]:
    config = config_of(cell, base=base, run_dir=folder / cell.name.replace("/", "-"), seed=seed)
    stop = Stop()
    async with contextlib.AsyncExitStack() as stack:
        prepared = await prepare(config, stack, say=lambda _: None)
        prepared = dataclasses.replace(prepared, sandboxes=ScriptedLookupProvider())

        async def start(request: StartRequest, parts_stack: contextlib.AsyncExitStack) -> Parts:
            parts = await start_parts(prepared, request, parts_stack)
            play = StopsAtGoal(parts.play, stop, max_groups=max_steps * GROUPS_PER_STEP + 1)
            return dataclasses.replace(parts, play=play)

        result = await live(config, make_run_dir(config), stop=stop, start=start)
    rows, summary = result.rows, result.summary
    points = [(row["loop_s"], row["reward_mean"] or 0.0) for row in rows]
    return {
        **dataclasses.asdict(cell),
        "num_steps": len(rows),
        "wall_s": rows[-1]["loop_s"],
        "episodes_per_s": rows[-1]["episodes_trained"] / rows[-1]["loop_s"],
        **{name: summary[name] for name in ("lag_mean", "lag_p99", "lag_max", "errors")},
        "generator_idle_fraction": rows[-1]["generator_idle_fraction"],
        "trainer_idle_fraction": rows[-1]["trainer_idle_fraction"],
        "seconds_to_goal": seconds_to(points, GOAL),
        "points": points,
    }

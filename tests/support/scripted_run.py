"""Runs whose parts are scripted, in this process or, as a program, in one that can be killed.

    python scripted_run.py RUN [--resume] [--step-s=SECONDS] [key.path=value ...]

Group 3 takes long, every fifth task is worth nothing, the others are worth what their member's number says.
"""

import asyncio
import contextlib
import json
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from driftgym.errors import DriftgymError
from driftgym.trainer.lineage import learner_part
from driftgym.trainer.loop import Parts
from driftgym.trainer.parts import StartRequest
from driftgym.trainer.run import RunResult, live
from driftgym.trainer.run_config import RunConfig, load_resolved, load_run_config, make_run_dir
from driftgym.trainer.scripted import NumberedTasks, Play, ScriptedEngines, ScriptedRollouts, ScriptedTrainingClient
from driftgym.trainer.stop import Stop

Script = Callable[[int, int], Play]


def ordinary(index: int, member: int) -> Play:
    """A short episode for most tasks, a long one for the fourth."""
    return Play(duration_s=0.2 if index == 3 else 0.005 * (1 + member), reward=0.0 if index % 5 == 0 else float(member))


class ScriptedParts:
    """Starts scripted parts for `live`, and keeps them for the test to look at."""

    def __init__(
        self, *, script: Script = ordinary, num_tasks: int | None = None, update_s: float = 0.0, **client: Any
    ) -> None:
        self._script = script
        self._num_tasks = num_tasks
        self._update_s = update_s
        self._client_options = client
        self.client: ScriptedTrainingClient
        self.engines: ScriptedEngines
        self.rollouts: ScriptedRollouts

    async def __call__(self, request: StartRequest, stack: contextlib.AsyncExitStack) -> Parts:
        """See `parts.start_parts`."""
        lineage = request.lineage
        self.client = ScriptedTrainingClient(incarnation=request.incarnation, **self._client_options)
        stack.push_async_callback(self.client.close)
        if lineage.checkpoint is not None:
            await self.client.load(learner_part(lineage.checkpoint), policy_version=lineage.policy_version)
        self.engines = ScriptedEngines(
            policy_version=lineage.policy_version, incarnation=request.incarnation, update_s=self._update_s
        )
        self.rollouts = ScriptedRollouts(
            self.engines, group_size=request.config.trainer.group_size, script=self._script
        )
        tasks = NumberedTasks(num_tasks=self._num_tasks)
        return Parts(client=self.client, engines=self.engines, play=self.rollouts, tasks=tasks)


def run_config(folder: Path, *overrides: str) -> RunConfig:
    """A small run under `folder`, in `folder / "run"`."""
    data = {
        "name": "scripted",
        "run_dir": str(folder / "run"),
        "model": {"path": "none"},
        "env": {"id": "scripted"},
        "agent": {"max_context_tokens": 64},
        "trainer": {
            "max_steps": 12,
            "groups_per_step": 2,
            "group_size": 3,
            "max_lag": 4,
            "max_in_flight_groups": 6,
            "publish_every_steps": 2,
            "checkpoint_every_steps": 3,
        },
        "limits": {"close_s": 2.0},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(data))
    return load_run_config(path, overrides)


async def begin(config: RunConfig, parts: ScriptedParts, *, stop: Stop | None = None) -> RunResult:
    """A new run."""
    run_dir = make_run_dir(config)
    return await live(config, run_dir, stop=stop or Stop(), start=parts)


async def go_on(run_dir: Path, parts: ScriptedParts, *, stop: Stop | None = None) -> RunResult:
    """The next life of a run."""
    config, run_dir = load_resolved(run_dir)
    return await live(config, run_dir, stop=stop or Stop(), start=parts)


def rows(run_dir: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The rows of a metrics file."""
    path = run_dir / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def trained_groups(run_dir: Path) -> dict[str, int]:
    """By group: the step that trained it, of the lineage that stands."""
    with contextlib.closing(sqlite3.connect(run_dir / "journal.sqlite")) as journal:
        return dict(journal.execute("SELECT group_id, step FROM groups WHERE state = 'trained'"))


def assert_exactly_once(run_dir: Path, *, steps: int, groups_per_step: int) -> None:
    """Each step trained its groups, no group twice, and the metrics tell of each step once, in order."""
    by_step = Counter(trained_groups(run_dir).values())
    assert by_step == dict.fromkeys(range(1, steps + 1), groups_per_step)
    assert [row["step"] for row in rows(run_dir)] == list(range(1, steps + 1))


def main(arguments: Sequence[str]) -> int:
    """The program."""
    run_dir, is_resumed = Path(arguments[0]), "--resume" in arguments
    overrides = [argument for argument in arguments[1:] if not argument.startswith("--")]
    step_s = next((float(a.partition("=")[2]) for a in arguments if a.startswith("--step-s=")), 0.01)

    async def run() -> RunResult:
        stop = Stop()
        with stop.on_signals(say=lambda text: print(text, file=sys.stderr, flush=True)):
            if is_resumed:
                return await go_on(run_dir, ScriptedParts(step_s=step_s), stop=stop)
            config = run_config(run_dir.parent, f"run_dir={run_dir}", *overrides)
            return await begin(config, ScriptedParts(step_s=step_s), stop=stop)

    try:
        result = asyncio.run(run())
    except DriftgymError as error:
        print(error, file=sys.stderr)
        return 1
    return 130 if result.is_interrupted else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

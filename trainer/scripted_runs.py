"""A whole run of `scripted_rollouts`, played and looked at: every token that was trained, and where the time went.

What the learner was given is compared with what the journal and the records say, token by token, so that the lag bound
is checked by neither the rule nor the loop that keep it.
"""

import contextlib
import io
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from driftgym.trainer.records import read_group
from driftgym.trainer.run import RunResult, live
from driftgym.trainer.run_config import make_run_dir
from driftgym.trainer.scripted import ScriptedTrainingClient
from driftgym.trainer.scripted_rollouts import Pace, PacedParts, paced_config
from driftgym.trainer.stop import Stop
from driftgym.types import Int32Array

Float64Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PacedSetup:
    """A run to be played. Its times are in units of `unit_s` seconds.

    >>> PacedSetup(name="s", times=np.ones(9), trainer={"max_lag": 4}).max_lag
    4
    """

    name: str
    """What it is called."""
    times: Float64Array
    """[tasks] how long the episode of each task takes; at least as many as will be played."""
    trainer: Mapping[str, Any]
    """The section `trainer` of its configuration, `max_lag` included; see `paced_config`."""
    steps: float | Float64Array = 0.0
    """How long a step takes, or [max_steps] each of them."""
    unit_s: float = 0.5
    """Seconds in a unit."""
    num_slots: int | None = None
    """Episodes played at once; None: as many as are in flight."""
    turn: float = 1000.0
    """The length of a turn. By default an episode is one turn, whose tokens come at its beginning."""
    generation_share: float = 0.01
    """The share of a turn in which tokens are written."""
    tokens_per_unit: int = 2
    """Tokens that an episode writes in a unit of its time."""
    skip: tuple[int, int] = (0, 0)
    """How many steps at the beginning, and at the end, are not counted."""

    @property
    def max_lag(self) -> int:
        """The bound."""
        return int(self.trainer["max_lag"])

    @property
    def num_places(self) -> int:
        """How many episodes can be played at once."""
        return self.num_slots or int(self.trainer["max_in_flight_groups"])

    @property
    def pace(self) -> Pace:
        """How its episodes go."""
        return Pace(
            turn_s=self.turn * self.unit_s,
            tokens_per_turn=round(self.tokens_per_unit * self.turn),
            generation_share=self.generation_share,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """The episodes of a run, one per group: arrays of equal length, in the order of issue.

    >>> Episodes.__slots__[:2]
    ('started_at', 'ended_at')
    """

    started_at: Float64Array
    """[E] wall clock."""
    ended_at: Float64Array
    """[E] wall clock."""
    num_tokens: Float64Array
    """[E] sampled tokens."""
    oldest_version: Float64Array
    """[E] the oldest version that wrote one of them; -1 without any."""
    step: Float64Array
    """[E] the step that consumed it; 0: none did."""
    is_trained: NDArray[np.bool_]
    """[E] whether that step trained it, rather than left it out."""

    def __getitem__(self, chosen: NDArray[np.bool_]) -> "Episodes":
        return Episodes(**{name: getattr(self, name)[chosen] for name in self.__slots__})

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class PacedRun:
    """What a run left behind, and what its learner was given.

    >>> PacedRun.__slots__[:2]
    ('setup', 'result')
    """

    setup: PacedSetup
    """What was played."""
    result: RunResult
    """What the run says of itself."""
    step_began_at: Float64Array
    """[steps] wall clock."""
    episodes: Episodes
    """All episodes that ended."""
    learner_lags: tuple[Counter[int], ...]
    """[steps] tokens by lag, of those that the learner trained."""
    record_lags: tuple[Counter[int], ...]
    """[steps] tokens by lag, of all that the records of the step's groups hold."""

    @property
    def max_lag(self) -> int:
        """The largest lag of any token that the learner trained."""
        return max((lag for lags in self.learner_lags for lag in lags), default=0)

    @property
    def num_unexplained(self) -> int:
        """Tokens that were trained although they are above the bound, or not trained although they are within it."""
        total = 0
        for learned, recorded in zip(self.learner_lags, self.record_lags, strict=True):
            allowed = Counter({lag: n for lag, n in recorded.items() if 0 <= lag <= self.setup.max_lag})
            total += (learned - allowed).total() + (allowed - learned).total()
        return total

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """The rows of the steps that count."""
        first, last = self.setup.skip
        return self.result.rows[first : len(self.result.rows) - last]

    @property
    def began_at(self) -> float:
        """When the first step that counts began."""
        return float(self.step_began_at[self.rows[0]["step"] - 1])

    @property
    def span_s(self) -> float:
        """From there to the end of the last one that counts."""
        last = self.rows[-1]
        return float(self.step_began_at[last["step"] - 1] + last["step_s"]) - self.began_at

    def consumed(self) -> Episodes:
        """The episodes that steps which count trained or dropped."""
        steps = self.episodes.step
        return self.episodes[(steps >= self.rows[0]["step"]) & (steps <= self.rows[-1]["step"])]

    def trained(self) -> Episodes:
        """The episodes that steps which count trained."""
        consumed = self.consumed()
        return consumed[consumed.is_trained]

    def lengths(self, episodes: Episodes) -> Float64Array:
        """[E] how long they took, in units."""
        return (episodes.ended_at - episodes.started_at) / self.setup.unit_s

    def total(self, name: str) -> float:
        """The sum of a figure over the rows that count."""
        return float(sum(row[name] for row in self.rows))

    @property
    def mean_lag(self) -> float:
        """Of the trained tokens."""
        return sum(row["lag_mean"] * row["num_tokens_trained"] for row in self.rows) / self.total("num_tokens_trained")

    @property
    def staleness(self) -> Float64Array:
        """[E] for each trained episode the lag of its oldest token."""
        trained = self.trained()
        return trained.step - 1 - trained.oldest_version

    @property
    def throughput(self) -> float:
        """Groups trained in a unit of time."""
        return len(self.trained()) * self.setup.unit_s / self.span_s

    @property
    def trainer_idle(self) -> float:
        """The share of the time outside a step."""
        return 1.0 - self.total("step_s") / self.span_s

    @property
    def engine_idle(self) -> float:
        """The share of the time in which no request was being decoded."""
        first, last = self.rows[0], self.rows[-1]
        busy_s = last["generator_busy_s"] - first["generator_busy_s"]
        return float(1.0 - busy_s / (last["generator_s"] - first["generator_s"]))

    @property
    def slots_idle(self) -> float:
        """The share of the slots' time in which no episode is played."""
        ended_at = self.began_at + self.span_s
        inside = np.minimum(self.episodes.ended_at, ended_at) - np.maximum(self.episodes.started_at, self.began_at)
        return float(1.0 - np.maximum(inside, 0.0).sum() / (self.setup.num_places * self.span_s))


class _StepTimes:
    """How long each step takes; keeps when it began."""

    def __init__(self, setup: PacedSetup) -> None:
        self._steps_s = np.asarray(setup.steps) * setup.unit_s
        self.began_at: list[float] = []

    def __call__(self, version: int) -> float:
        self.began_at.append(time.time())
        return float(self._steps_s[version] if self._steps_s.ndim else self._steps_s)


async def play_paced(
    setup: PacedSetup, run_dir: Path, *, model: Path, parts_type: type[PacedParts] = PacedParts
) -> PacedRun:
    """Plays a run in `run_dir`, which is made; what it prints is kept from the console.

    Args:
        setup: the run.
        run_dir: its folder.
        model: see `PacedParts`.
        parts_type: starts its parts.

    Raises:
        ConfigError: the section `trainer` of the setup is wrong.
        TrainingError: the run failed.
    """
    steps = _StepTimes(setup)
    parts = parts_type(
        model=model,
        pace=setup.pace,
        duration_s=lambda index: float(setup.times[index] * setup.unit_s),
        step_s=steps,
        num_slots=setup.num_slots,
    )
    config = paced_config(run_dir, setup.trainer)
    make_run_dir(config)
    with contextlib.redirect_stdout(io.StringIO()):
        result = await live(config, run_dir, stop=Stop(), start=parts)
    return PacedRun(
        setup=setup,
        result=result,
        step_began_at=np.array(steps.began_at),
        episodes=_episodes(run_dir),
        learner_lags=lags_of_learner(parts.client),
        record_lags=lags_of_records(run_dir, num_steps=len(result.rows)),
    )


def lags_of_learner(client: ScriptedTrainingClient) -> tuple[Counter[int], ...]:
    """[steps] tokens by lag, of those that the learner trained."""
    return _lags([s.policy_versions[s.train_mask] for s in segments] for segments in client.segments)


def lags_of_records(run_dir: Path, *, num_steps: int) -> tuple[Counter[int], ...]:
    """[steps] tokens by lag, of all sampled tokens of the groups that the step trained, by journal and records."""
    versions: list[list[Int32Array]] = [[] for _ in range(num_steps)]
    with contextlib.closing(sqlite3.connect(run_dir / "journal.sqlite")) as journal:
        trained = journal.execute("SELECT group_id, step FROM groups WHERE state = 'trained'").fetchall()
    for group_id, step in trained:
        for trajectory in read_group(run_dir / "trajectories" / f"{group_id}.json.gz").trajectories:
            versions[step - 1] += [turn.completion.policy_versions for turn in trajectory.turns]
    return _lags(versions)


def _lags(versions_by_step: Iterable[Iterable[Int32Array]]) -> tuple[Counter[int], ...]:
    """[steps] tokens by lag; the step at place t is done with version t."""
    return tuple(
        Counter(lag for each in versions for lag in (now - each).tolist())
        for now, versions in enumerate(versions_by_step)
    )


def _episodes(run_dir: Path) -> Episodes:
    with contextlib.closing(sqlite3.connect(run_dir / "journal.sqlite")) as journal:
        rows = journal.execute(
            "SELECT started_at, ended_at, num_tokens, COALESCE(oldest_version, -1), COALESCE(step, 0),"
            " state = 'trained' FROM episodes JOIN groups USING (group_id) ORDER BY task_index"
        ).fetchall()
    columns = np.array(rows, dtype=np.float64).reshape(-1, 6).T
    return Episodes(
        started_at=columns[0],
        ended_at=columns[1],
        num_tokens=columns[2],
        oldest_version=columns[3],
        step=columns[4],
        is_trained=columns[5] == 1,
    )

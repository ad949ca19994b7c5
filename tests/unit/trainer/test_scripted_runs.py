"""Paced rollouts: an episode's turns and tokens go with its time; what a run's check of its tokens finds."""

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftgym.errors import ConfigError
from driftgym.trainer.run import RunResult
from driftgym.trainer.scripted_rollouts import Pace, paced_config
from driftgym.trainer.scripted_runs import Episodes, PacedRun, PacedSetup


@given(duration_s=st.floats(0.001, 50.0), turn_s=st.floats(0.01, 5.0))
def test_turns_add_up_to_the_episode_and_only_the_last_is_shorter(duration_s: float, turn_s: float) -> None:
    turns = Pace(turn_s=turn_s, tokens_per_turn=8).turns(duration_s)
    assert sum(turns) == pytest.approx(duration_s, abs=1e-6)
    assert set(turns[:-1]) <= {turn_s}
    assert 0 < turns[-1] <= turn_s * (1 + 1e-6)


def test_tokens_go_with_the_length_of_a_turn() -> None:
    pace = Pace(turn_s=2.0, tokens_per_turn=20, generation_share=0.5)
    assert [pace.num_tokens(turn_s) for turn_s in (2.0, 1.0, 0.3, 0.01)] == [20, 10, 3, 2]
    assert pace.token_latency_s == pytest.approx(0.05)


def test_a_paced_run_takes_the_keys_of_any_run(tmp_path: Path) -> None:
    config = paced_config(tmp_path / "run", {"max_steps": 7, "on_lag": "mask"})
    assert (config.trainer.max_steps, config.trainer.on_lag, config.trainer.group_size) == (7, "mask", 1)
    with pytest.raises(ConfigError, match="on_lag"):
        paced_config(tmp_path / "run", {"on_lag": "never"})


def run_of(learner: Counter[int], records: Counter[int]) -> PacedRun:
    """A run of one step."""
    one = np.ones(2)
    episodes = Episodes(
        started_at=one * 10.0,
        ended_at=np.array([11.0, 13.0]),
        num_tokens=np.array([2.0, 6.0]),
        oldest_version=one * 0.0,
        step=one,
        is_trained=np.array([True, False]),
    )
    row = {"step": 1, "step_s": 1.0, "lag_mean": 0.0, "num_tokens_trained": 2}
    return PacedRun(
        setup=PacedSetup(name="s", times=one, trainer={"max_lag": 2, "max_in_flight_groups": 2}, unit_s=2.0),
        result=RunResult(run_dir=Path(), summary={}, rows=[row], is_interrupted=False),
        step_began_at=np.array([12.0]),
        episodes=episodes,
        learner_lags=(learner,),
        record_lags=(records,),
    )


def test_each_token_that_is_at_odds_with_the_records_is_found() -> None:
    assert run_of(Counter({0: 4, 2: 3}), Counter({0: 4, 2: 3, 3: 9})).num_unexplained == 0
    too_old = run_of(Counter({0: 4, 3: 1}), Counter({0: 4, 3: 9}))
    assert (too_old.num_unexplained, too_old.max_lag) == (1, 3)
    assert run_of(Counter({0: 4}), Counter({0: 5, 1: 1})).num_unexplained == 2, "left out, and within the bound"
    assert run_of(Counter({0: 5}), Counter({0: 4, 1: 1})).num_unexplained == 2, "another version than in the records"


def test_figures_of_a_run() -> None:
    run = run_of(Counter({0: 2}), Counter({0: 2}))
    assert run.lengths(run.consumed()).tolist() == [0.5, 1.5]
    assert (len(run.trained()), run.throughput, run.trainer_idle) == (1, 2.0, 0.0)
    assert run.slots_idle == 0.5, "one of two slots was used in that second"
    assert run.staleness.tolist() == [0.0]
    assert dataclasses.replace(run, step_began_at=np.array([20.0])).slots_idle == 1.0

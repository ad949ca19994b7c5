"""Steps that must not be taken, must change nothing, or must be scored by the rule that they were sampled by."""

import dataclasses
import math
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from stub_engine import StubEngine, reply
from tiny_models import save_model_of_fixed_logits

from driftgym.errors import TrainingError
from driftgym.trainer.learner import Learner
from driftgym.trainer.models import ModelConfig
from driftgym.trainer.objective_config import OBJECTIVE_NUMBERS
from driftgym.trainer.segments import segments_of
from driftgym.types import MAX_REWARD, Message, SamplingParams, Trajectory, TrajectoryStatus, Turn

COMPLETED = TrajectoryStatus.COMPLETED
NORMALISATIONS = (
    {},
    {"normalisation": "sequence"},
    {"normalisation": "prompt"},
    {"normalisation": "fixed", "fixed_num_tokens": 8},
)


def published(learner, folder):
    return load_file(f"{learner.publish(folder).location}/model.safetensors")


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def pair(make_segment, *, train_mask=None):
    """Two rows of one group, one good and one bad."""
    rows = [make_segment(seed=index, advantage=(-1.0) ** index) for index in range(2)]
    rows = [dataclasses.replace(row, group_id="g", reward=float(index)) for index, row in enumerate(rows)]
    if train_mask is None:
        return rows
    return [dataclasses.replace(row, train_mask=np.full_like(row.loss_mask, train_mask)) for row in rows]


@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan])
@pytest.mark.parametrize("name", OBJECTIVE_NUMBERS)
def test_a_log_prob_that_is_not_finite_is_refused_whether_the_objective_reads_it_or_not(
    learner_spec, make_segment, tmp_path, name, value
):
    learner = Learner(learner_spec(objective={"name": name}))
    weights = published(learner, tmp_path)
    good, bad = pair(make_segment)
    poisoned = np.where(bad.loss_mask, value, 0.0)
    with pytest.raises(TrainingError, match=r"^step 1: the loss is not finite.*Trajectories: t1$"):
        learner.train_step([good, dataclasses.replace(bad, behaviour_logprobs=poisoned)])
    assert learner.policy_version == 0
    assert same(weights, published(learner, tmp_path))


@pytest.mark.parametrize("normalisation", NORMALISATIONS, ids=lambda each: each.get("normalisation", "token"))
@pytest.mark.parametrize("name", OBJECTIVE_NUMBERS)
def test_two_samples_of_which_nothing_is_trained_are_a_step_that_changes_nothing(
    learner_spec, make_segment, tmp_path, name, normalisation
):
    """Both were cut and are masked: loss and gradient are exactly 0, every figure is finite, Adam has seen nothing."""
    kl = {"coef": 0.1, "estimator": "k3"}
    learner = Learner(learner_spec(objective={"name": name}, kl=kl, max_failure_drift=0.1, **normalisation))
    weights = published(learner, tmp_path)
    report = learner.train_step(pair(make_segment, train_mask=False))
    assert report.policy_version == 1
    assert (report.metrics["loss"], report.metrics["grad_norm"], report.metrics["update_skipped"]) == (0.0, 0.0, 1.0)
    assert report.metrics["num_tokens_masked"] == 18
    assert all(math.isfinite(value) for value in report.metrics.values())
    assert (report.num_lag0_tokens, report.lag0_ratio_sum) == (0, 0.0)
    assert same(weights, published(learner, tmp_path))
    fresh = Learner(learner_spec(objective={"name": name}, kl=kl, max_failure_drift=0.1, **normalisation))
    for each in (learner, fresh):
        each.train_step(pair(make_segment))
    first, second = (published(each, tmp_path / str(index)) for index, each in enumerate((learner, fresh)))
    assert same(first, second), "as if that step had never been"


def test_a_part_of_which_nothing_is_trained_within_a_batch_counts_and_pulls_nowhere(learner_spec, make_segment):
    """In micro-batches of one row: a row that is masked as a whole stays in what the others are divided by."""
    rows = [make_segment(seed=index, advantage=1.0) for index in range(3)]
    masked = [dataclasses.replace(rows[0], train_mask=np.zeros_like(rows[0].loss_mask)), *rows[1:]]
    spec = learner_spec(objective={"name": "reinforce"}, micro_batch_tokens=1, optimizer={"max_grad_norm": 1e9})
    whole, part = Learner(spec).forward_backward(masked), Learner(spec).forward_backward(rows[1:])
    assert math.isfinite(whole.metrics["loss"])
    assert whole.metrics["loss"] == pytest.approx(part.metrics["loss"] * 2 / 3)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [*((name, {}) for name in OBJECTIVE_NUMBERS), ("opmd", {"form": "residual"}), ("opmd", {"form": "token"})],
)
def test_the_largest_reward_that_an_environment_may_give_is_a_step(learner_spec, make_segment, name, numbers):
    rows = pair(make_segment)
    largest = [
        dataclasses.replace(row, advantages=row.advantages * np.float32(MAX_REWARD), reward=row.reward * MAX_REWARD)
        for row in rows
    ]
    report = Learner(learner_spec(objective={"name": name, **numbers})).train_step(largest)
    assert all(math.isfinite(value) for value in report.metrics.values())


def test_a_later_life_may_change_what_the_optimizer_was_told(learner_spec, make_segment, tmp_path):
    """Betas and weight decay are the configuration's, also where a checkpoint holds others."""
    before, after = {"betas": (0.9, 0.95)}, {"betas": (0.5, 0.6), "weight_decay": 0.5}
    rows = pair(make_segment)
    first = Learner(learner_spec(optimizer={"learning_rate": 1e-2, **before}))
    first.train_step(rows)
    first.save(tmp_path / "1")
    learners = [Learner(learner_spec(optimizer={"learning_rate": 1e-2, **each})) for each in (before, before, after)]
    for learner in learners:
        learner.load(tmp_path / "1", policy_version=1)
        learner.train_step(rows)
    weights = [published(learner, tmp_path / str(index)) for index, learner in enumerate(learners)]
    assert same(weights[0], weights[1])
    assert not same(weights[0], weights[2])


@pytest.mark.parametrize(("told", "ratio"), [(-2.1429, 1.0), (-1.4076, 0.479), (-2.8152, 1.959)])
async def test_what_an_engine_tells_at_a_temperature_is_what_the_learner_finds(learner_spec, tmp_path, told, ratio):
    """Logits 2, 1, 0 at temperature 0.5, token 1: the engine must tell -2.1429, and not -1.4076 or -2.8152."""
    engine = StubEngine()
    engine.model = {"vocab_size": 16}
    engine.answer = reply([1], spans=[("1:0", 0, 1)], output_token_logprobs=[[told, 1, None]])
    async with engine.client() as client:
        completion = await client.generate(
            [0], SamplingParams(temperature=0.5), request_id="r", session_id="s", deadline_s=time.monotonic() + 20
        )
    ((_, body),) = [call for call in engine.calls if call[0] == "/generate"]
    asked = body["sampling_params"]
    assert (asked["temperature"], asked["top_p"], asked["top_k"], asked["min_p"]) == (0.5, 1.0, -1, 0.0)
    assert body["return_logprob"] is True
    turn = Turn(new_prompt_token_ids=[0], completion=completion, action=Message(role="assistant"))
    trajectory = Trajectory(
        trajectory_id="t", group_id="g", member=0, attempt=0, task_id="t", turns=(turn,), status=COMPLETED, reward=1.0
    )
    folder = save_model_of_fixed_logits(tmp_path / "model", [2.0, 1.0, 0.0, *[-1e4] * 13])
    spec = dataclasses.replace(learner_spec(temperature=0.5), model=ModelConfig(path=str(folder)), model_folder=folder)
    figures = Learner(spec).forward_backward(segments_of(trajectory, advantage=1.0))
    assert figures.num_lag0_tokens == 1
    assert figures.metrics["ratio_mean"] == pytest.approx(ratio, abs=1e-3)
    assert figures.lag0_ratio_sum == pytest.approx(ratio, abs=1e-3)

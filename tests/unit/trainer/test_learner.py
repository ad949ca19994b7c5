"""Optimizer steps: what they change, what they must not change, and what they report."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from driftgym.errors import ConfigError, TrainingError
from driftgym.trainer.learner import Learner
from driftgym.trainer.learner_config import LearnerSpec
from driftgym.trainer.models import LoraConfig, ModelConfig


def _published(learner, folder):
    return load_file(f"{learner.publish(folder).location}/model.safetensors")


def _same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def _rescored(folder, segment, temperature=1.0):
    """The log-probs of the sampled tokens under a published model, from a forward pass of its own."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(segment.token_ids.astype(np.int64))[None]).logits[0, :-1]
    logprobs = torch.log_softmax(logits / temperature, -1)
    chosen = logprobs.gather(1, torch.from_numpy(segment.token_ids[1:].astype(np.int64))[:, None])[:, 0].numpy()
    return np.where(segment.loss_mask, np.concatenate([[0.0], chosen]), 0.0)


@pytest.fixture
def segments(make_segment):
    return [make_segment(seed=index, advantage=(-1) ** index * 0.5, num_prompt=4 + index) for index in range(6)]


def test_a_step_moves_the_policy_towards_what_was_good(learner_spec, make_segment, tmp_path):
    learner = Learner(learner_spec(objective={"name": "reinforce"}))
    good, bad = make_segment(seed=1, advantage=1.0), make_segment(seed=2, advantage=-1.0)
    before = learner.publish(tmp_path).location
    gained, lost = _rescored(before, good).sum(), _rescored(before, bad).sum()
    report = learner.train_step([good, bad])
    after = learner.publish(tmp_path).location
    assert _rescored(after, good).sum() > gained
    assert _rescored(after, bad).sum() < lost
    assert report.policy_version == learner.policy_version == 1
    assert report.metrics["update_skipped"] == 0.0
    assert report.metrics["grad_norm"] > 0.0
    assert all(math.isfinite(value) for value in report.metrics.values())


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_at_lag_0_the_ratio_is_1(learner_spec, segments, tmp_path, temperature):
    learner = Learner(learner_spec(temperature=temperature))
    folder = learner.publish(tmp_path).location
    scored = [dataclasses.replace(s, behaviour_logprobs=_rescored(folder, s, temperature)) for s in segments]
    report = learner.train_step(scored)
    assert report.num_lag0_tokens == sum(int(s.loss_mask.sum()) for s in scored)
    assert report.lag0_ratio_sum / report.num_lag0_tokens == pytest.approx(1.0, abs=1e-5)
    assert report.metrics["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert report.metrics["kl_k3"] == pytest.approx(0.0, abs=1e-6)


def test_raw_logprobs_at_another_temperature_are_noticed(learner_spec, segments, tmp_path):
    learner = Learner(learner_spec(temperature=0.5))
    folder = learner.publish(tmp_path).location
    raw = [dataclasses.replace(s, behaviour_logprobs=_rescored(folder, s, 1.0)) for s in segments]
    report = learner.train_step(raw)
    assert abs(report.lag0_ratio_sum / report.num_lag0_tokens - 1.0) > 1e-2


def test_lag_0_leaves_out_older_tokens_inexact_ones_and_masked_ones(learner_spec, segments):
    learner = Learner(learner_spec())
    learner.train_step(segments)
    segment = dataclasses.replace(
        segments[0],
        policy_versions=np.where(segments[0].loss_mask, 1, -1),
    )
    sampled = np.flatnonzero(segment.loss_mask)
    versions, exact, train = segment.policy_versions.copy(), segment.loss_mask.copy(), segment.loss_mask.copy()
    versions[sampled[0]], exact[sampled[1]], train[sampled[2]] = 0, False, False
    mixed = dataclasses.replace(segment, policy_versions=versions, exact_mask=exact, train_mask=train)
    report = learner.train_step([mixed])
    assert report.num_lag0_tokens == len(sampled) - 3
    assert report.metrics["num_tokens_masked"] == 1.0
    assert report.metrics["num_tokens_trained"] == len(sampled) - 1


def _masked(segment):
    return dataclasses.replace(segment, train_mask=np.zeros_like(segment.loss_mask))


def test_a_step_in_which_nothing_is_trained_counts_and_changes_nothing(learner_spec, segments, make_segment, tmp_path):
    learner = Learner(learner_spec())
    learner.train_step(segments)
    weights = _published(learner, tmp_path)
    batches = [[], [_masked(s) for s in segments], [make_segment(seed=9, advantage=0.0)]]
    for batch in batches:
        report = learner.train_step(batch)
        assert report.metrics["loss"] == 0.0
        assert report.metrics["grad_norm"] == 0.0
        assert report.metrics["update_skipped"] == 1.0
        assert all(math.isfinite(value) for value in report.metrics.values())
    assert learner.policy_version == 4
    assert _same(weights, _published(learner, tmp_path))


def test_skipped_steps_leave_the_optimizer_as_it_was(learner_spec, segments, tmp_path):
    plain, skipping = Learner(learner_spec()), Learner(learner_spec())
    for learner in (plain, skipping):
        learner.train_step(segments)
    skipping.train_step([_masked(s) for s in segments])
    for learner in (plain, skipping):
        learner.train_step(segments)
    assert _same(_published(plain, tmp_path / "a"), _published(skipping, tmp_path / "b"))


def test_a_step_of_which_everything_is_left_out_moves_nothing(learner_spec, segments, tmp_path):
    """Not even by the momentum of the steps before, or by weight decay."""
    learner = Learner(learner_spec(optimizer={"learning_rate": 1e-2, "weight_decay": 0.1}))
    learner.train_step(segments)
    weights = _published(learner, tmp_path)
    stale = [
        dataclasses.replace(
            s,
            behaviour_logprobs=np.where(s.loss_mask, -1e-3, 0.0),
            advantages=np.where(s.loss_mask, -1.0, 0.0),
        )
        for s in segments
    ]
    report = learner.train_step(stale)
    assert report.metrics["mask_fraction"] == 1.0
    assert report.metrics["update_skipped"] == 1.0
    assert _same(weights, _published(learner, tmp_path))


def test_what_stands_on_tool_tokens_does_not_touch_the_step(learner_spec, segments, tmp_path):
    learners = [Learner(learner_spec(objective={"name": name})) for name in ("ppo", "ppo")]
    shifted = [
        dataclasses.replace(
            s,
            behaviour_logprobs=np.where(s.loss_mask, s.behaviour_logprobs, -3.0),
            advantages=np.where(s.loss_mask, s.advantages, 9.0),
        )
        for s in segments
    ]
    reports = [learner.train_step(batch) for learner, batch in zip(learners, (segments, shifted), strict=True)]
    assert reports[0].metrics["loss"] == reports[1].metrics["loss"]
    assert _same(_published(learners[0], tmp_path / "a"), _published(learners[1], tmp_path / "b"))


@pytest.mark.parametrize("size", [5e36, 1e25])
def test_a_gradient_that_is_not_finite_names_the_trajectories_and_leaves_the_weights(
    learner_spec, segments, tmp_path, size
):
    """The losses are finite; the gradients are too large, or have a norm that is, though each of them is finite."""
    learner = Learner(learner_spec(objective={"name": "reinforce"}))
    weights = _published(learner, tmp_path)
    signs = {1: size, 3: -size}
    bad = [
        dataclasses.replace(segment, advantages=np.where(segment.loss_mask, signs[index], 0.0))
        if index in signs
        else segment
        for index, segment in enumerate(segments)
    ]
    with pytest.raises(TrainingError, match=r"a gradient is not finite.*Trajectories: t1, t3$"):
        learner.train_step(bad)
    assert _same(weights, _published(learner, tmp_path))
    learner.train_step(segments)


@pytest.mark.parametrize("field", ["behaviour_logprobs", "advantages"])
@pytest.mark.parametrize("objective", ["ppo", "tis"])
def test_a_loss_that_is_not_finite_names_the_trajectory_and_leaves_the_weights(
    learner_spec, segments, tmp_path, field, objective
):
    learner = Learner(learner_spec(objective={"name": objective}))
    learner.train_step(segments)
    weights = _published(learner, tmp_path)
    poisoned = getattr(segments[3], field).copy()
    poisoned[np.flatnonzero(segments[3].loss_mask)[0]] = math.nan
    bad = [*segments[:3], dataclasses.replace(segments[3], **{field: poisoned}), *segments[4:]]
    with pytest.raises(TrainingError, match=r"not finite.*Trajectories: t3$"):
        learner.train_step(bad)
    assert learner.policy_version == 1
    assert _same(weights, _published(learner, tmp_path))
    assert learner.train_step(segments).policy_version == 2


def test_a_nan_on_a_masked_token_is_never_read(learner_spec, segments):
    logprobs = segments[0].behaviour_logprobs.copy()
    train = segments[0].loss_mask.copy()
    first = np.flatnonzero(train)[0]
    logprobs[first], train[first] = math.nan, False
    learner = Learner(learner_spec())
    learner.train_step([dataclasses.replace(segments[0], behaviour_logprobs=logprobs, train_mask=train), *segments[1:]])
    assert learner.policy_version == 1


def test_many_bad_trajectories_are_named_up_to_eight(learner_spec, make_segment):
    bad = [
        dataclasses.replace(make_segment(seed=index), advantages=np.full(19, math.inf, dtype=np.float32))
        for index in range(12)
    ]
    with pytest.raises(TrainingError, match=r"t7, \.\.\.$"):
        Learner(learner_spec()).train_step(bad)


def test_gradients_are_clipped(learner_spec, segments, tmp_path):
    spec = learner_spec(optimizer={"learning_rate": 1e-2, "max_grad_norm": 1e-30})
    learner = Learner(spec)
    before = _published(learner, tmp_path)
    learner.train_step(segments)
    moved = max(float((before[name] - tensor).abs().max()) for name, tensor in _published(learner, tmp_path).items())
    assert moved < 1e-6


def test_the_learning_rate_rises_over_its_first_steps(learner_spec, segments):
    learner = Learner(learner_spec(optimizer={"learning_rate": 1e-3, "warmup_steps": 4}))
    rates = [learner.train_step(segments).metrics["learning_rate"] for _ in range(6)]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3])


def test_the_learning_rate_falls_to_a_tenth(learner_spec, segments):
    optimizer = {"learning_rate": 1e-3, "warmup_steps": 2, "decay_steps": 6}
    learner = Learner(learner_spec(optimizer=optimizer))
    rates = [learner.train_step(segments).metrics["learning_rate"] for _ in range(8)]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 7.75e-4, 5.5e-4, 3.25e-4, 1e-4, 1e-4])


def test_the_seed_decides_the_random_weights(learner_spec, tmp_path):
    spec = learner_spec()
    first, again = (_published(Learner(spec), tmp_path / name) for name in "ab")
    other = _published(Learner(dataclasses.replace(spec, seed=8)), tmp_path / "c")
    assert _same(first, again)
    assert not _same(first, other)


def test_a_resumed_learner_goes_on_as_if_nothing_had_happened(learner_spec, segments, tmp_path):
    straight, resumed = Learner(learner_spec()), Learner(dataclasses.replace(learner_spec(), seed=99))
    for _ in range(2):
        straight.train_step(segments)
    straight.save(tmp_path / "2")
    resumed.load(tmp_path / "2", policy_version=2)
    assert resumed.policy_version == 2
    for learner in (straight, resumed):
        learner.train_step(segments)
    assert _same(_published(straight, tmp_path / "a"), _published(resumed, tmp_path / "b"))


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.pt", "state.json", "manifest.json"])
def test_a_damaged_state_is_refused(learner_spec, segments, tmp_path, name):
    learner = Learner(learner_spec())
    learner.train_step(segments)
    learner.save(tmp_path / "1")
    weights = _published(learner, tmp_path / "weights")
    path = tmp_path / "1" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(TrainingError, match=r"^checkpoint 1: "):
        learner.load(tmp_path / "1", policy_version=1)
    assert _same(weights, _published(learner, tmp_path / "weights"))


def test_a_state_of_another_version_is_refused(learner_spec, tmp_path):
    learner = Learner(learner_spec())
    learner.save(tmp_path / "0")
    with pytest.raises(TrainingError, match="policy version 0, not 5"):
        learner.load(tmp_path / "0", policy_version=5)


def test_the_published_folder_is_loaded_by_transformers(learner_spec, segments, tmp_path):
    learner = Learner(learner_spec())
    learner.train_step(segments)
    update = learner.publish(tmp_path)
    assert update.policy_version == 1
    model = AutoModelForCausalLM.from_pretrained(update.location)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert _same(load_file(f"{update.location}/model.safetensors"), _published(learner, tmp_path))


def _with_lora(spec: LearnerSpec, folder) -> LearnerSpec:
    model = ModelConfig(path=str(folder), lora=LoraConfig(rank=4, alpha=8.0))
    return dataclasses.replace(spec, model=model, model_folder=folder)


def test_lora_trains_adapters_and_publishes_merged_weights(learner_spec, segments, tmp_path):
    base = Learner(learner_spec()).publish(tmp_path / "base")
    spec = _with_lora(learner_spec(), tmp_path / "base" / "1-0")
    learner = Learner(spec)
    start = _published(learner, tmp_path / "start")
    assert _same(start, load_file(f"{base.location}/model.safetensors"))
    for _ in range(3):
        learner.train_step(segments)
    update = learner.publish(tmp_path / "after")
    scored = [dataclasses.replace(s, behaviour_logprobs=_rescored(update.location, s)) for s in segments]
    now = [dataclasses.replace(s, policy_versions=np.where(s.loss_mask, 3, -1)) for s in scored]
    report = learner.train_step(now)
    assert report.lag0_ratio_sum / report.num_lag0_tokens == pytest.approx(1.0, abs=1e-4)
    assert not _same(start, load_file(f"{update.location}/model.safetensors"))


def test_lora_checkpoints_hold_the_adapters_alone_and_resume(learner_spec, segments, tmp_path):
    Learner(learner_spec()).publish(tmp_path / "base")
    spec = _with_lora(learner_spec(), tmp_path / "base" / "1-0")
    learner = Learner(spec)
    learner.train_step(segments)
    learner.save(tmp_path / "1")
    assert all("lora_" in name for name in load_file(tmp_path / "1" / "weights.safetensors"))
    resumed = Learner(spec)
    resumed.load(tmp_path / "1", policy_version=1)
    for one in (learner, resumed):
        one.train_step(segments)
    assert _same(_published(learner, tmp_path / "a"), _published(resumed, tmp_path / "b"))


def test_lora_on_modules_that_are_not_there_is_refused(learner_spec, tiny_model_folder):
    model = ModelConfig(path="m", init="random", lora=LoraConfig(target_modules=("nonesuch",)))
    with pytest.raises(ConfigError, match=r"model\.lora\.target_modules"):
        Learner(dataclasses.replace(learner_spec(), model=model))


def test_a_state_of_another_model_is_refused(learner_spec, segments, tmp_path):
    learner = Learner(learner_spec())
    learner.publish(tmp_path / "base")
    learner.save(tmp_path / "0")
    with pytest.raises(TrainingError, match="another model"):
        Learner(_with_lora(learner_spec(), tmp_path / "base" / "1-0")).load(tmp_path / "0", policy_version=0)


def test_training_needs_a_temperature_above_zero(learner_spec):
    with pytest.raises(ValueError, match="temperature above 0"):
        learner_spec(temperature=0.0)

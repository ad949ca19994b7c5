"""Steps of several passes: the same gradients as in one, one objective each, and nothing half applied."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from driftgym.errors import NotDoneError, TrainingError
from driftgym.trainer.batch_shape import BatchShape
from driftgym.trainer.learner import Learner
from driftgym.trainer.models import LoraConfig, ModelConfig
from driftgym.trainer.objective_config import ObjectiveConfig
from driftgym.trainer.training_client import WarmupConfig

FIXED = {"normalisation": "fixed", "fixed_num_tokens": 16}


def published(learner, folder):
    return load_file(f"{learner.publish(folder, is_last=True).location}/model.safetensors")


def same(first, second, *, atol=0.0):
    return all(torch.allclose(first[name], second[name], rtol=0, atol=atol) for name in first.keys() | second.keys())


def gradients(learner):
    return {name: p.grad.clone() for name, p in learner.parameters.items() if p.grad is not None}


@pytest.fixture
def segments(make_segment):
    """Rows of groups of 3, 2 and 1, of a row without a group, and of one of which a part is not trained."""
    rows = [
        make_segment(seed=index, advantage=(-1) ** index * 0.5, num_prompt=4 + index, spans=(2 + index, 3, 4))
        for index in range(8)
    ]
    groups = ["a", "a", "b", "a", "b", "c", "", "c"]
    rows = [dataclasses.replace(row, group_id=group) for row, group in zip(rows, groups, strict=True)]
    train_mask = rows[5].loss_mask & (np.arange(len(rows[5].loss_mask)) < len(rows[5].loss_mask) - 2)
    nothing = dataclasses.replace(rows[7], train_mask=np.zeros_like(rows[7].loss_mask))
    return [*rows[:5], dataclasses.replace(rows[5], train_mask=train_mask), rows[6], nothing]


def parts_of(segments, cuts):
    bounds = [0, *cuts, len(segments)]
    return [segments[start:end] for start, end in itertools.pairwise(bounds)]


def with_nan(segment):
    return dataclasses.replace(segment, advantages=np.where(segment.loss_mask, math.nan, 0.0).astype(np.float32))


@pytest.mark.parametrize("cuts", [[4], [1, 2, 7], [0, 8]])
@pytest.mark.parametrize(
    "config", [{"normalisation": "token"}, {"normalisation": "sequence"}, {"normalisation": "prompt"}, FIXED]
)
def test_a_batch_in_several_calls_is_the_step_of_one(learner_spec, segments, config, cuts):
    whole, split = Learner(learner_spec(**config)), Learner(learner_spec(**config))
    whole.forward_backward(segments)
    shape = BatchShape.of(segments)
    passes = [split.forward_backward(part, batch=shape) for part in parts_of(segments, cuts)]
    expected = gradients(whole)
    scale = max(float(tensor.abs().max()) for tensor in expected.values())
    assert same(gradients(split), expected, atol=1e-6 * scale)
    one, several = whole.optim_step(), split.optim_step()
    assert sum(each.metrics["loss"] for each in passes) == pytest.approx(one.metrics["loss"], abs=1e-6)
    assert sum(each.num_lag0_tokens for each in passes) == one.num_lag0_tokens == several.num_lag0_tokens
    timed = {"learner_step_s", "num_micro_batches", "padding_fraction"}  # of how it was split
    assert {k: v for k, v in several.metrics.items() if k not in timed} == pytest.approx(
        {k: v for k, v in one.metrics.items() if k not in timed}, rel=1e-4, abs=1e-6
    )
    assert several.lag0_ratio_sum == pytest.approx(one.lag0_ratio_sum, rel=1e-5)


def test_a_pass_and_a_step_are_what_train_step_does(learner_spec, segments, tmp_path):
    together, apart = Learner(learner_spec()), Learner(learner_spec())
    for _ in range(2):
        report = together.train_step(segments)
        passed = apart.forward_backward(segments)
        step = apart.optim_step()
    assert {**report.metrics, "learner_step_s": 0} == {**step.metrics, "learner_step_s": 0}
    assert passed.metrics.items() <= step.metrics.items()
    assert same(published(together, tmp_path / "a"), published(apart, tmp_path / "b"))


def test_without_a_shape_two_calls_are_the_sum_of_two_losses(learner_spec, segments):
    learner, first, second = (Learner(learner_spec()) for _ in range(3))
    learner.forward_backward(segments[:3])
    learner.forward_backward(segments[3:])
    first.forward_backward(segments[:3])
    second.forward_backward(segments[3:])
    summed = {name: tensor + gradients(second)[name] for name, tensor in gradients(first).items()}
    assert same(gradients(learner), summed, atol=1e-5)


def test_an_objective_is_of_one_call(learner_spec, segments):
    learner = Learner(learner_spec(objective={"name": "ppo"}))
    plain = Learner(learner_spec(objective={"name": "reinforce"}))
    learner.forward_backward(segments, objective=ObjectiveConfig(name="reinforce"))
    plain.forward_backward(segments)
    assert same(gradients(learner), gradients(plain))
    learner.optim_step()
    learner.forward_backward(segments)
    now = gradients(learner)
    learner.optim_step()
    learner.forward_backward(segments, objective=ObjectiveConfig(name="ppo"))
    assert learner.policy_version == 2
    assert not same(now, gradients(learner)), "the weights have moved"


@pytest.mark.parametrize("name", ["gepo", "m2po", "bapo", "opmd"])
def test_an_objective_of_whole_batches_refuses_a_part(learner_spec, segments, name):
    learner = Learner(learner_spec(objective={"name": name}))
    with pytest.raises(TrainingError, match=f"{name} looks at the whole batch"):
        learner.forward_backward(segments[:4], batch=BatchShape.of(segments))
    with pytest.raises(NotDoneError):
        learner.optim_step()
    learner.forward_backward(segments, batch=BatchShape.of(segments))
    assert learner.optim_step().policy_version == 1


def test_segments_that_are_no_part_of_the_batch_are_refused(learner_spec, segments):
    learner = Learner(learner_spec())
    with pytest.raises(TrainingError, match="no part of the batch"):
        learner.forward_backward(segments, batch=BatchShape.of(segments[:4]))


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("after", [0, 2])
def test_a_pass_that_is_not_finite_spoils_its_step_and_no_other(learner_spec, segments, tmp_path, before, after):
    learner, untouched = Learner(learner_spec()), Learner(learner_spec())
    for one in (learner, untouched):
        one.train_step(segments)
    for _ in range(before):
        learner.forward_backward(segments)
    with pytest.raises(TrainingError, match=r"^step 2: the loss is not finite.*Trajectories: t3$"):
        learner.forward_backward([segments[2], with_nan(segments[3])])
    assert not gradients(learner)
    for _ in range(after):
        with pytest.raises(NotDoneError, match=r"forward_backward was not done: .*step 2 .*Trajectories: t3$"):
            learner.forward_backward(segments)
    assert same(published(learner, tmp_path / "a"), published(untouched, tmp_path / "b"))
    with pytest.raises(NotDoneError, match=r"optim_step was not done: .*failed: step 2: the loss is not finite"):
        learner.optim_step()
    assert learner.policy_version == 1
    for one in (learner, untouched):
        one.train_step(segments)
    assert same(published(learner, tmp_path / "c"), published(untouched, tmp_path / "d"))


def test_an_error_of_any_other_kind_is_named_in_one_line(learner_spec, segments):
    learner = Learner(learner_spec())
    with pytest.raises(AttributeError):
        learner.forward_backward([*segments, None])
    with pytest.raises(NotDoneError, match=r"forward_backward failed: AttributeError: [^\n]+$"):
        learner.optim_step()


def test_a_row_that_no_pass_can_read_is_named(learner_spec, segments):
    learner = Learner(learner_spec())
    unknown = dataclasses.replace(segments[0], token_ids=np.full_like(segments[0].token_ids, 10_000))
    untold = dataclasses.replace(
        segments[1], loss_mask=np.ones_like(segments[1].loss_mask), train_mask=segments[1].train_mask
    )
    for row, problem in ((unknown, "t0: token 10000 is unknown"), (untold, "t1: the first token cannot be trained")):
        with pytest.raises(TrainingError, match=problem):
            learner.train_step([row])
    assert learner.train_step(segments).policy_version == 1


def test_a_step_without_a_pass_counts_and_changes_nothing(learner_spec, segments, tmp_path):
    learner, empty = Learner(learner_spec()), Learner(learner_spec())
    before = published(learner, tmp_path / "a")
    report, other = learner.optim_step(), empty.train_step([])
    assert report.metrics["update_skipped"] == 1.0
    assert report.metrics.keys() == other.metrics.keys()
    assert report.policy_version == 1
    assert same(before, published(learner, tmp_path / "b"))


def test_what_is_written_in_the_middle_of_a_step_is_of_before_it(learner_spec, segments, tmp_path):
    learner, plain = Learner(learner_spec()), Learner(learner_spec())
    before = published(learner, tmp_path / "a")
    learner.forward_backward(segments)
    assert same(before, published(learner, tmp_path / "b"))
    learner.save(tmp_path / "0")
    learner.optim_step()
    plain.train_step(segments)
    after = published(plain, tmp_path / "c")
    assert same(after, published(learner, tmp_path / "d"))
    resumed = Learner(learner_spec())
    resumed.forward_backward(segments[:2])  # gradients that are forgotten
    resumed.load(tmp_path / "0", policy_version=0)
    resumed.train_step(segments)
    assert same(after, published(resumed, tmp_path / "e"))


def test_a_warm_up_has_its_place_between_steps_and_leaves_no_gradient(learner_spec, segments):
    learner = Learner(learner_spec(warmup=WarmupConfig(num_steps=2, batch_size=4)))
    learner.forward_backward(segments)
    with pytest.raises(TrainingError, match="in the middle of a step"):
        learner.warm_up(segments)
    learner.optim_step()
    learner.warm_up(segments)
    assert not gradients(learner)


def test_the_first_weights_are_there_only_for_those_who_asked_in_time(learner_spec, segments, tmp_path):
    tba = ObjectiveConfig(name="tba")
    late = Learner(learner_spec())
    late.train_step(segments)
    with pytest.raises(TrainingError, match="tba reads the weights from before the first step"):
        late.forward_backward(segments, objective=tba)
    early, resumed = Learner(learner_spec()), Learner(learner_spec())
    early.forward_backward(segments, objective=tba)
    early.optim_step()
    early.save(tmp_path / "1")
    resumed.load(tmp_path / "1", policy_version=1)
    for learner in (early, resumed):
        learner.forward_backward(segments, objective=tba)
    assert same(gradients(early), gradients(resumed))


def test_adapters_train_in_several_calls_too(learner_spec, segments, tmp_path):
    base = Learner(learner_spec()).publish(tmp_path / "base").location
    model = ModelConfig(path=base, lora=LoraConfig(rank=4, alpha=8.0))
    spec = dataclasses.replace(learner_spec(kl={"coef": 0.1}), model=model, model_folder=tmp_path / "base" / "1-0")
    whole, split = Learner(spec), Learner(spec)
    for _ in range(2):
        one = whole.train_step(segments)
        for part in parts_of(segments, [3]):
            split.forward_backward(part, batch=BatchShape.of(segments))
        several = split.optim_step()
    assert several.metrics["grad_norm"] == pytest.approx(one.metrics["grad_norm"], rel=1e-3)
    assert same(published(whole, tmp_path / "a"), published(split, tmp_path / "b"), atol=1e-4)


def test_the_shape_of_a_batch(segments):
    shape = BatchShape.of(segments)
    assert shape.num_tokens == sum(int(segment.loss_mask.sum()) for segment in segments)
    assert (shape.num_sequences, shape.num_prompts) == (8, 4)
    assert set(shape.tokens_by_group) == {"a", "b", "c"}
    assert all(shape.holds(BatchShape.of(part)) for part in parts_of(segments, [3, 5]))
    assert not BatchShape.of(segments[:3]).holds(BatchShape.of(segments[3:5])), "more of group b"
    with pytest.raises(ValueError, match="groups of 1"):
        BatchShape.of_lengths([1, 2], groups=["a"])

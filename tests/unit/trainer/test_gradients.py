"""Any split into micro-batches gives the same loss and gradients, for every objective and every normalisation."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from passes import Models, check_same, policy_and_reference, run_pass

from driftgym.errors import TrainingError
from driftgym.trainer.batching import Row
from driftgym.trainer.learner import Learner
from driftgym.trainer.model_loading import trained_parameters
from driftgym.trainer.objective_config import KlConfig, Normalisation, ObjectiveConfig
from driftgym.trainer.objectives import OBJECTIVES, LossSpec, token_weights
from driftgym.trainer.training_client import LearnerSpec
from driftgym.types import Segment

SHAPES = [(3, (1, 0, 2)), (20, (4, 3, 5)), (7, (2, 9, 1)), (12, (6, 1, 1)), (5, (8, 0, 0)), (9, (2, 2, 2))]


@pytest.fixture
def models(tiny_model_folder: Path) -> Models:
    return policy_and_reference(tiny_model_folder)


@pytest.fixture
def segments(make_segment: Callable[..., Segment]) -> list[Segment]:
    """Six rows of three groups, ragged, of several versions; a part of one is not trained."""
    made = [
        dataclasses.replace(
            make_segment(seed=index, num_prompt=num, spans=spans, advantage=(-1) ** index * 0.5, version=index % 3),
            group_id=f"g{index // 2}",
            reward=float(index % 2 == 0),
        )
        for index, (num, spans) in enumerate(SHAPES)
    ]
    kept = made[1].loss_mask.copy()
    kept[: len(kept) // 2 + 12] = False
    made[1] = dataclasses.replace(made[1], train_mask=kept)
    return made


def rows_of(segments: Sequence[Segment], normalisation: Normalisation = "token") -> list[Row]:
    weights = token_weights(
        [int(s.loss_mask.sum()) for s in segments],
        normalisation=normalisation,
        groups=[s.group_id for s in segments],
        fixed_num_tokens=10,
    )
    return [Row(segment=s, token_weight=weight) for s, weight in zip(segments, weights, strict=True)]


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_any_split_and_any_order(models: Models, segments: list[Segment], name: str) -> None:
    loss = LossSpec(objective=ObjectiveConfig(name=name))  # type: ignore[arg-type]
    rows = rows_of(segments)
    whole = run_pass(models, rows, loss, max_tokens=10_000)
    assert whole[1]
    for max_tokens in (1, 40):
        split = run_pass(models, rows, loss, max_tokens=max_tokens)
        assert split[0].num_micro_batches > 2
        check_same(whole, split)
    check_same(whole, run_pass(models, rows[::-1], loss, max_tokens=40))


@pytest.mark.parametrize("normalisation", ["token", "sequence", "prompt", "fixed"])
def test_any_split_for_every_normalisation(
    models: Models, segments: list[Segment], normalisation: Normalisation
) -> None:
    loss = LossSpec(objective=ObjectiveConfig(name="m2po"))
    rows = rows_of(segments, normalisation)
    check_same(run_pass(models, rows, loss, max_tokens=10_000), run_pass(models, rows, loss, max_tokens=1))


def test_a_row_that_is_masked_as_a_whole_still_counts_in_the_baseline(models: Models, segments: list[Segment]) -> None:
    """The failure beside it is pushed down for what its sibling got, whether that is trained or not."""
    success, failure = segments[:2]
    masked = dataclasses.replace(success, train_mask=success.loss_mask & False)
    loss = LossSpec(objective=ObjectiveConfig(name="opmd", tau=1e-9))
    for max_tokens in (1, 10_000):
        report, _ = run_pass(models, rows_of([masked, failure], "sequence"), loss, max_tokens=max_tokens)
        assert report.record is not None
        num_trained = int(failure.train_mask.sum())
        share = num_trained / int(failure.loss_mask.sum())
        assert report.loss == pytest.approx(0.5 * float(report.record.logprobs.sum()) * share / 2, rel=1e-5)


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_any_split_with_a_kl_term_and_stale_failures_left_out(
    models: Models, segments: list[Segment], place: Any
) -> None:
    loss = LossSpec(objective=ObjectiveConfig(name="ppo"), kl=KlConfig(coef=0.1, place=place), max_failure_drift=0.0)
    rows = rows_of(segments)
    whole = run_pass(models, rows, loss, max_tokens=10_000)
    check_same(whole, run_pass(models, rows, loss, max_tokens=1))
    assert whole[0].metrics()["mask_fraction"] > 0


def test_the_surrogate_of_the_second_pass_is_the_gradient_of_the_loss(models: Models, segments: list[Segment]) -> None:
    """Finite differences of the loss of the whole batch along its gradient."""
    loss = LossSpec(objective=ObjectiveConfig(name="tba"))
    whole = [dataclasses.replace(segment, train_mask=segment.loss_mask) for segment in segments]
    rows = rows_of(whole, "sequence")
    _, gradients = run_pass(models, rows, loss, max_tokens=1)
    parameters = trained_parameters(models[0])
    squared = sum(float(g.square().sum()) for g in gradients.values())

    def loss_at(step: float) -> float:
        with torch.no_grad():
            for name, gradient in gradients.items():
                parameters[name].add_(step * gradient)
        value = run_pass(models, rows, loss, max_tokens=10_000)[0].loss
        with torch.no_grad():
            for name, gradient in gradients.items():
                parameters[name].add_(-step * gradient)
        return value

    step = 1e-3 / squared**0.5
    # log Z is detached, and its own slope adds to the difference: it is the same for all of a group, and the sum over
    # the group of what it is multiplied by is zero.
    assert (loss_at(step) - loss_at(-step)) / (2 * step) == pytest.approx(squared, rel=1e-2)


def test_a_reference_is_kept_over_steps_and_checkpoints(
    learner_spec: Callable[..., LearnerSpec], segments: list[Segment], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"objective": {"name": "reinforce"}, "kl": {"coef": 0.5}}
    learner = Learner(learner_spec(**options))
    learner.train_step(segments)
    learner.save(tmp_path / "at-1")
    learner.train_step(segments)
    resumed = Learner(learner_spec(**options))
    resumed.train_step(segments[:2])  # its own past is forgotten
    resumed.load(tmp_path / "at-1", policy_version=1)
    report = resumed.train_step(segments)
    assert report.policy_version == 2
    for one, other in zip(learner.parameters.values(), resumed.parameters.values(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_checkpoint_without_a_reference_is_refused_where_one_is_needed(
    learner_spec: Callable[..., LearnerSpec], segments: list[Segment], tmp_path: Path
) -> None:
    plain = Learner(learner_spec(objective={"name": "reinforce"}))
    plain.train_step(segments)
    plain.save(tmp_path / "at-1")
    with pytest.raises(TrainingError, match="without a reference policy"):
        Learner(learner_spec(kl={"coef": 0.5})).load(tmp_path / "at-1", policy_version=1)

"""A trajectory counts as one sequence, in however many rows its rewritten contexts have cut it.

Rows that are cut so that every token keeps the context that it had are scored as before: whatever the objective, they
must give the figures and the gradients of the row that they were cut from.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from passes import Models, Passed, check_same, policy_and_reference, run_pass

from driftgym.errors import TrainingError
from driftgym.trainer.batch_shape import BatchShape, group_names, sampled_lengths, sequence_names
from driftgym.trainer.batching import Row
from driftgym.trainer.learner import Learner
from driftgym.trainer.objective_config import KlConfig, Normalisation, ObjectiveConfig
from driftgym.trainer.objectives import OBJECTIVES, LossSpec, token_weights
from driftgym.types import Segment

NORMALISATIONS: tuple[Normalisation, ...] = ("token", "sequence", "prompt", "fixed")
LEVELS = [("tis", "sequence"), ("mis", "geometric"), ("topr", "sequence"), ("opmd", "residual")]


@pytest.fixture
def models(tiny_model_folder: Path) -> Models:
    return policy_and_reference(tiny_model_folder)


@pytest.fixture
def whole(make_segment: Callable[..., Segment]) -> list[Segment]:
    """Five trajectories of a row each: of a group of three, of one of one, and without a group."""
    made = [
        make_segment(
            seed=index, num_prompt=3 + index, spans=(4, 3, 5), advantage=(-1) ** index * 0.5, version=index % 3
        )
        for index in range(5)
    ]
    groups = ("a", "a", "a", "b", "")
    return [
        dataclasses.replace(segment, group_id=group, reward=float(index % 2 == 0))
        for index, (segment, group) in enumerate(zip(made, groups, strict=True))
    ]


def cut(segment: Segment, *places: int) -> list[Segment]:
    """`segment` in rows that end at `places`, the last at its end; each begins with all before, not to be trained."""
    sampled = np.flatnonzero(segment.loss_mask)
    bounds = [0, *(int(sampled[place]) for place in places), len(segment.loss_mask)]
    rows = []
    for index, (start, end) in enumerate(itertools.pairwise(bounds)):
        own = np.arange(end) >= start
        arrays = {
            name: getattr(segment, name)[:end]
            for name in ("token_ids", "behaviour_logprobs", "policy_versions", "advantages")
        }
        masks = {name: getattr(segment, name)[:end] & own for name in ("loss_mask", "train_mask", "exact_mask")}
        rows.append(dataclasses.replace(segment, segment_index=index, **arrays, **masks))
    return rows


def cut_all(segments: Sequence[Segment]) -> list[Segment]:
    """Two in three rows, one in two, the others as they are; the rows of one far from each other."""
    first, second, third, *others = segments
    rows = [cut(first, 3, 7), cut(second, 5), cut(third, 1, 2)]
    return [*rows[0][:1], *rows[2][::-1], *others, *rows[1], *rows[0][1:]]


def run(
    models: Models,
    segments: Sequence[Segment],
    loss: LossSpec,
    *,
    max_tokens: int,
    normalisation: Normalisation = "sequence",
) -> Passed:
    weights = token_weights(
        sampled_lengths(segments),
        normalisation=normalisation,
        groups=group_names(segments),
        sequences=sequence_names(segments),
        fixed_num_tokens=10,
    )
    rows = [Row(segment=s, token_weight=weight) for s, weight in zip(segments, weights, strict=True)]
    return run_pass(models, rows, loss, max_tokens=max_tokens)


def check_cut(models: Models, whole: list[Segment], loss: LossSpec, **options: Any) -> None:
    expected = run(models, whole, loss, max_tokens=10_000, **options)
    assert expected[1]
    for max_tokens in (1, 40):
        check_same(expected, run(models, cut_all(whole), loss, max_tokens=max_tokens, **options))


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_every_objective_takes_the_rows_of_a_trajectory_together(
    models: Models, whole: list[Segment], name: str
) -> None:
    check_cut(models, whole, LossSpec(objective=ObjectiveConfig(name=name)))  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "level"), LEVELS)
def test_every_level_of_sequences_takes_them_together(
    models: Models, whole: list[Segment], name: str, level: str
) -> None:
    key = "form" if name == "opmd" else "level"
    config = ObjectiveConfig.model_validate({"name": name, key: level})
    check_cut(models, whole, LossSpec(objective=config))


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
def test_every_normalisation_counts_a_trajectory_once(
    models: Models, whole: list[Segment], normalisation: Normalisation
) -> None:
    check_cut(models, whole, LossSpec(objective=ObjectiveConfig(name="gspo")), normalisation=normalisation)


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_a_kl_term_and_the_mask_of_stale_failures_do_too(models: Models, whole: list[Segment], place: Any) -> None:
    """A penalty in the reward counts for what was sampled before it, also in earlier rows."""
    kl = KlConfig(coef=0.1, place=place)
    check_cut(models, whole, LossSpec(objective=ObjectiveConfig(name="ppo"), kl=kl, max_failure_drift=0.0))


def test_a_row_without_an_advantage_moves_with_the_others_of_its_trajectory(
    models: Models, whole: list[Segment]
) -> None:
    """With credit by turns a row may have none of its own; its ratios are in the product that weighs the others."""
    sampled = np.flatnonzero(whole[0].loss_mask)
    advantages = whole[0].advantages.copy()
    advantages[: int(sampled[3])] = 0.0
    partly = [dataclasses.replace(whole[0], advantages=advantages), *whole[1:]]
    check_cut(models, partly, LossSpec(objective=ObjectiveConfig(name="gspo")))


def test_a_cut_trajectory_has_the_weight_of_one_in_the_shape_of_a_batch(whole: list[Segment]) -> None:
    shape, one = BatchShape.of(cut_all(whole)), BatchShape.of(whole)
    assert shape == one
    assert (shape.num_sequences, shape.num_prompts) == (5, 3)
    rows = cut(whole[4], 2)
    assert shape.holds(BatchShape.of(rows))
    assert shape.cuts_a_sequence(BatchShape.of(rows[:1]))
    assert not shape.cuts_a_sequence(BatchShape.of(rows))
    again = [dataclasses.replace(row, segment_index=7) for row in rows]
    assert not shape.holds(BatchShape.of([*rows, *again])), "more tokens of a sequence than it has"


def test_calls_that_cut_a_trajectory_are_refused_where_the_loss_looks_at_all_of_it(
    learner_spec: Any, whole: list[Segment]
) -> None:
    rows = [*cut(whole[0], 3), *whole[1:]]
    shape = BatchShape.of(rows)
    learner = Learner(learner_spec(objective=ObjectiveConfig(name="robust")))
    with pytest.raises(TrainingError, match="all segments of a trajectory in one call"):
        learner.forward_backward(rows[:1], batch=shape)
    with pytest.raises(TrainingError):
        learner.optim_step()
    learner.forward_backward(rows[:2], batch=shape)
    learner.forward_backward(rows[2:], batch=shape)
    assert learner.optim_step().policy_version == 1


@pytest.mark.parametrize("normalisation", ["token", "sequence", "prompt"])
def test_calls_may_cut_one_where_the_loss_is_of_tokens(
    learner_spec: Any, whole: list[Segment], normalisation: Normalisation
) -> None:
    """Weights and figures are those of one call with the row uncut."""
    rows = [*cut(whole[0], 3), *whole[1:]]
    config = {"objective": ObjectiveConfig(name="aipo"), "normalisation": normalisation}
    one, several = Learner(learner_spec(**config)), Learner(learner_spec(**config))
    one.forward_backward(whole)
    several.forward_backward(rows[:1], batch=BatchShape.of(rows))
    several.forward_backward(rows[1:], batch=BatchShape.of(rows))
    for name, parameter in one.parameters.items():
        torch.testing.assert_close(several.parameters[name].grad, parameter.grad, rtol=1e-4, atol=1e-6)
    apart = {"learner_step_s", "num_micro_batches", "padding_fraction", "num_segments"}
    expected, found = one.optim_step().metrics, several.optim_step().metrics
    for name in expected.keys() - apart:
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


def test_what_is_not_finite_is_named_once(learner_spec: Any, whole: list[Segment]) -> None:
    advantages = np.where(whole[0].loss_mask, np.nan, 0.0).astype(np.float32)
    rows = [*cut(dataclasses.replace(whole[0], advantages=advantages), 3), *whole[1:]]
    learner = Learner(learner_spec(objective=ObjectiveConfig(name="robust")))
    with pytest.raises(TrainingError, match=rf"Trajectories: {whole[0].trajectory_id}$"):
        learner.forward_backward(rows)

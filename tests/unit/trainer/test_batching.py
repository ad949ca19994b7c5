"""Any split and any padding give the same loss and the same gradients; log-probs are those of the whole model."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from driftgym.trainer.batching import Row, micro_batch, plan_micro_batches, score_tokens
from driftgym.trainer.gradients import PassSettings, accumulate_gradients
from driftgym.trainer.model_loading import load_model, trained_parameters
from driftgym.trainer.models import ModelConfig
from driftgym.trainer.objective_config import ObjectiveConfig
from driftgym.trainer.objectives import LossSpec, token_weights

_CPU = torch.device("cpu")
_OBJECTIVES = ("reinforce", "ppo", "tis", "gspo")


@pytest.fixture
def model(tiny_model_folder):
    config = ModelConfig(path="m", init="random")
    return load_model(config, tiny_model_folder, seed=3, device=_CPU).double()


def _rows(segments):
    weights = token_weights([int(s.loss_mask.sum()) for s in segments], normalisation="token")
    return [Row(segment=s, token_weight=weight) for s, weight in zip(segments, weights, strict=True)]


@pytest.fixture
def ragged(make_segment):
    shapes = [(3, (1, 0, 2)), (20, (4, 3, 5)), (7, (2, 9, 1)), (12, (6, 1, 1)), (5, (8, 0, 0))]
    return [
        make_segment(seed=index, num_prompt=num, spans=spans, advantage=(-1) ** index * 0.5, version=index % 2)
        for index, (num, spans) in enumerate(shapes)
    ]


def _settings(*, max_tokens, objective="tis", temperature=1.0):
    loss = LossSpec(objective=ObjectiveConfig(name=objective))
    return PassSettings(loss=loss, temperature=temperature, max_tokens=max_tokens, device=_CPU)


def _gradients(model, rows, *, max_tokens, objective="tis", temperature=1.0):
    model.zero_grad()
    settings = _settings(max_tokens=max_tokens, objective=objective, temperature=temperature)
    report = accumulate_gradients(model, rows, policy_version=2, settings=settings)
    return report, {name: p.grad.clone() for name, p in trained_parameters(model).items()}


@pytest.mark.parametrize("objective", _OBJECTIVES)
def test_any_split_gives_the_same_loss_and_gradients(model, ragged, objective):
    rows = _rows(ragged)
    whole, gradients = _gradients(model, rows, max_tokens=10_000, objective=objective)
    assert whole.num_micro_batches == 1
    for max_tokens in (1, 30, 70):
        split, others = _gradients(model, rows, max_tokens=max_tokens, objective=objective)
        assert split.num_micro_batches > 1
        assert split.loss == pytest.approx(whole.loss, abs=1e-6)
        for name, gradient in gradients.items():
            # transformers computes norms in float32, backwards too: tokens that rows share add up before or after
            torch.testing.assert_close(others[name], gradient, rtol=1e-5, atol=1e-8)


def test_padding_and_order_change_nothing(model, ragged):
    rows = _rows(ragged)
    together, gradients = _gradients(model, rows, max_tokens=10_000)
    reverse, others = _gradients(model, rows[::-1], max_tokens=10_000)
    assert reverse.loss == pytest.approx(together.loss, abs=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_plain_forward_of_the_model(model, ragged, temperature):
    for row in _rows(ragged):
        batch = micro_batch([row, _rows(ragged)[1]], policy_version=2, device=_CPU)
        scores = score_tokens(model, batch, temperature=temperature)
        segment = row.segment
        logits = model(input_ids=torch.tensor(segment.token_ids.astype(np.int64))[None]).logits[0] / temperature
        where = torch.from_numpy(np.flatnonzero(segment.loss_mask))
        plain = torch.log_softmax(logits, -1)[where - 1]
        targets = torch.tensor(segment.token_ids.astype(np.int64))[where]
        torch.testing.assert_close(scores.logprobs[: len(where)], plain.gather(1, targets[:, None])[:, 0])
        entropies = torch.distributions.Categorical(logits=plain).entropy()
        torch.testing.assert_close(scores.entropies[: len(where)], entropies)


class _FixedHead(torch.nn.Module):
    """A model whose logits are the same everywhere."""

    def __init__(self, logits):
        super().__init__()
        self._logits = torch.tensor(logits)

    def get_decoder(self):
        return self

    def get_output_embeddings(self):
        return lambda hidden: self._logits.expand(len(hidden), -1)

    def forward(self, *, input_ids, use_cache):
        return self

    @property
    def last_hidden_state(self):
        return torch.zeros(1, 2, 4)


def test_the_temperature_divides_the_logits(make_segment):
    segment = make_segment(seed=0, num_prompt=1, spans=(1, 0, 0))
    segment = dataclasses.replace(segment, token_ids=[0, 1])
    batch = micro_batch(_rows([segment]), policy_version=0, device=_CPU)
    scores = score_tokens(_FixedHead([2.0, 1.0, 0.0]), batch, temperature=0.5)
    assert scores.logprobs.item() == pytest.approx(-2.1429, abs=1e-4)


def test_worked_example_of_020_at_version_3_that_is_026_at_version_5(make_segment):
    segment = make_segment(seed=0, num_prompt=1, spans=(1, 0, 0), version=3)
    segment = dataclasses.replace(segment, token_ids=[0, 1], behaviour_logprobs=[0.0, math.log(0.20)])
    settings = _settings(max_tokens=100)
    model = _FixedHead([math.log(0.30), math.log(0.26), math.log(0.44)])
    with torch.no_grad():
        batch = micro_batch(_rows([segment]), policy_version=5, device=_CPU)
        assert batch.lags.tolist() == [2]
        logprobs = score_tokens(model, batch, temperature=settings.temperature).logprobs
    assert (logprobs - batch.behaviour_logprobs).exp().tolist() == pytest.approx([1.3], rel=1e-6)
    inert = dataclasses.replace(segment, advantages=[0.0, 0.0])
    report = accumulate_gradients(model, _rows([inert]), policy_version=5, settings=settings)
    assert report.metrics()["ratio_mean"] == pytest.approx(1.3, rel=1e-6)
    assert len(report.lag0_log_ratios()) == 0
    fresh = accumulate_gradients(model, _rows([inert]), policy_version=3, settings=settings)
    assert fresh.lag0_log_ratios().exp().tolist() == pytest.approx([1.3], rel=1e-6)


def test_what_a_tool_said_gets_no_gradient_of_its_own(model, ragged):
    """Changing which token a tool wrote at the very end of a row, after all sampled ones, changes nothing at all."""
    segment = ragged[1]
    tail = np.zeros(4)
    longer = [
        dataclasses.replace(
            segment,
            token_ids=np.concatenate([segment.token_ids, tail + filler]),
            **{
                name: np.concatenate([getattr(segment, name), tail])
                for name in ("loss_mask", "behaviour_logprobs", "policy_versions", "advantages")
            },
            train_mask=None,
            exact_mask=None,
        )
        for filler in (1, 2)
    ]
    first, gradients = _gradients(model, _rows([longer[0]]), max_tokens=1000)
    second, others = _gradients(model, _rows([longer[1]]), max_tokens=1000)
    assert first.loss == second.loss
    assert all(torch.equal(gradients[name], others[name]) for name in gradients)


def test_only_sampled_tokens_are_predicted(ragged):
    for row in _rows(ragged):
        batch = micro_batch([row], policy_version=0, device=_CPU)
        assert batch.predictors.tolist() == (np.flatnonzero(row.segment.loss_mask) - 1).tolist()
        assert batch.targets.tolist() == row.segment.token_ids[row.segment.loss_mask].tolist()
        assert batch.token_ids.shape[1] == np.flatnonzero(row.segment.loss_mask)[-1]


def test_a_row_without_trained_tokens_is_left_out(model, ragged):
    nothing = dataclasses.replace(ragged[0], train_mask=np.zeros_like(ragged[0].loss_mask))
    assert plan_micro_batches(_rows([nothing]), max_tokens=100) == []
    model.zero_grad()
    settings = _settings(max_tokens=100)
    report = accumulate_gradients(model, _rows([nothing]), policy_version=0, settings=settings)
    assert report.loss == 0.0
    assert len(report.lag0_log_ratios()) == 0
    assert all(p.grad is None for p in trained_parameters(model).values())


def test_masking_a_token_does_not_change_what_the_others_count(model, ragged):
    """The denominator is fixed before masking: the masked loss is the sum of what is left."""
    segment = ragged[1]
    half = segment.loss_mask & (np.arange(len(segment.loss_mask)) % 2 == 0)
    parts = [dataclasses.replace(segment, train_mask=mask) for mask in (half, segment.loss_mask & ~half)]
    whole = _gradients(model, _rows([segment]), max_tokens=1000)[0].loss
    assert sum(_gradients(model, _rows([part]), max_tokens=1000)[0].loss for part in parts) == pytest.approx(whole)


def test_rows_without_advantage_are_scored_without_a_gradient(model, ragged, make_segment):
    inert = make_segment(seed=50, advantage=0.0, version=2)
    rows = _rows([*ragged, inert])
    report, gradients = _gradients(model, rows, max_tokens=10_000)
    alone, others = _gradients(model, rows[:-1], max_tokens=10_000)
    assert len(report.record.logprobs) == len(alone.record.logprobs) + int(inert.loss_mask.sum())
    assert len(report.lag0_log_ratios()) == int(inert.loss_mask.sum())
    assert all(torch.equal(gradients[name], others[name]) for name in gradients)


def test_groups_stay_within_the_budget_and_hold_every_row(ragged):
    rows = _rows(ragged)
    for max_tokens in (1, 20, 45, 1000):
        groups = plan_micro_batches(rows, max_tokens=max_tokens)
        assert sorted(row.segment.trajectory_id for group in groups for row in group) == ["t0", "t1", "t2", "t3", "t4"]
        for group in groups:
            batch = micro_batch(group, policy_version=0, device=_CPU)
            assert len(group) == 1 or batch.num_inputs <= max_tokens


def test_a_first_token_cannot_be_trained(make_segment):
    segment = make_segment(seed=0, num_prompt=0)
    with pytest.raises(ValueError, match="first token"):
        plan_micro_batches(_rows([segment]), max_tokens=100)

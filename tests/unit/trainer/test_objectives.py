"""Losses and gradients against figures computed elsewhere; masks, splits and extreme ratios."""

import json
import math
from pathlib import Path

import pytest
import torch

from driftgym.trainer.learner_config import PpoConfig, ReinforceConfig, TisConfig
from driftgym.trainer.objectives import (
    OBJECTIVES,
    TokenBatch,
    ppo,
    ratio_metrics,
    reinforce,
    tis,
    tis_proximal,
    token_weights,
)

_DATA = json.loads((Path(__file__).parents[2] / "data" / "objective_vectors.json").read_text())
_D1 = _DATA["meta"]["D1"]
_VECTORS = {vector["id"]: vector for vector in _DATA["vectors"]}
_MASK = torch.tensor(_D1["mask"]).bool()
_CONFIGS = {"reinforce": ReinforceConfig(), "ppo": PpoConfig(), "tis": TisConfig()}


def _batch(dtype=torch.float64, *, logprobs=None):
    advantages = torch.tensor(_D1["advantage_per_sequence"], dtype=dtype)[:, None].expand(4, 5)
    return TokenBatch(
        logprobs=torch.tensor(logprobs or _D1["logp_new"], dtype=dtype, requires_grad=True),
        behaviour_logprobs=torch.tensor(_D1["logp_behav"], dtype=dtype),
        advantages=advantages,
        mask=_MASK,
    )


def _weights(aggregation="token_mean", fixed_num_tokens=None):
    """[4, 5]: the weight of each token of D1."""
    per_row = token_weights(_MASK.sum(1).tolist(), aggregation=aggregation, fixed_num_tokens=fixed_num_tokens)
    return torch.tensor(per_row, dtype=torch.float64)[:, None]


def _check(vector_id, batch, result, weights):
    expected = _VECTORS[vector_id]["expected"]
    exact = batch.logprobs.dtype == torch.float64
    limits = {"rtol": 0, "atol": 1e-9} if exact else {"rtol": 1e-5, "atol": 1e-6}
    loss = (result.losses * weights.to(result.losses.dtype)).sum()
    loss.backward()
    torch.testing.assert_close(loss, torch.tensor(expected["loss"], dtype=loss.dtype), **limits)
    gradient = torch.tensor(expected["grad_logp_new"], dtype=loss.dtype)
    torch.testing.assert_close(batch.logprobs.grad, gradient, **limits)


_PPO_CASES = {
    "ppo_clip_token_mean": (PpoConfig(eps_low=0.2, eps_high=0.2), "token_mean", None),
    "ppo_clip_higher_token_mean": (PpoConfig(eps_low=0.2, eps_high=0.28), "token_mean", None),
    "ppo_dual_clip_token_mean": (PpoConfig(eps_low=0.2, eps_high=0.28, dual_clip=3.0), "token_mean", None),
    "agg_seq_mean_token_mean": (PpoConfig(), "seq_mean_token_mean", None),
    "agg_seq_mean_token_sum": (PpoConfig(), "seq_mean_token_sum", None),
    "agg_dr_grpo_fixed_den": (PpoConfig(), "fixed", 8),
    "agg_fixed_global_tokens": (PpoConfig(), "fixed", 5),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("vector_id", _PPO_CASES)
def test_ppo_vectors(vector_id, dtype):
    config, aggregation, fixed_num_tokens = _PPO_CASES[vector_id]
    batch = _batch(dtype)
    _check(vector_id, batch, ppo(batch, config), _weights(aggregation, fixed_num_tokens))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("vector_id", "config"),
    [("aipo_rho2", TisConfig(cap=2.0)), ("cispo_upper_only_6", TisConfig(cap=6.0))],
)
def test_tis_vectors(vector_id, config, dtype):
    batch = _batch(dtype)
    _check(vector_id, batch, tis(batch, config), _weights())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_tis_against_a_proximal_policy(dtype):
    batch = _batch(dtype)
    proximal = torch.tensor(_D1["logp_prox"], dtype=dtype)
    clip = PpoConfig(eps_low=0.2, eps_high=0.28)
    result = tis_proximal(batch, proximal_logprobs=proximal, clip=clip, cap=2.0)
    _check("tis_token_cap2", batch, result, _weights())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_reinforce_vector(dtype):
    batch = _batch(dtype)
    _check("reinforce_no_is", batch, reinforce(batch, ReinforceConfig()), _weights())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_on_policy_all_objectives_have_the_same_gradient(name):
    batch = _batch(logprobs=_D1["logp_behav"])
    (OBJECTIVES[name](batch, _CONFIGS[name]).losses * _weights()).sum().backward()
    expected = torch.tensor(_VECTORS["onpolicy_equivalence"]["expected"]["grad_logp_new"], dtype=torch.float64)
    torch.testing.assert_close(batch.logprobs.grad, expected, rtol=0, atol=1e-9)


def test_on_policy_against_a_proximal_policy():
    batch = _batch(logprobs=_D1["logp_behav"])
    result = tis_proximal(batch, proximal_logprobs=batch.behaviour_logprobs, clip=PpoConfig(), cap=2.0)
    (result.losses * _weights()).sum().backward()
    expected = torch.tensor(_VECTORS["onpolicy_equivalence"]["expected"]["grad_logp_new"], dtype=torch.float64)
    torch.testing.assert_close(batch.logprobs.grad, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("objective", "config", "advantage", "loss", "gradient"),
    [
        (ppo, PpoConfig(eps_low=0.2, eps_high=0.2), 1.0, -1.2, 0.0),
        (ppo, PpoConfig(eps_low=0.2, eps_high=0.2), -1.0, 1.3, 1.3),
        (ppo, PpoConfig(eps_low=0.2, eps_high=0.28), 1.0, -1.28, 0.0),
        (ppo, PpoConfig(eps_low=0.2, eps_high=0.35), 1.0, -1.3, -1.3),
        (ppo, PpoConfig(dual_clip=1.25), -1.0, 1.25, 0.0),
        (tis, TisConfig(cap=2.0), 1.0, -1.3 * math.log(0.26), -1.3),
        (tis, TisConfig(cap=1.1), 1.0, -1.1 * math.log(0.26), -1.1),
    ],
)
def test_worked_example_of_probability_020_that_became_026(objective, config, advantage, loss, gradient):
    batch = TokenBatch(
        logprobs=torch.tensor([math.log(0.26)], dtype=torch.float64, requires_grad=True),
        behaviour_logprobs=torch.tensor([math.log(0.20)], dtype=torch.float64),
        advantages=torch.tensor([advantage], dtype=torch.float64),
        mask=torch.tensor([True]),
    )
    expected = _VECTORS["worked_example_1.3"]["expected"]
    metrics = ratio_metrics(batch)
    assert metrics["ratio_mean"] == pytest.approx(expected["ratio"], abs=1e-12)
    assert metrics["kl_k1"] == pytest.approx(expected["k1_behav_minus_new"], abs=1e-12)
    assert metrics["kl_k3"] == pytest.approx(expected["k3_r_minus_1_minus_logr"], abs=1e-12)
    result = objective(batch, config)
    result.losses.sum().backward()
    assert result.losses.item() == pytest.approx(loss, abs=1e-12)
    assert batch.logprobs.grad.item() == pytest.approx(gradient, abs=1e-12)


def test_diagnostics_vector():
    expected = _VECTORS["diagnostics"]["expected"]
    metrics = ratio_metrics(_batch())
    for key, name in [
        ("ratio_mean", "ratio_mean"),
        ("ratio_max", "ratio_max"),
        ("ess", "ess_token_norm"),
        ("kl_k1", "kl_k1_behav_new"),
        ("kl_k3", "kl_k3"),
    ]:
        assert metrics[key] == pytest.approx(expected[name], abs=1e-9)
    clipped = tis(_batch(), TisConfig(cap=2.0)).clipped
    assert clipped[_MASK].double().mean().item() == pytest.approx(expected["tis_trunc_frac"], abs=1e-9)


def test_clip_fraction_counts_tokens_whose_gradient_is_taken_away():
    for vector_id in ("ppo_clip_token_mean",):
        clipped = ppo(_batch(), _PPO_CASES[vector_id][0]).clipped
        expected = _VECTORS[vector_id]["expected"]["clip_frac"]
        assert clipped[_MASK].double().mean().item() == pytest.approx(expected)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("filler", [0.0, math.nan, -math.inf])
def test_a_batch_without_trained_tokens_has_loss_and_gradient_exactly_zero(name, filler):
    logprobs = torch.full((2, 3), filler, requires_grad=True)
    batch = TokenBatch(
        logprobs=logprobs,
        behaviour_logprobs=torch.full((2, 3), filler),
        advantages=torch.full((2, 3), 5.0),
        mask=torch.zeros(2, 3, dtype=torch.bool),
    )
    result = OBJECTIVES[name](batch, _CONFIGS[name])
    result.losses.sum().backward()
    assert result.losses.sum().item() == 0.0
    assert (logprobs.grad == 0.0).all()
    assert not result.clipped.any()
    assert all(math.isfinite(value) for value in ratio_metrics(batch).values())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_tokens_outside_the_mask_do_not_touch_the_loss(name):
    plain = OBJECTIVES[name](_batch(), _CONFIGS[name]).losses
    shifted = [
        [value if kept else -9.0 for value, kept in zip(*pair, strict=True)]
        for pair in zip(_D1["logp_new"], _D1["mask"], strict=True)
    ]
    other = _batch(logprobs=shifted)
    losses = OBJECTIVES[name](other, _CONFIGS[name]).losses
    losses.sum().backward()
    assert torch.equal(plain, losses)
    assert (other.logprobs.grad[~_MASK] == 0.0).all()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_advantage_no_gradient(name):
    batch = _batch()
    batch = TokenBatch(
        logprobs=batch.logprobs,
        behaviour_logprobs=batch.behaviour_logprobs,
        advantages=torch.zeros(4, 5, dtype=torch.float64),
        mask=_MASK,
    )
    OBJECTIVES[name](batch, _CONFIGS[name]).losses.sum().backward()
    assert (batch.logprobs.grad == 0.0).all()


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [-500.0, 500.0])
def test_extreme_ratios_stay_finite(name, advantage, log_ratio):
    logprobs = torch.tensor([-1.0], requires_grad=True)
    batch = TokenBatch(
        logprobs=logprobs,
        behaviour_logprobs=torch.tensor([-1.0 - log_ratio]),
        advantages=torch.tensor([advantage]),
        mask=torch.tensor([True]),
    )
    losses = OBJECTIVES[name](batch, _CONFIGS[name]).losses
    losses.sum().backward()
    assert losses.isfinite().all()
    assert logprobs.grad.isfinite().all()
    assert all(math.isfinite(value) for value in ratio_metrics(batch).values())


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "fixed"])
def test_weights_of_a_batch_without_tokens_are_zero(aggregation):
    assert token_weights([0, 0], aggregation=aggregation, fixed_num_tokens=4) == [0.0, 0.0]
    assert token_weights([], aggregation=aggregation, fixed_num_tokens=4) == []


def test_a_segment_without_tokens_does_not_count_as_one():
    assert token_weights([4, 0], aggregation="seq_mean_token_mean") == [0.25, 0.0]


def test_fixed_needs_its_length():
    with pytest.raises(ValueError, match="fixed_num_tokens"):
        token_weights([4], aggregation="fixed")

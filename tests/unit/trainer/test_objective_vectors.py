"""Every loss and gradient of `tests/data/objective_vectors.json`, which were computed independently and twice."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from driftgym.trainer.objective_config import OBJECTIVE_NUMBERS, KlConfig, ObjectiveConfig
from driftgym.trainer.objectives import LossSpec, TokenBatch, TokenLosses, drift_metrics, token_weights
from driftgym.trainer.objectives.kl import kl_penalty, kl_returns
from driftgym.trainer.objectives.moments import bapo, m2po
from driftgym.trainer.objectives.registry import OBJECTIVES
from driftgym.trainer.objectives.weighted import level_weights

DATA = json.loads((Path(__file__).parents[2] / "data" / "objective_vectors.json").read_text())
D1 = DATA["meta"]["D1"]
VECTORS = {vector["id"]: vector for vector in DATA["vectors"]}
MASK = torch.tensor(D1["mask"]).bool()
FORMATS = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])


def tensor(name: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(D1[name], dtype=dtype)


def batch(
    dtype: torch.dtype = torch.float64,
    *,
    logprobs: torch.Tensor | None = None,
    with_proximal: bool = False,
    one_group: bool = False,
    mask: torch.Tensor = MASK,
) -> TokenBatch:
    lags = D1["current_version"] - torch.tensor(D1["versions"])
    return TokenBatch.padded(
        logprobs=(tensor("logp_new", dtype) if logprobs is None else logprobs.to(dtype)).requires_grad_(),
        behaviour_logprobs=tensor("logp_behav", dtype),
        advantages=tensor("advantage_per_sequence", dtype)[:, None],
        mask=mask,
        groups=torch.zeros(4, dtype=torch.int64) if one_group else torch.tensor(D1["prompt_id"]),
        rewards=tensor("reward", dtype),
        lags=lags,
        proximal_logprobs=tensor("logp_prox", dtype) if with_proximal else None,
        reference_logprobs=tensor("logp_ref", dtype),
    )


def weights(normalisation: str = "token", *, fixed: int | None = None, mask: torch.Tensor = MASK) -> torch.Tensor:
    per_row = token_weights(
        mask.sum(1).tolist(),
        normalisation=normalisation,  # type: ignore[arg-type]
        groups=D1["prompt_id"],
        fixed_num_tokens=fixed,
    )
    return torch.tensor(per_row, dtype=torch.float64)[:, None].expand(4, 5).reshape(-1)


def check(vector_id: str, tokens: TokenBatch, result: TokenLosses, w: torch.Tensor, *, scale: float = 1.0) -> None:
    """Loss and gradient are those of the vector; `scale`: where its denominator is another."""
    expected = VECTORS[vector_id]["expected"]
    exact = tokens.logprobs.dtype == torch.float64
    limits: dict[str, Any] = {"rtol": 0, "atol": 1e-9} if exact else {"rtol": 1e-5, "atol": 1e-6}
    loss = (result.losses * w.to(result.losses.dtype)).sum() * scale
    (gradient,) = torch.autograd.grad(loss, tokens.logprobs)
    if "loss" in expected:
        torch.testing.assert_close(loss, torch.tensor(expected["loss"], dtype=loss.dtype), **limits)
    wanted = torch.tensor(expected["grad_logp_new"], dtype=loss.dtype)
    torch.testing.assert_close(gradient.reshape(4, 5), wanted, **limits)


def run(name: str, tokens: TokenBatch, **numbers: Any) -> TokenLosses:
    """As a configuration would, so that its defaults are tried too."""
    return LossSpec(objective=ObjectiveConfig(name=name, **numbers)).losses(tokens)  # type: ignore[arg-type]


EPS = {"eps_low": 0.2, "eps_high": 0.2}
HIGHER = {"eps_low": 0.2, "eps_high": 0.28}

TOKEN_CASES = {
    "ppo_clip_token_mean": ("ppo", EPS | {"dual_clip": None}),
    "ppo_clip_higher_token_mean": ("ppo", HIGHER | {"dual_clip": None}),
    "ppo_dual_clip_token_mean": ("ppo", HIGHER | {"dual_clip": 3.0}),
    "decoupled_ppo_prox_is_theta": ("decoupled_ppo", EPS | {"cap": None}),
    "a3po_loglinear": ("decoupled_ppo", EPS | {"cap": None, "proximal": "interpolated"}),
    "reinforce_no_is": ("reinforce", {}),
    "aipo_rho2": ("aipo", {"cap": 2.0}),
    "cispo_upper_only_6": ("cispo", {"eps_low": 1.0, "eps_high": 5.0}),
    "rollout_is_hard_zero": ("cispo", HIGHER | {"beyond": "drop"}),
    "topr_token": ("topr", {"level": "token"}),
    "vespo_default": ("vespo", {}),
    "prime_rl_default_dppo_kl": ("dppo_tv", {}),
    "prime_rl_ipo": ("ipo", {}),
    "dppo_binary_kl": ("dppo_kl", {}),
    "sapo": ("sapo", {}),
    "m2po_mask_all_tokens": ("m2po", {}),
    "m2po_official_clip": ("m2po", {"form": "clip"}),
    "kimi15_token": ("opmd", {"form": "token"}),
}
PROXIMAL_CASES = {
    "decoupled_ppo_no_cap": ("decoupled_ppo", EPS | {"cap": None}),
    "decoupled_ppo_mask_cap_3.5": ("decoupled_ppo", EPS | {"cap": 3.5, "beyond": "drop"}),
    "decoupled_ppo_clamp_cap_2": ("decoupled_ppo", EPS | {"cap": 2.0, "beyond": "cut"}),
    "tis_token_cap2": ("tis", {"cap": 2.0}),
    "mis_token_icepop_0.5_5": ("icepop", {}),
    "mis_sequence_product_0.3_3": ("mis", {"low": 0.3, "high": 3.0, "level": "sequence"}),
}
SEQUENCE_CASES = {
    "gspo_paper_eps": ("gspo", {}),
    "gmpo_0.4": ("gmpo", {}),
    "kimi15_sequence": ("opmd", {}),
    "opmd_residual": ("opmd", {"form": "residual"}),
    "tba_vargrad": ("tba", {}),
}
NORMALISATIONS = {
    "agg_seq_mean_token_mean": ("sequence", None),
    "agg_seq_mean_token_sum": ("fixed", 1),
    "agg_dr_grpo_fixed_den": ("fixed", 8),
    "agg_fixed_global_tokens": ("fixed", 5),
}


@FORMATS
@pytest.mark.parametrize("vector_id", TOKEN_CASES)
def test_objectives_of_tokens(vector_id: str, dtype: torch.dtype) -> None:
    if vector_id == "prime_rl_ipo" and dtype == torch.float32:
        pytest.skip("a token of the vector lies on the bound, within float32's rounding")
    name, numbers = TOKEN_CASES[vector_id]
    tokens = batch(dtype)
    check(vector_id, tokens, run(name, tokens, **numbers), weights())


@FORMATS
@pytest.mark.parametrize("vector_id", PROXIMAL_CASES)
def test_objectives_with_a_proximal_policy(vector_id: str, dtype: torch.dtype) -> None:
    name, numbers = PROXIMAL_CASES[vector_id]
    tokens = batch(dtype, with_proximal=True)
    check(vector_id, tokens, run(name, tokens, **numbers), weights())


@FORMATS
@pytest.mark.parametrize("vector_id", SEQUENCE_CASES)
def test_objectives_of_sequences(vector_id: str, dtype: torch.dtype) -> None:
    name, numbers = SEQUENCE_CASES[vector_id]
    tokens = batch(dtype)
    check(vector_id, tokens, run(name, tokens, **numbers), weights("sequence"))


@FORMATS
def test_gepo_of_one_group_of_four(dtype: torch.dtype) -> None:
    tokens = batch(dtype, one_group=True)
    check("gepo_group4", tokens, run("gepo", tokens), weights("sequence"))


@FORMATS
@pytest.mark.parametrize("vector_id", NORMALISATIONS)
def test_normalisations(vector_id: str, dtype: torch.dtype) -> None:
    normalisation, fixed = NORMALISATIONS[vector_id]
    tokens = batch(dtype)
    check(vector_id, tokens, run("ppo", tokens, **HIGHER, dual_clip=None), weights(normalisation, fixed=fixed))


def test_prompts_count_the_same_whatever_their_tokens() -> None:
    w = weights("prompt").reshape(4, 5)
    per_prompt = [float((w * MASK)[rows].sum()) for rows in ([0, 1], [2, 3])]
    assert per_prompt == pytest.approx([0.5, 0.5])
    assert torch.equal(w[0], w[1])
    assert w[0, 0] == pytest.approx(1 / (2 * 7))


def test_a_rejected_token_stays_in_the_denominator() -> None:
    vector_id = "mis_token_icepop_0.5_2_kept_den"
    tokens = batch(with_proximal=True)
    result = run("icepop", tokens, low=0.5, high=2.0)
    num_kept = D1["n_tokens"] - int(result.left_out.sum())
    assert num_kept == 11
    # The vector divides by what is kept; here the denominator is that of before the rejection.
    check(vector_id, tokens, result, weights(), scale=D1["n_tokens"] / num_kept)


def test_bapo() -> None:
    tokens = batch()
    result = bapo(tokens, target=1.6, dual_clip=3.0, lows=(0.6, 0.8, 0.05), highs=(1.2, 2.0, 0.05))
    check("bapo", tokens, result, weights())


def test_a_gradient_through_the_cap_loses_the_tokens_above_it() -> None:
    expected = torch.tensor(VECTORS["aipo_nondetached_clamp"]["expected"]["grad_logp_new"], dtype=torch.float64)
    tokens = batch()
    loss = (run("aipo", tokens, cap=2.0).losses * weights()).sum()
    gradient = torch.autograd.grad(loss, tokens.logprobs)[0].reshape(4, 5)
    above = (tensor("logp_new") - tensor("logp_behav")).exp() > 2.0
    torch.testing.assert_close(gradient[~above], expected[~above], rtol=0, atol=1e-9)
    assert (expected[above & MASK] == 0).all()
    assert (gradient[above & MASK] != 0).all()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_straight_through"])
def test_kl_in_the_loss(estimator: str) -> None:
    vector_id = "kl_loss_k3_plus_straight_through" if "straight" in estimator else f"kl_loss_{estimator}"
    tokens = batch()
    kl = KlConfig(coef=1.0, estimator=estimator)  # type: ignore[arg-type]
    spec = LossSpec(objective=ObjectiveConfig(name="positives_only"), kl=kl)
    without = LossSpec(objective=ObjectiveConfig(name="positives_only")).losses(tokens)
    result = spec.losses(tokens)
    term = TokenLosses(losses=result.losses - without.losses, clipped=result.clipped, left_out=result.left_out)
    check(vector_id, tokens, term, weights())
    penalty = kl_penalty(tensor("logp_new"), tensor("logp_ref"), estimator)  # type: ignore[arg-type]
    mean = float((penalty * MASK).sum() / MASK.sum())
    expected = VECTORS[vector_id]["expected"]
    assert mean == pytest.approx(expected.get("mean_value", expected["loss"]), abs=1e-9)


def test_kl_in_the_reward() -> None:
    expected = torch.tensor(VECTORS["kl_in_reward"]["expected"]["return_to_go"], dtype=torch.float64)
    tokens = batch()
    returns = kl_returns(tokens, coef=0.1).reshape(4, 5) + tensor("reward")[:, None]
    torch.testing.assert_close(returns[MASK], expected[MASK], rtol=0, atol=1e-9)
    spec = LossSpec(objective=ObjectiveConfig(name="reinforce"), kl=KlConfig(coef=0.1, place="reward"))
    losses = spec.losses(tokens).losses.reshape(4, 5)
    advantages = tensor("advantage_per_sequence")[:, None] + kl_returns(tokens, coef=0.1).reshape(4, 5)
    torch.testing.assert_close(losses[MASK], (-advantages * tensor("logp_new"))[MASK])


def test_m2po_on_a_flat_batch() -> None:
    vector = VECTORS["m2po_D2_60_tokens"]
    inputs, expected = vector["inputs"], vector["expected"]
    advantages = inputs.get("advantage", inputs.get("advantages"))

    def flat(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)[None]

    def losses(form: str, **floors: float) -> tuple[TokenBatch, TokenLosses]:
        tokens = TokenBatch.padded(
            logprobs=flat(inputs["logp_new"]).requires_grad_(),
            behaviour_logprobs=flat(inputs["logp_behav"]),
            advantages=flat(advantages),
            mask=torch.ones(1, 60, dtype=torch.bool),
        )
        return tokens, m2po(tokens, max_m2=0.04, form=form, **floors)  # type: ignore[arg-type]

    _, masked = losses("mask")
    assert (~masked.left_out).nonzero().flatten().tolist() == expected["mask_all"]["kept_index"]
    assert float(masked.losses.detach().mean()) == pytest.approx(expected["mask_all"]["loss"], abs=1e-9)
    _, outward = losses("outward_mask")
    assert (~outward.left_out).int().tolist() == expected["mask_quadrants"]["keep"]
    assert float(outward.losses.detach().mean()) == pytest.approx(expected["mask_quadrants"]["loss"], abs=1e-9)
    tokens, unfloored = losses("clip", floor_low=0.0, floor_high=0.0)
    official = expected["official"]
    assert float(unfloored.losses.detach().mean()) == pytest.approx(official["loss_without_floor"], abs=1e-9)
    (gradient,) = torch.autograd.grad(unfloored.losses.mean(), tokens.logprobs)
    assert int((gradient != 0).sum()) == official["grad_nonzero_without_floor"]


def test_tokens_above_the_lag_bound_are_left_out() -> None:
    """The vector divides by what is kept; a masked token stays in the denominator here."""
    lags = D1["current_version"] - torch.tensor(D1["versions"])
    kept = MASK & (lags <= 2)
    tokens = batch(mask=kept)
    result = run("ppo", tokens, **HIGHER, dual_clip=None)
    check("max_lag_token_mask_2", tokens, result, weights(), scale=D1["n_tokens"] / int(kept.sum()))
    assert kept.int().tolist() == VECTORS["max_lag_token_mask_2"]["expected"]["kept"]


def test_sequences_above_the_lag_bound_are_no_part_of_the_batch() -> None:
    lags = D1["current_version"] - torch.tensor(D1["versions"])
    kept_rows = torch.where(MASK, lags, -1).amax(1) <= 3
    assert kept_rows.int().tolist() == VECTORS["max_lag_sequence_drop_3"]["expected"]["kept"]
    kept = MASK & kept_rows[:, None]
    tokens = batch(mask=kept)
    result = run("ppo", tokens, **HIGHER, dual_clip=None)
    check("max_lag_sequence_drop_3", tokens, result, weights(mask=kept))


def test_on_policy_the_gradient_is_that_of_reinforce() -> None:
    expected = torch.tensor(VECTORS["onpolicy_equivalence"]["expected"]["grad_logp_new"], dtype=torch.float64)
    names = ("aipo", "cispo", "decoupled_ppo", "ppo", "dppo_tv", "sapo", "vespo", "robust", "tis", "icepop")
    others = ("reinforce", "topr", "m2po", "bapo", "ipo", "dppo_kl", "mis")
    cases = [
        *((name, {}) for name in (*names, *others)),
        ("opmd", {"form": "token"}),
        ("decoupled_ppo", {"proximal": "interpolated"}),
    ]
    for name, numbers in cases:
        tokens = batch(logprobs=tensor("logp_behav"))
        loss = (run(name, tokens, **numbers).losses * weights()).sum()
        gradient = torch.autograd.grad(loss, tokens.logprobs)[0].reshape(4, 5)
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-9, msg=name)


def test_gspo_on_policy_weighs_sequences_alike() -> None:
    tokens = batch(logprobs=tensor("logp_behav"))
    loss = (run("gspo", tokens).losses * weights("sequence")).sum()
    gradient = torch.autograd.grad(loss, tokens.logprobs)[0].reshape(4, 5)
    wanted = -tensor("advantage_per_sequence")[:, None] * MASK / (4 * MASK.sum(1, keepdim=True))
    torch.testing.assert_close(gradient, wanted)


def test_diagnostics() -> None:
    expected = VECTORS["diagnostics"]["expected"]
    tokens = batch()
    metrics = drift_metrics(tokens)
    names = {
        "ess": "ess_token_norm",
        "ess_sequence": "ess_seq_norm",
        "ess_geometric": "ess_seq_geo_norm",
        "kl_k1": "kl_k1_behav_new",
        "kl_k2": "kl_k2",
        "kl_k3": "kl_k3",
        "ratio_mean": "ratio_mean",
        "ratio_max": "ratio_max",
        "ratio_min": "ratio_min",
        "ratio_p50": "ratio_p50",
        "ratio_p99": "ratio_p99_linear",
        "log_ratio_abs_mean": "abs_logdiff_mean",
    }
    assert {name: metrics[name] for name in names} == pytest.approx({n: expected[v] for n, v in names.items()})
    assert metrics["m2"] == pytest.approx(VECTORS["m2po_mask_all_tokens"]["expected"]["M2_before"])
    # An effective sample size of clamped weights cannot fall below 0.64 for a clamp of 2: this one does.
    assert metrics["ess"] < 0.64 < expected["ess_token_verl_clamped"]
    capped = run("aipo", tokens, cap=2.0).clipped
    assert float(capped.double().sum() / MASK.sum()) == pytest.approx(expected["tis_trunc_frac"])
    left_out = run("icepop", tokens).left_out
    assert float(left_out.double().sum() / MASK.sum()) == pytest.approx(expected["masked_frac_icepop_0p5_5"])


def test_the_worked_example() -> None:
    """Probability 0.20 at version 3, 0.26 at version 5: ratio 1.3, lag 2."""
    vector = VECTORS["worked_example_1.3"]
    inputs, expected = vector["inputs"], vector["expected"]

    def one(advantage: float) -> TokenBatch:
        return TokenBatch.padded(
            logprobs=torch.tensor([[math.log(inputs["p_new"])]], dtype=torch.float64, requires_grad=True),
            behaviour_logprobs=torch.tensor([[math.log(inputs["p_behav"])]], dtype=torch.float64),
            advantages=torch.tensor([[advantage]], dtype=torch.float64),
            mask=torch.ones(1, 1, dtype=torch.bool),
            lags=torch.tensor([[inputs["version_now"] - inputs["version_behav"]]]),
        )

    tokens = one(1.0)
    assert int(tokens.lags) == expected["staleness"] == 2
    metrics = drift_metrics(tokens)
    assert metrics["ratio_mean"] == pytest.approx(expected["ratio"], abs=1e-12)
    assert metrics["kl_k1"] == pytest.approx(expected["k1_behav_minus_new"], abs=1e-12)
    assert metrics["kl_k2"] == pytest.approx(expected["k2"], abs=1e-12)
    assert metrics["kl_k3"] == pytest.approx(expected["k3_r_minus_1_minus_logr"], abs=1e-12)
    assert metrics["m2"] == pytest.approx(expected["m2"], abs=1e-12)
    cases = {
        "ppo_clip_0.2 A=+1": ("ppo", 1.0, EPS | {"dual_clip": None}),
        "ppo_clip_0.2 A=-1": ("ppo", -1.0, EPS | {"dual_clip": None}),
        "ppo_clip_higher_0.28 A=+1": ("ppo", 1.0, HIGHER | {"dual_clip": None}),
        "ppo_clip_0.2/0.35 A=+1": ("ppo", 1.0, {"eps_low": 0.2, "eps_high": 0.35, "dual_clip": None}),
        "dual_clip c=1.25 (illustrative) A=-1": ("ppo", -1.0, HIGHER | {"dual_clip": 1.25}),
        "tis/aipo rho=2 A=+1": ("aipo", 1.0, {"cap": 2.0}),
        "aipo rho=1.1 A=+1": ("aipo", 1.0, {"cap": 1.1}),
        "cispo [0.8,1.28] A=+1": ("cispo", 1.0, HIGHER),
        "cispo [0.8,1.28] A=-1": ("cispo", -1.0, HIGHER),
        "icepop [0.5,5] A=+1": ("icepop", 1.0, {}),
        "dppo tv 0.2 A=+1": ("dppo_tv", 1.0, {"tau": 0.0}),
        "prime_rl default kl_tau=1e-3 A=+1": ("dppo_tv", 1.0, {}),
        "topr R>0": ("topr", 1.0, {}),
        "topr R<=0, A=-1": ("topr", -1.0, {}),
        "sapo tau=1 A=+1": ("sapo", 1.0, {}),
        "kimi15 tau=0.1 A=+1": ("opmd", 1.0, {"form": "token"}),
    }
    apart = {"m2po tau=0.04 single token", "a3po v_theta=5 (d=2, alpha=0.5)"}
    assert cases.keys() | apart == expected["per_objective"].keys()
    for label, (name, advantage, numbers) in cases.items():
        wanted = expected["per_objective"][label]
        tokens = one(advantage)
        losses = run(name, tokens, **numbers).losses
        (gradient,) = torch.autograd.grad(losses.sum(), tokens.logprobs)
        assert float(gradient) == pytest.approx(wanted["grad"], abs=1e-12), label
        if "loss" in wanted:
            assert float(losses.detach()) == pytest.approx(wanted["loss"], abs=1e-12), label
    for form in ("mask", "outward_mask"):
        kept = not run("m2po", one(1.0), form=form).left_out.any()
        assert kept == expected["per_objective"]["m2po tau=0.04 single token"]["kept"]
    interpolated = run("decoupled_ppo", one(1.0), proximal="interpolated", **EPS, cap=None).losses
    assert float(interpolated.detach()) == pytest.approx(-1.3, abs=1e-12)


def test_every_vector_is_tried() -> None:
    elsewhere = {"advantages"}  # test_advantages.py
    single = {
        "worked_example_1.3", "gepo_group4", "mis_token_icepop_0.5_2_kept_den", "bapo", "aipo_nondetached_clamp",
        "kl_loss_k1", "kl_loss_k2", "kl_loss_k3", "kl_loss_k3_plus_straight_through", "kl_in_reward",
        "m2po_D2_60_tokens", "max_lag_token_mask_2", "max_lag_sequence_drop_3", "onpolicy_equivalence", "diagnostics",
    }  # fmt: skip
    tried = {*TOKEN_CASES, *PROXIMAL_CASES, *SEQUENCE_CASES, *NORMALISATIONS, *single, *elsewhere}
    assert tried == set(VECTORS)


def test_weights_of_levels() -> None:
    tokens = batch(with_proximal=True).masked()
    raw = VECTORS["mis_sequence_product_0.3_3"]["expected"]["seq_weight_raw"]
    products = level_weights(tokens, "sequence").reshape(4, 5)[:, 0]
    torch.testing.assert_close(products, torch.tensor(raw, dtype=torch.float64))
    lengths = MASK.sum(1)
    geometric = level_weights(tokens, "geometric").reshape(4, 5)[:, 0]
    torch.testing.assert_close(geometric, products ** (1.0 / lengths))


def test_every_objective_has_numbers() -> None:
    assert set(OBJECTIVES) == set(OBJECTIVE_NUMBERS)

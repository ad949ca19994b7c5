"""What holds for every objective: masks, extreme ratios, bounds; and mistakes that public code has made."""

import dataclasses
import math
from typing import Any

import pydantic
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from driftgym.trainer.batch_shape import BatchShape
from driftgym.trainer.learner_config import LearnerConfig
from driftgym.trainer.objective_config import OBJECTIVE_NUMBERS, KlConfig, ObjectiveConfig
from driftgym.trainer.objectives import OBJECTIVES, LossSpec, TokenBatch, TokenLosses, drift_metrics, token_weights
from driftgym.trainer.objectives.kl import kl_returns

NAMES = sorted(OBJECTIVES)
every_objective = pytest.mark.parametrize("name", NAMES)


def spec(name: str, **numbers: Any) -> LossSpec:
    return LossSpec(objective=ObjectiveConfig(name=name, **numbers))  # type: ignore[arg-type]


def batch(
    logprobs: torch.Tensor, behaviour: torch.Tensor, *, advantages: torch.Tensor | float = 1.0, **more: Any
) -> TokenBatch:
    """Rows of tokens, two of which answer the same prompt; the first of the two succeeded."""
    num_rows = len(logprobs)
    return TokenBatch.padded(
        logprobs=logprobs,
        behaviour_logprobs=behaviour,
        advantages=torch.as_tensor(advantages, dtype=logprobs.dtype).expand(logprobs.shape),
        mask=more.pop("mask", torch.ones(logprobs.shape, dtype=torch.bool)),
        groups=torch.arange(num_rows) // 2,
        rewards=(torch.arange(num_rows) % 2 == 0).to(logprobs.dtype),
        reference_logprobs=behaviour,
        **more,
    )


def gradient(losses: TokenLosses, tokens: TokenBatch) -> torch.Tensor:
    (found,) = torch.autograd.grad(losses.losses.sum(), tokens.logprobs, allow_unused=True)
    return torch.zeros_like(tokens.logprobs) if found is None else found


@every_objective
@pytest.mark.parametrize("filler", [0.0, math.nan, -math.inf])
def test_without_trained_tokens_loss_and_gradient_are_exactly_zero(name: str, filler: float) -> None:
    logprobs = torch.full((2, 3), filler, requires_grad=True)
    none = torch.zeros(2, 3, dtype=torch.bool)
    tokens = batch(logprobs, torch.full((2, 3), filler), advantages=5.0, mask=none)
    result = spec(name).losses(tokens)
    assert (result.losses == 0.0).all()
    assert (gradient(result, tokens) == 0.0).all()
    assert not result.clipped.any()
    assert not result.left_out.any()
    assert all(math.isfinite(value) for value in drift_metrics(tokens).values())


@every_objective
def test_what_is_not_trained_is_never_read(name: str) -> None:
    torch.manual_seed(0)
    behaviour = -torch.rand(4, 6, dtype=torch.float64)
    logprobs = behaviour + 0.3 * torch.randn(4, 6, dtype=torch.float64)
    advantages = torch.tensor([1.0, -0.5, 0.7, -1.0], dtype=torch.float64)[:, None]
    mask = torch.rand(4, 6) < 0.7

    def losses(filler: float) -> tuple[torch.Tensor, torch.Tensor]:
        filled = torch.where(mask, logprobs, filler).requires_grad_()
        tokens = batch(filled, torch.where(mask, behaviour, -filler), advantages=advantages, mask=mask)
        result = spec(name).losses(tokens)
        return result.losses, torch.autograd.grad(result.losses.sum(), filled)[0]

    (plain, plain_gradient), (other, other_gradient) = losses(0.0), losses(math.nan)
    assert torch.equal(plain, other)
    assert torch.equal(plain_gradient, other_gradient)
    assert (other_gradient[~mask] == 0.0).all()


@every_objective
def test_no_advantage_no_gradient_unless_it_says_so(name: str) -> None:
    logprobs = torch.tensor([[-1.0, -0.2], [-0.7, -0.1]], requires_grad=True)
    tokens = batch(logprobs, torch.tensor([[-0.8, -0.3], [-0.9, -0.3]]), advantages=0.0)
    moves = bool((gradient(spec(name).losses(tokens), tokens) != 0.0).any())
    assert moves == ObjectiveConfig(name=name).moves_without_advantage  # type: ignore[arg-type]


@every_objective
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [-500.0, 500.0])
def test_extreme_ratios_stay_finite(name: str, advantage: float, log_ratio: float) -> None:
    logprobs = torch.tensor([[-1.0 + min(log_ratio, 0.0)], [-1.0]], requires_grad=True)
    tokens = batch(logprobs, torch.tensor([[-1.0 - max(log_ratio, 0.0)], [-1.0]]), advantages=advantage)
    result = spec(name).losses(tokens)
    assert result.losses.isfinite().all()
    assert gradient(result, tokens).isfinite().all()
    assert all(math.isfinite(value) for value in drift_metrics(tokens).values())


BOUNDED = sorted(set(NAMES) - {"opmd", "tba", "m2po", "dppo_tv", "ipo", "gepo", "vespo"})


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_no_single_token_rules_the_step(name: str, advantage: float) -> None:
    """A token whose ratio grows without end has a bounded gradient (opmd, tba: squares; m2po and dppo mask instead)."""
    slopes = []
    for log_ratio in (2.0, 6.0, 12.0):
        logprobs = torch.tensor([[-0.1]], dtype=torch.float64, requires_grad=True)
        tokens = batch(logprobs, torch.tensor([[-0.1 - log_ratio]], dtype=torch.float64), advantages=advantage)
        slopes.append(float(gradient(spec(name).losses(tokens), tokens).abs().max()))
    # GMPO and GSPO hold a failure's ratio from below alone: what they bound is the log, by normalising over n.
    grows = slopes[2] > 10.0
    assert grows == (advantage < 0 and name in {"gmpo", "gspo"})


def test_ppo_without_a_dual_clip_has_no_bound() -> None:
    logprobs = torch.tensor([[-0.1]], requires_grad=True)
    tokens = batch(logprobs, torch.tensor([[-9.1]]), advantages=-1.0)
    bounded = float(gradient(spec("ppo").losses(tokens), tokens).abs().max())
    unbounded = float(gradient(spec("ppo", dual_clip=None).losses(tokens), tokens).abs().max())
    assert bounded == 0.0
    assert unbounded == pytest.approx(math.exp(9.0), rel=1e-4)


def test_the_upper_bound_of_cispo_is_one_plus_eps_high() -> None:
    logprobs = torch.tensor([[-0.1]], requires_grad=True)
    tokens = batch(logprobs, torch.tensor([[-9.1]]))
    assert float(gradient(spec("cispo", eps_high=4.0).losses(tokens), tokens)) == pytest.approx(-5.0)


def test_the_bounds_of_a_mask_are_of_the_ratio_and_not_of_its_inverse() -> None:
    ratios = torch.tensor([[0.25, 0.6, 4.0, 6.0]], dtype=torch.float64)
    logprobs = torch.full((1, 4), -2.0, dtype=torch.float64, requires_grad=True)
    tokens = batch(logprobs, -2.0 - ratios.log())
    assert spec("icepop", low=0.5, high=5.0).losses(tokens).left_out.tolist() == [True, False, False, True]


def test_truncated_weights_do_not_count_the_ratio_twice() -> None:
    """r = 1.8: a surrogate anchored on the sampler and weighted again would give 3.24."""
    logprobs = torch.tensor([[-0.5]], dtype=torch.float64, requires_grad=True)
    tokens = batch(logprobs, torch.tensor([[-0.5 - math.log(1.8)]], dtype=torch.float64))
    assert float(gradient(spec("tis", cap=4.0).losses(tokens), tokens)) == pytest.approx(-1.8)


def test_the_effective_sample_size_can_fall() -> None:
    behaviour = torch.full((8, 4), -1.0)
    logprobs = behaviour.clone()
    logprobs[0] += 6.0
    metrics = drift_metrics(batch(logprobs, behaviour))
    assert metrics["ess"] == pytest.approx(4 / 32, rel=0.1)
    assert metrics["ess_sequence"] == pytest.approx(1 / 8, rel=0.01)


def test_the_effective_sample_size_of_long_sequences_can_fall() -> None:
    """Products of e^-400 and of e^-900: one of the two carries all, though both are beyond any bound for exp."""
    logprobs = torch.tensor([[-1.4], [-1.9]]).expand(2, 1000)
    metrics = drift_metrics(batch(logprobs, torch.full((2, 1000), -1.0)))
    assert metrics["ess_sequence"] == pytest.approx(0.5)
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 101])
def test_percentiles_interpolate_linearly(num_tokens: int) -> None:
    log_ratios = torch.randn(1, num_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(num_tokens))
    metrics = drift_metrics(batch(log_ratios, torch.zeros(1, num_tokens, dtype=torch.float64)))
    for name, share in (("ratio_p50", 0.5), ("ratio_p99", 0.99)):
        assert metrics[name] == pytest.approx(float(torch.quantile(log_ratios.exp(), share)))


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("logprob", [-60.0, -500.0])
def test_gepo_of_groups_that_were_all_but_impossible(advantage: float, logprob: float) -> None:
    logprobs = torch.tensor([[-1.0], [-2.0]], requires_grad=True)
    tokens = batch(logprobs, torch.tensor([[logprob], [logprob - 1.0]]), advantages=advantage)
    result = spec("gepo").losses(tokens)
    assert result.losses.isfinite().all()
    assert gradient(result, tokens).isfinite().all()


def test_rewards_of_one_group_do_not_drown_those_of_another() -> None:
    same = torch.full((4, 1), -1.0, dtype=torch.float64)
    tokens = batch(same, same, advantages=0.0)
    tokens = dataclasses.replace(tokens, rewards=torch.tensor([0.0, 0.0, 2000.0, 0.0], dtype=torch.float64))
    losses = spec("opmd", form="residual").losses(tokens).losses
    # Both of the first group got what was expected; of the second, log mean exp is that of its best, less log 2.
    assert losses.tolist() == pytest.approx([0.0, 0.0, (0.1 * math.log(2.0)) ** 2, (2000.0 - 0.1 * math.log(2)) ** 2])


def test_the_baseline_of_opmd_is_of_masked_rows_too() -> None:
    logprobs = torch.full((2, 2), -1.0, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[False, False], [True, True]])
    tokens = batch(logprobs, logprobs.detach(), mask=mask)
    assert gradient(spec("opmd").losses(tokens), tokens).tolist() == [0.0, 0.0, 1.0, 1.0]  # 0.5 for each token's loss
    residual = spec("opmd", form="residual", tau=1.0).losses(tokens).losses[2:]
    assert residual.tolist() == pytest.approx([math.log((math.e + 1.0) / 2.0) ** 2] * 2)


def test_vespo_of_a_token_that_its_writer_could_not_have_written() -> None:
    tokens = batch(torch.tensor([[-1.0]], requires_grad=True), torch.tensor([[-math.inf]]))
    assert spec("vespo").losses(tokens).losses.tolist() == [0.0]


def test_topr_tapers_a_failure_by_the_product_of_its_ratios() -> None:
    logprobs = torch.tensor([[-1.5, -1.2], [-1.5, -1.2]], dtype=torch.float64, requires_grad=True)
    behaviour = torch.full((2, 2), -1.0, dtype=torch.float64)
    tokens = batch(logprobs, behaviour, advantages=torch.tensor([[1.0], [-1.0]], dtype=torch.float64))
    slopes = gradient(spec("topr").losses(tokens), tokens)
    assert slopes.tolist() == pytest.approx([-1.0, -1.0, math.exp(-0.7), math.exp(-0.7)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_token_that_gives_the_bound_of_m2po_is_clipped(dtype: torch.dtype) -> None:
    for reach in torch.linspace(0.01, 0.19, 50).tolist():
        logprobs = torch.tensor([[-1.0 + reach]], dtype=dtype, requires_grad=True)
        tokens = batch(logprobs, torch.tensor([[-1.0]], dtype=dtype))
        result = spec("m2po", form="clip", floor_low=0.0, floor_high=0.0).losses(tokens)
        assert result.clipped.all()


def failures(drift: float, *, num_tokens: int) -> TokenBatch:
    """A success and a failure of which the policy moved away by `drift` nats a token."""
    behaviour = torch.full((2, num_tokens), -1.0, dtype=torch.float64)
    logprobs = torch.full((2, num_tokens), -1.0 - drift, dtype=torch.float64, requires_grad=True)
    return batch(logprobs, behaviour, advantages=torch.tensor([[1.0], [-1.0]], dtype=torch.float64))


@pytest.mark.parametrize("num_tokens", [2, 200])
def test_robust_keeps_successes_and_leaves_out_failures_that_drifted(num_tokens: int) -> None:
    near, far = failures(0.05, num_tokens=num_tokens), failures(3.0, num_tokens=num_tokens)
    config = spec("robust", low=0.5, cap=2.0, max_drift=0.1)
    kept, masked = config.losses(near), config.losses(far)
    assert not kept.left_out.any()
    assert masked.left_out.reshape(2, -1).all(1).tolist() == [False, True]
    slopes = gradient(masked, far).reshape(2, -1)
    assert slopes[0].tolist() == pytest.approx([-0.5] * num_tokens)  # a success keeps a weight of `low` at least
    assert (slopes[1] == 0.0).all()


def test_failures_can_be_left_out_beside_any_objective() -> None:
    tokens = failures(3.0, num_tokens=4)
    plain = LossSpec(objective=ObjectiveConfig(name="reinforce"))
    masked = LossSpec(objective=ObjectiveConfig(name="reinforce"), max_failure_drift=0.1)
    assert plain.losses(tokens).losses.reshape(2, 4)[1].ne(0.0).all()
    result = masked.losses(tokens)
    assert result.losses.reshape(2, 4)[1].eq(0.0).all()
    assert result.losses.reshape(2, 4)[0].ne(0.0).all()


def test_positives_only_reads_no_failure() -> None:
    result = spec("positives_only").losses(failures(0.0, num_tokens=3))
    assert result.left_out.reshape(2, 3).all(1).tolist() == [False, True]


def test_a_kl_term_moves_tokens_without_an_advantage() -> None:
    logprobs = torch.tensor([[-1.0], [-2.0]], requires_grad=True)
    tokens = batch(logprobs, torch.tensor([[-1.5], [-1.5]]), advantages=0.0)
    pulled = LossSpec(objective=ObjectiveConfig(name="reinforce"), kl=KlConfig(coef=0.5))
    assert pulled.moves_without_advantage
    assert gradient(pulled.losses(tokens), tokens).tolist() == pytest.approx([0.25, -0.25])


def test_a_kl_term_in_the_reward_is_the_same_whatever_stands_before() -> None:
    logprobs = -torch.rand(300, 300, generator=torch.Generator().manual_seed(0))
    alone = batch(logprobs[-1:], logprobs[-1:])
    after = dataclasses.replace(batch(logprobs, logprobs), reference_logprobs=2.0 * logprobs.reshape(-1))
    alone = dataclasses.replace(alone, reference_logprobs=2.0 * alone.logprobs)
    torch.testing.assert_close(kl_returns(after, coef=1.0)[-300:], kl_returns(alone, coef=1.0), rtol=1e-6, atol=1e-6)


def test_a_missing_reference_is_named() -> None:
    one = torch.zeros(1, 1)
    tokens = TokenBatch.padded(logprobs=one, behaviour_logprobs=one, advantages=one, mask=one == 0)
    with pytest.raises(ValueError, match="reference"):
        spec("tba").losses(tokens)
    with pytest.raises(ValueError, match="reference"):
        LossSpec(objective=ObjectiveConfig(), kl=KlConfig(coef=0.1)).losses(tokens)


@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=8),
    groups=st.lists(st.integers(0, 2), min_size=8, max_size=8),
    normalisation=st.sampled_from(["token", "sequence", "prompt", "fixed"]),
)
@settings(deadline=None)
def test_weights_add_up_to_one_where_they_are_a_mean(lengths: list[int], groups: list[int], normalisation: str) -> None:
    weights = token_weights(
        lengths,
        normalisation=normalisation,  # type: ignore[arg-type]
        groups=groups[: len(lengths)],
        fixed_num_tokens=3,
    )
    total = sum(weight * length for weight, length in zip(weights, lengths, strict=True))
    if not any(lengths):
        assert weights == [0.0] * len(lengths)
    elif normalisation == "fixed":
        assert total == pytest.approx(sum(lengths) / (3 * sum(length > 0 for length in lengths)))
    else:
        assert total == pytest.approx(1.0)


@pytest.mark.parametrize("normalisation", ["sequence", "prompt"])
def test_a_row_without_a_sampled_token_that_its_batch_does_not_know_weighs_nothing(normalisation: Any) -> None:
    known = BatchShape.of_lengths([4, 2], groups=["a", None], sequences=["x", "y"])
    names: dict[str, Any] = {"groups": ["a", "b", None], "sequences": ["x", "u", "v"]}
    weights = token_weights([4, 0, 0], normalisation=normalisation, batch=known, **names)
    assert weights == [1.0 / 8, 0.0, 0.0]


def test_weights_need_what_they_are_made_of() -> None:
    with pytest.raises(ValueError, match="fixed_num_tokens"):
        token_weights([4], normalisation="fixed")
    with pytest.raises(ValueError, match="groups"):
        token_weights([4, 4], normalisation="prompt", groups=["a"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"name": "ppo", "eps_hihg": 0.3}, "objective ppo does not read eps_hihg; did you mean 'eps_high'"),
        ({"name": "tis", "target": 2.0}, "objective tis does not read target; it reads cap, level"),
        ({"name": "reinforce", "cap": 2.0}, "objective reinforce does not read cap; it reads no number"),
        ({"name": "ppo", "dual_clip": 1.0}, "dual_clip must be above 1"),
        ({"name": "cispo", "beyond": "clamp"}, "beyond must be one of cut, drop"),
        ({"name": "topr", "level": "geometric"}, "level must be one of token, sequence"),
        ({"name": "tis", "cap": "two"}, "cap must be a number of at least 0"),
        ({"name": "tis", "cap": None}, "cap must be a number of at least 0"),
        ({"name": "tis", "cap": float("nan")}, "cap must be a number of at least 0"),
        ({"name": "tis", "cap": 0}, "cap must be above 0"),
        ({"name": "tis", "cap": 1e300}, "cap must be a number of at least 0"),
        ({"name": "tis", "cap": 10**400}, "cap must be a number of at least 0"),
        ({"name": "sapo", "tau_neg": 0.0}, "tau_neg must be above 0"),
        ({"name": "tba", "tau": 0.0}, "tau must be above 0"),
        ({"name": "opmd", "tau": 0.0}, "tau must be above 0"),
        ({"name": "mis", "low": 3.0}, "low must not be above high, got 3.0 and 2.0"),
        ({"name": "robust", "cap": 0.1}, "low must not be above cap, got 0.5 and 0.1"),
        ({"name": "grpo"}, "Input should be 'robust'"),
        ({"name": ["ppo"]}, "Input should be 'robust'"),
    ],
)
def test_bad_numbers_are_named(data: dict[str, Any], message: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=message):
        ObjectiveConfig.model_validate(data)


def test_numbers_are_read_as_yaml_gives_them() -> None:
    written = yaml.safe_load("{name: gspo, eps_low: 3e-4, eps_high: 1}")
    assert ObjectiveConfig.model_validate(written).numbers == {"eps_low": 3e-4, "eps_high": 1.0}


@pytest.mark.parametrize("decay_steps", [5, 10])
def test_a_learning_rate_that_falls_before_it_rose_is_refused(decay_steps: int) -> None:
    with pytest.raises(pydantic.ValidationError, match="decay_steps must be above warmup_steps"):
        LearnerConfig.model_validate({"optimizer": {"warmup_steps": 10, "decay_steps": decay_steps}})


@every_objective
def test_a_configuration_survives_being_written(name: str) -> None:
    config = LearnerConfig.model_validate({"objective": {"name": name}})
    assert LearnerConfig.model_validate(config.model_dump(mode="json")) == config
    assert config.objective.numbers == dict(OBJECTIVE_NUMBERS[name])


def test_the_default_is_robust() -> None:
    assert LearnerConfig().objective.name == "robust"

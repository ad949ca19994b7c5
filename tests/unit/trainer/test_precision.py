"""The decoder in bfloat16, the weights in float32: what is computed in which type, how far off it is, learning."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import SMALL_SHAPE
from torch import nn
from transformers import AutoModelForCausalLM

from driftgym.config import Limits
from driftgym.errors import ConfigError
from driftgym.trainer.batching import Row, micro_batch, plan_micro_batches, score_tokens
from driftgym.trainer.last_layer import hidden_states_at
from driftgym.trainer.learner import Learner
from driftgym.trainer.learner_config import WarmupConfig
from driftgym.trainer.model_loading import compute_in_words, load_model, named_weights
from driftgym.trainer.models import ModelConfig
from driftgym.trainer.packed_attention import takes_packed_rows
from driftgym.trainer.precision import body_dtype, compute_body_in, decoder_output
from driftgym.trainer.training_client import ProcessTrainingClient, train_step
from driftgym.types import Segment

_CPU = torch.device("cpu")
_LOW = torch.bfloat16
_FAMILIES = {
    "qwen3": {"model_type": "qwen3", "head_dim": 8, **SMALL_SHAPE},
    "qwen2": {"model_type": "qwen2", **SMALL_SHAPE},
    "llama": {"model_type": "llama", "tie_word_embeddings": False, **SMALL_SHAPE},
    "mistral, short window": {"model_type": "mistral", "sliding_window": 5, **SMALL_SHAPE},
    "olmo2": {"model_type": "olmo2", **SMALL_SHAPE},
    "gpt2": {"model_type": "gpt2", "vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
}


def _in(spec, dtype):
    return dataclasses.replace(spec, model=spec.model.model_copy(update={"dtype": dtype}))


@pytest.fixture
def pair(learner_spec):
    """Makes two learners of the same weights: in float32 and in bfloat16."""

    def make(**config):
        return tuple(Learner(_in(learner_spec(**config), dtype)) for dtype in ("float32", "bfloat16"))

    return make


@pytest.fixture
def segments(make_segment):
    return [make_segment(seed=index, advantage=(-1) ** index * 0.5, num_prompt=4 + index) for index in range(6)]


def _gradient(learner):
    return torch.cat([parameter.grad.flatten() for parameter in learner.parameters.values()])


def _weights(learner):
    return {name: tensor.clone() for name, tensor in learner.weights()}


def _same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _rescored(folder, segments, *, dtype, version=0):
    """`segments` as if written by a generator that computes in `dtype`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    written = []
    for segment in segments:
        ids = torch.from_numpy(segment.token_ids.astype(np.int64))
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1].float(), -1)
        chosen = np.concatenate([[0.0], logprobs.gather(1, ids[1:, None])[:, 0].numpy()])
        written.append(
            dataclasses.replace(
                segment,
                behaviour_logprobs=np.where(segment.loss_mask, chosen, 0.0),
                policy_versions=np.where(segment.loss_mask, version, -1),
            )
        )
    return written


def test_what_is_computed_in_which_type(pair, segments):
    plain, low = pair()
    assert compute_in_words(plain.model).startswith("decoder in float32, weights that are trained in float32")
    assert compute_in_words(low.model).startswith("decoder in bfloat16, weights that are trained in float32")
    rows = [Row(segment=segment, token_weight=1.0) for segment in segments]
    batch = micro_batch(rows, policy_version=0, device=_CPU)
    assert batch.packed_rows is not None
    hidden = hidden_states_at(low.model, batch.token_ids, batch.predictors, packed_rows=batch.packed_rows)
    scores = score_tokens(low.model, batch, temperature=1.0)
    assert (hidden.dtype, scores.logprobs.dtype, scores.entropies.dtype) == (_LOW, torch.float32, torch.float32)
    low.train_step(segments)
    low.forward_backward(segments)
    assert {each.dtype for each in low.parameters.values()} == {torch.float32}
    assert {each.grad.dtype for each in low.parameters.values()} == {torch.float32}
    assert {tensor.dtype for tensor in _weights(low).values()} == {torch.float32}


def test_the_head_is_computed_in_float32_with_float32_weights(pair):
    _, low = pair()
    batch = micro_batch([_row([5, 9, 2, 7]), _row([5, 9, 4, 8, 6])], policy_version=0, device=_CPU)
    hidden = hidden_states_at(low.model, batch.token_ids, batch.predictors, packed_rows=batch.packed_rows)
    logits = hidden.float() @ low.model.get_output_embeddings().weight.T
    expected = torch.log_softmax(logits, -1).gather(1, batch.targets[:, None])[:, 0]
    found = score_tokens(low.model, batch, temperature=1.0).logprobs
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def _row(token_ids):
    mask = np.arange(len(token_ids)) == len(token_ids) - 1
    segment = Segment(
        trajectory_id="t",
        segment_index=0,
        token_ids=token_ids,
        loss_mask=mask,
        behaviour_logprobs=np.where(mask, -4.0, 0.0),
        policy_versions=np.where(mask, 0, -1),
        advantages=np.where(mask, 1.0, 0.0),
    )
    return Row(segment=segment, token_weight=1.0)


def test_loss_and_gradient_are_those_of_float32_but_for_rounding(pair, segments):
    learners = pair(objective={"name": "reinforce"})
    figures = [learner.forward_backward(segments).metrics for learner in learners]
    exact, found = (_gradient(learner) for learner in learners)
    assert not torch.equal(exact, found)
    assert figures[1]["loss"] == pytest.approx(figures[0]["loss"], rel=2e-2)
    assert figures[1]["entropy"] == pytest.approx(figures[0]["entropy"], rel=2e-2)
    assert float((found - exact).norm() / exact.norm()) < 0.06
    assert float(torch.cosine_similarity(found, exact, dim=0)) > 0.998


def test_micro_batches_add_up_in_float32(pair, segments):
    """Sixteen times the same gradient is sixteen times that, to an accuracy that bfloat16 does not have."""
    _, low = pair(objective={"name": "reinforce"})
    low.forward_backward(segments)
    once = _gradient(low)
    for _ in range(15):
        low.forward_backward(segments)
    torch.testing.assert_close(_gradient(low), 16.0 * once, rtol=1e-5, atol=1e-7)


def test_at_lag_0_ratios_are_near_1_for_generators_in_bfloat16(pair, segments, tmp_path):
    plain, low = pair()
    written = _rescored(low.publish(tmp_path).location, segments, dtype=_LOW)
    other, report = (learner.train_step(written) for learner in (plain, low))
    assert report.num_lag0_tokens == sum(int(segment.loss_mask.sum()) for segment in segments)
    assert report.lag0_ratio_sum / report.num_lag0_tokens == pytest.approx(1.0, abs=2e-2)
    assert report.metrics["mismatch_at_lag0"] < 0.5 * other.metrics["mismatch_at_lag0"]


def test_steps_far_below_the_resolution_of_bfloat16_add_up(pair, segments):
    """Each moves a weight by 2e-6; between bfloat16 values of 0.1 there are 5e-4."""
    rate, num_steps = 2e-6, 60
    _, low = pair(objective={"name": "reinforce"}, optimizer={"learning_rate": rate, "betas": (0.0, 0.9)})
    name = next(name for name in low.parameters if name.endswith("down_proj.weight"))
    first = low.parameters[name].detach().clone()
    for _ in range(num_steps):
        before = low.parameters[name].detach().clone()
        low.train_step(segments)
        moved = (low.parameters[name].detach() - before).abs()
        assert 0.0 < float(moved.max()) < 4 * rate
    travelled = (low.parameters[name].detach() - first).abs()
    assert float(travelled.median()) > 0.5 * num_steps * rate
    large = first.abs() > 0.1
    # A weight in bfloat16 would never have moved: each step is far less than half the way to its neighbour.
    rounded = first.to(_LOW)
    assert torch.equal((rounded.float() + 4 * rate).to(_LOW)[large], rounded[large])


def test_small_steps_come_to_be_seen_by_the_decoder(pair, segments):
    _, low = pair(objective={"name": "reinforce"}, optimizer={"learning_rate": 2e-5, "betas": (0.0, 0.9)})
    token_ids = torch.arange(12)[None]
    with torch.no_grad():
        before = decoder_output(low.model.get_decoder(), token_ids)
        for _ in range(60):
            low.train_step(segments)
        assert not torch.equal(decoder_output(low.model.get_decoder(), token_ids), before)


def _reward_of_a_bandit(learner, folder, *, num_steps):
    """Mean rewards by step: two tokens are sampled after a prompt; each is worth 1 when its id is even."""
    rng = torch.Generator().manual_seed(0)
    engine = AutoModelForCausalLM.from_pretrained(learner.publish(folder).location, dtype=body_dtype(learner.model))
    rewards = []
    for step in range(num_steps):
        with torch.no_grad():
            for name, tensor in learner.weights():
                engine.get_parameter(name).copy_(tensor)
        ids = torch.arange(4, 12).repeat_interleave(4)[:, None]
        ids = torch.cat([torch.full_like(ids, 3), ids], dim=1)
        behaviour = [torch.zeros(len(ids), 2)]
        for _ in range(2):
            with torch.no_grad():
                logprobs = torch.log_softmax(engine(input_ids=ids).logits[:, -1].float(), -1)
            chosen = torch.multinomial(logprobs.exp(), 1, generator=rng)
            behaviour.append(logprobs.gather(1, chosen))
            ids = torch.cat([ids, chosen], dim=1)
        reward = (ids[:, 2:] % 2 == 0).float().mean(1)
        rewards.append(float(reward.mean()))
        mu = torch.cat(behaviour, dim=1)
        batch = [_played(ids[i], mu[i], float(reward[i] - reward.mean()), step=step, member=i) for i in range(len(ids))]
        report = learner.train_step(batch)
        assert report.lag0_ratio_sum / report.num_lag0_tokens == pytest.approx(1.0, abs=5e-2)
    return rewards


def _played(ids, logprobs, advantage, *, step, member):
    mask = np.array([False, False, True, True])
    return Segment(
        trajectory_id=f"{step}-{member}",
        segment_index=0,
        token_ids=ids.numpy(),
        loss_mask=mask,
        behaviour_logprobs=logprobs.numpy(),
        policy_versions=np.where(mask, step, -1),
        advantages=np.where(mask, advantage, 0.0),
    )


def test_training_learns_as_in_float32(pair, tmp_path):
    learners = pair(objective={"name": "reinforce"}, optimizer={"learning_rate": 5e-3})
    curves = [
        _reward_of_a_bandit(learner, tmp_path / str(number), num_steps=30) for number, learner in enumerate(learners)
    ]
    for rewards in curves:
        assert np.mean(rewards[:4]) < 0.65
        assert np.mean(rewards[-8:]) > 0.9
    assert np.mean(curves[1][-8:]) == pytest.approx(np.mean(curves[0][-8:]), abs=0.1)


def test_the_warm_up_learns_as_in_float32(learner_spec, make_segment):
    warmup = WarmupConfig(num_steps=30, batch_size=8, copy_fraction=0.0)
    demonstrations = [make_segment(seed=index) for index in range(8)]
    figures = [
        Learner(_in(learner_spec(warmup=warmup), dtype)).warm_up(demonstrations) for dtype in ("float32", "bfloat16")
    ]
    exact, found = (each["warmup_loss_last"] for each in figures)
    assert exact < 0.5 * figures[0]["warmup_loss_first"]
    assert found == pytest.approx(exact, rel=0.1)


def test_a_resumed_learner_goes_on_to_the_bit(learner_spec, segments, tmp_path):
    spec = _in(learner_spec(), "bfloat16")
    straight, resumed = Learner(spec), Learner(dataclasses.replace(spec, seed=99))
    for _ in range(3):
        straight.train_step(segments)
    straight.save(tmp_path / "3")
    assert {tensor.dtype for tensor in load_file(tmp_path / "3" / "weights.safetensors").values()} == {torch.float32}
    resumed.load(tmp_path / "3", policy_version=3)
    reports = [learner.train_step(segments) for learner in (straight, resumed)]
    assert reports[0].metrics["loss"] == reports[1].metrics["loss"]
    assert _same(_weights(straight), _weights(resumed))


def test_a_checkpoint_of_float32_is_gone_on_with(pair, segments, tmp_path):
    plain, low = pair()
    plain.train_step(segments)
    plain.save(tmp_path / "1")
    low.load(tmp_path / "1", policy_version=1)
    assert _same(_weights(plain), _weights(low))
    low.train_step(segments)


def test_what_is_published_is_what_is_trained(pair, segments, tmp_path):
    _, low = pair()
    low.train_step(segments)
    folder = low.publish(tmp_path).location
    assert _same(load_file(f"{folder}/model.safetensors"), _weights(low))
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.float32
    assert "driftgym" not in low.model.config.to_json_string()


def test_the_reference_policy_is_computed_alike(pair, segments):
    """At its first step the policy is the reference: a pull towards it is nothing at all."""
    with_pull, without = (pair(objective={"name": "reinforce"}, kl=kl)[1] for kl in ({"coef": 5.0}, None))
    for learner in (with_pull, without):
        learner.forward_backward(segments)
    torch.testing.assert_close(_gradient(with_pull), _gradient(without), rtol=0, atol=1e-5)


async def _run_of(spec, segments, folder):
    """What the learner's process says, the losses of two steps, and the weights then."""
    client = await ProcessTrainingClient.start(spec, limits=Limits(learner_s=100.0, close_s=5.0))
    try:
        losses = [(await train_step(client, segments)).metrics["loss"] for _ in range(2)]
        update = await client.publish(folder)
        return client.computation, losses, load_file(f"{update.location}/model.safetensors")
    finally:
        await client.close()


@pytest.mark.slow
async def test_several_processes_share_a_step(learner_spec, segments, tmp_path):
    """They round otherwise than one alone, since they sum in another order; in float32 they hold and publish."""
    one, two = [
        await _run_of(_in(learner_spec(num_processes=num), "bfloat16"), segments, tmp_path / str(num)) for num in (1, 2)
    ]
    assert one[0].startswith("decoder in bfloat16, weights that are trained in float32; attention of packed rows")
    assert one[0] == two[0]
    assert two[1] == pytest.approx(one[1], rel=2e-2)
    assert {tensor.dtype for tensor in two[2].values()} == {torch.float32}
    distances = torch.cat([(one[2][name] - tensor).abs().flatten() for name, tensor in two[2].items()])
    assert float(distances.quantile(0.9)) < 2e-3  # a fifth of a step


@pytest.mark.parametrize("family", _FAMILIES)
def test_families_are_computed_in_bfloat16(tmp_path, family):
    (tmp_path / "config.json").write_text(json.dumps(_FAMILIES[family]))
    plain, low = (
        load_model(ModelConfig(path="m", init="random", dtype=dtype), tmp_path, seed=1, device=_CPU)
        for dtype in ("float32", "bfloat16")
    )
    assert (body_dtype(plain), body_dtype(low)) == (torch.float32, _LOW)
    assert takes_packed_rows(low) == takes_packed_rows(plain)
    assert _same(dict(named_weights(plain)), dict(named_weights(low)))
    rows = [_row([5, 9, 2, *range(last, last + 4 + last % 5)]) for last in range(11, 18)]
    (part,) = plan_micro_batches(rows, max_tokens=1000)
    batch = micro_batch(part, policy_version=0, device=_CPU)
    padded = micro_batch(part, policy_version=0, device=_CPU, packs=False)
    exact, packed, alone = (
        score_tokens(model, each, temperature=1.0).logprobs.detach()
        for model, each in ((plain, batch), (low, batch), (low, padded))
    )
    assert batch.packed_rows is not None
    assert padded.packed_rows is None
    scale = float(exact.abs().max())
    assert 0.0 < float((packed - exact).abs().max()) < 0.04 * scale
    assert float((packed - alone).abs().max()) < 0.04 * scale


class _Mixing(nn.Module):
    """A decoder that mixes its weights with a table of its own, which stays float32."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 8)
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mixer", torch.eye(8))

    def get_decoder(self):
        return self

    def get_input_embeddings(self):
        return self.table

    def forward(self, input_ids=None, inputs_embeds=None, use_cache=False):
        hidden = self.table(input_ids) if inputs_embeds is None else inputs_embeds
        return _Output(last_hidden_state=self.layer(hidden) @ self.mixer)


@dataclasses.dataclass
class _Output:
    last_hidden_state: torch.Tensor


def test_a_decoder_that_cannot_be_computed_so_is_refused():
    model = _Mixing()
    with pytest.raises(ConfigError, match=r"model\.dtype: _Mixing is not computed right in bfloat16"):
        compute_body_in(model, _LOW)
    assert body_dtype(model) == torch.float32
    assert decoder_output(model, torch.tensor([[1, 2]])).dtype == torch.float32

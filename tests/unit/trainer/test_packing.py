"""Packed rows: each beginning stands once, attention stays within rows, log-probs and gradients are the padded ones."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import SMALL_SHAPE

from driftgym.trainer.adapters import ADAPTER_NAME
from driftgym.trainer.batching import Row, micro_batch, plan_micro_batches, score_tokens
from driftgym.trainer.head import head_logits
from driftgym.trainer.model_loading import load_model, trained_parameters
from driftgym.trainer.models import LoraConfig, ModelConfig
from driftgym.trainer.packed_attention import packed_rows, takes_packed_rows
from driftgym.trainer.packing import plan_packing
from driftgym.types import Segment

_CPU = torch.device("cpu")
_FAMILIES = {
    "qwen3": {"model_type": "qwen3", "head_dim": 8, **SMALL_SHAPE},
    "llama": {"model_type": "llama", "tie_word_embeddings": False, **SMALL_SHAPE},
    "mistral": {"model_type": "mistral", **SMALL_SHAPE},
    "mistral, short window": {"model_type": "mistral", "sliding_window": 5, **SMALL_SHAPE},
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128,
        "bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.3,
    },
}  # fmt: skip
_WITHOUT = {
    "model_type": "qwen3_next", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, **SMALL_SHAPE
}  # fmt: skip


def _loaded(folder, config, **options):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return load_model(ModelConfig(path="m", init="random", **options), folder, seed=1, device=_CPU)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return _loaded(tmp_path_factory.mktemp("qwen3"), _FAMILIES["qwen3"]).double()


def _row(token_ids, *, trained, group="", weight=0.1, trajectory="t", index=0):
    mask = np.zeros(len(token_ids), dtype=bool)
    mask[list(trained)] = True
    segment = Segment(
        trajectory_id=trajectory,
        group_id=group,
        segment_index=index,
        token_ids=token_ids,
        loss_mask=mask,
        behaviour_logprobs=np.where(mask, -4.0, 0.0),
        policy_versions=np.where(mask, 0, -1),
        advantages=np.where(mask, np.arange(len(mask)) % 3 - 0.5, 0.0),
    )
    return Row(segment=segment, token_weight=weight)


def _group(seed, *, members, num_prompt, num_answer, name=None):
    """Rows of one prompt, whose answers differ in length."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 61, num_prompt)
    rows = []
    for member in range(members):
        length = num_answer + member % 4
        ids = np.concatenate([prompt, rng.integers(0, 61, length)])
        trained = [num_prompt, *range(num_prompt + 2, len(ids) - 1, 2), len(ids) - 1]
        rows.append(_row(ids, trained=trained, group=name or f"g{seed}", trajectory=f"{seed}-{member}"))
    return rows


def _scored(model, rows, *, max_tokens=10_000, packs=True):
    """The log-probs by row, and the gradients of their weighted sum."""
    model.zero_grad()
    logprobs = {}
    for part in plan_micro_batches(rows, max_tokens=max_tokens, packs=packs):
        batch = micro_batch(part, policy_version=2, device=_CPU, packs=packs)
        scores = score_tokens(model, batch, temperature=0.9)
        (scores.logprobs * batch.weights * batch.advantages).sum().backward()
        for index, row in enumerate(part):
            logprobs[id(row)] = scores.logprobs.detach()[batch.rows == index]
    gradients = {name: p.grad.clone() for name, p in trained_parameters(model).items() if p.grad is not None}
    return [logprobs[id(row)] for row in rows if row.num_inputs], gradients


def _assert_same(model, rows, *, max_tokens=10_000, atol=1e-10, gradient_atol=1e-6):
    packed, gradients = _scored(model, rows, max_tokens=max_tokens)
    padded, others = _scored(model, rows, packs=False)
    for one, other in zip(packed, padded, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=atol)
    for name, gradient in others.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=gradient_atol)


def test_packed_rows_read_a_shared_prompt_once(qwen3):
    rows = _group(1, members=8, num_prompt=20, num_answer=9)
    batch = micro_batch(rows, policy_version=0, device=_CPU)
    assert batch.packed_rows is not None
    assert batch.num_padding == 0
    assert batch.num_inputs <= 20 + sum(row.num_inputs - 20 for row in rows)
    assert micro_batch(rows, policy_version=0, device=_CPU, packs=False).num_inputs == 8 * 31
    _assert_same(qwen3, rows)


def test_each_row_predicts_its_own_first_token_after_the_prompt(qwen3):
    prompt = [5, 9, 2, 7, 7, 3]
    rows = [_row([*prompt, last, 1, 2, 3], trained=[6, 9], group="g") for last in (11, 12, 13)]
    batch = micro_batch(rows, policy_version=0, device=_CPU)
    assert batch.packed_rows is not None
    firsts = batch.predictors[::2]
    assert len(set(firsts.tolist())) == 1
    assert batch.targets[::2].tolist() == [11, 12, 13]
    assert batch.rows.tolist() == [0, 0, 1, 1, 2, 2]
    _assert_same(qwen3, rows)


@pytest.mark.parametrize("max_tokens", [1, 40, 90, 10_000])
def test_any_split_and_any_order_give_the_padded_figures(qwen3, max_tokens):
    rows = [
        *_group(1, members=4, num_prompt=20, num_answer=9),
        *_group(2, members=1, num_prompt=6, num_answer=30),
        *_group(3, members=3, num_prompt=15, num_answer=2),
        *_group(3, members=2, num_prompt=15, num_answer=3, name="the same prompt again"),
    ]
    order = np.random.default_rng(0).permutation(len(rows))
    _assert_same(qwen3, rows, max_tokens=max_tokens)
    _assert_same(qwen3, [rows[index] for index in order], max_tokens=max_tokens)


def test_long_rows_that_share_little_are_attended_whole(qwen3):
    rows = [
        *_group(1, members=4, num_prompt=60, num_answer=200),
        *_group(2, members=3, num_prompt=90, num_answer=10),
    ]
    packing = micro_batch(rows, policy_version=0, device=_CPU).packed_rows
    assert packing is not None
    whole = [block for block in packing.blocks if block.allowed is None]
    assert sum(len(block.queries) for block in whole) == 4 + 1
    assert sum(block.queries.numel() for block in whole) > sum(len(block.owned) for block in whole)
    _assert_same(qwen3, rows)


def test_nothing_in_common_and_unequal_lengths(qwen3):
    rng = np.random.default_rng(0)
    rows = [_row([n, *rng.integers(0, 61, 3 * n)], trained=[1, 3 * n]) for n in range(1, 12)]
    assert micro_batch(rows, policy_version=0, device=_CPU).packed_rows is not None
    _assert_same(qwen3, rows)


def test_a_row_that_is_the_beginning_of_another_and_one_that_occurs_twice(qwen3):
    ids = [4, 8, 15, 16, 23, 42, 3, 1]
    rows = [
        _row(ids, trained=[2, 7], group="g"),
        _row(ids[:5], trained=[3, 4], group="g"),
        _row(ids, trained=[5, 7], group="g", weight=0.7),
        _row([*ids[:4], 9, 9, 9], trained=[4, 6], group="g"),
    ]
    batch = micro_batch(rows, policy_version=0, device=_CPU)
    assert batch.num_inputs == 7 + 2
    _assert_same(qwen3, rows)


def test_segments_of_one_trajectory_share_what_they_begin_with(qwen3):
    rng = np.random.default_rng(1)
    start = rng.integers(0, 61, 12)
    rows = [
        _row(np.concatenate([start, rng.integers(0, 61, 8)]), trained=[12, 19], group="g", index=index)
        for index in range(3)
    ]
    assert micro_batch(rows, policy_version=0, device=_CPU).num_inputs == 12 + 3 * 7
    _assert_same(qwen3, rows)


@pytest.mark.parametrize("family", _FAMILIES)
def test_families_take_packed_rows(tmp_path, family):
    model = _loaded(tmp_path, _FAMILIES[family])
    assert takes_packed_rows(model)
    rows = [*_group(1, members=5, num_prompt=11, num_answer=6), *_group(2, members=2, num_prompt=3, num_answer=14)]
    _assert_same(model, rows, atol=1e-5, gradient_atol=1e-5)
    _assert_same(model.double(), rows, gradient_atol=1e-10 if family == "gpt2" else 1e-6)


def test_dropout_is_off(tmp_path):
    """GPT-2 has one of 0.1 in its training mode; generators sample without."""
    model = _loaded(tmp_path, _FAMILIES["gpt2"])
    batch = micro_batch(_group(1, members=4, num_prompt=11, num_answer=6), policy_version=0, device=_CPU)
    with torch.no_grad():
        first, again = (score_tokens(model, batch, temperature=1.0).logprobs for _ in range(2))
    assert torch.equal(first, again)


@pytest.mark.parametrize("family", ["qwen3", "mistral, short window"])
def test_calls_without_packed_rows_are_those_of_transformers(tmp_path, family):
    model = _loaded(tmp_path, _FAMILIES[family])
    token_ids = torch.arange(24).reshape(2, 12)
    mask = torch.ones_like(token_ids)
    mask[1, :4] = 0
    logits = model(input_ids=token_ids, attention_mask=mask).logits
    model.set_attn_implementation("eager")
    assert not takes_packed_rows(model)
    torch.testing.assert_close(model(input_ids=token_ids, attention_mask=mask).logits[mask > 0], logits[mask > 0])


def test_what_attention_is_called_is_not_published(qwen3):
    assert "attn" not in qwen3.config.to_json_string()


def test_a_model_of_another_build_reads_padded_rows(tmp_path):
    model = _loaded(tmp_path, _WITHOUT)
    assert not takes_packed_rows(model)
    rows = _group(1, members=4, num_prompt=11, num_answer=6)
    batch = micro_batch(rows, policy_version=0, device=_CPU)
    plain = micro_batch(rows, policy_version=0, device=_CPU, packs=False)
    assert batch.packed_rows is not None
    with torch.no_grad():
        packed, padded = (score_tokens(model, each, temperature=1.0).logprobs for each in (batch, plain))
    torch.testing.assert_close(packed, padded)


@pytest.mark.parametrize("target", ["all-linear", ["q_proj", "o_proj", "lm_head"]])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lora(tmp_path, target, dtype):
    pytest.importorskip("peft")
    lora = LoraConfig(rank=2, target_modules=target)
    config = {**_FAMILIES["qwen3"], "tie_word_embeddings": False}
    model = _loaded(tmp_path, config, lora=lora, dtype=dtype)
    assert takes_packed_rows(model)
    generator = torch.Generator().manual_seed(0)
    for parameter in trained_parameters(model).values():
        parameter.data.normal_(0.0, 0.1, generator=generator)
    rows = _group(1, members=5, num_prompt=11, num_answer=6)
    loose = dtype == "bfloat16"
    _assert_same(model, rows, atol=0.3 if loose else 1e-5, gradient_atol=0.3 if loose else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_head_is_computed_in_float32_at_least(dtype, has_bias):
    head = torch.nn.Linear(16, 61, bias=has_bias).to(dtype)
    hidden = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits = head_logits(head, hidden)
    assert logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    bias = head.bias.double() if has_bias else 0.0
    torch.testing.assert_close(logits.double(), hidden.double() @ head.weight.double().T + bias, rtol=1e-5, atol=1e-5)


def test_the_head_in_float32_with_lora_on_it():
    peft = pytest.importorskip("peft")
    model = torch.nn.ModuleDict({"head": torch.nn.Linear(16, 61, dtype=torch.bfloat16)})
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["head"])
    head = peft.inject_adapter_in_model(config, model, adapter_name=ADAPTER_NAME)["head"]
    down, up = head.lora_A[ADAPTER_NAME].weight, head.lora_B[ADAPTER_NAME].weight
    up.data.normal_(generator=torch.Generator().manual_seed(0))
    hidden = torch.randn(5, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    base = head.base_layer
    expected = hidden.double() @ (base.weight.double() + 3.0 * up.double() @ down.double()).T + base.bias.double()
    torch.testing.assert_close(head_logits(head, hidden).double(), expected, rtol=1e-5, atol=1e-5)


def test_groups_stay_together_where_they_fit():
    rows = [row for seed in range(6) for row in _group(seed, members=4, num_prompt=10, num_answer=8)]
    for max_tokens in (60, 100, 150, 400):
        parts = plan_micro_batches(rows[::-1], max_tokens=max_tokens)
        groups = [{row.segment.group_id for row in part} for part in parts]
        assert sum(map(len, groups)) == 6
        assert sum(map(len, parts)) == len(rows)
        assert all(micro_batch(p, policy_version=0, device=_CPU).num_inputs <= max_tokens for p in parts)


def test_equal_rows_without_anything_in_common_are_padded():
    rows = [_row([n, *range(10)], trained=[10]) for n in range(11, 19)]
    batch = micro_batch(rows, policy_version=0, device=_CPU)
    assert batch.packed_rows is None
    assert (batch.num_inputs, batch.num_padding) == (80, 0)


def test_a_mask_that_only_keeps_some_tokens_ends_the_row_early():
    row = _group(1, members=1, num_prompt=10, num_answer=20)[0]
    early = np.arange(len(row.segment.loss_mask)) < 15
    segment = dataclasses.replace(row.segment, train_mask=row.segment.loss_mask & early)
    batch = micro_batch([Row(segment=segment, token_weight=1.0)], policy_version=0, device=_CPU)
    assert batch.num_inputs == 14


_SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9)


@given(_SEQUENCES)
def test_the_packed_sequence_holds_every_beginning_once(lists):
    plan = plan_packing([np.array(each, dtype=np.int32) for each in lists])
    beginnings = {tuple(each[: end + 1]) for each in lists for end in range(len(each))}
    assert plan.num_tokens == len(beginnings)
    place_of = {}
    for path, each in zip(plan.paths, lists, strict=True):
        for end in range(len(each)):
            assert place_of.setdefault(tuple(each[: end + 1]), path[end]) == path[end]
    assert sorted(place_of.values()) == list(range(len(beginnings)))


@given(_SEQUENCES, st.one_of(st.none(), st.integers(1, 4)))
def test_every_token_attends_to_its_row_up_to_itself(lists, window):
    plan = plan_packing([np.array(each, dtype=np.int32) for each in lists])
    rows = packed_rows(plan, device=_CPU)
    expected = {}
    for path, each in zip(plan.paths, lists, strict=True):
        for end in range(len(each)):
            expected[int(path[end])] = path[max(0, end + 1 - (window or 99)) : end + 1].tolist()
            assert rows.position_ids[0, path[end]] == end
    seen = []
    for block in rows.blocks:
        allowed = block.allowed_within(window)
        shape = (len(block.queries), block.queries.shape[1], block.keys.shape[1])
        allowed = torch.ones(shape[1:]).tril().bool() if allowed is None else allowed[:, 0]
        allowed = allowed.expand(shape)
        assert allowed.any(-1).all()
        for place in block.owned.tolist():
            row, query = divmod(place, shape[1])
            seen.append(int(block.queries[row, query]))
            assert block.keys[row][allowed[row, query]].tolist() == expected[seen[-1]]
    assert seen == list(range(plan.num_tokens))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_rows_are_scored_as_padded_ones(qwen3, data):
    rows = []
    for tokens in data.draw(st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=12), min_size=1, max_size=8)):
        trained = data.draw(st.sets(st.integers(1, len(tokens) - 1)))
        rows.append(_row(tokens, trained=trained, group=data.draw(st.sampled_from(["", "a", "b"]))))
    _assert_same(qwen3, rows, max_tokens=data.draw(st.sampled_from([1, 12, 30, 1000])))

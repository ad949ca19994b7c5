"""Rows handed to a kernel by their bounds: what it is given, what comes back, and which kernel is used where."""

import inspect
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import SMALL_SHAPE
from torch.nn.attention.varlen import varlen_attn

from driftgym.trainer.batching import Row, micro_batch, plan_micro_batches, score_tokens
from driftgym.trainer.model_loading import compute_in_words, load_model, trained_parameters
from driftgym.trainer.models import LoraConfig, ModelConfig
from driftgym.trainer.packed_attention import attend_by_kernel, packed_rows, takes_packed_rows
from driftgym.trainer.packing import plan_packing
from driftgym.trainer.varlen_attention import (
    PLAIN_KERNEL,
    VarlenKernel,
    causal_window,
    is_right,
    plain_varlen_attn,
    varlen_kernel,
)
from driftgym.types import Segment

_CPU, _CUDA = torch.device("cpu"), torch.device("cuda")
_FAMILIES = {
    "qwen3": {"model_type": "qwen3", "head_dim": 8, **SMALL_SHAPE},
    "llama": {"model_type": "llama", "tie_word_embeddings": False, **SMALL_SHAPE},
    "mistral, short window": {"model_type": "mistral", "sliding_window": 5, **SMALL_SHAPE},
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128,
        "bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.3,
    },
}  # fmt: skip


class _Counting:
    """A kernel that computes as its twin does, and keeps the bounds that it is given."""

    def __init__(self):
        self.bounds = []
        self.kernel = replace(PLAIN_KERNEL, name="counting", attend=self.attend)

    def attend(self, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options):
        self.bounds.append((cu_seq_q.tolist(), cu_seq_k.tolist()))
        return plain_varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options)


def _loaded(folder, config, **options):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return load_model(ModelConfig(path="m", init="random", **options), folder, seed=1, device=_CPU)


def _row(token_ids, *, trained, group=""):
    mask = np.zeros(len(token_ids), dtype=bool)
    mask[list(trained)] = True
    segment = Segment(
        trajectory_id="t",
        group_id=group,
        segment_index=0,
        token_ids=token_ids,
        loss_mask=mask,
        behaviour_logprobs=np.where(mask, -4.0, 0.0),
        policy_versions=np.where(mask, 0, -1),
        advantages=np.where(mask, np.arange(len(mask)) % 3 - 0.5, 0.0),
    )
    return Row(segment=segment, token_weight=0.1)


def _rows_without_anything_in_common():
    rng = np.random.default_rng(0)
    return [_row([n, *rng.integers(0, 61, 3 * n)], trained=[1, 3 * n]) for n in range(1, 12)]


def _rows_of_groups():
    rng = np.random.default_rng(1)
    rows = []
    for group, num_prompt in (("a", 11), ("b", 40), ("c", 3)):
        prompt = rng.integers(0, 61, num_prompt)
        for member in range(4):
            ids = np.concatenate([prompt, rng.integers(0, 61, 3 + 5 * member)])
            rows.append(_row(ids, trained=[num_prompt, len(ids) - 1], group=group))
    return rows


_BATCHES = {"nothing in common": _rows_without_anything_in_common, "groups": _rows_of_groups}


def _scored(model, rows, *, packs):
    """The log-probs of `rows`, and the gradients of their weighted sum."""
    model.zero_grad()
    (part,) = plan_micro_batches(rows, max_tokens=100_000, packs=packs)
    batch = micro_batch(part, policy_version=2, device=_CPU, packs=packs)
    assert (batch.packed_rows is not None) == packs
    scores = score_tokens(model, batch, temperature=0.9)
    (scores.logprobs * batch.weights * batch.advantages).sum().backward()
    numbers = {id(row): number for number, row in enumerate(rows)}
    owners = torch.tensor([numbers[id(row)] for row in part])[batch.rows]
    order = torch.argsort(owners, stable=True)
    gradients = {name: p.grad.clone() for name, p in trained_parameters(model).items() if p.grad is not None}
    return scores.logprobs.detach()[order], gradients


def _assert_same(one, other, *, atol):
    torch.testing.assert_close(one[0], other[0], rtol=0, atol=atol)
    for name, gradient in other[1].items():
        torch.testing.assert_close(one[1][name], gradient, rtol=0, atol=atol)


@pytest.mark.parametrize("batch", _BATCHES)
@pytest.mark.parametrize("family", _FAMILIES)
def test_a_kernel_gives_the_figures_of_padded_rows_and_of_blocks(tmp_path, family, batch):
    model = _loaded(tmp_path, _FAMILIES[family]).double()
    rows = _BATCHES[batch]()
    padded, blocks = (_scored(model, rows, packs=packs) for packs in (False, True))
    counting = _Counting()
    assert attend_by_kernel(model, counting.kernel)
    counting.bounds.clear()
    by_kernel = _scored(model, rows, packs=True)
    assert len(counting.bounds) == model.config.num_hidden_layers
    _assert_same(by_kernel, padded, atol=1e-6)
    _assert_same(by_kernel, blocks, atol=1e-6)


def test_rows_without_anything_in_common_are_handed_over_as_they_are(tmp_path):
    model, counting = _loaded(tmp_path, _FAMILIES["qwen3"]), _Counting()
    attend_by_kernel(model, counting.kernel)
    counting.bounds.clear()
    rows = _rows_without_anything_in_common()
    _scored(model, rows, packs=True)
    first, second = counting.bounds
    assert first == second
    of_queries, of_keys = first
    assert of_queries == of_keys
    lengths = [end - start for start, end in itertools.pairwise(of_queries)]
    assert sorted(lengths) == sorted(row.num_inputs for row in rows)


@pytest.mark.parametrize("config", [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "lora": LoraConfig(rank=2)}])
def test_in_bfloat16(tmp_path, config):
    if "lora" in config:
        pytest.importorskip("peft")
    model = _loaded(tmp_path, _FAMILIES["qwen3"], **config)
    kernel = replace(PLAIN_KERNEL, name="halves", dtypes=(torch.bfloat16, torch.float16))
    blocks = _scored(model, _rows_of_groups(), packs=True)
    assert attend_by_kernel(model, kernel)
    assert compute_in_words(model).endswith("attention of packed rows by the kernel halves")
    by_kernel = _scored(model, _rows_of_groups(), packs=True)
    assert not torch.equal(by_kernel[0], blocks[0])
    assert float((by_kernel[0] - blocks[0]).abs().max()) < 0.05 * float(blocks[0].abs().max())


def test_other_calls_are_those_of_transformers(tmp_path):
    model = _loaded(tmp_path, _FAMILIES["qwen3"])
    token_ids, mask = torch.arange(24).reshape(2, 12), torch.ones(2, 12, dtype=torch.int64)
    mask[1, :4] = 0
    before = model(input_ids=token_ids, attention_mask=mask).logits
    assert attend_by_kernel(model, PLAIN_KERNEL)
    assert torch.equal(model(input_ids=token_ids, attention_mask=mask).logits, before)
    assert "attn" not in model.config.to_json_string()


def _top_left(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options):
    """The first query of a row stands at its first key: right only where there are as many queries as keys."""
    whole = [torch.arange(end - start) for start, end in itertools.pairwise(cu_seq_k.tolist())]
    parts = []
    for (start, end), (first, last), places in zip(
        itertools.pairwise(cu_seq_q.tolist()), itertools.pairwise(cu_seq_k.tolist()), whole, strict=True
    ):
        padded = torch.cat([query[start:end], query.new_zeros(len(places) - (end - start), *query.shape[1:])])
        bounds = torch.tensor([0, len(places)], dtype=torch.int32)
        longest = len(places)
        out = plain_varlen_attn(padded, key[first:last], value[first:last], bounds, bounds, longest, longest, **options)
        parts.append(out[: end - start])
    return torch.cat(parts)


def _without_gradients(*arguments, **options):
    return plain_varlen_attn(*[each.detach() if torch.is_tensor(each) else each for each in arguments], **options)


def _not_here(*arguments, **options):
    raise RuntimeError("no such operator on this device")


@pytest.mark.parametrize("attend", [_top_left, _without_gradients, _not_here])
def test_a_kernel_that_is_not_right_is_not_used(tmp_path, attend):
    model = _loaded(tmp_path, _FAMILIES["qwen3"])
    expected = _scored(model, _rows_of_groups(), packs=True)
    assert not attend_by_kernel(model, replace(PLAIN_KERNEL, name="wrong", attend=attend))
    assert takes_packed_rows(model)
    assert compute_in_words(model).endswith("attention of packed rows in blocks")
    _assert_same(_scored(model, _rows_of_groups(), packs=True), expected, atol=0.0)


def test_a_window_that_a_kernel_does_not_keep_matters_to_models_that_have_one(tmp_path):
    def attend(*arguments, window_size, **options):
        return plain_varlen_attn(*arguments, window_size=(-1, 0), **options)

    kernel = replace(PLAIN_KERNEL, name="windowless", attend=attend)
    assert not attend_by_kernel(_loaded(tmp_path / "a", _FAMILIES["mistral, short window"]), kernel)
    assert attend_by_kernel(_loaded(tmp_path / "b", _FAMILIES["qwen3"]), kernel)


def test_a_model_that_reads_padded_rows_has_no_use_for_a_kernel(tmp_path):
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = _loaded(tmp_path, {"model_type": "qwen3_next", **moe, **SMALL_SHAPE})
    assert not attend_by_kernel(model, PLAIN_KERNEL)
    assert compute_in_words(model).endswith("attention of padded rows")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_of_torch_is_chosen_on_cuda_in_half_precision(dtype):
    chosen = varlen_kernel(device=_CUDA, dtype=dtype)
    assert chosen is not None
    assert chosen.attend is varlen_attn


@pytest.mark.parametrize(("device", "dtype"), [(_CUDA, torch.float32), (_CPU, torch.bfloat16), (_CPU, torch.float32)])
def test_elsewhere_there_is_none(device, dtype):
    assert varlen_kernel(device=device, dtype=dtype) is None


def test_a_kernel_is_given_tensors_that_it_takes_alone(tmp_path):
    """A model that is converted after its kernel was chosen attends in blocks again."""
    model, counting = _loaded(tmp_path, _FAMILIES["qwen3"]), _Counting()
    assert attend_by_kernel(model, replace(counting.kernel, dtypes=(torch.float32,)))
    counting.bounds.clear()
    _scored(model.double(), _rows_of_groups(), packs=True)
    assert not counting.bounds


def test_the_twin_is_called_as_the_kernel_is():
    """Its parameters are the kernel's, in name, order, kind and default; those that it leaves out are optional."""
    twin, kernel = (inspect.signature(each).parameters for each in (plain_varlen_attn, varlen_attn))
    common = {name: parameter for name, parameter in kernel.items() if name in twin}
    assert list(common) == list(twin)
    for name, parameter in twin.items():
        assert (parameter.kind, parameter.default) == (common[name].kind, common[name].default)
    for name in kernel.keys() - twin.keys():
        assert kernel[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert kernel[name].default is None


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize(("num_heads", "num_key_heads"), [(4, 4), (4, 2), (3, 1)])
def test_the_twin_against_torchs_attention(num_heads, num_key_heads, window):
    generator = torch.Generator().manual_seed(0)
    lengths = [(5, 5), (2, 7), (1, 1)]
    tensors = [
        torch.randn(sum(each), heads, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for each, heads in (
            ([q for q, _ in lengths], num_heads),
            ([k for _, k in lengths], num_key_heads),
            ([k for _, k in lengths], num_key_heads),
        )
    ]
    query, key, value = tensors
    bounds = [torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32) for each in zip(*lengths, strict=True)]
    found = plain_varlen_attn(
        query, key, value, *bounds, 5, 7, scale=0.3, window_size=causal_window(window), enable_gqa=True
    )
    parts, first, start = [], 0, 0
    for num_queries, num_keys in lengths:
        places = torch.arange(num_keys - num_queries, num_keys)[:, None]
        allowed = torch.arange(num_keys) <= places
        if window is not None:
            allowed &= torch.arange(num_keys) > places - window
        rows = (query[first : first + num_queries], key[start : start + num_keys], value[start : start + num_keys])
        query_hSD, key_hKD, value_hKD = (each.transpose(0, 1)[None] for each in rows)
        out = torch.nn.functional.scaled_dot_product_attention(
            query_hSD, key_hKD, value_hKD, attn_mask=allowed, scale=0.3, enable_gqa=True
        )
        parts.append(out[0].transpose(0, 1))
        first, start = first + num_queries, start + num_keys
    expected = torch.cat(parts)
    torch.testing.assert_close(found, expected)
    slopes = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    for one, other in zip(*(torch.autograd.grad(each, tensors, slopes) for each in (found, expected)), strict=True):
        torch.testing.assert_close(one, other)


def test_the_twin_refuses_what_does_not_go_together():
    query = torch.zeros(4, 2, 8)
    bounds = torch.tensor([0, 4], dtype=torch.int32)
    for heads, given_bounds, longest in ((1, bounds, 4), (2, bounds.long(), 4), (2, bounds, 5), (2, bounds - 1, 4)):
        key = torch.zeros(4, heads, 8)
        with pytest.raises(ValueError, match="varlen attention"):
            plain_varlen_attn(query, key, key, given_bounds, given_bounds, longest, longest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_twin_is_right_by_its_own_trial(dtype):
    shape = {"num_heads": 4, "num_key_heads": 2, "head_dim": 8}
    assert is_right(PLAIN_KERNEL, device=_CPU, dtype=dtype, window=3, **shape)
    off = VarlenKernel(
        name="off", attend=lambda *args, **kw: 1.2 * plain_varlen_attn(*args, **kw), device_type="cpu", dtypes=(dtype,)
    )
    assert not is_right(off, device=_CPU, dtype=dtype, **shape)


_SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9)


@given(_SEQUENCES)
def test_bounds_are_those_of_the_rows(lists):
    """Each query that is handed over is the token at its place, at the end of the keys of its row."""
    plan = plan_packing([np.array(each, dtype=np.int32) for each in lists])
    rows = packed_rows(plan, device=_CPU)
    path_to = {}
    for path, each in zip(plan.paths, lists, strict=True):
        for end in range(len(each)):
            path_to[int(path[end])] = path[: end + 1].tolist()
    bounds = rows.bounds
    keys = torch.arange(plan.num_tokens) if bounds.keys is None else bounds.keys
    seen = []
    pairs = zip(
        itertools.pairwise(bounds.query_bounds.tolist()), itertools.pairwise(bounds.key_bounds.tolist()), strict=True
    )
    longest = [0, 0]
    for (start, end), (first, last) in pairs:
        row_keys = keys[first:last].tolist()
        longest = [max(longest[0], end - start), max(longest[1], last - first)]
        for place in range(start, end):
            seen.append(place)
            own = len(row_keys) - (end - place)
            assert row_keys[: own + 1] == path_to[place]
            assert rows.position_ids[0, place] == own
    assert seen == list(range(plan.num_tokens))
    assert longest == [bounds.max_queries, bounds.max_keys]
    assert (bounds.query_bounds.dtype, bounds.key_bounds.dtype) == (torch.int32, torch.int32)

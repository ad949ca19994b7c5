"""The lean forward pass gives the logits of transformers' own, and is refused where it would not."""

from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from driftgym.agents.generators.embedded.lean import LeanRefusedError, lean_decoder
from driftgym.agents.generators.embedded.model import ModelRunner
from driftgym.types import SamplingParams

LEAN = {
    "llama": {},
    "qwen2": {},  # biases on queries, keys and values
    "qwen3": {},  # norms on queries and keys
    "mistral": {"sliding_window": None},
}
SCALED = {"rope_theta": 10000.0, "factor": 4.0}
VOCAB_SIZE = 120


@torch.inference_mode()
def expected(model: Any, sequence: np.ndarray) -> torch.Tensor:
    """[L, V] by one plain pass of the whole sequence."""
    logits: torch.Tensor = model(torch.from_numpy(sequence)[None]).logits[0]
    return logits


def random_sequences(lengths: list[int], *, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB_SIZE, length) for length in lengths]


def read(
    runner: ModelRunner, rows: Any, sequences: list[np.ndarray], starts: list[int], *, num_logits: int | None = None
) -> list[torch.Tensor]:
    """Reads each sequence from its start on, all in one padded pass; the logits of each after what it read."""
    width = max(len(sequence) - start for sequence, start in zip(sequences, starts, strict=True))
    ids, positions = np.zeros((len(sequences), width), np.int64), np.full((len(sequences), width), -1)
    for index, (sequence, start) in enumerate(zip(sequences, starts, strict=True)):
        ids[index, width - len(sequence) + start :] = sequence[start:]
        positions[index, width - len(sequence) + start :] = np.arange(start, len(sequence))
    num_logits = num_logits or width
    logits = runner.forward(ids, positions, rows=rows, kv_length=int(positions.max()) + 1, num_logits=num_logits)
    assert logits.shape == (len(sequences), num_logits, VOCAB_SIZE)
    return [found[-(len(sequence) - start) :] for found, sequence, start in zip(logits, sequences, starts, strict=True)]


def assert_reads_right(runner: ModelRunner, model: Any, *, seed: int) -> None:
    """Prompts of several lengths; the last logits only; a token a row; a prefix from another slot; slots apart."""
    sequences = random_sequences([30, 7, 1, 19], seed=seed)
    for found, sequence in zip(read(runner, slice(0, 4), sequences, [0] * 4), sequences, strict=True):
        torch.testing.assert_close(found, expected(model, sequence), atol=1e-4, rtol=0)
    for num_logits in (1, 4):
        last = read(runner, slice(0, 4), sequences, [0] * 4, num_logits=num_logits)
        for found, sequence in zip(last, sequences, strict=True):
            wanted = expected(model, sequence)[-num_logits:]
            torch.testing.assert_close(found[-len(wanted) :], wanted, atol=1e-4, rtol=0)
    for token in (5, 6):
        starts = [len(sequence) for sequence in sequences]
        sequences = [np.append(sequence, token + row) for row, sequence in enumerate(sequences)]
        for found, sequence in zip(read(runner, slice(0, 4), sequences, starts), sequences, strict=True):
            torch.testing.assert_close(found, expected(model, sequence)[-1:], atol=1e-4, rtol=0)
    runner.cache.copy_prefix(source=0, target=5, length=20)
    apart = [np.concatenate([sequences[0][:20], sequences[3][:5]]), *random_sequences([12], seed=seed + 1)]
    found, fresh = read(runner, np.array([5, 2]), apart, [20, 0])
    torch.testing.assert_close(found, expected(model, apart[0])[20:], atol=1e-4, rtol=0)
    torch.testing.assert_close(fresh, expected(model, apart[1]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", LEAN)
@pytest.mark.parametrize("is_tied", [True, False])
def test_logits_are_those_of_transformers_also_with_new_weights(model_of, family, is_tied):
    model = model_of(family, is_tied=is_tied, **LEAN[family])
    runner = ModelRunner(model, num_slots=6, max_context_tokens=64)
    assert runner.is_lean
    assert_reads_right(runner, model, seed=0)
    new = model_of(family, seed=1, is_tied=is_tied, **LEAN[family])
    with torch.no_grad():
        for own, given in zip(model.parameters(), new.parameters(), strict=True):
            own.copy_(given)
    assert_reads_right(runner, new, seed=2)


def test_long_prompts(model_of):
    """Beyond the length to which scores are computed by matrix products."""
    model = model_of("qwen3")
    runner = ModelRunner(model, num_slots=3, max_context_tokens=400)
    assert runner.is_lean
    sequences = random_sequences([350, 200], seed=0)
    for found, sequence in zip(read(runner, slice(0, 2), sequences, [0, 0]), sequences, strict=True):
        torch.testing.assert_close(found, expected(model, sequence), atol=1e-4, rtol=0)
    found = read(runner, slice(0, 2), sequences, [0, 0], num_logits=1)
    torch.testing.assert_close(found[1], expected(model, sequences[1])[-1:], atol=1e-4, rtol=0)
    longer = [np.append(sequence, 3) for sequence in sequences]
    for found, sequence in zip(read(runner, slice(0, 2), longer, [350, 200]), longer, strict=True):
        torch.testing.assert_close(found, expected(model, sequence)[-1:], atol=1e-4, rtol=0)


class LargestTensor(TorchDispatchMode):
    """Within the block, how many numbers the largest tensor has that an operation gives."""

    num_numbers = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = operation(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.num_numbers = max(self.num_numbers, found.numel())
        return found


def test_a_long_prompt_has_one_mask_for_all_heads(model_of):
    model = model_of("llama", num_attention_heads=4, num_key_value_heads=1)
    runner = ModelRunner(model, num_slots=1, max_context_tokens=400)
    assert runner.is_lean
    (sequence,) = random_sequences([400], seed=0)
    with LargestTensor() as largest:
        (found,) = read(runner, slice(0, 1), [sequence], [0], num_logits=1)
    torch.testing.assert_close(found, expected(model, sequence)[-1:], atol=1e-4, rtol=0)
    assert largest.num_numbers == 400 * 400


@pytest.mark.parametrize("groups", [(4, 4), (4, 1)])
def test_heads_in_groups_of_any_size(model_of, groups):
    queries, keys = groups
    model = model_of("llama", num_attention_heads=queries, num_key_value_heads=keys)
    runner = ModelRunner(model, num_slots=6, max_context_tokens=64)
    assert runner.is_lean
    assert_reads_right(runner, model, seed=0)


@pytest.mark.parametrize(
    "rotary",
    [
        {**SCALED, "rope_type": "linear"},
        {
            **SCALED,
            "rope_type": "llama3",
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rotary: rotary["rope_type"],
)
def test_positions_that_are_scaled_alike_at_all_lengths(model_of, rotary):
    model = model_of("llama", rope_parameters=rotary)
    runner = ModelRunner(model, num_slots=6, max_context_tokens=64)
    assert runner.is_lean
    assert_reads_right(runner, model, seed=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_half_types(model_of, family, dtype):
    model = model_of(family).to(dtype)
    runner = ModelRunner(model, num_slots=3, max_context_tokens=64)
    assert runner.is_lean
    exact = model_of(family).to(dtype).float()
    sequences = random_sequences([30, 7, 19], seed=0)
    for found, sequence in zip(read(runner, slice(0, 3), sequences, [0] * 3), sequences, strict=True):
        wanted, theirs = expected(exact, sequence), expected(model, sequence).float()
        # As near to the exact logits as transformers' own pass is, on the average.
        assert found.dtype == dtype
        assert (found.float() - wanted).abs().mean() < 1.5 * (theirs - wanted).abs().mean()
        longer = np.append(sequence, 4)
    (last,) = read(runner, slice(2, 3), [longer], [19])
    limit = 3 * (expected(model, longer).float() - expected(exact, longer)).abs().max()
    assert (last[-1].float() - expected(exact, longer)[-1]).abs().max() < limit


def assert_plain_and_right(runner: ModelRunner, model: Any) -> None:
    assert not runner.is_lean
    assert_reads_right(runner, model, seed=0)


def test_a_window_is_left_to_transformers(model_of, engine_of, random_prompts):
    model = model_of("mistral", sliding_window=64)
    assert_plain_and_right(ModelRunner(model, num_slots=6, max_context_tokens=64), model)
    model = model_of("qwen2", sliding_window=64, use_sliding_window=True, max_window_layers=1)
    assert set(model.config.layer_types) == {"full_attention", "sliding_attention"}
    assert_plain_and_right(ModelRunner(model, num_slots=6, max_context_tokens=64), model)


def test_positions_that_are_scaled_by_the_length_are_left_to_transformers(model_of):
    model = model_of("llama", rope_parameters={**SCALED, "rope_type": "dynamic"})
    assert_plain_and_right(ModelRunner(model, num_slots=6, max_context_tokens=64), model)


def test_other_kinds_are_left_to_transformers(model_of):
    model = model_of("gemma", head_dim=16)  # scales its embeddings, and adds 1 to the weights of its norms
    assert_plain_and_right(ModelRunner(model, num_slots=6, max_context_tokens=64), model)


def test_an_adapter_on_a_layer_is_left_to_transformers(model_of):
    config = peft.LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False)
    model = peft.inject_adapter_in_model(config, model_of("llama")).eval()
    with pytest.raises(LeanRefusedError, match="in the place of a linear layer"):
        lean_decoder(model, max_context_tokens=64)
    assert_plain_and_right(ModelRunner(model, num_slots=6, max_context_tokens=64), model)


def test_a_model_that_computes_otherwise_than_its_kind_is_left_to_transformers(model_of):
    """What the configuration does not say, the trial finds."""
    model = model_of("llama")
    model.model.layers[1].mlp.act_fn = torch.nn.GELU()
    lean_decoder(model, max_context_tokens=64)
    assert_plain_and_right(ModelRunner(model, num_slots=6, max_context_tokens=64), model)


@pytest.mark.parametrize("max_context_tokens", [1, 2, 3, 16])
def test_the_smallest_slots(model_of, max_context_tokens):
    model = model_of("qwen3")
    runner = ModelRunner(model, num_slots=1, max_context_tokens=max_context_tokens)
    assert runner.is_lean
    (sequence,) = random_sequences([max_context_tokens], seed=0)
    (found,) = read(runner, slice(0, 1), [sequence], [0])
    torch.testing.assert_close(found, expected(model, sequence), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", LEAN)
def test_engines_with_and_without_it_draw_the_same(model_of, engine_of, random_prompts, family):
    prompts = random_prompts(10)
    answers: dict[bool, dict[str, Any]] = {True: {}, False: {}}
    for is_lean, kept in answers.items():
        model = model_of(family, **LEAN[family])
        if not is_lean:
            # The same arithmetic by a layer that the lean pass does not know.
            head = model.lm_head
            model.lm_head = torch.nn.Sequential(torch.nn.Identity(), head)
        runner = ModelRunner(model, num_slots=4, max_context_tokens=256)
        assert runner.is_lean == is_lean
        engine = engine_of(model, max_batch_size=4)
        for index, prompt in enumerate(prompts):
            sampling = SamplingParams(max_tokens=20, seed=index, temperature=0.7 * (index % 3))
            engine.submit(str(index), prompt, sampling, lambda each, kept=kept: kept.update({each.request_id: each}))
        while engine.has_work:
            engine.step()
    for name, answer in answers[True].items():
        assert answer.token_ids.tolist() == answers[False][name].token_ids.tolist()
        np.testing.assert_allclose(answer.logprobs, answers[False][name].logprobs, atol=1e-5)

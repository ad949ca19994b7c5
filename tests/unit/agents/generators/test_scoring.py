"""Log-probs of given tokens: those of a plain forward pass, whatever else the engine does."""

import itertools
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch

from driftgym.agents.generators.embedded.requests import WeightsOrder
from driftgym.agents.generators.sglang import SGLangGenerator
from driftgym.types import SamplingParams

NUMBERS = itertools.count()


@torch.inference_mode()
def expected(model: Any, sequence: np.ndarray, start: int) -> np.ndarray:
    """The log-probs of the tokens after `start`, by one plain forward pass."""
    ids = torch.from_numpy(sequence.astype(np.int64))[None]
    logprobs = torch.log_softmax(model(ids).logits[0, :-1].double(), -1)
    return logprobs.gather(-1, ids[0, 1:, None])[start:, 0].numpy()


def submit(engine: Any, sequence: np.ndarray, start: int) -> list:
    """Where the answer will be."""
    answers: list = []
    engine.score(f"score{next(NUMBERS)}", sequence, start=start, on_finished=answers.append)
    return answers


def run(engine: Any) -> None:
    while engine.has_work:
        engine.step()


def generate(engine: Any, prompt: np.ndarray, **sampling: Any) -> list:
    answers: list = []
    engine.submit(f"generate{next(NUMBERS)}", prompt, SamplingParams(**sampling), answers.append)
    return answers


def take(engine: Any, folder: Path, version: str, *, flush_cache: bool = True) -> None:
    order = WeightsOrder(folder=folder, version=version)
    engine.update_weights(engine.weights.read(order), flush_cache=flush_cache)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("max_prefill_tokens", [16, 8192])
def test_scores_are_those_of_a_plain_forward_pass(model_of, engine_of, random_prompts, family, max_prefill_tokens):
    """Sequences of all lengths, more than there are slots, read in parts or at once, among running requests."""
    model = model_of(family)
    engine = engine_of(model, max_batch_size=6, max_prefill_tokens=max_prefill_tokens)
    running = [(prompt, generate(engine, prompt, max_tokens=20)) for prompt in random_prompts(3)]
    engine.step()
    rng = np.random.default_rng(3)
    sequences = random_prompts(20, shortest=2, longest=120, seed=1)
    starts = [int(rng.integers(0, len(sequence) - 1)) for sequence in sequences]
    found = [submit(engine, sequence, start) for sequence, start in zip(sequences, starts, strict=True)]
    assert engine.num_queued >= 20
    run(engine)
    for sequence, start, (answer,) in zip(sequences, starts, found, strict=True):
        assert answer.version == "1:0"
        np.testing.assert_allclose(answer.logprobs, expected(model, sequence, start), atol=1e-4)
    for prompt, (answer,) in running:
        assert len(answer.token_ids) == 20
        whole = np.concatenate([prompt, answer.token_ids])
        np.testing.assert_allclose(answer.logprobs, expected(model, whole, len(prompt) - 1), atol=1e-4)
    assert engine.num_queued == engine.num_running == 0


def test_kv_goes_over_from_answers_to_scores_and_back(model_of, engine_of, random_prompts):
    model = model_of("qwen3")
    engine = engine_of(model)
    (prompt,) = random_prompts(1, shortest=40)
    answers = generate(engine, prompt, max_tokens=20)
    run(engine)
    whole = np.concatenate([prompt, answers[0].token_ids])
    scores = submit(engine, whole, len(prompt) - 1)
    run(engine)
    assert scores[0].num_cached_tokens == len(prompt) - 1
    np.testing.assert_allclose(scores[0].logprobs, answers[0].logprobs, atol=1e-4)
    (other,) = random_prompts(1, shortest=40, seed=9)
    submit(engine, other, 0)
    run(engine)
    after = generate(engine, np.append(other, 3).astype(np.int32), max_tokens=5)
    run(engine)
    assert after[0].num_cached_tokens == len(other) - 1
    sequence = np.concatenate([other, [3], after[0].token_ids])
    np.testing.assert_allclose(after[0].logprobs, expected(model, sequence, len(other)), atol=1e-4)


def test_scores_never_rest_on_kv_of_older_weights(model_of, engine_of, random_prompts, save_model):
    engine = engine_of(model_of("qwen3"))
    new = model_of("qwen3", seed=1)
    (prompt,) = random_prompts(1, shortest=40)
    generate(engine, prompt, max_tokens=5)
    run(engine)
    take(engine, save_model(new, "new"), "1:1", flush_cache=False)
    cached = []
    for _ in range(2):
        scores = submit(engine, prompt, 20)
        run(engine)
        np.testing.assert_allclose(scores[0].logprobs, expected(new, prompt, 20), atol=1e-4)
        cached.append(scores[0].num_cached_tokens)
        assert scores[0].version == "1:1"
    assert cached == [0, 20]


def test_abort_and_pause(model_of, engine_of, random_prompts):
    engine = engine_of(model_of("qwen3"))
    first, second = random_prompts(2, shortest=10)
    engine.pause("in_place")
    aborted, kept = submit(engine, first, 0), submit(engine, second, 0)
    engine.step()
    assert (aborted, kept) == ([], [])
    with pytest.raises(ValueError, match="in use"):
        engine.submit(f"score{next(NUMBERS) - 1}", first, SamplingParams(max_tokens=1), print)
    engine.abort(f"score{next(NUMBERS) - 3}")
    assert (aborted[0].logprobs, aborted[0].message) == (None, "aborted")
    engine.resume()
    run(engine)
    assert len(kept[0].logprobs) == len(second) - 1


def test_weights_that_are_not_finite_score_nothing_and_leave_nothing(model_of, engine_of, random_prompts, save_model):
    good, bad = model_of("qwen3"), model_of("qwen3")
    with torch.no_grad():
        bad.model.layers[0].mlp.down_proj.weight[0] = torch.nan
    engine = engine_of(model_of("qwen3"))
    folder = save_model(good, "good")
    take(engine, save_model(bad, "bad"), "1:1")
    sequences = random_prompts(8, shortest=5)
    answers = [submit(engine, sequence, 0) for sequence in sequences]
    run(engine)
    assert all((answer[0].logprobs, answer[0].is_failure) == (None, True) for answer in answers)
    take(engine, folder, "1:2")
    for sequence in sequences:
        scores = submit(engine, sequence, 0)
        run(engine)
        np.testing.assert_allclose(scores[0].logprobs, expected(good, sequence, 0), atol=1e-4)


async def test_over_http(model_of, engine_of, served, random_prompts):
    """In SGLang's shape: the first token without a log-prob, then each token with its own."""
    model = model_of("qwen3")
    (sequence,) = random_prompts(1, shortest=30)
    ids = sequence.tolist()
    async with (
        served(engine_of(model)) as url,
        SGLangGenerator(url, incarnation=1, max_concurrency=8) as generator,
        aiohttp.ClientSession() as session,
    ):
        body = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 7,
            "rid": "s",
        }
        async with session.post(url + "/generate", json=body) as response:
            reply = await response.json()
        meta = reply["meta_info"]
        assert reply["output_ids"] == meta["output_token_logprobs"] == []
        assert (meta["id"], meta["weight_version"], meta["prompt_tokens"]) == ("s", "1:0", len(ids))
        assert meta["input_token_logprobs"][0] == [None, ids[7], None]
        assert [pair[1] for pair in meta["input_token_logprobs"]] == ids[7:]
        logprobs = [pair[0] for pair in meta["input_token_logprobs"][1:]]
        np.testing.assert_allclose(logprobs, expected(model, sequence, 7), atol=1e-4)
        scores = await generator.score(ids, num_given=8, deadline_s=time.monotonic() + 30)
        assert str(scores.version) == "1:0"
        np.testing.assert_allclose(scores.logprobs, expected(model, sequence, 7), atol=1e-4)

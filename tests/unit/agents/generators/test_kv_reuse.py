"""What a prompt finds in the embedded server's KV cache: turns, slices, and updates that keep the cache or not."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from driftgym.agents.generators.sglang import SGLangGenerator
from driftgym.types import Completion, SamplingParams, WeightUpdate

PROMPT = [int(number) for number in np.random.default_rng(5).integers(0, 120, 40)]


@pytest.fixture
def connected(served: Callable[..., Any]) -> Callable[..., Any]:
    """Opens a server over an engine, and a client of it."""

    @contextlib.asynccontextmanager
    async def connect(engine: Any) -> AsyncIterator[SGLangGenerator]:
        async with served(engine) as url, SGLangGenerator(url, incarnation=1, max_concurrency=64) as generator:
            yield generator

    return connect


async def ask(generator: SGLangGenerator, prompt: list[int], *, name: str, max_tokens: int = 12) -> Completion:
    return await generator.generate(
        prompt,
        SamplingParams(max_tokens=max_tokens),
        request_id=name,
        session_id=name,
        deadline_s=time.monotonic() + 60,
    )


def cached(completion: Completion) -> int:
    return int(completion.extras["cached_tokens"])


@torch.inference_mode()
def scored(model: Any, prompt: list[int], completion: Completion) -> np.ndarray:
    ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
    logprobs = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1].double(), -1)
    return logprobs.gather(-1, ids[0, len(prompt) :, None])[:, 0].numpy()


async def test_a_turn_reads_only_what_is_new(model_of, engine_of, connected):
    """Over five turns, also after others had all slots but its own."""
    model = model_of("qwen3")
    async with connected(engine_of(model, max_batch_size=8, max_context_tokens=512)) as generator:
        prompt = PROMPT
        for turn in range(5):
            completion = await ask(generator, prompt, name=f"turn{turn}")
            assert cached(completion) == (0 if turn == 0 else len(prompt) - 4)
            np.testing.assert_allclose(completion.logprobs, scored(model, prompt, completion), atol=1e-4)
            # The last sampled token was never read; three more come from the environment.
            prompt = [*prompt, *completion.token_ids.tolist(), 7, 8, turn]
            others = [[turn, number, *PROMPT[::-1]] for number in range(7)]
            await asyncio.gather(*(ask(generator, other, name=f"{turn}-{index}") for index, other in enumerate(others)))


async def test_turns_of_sessions_that_run_at_once_each_find_their_own(model_of, engine_of, connected):
    model = model_of("llama")
    async with connected(engine_of(model, max_batch_size=16, max_context_tokens=512)) as generator:
        prompts = [[session, *PROMPT[: 20 + session]] for session in range(16)]
        for turn in range(4):
            completions = await asyncio.gather(
                *(ask(generator, prompt, name=f"{turn}-{index}") for index, prompt in enumerate(prompts))
            )
            for prompt, completion in zip(prompts, completions, strict=True):
                assert cached(completion) == (0 if turn == 0 else len(prompt) - 2)
                np.testing.assert_allclose(completion.logprobs, scored(model, prompt, completion), atol=1e-4)
            prompts = [
                [*prompt, *completion.token_ids.tolist(), 3]
                for prompt, completion in zip(prompts, completions, strict=True)
            ]


async def test_a_slice_goes_on_where_the_one_before_ended(model_of, engine_of, connected):
    """Slices of 16 answers together: each reads one token anew, and all are what one request would have given."""
    model = model_of("qwen3")
    async with connected(engine_of(model, max_batch_size=16)) as generator:
        prompts = [[index, *PROMPT] for index in range(16)]
        for piece in range(4):
            completions = await asyncio.gather(
                *(ask(generator, prompt, name=f"{piece}-{index}") for index, prompt in enumerate(prompts))
            )
            if piece:
                assert [cached(each) for each in completions] == [len(prompt) - 1 for prompt in prompts]
            for prompt, completion in zip(prompts, completions, strict=True):
                np.testing.assert_allclose(completion.logprobs, scored(model, prompt, completion), atol=1e-4)
                prompt += completion.token_ids.tolist()


def weights(folder: Path, version: int) -> WeightUpdate:
    return WeightUpdate(policy_version=version, incarnation=1, location=str(folder), checksum="sha256:0")


async def test_kv_that_is_kept_over_an_update_is_said_and_kv_that_is_not_is_read_anew(
    model_of, engine_of, connected, save_model
):
    new = model_of("qwen3", seed=1)
    folder = save_model(new, "new")
    engine = engine_of(model_of("qwen3"))
    async with connected(engine) as generator:
        tasks = [
            asyncio.create_task(ask(generator, [*PROMPT, index], name=f"{index}", max_tokens=80)) for index in range(4)
        ]
        while engine.num_running < 4:  # noqa: ASYNC110  # polls what has no event
            await asyncio.sleep(0)
        await generator.update_weights(weights(folder, 1), mode="in_flight", keep_kv=True, timeout_s=30)
        for completion in await asyncio.gather(*tasks):
            assert set(completion.policy_versions.tolist()) == {0, 1}
            assert completion.kv_min_policy_version == 0
            assert len(completion.token_ids) == 80
        later = await ask(generator, [*PROMPT, 9], name="later")
        assert (cached(later) >= 40, later.kv_min_policy_version) == (True, 0)
        fresh = await ask(generator, PROMPT[::-1], name="fresh")
        assert (cached(fresh), fresh.kv_min_policy_version) == (0, None)
        await generator.update_weights(weights(folder, 2), mode="in_flight", timeout_s=30)
        flushed = await ask(generator, [*PROMPT, 9], name="flushed")
        assert (cached(flushed), flushed.kv_min_policy_version) == (0, None)
        np.testing.assert_allclose(flushed.logprobs, scored(new, [*PROMPT, 9], flushed), atol=1e-4)


async def test_a_request_that_an_update_ended_goes_on_with_the_new_weights(model_of, engine_of, connected, save_model):
    old, new = model_of("qwen3"), model_of("qwen3", seed=1)
    folder = save_model(new, "new")
    engine = engine_of(model_of("qwen3"))
    async with connected(engine) as generator:
        task = asyncio.create_task(ask(generator, PROMPT, name="a", max_tokens=100))
        while engine.num_sampled_tokens < 5:  # noqa: ASYNC110  # polls what has no event
            await asyncio.sleep(0)
        await generator.update_weights(weights(folder, 1), mode="abort_resume", timeout_s=30)
        part = await task
        assert part.finish_reason == "abort"
        assert set(part.policy_versions.tolist()) == {0}
        assert 5 <= len(part.token_ids) < 100
        np.testing.assert_allclose(part.logprobs, scored(old, PROMPT, part), atol=1e-4)
        prompt = [*PROMPT, *part.token_ids.tolist()]
        rest = await ask(generator, prompt, name="b", max_tokens=20)
        assert (cached(rest), rest.kv_min_policy_version, set(rest.policy_versions.tolist())) == (0, None, {1})
        np.testing.assert_allclose(rest.logprobs, scored(new, prompt, rest), atol=1e-4)

"""A real vLLM server: exact tokens, log-probs and versions."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
from engine_checks import (
    check_abort_resume,
    check_aborts,
    check_death,
    check_drain,
    check_given_up,
    check_greedy,
    check_kept_cache,
    check_sampled,
    check_scores,
    check_unknown_ids,
)
from engine_server import EngineServer
from live_engine import INCARNATION, ask, ask_all, prompts, until_running, weights
from rescore import rescore, rescore_spans
from tiny_models import VOCAB_SIZE, save_tiny_models, save_tiny_tokenizer
from vllm_server import MAX_RUNNING_REQUESTS, SHAPE, open_vllm, vllm_python

from driftgym.agents.generators.probe import check_logprobs
from driftgym.agents.generators.vllm import VLLMGenerator
from driftgym.errors import ConfigError, GeneratorError

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The place in the list is the version."""
    vllm_python()
    return save_tiny_models(tmp_path_factory.mktemp("models"), count=3, **SHAPE)


@pytest.fixture(scope="module")
def plain_server(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """A server as it starts by default: it reports no versions, and log-probs of before the temperature."""
    save_tiny_tokenizer(models[0])
    with open_vllm(models[0], log=tmp_path_factory.mktemp("plain") / "log", flags=()) as server:
        yield server


def client(server: EngineServer) -> VLLMGenerator:
    return VLLMGenerator(server.url, incarnation=INCARNATION, max_concurrency=MAX_RUNNING_REQUESTS)


@pytest.fixture
async def engine(vllm_server: EngineServer, models: list[Path]) -> AsyncIterator[VLLMGenerator]:
    """With the weights of version 0."""
    async with client(vllm_server) as made:
        await made.update_weights(weights(models, 0), mode="in_flight", timeout_s=120)
        yield made


@pytest.fixture
async def plain(plain_server: EngineServer, models: list[Path]) -> AsyncIterator[VLLMGenerator]:
    """With the weights of version 0."""
    async with client(plain_server) as made:
        await made.update_weights(weights(models, 0), mode="in_flight", timeout_s=120)
        yield made


async def test_greedy_ids_are_those_of_transformers(engine: VLLMGenerator, models: list[Path]) -> None:
    await check_greedy(engine, models[0])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_log_probs_are_those_that_the_trainer_finds(
    engine: VLLMGenerator, models: list[Path], temperature: float
) -> None:
    completions = await check_sampled(engine, models[0], temperature=temperature)
    assert len({tuple(completion.token_ids[:8]) for completion in completions}) == 16


async def test_scores_are_those_that_the_trainer_finds(engine: VLLMGenerator, models: list[Path]) -> None:
    await check_scores(engine, models[0], [*prompts(3, seed=2), [5, VOCAB_SIZE - 1, 0]])


async def test_stop_tokens_and_the_seed(engine: VLLMGenerator) -> None:
    """Nothing but the request's own stop tokens ends it; the one that did stays."""
    stops = tuple(range(0, VOCAB_SIZE, 7))
    for index in range(4):
        completion = await ask(engine, [5, 6], request_id=f"s{index}", max_tokens=400, stop_token_ids=stops, seed=index)
        assert completion.finish_reason == "stop"
        assert completion.token_ids[-1] in stops
        assert not set(completion.token_ids[:-1].tolist()) & set(stops)
        again = await ask(engine, [5, 6], request_id=f"t{index}", max_tokens=400, stop_token_ids=stops, seed=index)
        assert again.token_ids.tolist() == completion.token_ids.tolist()
    with pytest.raises(GeneratorError, match="max-model-len"):
        await ask(engine, [5] * 1020, request_id="long")


async def test_an_update_in_the_middle_of_64_answers(engine: VLLMGenerator, models: list[Path]) -> None:
    """Every token has the version of the weights that wrote it, with a cache of theirs; none is lost."""
    asked = prompts(64, seed=3)
    tasks = ask_all(engine, asked, name="fly", max_tokens=200)
    await until_running(engine, 64)
    await asyncio.sleep(0.3)
    for version in (1, 2):
        assert not any(task.done() for task in tasks)  # nothing was drained
        await engine.update_weights(weights(models, version), mode="in_flight", timeout_s=60)
        assert (await engine.health()).version.policy_version == version
    completions = await asyncio.gather(*tasks)
    worst = 0.0
    for prompt, completion in zip(asked, completions, strict=True):
        assert (len(completion.token_ids), completion.finish_reason) == (200, "length")
        assert (np.diff(completion.policy_versions) >= 0).all()
        assert {0, 2} <= set(completion.policy_versions.tolist())
        assert completion.kv_min_policy_version is None
        worst = max(worst, float(np.abs(completion.logprobs - rescore_spans(models, prompt, completion)).max()))
    print(f"max |delta| over updates in flight: {worst:.1e}")
    assert worst <= 1e-3


async def test_an_update_that_aborts(engine: VLLMGenerator, models: list[Path]) -> None:
    """What was written has the old version; whoever asked goes on with it, under the new one."""
    await check_abort_resume(engine, models, max_tokens=900)


async def test_an_update_that_drains(engine: VLLMGenerator, models: list[Path]) -> None:
    await check_drain(engine, models)


async def test_an_update_that_keeps_the_cache(engine: VLLMGenerator, models: list[Path]) -> None:
    """Tokens after it rest on KV of older weights until the cache is dropped, and completions say so."""
    await check_kept_cache(engine, models, max_tokens=500)


async def test_an_abort_ends_the_request_that_it_names(engine: VLLMGenerator, models: list[Path]) -> None:
    await check_aborts(engine, models[0], max_tokens=900)


async def test_a_request_that_nobody_waits_for_is_ended(engine: VLLMGenerator) -> None:
    await check_given_up(engine, max_tokens=900)


async def test_ids_that_the_model_does_not_know_are_never_sent(engine: VLLMGenerator) -> None:
    """A server without a tokenizer reads beyond its embeddings, or ends."""
    await check_unknown_ids(engine)


async def test_weights_that_are_not_there_are_not_asked_for(
    engine: VLLMGenerator, models: list[Path], tmp_path: Path
) -> None:
    """The server would end."""
    with pytest.raises(GeneratorError, match="no model"):
        await engine.update_weights(
            weights(models, 1, location=str(tmp_path / "nowhere")), mode="in_flight", timeout_s=60
        )
    with pytest.raises(GeneratorError, match="full weights alone"):
        await engine.update_weights(weights(models, 1, kind="lora"), mode="in_flight", timeout_s=60)
    assert set((await ask(engine, [5], request_id="old")).policy_versions.tolist()) == {0}


async def test_log_probs_after_the_temperature_pass(engine: VLLMGenerator) -> None:
    await check_logprobs(engine, name=engine.url, token_id=5, timeout_s=60)


async def test_log_probs_before_the_temperature_are_refused(plain: VLLMGenerator) -> None:
    with pytest.raises(ConfigError, match="processed_logprobs"):
        await check_logprobs(plain, name=plain.url, token_id=5, timeout_s=60)


async def test_a_server_that_reports_no_versions(plain: VLLMGenerator, models: list[Path]) -> None:
    """What was written under one version has it; what was written over an update is refused."""
    prompt = [5, 6, 7]
    completion = await ask(plain, prompt, request_id="one", stop_token_ids=(1, 2))
    assert set(completion.policy_versions.tolist()) == {0}
    np.testing.assert_allclose(
        completion.logprobs, rescore(models[0], prompt, completion.token_ids.tolist()), atol=1e-4
    )
    scores = await plain.score(prompt, num_given=1, deadline_s=time.monotonic() + 60)
    np.testing.assert_allclose(scores.logprobs, rescore(models[0], prompt[:1], prompt[1:]), atol=1e-4)
    cut = asyncio.create_task(ask(plain, prompt, request_id="cut", max_tokens=900))
    await until_running(plain, 1)
    await plain.abort("cut")
    assert (await cut).finish_reason == "abort"
    over = asyncio.create_task(ask(plain, prompt, request_id="over", max_tokens=900))
    await until_running(plain, 1)
    await plain.update_weights(weights(models, 1), mode="in_flight", timeout_s=60)
    with pytest.raises(GeneratorError, match="changed"):
        await over
    assert set((await ask(plain, prompt, request_id="new")).policy_versions.tolist()) == {1}


async def test_a_server_that_dies(plain_server: EngineServer, models: list[Path]) -> None:
    """All that is under way fails at once. The last test of this server."""
    async with client(plain_server) as generator:
        await generator.update_weights(weights(models, 0), mode="in_flight", timeout_s=60)
        await check_death(generator, plain_server, max_tokens=900)

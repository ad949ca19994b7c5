"""A real SGLang server and the embedded one, on the same weights: exact tokens, log-probs and versions."""

import asyncio
import json
import subprocess
import sys
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
from sglang_server import open_sglang, sglang_python
from tiny_models import VOCAB_SIZE, save_tiny_models

from driftgym.agents.generators.http import EngineHttp, EngineRefusedError
from driftgym.agents.generators.probe import check_logprobs
from driftgym.agents.generators.sglang import SGLangGenerator
from driftgym.errors import ConfigError, GeneratorError

MAX_CONCURRENCY = 80
SGLANG = pytest.param("sglang", marks=pytest.mark.sglang)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The place in the list is the version."""
    return save_tiny_models(tmp_path_factory.mktemp("models"), count=3)


@pytest.fixture(scope="module")
def literal_server(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """A server that decodes no step ahead, and reports the model's log-probs whatever it samples at."""
    sglang_python()
    with open_sglang(
        models[0],
        log=tmp_path_factory.mktemp("literal") / "log",
        flags=["--disable-overlap-schedule"],
        environment={"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"},
    ) as server:
        yield server


def client(url: str) -> SGLangGenerator:
    return SGLangGenerator(url, incarnation=INCARNATION, max_concurrency=MAX_CONCURRENCY)


@pytest.fixture(scope="module")
def embedded_url(models: list[Path]) -> Iterator[str]:
    """An embedded server; it takes the weights of each test."""
    options = [f"--max-batch-size={MAX_CONCURRENCY}", "--max-context-tokens=512", "--exit-with-stdin"]
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "driftgym.agents.generators.embedded.server", str(models[0]), *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture(params=[SGLANG, "embedded"])
async def engine(request: pytest.FixtureRequest, models: list[Path]) -> AsyncIterator[SGLangGenerator]:
    """Each kind, with the weights of version 0."""
    is_real = request.param == "sglang"
    url = request.getfixturevalue("sglang_server").url if is_real else request.getfixturevalue("embedded_url")
    async with client(url) as made:
        await made.update_weights(weights(models, 0), mode="in_flight", timeout_s=60)
        yield made


@pytest.fixture
async def sglang(sglang_server: EngineServer, models: list[Path]) -> AsyncIterator[SGLangGenerator]:
    """The real one, with the weights of version 0."""
    async with client(sglang_server.url) as made:
        await made.update_weights(weights(models, 0), mode="in_flight", timeout_s=60)
        yield made


@pytest.fixture
async def literal(literal_server: EngineServer, models: list[Path]) -> AsyncIterator[SGLangGenerator]:
    """The literal one, with the weights of version 0."""
    async with client(literal_server.url) as made:
        await made.update_weights(weights(models, 0), mode="in_flight", timeout_s=60)
        yield made


async def test_greedy_ids_are_those_of_transformers(engine: SGLangGenerator, models: list[Path]) -> None:
    await check_greedy(engine, models[0])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_log_probs_are_those_that_the_trainer_finds(
    engine: SGLangGenerator, models: list[Path], temperature: float
) -> None:
    await check_sampled(engine, models[0], temperature=temperature)


async def test_scores_are_those_that_the_trainer_finds(engine: SGLangGenerator, models: list[Path]) -> None:
    await check_scores(engine, models[0], prompts(4, seed=2))
    for wrong, num_given in (([5], 1), ([5, VOCAB_SIZE], 1), ([5, 6], 0)):
        with pytest.raises(ValueError, match="prompt"):
            await engine.score(wrong, num_given=num_given, deadline_s=time.monotonic() + 60)


async def test_an_update_in_the_middle_of_64_answers(engine: SGLangGenerator, models: list[Path]) -> None:
    """Every token has the version of the weights that wrote it, with a cache of theirs; none is lost."""
    asked = prompts(64, seed=3)
    await engine.pause()
    tasks = ask_all(engine, asked, name="fly", max_tokens=400)
    await asyncio.sleep(0.1)
    await engine.resume()  # all at once, so that all run together
    await until_running(engine, 64)
    for version in (1, 2):
        assert not any(task.done() for task in tasks)  # nothing was drained
        await engine.update_weights(weights(models, version), mode="in_flight", timeout_s=60)
        assert (await engine.health()).version.policy_version == version
    completions = await asyncio.gather(*tasks)
    worst = 0.0
    for prompt, completion in zip(asked, completions, strict=True):
        assert (len(completion.token_ids), completion.finish_reason) == (400, "length")
        assert (np.diff(completion.policy_versions) >= 0).all()
        assert {0, 2} <= set(completion.policy_versions.tolist())
        assert completion.kv_min_policy_version is None
        delta = np.abs(completion.logprobs - rescore_spans(models, prompt, completion))
        worst = max(worst, float(delta.max()))
    print(f"max |delta| over updates in flight: {worst:.1e}")
    assert worst <= 1e-3


async def test_an_update_that_aborts(engine: SGLangGenerator, models: list[Path]) -> None:
    """What was written has the old version; whoever asked goes on with it, under the new one."""
    await check_abort_resume(engine, models, max_tokens=400)


async def test_an_update_that_drains(engine: SGLangGenerator, models: list[Path]) -> None:
    """Requests that come meanwhile wait, so that it ends however many come."""
    await check_drain(engine, models)


@pytest.mark.parametrize("kind", [SGLANG, "embedded"])
async def test_an_update_that_keeps_the_cache(kind: str, models: list[Path], request: pytest.FixtureRequest) -> None:
    """Tokens after it rest on KV of older weights until the cache is dropped, and completions say so."""
    is_real = kind == "sglang"
    url = request.getfixturevalue("literal_server").url if is_real else request.getfixturevalue("embedded_url")
    async with client(url) as engine:
        await engine.update_weights(weights(models, 0), mode="drain", timeout_s=60)
        await check_kept_cache(engine, models, max_tokens=400)


async def test_a_pause_loses_nothing(engine: SGLangGenerator, models: list[Path]) -> None:
    asked = prompts(8, seed=8)
    tasks = ask_all(engine, asked, name="held", max_tokens=150)
    await until_running(engine, 8)
    await engine.pause()
    late = asyncio.create_task(ask(engine, asked[0], request_id="late"))
    await asyncio.sleep(0.5)
    assert not late.done()
    cut = asyncio.create_task(ask(engine, asked[0], request_id="cut"))
    await asyncio.sleep(0.05)
    await engine.abort("cut")
    assert (await cut).finish_reason == "abort"
    assert not any(task.done() for task in tasks)
    await engine.resume()
    for prompt, task in zip(asked, tasks, strict=True):
        completion = await task
        assert len(completion.token_ids) == 150
        np.testing.assert_allclose(
            completion.logprobs, rescore(models[0], prompt, completion.token_ids.tolist()), atol=1e-3
        )
    assert len((await late).token_ids) == 40


async def test_an_abort_ends_the_request_that_it_names(engine: SGLangGenerator, models: list[Path]) -> None:
    """And none whose id begins with the same letters."""
    await check_aborts(engine, models[0], max_tokens=300)


async def test_a_request_that_nobody_waits_for_is_ended(engine: SGLangGenerator) -> None:
    await check_given_up(engine, max_tokens=450)


async def test_ids_that_the_model_does_not_know_are_never_sent(engine: SGLangGenerator) -> None:
    """A real server ends by them."""
    await check_unknown_ids(engine)


async def test_weights_that_are_refused_leave_no_tokens_of_unknown_weights(
    engine: SGLangGenerator, models: list[Path], tmp_path: Path
) -> None:
    wrong = weights(models, 1, location=str(tmp_path / "nowhere"))
    with pytest.raises(GeneratorError):
        await engine.update_weights(wrong, mode="in_flight", timeout_s=60)
    with pytest.raises(GeneratorError, match="unknown"):
        await ask(engine, [5], request_id="between")
    await engine.update_weights(weights(models, 1), mode="in_flight", timeout_s=60)
    assert set((await ask(engine, [5], request_id="after")).policy_versions.tolist()) == {1}


async def test_log_probs_after_the_temperature_pass(engine: SGLangGenerator) -> None:
    await check_logprobs(engine, name=engine.url, token_id=5, timeout_s=60)


@pytest.mark.sglang
async def test_log_probs_before_the_temperature_are_refused(literal: SGLangGenerator) -> None:
    with pytest.raises(ConfigError, match="SGLANG_RETURN_ORIGINAL_LOGPROB"):
        await check_logprobs(literal, name=literal.url, token_id=5, timeout_s=60)


@pytest.mark.sglang
async def test_a_server_that_decodes_ahead_cannot_keep_its_cache(sglang: SGLangGenerator, models: list[Path]) -> None:
    """It would call the first token of the new weights one that the old ones wrote."""
    with pytest.raises(GeneratorError, match="disable-overlap-schedule"):
        await sglang.update_weights(weights(models, 1), mode="in_flight", keep_kv=True, timeout_s=60)
    assert set((await ask(sglang, [5], request_id="old")).policy_versions.tolist()) == {0}


@pytest.mark.sglang
@pytest.mark.parametrize("kind", ["delta", "lora"])
async def test_weights_of_kinds_that_it_does_not_take(sglang: SGLangGenerator, models: list[Path], kind: str) -> None:
    with pytest.raises(GeneratorError, match="full weights alone"):
        await sglang.update_weights(
            weights(models, 1, kind=kind, base_policy_version=0), mode="in_flight", timeout_s=60
        )
    assert set((await ask(sglang, [5], request_id="old")).policy_versions.tolist()) == {0}


@pytest.mark.sglang
async def test_the_wrong_form_of_an_update(sglang: SGLangGenerator, models: list[Path]) -> None:
    """What the client never asks for: paused in place with a flush, the server refuses and has changed its weights."""
    http = EngineHttp(sglang.url, max_concurrency=1)
    task = asyncio.create_task(ask(sglang, [5, 6, 7], request_id="r", max_tokens=300))
    await until_running(sglang, 1)
    try:
        await http.post("/pause_generation", {"mode": "in_place"})
        body = {"model_path": str(models[1]), "weight_version": f"{INCARNATION}:1", "flush_cache": True}
        with pytest.raises(EngineRefusedError, match="not flushed") as refused:
            await http.post("/update_weights_from_disk", body)
        assert refused.value.status == 400
    finally:
        await http.post("/continue_generation", {})
        await http.close()
    assert set((await task).policy_versions.tolist()) == {0, 1}


@pytest.mark.sglang
async def test_a_server_that_dies(literal_server: EngineServer, models: list[Path]) -> None:
    """All that is under way fails at once. The last test of this server."""
    async with client(literal_server.url) as generator:
        await generator.update_weights(weights(models, 0), mode="in_flight", timeout_s=60)
        await check_death(generator, literal_server, max_tokens=450)

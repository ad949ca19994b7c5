"""The contract of a generator, over every implementation: scripted, embedded, a real SGLang server, a pool of two."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from driftgym.agents.generators.base import Generator, WeightVersion
from driftgym.agents.generators.launch import GeneratorConfig, start_embedded
from driftgym.agents.generators.pool import GeneratorPool
from driftgym.agents.generators.scripted import ScriptedGenerator
from driftgym.agents.generators.sglang import SGLangGenerator
from driftgym.errors import GeneratorError
from driftgym.types import Completion, SamplingParams, WeightUpdate

VOCAB_SIZE = 100
INCARNATION = 2
CONFIG = GeneratorConfig(max_batch_size=16, max_context_tokens=1024)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Tiny random models; the place in the list is the version."""
    made = []
    for version in range(3):
        torch.manual_seed(version)
        config = Qwen3Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
        )
        made.append(tmp_path_factory.mktemp("weights") / str(version))
        Qwen3ForCausalLM(config).save_pretrained(made[-1])
    return made


def scripted() -> ScriptedGenerator:
    return ScriptedGenerator(
        lambda request: [(sum(request.prompt_token_ids) + index) % VOCAB_SIZE for index in range(1000)],
        incarnation=INCARNATION,
        token_latency_s=0.001,
        vocab_size=VOCAB_SIZE,
    )


EMBEDDED = pytest.param("embedded", marks=pytest.mark.slow)
SGLANG = pytest.param("sglang", marks=[pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(600)])


@pytest.fixture(params=["scripted", EMBEDDED, "pool", SGLANG])
async def generator(request: pytest.FixtureRequest, folders: list[Path]) -> AsyncIterator[Generator]:
    made: Generator
    if request.param == "scripted":
        made = scripted()
    elif request.param == "pool":
        made = GeneratorPool([scripted(), scripted()], policy_version=0)
    elif request.param == "sglang":
        made = SGLangGenerator(
            request.getfixturevalue("sglang_server").url, incarnation=INCARNATION, max_concurrency=80
        )
        await made.update_weights(_update(folders, 0), mode="in_flight", timeout_s=60)
    else:
        made = await start_embedded(
            folders[0], CONFIG, incarnation=INCARNATION, policy_version=0, timeout_s=90, close_timeout_s=10
        )
    yield made
    await made.close()


def ask(generator: Generator, *, request_id: str = "r", max_tokens: int = 5, timeout_s: float = 60.0, **options):
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=options.pop("stop_token_ids", ()))
    return generator.generate(
        options.pop("ids", [1, 2, 3]),
        sampling,
        request_id=request_id,
        session_id=f"session of {request_id}",
        deadline_s=time.monotonic() + timeout_s,
        **options,
    )


def check(completion: Completion, *, length: int) -> None:
    assert len(completion.token_ids) == len(completion.logprobs) == len(completion.policy_versions) == length
    assert np.isfinite(completion.logprobs).all()
    assert (completion.logprobs <= 0).all()
    assert ((completion.token_ids >= 0) & (completion.token_ids < VOCAB_SIZE)).all()


async def until_running(generator: Generator, count: int) -> None:
    async with asyncio.timeout(30):
        while (await generator.health()).num_running < count:  # noqa: ASYNC110  # polls what has no event
            await asyncio.sleep(0.005)


async def test_contract(generator: Generator, folders: list[Path]) -> None:
    """One after the other on one engine: an engine is dear to start."""
    for part in (
        _completions,
        _stop_tokens,
        _many_at_once,
        _wrong_prompts,
        _deadline,
        _abort,
        _pause,
        _versions,
        _in_flight_update,
        _drained_update,
        _refused_update,
        _health,
        _closed,
    ):
        await part(generator, folders)


async def _completions(generator: Generator, folders: list[Path]) -> None:
    completion = await ask(generator, request_id="first")
    check(completion, length=5)
    assert (completion.request_id, completion.finish_reason) == ("first", "length")
    assert completion.policy_versions.tolist() == [0] * 5
    assert completion.kv_min_policy_version is None
    assert completion.latency_s > 0


async def _stop_tokens(generator: Generator, folders: list[Path]) -> None:
    completion = await ask(generator, max_tokens=500, stop_token_ids=tuple(range(0, VOCAB_SIZE, 2)))
    assert completion.finish_reason == "stop"
    assert completion.token_ids[-1] % 2 == 0
    assert (completion.token_ids[:-1] % 2 == 1).all()


async def _many_at_once(generator: Generator, folders: list[Path]) -> None:
    asked = [ask(generator, request_id=f"many{index}", max_tokens=1 + index, ids=[index + 1]) for index in range(30)]
    completions = await asyncio.gather(*asked)
    for index, completion in enumerate(completions):
        assert completion.request_id == f"many{index}"
        check(completion, length=1 + index)


async def _wrong_prompts(generator: Generator, folders: list[Path]) -> None:
    for ids in ([], [VOCAB_SIZE], [-1]):
        with pytest.raises(ValueError, match="prompt"):
            await ask(generator, ids=ids)


async def _deadline(generator: Generator, folders: list[Path]) -> None:
    await generator.pause()
    with pytest.raises(GeneratorError):
        await ask(generator, request_id="late", timeout_s=0.2)
    await generator.resume()
    check(await ask(generator, request_id="late"), length=5)


async def _abort(generator: Generator, folders: list[Path]) -> None:
    task = asyncio.create_task(ask(generator, request_id="cut", max_tokens=900))
    await until_running(generator, 1)
    await generator.abort("another")
    await generator.abort("cut")
    completion = await task
    assert completion.finish_reason == "abort"
    check(completion, length=len(completion.token_ids))
    assert len(completion.token_ids) < 900
    tasks = [asyncio.create_task(ask(generator, request_id=f"all{index}", max_tokens=900)) for index in range(3)]
    await until_running(generator, 3)
    await generator.abort()
    assert {(await task).finish_reason for task in tasks} == {"abort"}


async def _pause(generator: Generator, folders: list[Path]) -> None:
    task = asyncio.create_task(ask(generator, request_id="held", max_tokens=100))
    await generator.pause()
    late = asyncio.create_task(ask(generator, request_id="came late"))
    await asyncio.sleep(0.5)
    assert not late.done()
    await generator.resume()
    check(await task, length=100)
    completion = await late
    check(completion, length=5)
    assert completion.latency_s < 0.5  # what was waited does not count


async def _versions(generator: Generator, folders: list[Path]) -> None:
    with pytest.raises(GeneratorError):
        await ask(generator, min_policy_version=1, timeout_s=0.5)


def _update(folders: list[Path], version: int, *, incarnation: int = INCARNATION) -> WeightUpdate:
    return WeightUpdate(
        policy_version=version, incarnation=incarnation, location=str(folders[version % 3]), checksum="sha256:0"
    )


async def _in_flight_update(generator: Generator, folders: list[Path]) -> None:
    tasks = [asyncio.create_task(ask(generator, request_id=f"fly{index}", max_tokens=800)) for index in range(4)]
    await until_running(generator, 4)
    await asyncio.sleep(0.05)
    await generator.update_weights(_update(folders, 1), mode="in_flight", timeout_s=30)
    for task in tasks:
        completion = await task
        check(completion, length=800)
        assert (np.diff(completion.policy_versions) >= 0).all()
        assert set(completion.policy_versions.tolist()) == {0, 1}
        assert completion.kv_min_policy_version is None


async def _drained_update(generator: Generator, folders: list[Path]) -> None:
    task = asyncio.create_task(ask(generator, request_id="drained", max_tokens=200))
    await until_running(generator, 1)
    await generator.update_weights(_update(folders, 2), mode="drain", timeout_s=30)
    completion = await task
    check(completion, length=200)
    assert set(completion.policy_versions.tolist()) == {1}
    completion = await ask(generator, min_policy_version=2)
    assert completion.policy_versions.tolist() == [2] * 5


async def _refused_update(generator: Generator, folders: list[Path]) -> None:
    if isinstance(generator, GeneratorPool):
        return  # takes out who refuses; see its own tests
    with pytest.raises(GeneratorError):
        await generator.update_weights(_update(folders, 3, incarnation=7), mode="in_flight", timeout_s=5)
    check(await ask(generator, min_policy_version=2), length=5)


async def _health(generator: Generator, folders: list[Path]) -> None:
    health = await generator.health()
    assert health.version == WeightVersion(incarnation=INCARNATION, policy_version=2)
    assert (health.num_running, health.num_queued) == (0, 0)
    assert health.busy_s > 0
    await asyncio.sleep(0.05)
    assert (await generator.health()).busy_s == health.busy_s


async def _closed(generator: Generator, folders: list[Path]) -> None:
    await generator.close()
    with pytest.raises(GeneratorError):
        await ask(generator)
    with pytest.raises(GeneratorError):
        await generator.health()

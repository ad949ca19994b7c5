"""The contract of a generator, over every implementation: scripted, embedded, a real SGLang server, a pool of two."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from tiny_models import VOCAB_SIZE, save_tiny_models
from vllm_server import SHAPE

from driftgym.agents.generators.base import Generator, WeightVersion
from driftgym.agents.generators.launch import GeneratorConfig, start_embedded
from driftgym.agents.generators.pool import GeneratorPool
from driftgym.agents.generators.scripted import ScriptedGenerator, ScriptedRequest
from driftgym.agents.generators.sglang import SGLangGenerator
from driftgym.agents.generators.vllm import VLLMGenerator
from driftgym.errors import GeneratorError
from driftgym.types import Completion, SamplingParams, WeightUpdate

INCARNATION = 2
CONFIG = GeneratorConfig(max_batch_size=16, max_context_tokens=1024)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Tiny random models; the place in the list is the version."""
    return save_tiny_models(tmp_path_factory.mktemp("weights"), count=3)


@pytest.fixture(scope="session")
def vllm_folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same, of a shape that a vLLM server takes."""
    return save_tiny_models(tmp_path_factory.mktemp("vllm"), count=3, **SHAPE)


def walk(request: ScriptedRequest) -> list[int]:
    """Each token follows from the one before, so that an answer can be gone on with from any of its tokens."""
    ids = [request.prompt_token_ids[-1]]
    for _ in range(1000):
        ids.append((7 * ids[-1] + 3) % VOCAB_SIZE)
    return ids[1:]


def scripted() -> ScriptedGenerator:
    return ScriptedGenerator(walk, incarnation=INCARNATION, token_latency_s=0.001, vocab_size=VOCAB_SIZE)


EMBEDDED = pytest.param("embedded", marks=pytest.mark.slow)
SLICES = pytest.param("pool in slices", marks=pytest.mark.slow)
SGLANG = pytest.param("sglang", marks=[pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(600)])

VLLM = pytest.param("vllm", marks=[pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)])


@pytest.fixture(params=["scripted", EMBEDDED, "pool", SLICES, SGLANG, VLLM])
async def generator(request: pytest.FixtureRequest, folders: list[Path]) -> AsyncIterator[Generator]:
    made: Generator
    if request.param == "scripted":
        made = scripted()
    elif request.param == "pool":
        made = GeneratorPool([scripted(), scripted()], policy_version=0)
    elif request.param == "pool in slices":
        made = GeneratorPool([scripted(), scripted()], policy_version=0, chunk_tokens=90)
    elif request.param == "sglang":
        made = SGLangGenerator(
            request.getfixturevalue("sglang_server").url, incarnation=INCARNATION, max_concurrency=80
        )
        await made.update_weights(_update(folders, 0), mode="in_flight", timeout_s=60)
    elif request.param == "vllm":
        made = VLLMGenerator(request.getfixturevalue("vllm_server").url, incarnation=INCARNATION, max_concurrency=80)
        first = _update(request.getfixturevalue("vllm_folders"), 0)
        await made.update_weights(first, mode="in_flight", timeout_s=120)
    else:
        made = await start_embedded(
            folders[0], CONFIG, incarnation=INCARNATION, policy_version=0, timeout_s=90, close_timeout_s=10
        )
    yield made
    await made.close()


def ask(generator: Generator, *, request_id: str = "r", max_tokens: int = 5, timeout_s: float = 60.0, **options):
    sampling = SamplingParams(
        max_tokens=max_tokens,
        stop_token_ids=options.pop("stop_token_ids", ()),
        temperature=options.pop("temperature", 1.0),
    )
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


def ask_all(generator: Generator, name: str, count: int, **options) -> list[asyncio.Task[Completion]]:
    return [asyncio.create_task(ask(generator, request_id=f"{name}{index}", **options)) for index in range(count)]


def score(generator: Generator, ids: list[int], *, num_given: int, timeout_s: float = 60.0):
    return generator.score(ids, num_given=num_given, deadline_s=time.monotonic() + timeout_s)


async def until_running(generator: Generator, count: int) -> None:
    async with asyncio.timeout(30):
        while (await generator.load()).num_running < count:  # noqa: ASYNC110  # polls what has no event
            await asyncio.sleep(0.005)


async def test_contract(generator: Generator, folders: list[Path], request: pytest.FixtureRequest) -> None:
    """One after the other on one engine: an engine is dear to start."""
    if isinstance(generator, VLLMGenerator):
        folders = request.getfixturevalue("vllm_folders")
    for part in (
        _completions,
        _stop_tokens,
        _many_at_once,
        _slices,
        _scores,
        _wrong_prompts,
        _deadline,
        _abort,
        _pause,
        _versions,
        _in_flight_update,
        _drained_update,
        _aborting_update,
        _kept_kv,
        _refused_update,
        _health,
        _load,
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


async def _slices(generator: Generator, folders: list[Path]) -> None:
    """An answer in pieces, each asked for with the tokens before it, is the answer in one piece."""
    whole = await ask(generator, max_tokens=24, temperature=0.0)
    ids, logprobs = [1, 2, 3], []
    for index, length in enumerate((10, 10, 4)):
        part = await ask(generator, request_id=f"slice{index}", max_tokens=length, temperature=0.0, ids=ids)
        assert part.finish_reason == "length"
        ids += part.token_ids.tolist()
        logprobs += part.logprobs.tolist()
    assert ids[3:] == whole.token_ids.tolist()
    assert logprobs == pytest.approx(whole.logprobs.tolist(), abs=1e-4)


async def _scores(generator: Generator, folders: list[Path]) -> None:
    """Those of an engine's own tokens are what it said when it sampled them."""
    completion = await ask(generator, max_tokens=20)
    ids = [1, 2, 3, *completion.token_ids.tolist()]
    scores = await score(generator, ids, num_given=3)
    assert scores.logprobs.tolist() == pytest.approx(completion.logprobs.tolist(), abs=1e-4)
    assert scores.version == WeightVersion(incarnation=INCARNATION, policy_version=0)
    tail = await score(generator, ids, num_given=22)
    assert tail.logprobs.tolist() == pytest.approx(scores.logprobs[-1:].tolist(), abs=1e-4)
    for wrong, num_given in (([1, 2], 0), ([1, 2], 2), ([1], 1), ([1, VOCAB_SIZE], 1), ([], 1)):
        with pytest.raises(ValueError, match="prompt"):
            await score(generator, wrong, num_given=num_given)


async def _wrong_prompts(generator: Generator, folders: list[Path]) -> None:
    for ids in ([], [VOCAB_SIZE], [-1], [1, 2**40]):
        with pytest.raises(ValueError, match="prompt"):
            await ask(generator, ids=ids)
    check(await ask(generator), length=5)  # no harm is done


async def _deadline(generator: Generator, folders: list[Path]) -> None:
    await generator.pause()
    with pytest.raises(GeneratorError):
        await ask(generator, request_id="late", timeout_s=0.2)
    with pytest.raises(GeneratorError):
        await score(generator, [1, 2], num_given=1, timeout_s=0.2)
    await generator.resume()
    check(await ask(generator, request_id="late"), length=5)
    for timeout_s in (0.0, -1.0):
        with pytest.raises(GeneratorError):
            await ask(generator, request_id="too late", timeout_s=timeout_s)


async def _abort(generator: Generator, folders: list[Path]) -> None:
    task = asyncio.create_task(ask(generator, request_id="cut", max_tokens=900))
    await until_running(generator, 1)
    await generator.abort("cu")  # the beginning of its name is not its name
    await generator.abort("another")
    await generator.abort("cut")
    completion = await task
    assert completion.finish_reason == "abort"
    check(completion, length=len(completion.token_ids))
    assert len(completion.token_ids) < 900
    tasks = ask_all(generator, "all", 3, max_tokens=900)
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
    tasks = ask_all(generator, "fly", 4, max_tokens=800)
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
    updating = asyncio.create_task(generator.update_weights(_update(folders, 2), mode="drain", timeout_s=30))
    await asyncio.sleep(0)
    late = ask_all(generator, "after the drain", 2)
    await updating
    completion = await task
    check(completion, length=200)
    assert set(completion.policy_versions.tolist()) == {1}
    for each in (*late, asyncio.create_task(ask(generator, min_policy_version=2))):
        assert (await each).policy_versions.tolist() == [2] * 5


async def _aborting_update(generator: Generator, folders: list[Path]) -> None:
    """Who asked goes on from what it got; a pool does so by itself."""
    tasks = ask_all(generator, "cut off", 3, max_tokens=800)
    await until_running(generator, 3)
    await asyncio.sleep(0.05)
    await generator.update_weights(_update(folders, 3), mode="abort_resume", timeout_s=30)
    for task in tasks:
        completion = await task
        check(completion, length=len(completion.token_ids))
        assert completion.kv_min_policy_version is None
        if isinstance(generator, GeneratorPool):
            check(completion, length=800)
            assert set(completion.policy_versions.tolist()) == {2, 3}
        else:
            assert completion.finish_reason == "abort"
            assert set(completion.policy_versions.tolist()) <= {2}
    assert (await ask(generator)).policy_versions.tolist() == [3] * 5


async def _kept_kv(generator: Generator, folders: list[Path]) -> None:
    for mode in ("drain", "abort_resume"):
        with pytest.raises(ValueError, match="in_flight alone"):
            await generator.update_weights(_update(folders, 4), mode=mode, keep_kv=True, timeout_s=5)
    tasks = ask_all(generator, "kept", 3, max_tokens=800)
    await until_running(generator, 3)
    await asyncio.sleep(0.05)
    try:
        await generator.update_weights(_update(folders, 4), mode="in_flight", keep_kv=True, timeout_s=30)
    except GeneratorError as error:
        assert "disable-overlap-schedule" in str(error)  # noqa: PT017  # one that decodes ahead says so, and goes on
        await generator.update_weights(_update(folders, 4), mode="in_flight", timeout_s=30)
        await asyncio.gather(*tasks)
        return
    for task in tasks:
        completion = await task
        check(completion, length=800)
        assert set(completion.policy_versions.tolist()) == {3, 4}
        assert completion.kv_min_policy_version == 3
    await generator.update_weights(_update(folders, 5), mode="in_flight", timeout_s=30)
    assert (await ask(generator, request_id="kept0")).kv_min_policy_version is None


async def _refused_update(generator: Generator, folders: list[Path]) -> None:
    if isinstance(generator, GeneratorPool):
        return  # takes out who refuses; see its own tests
    with pytest.raises(GeneratorError):
        await generator.update_weights(_update(folders, 6, incarnation=7), mode="in_flight", timeout_s=5)
    check(await ask(generator, min_policy_version=4), length=5)


async def _health(generator: Generator, folders: list[Path]) -> None:
    await generator.update_weights(_update(folders, 8), mode="in_flight", timeout_s=30)
    health = await generator.health()
    assert health.version == WeightVersion(incarnation=INCARNATION, policy_version=8)
    assert (health.num_running, health.num_queued) == (0, 0)
    assert health.busy_s > 0
    await asyncio.sleep(0.05)
    assert (await generator.health()).busy_s == health.busy_s


async def _load(generator: Generator, folders: list[Path]) -> None:
    idle = await generator.load()
    assert (idle.num_running, idle.num_queued) == (0, 0)
    tasks = ask_all(generator, "loaded", 3, max_tokens=300)
    await until_running(generator, 3)
    await asyncio.gather(*tasks)
    left = await generator.load()
    assert (left.num_running, left.num_queued) == (0, 0)


async def _closed(generator: Generator, folders: list[Path]) -> None:
    under_way = ask_all(generator, "left", 2, max_tokens=900)
    await until_running(generator, 2)
    await generator.close()
    for task in under_way:
        with pytest.raises(GeneratorError):
            await task
    for call in (
        ask(generator),
        score(generator, [1, 2], num_given=1),
        generator.health(),
        generator.load(),
    ):
        with pytest.raises(GeneratorError):
            await call
    await generator.close()  # a second time is none

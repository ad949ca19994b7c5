"""What holds of every real engine, whatever it speaks: checks that the tests of each one share."""

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest
from engine_server import EngineServer
from live_engine import ask, ask_all, prompts, until_running, weights
from rescore import greedy, rescore, rescore_kept
from tiny_models import VOCAB_SIZE

from driftgym.agents.generators.base import Generator
from driftgym.errors import GeneratorError
from driftgym.types import Completion


async def check_greedy(engine: Generator, model: Path) -> None:
    """The greedy ids are those of transformers."""
    asked = prompts(12)
    completions = await asyncio.gather(*ask_all(engine, asked, name="greedy", temperature=0.0))
    expected = [greedy(model, prompt, num_tokens=40) for prompt in asked]
    assert [completion.token_ids.tolist() for completion in completions] == expected


async def check_sampled(engine: Generator, model: Path, *, temperature: float) -> list[Completion]:
    """The log-probs of what it samples are those that the trainer finds. Returns 16 completions."""
    asked = prompts(16, seed=1)
    completions = await asyncio.gather(*ask_all(engine, asked, name="sampled", temperature=temperature))
    deltas = [
        np.abs(completion.logprobs - rescore(model, prompt, completion.token_ids.tolist(), temperature=temperature))
        for prompt, completion in zip(asked, completions, strict=True)
    ]
    print(f"max |delta| at temperature {temperature}: {max(delta.max() for delta in deltas):.1e}")
    assert max(delta.max() for delta in deltas) <= 1e-4
    return completions


async def check_scores(engine: Generator, model: Path, asked: list[list[int]]) -> None:
    """Its scores are those that the trainer finds."""
    for prompt in asked:
        for num_given in (1, len(prompt) - 1):
            scores = await engine.score(prompt, num_given=num_given, deadline_s=time.monotonic() + 60)
            expected = rescore(model, prompt[:num_given], prompt[num_given:])
            np.testing.assert_allclose(scores.logprobs, expected, atol=1e-4)
            assert scores.version.policy_version == 0


async def check_abort_resume(engine: Generator, models: list[Path], *, max_tokens: int) -> None:
    """What was written has the old version; whoever asked goes on with it, under the new one."""
    asked = prompts(8, seed=4)
    tasks = ask_all(engine, asked, name="cut", max_tokens=max_tokens)
    await until_running(engine, 8)
    await asyncio.sleep(0.1)
    await engine.update_weights(weights(models, 1), mode="abort_resume", timeout_s=60)
    for prompt, task in zip(asked, tasks, strict=True):
        first = await task
        assert first.finish_reason == "abort"
        assert 0 < len(first.token_ids) < max_tokens
        assert set(first.policy_versions.tolist()) == {0}
        np.testing.assert_allclose(first.logprobs, rescore(models[0], prompt, first.token_ids.tolist()), atol=1e-3)
        going_on = [*prompt, *first.token_ids.tolist()]
        second = await ask(engine, going_on, request_id="on", max_tokens=5)
        assert second.policy_versions.tolist() == [1] * 5
        np.testing.assert_allclose(second.logprobs, rescore(models[1], going_on, second.token_ids.tolist()), atol=1e-3)


async def check_drain(engine: Generator, models: list[Path]) -> None:
    """Requests that come during an update that drains wait, so that it ends however many come."""
    tasks = ask_all(engine, prompts(4, seed=5), name="old", max_tokens=200)
    await until_running(engine, 4)
    updating = asyncio.create_task(engine.update_weights(weights(models, 1), mode="drain", timeout_s=120))
    await asyncio.sleep(0.1)
    late = ask_all(engine, prompts(4, seed=6), name="new")
    await updating
    assert {version for task in tasks for version in (await task).policy_versions.tolist()} == {0}
    assert {version for task in late for version in (await task).policy_versions.tolist()} == {1}


async def check_kept_cache(engine: Generator, models: list[Path], *, max_tokens: int) -> None:
    """After an update that keeps the cache, tokens rest on KV of older weights until it is dropped, and say so."""
    asked = prompts(8, seed=7)
    tasks = ask_all(engine, asked, name="kept", max_tokens=max_tokens)
    await until_running(engine, 8)
    await engine.update_weights(weights(models, 1), mode="in_flight", keep_kv=True, timeout_s=60)
    for prompt, task in zip(asked, tasks, strict=True):
        completion = await task
        assert len(completion.token_ids) == max_tokens
        assert set(completion.policy_versions.tolist()) == {0, 1}
        assert completion.kv_min_policy_version == 0
        expected = rescore_kept(models[0], models[1], prompt, completion)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-3)
    # The next turn finds its prompt in the cache, as the older weights wrote it.
    following = [*asked[0], *tasks[0].result().token_ids.tolist(), 7]
    assert (await ask(engine, following, request_id="turn 2")).kv_min_policy_version == 0
    scores = await engine.score(following, num_given=3, deadline_s=time.monotonic() + 60)
    np.testing.assert_allclose(scores.logprobs, rescore(models[1], following[:3], following[3:]), atol=1e-3)
    await engine.update_weights(weights(models, 2), mode="in_flight", timeout_s=60)
    fresh = await ask(engine, following, request_id="turn 3")
    assert fresh.kv_min_policy_version is None
    np.testing.assert_allclose(fresh.logprobs, rescore(models[2], following, fresh.token_ids.tolist()), atol=1e-3)


async def check_aborts(engine: Generator, model: Path, *, max_tokens: int) -> None:
    """An abort ends the request that it names, none whose id begins with the same letters, and without a name all."""
    names = ("r1", "r10")
    tasks = {
        name: asyncio.create_task(ask(engine, [5, 6, 7], request_id=name, max_tokens=max_tokens)) for name in names
    }
    await until_running(engine, 2)
    await asyncio.sleep(0.1)
    await engine.abort("r1")
    cut = await tasks["r1"]
    assert cut.finish_reason == "abort"
    assert 0 < len(cut.token_ids) < max_tokens
    np.testing.assert_allclose(cut.logprobs, rescore(model, [5, 6, 7], cut.token_ids.tolist()), atol=1e-3)
    assert len((await tasks["r10"]).token_ids) == max_tokens
    both = ask_all(engine, [[5, 6], [5, 6]], name="all", max_tokens=max_tokens)
    await asyncio.sleep(0)
    await engine.abort()  # before the engine can have seen them
    assert {(await task).finish_reason for task in both} == {"abort"}


async def check_given_up(engine: Generator, *, max_tokens: int) -> None:
    """A request that nobody waits for any more is ended: one that was cancelled, and one that is late."""
    task = asyncio.create_task(ask(engine, [5, 6, 7], request_id="given up", max_tokens=max_tokens))
    await until_running(engine, 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(GeneratorError, match="deadline"):
        await ask(engine, [5, 6, 7], request_id="late", max_tokens=max_tokens, timeout_s=0.2)
    async with asyncio.timeout(20):
        while (await engine.load()).num_running:  # noqa: ASYNC110  # polls what has no event
            await asyncio.sleep(0.05)


async def check_unknown_ids(engine: Generator) -> None:
    """Ids that the model does not know are refused, and leave it well."""
    for ids in ([VOCAB_SIZE], [5, 2**31], [-1], []):
        with pytest.raises(ValueError, match="prompt"):
            await ask(engine, ids, request_id="unknown")
    assert len((await ask(engine, [5], request_id="known")).token_ids) == 40


async def check_death(engine: Generator, server: EngineServer, *, max_tokens: int) -> None:
    """All that is under way at a server that dies fails at once, and all that comes after."""
    tasks = ask_all(engine, prompts(20, seed=9), name="lost", max_tokens=max_tokens, timeout_s=3600)
    await until_running(engine, 20)
    server.kill()
    async with asyncio.timeout(30):
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(error) for error in ended] == [GeneratorError] * 20
        for asked in (engine.health(), engine.load(), ask(engine, [5], request_id="after")):
            with pytest.raises(GeneratorError):
                await asked

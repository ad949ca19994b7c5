"""An engine on weights that change under it: held, let go, and told what they are called."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from driftgym.agents.generators.embedded.model import ModelRunner
from driftgym.agents.generators.embedded.shared import SharedEngine, SharedEngineLoop
from driftgym.agents.generators.embedded.weights import WeightsRefusedError
from driftgym.agents.generators.sglang import SGLangGenerator
from driftgym.errors import GeneratorError
from driftgym.types import SamplingParams, WeightUpdate

PROMPT = np.array([3, 1, 4, 1, 5, 9, 2, 6], np.int32)


def engine_on(model: Any) -> SharedEngine:
    runner = ModelRunner(model, num_slots=2, max_context_tokens=64)
    return SharedEngine(runner, max_batch_size=2, max_context_tokens=64, weight_version="1:0")


async def test_what_runs_ends_before_the_hold_and_what_comes_waits_for_the_name(model_of: Callable[..., Any]) -> None:
    model = model_of("qwen3")
    loop = SharedEngineLoop(engine_on(model))
    running = asyncio.create_task(loop.run())
    sampling = SamplingParams(max_tokens=20, seed=1)
    first = asyncio.create_task(loop.generate("a", PROMPT, sampling))
    await asyncio.sleep(0)
    second = asyncio.create_task(loop.generate("b", PROMPT, sampling))
    await asyncio.sleep(0.005)
    await loop.hold()
    await loop.hold()  # it is held already
    done = [task.done() for task in (first, second)]
    assert loop.engine.num_running == 0
    assert not loop.engine.has_work
    late = asyncio.create_task(loop.generate("c", PROMPT, sampling))
    await asyncio.sleep(0.02)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    await loop.weights_changed("1:1")
    await loop.let_go()
    await asyncio.sleep(0.02)
    assert [task.done() for task in (first, second)] == done
    assert not late.done()
    with pytest.raises(WeightsRefusedError, match="the memory holds 1:1"):
        await loop.name_weights("1:2")
    await loop.name_weights("1:1")
    answer, new = await first, await late
    assert (answer.version, new.version) == ("1:0", "1:1")
    assert [span.version for span in new.spans] == ["1:1"]
    assert new.num_cached_tokens == 0, "no KV of the weights before is used"
    assert new.queue_s > 0, "the wait is not the request's own time"
    fresh = SharedEngineLoop(engine_on(model))
    fresh_running = asyncio.create_task(fresh.run())
    expected = await fresh.generate("c", PROMPT, sampling)
    assert new.token_ids.tolist() == expected.token_ids.tolist()
    assert new.logprobs.tolist() == pytest.approx(expected.logprobs.tolist(), abs=1e-5)
    await second
    for task in (running, fresh_running):
        task.cancel()
    await asyncio.gather(running, fresh_running, return_exceptions=True)


async def test_an_engine_of_its_own_has_no_weights_to_name(
    model_of: Callable[..., Any], engine_of: Callable[..., Any], served: Callable[..., Any]
) -> None:
    update = WeightUpdate(policy_version=1, incarnation=1, location="x", checksum="", transport="tensor")
    async with (
        served(engine_of(model_of("qwen3"))) as url,
        SGLangGenerator(url, incarnation=1, max_concurrency=2) as client,
    ):
        with pytest.raises(GeneratorError, match="disk alone, not by tensor"):
            await client.update_weights(update, mode="in_flight", timeout_s=5)
        with pytest.raises(GeneratorError, match="send them from disk"):
            await client._http.post("/update_weights_from_tensor", {"weight_version": "1:1"})
        with pytest.raises(GeneratorError, match="the cache is always flushed"):
            await client._http.post("/update_weights_from_tensor", {"weight_version": "1:1", "flush_cache": False})
        assert str((await client.health()).version) == "1:0"

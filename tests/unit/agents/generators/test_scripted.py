import asyncio
import time

import pytest

from driftgym.agents.generators.scripted import ScriptedGenerator
from driftgym.errors import GeneratorError
from driftgym.types import SamplingParams, WeightUpdate


def ask(generator, *, timeout_s=5.0, sampling=None, request_id="r"):
    return generator.generate(
        [1, 2],
        sampling or SamplingParams(),
        request_id=request_id,
        session_id="s",
        deadline_s=time.monotonic() + timeout_s,
    )


async def test_answers_come_in_order_until_there_are_none():
    generator = ScriptedGenerator([[1, 2], [3]], policy_version=4, logprob=-0.25)
    first, second = await ask(generator), await ask(generator)
    assert (first.token_ids.tolist(), second.token_ids.tolist()) == ([1, 2], [3])
    assert first.policy_versions.tolist() == [4, 4]
    assert first.logprobs.tolist() == [-0.25, -0.25]
    with pytest.raises(GeneratorError, match="no answers left"):
        await ask(generator)
    assert [request.request_id for request in generator.requests] == ["r"] * 3


async def test_an_answer_is_cut_as_an_engine_would():
    generator = ScriptedGenerator(lambda request: [5, 6, 7, 8])
    stopped = await ask(generator, sampling=SamplingParams(stop_token_ids=(6,)))
    assert (stopped.token_ids.tolist(), stopped.finish_reason) == ([5, 6], "stop")
    short = await ask(generator, sampling=SamplingParams(max_tokens=3))
    assert (short.token_ids.tolist(), short.finish_reason) == ([5, 6, 7], "length")


async def test_weights_change_between_two_tokens():
    generator = ScriptedGenerator(lambda request: range(20), token_latency_s=0.005)
    task = asyncio.create_task(ask(generator))
    await asyncio.sleep(0.04)
    update = WeightUpdate(policy_version=5, incarnation=0, location="/w", checksum="sha256:0")
    await generator.update_weights(update, mode="in_flight", timeout_s=1)
    versions = (await task).policy_versions.tolist()
    assert versions == sorted(versions)
    assert set(versions) == {0, 5}


async def test_failures_on_demand():
    generator = ScriptedGenerator(lambda request: range(100), token_latency_s=0.01)
    generator.fail_next(2)
    for _ in range(2):
        with pytest.raises(GeneratorError, match="as it was told"):
            await ask(generator)
    with pytest.raises(GeneratorError, match="deadline"):
        await ask(generator, timeout_s=0.05)
    task = asyncio.create_task(ask(generator))
    await asyncio.sleep(0.03)
    generator.kill()
    with pytest.raises(GeneratorError, match="gone"):
        await task
    with pytest.raises(GeneratorError, match="gone"):
        await generator.health()
    assert generator.num_running == 0

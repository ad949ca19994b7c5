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


def weights(version):
    return WeightUpdate(policy_version=version, incarnation=0, location="/w", checksum="sha256:0")


async def test_a_session_rests_on_the_cache_until_an_update_drops_it():
    generator = ScriptedGenerator(lambda request: [5, 6])
    assert (await ask(generator)).kv_min_policy_version is None
    await generator.update_weights(weights(1), mode="in_flight", keep_kv=True, timeout_s=1)
    await generator.update_weights(weights(2), mode="in_flight", keep_kv=True, timeout_s=1)
    completion = await ask(generator)
    assert (completion.policy_versions.tolist(), completion.kv_min_policy_version) == ([2, 2], 0)
    await generator.update_weights(weights(3), mode="in_flight", timeout_s=1)
    assert (await ask(generator)).kv_min_policy_version is None


async def test_requests_that_come_while_it_drains_wait():
    generator = ScriptedGenerator(lambda request: range(20), token_latency_s=0.005)
    first = asyncio.create_task(ask(generator))
    await asyncio.sleep(0.02)
    draining = asyncio.create_task(generator.update_weights(weights(1), mode="drain", timeout_s=5))
    await asyncio.sleep(0)
    late, aborted = (asyncio.create_task(ask(generator, request_id=name)) for name in ("late", "cut"))
    await asyncio.sleep(0.01)
    assert (await generator.load()).num_queued == 2
    with pytest.raises(GeneratorError, match="deadline"):
        await ask(generator, timeout_s=0.01)
    await generator.abort("cut")
    assert ((await aborted).finish_reason, len((await aborted).token_ids)) == ("abort", 0)
    await draining
    assert set((await first).policy_versions.tolist()) == {0}
    assert set((await late).policy_versions.tolist()) == {1}
    assert [request.request_id for request in generator.requests] == ["r", "late"]


async def test_one_that_stands_still_answers_nothing():
    generator = ScriptedGenerator(lambda request: [5])
    generator.hang()
    for asked in (
        ask(generator, timeout_s=0.02),
        generator.score([1, 2], num_given=1, deadline_s=time.monotonic() + 0.02),
        generator.update_weights(weights(1), mode="in_flight", timeout_s=0.02),
    ):
        with pytest.raises(GeneratorError):
            await asked
    for asked in (generator.health(), generator.load()):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asked, 0.02)

"""Slices: long answers in pieces, wherever there is a place; nothing twice, at most one slice lost."""

import asyncio
import time

import numpy as np
import pytest
from pool_engines import QUICK, Engine, Events, answer, ask, check, expect_failure, until, weights

from driftgym.agents.generators.pool import GeneratorPool
from driftgym.agents.generators.scripted import ScriptedGenerator
from driftgym.errors import GeneratorError
from driftgym.types import Completion, SamplingParams, float32_array, int32_array


def pool_of(*engines, **options):
    return GeneratorPool(engines, policy_version=0, watch=options.pop("watch", QUICK), **options)


async def test_a_long_answer_comes_in_slices():
    engine = Engine()
    pool = pool_of(engine, chunk_tokens=4)
    completion = await ask(pool, 3, 11)
    check(completion, 3, 11)
    assert engine.lengths == [4, 4, 4]
    assert [len(request.prompt_token_ids) for request in engine.requests] == [2, 6, 10]
    assert completion.extras["num_slices"] == 3
    assert (pool.counts.num_slices, pool.counts.num_retried, pool.counts.num_moved) == (3, 0, 0)
    await pool.close()


@pytest.mark.parametrize(("max_tokens", "lengths"), [(4, [4]), (7, [4, 3]), (8, [4, 4]), (9, [4, 4, 1])])
async def test_slices_never_ask_for_more_than_is_left(max_tokens, lengths):
    """The prompt and what is asked for are together never more than those of the whole request."""
    engine = Engine()
    pool = pool_of(engine, chunk_tokens=4)
    completion = await ask(pool, 3, 100, max_tokens=max_tokens)
    assert completion.finish_reason == "length"
    assert completion.token_ids.tolist() == answer(3, 100)[:max_tokens]
    assert engine.lengths == lengths
    assert all(len(r.prompt_token_ids) + r.sampling.max_tokens <= 2 + max_tokens for r in engine.requests)
    await pool.close()


async def test_without_slices_a_completion_is_the_engines_own():
    pool = pool_of(Engine())
    completion = await ask(pool, 3, 11)
    check(completion, 3, 11)
    assert "num_slices" not in completion.extras
    await pool.close()


async def test_an_engine_that_stops_short_has_ended():
    pool = GeneratorPool([ScriptedGenerator([[7, 8]])], policy_version=0, chunk_tokens=4)
    completion = await ask(pool)
    assert (completion.token_ids.tolist(), completion.finish_reason) == ([7, 8], "length")
    await pool.close()


async def test_each_slice_of_a_seeded_request_has_a_seed_of_its_own():
    engines = [Engine(), Engine()]
    pools = [pool_of(engine, chunk_tokens=4) for engine in engines]
    for pool in pools:
        await ask(pool, 3, 11, seed=5)
    seeds = [[request.sampling.seed for request in engine.requests] for engine in engines]
    assert seeds[0] == seeds[1]
    assert seeds[0][0] == 5
    assert len(set(seeds[0])) == 3
    assert all(0 <= seed < 2**31 for seed in seeds[0])
    await pools[0].close()
    await pools[1].close()


async def test_a_dead_engine_costs_one_slice_of_each_request():
    """Case H2: one of two engines dies in the middle; episodes end on the other one, from the tokens kept."""
    first, second = Engine(token_latency_s=0.005), Engine(token_latency_s=0.005)
    events = Events()
    pool = pool_of(first, second, chunk_tokens=5, on_event=events)
    asked = [asyncio.ensure_future(ask(pool, key, 23)) for key in range(10)]
    await asyncio.sleep(0.07)
    assert first.num_running == second.num_running == 5
    first.kill()
    for key, completion in enumerate(await asyncio.gather(*asked)):
        check(completion, key, 23)
    await until(lambda: events.names == ["generator_lost"])
    assert pool.counts.num_retried == 5
    assert pool.counts.num_moved == 5
    assert pool.counts.num_slices == 10 * 5 + 5, "one slice of each moved request is asked for again"
    assert pool.names == ("1",)
    assert (await pool.health()).num_running == 0
    await pool.close()


async def test_both_engines_die_and_one_comes_back():
    """Case H2: with none alive the pool says so, requests wait, and go on where one comes back."""
    first, second = Engine(token_latency_s=0.005), Engine(token_latency_s=0.005)
    events = Events()
    pool = pool_of(first, second, chunk_tokens=5, on_event=events)
    asked = [asyncio.ensure_future(ask(pool, key, 23)) for key in range(6)]
    await asyncio.sleep(0.07)
    first.kill()
    second.kill()
    await asyncio.sleep(0.5)
    assert not any(task.done() for task in asked)
    assert pool.names == ()
    with pytest.raises(GeneratorError, match=r"no generator answers \(0: .*; 1: "):
        await pool.health()
    await expect_failure(ask(pool, 77, 5, timeout_s=0.1), match="no generator answers")
    first.revive()
    for key, completion in enumerate(await asyncio.gather(*asked)):
        check(completion, key, 23)
    assert events.names == ["generator_lost", "generator_lost", "generator_returned"]
    assert (await pool.health()).version.policy_version == 0
    await pool.close()


async def test_an_abort_that_nobody_asked_for_goes_on():
    """Case C5: 4 tokens at version 3 that the engine cut short, then 6 at version 5."""

    class Cutting(ScriptedGenerator):
        async def generate(self, prompt_token_ids, sampling, *, request_id, **options):
            length, version, reason = (4, 3, "abort") if len(prompt_token_ids) == 2 else (6, 5, "stop")
            self.requests.append((list(prompt_token_ids), sampling.max_tokens))
            return Completion(
                request_id=request_id,
                token_ids=int32_array(range(length)),
                logprobs=float32_array([-0.1 * version] * length),
                policy_versions=int32_array([version] * length),
                finish_reason=reason,
                kv_min_policy_version=2 if version == 3 else None,
                latency_s=1.0,
            )

    engine = Cutting([])
    pool = GeneratorPool([engine], policy_version=3)
    completion = await ask(pool, max_tokens=50)
    assert completion.policy_versions.tolist() == [3] * 4 + [5] * 6
    assert completion.token_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]
    assert completion.logprobs == pytest.approx([-0.3] * 4 + [-0.5] * 6)
    assert (completion.finish_reason, completion.kv_min_policy_version, completion.latency_s) == ("stop", 2, 2.0)
    assert engine.requests == [([1, 5], 50), ([1, 5, 0, 1, 2, 3], 46)]
    await pool.close()


async def test_an_engine_that_only_aborts_is_left():
    class Aborting(Engine):
        async def generate(self, prompt_token_ids, sampling, *, request_id, **options):
            self.requests.append(request_id)
            return Completion(
                request_id=request_id, token_ids=[], logprobs=[], policy_versions=[], finish_reason="abort"
            )

    aborting = Aborting()
    pool = pool_of(aborting, Engine())
    check(await ask(pool), 1, 5)
    assert len(aborting.requests) == 3
    await pool.close()
    alone = pool_of(Aborting())
    await expect_failure(ask(alone), match="aborted without a token")
    await alone.close()


async def test_an_abort_that_somebody_asked_for_ends_it():
    engine = Engine(token_latency_s=0.005)
    pool = pool_of(engine, chunk_tokens=4)
    asked = asyncio.ensure_future(ask(pool, 3, 200))
    await asyncio.sleep(0.1)
    await pool.abort("r4")
    assert not asked.done()
    await pool.abort("r3")
    completion = await asked
    assert completion.finish_reason == "abort"
    assert len(completion.token_ids) >= 5, "what earlier slices gave is there too"
    assert completion.token_ids.tolist() == answer(3, 200)[: len(completion.token_ids)]
    await pool.close()


async def test_a_hung_engine_costs_a_part_of_the_deadline():
    """Requests there are told to abort, then cut off, and go on elsewhere from the tokens received."""
    hung, well = Engine(token_latency_s=0.002), Engine(token_latency_s=0.002)
    events = Events()
    pool = pool_of(hung, well, chunk_tokens=5, on_event=events)
    asked = [asyncio.ensure_future(ask(pool, key, 23, max_tokens=30)) for key in range(6)]
    await asyncio.sleep(0.025)
    hung.hang()
    began = time.monotonic()
    for key, completion in enumerate(await asyncio.gather(*asked)):
        check(completion, key, 23)
    assert time.monotonic() - began < 15
    assert events.names == ["generator_lost"], "the watch finds it, although nothing failed"
    assert pool.counts.num_retried == 3
    await pool.close()


async def test_a_slow_engine_loses_no_token():
    """It is told to abort, gives what it has, and the rest is written elsewhere."""
    slow, quick = Engine(token_latency_s=0.1), Engine()
    pool = pool_of(slow, quick)
    completion = await ask(pool, 3, 100, timeout_s=3.0)
    check(completion, 3, 100)
    assert len(slow.requests) == 1
    (rest,) = quick.requests
    assert 5 < len(rest.prompt_token_ids) < 25
    assert (pool.counts.num_slow, pool.counts.num_moved, pool.counts.num_retried) == (1, 1, 0)
    await pool.close()


async def test_an_engine_that_is_slow_and_alone_is_let_be():
    slow = Engine(token_latency_s=0.02)
    pool = pool_of(slow)
    check(await ask(pool, 3, 40, timeout_s=1.5), 3, 40)
    assert (pool.counts.num_slow, len(slow.requests)) == (0, 1)
    await pool.close()


async def test_time_in_which_the_pool_is_paused_makes_no_engine_slow():
    engines = [Engine(token_latency_s=0.005), Engine(token_latency_s=0.005)]
    pool = pool_of(*engines)
    asked = asyncio.ensure_future(ask(pool, 3, 20, timeout_s=2.0))
    await asyncio.sleep(0.03)
    await pool.pause()
    await asyncio.sleep(1.4)
    await pool.resume()
    check(await asked, 3, 20)
    assert (pool.counts.num_slow, pool.counts.num_moved) == (0, 0)
    await pool.close()


async def test_more_than_the_engines_take_wait_in_order():
    engines = [Engine(token_latency_s=0.01), Engine(token_latency_s=0.01)]
    pool = pool_of(*engines, max_concurrency=3, chunk_tokens=3)
    ended = []

    async def play(key):
        completion = await ask(pool, key, 6)
        ended.append(key)
        return completion

    asked = [asyncio.create_task(play(key)) for key in range(24)]
    await asyncio.sleep(0.03)
    health = await pool.health()
    assert (health.num_running, health.num_queued) == (6, 18)
    load = await pool.load()
    assert (load.num_running, load.num_queued) == (6, 18)
    for key, completion in enumerate(await asyncio.gather(*asked)):
        check(completion, key, 6)
        assert completion.latency_s < 0.5, "what was waited does not count"
    assert [engine.peak_running for engine in engines] == [3, 3]
    waves = [sorted(ended[index : index + 6]) for index in range(0, 24, 6)]
    assert waves == [list(range(index, index + 6)) for index in range(0, 24, 6)]
    await pool.close()


async def test_those_who_wait_have_their_deadline_and_can_be_cancelled():
    engine = Engine(token_latency_s=0.01)
    pool = pool_of(engine, max_concurrency=1)
    first = asyncio.ensure_future(ask(pool, 1, 40))
    await asyncio.sleep(0)
    await expect_failure(ask(pool, 2, 5, timeout_s=0.05), match="no place")
    waiting = asyncio.ensure_future(ask(pool, 3, 5))
    aborted = asyncio.ensure_future(ask(pool, 4, 5))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await pool.abort("r4")
    completion = await aborted
    assert (completion.finish_reason, len(completion.token_ids)) == ("abort", 0)
    check(await first, 1, 40)
    assert waiting.cancelled()
    assert (await pool.health()).num_queued == 0
    check(await ask(pool, 5, 5), 5, 5)
    await pool.close()


async def test_a_wrong_prompt_is_the_callers_and_frees_its_place():
    pool = GeneratorPool([ScriptedGenerator([[7]], vocab_size=10)], policy_version=0, max_concurrency=1)
    for _ in range(3):
        with pytest.raises(ValueError, match="vocabulary"):
            await pool.generate([10], SamplingParams(), request_id="r", session_id="s", deadline_s=time.monotonic() + 5)
    assert pool.counts.num_retried == 0
    await pool.close()


async def test_versions_do_not_go_back_where_there_is_a_choice():
    """A request whose tokens have new weights does not go on at an engine with old ones."""
    first, second = Engine(token_latency_s=0.005), Engine(token_latency_s=0.005)
    pool = pool_of(first, second, chunk_tokens=4, max_paused_share=0.5)
    asked = [asyncio.ensure_future(ask(pool, key, 60)) for key in range(8)]
    await asyncio.sleep(0.05)
    await pool.update_weights(weights(1), mode="in_flight", timeout_s=5)
    for key, task in enumerate(asked):
        completion = await task
        check(completion, key, 60)
        assert (np.diff(completion.policy_versions) >= 0).all()
        assert set(completion.policy_versions.tolist()) == {0, 1}
    await pool.close()

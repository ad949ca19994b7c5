"""Partial rollouts: what has had its share of an iteration waits for the next one."""

import asyncio
import time

from pool_engines import QUICK, Engine, answer, ask, check, expect_failure, until, weights

from driftgym.agents.bounded import bounded
from driftgym.agents.generators.pool import GeneratorPool
from driftgym.agents.generators.traffic import PARKED, Stopwatch


def pool_of(*engines, **options):
    return GeneratorPool(engines, policy_version=0, watch=QUICK, idle_s=options.pop("idle_s", 3600), **options)


async def test_a_long_answer_is_parked_and_goes_on_with_the_next_weights():
    engine = Engine()
    pool = pool_of(engine, iteration_tokens=10, chunk_tokens=4)
    asked = asyncio.ensure_future(ask(pool, 3, 25))
    short = await ask(pool, 4, 6)
    check(short, 4, 6)
    for version, num_parked in ((1, 1), (2, 2)):
        await until(lambda: pool.num_parked == num_parked)  # noqa: B023  # awaited at once
        health = await pool.health()
        assert (health.num_running, health.num_queued) == (0, 1)
        await pool.update_weights(weights(version), mode="drain", timeout_s=5)
        pool.next_iteration()
    completion = await asked
    check(completion, 3, 25)
    assert completion.policy_versions.tolist() == [0] * 10 + [1] * 10 + [2] * 5
    assert max(engine.lengths) == 4
    assert pool.num_parked == 2
    await pool.close()


async def test_a_parked_request_goes_on_anywhere():
    first, second = Engine(), Engine()
    pool = pool_of(first, second, iteration_tokens=10)
    asked = asyncio.ensure_future(ask(pool, 3, 15))
    await until(lambda: pool.num_parked == 1)
    await pool.remove("0")
    pool.next_iteration()
    check(await asked, 3, 15)
    assert [len(first.requests), len(second.requests)] == [1, 1]
    await pool.close()


async def test_parked_requests_can_be_aborted_cancelled_and_closed():
    pool = pool_of(Engine(), iteration_tokens=10, max_concurrency=2)
    asked = [asyncio.ensure_future(ask(pool, key, 15)) for key in range(3)]
    await until(lambda: pool.num_parked == 3)
    await pool.abort("r0")
    completion = await asked[0]
    assert (completion.finish_reason, completion.token_ids.tolist()) == ("abort", answer(0, 15)[:10])
    asked[1].cancel()
    await asyncio.wait((asked[1],))
    assert (await pool.health()).num_queued == 1
    await pool.close()
    await expect_failure(asked[2], match="closed")


async def test_parked_time_moves_the_deadline():
    pool = pool_of(Engine(), iteration_tokens=10)
    asked = asyncio.ensure_future(ask(pool, 3, 25, timeout_s=0.3))
    await until(lambda: pool.num_parked == 1)
    await asyncio.sleep(0.5)
    pool.next_iteration()
    await until(lambda: pool.num_parked == 2)
    await asyncio.sleep(0.5)
    pool.next_iteration()
    check(await asked, 3, 25)
    await pool.close()


async def test_who_bounds_a_request_learns_how_long_it_was_parked():
    pool = pool_of(Engine(), iteration_tokens=10)
    parked = Stopwatch()
    PARKED.set(parked)
    asked = asyncio.create_task(
        bounded(ask(pool, 3, 15, timeout_s=0.2), limit_s=0.2, what="it", stood_still_s=lambda: parked.seconds)
    )
    await asyncio.sleep(0.6)
    pool.next_iteration()
    check(await asked, 3, 15)
    assert 0.4 < parked.seconds < 5
    await pool.close()


async def test_all_go_on_when_the_engines_have_nothing_else_to_do():
    """The step that would bring the next weights may be waiting for exactly these answers."""
    engine = Engine(token_latency_s=0.01)
    pool = pool_of(engine, iteration_tokens=10, idle_s=0.1)
    asked = [asyncio.ensure_future(ask(pool, key, 25)) for key in range(3)]
    other = asyncio.ensure_future(ask(pool, 9, 10))
    for key, completion in enumerate(await asyncio.gather(*asked)):
        check(completion, key, 25)
    check(await other, 9, 10)
    assert pool.num_parked == 6
    await pool.close()


async def test_a_request_is_not_parked_for_longer_than_it_may_be():
    pool = pool_of(Engine(), iteration_tokens=10, max_parked_s=0.1)
    began = time.monotonic()
    check(await ask(pool, 3, 25), 3, 25)
    assert time.monotonic() - began >= 0.2
    assert pool.num_parked == 2
    await pool.close()

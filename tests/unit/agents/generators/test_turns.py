"""Engines that compute in turn with somebody else: requests wait meanwhile, and their clocks stand still."""

import asyncio

import pytest
from pool_engines import QUICK, Engine, ask, check, expect_failure, until, weights

from driftgym.agents.bounded import bounded
from driftgym.agents.generators.traffic import PARKED, Stopwatch
from driftgym.agents.generators.turns import TurnTakingPool


def pool_of(engine, **options):
    return TurnTakingPool([engine], policy_version=0, watch=QUICK, idle_s=3600, **options)


def start(pool, key, length=15, **options):
    return asyncio.ensure_future(ask(pool, key, length, **options))


async def waiting(pool, number):
    """`number` requests wait for a place."""
    await until(lambda: pool._parts.places.num_waiting == number)


async def test_a_turn_does_not_count_for_those_who_wait():
    """Neither for those that waited before it began, nor for those that come in it; nor for who bounds them."""
    engine = Engine(token_latency_s=0.01)
    pool = pool_of(engine, max_concurrency=1)
    first = start(pool, 1, 30)
    await until(lambda: engine.num_running == 1)
    before = start(pool, 2, timeout_s=2.0)
    await waiting(pool, 1)
    lent = asyncio.ensure_future(pool.lend_turn())
    check(await first, 1, 30)
    await lent
    assert engine.num_running == 0
    parked = Stopwatch()
    PARKED.set(parked)
    late = ask(pool, 3, 15, timeout_s=1.0)
    within = asyncio.create_task(bounded(late, limit_s=1.0, what="it", stood_still_s=lambda: parked.seconds))
    await asyncio.sleep(2.5)
    assert len(engine.requests) == 1, "nothing is begun"
    assert not before.done()
    assert not within.done()
    pool.take_turn_back(have_weights_changed=False)
    check(await before, 2, 15)
    check(await within, 3, 15)
    assert parked.seconds > 2.0
    await pool.close()


async def test_after_a_turn_the_clock_goes_on():
    engine = Engine(token_latency_s=0.01)
    pool = pool_of(engine, max_concurrency=1)
    await pool.lend_turn()
    first, second = start(pool, 1, 100), start(pool, 2, timeout_s=0.3)
    await waiting(pool, 2)
    pool.take_turn_back(have_weights_changed=False)
    await expect_failure(second, match="got no place at a generator by its deadline")
    check(await first, 1, 100)
    await pool.close()


async def test_what_is_under_way_ends_by_its_deadline_and_the_turn_begins():
    engine = Engine()
    pool = pool_of(engine)
    engine.hang()
    asked = start(pool, 1, timeout_s=0.3)
    await until(lambda: bool(pool._parts.roster.members[0].num_running))
    async with asyncio.timeout(20):
        await pool.lend_turn()
    with pytest.raises(Exception, match="r1"):
        await asked
    pool.take_turn_back(have_weights_changed=False)
    await pool.close()


async def test_changed_weights_are_waited_for_by_the_deadline():
    engine = Engine()
    pool = pool_of(engine)
    await pool.lend_turn()
    hasty, patient = start(pool, 1, timeout_s=0.3), start(pool, 2)
    await waiting(pool, 2)
    pool.take_turn_back(have_weights_changed=True)
    await expect_failure(hasty, match="by its deadline")
    assert not engine.requests
    await pool.lend_turn()
    pool.take_turn_back(have_weights_changed=False)
    assert not engine.requests, "they still have no name"
    await pool.update_weights(weights(1), mode="drain", timeout_s=5)
    completion = await patient
    check(completion, 2, 15)
    assert set(completion.policy_versions.tolist()) == {1}
    await pool.close()


async def test_weights_that_are_taken_in_a_turn_do_not_end_it():
    engine = Engine()
    pool = pool_of(engine)
    await pool.lend_turn()
    asked = start(pool, 1, timeout_s=1.0)
    await waiting(pool, 1)
    await pool.update_weights(weights(1), mode="in_flight", timeout_s=5)
    await asyncio.sleep(1.5)
    assert not engine.requests
    assert not asked.done()
    pool.take_turn_back(have_weights_changed=False)
    check(await asked, 1, 15)
    await pool.close()


async def test_who_waits_in_a_turn_can_be_aborted_cancelled_and_closed():
    pool = pool_of(Engine())
    await pool.lend_turn()
    asked = [start(pool, key) for key in range(3)]
    await waiting(pool, 3)
    await pool.abort("r0")
    assert (await asked[0]).finish_reason == "abort"
    asked[1].cancel()
    await asyncio.wait((asked[1],))
    assert asked[1].cancelled()
    await pool.close()
    await expect_failure(asked[2], match="closed")


async def test_partial_answers_keep_their_place_no_longer_than_their_slice():
    engine = Engine(token_latency_s=0.002)
    pool = pool_of(engine, chunk_tokens=5)
    asked = start(pool, 1, 60)
    await until(lambda: len(engine.requests) == 2)
    await pool.lend_turn()
    num_before = len(engine.requests)
    assert num_before < 12
    assert not asked.done()
    await asyncio.sleep(0.1)
    assert len(engine.requests) == num_before
    pool.take_turn_back(have_weights_changed=False)
    check(await asked, 1, 60)
    await pool.close()

"""Engines of a pool join, are lost, come back and leave while requests are under way."""

import asyncio
import itertools

import pytest
from pool_engines import QUICK, Engine, Events, ask, check, expect_failure, until, weights

from driftgym.agents.generators.pool import GeneratorPool
from driftgym.agents.generators.watch import WatchOptions
from driftgym.errors import GeneratorError


def pool_of(*engines, **options):
    return GeneratorPool(engines, policy_version=0, watch=options.pop("watch", QUICK), **options)


async def test_an_engine_joins_with_the_latest_weights():
    first, late = Engine(), Engine()
    events = Events()
    pool = pool_of(first, on_event=events)
    await pool.update_weights(weights(3), mode="in_flight", timeout_s=5)
    assert await pool.add(late, name="late") == "late"
    assert pool.names == ("0", "late")
    assert pool.min_version == 3
    for key in range(4):
        assert (await ask(pool, key, min_policy_version=3)).policy_versions.tolist() == [3] * 5
    assert len(late.requests) == 2
    assert events.names == ["generator_joined"]
    with pytest.raises(ValueError, match="late already"):
        await pool.add(Engine(), name="late")
    assert await pool.add(Engine()) == "1"
    await pool.close()
    assert late.is_closed


async def test_an_engine_that_cannot_join_is_closed():
    pool = pool_of(Engine())
    dead = Engine()
    dead.kill()
    with pytest.raises(GeneratorError):
        await pool.add(dead)
    other = Engine(policy_version=4)
    with pytest.raises(GeneratorError, match="nothing leads there"):
        await pool.add(other)
    assert dead.is_closed
    assert other.is_closed
    assert pool.names == ("0",)
    await pool.close()


async def test_an_engine_that_joins_a_paused_pool_is_paused():
    pool = pool_of(Engine())
    await pool.pause()
    late = Engine(token_latency_s=0.001)
    await pool.add(late)
    assert not late._goes_on.is_set()
    await pool.resume()
    for key in range(4):
        check(await ask(pool, key), key, 5)
    assert len(late.requests) == 2
    await pool.close()


async def test_an_engine_that_joins_takes_part_of_what_is_under_way():
    first = Engine(token_latency_s=0.002)
    pool = pool_of(first, chunk_tokens=5)
    asked = [asyncio.ensure_future(ask(pool, key, 100)) for key in range(40)]
    await asyncio.sleep(0.05)
    late = Engine(token_latency_s=0.002)
    await pool.add(late)
    for key, completion in enumerate(await asyncio.gather(*asked)):
        check(completion, key, 100)
    assert late.peak_running > 10
    assert pool.counts.num_retried == 0
    await pool.close()


async def test_a_drained_engine_ends_its_slices_before_it_leaves():
    first, second = Engine(token_latency_s=0.005), Engine(token_latency_s=0.005)
    events = Events()
    pool = pool_of(first, second, chunk_tokens=10, on_event=events)
    asked = [asyncio.ensure_future(ask(pool, key, 40)) for key in range(8)]
    await asyncio.sleep(0.02)
    await pool.remove("0")
    assert first.is_closed
    assert not any(task.done() for task in asked), "slices end, not whole requests"
    assert len(first.requests) == 4
    for key, completion in enumerate(await asyncio.gather(*asked)):
        check(completion, key, 40)
    assert (pool.counts.num_retried, pool.counts.num_moved, pool.names) == (0, 4, ("1",))
    assert events.names == ["generator_left"]
    with pytest.raises(KeyError, match="no generator 0; there are: 1"):
        await pool.remove("0")
    await pool.close()


async def test_an_engine_leaves_at_once_and_no_token_is_lost():
    first, second = Engine(token_latency_s=0.02), Engine(token_latency_s=0.001)
    pool = pool_of(first, second)
    asked = [asyncio.ensure_future(ask(pool, key, 200)) for key in range(8)]
    await asyncio.sleep(0.1)
    await pool.remove("0", drain=False)
    assert first.is_closed
    for key, completion in enumerate(await asyncio.gather(*asked)):
        check(completion, key, 200)
    assert (pool.counts.num_retried, pool.counts.num_moved) == (0, 4)
    assert all(len(request.prompt_token_ids) > 2 for request in second.requests[4:])
    await pool.close()


async def test_an_engine_that_does_not_drain_in_time_is_cut_off():
    first, second = Engine(token_latency_s=0.002), Engine(token_latency_s=0.002)
    pool = pool_of(first, second, watch=WatchOptions())
    asked = [asyncio.ensure_future(ask(pool, key, 20)) for key in range(4)]
    await asyncio.sleep(0.01)
    first.hang()
    await pool.remove("0", timeout_s=0.1)
    for key, completion in enumerate(await asyncio.gather(*asked)):
        check(completion, key, 20)
    assert pool.counts.num_retried == 2
    await pool.close()


async def test_the_last_engine_leaves():
    pool = pool_of(Engine())
    await pool.remove("0")
    await expect_failure(ask(pool), match="no generator is left")
    await pool.add(Engine())
    check(await ask(pool), 1, 5)
    await pool.close()


async def test_a_miss_takes_no_engine_out_and_an_answer_lets_none_in():
    """Hysteresis, without a request: two misses take it out, two answers let it in."""

    class Flaky(Engine):
        is_there = True

        async def health(self):
            self.num_looks += 1
            if not self.is_there:
                raise GeneratorError("no answer")
            return await super().health()

        async def load(self):
            await self.health()
            return await super().load()

    flaky = Flaky()
    events = Events()
    pool = pool_of(flaky, Engine(), on_event=events)
    check(await ask(pool), 1, 5)
    for _ in range(3):
        flaky.is_there, seen = False, flaky.num_looks
        await until(lambda: flaky.num_looks > seen)  # noqa: B023  # awaited at once
        flaky.is_there, seen = True, flaky.num_looks
        await until(lambda: flaky.num_looks > seen)  # noqa: B023
    assert events.names == []
    flaky.is_there = False
    await until(lambda: events.names == ["generator_lost"])
    assert pool.names == ("1",)
    flaky.is_there = True
    await until(lambda: len(events.names) == 2)
    assert events.names == ["generator_lost", "generator_returned"]
    assert pool.names == ("0", "1")
    await pool.close()


async def test_an_engine_that_was_started_anew_gets_the_weights_before_it_gets_requests():
    """It died and came back between two looks, with the weights of its start: its own report tells."""
    first, second = Engine(), Engine()
    events = Events()
    pool = pool_of(first, second, on_event=events)
    await pool.update_weights(weights(2), mode="in_flight", timeout_s=5)
    first.revive(policy_version=0)
    await until(lambda: "generator_returned" in events.names)
    assert events.names == ["generator_behind", "generator_returned"]
    for key in range(6):
        assert (await ask(pool, key)).policy_versions.tolist() == [2] * 5
    await pool.close()


async def test_a_lost_engine_comes_back_with_the_weights_that_it_missed():
    first, second = Engine(), Engine()
    events = Events()
    pool = pool_of(first, second, on_event=events)
    first.kill()
    check(await ask(pool), 1, 5)
    await until(lambda: pool.names == ("1",))
    await pool.update_weights(weights(1), mode="in_flight", timeout_s=5)
    await pool.update_weights(weights(2), mode="in_flight", timeout_s=5)
    assert pool.min_version == 2
    first.revive()
    await until(lambda: pool.names == ("0", "1"))
    for key in range(6):
        assert (await ask(pool, key)).policy_versions.tolist() == [2] * 5
    assert events.names == ["generator_lost", "generator_returned"]
    await pool.close()


async def test_a_dead_engine_is_never_reported_well():
    """Case H2: whatever the time since its death, it adds nothing to the pool's health."""
    first, second = Engine(), Engine()
    pool = pool_of(first, second, watch=WatchOptions(interval_s=3600))
    first.kill()
    second.kill()
    with pytest.raises(GeneratorError):
        await pool.health()
    second.revive()
    assert (await pool.health()).num_running == 0
    await pool.close()


async def test_score_asks_another_engine_when_one_fails():
    first, second = Engine(), Engine()
    pool = pool_of(first, second)
    first.kill()
    scores = await pool.score([1, 2, 3], num_given=1, deadline_s=1e9)
    assert len(scores.logprobs) == 2
    second.kill()
    with pytest.raises(GeneratorError):
        await pool.score([1, 2, 3], num_given=1, deadline_s=1e9)
    await pool.close()


async def test_busy_seconds_never_go_back_when_engines_come_and_go():
    first, second = Engine(token_latency_s=0.005), Engine(token_latency_s=0.005)
    pool = pool_of(first, second)
    seen = [0.0]
    for key in range(4):
        await asyncio.gather(ask(pool, 2 * key), ask(pool, 2 * key + 1))
        seen.append((await pool.health()).busy_s)
        if key == 1:
            await pool.remove("0")
        if key == 2:
            await pool.add(Engine(token_latency_s=0.005))
    assert all(later > earlier for earlier, later in itertools.pairwise(seen))
    await pool.close()

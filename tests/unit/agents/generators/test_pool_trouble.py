"""A pool in trouble: engines that answer errors at once, calls that are broken off, and what comes together."""

import asyncio
import time

import pytest
from pool_engines import QUICK, Engine, Events, ask, check, expect_failure, until, weights
from stub_engine import StubEngine
from stub_engine import weights as stub_weights

from driftgym.agents.generators.pool import GeneratorPool
from driftgym.agents.generators.watch import WatchOptions
from driftgym.errors import GeneratorError


class Refusing(Engine):
    """Says that it is well, and refuses every request at once while `refuses`."""

    def __init__(self, **options):
        super().__init__(**options)
        self.num_refused = 0
        self.refuses = True

    async def generate(self, *arguments, **options):
        if self.refuses:
            self.num_refused += 1
            raise GeneratorError("out of memory")
        return await super().generate(*arguments, **options)


def pool_of(*engines, **options):
    return GeneratorPool(engines, policy_version=0, watch=QUICK, **options)


async def ask_again_and_again(pool, *, name, seconds):
    """Episodes that are begun anew whenever they fail; returns how many failed."""
    ends_s, num_failed = time.monotonic() + seconds, 0
    while time.monotonic() < ends_s:
        try:
            await ask(pool, name, 5)
        except GeneratorError:
            num_failed += 1
    return num_failed


async def test_an_engine_that_refuses_all_is_not_asked_without_pause():
    refusing = Refusing()
    pool = pool_of(refusing)
    await asyncio.gather(*(ask_again_and_again(pool, name=key, seconds=1.5) for key in range(20)))
    assert refusing.num_refused < 200
    refusing.refuses = False
    check(await ask(pool, 50), 50, 5)
    await pool.close()


async def test_an_engine_that_refuses_all_is_asked_now_and_then_when_another_one_answers():
    """And takes part again when it refuses no more."""
    refusing, well = Refusing(), Engine(token_latency_s=0.0005)
    pool = pool_of(refusing, well, chunk_tokens=2)
    asked = [ask(pool, key, 60) for key in range(30)]
    for key, completion in enumerate(await asyncio.gather(*asked)):
        check(completion, key, 60)
    assert len(well.requests) == 900
    assert refusing.num_refused < 60
    refusing.refuses = False
    await until(lambda: not pool._parts.roster.members[0].is_doubted)
    for key in range(50, 60):
        check(await ask(pool, key), key, 5)
    assert refusing.requests
    await pool.close()


async def test_nothing_is_parked_when_the_pool_is_closed():
    """A slice that ends while the pool is being closed leaves a request that wants to be parked."""

    class Last(Engine):
        async def close(self):
            await asyncio.sleep(0.3)
            await super().close()

    pool = pool_of(Last(token_latency_s=0.02), chunk_tokens=5, iteration_tokens=5)
    asked = asyncio.ensure_future(ask(pool, 1, 50))
    await asyncio.sleep(0.05)
    closing = asyncio.create_task(pool.close())
    async with asyncio.timeout(5):
        await expect_failure(asked, match="closed")
        await closing


async def test_an_abort_that_comes_together_with_a_place():
    engine = Engine(token_latency_s=0.01)
    pool = pool_of(engine, max_concurrency=1)
    first = asyncio.ensure_future(ask(pool, 1, 3))
    second = asyncio.ensure_future(ask(pool, 2, 100))
    await until(lambda: pool._parts.places.num_waiting == 1)
    first.add_done_callback(lambda _: None)
    while pool._parts.places.num_waiting:  # noqa: ASYNC110  # to be there in the same turn of the loop
        await asyncio.sleep(0)
    await pool.abort("r2")
    completion = await second
    assert completion.finish_reason == "abort"
    assert len(completion.token_ids) < 20
    check(await first, 1, 3)
    await pool.close()


async def test_an_answer_that_is_whole_was_not_aborted():
    """An engine that ends a slice by itself, after its last token."""

    class Late(Engine):
        async def generate(self, *arguments, **options):
            completion = await super().generate(*arguments, **options)
            object.__setattr__(completion, "finish_reason", "abort")
            return completion

    pool = pool_of(Late())
    assert (await ask(pool, 1, 50, max_tokens=7)).finish_reason == "length"
    await pool.close()


async def test_a_broken_off_removal_is_told():
    events = Events()
    engine = Engine(token_latency_s=0.05)
    pool = pool_of(engine, max_concurrency=1, on_event=events)
    asked = asyncio.ensure_future(ask(pool, 1, 50))
    waiting = asyncio.ensure_future(ask(pool, 2, 50))
    await asyncio.sleep(0.05)
    removing = asyncio.create_task(pool.remove("0"))
    await asyncio.sleep(0.05)
    removing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await removing
    async with asyncio.timeout(5):
        await expect_failure(asked, match="gone|taken from")
        await expect_failure(waiting, match="no generator is left")
    assert events.names == ["generator_left"]
    assert engine.is_closed
    await pool.close()


async def test_a_broken_off_pause_leaves_nothing_paused():
    class Slow(Engine):
        async def pause(self):
            await super().pause()
            await asyncio.sleep(3600)

    engines = [Slow(), Engine()]
    pool = pool_of(*engines)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await pool.pause()
    for key in range(4):
        check(await ask(pool, key), key, 5)
    assert all(engine.requests for engine in engines)
    await pool.close()


async def test_a_resume_that_finds_no_engine_holds_nobody_back():
    engine = Engine()
    pool = pool_of(engine)
    await pool.pause()
    await pool.remove("0")
    with pytest.raises(GeneratorError, match="no generator is left"):
        await pool.resume()
    await pool.add(Engine())
    check(await ask(pool, 1), 1, 5)
    await pool.close()


async def test_a_pool_that_is_closed_starts_nothing():
    pool = pool_of(Engine())
    await pool.close()
    tasks = asyncio.all_tasks()
    await expect_failure(ask(pool, 1), match="closed")
    assert asyncio.all_tasks() == tasks


async def test_an_update_that_cannot_be_leaves_the_pool_as_it_was():
    pool = pool_of(Engine())
    with pytest.raises(ValueError, match="keep_kv"):
        await pool.update_weights(weights(1), mode="drain", keep_kv=True, timeout_s=5)
    assert pool.latest_update is None
    await pool.add(Engine())
    await pool.close()


async def test_an_error_that_was_overcome_is_not_the_reason_of_a_later_one():
    engine = Engine(token_latency_s=0.01)
    pool = pool_of(engine, Engine(token_latency_s=0.01), chunk_tokens=5)
    engine.fail_next()
    asked = asyncio.ensure_future(ask(pool, 1, 50, timeout_s=0.5))
    await asyncio.sleep(0.1)
    await pool.pause()
    await expect_failure(asked, match="deadline")
    await pool.close()


async def test_many_that_are_aborted_at_once_keep_their_tokens():
    """However long it takes an engine to be told of one request."""

    class Busy(Engine):
        telling = asyncio.Semaphore(8)

        async def abort(self, request_id=None):
            async with self.telling:
                await asyncio.sleep(0.1)
                await super().abort(request_id)

    engine = Busy(token_latency_s=0.01)
    pool = pool_of(engine)
    asked = [asyncio.ensure_future(ask(pool, key, 2000)) for key in range(400)]
    await asyncio.sleep(0.3)
    await pool.abort()
    completions = await asyncio.gather(*asked)
    assert all(completion.finish_reason == "abort" for completion in completions)
    assert all(len(completion.token_ids) for completion in completions)
    await pool.close()


async def test_scoring_ends_at_its_deadline():
    class Hung(Engine):
        num_scored = 0

        async def score(self, token_ids, *, num_given, deadline_s):
            self.num_scored += 1
            await asyncio.sleep(max(0.0, deadline_s - time.monotonic()))
            raise GeneratorError("no answer by its deadline")

    engines = [Hung() for _ in range(3)]
    pool = pool_of(*engines)
    with pytest.raises(GeneratorError, match="deadline"):
        await pool.score([1, 2, 3], num_given=1, deadline_s=time.monotonic() + 0.1)
    assert sum(engine.num_scored for engine in engines) == 1
    await pool.close()


def stub_pool(client, **options):
    watch = WatchOptions(interval_s=0.05, timeout_s=1.0, num_failures_out=2, num_successes_in=2)
    return GeneratorPool([client], policy_version=3, watch=watch, **options)


def ask_stub(pool, *, timeout_s=5.0):
    return ask(pool, 1, 5, timeout_s=timeout_s)


async def test_an_update_that_is_broken_off_is_made_up_for():
    stub = StubEngine()
    async with stub.client() as client:
        pool = stub_pool(client)
        stub.update_s = 0.3
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await pool.update_weights(stub_weights(4), mode="in_flight", timeout_s=10)
        stub.update_s = 0.0
        await ask_stub(pool)
        assert stub.version == "1:4"
        await pool.close()


async def test_an_update_that_succeeded_though_nobody_heard_of_it():
    """The engine has the weights; whether it has all of them, nobody knows, so it is given them again."""
    stub = StubEngine()
    async with stub.client() as client:
        pool = stub_pool(client)
        stub.update = (500, {"message": "the answer was lost"})
        with pytest.raises(GeneratorError):
            await pool.update_weights(stub_weights(4), mode="in_flight", timeout_s=0.5)
        stub.version, stub.update = "1:4", (200, {"success": True})
        await ask_stub(pool)
        await pool.close()


@pytest.mark.parametrize("foreign", ["2:4", "1:9", "0:4"])
async def test_an_engine_that_somebody_else_gave_weights_gets_its_own_again(foreign):
    events = Events()
    stub = StubEngine()
    async with stub.client() as client:
        pool = stub_pool(client, on_event=events)
        await pool.update_weights(stub_weights(4), mode="in_flight", timeout_s=5)
        stub.version = foreign
        await until(lambda: stub.version == "1:4")
        await until(lambda: bool(pool.names))
        assert events.names == ["generator_behind", "generator_returned"]
        await ask_stub(pool)
        await pool.close()


async def test_all_at_once():
    """Updates, pauses, parking, and engines that come, go and die, at once: every answer is whole, nothing hangs."""
    engines = [Engine(token_latency_s=0.001) for _ in range(3)]
    pool = pool_of(*engines, chunk_tokens=7, iteration_tokens=20, max_concurrency=4, idle_s=0.05)

    async def disturb():
        for version in range(1, 6):
            await pool.pause()
            update = asyncio.create_task(
                pool.update_weights(weights(version), mode=("in_flight", "abort_resume")[version % 2], timeout_s=10)
            )
            await asyncio.sleep(0.01)
            name = await pool.add(Engine(token_latency_s=0.001))
            await pool.resume()
            await asyncio.gather(update, pool.remove(name, drain=bool(version % 2)))
            pool.next_iteration()
            engines[version % 3].kill()
            await asyncio.sleep(0.3)
            engines[version % 3].revive()

    asked = [asyncio.ensure_future(ask(pool, key, 20 + key)) for key in range(40)]
    async with asyncio.timeout(30):
        await disturb()
        for key, completion in enumerate(await asyncio.gather(*asked)):
            check(completion, key, 20 + key)
        await until(lambda: len(pool.names) == 3)
    assert pool._parts.places.is_idle
    assert not pool._parts.parking.num_waiting
    assert all(member.num_bound == 0 for member in pool._parts.roster.members)
    await pool.close()

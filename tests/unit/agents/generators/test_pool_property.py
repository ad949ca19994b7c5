"""Whatever happens to the engines, each request gets exactly its answer, or ends by its deadline."""

import asyncio
import contextlib
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pool_engines import QUICK, Engine, answer, ask, weights

from driftgym.agents.generators.pool import GeneratorPool
from driftgym.errors import GeneratorError

MODES = ("drain", "abort_resume", "in_flight")
EVENTS = st.one_of(
    st.tuples(st.sampled_from(["kill", "hang", "revive", "abort_all", "remove", "remove_at_once"]), st.integers(0, 5)),
    st.tuples(st.just("abort"), st.integers(0, 11)),
    st.tuples(st.just("fail"), st.integers(0, 5)),
    st.tuples(st.sampled_from(["join", "next_iteration", "pause"]), st.just(0)),
    st.tuples(st.just("update"), st.sampled_from(MODES)),
)
REQUEST_S = 6.0


class World:
    """A pool, its engines, and what was done to them."""

    def __init__(self, *, num_engines, **options):
        self.engines = [Engine(token_latency_s=0.001) for _ in range(num_engines)]
        self.pool = GeneratorPool(self.engines, policy_version=0, watch=QUICK, idle_s=0.05, **options)
        self.version = 0
        self.aborted = set()
        self.tasks = []

    async def do(self, name, argument):
        engine = self.engines[argument % len(self.engines)] if isinstance(argument, int) else None
        if name == "kill":
            engine.kill()
        elif name == "hang" and not engine._is_dead:
            engine.hang()
        elif name == "revive" and not engine.is_closed:
            engine.revive()
        elif name == "fail":
            engine.fail_next(2)
        elif name == "next_iteration":
            self.pool.next_iteration()
        else:
            await self._do_slowly(name, argument)

    async def _do_slowly(self, name, argument):
        with contextlib.suppress(GeneratorError, KeyError):
            if name == "join":
                self.engines.append(Engine(token_latency_s=0.001))
                await self.pool.add(self.engines[-1])
            elif name == "pause":
                await self.pool.pause()
                await asyncio.sleep(0.01)
                await self.pool.resume()
            elif name == "abort":
                self.aborted.add(argument)
                await self.pool.abort(f"r{argument}")
            elif name == "abort_all":
                self.aborted.update(range(12))
                await self.pool.abort()
            elif name.startswith("remove"):
                await self.pool.remove(str(argument), drain=name == "remove", timeout_s=0.2)
            elif name == "update":
                self.version += 1
                await self.pool.update_weights(weights(self.version), mode=argument, timeout_s=0.5)


async def play(world, lengths, events):
    began = time.monotonic()
    asked = [asyncio.ensure_future(ask(world.pool, k, n, timeout_s=REQUEST_S)) for k, n in enumerate(lengths)]
    doing = []
    for name, argument in events:
        await asyncio.sleep(0.004)
        doing.append(asyncio.create_task(world.do(name, argument)))
    for engine in world.engines:
        if not engine.is_closed:
            engine.revive()
    results = await asyncio.gather(*asked, return_exceptions=True)
    # A request that was parked may take longer: by as long as it was.
    assert time.monotonic() - began < 2 * REQUEST_S + 5
    await asyncio.gather(*doing)
    return results


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    events=st.lists(EVENTS, max_size=10),
    num_engines=st.integers(1, 4),
    chunk_tokens=st.one_of(st.none(), st.integers(1, 12)),
    iteration_tokens=st.one_of(st.none(), st.integers(5, 30)),
    max_concurrency=st.one_of(st.none(), st.integers(1, 4)),
    max_paused_share=st.sampled_from([0.3, 0.5, 1.0]),
)
def test_each_request_gets_exactly_its_answer(lengths, events, **options):
    async def run():
        world = World(**options)
        try:
            results = await play(world, lengths, events)
            members = list(world.pool._parts.roster.members)
            assert all(member.num_running == member.num_bound == 0 for member in members)
        finally:
            await world.pool.close()
        assert all(engine.num_running == 0 for engine in world.engines if not engine._is_hung)
        return world, results

    world, results = asyncio.run(run())
    for key, (length, result) in enumerate(zip(lengths, results, strict=True)):
        if isinstance(result, GeneratorError):
            continue  # refused by all, or the deadline passed
        assert not isinstance(result, BaseException), result
        written = result.token_ids.tolist()
        if result.finish_reason == "abort":
            assert key in world.aborted
            assert written == answer(key, length)[: len(written)]
        else:
            assert result.finish_reason == "stop"
            assert written == answer(key, length)
        assert len(result.logprobs) == len(written)
        assert np.isin(result.policy_versions, range(world.version + 1)).all()

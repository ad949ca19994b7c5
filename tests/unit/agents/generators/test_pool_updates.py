"""New weights for a pool: a share at once, the modes, and engines that miss an update."""

import asyncio

import numpy as np
import pytest
from pool_engines import QUICK, Engine, Events, ask, check, until, weights

from driftgym.agents.generators.pool import GeneratorPool
from driftgym.errors import GeneratorError
from driftgym.types import WeightUpdate


class Slow(Engine):
    """Takes its time with weights, and counts who does so at once; refuses as often as it was told."""

    def __init__(self, log, *, update_s=0.05, num_refusals=0, **options):
        super().__init__(**options)
        self.log = log
        self.update_s = update_s
        self.num_refusals = num_refusals
        self.taken = []

    async def update_weights(self, update, *, mode, keep_kv=False, timeout_s):
        if self.num_refusals:
            self.num_refusals -= 1
            raise GeneratorError("refused as it was told")
        self.log.append(1)
        try:
            await asyncio.sleep(self.update_s)
            await super().update_weights(update, mode=mode, keep_kv=keep_kv, timeout_s=timeout_s)
        finally:
            self.log.append(-1)
        self.taken.append((update.kind, update.policy_version, mode, keep_kv))


def pool_of(*engines, **options):
    return GeneratorPool(engines, policy_version=0, watch=QUICK, **options)


def peak(log):
    return int(np.cumsum(log).max())


@pytest.mark.parametrize(("share", "num_engines", "expected"), [(0.5, 4, 2), (0.1, 3, 1), (1.0, 4, 4), (0.5, 3, 1)])
async def test_no_more_than_a_share_is_given_weights_at_once(share, num_engines, expected):
    log = []
    pool = pool_of(*(Slow(log) for _ in range(num_engines)), max_paused_share=share)
    await pool.update_weights(weights(1), mode="in_flight", timeout_s=10)
    assert peak(log) == expected
    assert sum(log) == 0
    assert pool.min_version == 1
    await pool.close()


async def test_requests_go_to_the_others_meanwhile():
    log = []
    engines = [Slow(log, update_s=0.15, token_latency_s=0.001) for _ in range(2)]
    pool = pool_of(*engines, max_paused_share=0.5)
    updating = asyncio.create_task(pool.update_weights(weights(1), mode="in_flight", timeout_s=10))
    await asyncio.sleep(0.05)
    for key in range(4):
        check(await ask(pool, key), key, 5)
    assert not updating.done()
    assert sorted(len(engine.requests) for engine in engines) == [0, 4]
    await updating
    await pool.close()


@pytest.mark.parametrize("chunk_tokens", [None, 5])
async def test_drain_ends_requests_with_the_weights_that_they_began_with(chunk_tokens):
    """All slices of a request that has begun; new ones wait, or go where the new weights are."""
    log = []
    pool = pool_of(*(Slow(log, token_latency_s=0.005) for _ in range(2)), chunk_tokens=chunk_tokens)
    asked = [asyncio.ensure_future(ask(pool, key, 30)) for key in range(6)]
    await asyncio.sleep(0.05)
    updating = asyncio.create_task(pool.update_weights(weights(1), mode="drain", timeout_s=10))
    await asyncio.sleep(0.02)
    late = [asyncio.ensure_future(ask(pool, key, 30)) for key in range(6, 9)]
    await updating
    for key, completion in enumerate(await asyncio.gather(*asked, *late)):
        check(completion, key, 30)
        assert set(completion.policy_versions.tolist()) == ({0} if key < 6 else {1})
    await pool.close()


@pytest.mark.parametrize("mode", ["abort_resume", "in_flight"])
async def test_requests_go_on_with_the_new_weights(mode):
    log = []
    pool = pool_of(*(Slow(log, token_latency_s=0.005) for _ in range(2)), chunk_tokens=20)
    asked = [asyncio.ensure_future(ask(pool, key, 50)) for key in range(6)]
    await asyncio.sleep(0.05)
    await pool.update_weights(weights(1), mode=mode, timeout_s=10)
    for key, completion in enumerate(await asyncio.gather(*asked)):
        check(completion, key, 50)
        assert (np.diff(completion.policy_versions) >= 0).all()
        assert set(completion.policy_versions.tolist()) == {0, 1}
    assert pool.counts.num_retried == 0
    await pool.close()


async def test_an_engine_that_refuses_is_out_until_it_has_caught_up():
    log = []
    events = Events()
    refusing, well = Slow(log, num_refusals=2), Slow(log)
    pool = pool_of(refusing, well, on_event=events)
    await pool.update_weights(weights(1), mode="in_flight", keep_kv=True, timeout_s=5)
    assert pool.names == ("1",)
    assert pool.min_version == 1
    assert events.names == ["generator_behind"]
    assert "refused as it was told" in events.texts[0]
    for key in range(4):
        assert (await ask(pool, key)).policy_versions.tolist() == [1] * 5
    assert not refusing.requests
    await until(lambda: pool.names == ("0", "1"))
    assert events.names == ["generator_behind", "generator_returned"]
    assert well.taken == [("full", 1, "in_flight", True)]
    assert refusing.taken == [("full", 1, "in_flight", False)]
    await pool.close()


async def test_an_engine_that_hangs_leaves_the_others_their_time():
    log = []
    hanging = Slow(log, update_s=3600)
    others = [Slow(log), Slow(log)]
    events = Events()
    pool = pool_of(hanging, *others, max_paused_share=0.34, on_event=events)
    await pool.update_weights(weights(1), mode="in_flight", timeout_s=1.5)
    assert pool.names == ("1", "2")
    assert events.names == ["generator_behind"]
    assert "not taken in time" in events.texts[0]
    await pool.close()


async def test_an_engine_that_does_not_drain_in_time_is_behind():
    log = []
    engines = [Slow(log, token_latency_s=0.05), Slow(log)]
    pool = pool_of(*engines)
    asked = asyncio.ensure_future(ask(pool, 3, 20))
    await asyncio.sleep(0.02)
    await pool.update_weights(weights(1), mode="drain", timeout_s=0.3)
    assert pool.names == ("1",)
    check(await asked, 3, 20)
    await until(lambda: pool.names == ("0", "1"))
    await pool.close()


async def test_none_takes_the_weights():
    log = []
    engines = [Slow(log, num_refusals=1000) for _ in range(2)]
    pool = pool_of(*engines)
    with pytest.raises(GeneratorError, match=r"no generator has weights 1 in time \(0: refused"):
        await pool.update_weights(weights(1), mode="in_flight", timeout_s=0.5)
    for engine in engines:
        engine.num_refusals = 0
    await until(lambda: len(pool.names) == 2)
    assert (await ask(pool)).policy_versions.tolist() == [1] * 5
    await pool.close()


def delta(version, base):
    return WeightUpdate(
        policy_version=version,
        incarnation=0,
        location="/w",
        checksum="sha256:0",
        kind="delta",
        base_policy_version=base,
    )


async def test_an_engine_that_missed_a_delta_gets_all_that_lead_to_the_latest():
    log = []
    first, second = Slow(log), Slow(log)
    pool = pool_of(first, second, came_with=weights(0))
    assert pool.latest_full == weights(0)
    await pool.update_weights(delta(1, 0), mode="in_flight", timeout_s=5)
    second.kill()
    await until(lambda: pool.names == ("0",), timeout_s=5)
    await pool.update_weights(delta(2, 1), mode="in_flight", timeout_s=5)
    await pool.update_weights(delta(3, 2), mode="in_flight", timeout_s=5)
    second.revive(policy_version=1)
    await until(lambda: pool.names == ("0", "1"))
    assert [taken[:2] for taken in second.taken] == [("delta", 1), ("delta", 2), ("delta", 3)]
    late = Slow(log, policy_version=7)
    await pool.add(late)
    assert [taken[:2] for taken in late.taken] == [("full", 0), ("delta", 1), ("delta", 2), ("delta", 3)]
    assert pool.latest_update == delta(3, 2)
    assert pool.latest_full == weights(0)
    await pool.close()


async def test_updates_follow_one_another():
    log = []
    pool = pool_of(Slow(log), Slow(log))
    await asyncio.gather(*(pool.update_weights(weights(v), mode="in_flight", timeout_s=5) for v in (1, 2, 3)))
    assert peak(log) == 2
    assert pool.min_version == 3
    await pool.close()

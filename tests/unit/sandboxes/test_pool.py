"""The pool of boxes: order, bounds, leases, dirty boxes, failing starts, and cancellation at every point."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from fake_boxes import FakeBox, FakeYard
from hypothesis import given, settings
from hypothesis import strategies as st

from driftgym.errors import ConfigError, SandboxError
from driftgym.sandboxes.base import MIB, PoolConfig, SandboxSpec
from driftgym.sandboxes.pool import SandboxPool, reuse_of
from driftgym.sandboxes.pool_box import PooledSandbox

SPEC = SandboxSpec()
WRITABLE = SandboxSpec(read_only_root=False)
OTHER = SandboxSpec(image="other")
MakePool = Callable[..., SandboxPool]


@pytest.fixture
def yard() -> FakeYard:
    return FakeYard()


@pytest_asyncio.fixture
async def make_pool(yard: FakeYard) -> AsyncIterator[MakePool]:
    pools: list[SandboxPool] = []

    def make(*, max_concurrent_starts: int = 4, **config: Any) -> SandboxPool:
        pool = SandboxPool(yard, PoolConfig(**{"num_warm": 0, **config}), max_concurrent_starts=max_concurrent_starts)
        pools.append(pool)
        return pool

    yield make
    yard.release()
    for pool in pools:
        await pool.close()
    assert yard.live == []
    assert yard.num_starting == 0
    assert all(pool.stats.num_boxes == 0 and pool.stats.memory_bytes == 0 for pool in pools)
    assert len(asyncio.all_tasks()) == 1


async def acquire(pool: SandboxPool, spec: SandboxSpec = SPEC, *, timeout_s: float = 20.0) -> PooledSandbox:
    return await pool.start(spec, timeout_s=timeout_s)


def acquire_later(pool: SandboxPool, spec: SandboxSpec = SPEC) -> "asyncio.Task[PooledSandbox]":
    return asyncio.ensure_future(acquire(pool, spec))


async def settle(num_passes: int = 20) -> None:
    for _ in range(num_passes):
        await asyncio.sleep(0)


# --- boxes kept ready


async def test_boxes_are_started_ahead_and_handed_out(make_pool: MakePool, yard: FakeYard) -> None:
    pool = make_pool(num_warm=2)
    first = await acquire(pool)
    await settle()
    assert (pool.kind, pool.stats.num_warm, pool.stats.num_leased, pool.stats.num_started) == ("fake", 2, 1, 3)
    yard.hold("start")
    second, third = await acquire(pool), await acquire(pool)
    assert len({first.sandbox_id, second.sandbox_id, third.sandbox_id}) == 3


async def test_nothing_is_started_before_the_first_request(make_pool: MakePool, yard: FakeYard) -> None:
    make_pool(num_warm=2)
    await settle()
    assert yard.num_starts == 0


async def test_starts_at_once_are_limited(make_pool: MakePool, yard: FakeYard) -> None:
    pool = make_pool(max_concurrent_starts=3)
    gate = yard.hold("start")
    requests = [acquire_later(pool) for _ in range(10)]
    await settle()
    assert yard.num_starting == pool.stats.num_starting == 3
    gate.set()
    await asyncio.gather(*requests)
    assert yard.most_starting == 3


async def test_a_box_that_died_while_it_was_ready_is_never_seen(make_pool: MakePool, yard: FakeYard) -> None:
    pool = make_pool(num_warm=2)
    await acquire(pool)
    await settle()
    dead = list(yard.boxes[1:])
    for box in dead:
        box.is_dead = True
    lease = await acquire(pool)
    await lease.exec("true")
    assert pool.stats.num_unhealthy == 2
    await settle()
    assert all(box not in yard.live for box in dead)


async def test_boxes_of_kinds_long_out_of_use_are_removed(make_pool: MakePool, yard: FakeYard) -> None:
    pool = make_pool(num_warm=1)
    for number in range(12):
        lease = await acquire(pool, SandboxSpec(image=f"image-{number}"))
        await settle()
        await lease.close()
        await settle()
    assert 0 < pool.stats.num_warm <= 2 * 5
    assert {box.spec.image for box in yard.live} <= {f"image-{number}" for number in range(7, 12)}


# --- two ways back into service


async def test_reset_reuses_the_box_and_empties_it(make_pool: MakePool, yard: FakeYard) -> None:
    pool = make_pool(max_boxes=1)
    lease = await acquire(pool)
    await lease.write_file("/work/secret", b"x")
    await lease.close()
    again = await acquire(pool)
    assert (again.sandbox_id, again.reuse) == (lease.sandbox_id, "reset")
    with pytest.raises(FileNotFoundError):
        await again.read_file("/work/secret")
    assert (pool.stats.num_started, pool.stats.num_reused) == (1, 1)


async def test_fresh_never_hands_out_a_box_twice(make_pool: MakePool, yard: FakeYard) -> None:
    pool = make_pool(reuse="fresh", max_boxes=2)
    seen = set()
    for _ in range(5):
        lease = await acquire(pool)
        seen.add(lease.sandbox_id)
        await lease.reset()
        seen.add(lease.sandbox_id)
        await lease.exec("true")
        await lease.close()
    assert len(seen) == 10
    assert all(box.num_resets == 0 for box in yard.boxes)


async def test_auto_takes_fresh_where_a_reset_cannot_be(make_pool: MakePool) -> None:
    assert reuse_of(SPEC, PoolConfig()) == "reset"
    assert reuse_of(WRITABLE, PoolConfig()) == "fresh"
    assert reuse_of(SandboxSpec(run_as_root=True), PoolConfig()) == "fresh"
    assert reuse_of(SandboxSpec(runtime="runsc"), PoolConfig()) == "fresh"
    assert reuse_of(SandboxSpec(runtime="runsc"), PoolConfig(reuse="reset")) == "reset"
    assert (await acquire(make_pool(), WRITABLE)).reuse == "fresh"
    with pytest.raises(ConfigError, match=r"sandbox\.pool\.reuse.*read_only_root"):
        await acquire(make_pool(reuse="reset"), WRITABLE)
    with pytest.raises(ConfigError, match="run_as_root"):
        reuse_of(SandboxSpec(run_as_root=True), PoolConfig(reuse="reset"))


async def test_box_that_does_not_come_back_clean_is_replaced(make_pool: MakePool, yard: FakeYard) -> None:
    pool = make_pool()
    lease = await acquire(pool)
    first = lease.sandbox_id
    yard.boxes[0].fails_reset = True
    await lease.reset()
    assert lease.sandbox_id != first
    await lease.exec("true")
    yard.boxes[1].fails_reset = True
    await lease.close()
    await settle()
    assert yard.live == []
    assert pool.stats.num_reused == 0


async def test_reset_that_keeps_files_keeps_the_box(make_pool: MakePool) -> None:
    for reuse in ("fresh", "reset"):
        lease = await acquire(make_pool(reuse=reuse))
        await lease.write_file("/work/answer", b"41")
        first = lease.sandbox_id
        await lease.reset(keep_files=True)
        assert (await lease.read_file("/work/answer"), lease.sandbox_id) == (b"41", first)


async def test_release_does_not_wait(make_pool: MakePool, yard: FakeYard) -> None:
    yard.hold("reset")
    yard.hold("close")
    for reuse in ("fresh", "reset"):
        lease = await acquire(make_pool(reuse=reuse))
        await lease.close()
        await lease.close()
        assert lease.is_closed
        with pytest.raises(SandboxError, match="given back"):
            await lease.exec("true")


# --- dirty boxes


async def test_box_whose_call_failed_is_not_handed_out_again(make_pool: MakePool, yard: FakeYard) -> None:
    pool = make_pool()
    lease = await acquire(pool)
    with pytest.raises(SandboxError, match="No such file"):
        await lease.spawn(["no-such-program"])
    await lease.exec("true")  # its holder goes on with it
    await lease.close()
    await settle()
    assert yard.live == []
    assert pool.stats.num_discarded == 1


async def test_box_whose_call_was_cancelled_is_not_handed_out_again(make_pool: MakePool, yard: FakeYard) -> None:
    pool = make_pool()
    lease = await acquire(pool)
    yard.hold("exec")
    call = asyncio.ensure_future(lease.exec("true"))
    await settle()
    call.cancel()
    await asyncio.wait([call])
    await lease.close()
    await settle()
    assert yard.live == []


async def test_call_that_is_under_way_ends_with_the_lease(make_pool: MakePool, yard: FakeYard) -> None:
    pool = make_pool()
    lease = await acquire(pool)
    gate = yard.hold("exec")
    call = asyncio.ensure_future(lease.exec("true"))
    await settle()
    await lease.close()
    gate.set()
    with pytest.raises(SandboxError, match="given back"):
        await call
    await settle()
    assert yard.live == []  # what the call did may have come after the cleaning


async def test_call_that_is_under_way_at_a_reset_means_another_box(make_pool: MakePool, yard: FakeYard) -> None:
    lease = await acquire(make_pool())
    gate = yard.hold("exec")
    call = asyncio.ensure_future(lease.exec("true"))
    await settle()
    first = lease.sandbox_id
    await lease.reset()
    assert lease.sandbox_id != first
    gate.set()
    with pytest.raises(SandboxError):
        await call


async def test_nothing_is_done_in_a_box_that_is_being_cleaned(make_pool: MakePool, yard: FakeYard) -> None:
    lease = await acquire(make_pool())
    gate = yard.hold("reset")
    reset = asyncio.ensure_future(lease.reset())
    await settle()
    with pytest.raises(SandboxError, match="reset goes on"):
        await lease.exec("true")
    gate.set()
    await reset
    await lease.exec("true")


async def test_process_ends_with_the_lease_and_its_end_is_not_the_boxs(make_pool: MakePool, yard: FakeYard) -> None:
    pool = make_pool(max_boxes=1)
    lease = await acquire(pool)
    process = await lease.spawn(["cat"])
    assert (await process.ask("hi", timeout_s=5)).text == "hi"
    await process.kill()
    with pytest.raises(SandboxError):
        await process.ask("hi", timeout_s=5)
    process = await lease.spawn(["cat"])
    await lease.reset()
    assert not process.is_alive
    process = await lease.spawn(["cat"])
    await lease.close()
    assert not process.is_alive
    with pytest.raises(SandboxError, match="lease"):
        await process.ask("hi", timeout_s=5)
    await process.kill()
    assert (await acquire(pool)).sandbox_id == lease.sandbox_id


# --- leases


async def test_lease_that_is_over_takes_the_box_back(make_pool: MakePool, yard: FakeYard) -> None:
    pool = make_pool(lease_s=0.05, max_boxes=1)
    lease = await acquire(pool)
    other = await acquire(pool)  # waits until the lease is over
    with pytest.raises(SandboxError, match=r"taken back.*lease of 0\.05 s"):
        await lease.exec("true")
    with pytest.raises(SandboxError, match="taken back"):
        await lease.reset()
    await lease.close()
    assert other.sandbox_id != lease.sandbox_id


async def test_reset_renews_the_lease(make_pool: MakePool) -> None:
    lease = await acquire(make_pool(lease_s=0.5))
    for keep_files in (False, True, False, True):
        await asyncio.sleep(0.2)
        await lease.reset(keep_files=keep_files)
    await lease.exec("true")


async def test_lease_that_ends_during_a_reset_leaks_nothing(make_pool: MakePool, yard: FakeYard) -> None:
    pool = make_pool(lease_s=0.05)
    lease = await acquire(pool)
    gate = yard.hold("reset")
    reset = asyncio.ensure_future(lease.reset())
    await asyncio.sleep(0.1)
    gate.set()
    with pytest.raises(SandboxError, match="taken back"):
        await reset
    await settle()
    assert yard.live == []


async def test_cancelled_reset_gives_the_box_up(make_pool: MakePool, yard: FakeYard) -> None:
    pool = make_pool(max_boxes=1)
    lease = await acquire(pool)
    first = lease.sandbox_id
    yard.hold("reset")
    reset = asyncio.ensure_future(lease.reset())
    await settle()
    reset.cancel()
    await asyncio.wait([reset])
    yard.release()
    await settle()
    assert yard.live == []
    await lease.reset()
    assert lease.sandbox_id != first


async def test_remove_ends_the_lease(make_pool: MakePool, yard: FakeYard) -> None:
    pool = make_pool()
    lease = await acquire(pool)
    await pool.remove(lease.sandbox_id)
    with pytest.raises(SandboxError, match="removed"):
        await lease.exec("true")
    await settle()
    assert yard.live == []


# --- bounds and order


async def test_requests_are_served_in_their_order(make_pool: MakePool) -> None:
    for reuse in ("fresh", "reset"):
        pool = make_pool(reuse=reuse, max_boxes=2)
        leases = [await acquire(pool), await acquire(pool)]
        order: list[int] = []

        async def request(number: int, pool: SandboxPool = pool, order: list[int] = order) -> None:
            lease = await acquire(pool)
            order.append(number)
            await settle(2)
            await lease.close()

        requests = [asyncio.ensure_future(request(number)) for number in range(8)]
        await settle()
        assert (pool.stats.num_waiting, order) == (8, [])
        for lease in leases:
            await lease.close()
        await asyncio.gather(*requests)
        assert order == list(range(8))


async def test_request_without_room_says_so_at_its_deadline(make_pool: MakePool) -> None:
    pool = make_pool(max_boxes=1)
    lease = await acquire(pool)
    with pytest.raises(SandboxError, match=r"no box free within 0\.05 s \(1 in use"):
        await acquire(pool, timeout_s=0.05)
    assert pool.stats.num_waiting == 0
    await lease.close()
    await acquire(pool)


async def test_a_short_deadline_does_not_shorten_the_start_that_others_wait_for(
    make_pool: MakePool, yard: FakeYard
) -> None:
    pool = make_pool(max_concurrent_starts=1)
    gate = yard.hold("start")
    first, second = acquire_later(pool), acquire_later(pool)
    await settle()
    with pytest.raises(SandboxError, match="no box free"):
        await acquire(pool, timeout_s=0.05)
    next_gate = yard.hold("start")
    gate.set()
    await first
    await asyncio.sleep(0.1)
    next_gate.set()
    await second


async def test_memory_bounds_boxes_of_all_specs(make_pool: MakePool, yard: FakeYard) -> None:
    pool = make_pool(max_memory_bytes=1024 * MIB, num_warm=4)
    large = SandboxSpec(memory_bytes=600 * MIB)
    small = [await acquire(pool) for _ in range(3)]
    waiting = acquire_later(pool, large)
    late = acquire_later(pool)
    await settle()
    assert not waiting.done()
    assert not late.done()  # a large box is not starved by small ones that come after it
    await small[0].close()
    await settle()
    assert not waiting.done()
    await small[1].close()
    await waiting
    await (await waiting).close()
    await late
    assert yard.most_bytes <= 1024 * MIB
    with pytest.raises(SandboxError, match="never fits"):
        await acquire(pool, SandboxSpec(memory_bytes=2048 * MIB))


async def test_request_that_gives_up_lets_those_behind_pass(make_pool: MakePool) -> None:
    pool = make_pool(max_memory_bytes=1024 * MIB)
    await acquire(pool)
    large = acquire_later(pool, SandboxSpec(memory_bytes=1000 * MIB))
    small = acquire_later(pool)
    await settle()
    assert not small.done()
    large.cancel()
    await asyncio.wait([large])
    await small


async def test_request_that_gives_up_during_the_question_after_health_gives_the_box_back(
    make_pool: MakePool, yard: FakeYard
) -> None:
    pool = make_pool(max_boxes=1)
    lease = await acquire(pool)
    await lease.close()
    await settle()
    yard.hold("ping")
    request = acquire_later(pool)
    await settle()
    assert pool.stats.num_leased == 1
    request.cancel()
    await asyncio.wait([request])
    yard.release()
    assert (pool.stats.num_leased, pool.stats.num_warm) == (0, 1)
    assert (await acquire(pool)).sandbox_id == lease.sandbox_id


async def test_ready_boxes_of_other_specs_make_room(make_pool: MakePool, yard: FakeYard) -> None:
    pool = make_pool(num_warm=2, max_boxes=3)
    lease = await acquire(pool)
    await settle()
    assert pool.stats.num_warm == 2
    other = await acquire(pool, OTHER)
    await settle()
    assert pool.stats.num_warm == 1
    assert sorted(box.spec.image or "" for box in yard.live) == ["", "", "other"]
    assert (yard.most_boxes, pool.stats.num_discarded) == (3, 1)
    await lease.close()
    await other.close()


async def test_box_that_is_being_removed_counts(make_pool: MakePool, yard: FakeYard) -> None:
    pool = make_pool(reuse="fresh", max_boxes=1)
    gate = yard.hold("close")
    lease = await acquire(pool)
    await lease.close()
    request = acquire_later(pool)
    await settle()
    assert not request.done()
    assert pool.stats.num_closing == 1
    gate.set()
    await request


async def test_starts_wait_for_removals_that_do_not_keep_up(make_pool: MakePool, yard: FakeYard) -> None:
    pool = make_pool(reuse="fresh", max_concurrent_starts=2)
    gate = yard.hold("close")
    for lease in [await acquire(pool) for _ in range(6)]:
        await lease.close()
    request = acquire_later(pool)
    await settle()
    assert not request.done()
    gate.set()
    await request


# --- failing starts


async def test_failed_start_is_told_to_who_waits(make_pool: MakePool, yard: FakeYard) -> None:
    pool = make_pool()
    yard.errors = [SandboxError("no space"), ConfigError("no image")]
    with pytest.raises(SandboxError, match="no space"):
        await acquire(pool)
    with pytest.raises(ConfigError, match="no image"):
        await acquire(pool)
    await acquire(pool)
    assert pool.stats.num_failed_starts == 2


async def test_each_failed_start_is_told_to_one(make_pool: MakePool, yard: FakeYard) -> None:
    pool = make_pool()
    yard.errors = [SandboxError("no space")] * 3
    results = await asyncio.gather(*(acquire(pool) for _ in range(5)), return_exceptions=True)
    assert [isinstance(result, SandboxError) for result in results] == [True] * 3 + [False] * 2


async def test_failing_starts_ahead_do_not_spin(make_pool: MakePool, yard: FakeYard) -> None:
    pool = make_pool(num_warm=2)
    leases = [await acquire(pool)]
    await settle()
    yard.errors = [SandboxError("no space")] * 1000
    leases += [await acquire(pool), await acquire(pool)]
    num_starts = yard.num_starts
    for _ in range(50):
        await leases[0].reset()
    await settle(200)
    assert yard.num_starts - num_starts <= 2
    yard.errors.clear()


async def test_pool_recovers_after_the_engine_was_away(make_pool: MakePool, yard: FakeYard) -> None:
    pool = make_pool(num_warm=2)
    leases = [await acquire(pool) for _ in range(4)]
    await settle()
    for box in yard.live:
        box.is_dead = True
    yard.errors = [SandboxError("no engine")] * 3
    for lease in leases:
        with pytest.raises(SandboxError):
            await lease.exec("true")
        await lease.close()
    results = await asyncio.gather(*(acquire(pool) for _ in range(6)), return_exceptions=True)
    assert sum(isinstance(result, SandboxError) for result in results) <= 3
    for result in results:
        if isinstance(result, PooledSandbox):
            await result.exec("true")
    assert not any(box.is_dead for box in yard.live)


async def test_swap_without_a_new_box_can_be_tried_again(make_pool: MakePool, yard: FakeYard) -> None:
    lease = await acquire(make_pool(reuse="fresh"))
    yard.errors = [SandboxError("no space")]
    with pytest.raises(SandboxError, match="no space"):
        await lease.reset()
    with pytest.raises(SandboxError, match="reset goes on, or failed"):
        await lease.exec("true")
    await lease.reset()
    await lease.exec("true")


# --- cancellation and closing


@pytest.mark.parametrize("act", ["start", "ping", "reset", "close"])
@pytest.mark.parametrize("reuse", ["fresh", "reset"])
@pytest.mark.parametrize("num_passes", range(8))
async def test_cancellation_at_any_point_leaks_nothing(
    make_pool: MakePool, yard: FakeYard, act: str, reuse: str, num_passes: int
) -> None:
    yard.num_steps = lambda name: 2 if name == act else 0
    pool = make_pool(reuse=reuse, max_boxes=2, num_warm=1)

    async def episode() -> None:
        lease = await acquire(pool)
        try:
            await lease.exec("true")
            await lease.reset()
        finally:
            await lease.close()

    for _ in range(2):
        task = asyncio.ensure_future(episode())
        for _ in range(num_passes):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    await asyncio.gather(*(episode() for _ in range(4)))  # the room that they had is free again
    await settle()
    assert pool.stats.num_leased == 0
    assert pool.stats.num_boxes == pool.stats.num_warm == len(yard.live)


async def test_close_refuses_who_waits_and_ends_leases(make_pool: MakePool, yard: FakeYard) -> None:
    pool = make_pool(max_boxes=1)
    lease = await acquire(pool)
    waiting = acquire_later(pool)
    await settle()
    await asyncio.gather(pool.close(), pool.close())
    with pytest.raises(SandboxError, match="closed"):
        await waiting
    with pytest.raises(SandboxError, match="closed"):
        await acquire(pool)
    with pytest.raises(SandboxError, match="closed"):
        await lease.exec("true")
    await lease.close()
    assert yard.is_closed
    assert yard.live == []


async def test_close_ends_what_is_under_way(make_pool: MakePool, yard: FakeYard) -> None:
    yard.hold("start")
    pool = make_pool(num_warm=2)
    waiting = acquire_later(pool)
    await pool.close()  # in the same pass of the loop: the start has not begun
    with pytest.raises(SandboxError, match="closed"):
        await waiting
    pool = make_pool()
    waiting = acquire_later(pool)
    await settle()
    assert yard.num_starting == 1
    await pool.close()
    assert yard.num_starting == 0
    with pytest.raises(SandboxError, match="closed"):
        await waiting


async def test_close_goes_on_when_it_is_cancelled(make_pool: MakePool, yard: FakeYard) -> None:
    gate = yard.hold("close")
    pool = make_pool()
    await acquire(pool)
    closing = asyncio.ensure_future(pool.close())
    await settle()
    closing.cancel()
    await asyncio.wait([closing])
    gate.set()
    await pool.close()
    assert yard.live == []


async def test_pool_is_a_context_manager(yard: FakeYard) -> None:
    async with SandboxPool(yard, PoolConfig()) as pool:
        await acquire(pool)
    assert yard.live == []
    assert dataclasses.replace(pool.stats, num_started=0, num_discarded=0).num_boxes == 0


# --- any sequence of requests, returns, resets, failures, deaths and cancellations

_SPECS = (
    SandboxSpec(memory_bytes=100 * MIB),
    SandboxSpec(memory_bytes=300 * MIB),
    SandboxSpec(memory_bytes=200 * MIB, read_only_root=False),
)
_STEPS = st.tuples(
    st.sampled_from(
        ["acquire", "acquire", "acquire", "release", "release", "reset", "exec", "die", "kill", "fail", "cancel", "run"]
    ),
    st.integers(0, 7),
)


class _Players:
    """The model: who has, and who waits for, which box. It knows nothing of how the pool works."""

    def __init__(self, pool: SandboxPool, yard: FakeYard) -> None:
        self.pool, self.yard = pool, yard
        self.leases: list[PooledSandbox] = []
        self.tasks: list[asyncio.Task[Any]] = []

    def begin(self, work: Awaitable[Any]) -> None:
        self.tasks.append(asyncio.ensure_future(work))

    async def acquire(self, number: int) -> None:
        lease = await self.pool.start(_SPECS[number % len(_SPECS)], timeout_s=20)
        self.leases.append(lease)

    async def call(self, lease: PooledSandbox, name: str) -> None:
        if name == "reset":
            await lease.reset()
        else:
            await lease.exec(name)

    async def do(self, name: str, number: int) -> None:
        lease = self.leases[number % len(self.leases)] if self.leases else None
        live = [box for box in self.yard.live if not box.is_dead]
        pending = [task for task in self.tasks if not task.done()]
        if name == "acquire":
            self.begin(self.acquire(number))
        elif name == "release" and lease:
            self.leases.remove(lease)
            await lease.close()
        elif name in ("reset", "exec", "die") and lease:
            self.begin(self.call(lease, name))
        elif name == "kill" and live:
            live[number % len(live)].is_dead = True
        elif name == "fail":
            self.yard.errors.append(SandboxError("failed"))
        elif name == "cancel" and pending:
            pending[number % len(pending)].cancel()
        elif name == "run":
            await settle(number)

    def check(self) -> None:
        held = [lease._slot.box for lease in self.pool._leases if lease._slot is not None]
        assert len({id(box) for box in held}) == len(held), "a box is leased to two"
        assert not any(isinstance(box, FakeBox) and box.is_closed for box in held), "a closed box is leased"

    async def end(self) -> None:
        """Everybody gives back what they have; then everybody who waits must be served."""
        self.yard.errors.clear()
        for _ in range(200):
            await settle(5)
            self.check()
            for lease in self.leases:
                await lease.close()
            self.leases.clear()
            if all(task.done() for task in self.tasks):
                break
        assert all(task.done() for task in self.tasks), "somebody waits for ever"
        for task in self.tasks:
            error = None if task.cancelled() else task.exception()
            assert error is None or isinstance(error, SandboxError)


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(_STEPS, max_size=50),
    pauses=st.lists(st.integers(0, 4), min_size=1, max_size=7),
    num_warm=st.integers(0, 3),
    max_boxes=st.integers(1, 5),
    reuse=st.sampled_from(["auto", "fresh"]),
)
def test_any_sequence_keeps_the_bounds_and_leaks_nothing(
    steps: list[tuple[str, int]], pauses: list[int], num_warm: int, max_boxes: int, reuse: Any
) -> None:
    async def play() -> None:
        yard = FakeYard()
        turn = iter(range(1_000_000))
        yard.num_steps = lambda act: pauses[next(turn) % len(pauses)]
        config = PoolConfig(num_warm=num_warm, max_boxes=max_boxes, max_memory_bytes=700 * MIB, reuse=reuse)
        pool = SandboxPool(yard, config, max_concurrent_starts=2)
        players = _Players(pool, yard)
        for name, number in steps:
            await players.do(name, number)
            players.check()
        await players.end()
        await settle(100)
        stats = pool.stats
        assert (stats.num_waiting, stats.num_leased, stats.num_starting, stats.num_closing) == (0, 0, 0, 0)
        assert stats.num_warm == len(yard.live)
        assert stats.memory_bytes == sum(box.spec.memory_bytes for box in yard.live)
        await pool.close()
        assert yard.live == []
        assert yard.num_starting == 0
        assert yard.most_boxes <= max_boxes
        assert yard.most_bytes <= 700 * MIB
        assert yard.most_starting <= 2
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(play())

"""The pool over real boxes of every kind: what a lease finds, and what it leaves."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from driftgym.errors import SandboxError
from driftgym.sandboxes.base import PoolConfig, SandboxProvider, SandboxSpec
from driftgym.sandboxes.pool import SandboxPool

TIMEOUT_S = 60.0
MakePool = Callable[..., SandboxPool]


@pytest_asyncio.fixture
async def make_pool(real_provider: SandboxProvider) -> AsyncIterator[MakePool]:
    """Makes pools over boxes of each kind, closed at the end."""
    pools: list[SandboxPool] = []

    def make(**config: Any) -> SandboxPool:
        pools.append(SandboxPool(real_provider, PoolConfig(**{"num_warm": 1, **config})))
        return pools[-1]

    yield make
    for pool in pools:
        await pool.close()


async def own_ids(provider: SandboxProvider, one: str) -> set[str]:
    """The boxes of the owner of the box `one`."""
    infos = await provider.list()
    owner = next(info.owner for info in infos if info.sandbox_id == one)
    return {info.sandbox_id for info in infos if info.owner == owner}


async def until_warm(pool: SandboxPool, num: int) -> None:
    """Waits until that many boxes are ready."""
    for _ in range(int(TIMEOUT_S / 0.02)):
        if pool.stats.num_warm >= num:
            break
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("reuse", ["reset", "fresh"])
async def test_episode_meets_nothing_of_the_last_one(make_pool: MakePool, real_spec: SandboxSpec, reuse: str) -> None:
    pool = make_pool(reuse=reuse, max_boxes=2)
    ids = []
    for number in range(2):
        box = await pool.start(real_spec, timeout_s=TIMEOUT_S)
        for _ in range(2):
            ids.append(box.sandbox_id)
            assert (await box.exec("ls -A", timeout_s=20)).stdout == ""
            await box.write_file("/work/secret", b"x")
            await box.exec("sleep 4242 & mkdir -p deep/er; touch $HOME/.hidden; exit 0", timeout_s=20)
            process = await box.spawn(["cat"])
            assert (await process.ask(f"on {number}", timeout_s=20)).text == f"on {number}"
            await box.reset()
            assert not process.is_alive
            with pytest.raises(FileNotFoundError):
                await box.read_file("/work/secret")
        await box.close()
    assert pool.stats.num_unhealthy == 0
    if reuse == "fresh":
        assert len(set(ids)) == 4
    else:
        assert pool.stats.num_started <= 2
        assert pool.stats.num_discarded == 0


async def test_box_that_was_killed_while_it_was_ready_is_replaced(
    make_pool: MakePool, real_provider: SandboxProvider, real_spec: SandboxSpec
) -> None:
    pool = make_pool(num_warm=2)
    first = await pool.start(real_spec, timeout_s=TIMEOUT_S)
    await until_warm(pool, 2)
    killed = await own_ids(real_provider, first.sandbox_id) - {first.sandbox_id}
    assert len(killed) == 2
    for sandbox_id in killed:
        await real_provider.remove(sandbox_id)
    # Two at once: one alone may get the box that was started ahead meanwhile, and leave a killed one where it is.
    given = await asyncio.gather(*(pool.start(real_spec, timeout_s=TIMEOUT_S) for _ in range(2)))
    for box in given:
        assert box.sandbox_id not in killed
        assert (await box.exec("echo on", timeout_s=20)).stdout == "on\n"
    assert pool.stats.num_unhealthy == 2


async def test_box_that_was_killed_while_it_was_leased_is_not_handed_out_again(
    make_pool: MakePool, real_provider: SandboxProvider, real_spec: SandboxSpec
) -> None:
    pool = make_pool(num_warm=0)
    box = await pool.start(real_spec, timeout_s=TIMEOUT_S)
    killed = box.sandbox_id
    await real_provider.remove(killed)
    with pytest.raises(SandboxError):
        await box.exec("echo on", timeout_s=20)
    await box.reset()
    assert box.sandbox_id != killed
    assert (await box.exec("echo on", timeout_s=20)).stdout == "on\n"


async def test_cancelled_command_does_not_reach_the_next_lease(make_pool: MakePool, real_spec: SandboxSpec) -> None:
    pool = make_pool(num_warm=0, max_boxes=1)
    box = await pool.start(real_spec, timeout_s=TIMEOUT_S)
    call = asyncio.ensure_future(box.exec("while :; do echo x > late; done", timeout_s=60))
    await asyncio.sleep(0.2)
    call.cancel()
    await asyncio.wait([call])
    await box.close()
    box = await pool.start(real_spec, timeout_s=TIMEOUT_S)
    assert (await box.exec("ls -A; sleep 0.2; ls -A", timeout_s=20)).stdout == ""


async def test_lease_that_is_over_ends_a_command(make_pool: MakePool, real_spec: SandboxSpec) -> None:
    pool = make_pool(num_warm=0, lease_s=1.0)
    box = await pool.start(real_spec, timeout_s=TIMEOUT_S)
    with pytest.raises(SandboxError, match="taken back"):
        await box.exec("sleep 60", timeout_s=60)


async def test_folders_go_in_and_out_of_a_lease(make_pool: MakePool, real_spec: SandboxSpec, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").write_text("41")
    box = await make_pool(num_warm=0).start(real_spec, timeout_s=TIMEOUT_S)
    await box.upload(tmp_path / "in", "/work/folder")
    assert (await box.exec("cat folder/a && echo 42 > folder/b", timeout_s=20)).stdout == "41"
    await box.reset(keep_files=True)
    await box.download("/work/folder", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a", "b"]


async def test_requests_at_once_get_boxes_of_their_own_and_all_are_gone_at_the_end(
    make_pool: MakePool, real_provider: SandboxProvider, real_spec: SandboxSpec
) -> None:
    pool = make_pool(max_boxes=4)

    async def episode(number: int) -> str:
        box = await pool.start(real_spec, timeout_s=TIMEOUT_S)
        await box.write_file("/work/mine", str(number).encode())
        answer = (await box.exec("cat mine; ls | wc -l", timeout_s=20)).stdout.split()
        await box.close()
        return answer == [f"{number}1"] or str(answer)

    assert await asyncio.gather(*(episode(number) for number in range(12))) == [True] * 12
    assert pool.stats.num_boxes <= 4
    await pool.close()
    assert pool.stats.num_boxes == 0

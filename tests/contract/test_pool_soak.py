"""A thousand episodes on Docker leave nothing behind: no container, file descriptor, thread or memory."""

import asyncio
import gc
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from docker_engine import open_docker

from driftgym.sandboxes import owners
from driftgym.sandboxes.base import MIB, PoolConfig, SandboxSpec
from driftgym.sandboxes.pool import SandboxPool
from driftgym.sandboxes.pool_state import PoolStats

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(900)]

TIMEOUT_S = 60.0
NUM_EXECS = 20
_MAX_GROWTH_BYTES = 24 * MIB
"""What an allocator may keep; a leak of one reply of each command would be more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What this process holds of the machine."""

    num_fds: int
    num_threads: int
    rss_bytes: int


def held() -> Held:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Held(
        num_fds=len(os.listdir("/proc/self/fd")),
        num_threads=threading.active_count(),
        rss_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
    )


async def num_own_containers() -> int:
    provider = await open_docker()
    try:
        return sum(info.owner == owners.own_label() for info in await provider.list())
    finally:
        await provider.close()


async def play(pool: SandboxPool, *, num_episodes: int, num_players: int) -> None:
    """Episodes of acquire, execs and release, played by so many at once."""
    left = iter(range(num_episodes))

    async def player() -> None:
        for number in left:
            box = await pool.start(SandboxSpec(), timeout_s=TIMEOUT_S)
            assert (await box.exec("ls -A", timeout_s=20)).stdout == ""
            await box.write_file("/work/mine", str(number).encode())
            for _ in range(NUM_EXECS - 2):
                result = await box.exec(["cat", "mine"], timeout_s=20)
                assert result.stdout == str(number)
            await box.exec("head -c 20000 /dev/zero; sleep 77 & exit 0", timeout_s=20)
            await box.close()

    await asyncio.gather(*(player() for _ in range(num_players)))


async def run(config: PoolConfig, *, num_episodes: int, num_players: int) -> tuple[PoolStats, int]:
    """The pool's figures before it was closed, and how many containers there were then."""
    async with SandboxPool(await open_docker(), config) as pool:
        await play(pool, num_episodes=num_episodes, num_players=num_players)
        return pool.stats, await num_own_containers()


@pytest.mark.parametrize(("reuse", "num_episodes", "num_players"), [("reset", 1000, 4), ("fresh", 60, 4)])
async def test_episodes_leave_nothing_behind(
    reuse: str, num_episodes: int, num_players: int, capsys: pytest.CaptureFixture[str]
) -> None:
    config = PoolConfig.model_validate({"reuse": reuse, "num_warm": 2, "max_boxes": 8})
    await run(config, num_episodes=12, num_players=num_players)
    before = held()
    assert await num_own_containers() == 0
    started_s = time.monotonic()
    stats, num_containers = await run(config, num_episodes=num_episodes, num_players=num_players)
    wall_s = time.monotonic() - started_s
    after = held()
    with capsys.disabled():
        print(
            f"\n{reuse}: {num_episodes} episodes of {NUM_EXECS} commands in {wall_s:.1f} s "
            f"({num_episodes / wall_s:.1f} episodes/s); boxes started {stats.num_started}, reused {stats.num_reused}, "
            f"thrown away {stats.num_discarded}; before {before}, after {after}"
        )
    assert num_containers <= config.max_boxes
    assert (stats.num_leased, stats.num_waiting, stats.num_failed_starts) == (0, 0, 0)
    assert stats.num_started >= (num_episodes if reuse == "fresh" else 1)
    assert stats.num_started <= (num_episodes + config.max_boxes if reuse == "fresh" else config.max_boxes)
    assert await num_own_containers() == 0
    assert after.num_fds <= before.num_fds
    assert after.num_threads <= before.num_threads
    assert after.rss_bytes - before.rss_bytes < _MAX_GROWTH_BYTES

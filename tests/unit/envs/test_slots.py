import asyncio

import pytest

from driftgym.envs.slots import EnvSlots
from driftgym.errors import EnvError


def _counted(env_type, **settings):
    made = []

    def make():
        made.append(env_type(**settings))
        return made[-1]

    return make, made


async def test_made_lazily_and_reused(echo_env_type):
    make, made = _counted(echo_env_type)
    slots = EnvSlots(make, num_slots=4)
    assert not made
    for _ in range(5):
        async with slots.lease() as env:
            await env.areset(seed=1)
    assert [env.num_resets for env in made] == [5]
    await slots.close()
    assert [env.num_closed for env in made] == [1]


async def test_one_episode_at_a_time_in_at_most_so_many(echo_env_type):
    make, made = _counted(echo_env_type)
    slots = EnvSlots(make, num_slots=3)
    playing = []

    async def play():
        async with slots.lease() as env:
            assert env not in playing
            playing.append(env)
            assert len(playing) <= 3
            await asyncio.sleep(0.001)
            playing.remove(env)

    await asyncio.gather(*(play() for _ in range(30)))
    assert len(made) == 3
    await slots.close()


async def test_an_async_maker(echo_env_type):
    async def make():
        return echo_env_type()

    slots = EnvSlots(make, num_slots=1)
    async with slots.lease() as env:
        assert isinstance(env, echo_env_type)
    await slots.close()


async def test_an_episode_that_raises_costs_its_environment_only(echo_env_type):
    make, made = _counted(echo_env_type)
    slots = EnvSlots(make, num_slots=1)
    with pytest.raises(EnvError):
        async with slots.lease():
            raise EnvError("x")
    async with slots.lease():
        pass
    assert [env.num_closed for env in made] == [1, 0]
    await slots.close()


async def test_a_broken_environment_is_replaced(echo_env_type):
    make, made = _counted(echo_env_type)
    slots = EnvSlots(make, num_slots=1)
    async with slots.lease() as env:
        env.broken = True
    async with slots.lease() as env:
        assert env is made[1]
    assert made[0].num_closed == 1
    await slots.close()


async def test_a_maker_that_fails_frees_its_slot(echo_env_type):
    answers = [EnvError("no"), echo_env_type()]

    def make():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    slots = EnvSlots(make, num_slots=1)
    with pytest.raises(EnvError):
        async with slots.lease():
            pass
    async with asyncio.timeout(5):
        async with slots.lease():
            pass
    await slots.close()


async def test_cancelled_while_playing_and_while_waiting(echo_env_type):
    make, made = _counted(echo_env_type)
    slots = EnvSlots(make, num_slots=1)
    playing = asyncio.Event()

    async def play():
        async with slots.lease():
            playing.set()
            await asyncio.sleep(3600)

    first, waiting = asyncio.create_task(play()), asyncio.create_task(play())
    await playing.wait()
    waiting.cancel()
    first.cancel()
    await asyncio.gather(first, waiting, return_exceptions=True)
    assert [env.num_closed for env in made] == [1]
    async with asyncio.timeout(5):
        async with slots.lease():
            pass
    await slots.close()


async def test_a_close_that_hangs_or_raises_is_bounded(echo_env_type, caplog):
    class Stubborn(echo_env_type):
        async def aclose(self):
            while True:
                try:
                    await asyncio.sleep(0.2)
                    return
                except asyncio.CancelledError:
                    pass

    class Failing(echo_env_type):
        async def aclose(self):
            raise RuntimeError("cannot close")

    for env_type in (Stubborn, Failing):
        slots = EnvSlots(env_type, num_slots=2, close_s=0.05)
        async with slots.lease(), slots.lease():
            pass
        async with asyncio.timeout(5):
            await slots.close()
    assert "cannot close" in caplog.text
    await asyncio.sleep(0.5)


async def test_leased_at_close_is_closed_when_it_comes_back(echo_env_type):
    slots = EnvSlots(echo_env_type, num_slots=1)
    async with slots.lease() as env:
        await slots.close()
        assert env.num_closed == 0
    assert env.num_closed == 1
    with pytest.raises(EnvError, match="closed"):
        async with slots.lease():
            pass


def test_no_slots_are_refused(echo_env_type):
    with pytest.raises(ValueError, match="num_slots"):
        EnvSlots(echo_env_type, num_slots=0)

import asyncio
import collections
import time

import pytest
from pool_engines import QUICK, Events, until, weights

from driftgym.agents.generators.pool import GeneratorPool
from driftgym.agents.generators.scripted import ScriptedGenerator
from driftgym.agents.generators.watch import WatchOptions
from driftgym.errors import GeneratorError
from driftgym.types import SamplingParams


def scripted(**options):
    return ScriptedGenerator(lambda request: [7, 8, 9], **options)


def ask(pool, session_id="s", *, request_id="r", timeout_s=5.0, **options):
    return pool.generate(
        [1],
        SamplingParams(),
        request_id=request_id,
        session_id=session_id,
        deadline_s=time.monotonic() + timeout_s,
        **options,
    )


async def test_ties_are_spread_and_sessions_stay():
    """Case H5: four engines; 200 one-turn sessions one after another, then 8 long ones at once."""
    members = [scripted() for _ in range(4)]
    pool = GeneratorPool(members, policy_version=0)
    for index in range(200):
        await ask(pool, f"short{index}")
    assert [len(member.requests) for member in members] == [50] * 4
    for member in members:
        member.requests.clear()
        member._token_latency_s = 0.01
    for _ in range(3):
        await asyncio.gather(*(ask(pool, f"long{index}", request_id=f"{index}") for index in range(8)))
    for member in members:
        sessions = collections.Counter(request.session_id for request in member.requests)
        assert sorted(sessions.values()) == [3, 3]
    await pool.close()
    assert all(member.is_closed for member in members)


async def test_a_session_leaves_an_engine_that_is_overloaded():
    members = [scripted(token_latency_s=0.05) for _ in range(2)]
    pool = GeneratorPool(members, policy_version=0)
    await asyncio.gather(*(ask(pool, "one", request_id=str(index)) for index in range(20)))
    assert min(len(member.requests) for member in members) >= 5


async def test_a_request_goes_where_its_version_is():
    members = [scripted(), scripted()]
    pool = GeneratorPool(members, policy_version=0)
    assert pool.min_version == 0
    await ask(pool, "s", min_policy_version=0)
    waiting = asyncio.create_task(ask(pool, "s", min_policy_version=2))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await pool.update_weights(weights(2), mode="in_flight", timeout_s=5)
    assert pool.min_version == 2
    assert (await waiting).policy_versions.tolist() == [2, 2, 2]
    with pytest.raises(GeneratorError, match="version 3"):
        await ask(pool, min_policy_version=3, timeout_s=0.1)


async def test_a_failed_request_is_answered_by_another_engine():
    members = [scripted(), scripted()]
    events = Events()
    pool = GeneratorPool(members, policy_version=0, on_event=events)
    members[0].fail_next()
    members[1].fail_next(0)
    assert (await ask(pool)).token_ids.tolist() == [7, 8, 9]
    assert (pool.counts.num_retried, events.names) == (1, [])
    for member in members:
        member.fail_next(1)
    with pytest.raises(GeneratorError, match="as it was told"):
        await ask(pool)


async def test_a_dead_engine_is_taken_out_and_its_requests_move():
    members = [scripted(token_latency_s=0.02) for _ in range(3)]
    events = Events()
    pool = GeneratorPool(members, policy_version=0, on_event=events)
    tasks = [asyncio.create_task(ask(pool, f"s{index}", request_id=f"{index}")) for index in range(30)]
    await asyncio.sleep(0.03)
    members[1].kill()
    completions = await asyncio.gather(*tasks)
    assert sorted(int(completion.request_id) for completion in completions) == list(range(30))
    assert all(completion.token_ids.tolist() == [7, 8, 9] for completion in completions)
    await until(lambda: events.names == ["generator_lost"])
    assert pool.counts.num_retried == 10
    assert "generator 1 is taken out, 2 are left" in events.texts[0]
    health = await pool.health()
    assert health.num_running == 0


async def test_a_statistic_takes_no_engine_out():
    class Busy(ScriptedGenerator):
        async def health(self):
            raise GeneratorError("no answer in time")

    events = Events()
    pool = GeneratorPool([Busy(lambda request: [7]), scripted()], policy_version=0, on_event=events)
    assert (await pool.health()).num_running == 0
    assert events.names == []
    assert {tuple((await ask(pool, f"s{index}")).token_ids.tolist()) for index in range(4)} == {(7,), (7, 8, 9)}
    await pool.close()


async def test_an_engine_is_looked_at_once_for_all_that_failed_there_at_once():
    looks = []

    class Watched(ScriptedGenerator):
        async def health(self):
            looks.append(time.monotonic())
            return await super().health()

        async def load(self):
            raise GeneratorError("gone")

    first = Watched(lambda request: [7], token_latency_s=0.05)
    options = WatchOptions(interval_s=3600, num_failures_out=2)  # no rounds
    pool = GeneratorPool([first, scripted()], policy_version=0, watch=options)
    tasks = [asyncio.create_task(ask(pool, f"s{index}", request_id=f"{index}")) for index in range(40)]
    await asyncio.sleep(0.02)
    first.kill()
    assert len(await asyncio.gather(*tasks)) == 40
    await until(lambda: pool.names == ("1",))
    assert len(looks) == 2
    await pool.close()


async def test_the_last_engine_is_replaced_once_and_the_requests_go_on():
    first = scripted(token_latency_s=0.02)
    started = []

    async def restart():
        await asyncio.sleep(0.05)
        started.append(scripted(policy_version=4))
        return started[-1]

    events = Events()
    pool = GeneratorPool([first], policy_version=0, restart=restart, max_restarts=1, on_event=events)
    assert pool.latest_update is None
    await pool.update_weights(weights(4), mode="in_flight", timeout_s=5)
    assert pool.latest_update == weights(4)
    tasks = [asyncio.create_task(ask(pool, f"s{index}", request_id=f"{index}")) for index in range(8)]
    await asyncio.sleep(0.03)
    first.kill()
    completions = await asyncio.gather(*tasks)
    assert len(started) == 1
    assert first.is_closed
    assert events.names == ["generator_lost", "generator_restarted"]
    assert all(set(completion.policy_versions.tolist()) == {4} for completion in completions)
    started[0].kill()
    with pytest.raises(GeneratorError, match="gone"):
        await ask(pool)
    with pytest.raises(GeneratorError, match="no generator is left"):
        await ask(pool)
    assert len(started) == 1
    await pool.close()


@pytest.mark.parametrize("how", ["raises", "hangs"])
async def test_a_replacement_that_does_not_come(how, caplog):
    async def restart():
        if how == "raises":
            raise GeneratorError("no memory")
        await asyncio.sleep(3600)
        raise AssertionError

    first = scripted()
    pool = GeneratorPool([first], policy_version=0, restart=restart, restart_timeout_s=0.2)
    first.kill()
    with pytest.raises(GeneratorError):
        await ask(pool)
    assert caplog.text.count("no generator could be started") == 3
    await pool.close()


async def test_a_start_that_failed_is_tried_again():
    starts = [GeneratorError("no memory"), scripted()]

    async def restart():
        start = starts.pop(0)
        if isinstance(start, Exception):
            raise start
        return start

    events = Events()
    first = scripted()
    pool = GeneratorPool([first], policy_version=0, restart=restart, on_event=events)
    first.kill()
    assert (await ask(pool)).token_ids.tolist() == [7, 8, 9]
    assert events.names == ["generator_lost", "generator_not_restarted", "generator_restarted"]
    assert "no memory" in events.texts[1]
    await pool.close()


async def test_a_replacement_of_a_paused_engine_is_paused():
    first, second = scripted(), scripted()

    async def restart():
        return second

    pool = GeneratorPool([first], policy_version=0, restart=restart, watch=QUICK)
    await pool.pause()
    first.kill()
    waiting = asyncio.create_task(ask(pool))
    await until(lambda: second in [member.generator for member in pool._parts.roster.members])
    assert (await pool.health()).num_queued == 1
    assert not waiting.done()
    await pool.resume()
    assert (await waiting).token_ids.tolist() == [7, 8, 9]
    await pool.close()


@pytest.mark.slow
async def test_an_engine_that_stands_still_is_found_out_by_requests_that_ran_out_of_time():
    first = scripted()

    async def restart():
        return scripted()

    events = Events()
    pool = GeneratorPool([first], policy_version=0, restart=restart, on_event=events, watch=QUICK)
    first.hang()
    late = await asyncio.gather(
        *(ask(pool, f"s{index}", request_id=f"{index}", timeout_s=0.1) for index in range(5)), return_exceptions=True
    )
    assert all(isinstance(error, GeneratorError) for error in late)
    assert (await ask(pool, timeout_s=30)).token_ids.tolist() == [7, 8, 9]
    assert events.names == ["generator_lost", "generator_restarted"]
    await pool.close()


async def test_a_replacement_with_old_weights_is_brought_up():
    first, second = scripted(), scripted()

    async def restart():
        return second

    pool = GeneratorPool([first], policy_version=0, restart=restart)
    await pool.update_weights(weights(3), mode="in_flight", timeout_s=5)
    first.kill()
    assert (await ask(pool, min_policy_version=3)).policy_versions.tolist() == [3, 3, 3]


async def test_pause_abort_and_close_reach_all():
    members = [scripted(token_latency_s=0.01) for _ in range(2)]
    pool = GeneratorPool(members, policy_version=0)
    await pool.pause()
    tasks = [asyncio.create_task(ask(pool, f"{index}", request_id=f"{index}", timeout_s=30)) for index in range(4)]
    await asyncio.sleep(0.05)
    health = await pool.health()
    assert (health.num_running, health.num_queued) == (0, 4)
    await pool.abort("0")
    assert (await tasks[0]).finish_reason == "abort"
    await pool.resume()
    assert {(await task).finish_reason for task in tasks[1:]} == {"length"}
    tasks = [asyncio.create_task(ask(pool, f"{index}", request_id=f"{index}", timeout_s=30)) for index in range(4)]
    await asyncio.sleep(0.015)
    await pool.pause()
    assert (await pool.health()).num_running == 4
    await pool.abort()
    assert {(await task).finish_reason for task in tasks} == {"abort"}
    await pool.resume()
    await pool.pause()
    last = asyncio.create_task(ask(pool, timeout_s=30))
    await asyncio.sleep(0.02)
    await pool.close()
    with pytest.raises(GeneratorError):
        await last


async def test_a_wrong_prompt_is_not_sent_around():
    members = [scripted(vocab_size=10), scripted(vocab_size=10)]
    pool = GeneratorPool(members, policy_version=0)
    with pytest.raises(ValueError, match="vocabulary"):
        await pool.generate([10], SamplingParams(), request_id="r", session_id="s", deadline_s=time.monotonic() + 5)
    assert pool.counts.num_retried == 0


async def test_a_request_that_is_never_answered_and_one_that_is_refused_are_answered_elsewhere():
    """Case C1: neither holds up the others beyond its deadline."""

    class Faulty(ScriptedGenerator):
        async def generate(self, prompt_token_ids, sampling, *, request_id, **options):
            if request_id == "5":
                await asyncio.Event().wait()
            if request_id == "6":
                raise GeneratorError("refused")
            return await super().generate(prompt_token_ids, sampling, request_id=request_id, **options)

    faulty = Faulty(lambda request: [7, 8, 9])
    alone = GeneratorPool([faulty], policy_version=0, watch=QUICK)
    asked = [ask(alone, f"s{index}", request_id=str(index), timeout_s=0.3) for index in range(8)]
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert [index for index, result in enumerate(results) if isinstance(result, GeneratorError)] == [5, 6]
    assert "got no answer by its deadline" in str(results[5])
    await alone.close()
    both = GeneratorPool([Faulty(lambda request: [7, 8, 9]), scripted()], policy_version=0, watch=QUICK)
    asked = [ask(both, f"s{index}", request_id=str(index), timeout_s=8) for index in range(8)]
    assert all(completion.token_ids.tolist() == [7, 8, 9] for completion in await asyncio.gather(*asked))
    await both.close()


async def test_as_many_are_under_way_as_were_asked():
    """Case H3: 200 at once, each for a while; nothing between the caller and the engines holds them up."""
    members = [scripted(token_latency_s=0.1) for _ in range(2)]
    pool = GeneratorPool(members, policy_version=0, max_concurrency=100)
    asked = [asyncio.create_task(ask(pool, f"s{index}", request_id=str(index))) for index in range(200)]
    await asyncio.sleep(0.05)
    assert [member.num_running for member in members] == [100, 100]
    await asyncio.gather(*asked)
    await pool.close()

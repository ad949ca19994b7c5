"""Who is sent to an engine, in which order, and what becomes of those that wait."""

import asyncio

import pytest

from driftgym.agents.generators.traffic import NotSentError, Stopwatch, Traffic


class Requests:
    """Requests of a client; each stays under way until it is ended."""

    def __init__(self, traffic):
        self.traffic = traffic
        self.sent = []
        self.ends = {}
        self.tasks = {}

    async def start(self, name):
        self.ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._run(name))
        await self.settle()

    async def _run(self, name):
        async with self.traffic.sending(name) as request:
            self.sent.append(name)
            await self.ends[name].wait()
            return request

    async def end(self, name):
        self.ends[name].set()
        await self.settle()
        return self.tasks[name].result()

    async def settle(self):
        for _ in range(5):
            await asyncio.sleep(0)


async def test_places_are_given_in_order_of_arrival():
    requests = Requests(Traffic(max_concurrency=2))
    for name in "abcde":
        await requests.start(name)
    assert (requests.sent, requests.traffic.num_waiting) == (["a", "b"], 3)
    requests.tasks["c"].cancel()  # the first of those that wait: the next one takes its turn
    await requests.end("b")
    assert requests.sent == ["a", "b", "d"]
    await requests.end("a")
    assert requests.sent == ["a", "b", "d", "e"]
    for name in "de":
        await requests.end(name)
    with pytest.raises(asyncio.CancelledError):
        await requests.tasks["c"]


async def test_nothing_is_sent_while_it_is_held():
    requests = Requests(Traffic(max_concurrency=8))
    await requests.start("a")
    requests.traffic.hold()
    with requests.traffic.held():
        for name in "bcd":
            await requests.start(name)
        emptied = asyncio.create_task(requests.traffic.empty())
        await requests.settle()
        assert not emptied.done()
        await requests.end("a")
        await emptied
    await requests.settle()
    assert requests.sent == ["a"]
    assert requests.traffic.abort("c") == []
    await requests.settle()
    with pytest.raises(NotSentError):
        await requests.tasks["c"]
    requests.traffic.release()
    await requests.settle()
    assert requests.sent == ["a", "b", "d"]
    assert {request.request_id for request in requests.traffic.abort(None)} == {"b", "d"}
    for name in "bd":
        await requests.end(name)


async def test_the_oldest_kv_is_known_until_the_cache_is_dropped():
    requests = Requests(Traffic(max_concurrency=8))
    await requests.start("over both")
    requests.traffic.updated(kept_version=3)
    await requests.start("over one")
    requests.traffic.updated(kept_version=5)
    await requests.start("after")
    requests.traffic.updated(kept_version=None)
    await requests.start("fresh")
    found = {}
    for name in requests.ends:
        request = await requests.end(name)
        found[name] = (request.kept_version, request.cached_version)
    assert found == {"over both": (3, None), "over one": (3, 3), "after": (None, 3), "fresh": (None, None)}


async def test_closing_lets_all_go_on():
    requests = Requests(Traffic(max_concurrency=1))
    requests.traffic.hold()
    for name in "abc":
        await requests.start(name)
    requests.traffic.close()
    await requests.settle()
    assert sorted(requests.sent) == ["a", "b", "c"]
    for name in "abc":
        await requests.end(name)


async def test_a_stopwatch_counts_the_seconds_in_which_it_runs():
    watch = Stopwatch()
    watch.run(False)
    assert watch.seconds == 0.0
    watch.run(True)
    await asyncio.sleep(0.02)
    watch.run(True)
    assert watch.seconds >= 0.02
    watch.run(False)
    stopped = watch.seconds
    await asyncio.sleep(0.02)
    assert watch.seconds == stopped

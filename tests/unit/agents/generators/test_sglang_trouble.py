"""The client of one engine when calls come together, or fail half-way."""

import asyncio

import pytest
from stub_engine import StubEngine, ask, weights

from driftgym.errors import GeneratorError


async def until_asked(stub, path, count=1):
    async with asyncio.timeout(5):
        while stub.paths().count(path) < count:  # noqa: ASYNC110  # polls what has no event
            await asyncio.sleep(0.005)


def orders(stub):
    """The calls that halt and change the engine, in order."""
    names = {"/pause_generation": "halt", "/continue_generation": "go on", "/update_weights_from_disk": "load"}
    return [names[path] for path in stub.paths() if path in names]


async def test_an_engine_that_is_resumed_while_it_takes_weights_stands_still_until_it_has_them():
    stub = StubEngine()
    stub.update_s = 0.2
    async with stub.client() as client:
        await client.pause()
        updating = asyncio.create_task(client.update_weights(weights(4), mode="in_flight", timeout_s=5))
        await until_asked(stub, "/update_weights_from_disk")
        await client.resume()
        assert orders(stub) == ["halt", "load"]
        await updating
        assert orders(stub) == ["halt", "load", "go on"]
        await ask(client)


async def test_an_engine_that_is_paused_while_it_takes_weights_stays_paused():
    stub = StubEngine()
    stub.update_s = 0.2
    async with stub.client() as client:
        updating = asyncio.create_task(client.update_weights(weights(4), mode="in_flight", timeout_s=5))
        await until_asked(stub, "/update_weights_from_disk")
        await client.pause()
        await updating
        assert orders(stub) == ["halt", "load", "halt"]
        await client.resume()
        await ask(client)


@pytest.mark.parametrize("begun_by", ["resume", "update"])
async def test_a_late_call_to_go_on_never_comes_after_the_next_halt(begun_by):
    """The end of one update may still be on its way when the next one begins."""

    class Tardy(StubEngine):
        async def respond(self, path, body):
            if path == "/continue_generation":
                await asyncio.sleep(0.2)
                self.ended.append("go on")
            answer = await super().respond(path, body)
            if path == "/update_weights_from_disk":
                self.ended.append("load")
            return answer

    stub = Tardy()
    stub.ended = []
    async with stub.client() as client:
        if begun_by == "resume":
            await client.pause()
            first = asyncio.create_task(client.resume())
        else:
            first = asyncio.create_task(client.update_weights(weights(4), mode="in_flight", timeout_s=5))
        await until_asked(stub, "/continue_generation")
        if begun_by == "update":
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
        await client.update_weights(weights(5), mode="in_flight", timeout_s=5)
        assert stub.ended[-3:] == ["go on", "load", "go on"]
        assert orders(stub)[-4:] == ["go on", "halt", "load", "go on"]
        await asyncio.gather(first, return_exceptions=True)


@pytest.mark.parametrize("is_named_anew", [False, True])
async def test_what_runs_over_an_update_that_fails_is_refused(is_named_anew):
    """The engine may have the new weights and still call them by the old name, or rest on a cache of the old ones."""
    stub = StubEngine()
    stub.delay_s = 0.2
    stub.update = (400, {"message": "weights were updated, and the cache was not flushed"})
    async with stub.client() as client:
        running = asyncio.create_task(ask(client))
        await until_asked(stub, "/generate")
        with pytest.raises(GeneratorError, match="not flushed"):
            await client.update_weights(weights(4), mode="in_flight", timeout_s=5)
        stub.version = "1:4" if is_named_anew else "1:3"
        with pytest.raises(GeneratorError, match="unknown"):
            await running
        with pytest.raises(GeneratorError, match="unknown"):
            await client.health()
        stub.update = (200, {"success": True})
        await client.update_weights(weights(4), mode="in_flight", timeout_s=5)
        await ask(client)
        assert (await client.health()).version.policy_version == 4


async def test_health_answers_while_weights_are_taken():
    stub = StubEngine()
    stub.update_s = 0.2
    async with stub.client() as client:
        updating = asyncio.create_task(client.update_weights(weights(4), mode="in_flight", timeout_s=5))
        await until_asked(stub, "/update_weights_from_disk")
        assert (await client.health()).version.policy_version == 3
        await updating

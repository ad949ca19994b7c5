"""The client against a stub engine: new weights, and whose KV cache tokens rest on."""

import asyncio

import pytest
from stub_engine import StubEngine, ask, reply, weights

from driftgym.errors import GeneratorError


async def test_one_version_for_all_is_taken_unless_it_changed_meanwhile():
    stub = StubEngine()
    stub.answer = reply([1, 2])
    del stub.answer["meta_info"]["weight_versions"]
    async with stub.client() as client:
        assert (await ask(client)).policy_versions.tolist() == [3, 3]
        stub.delay_s = 0.3
        task = asyncio.create_task(ask(client))
        await asyncio.sleep(0.1)
        await client.update_weights(weights(4), mode="in_flight", timeout_s=5)
        with pytest.raises(GeneratorError, match="changed"):
            await task


async def test_a_request_that_comes_within_an_update_is_sent_after_it():
    """It is of the new weights alone, so one version for all of its tokens says enough."""
    stub = StubEngine()
    stub.answer = reply([1, 2], spans=[("1:4", 0, 2)])
    del stub.answer["meta_info"]["weight_versions"]
    stub.update_s = 0.3
    async with stub.client() as client:
        for mode in ("drain", "in_flight", "abort_resume"):
            stub.calls.clear()
            updating = asyncio.create_task(client.update_weights(weights(4), mode=mode, timeout_s=5))
            while "/update_weights_from_disk" not in stub.paths():  # noqa: ASYNC110  # polls what has no event
                await asyncio.sleep(0.01)
            assert (await ask(client)).policy_versions.tolist() == [4, 4]
            assert stub.paths()[-1] == "/generate"
            await updating


async def test_draining_ends_though_requests_keep_coming():
    stub = StubEngine()
    stub.delay_s = 0.1
    async with stub.client(max_concurrency=2) as client:

        async def keep_asking(name):
            for index in range(8):
                await ask(client, request_id=f"{name}{index}")

        asking = [asyncio.create_task(keep_asking(name)) for name in "abcd"]
        await asyncio.sleep(0.05)
        await client.update_weights(weights(4), mode="drain", timeout_s=5)
        assert not any(task.done() for task in asking)
        await asyncio.gather(*asking)


async def test_an_update_drops_cached_prefixes_before_the_next_request():
    """Case C6: two updates; pause, update with flush, continue, and only then new tokens."""
    stub = StubEngine()
    async with stub.client() as client:
        for version in (4, 5):
            await client.update_weights(weights(version), mode="in_flight", timeout_s=5)
            await ask(client)
        await client.update_weights(weights(6), mode="drain", timeout_s=5)
        await client.update_weights(weights(7), mode="abort_resume", timeout_s=5)
    in_flight = ["/pause_generation", "/update_weights_from_disk", "/continue_generation", "/generate"]
    assert stub.paths() == [*in_flight, *in_flight, "/update_weights_from_disk", *in_flight[:3]]
    updates = [body for path, body in stub.calls if path == "/update_weights_from_disk"]
    assert all(body["flush_cache"] is True for body in updates)
    assert [body["weight_version"] for body in updates] == ["1:4", "1:5", "1:6", "1:7"]
    modes = [body["mode"] for path, body in stub.calls if path == "/pause_generation"]
    assert modes == ["retract", "retract", "abort"]


@pytest.mark.parametrize("how", ["refused", "flush failed", "did nothing", "another life"])
async def test_an_update_that_failed_is_said_and_decoding_goes_on(how):
    stub = StubEngine()
    if how == "refused":
        stub.update = (400, {"success": False, "message": "no such folder"})
    elif how == "flush failed":
        stub.update = (200, {"success": False, "message": "the cache was not flushed"})
    stub.takes_updates = how != "did nothing"
    async with stub.client() as client:
        with pytest.raises(GeneratorError):
            await client.update_weights(weights(4, 2 if how == "another life" else 1), mode="in_flight", timeout_s=5)
        if how != "another life":
            assert stub.paths()[-1] == "/continue_generation"
            # A server that refuses may have changed its weights, or keep a cache of the old ones.
            with pytest.raises(GeneratorError, match="unknown"):
                await ask(client)
            assert "/generate" not in stub.paths()
            stub.update, stub.takes_updates = (200, {"success": True}), True
            await client.update_weights(weights(5), mode="in_flight", timeout_s=5)
        await ask(client)


async def test_an_update_that_is_cancelled_lets_decoding_go_on():
    stub = StubEngine()
    stub.update_s = 30.0
    async with stub.client() as client:
        task = asyncio.create_task(client.update_weights(weights(4), mode="in_flight", timeout_s=60))
        while "/update_weights_from_disk" not in stub.paths():  # noqa: ASYNC110  # polls what has no event
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.1)
        assert stub.paths()[-1] == "/continue_generation"
        with pytest.raises(GeneratorError, match="unknown"):
            await ask(client)


async def test_an_update_that_keeps_the_cache_says_whose_kv_tokens_rest_on():
    """The engine reports nothing: what runs over the update, and what is found in the cache after it, is old."""
    stub = StubEngine()
    stub.answer = reply([1, 2], spans=[("1:3", 0, 1), ("1:4", 1, 2)], cached_tokens=0)
    stub.wants = 2
    async with stub.client() as client:
        running = asyncio.create_task(ask(client, request_id="running"))
        while not stub.num_in_flight:  # noqa: ASYNC110  # polls what has no event
            await asyncio.sleep(0.01)
        await client.update_weights(weights(4), mode="in_flight", keep_kv=True, timeout_s=5)
        assert stub.paths() == [
            "/generate", "/server_info", "/pause_generation", "/update_weights_from_disk", "/continue_generation"
        ]  # fmt: skip
        bodies = dict(stub.calls)
        assert bodies["/pause_generation"]["mode"] == "in_place"
        assert bodies["/update_weights_from_disk"]["flush_cache"] is False
        stub.all_here.set()
        assert (await running).kv_min_policy_version == 3
        for cached, expected in ((0, None), (2, 3)):
            stub.answer = reply([1], spans=[("1:4", 0, 1)], cached_tokens=cached)
            assert (await ask(client)).kv_min_policy_version == expected
        await client.update_weights(weights(5), mode="in_flight", keep_kv=True, timeout_s=5)
        stub.answer = reply([1], spans=[("1:5", 0, 1)])
        assert (await ask(client)).kv_min_policy_version == 3  # the oldest since the cache was dropped
        stub.answer = reply([1], spans=[("1:5", 0, 1)], kv_min_version=None)
        assert (await ask(client)).kv_min_policy_version is None  # the engine knows better
        await client.update_weights(weights(6), mode="in_flight", timeout_s=5)
        stub.answer = reply([1], spans=[("1:6", 0, 1)], cached_tokens=2)
        assert (await ask(client)).kv_min_policy_version is None


async def test_an_engine_that_decodes_ahead_cannot_keep_its_cache():
    stub = StubEngine()
    stub.server = {"disable_overlap_schedule": False}
    async with stub.client() as client:
        with pytest.raises(GeneratorError, match="disable-overlap-schedule"):
            await client.update_weights(weights(4), mode="in_flight", keep_kv=True, timeout_s=5)
        for mode in ("drain", "abort_resume"):
            with pytest.raises(ValueError, match="in_flight alone"):
                await client.update_weights(weights(4), mode=mode, keep_kv=True, timeout_s=5)
        assert stub.paths() == ["/server_info"]
        await ask(client)


async def test_the_cache_of_weights_that_no_run_published_is_not_kept():
    stub = StubEngine()
    stub.version = "default"
    async with stub.client() as client:
        await client.update_weights(weights(4), mode="in_flight", keep_kv=True, timeout_s=5)
    bodies = dict(stub.calls)
    assert bodies["/pause_generation"]["mode"] == "retract"
    assert bodies["/update_weights_from_disk"]["flush_cache"] is True


async def test_kinds_of_weights_are_asked_for_only_where_they_are_taken():
    stub = StubEngine()
    delta = weights(4, kind="delta", base_policy_version=3)
    async with stub.client() as client:
        with pytest.raises(GeneratorError, match="full weights alone, not delta"):
            await client.update_weights(delta, mode="in_flight", timeout_s=5)
        with pytest.raises(GeneratorError, match="disk alone"):
            await client.update_weights(weights(4, transport="nccl"), mode="in_flight", timeout_s=5)
        assert stub.paths() == []
        await ask(client)  # nothing was begun
        stub.model = {"weight_kinds": ["full", "delta", "lora"]}
        await client.update_weights(delta, mode="in_flight", timeout_s=5)
    body = dict(stub.calls)["/update_weights_from_disk"]
    assert (body["kind"], body["base_weight_version"], body["checksum"]) == ("delta", "1:3", "sha256:0")


async def test_who_paused_it_is_who_resumes_it():
    stub = StubEngine()
    async with stub.client() as client:
        await client.pause()
        await client.update_weights(weights(4), mode="in_flight", timeout_s=5)
        assert "/continue_generation" not in stub.paths()
        await client.resume()
    assert stub.paths()[-1] == "/continue_generation"

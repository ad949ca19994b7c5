"""The client against a stub engine: requests, their answers, and who ends them."""

import asyncio
import json
import math
import os
import time

import pytest
from stub_engine import StubEngine, ask, reply, scored, weights

from driftgym.agents.generators.sglang import SGLangGenerator
from driftgym.errors import GeneratorError


async def test_each_token_has_the_version_that_wrote_it():
    """Case C5: 4 tokens at version 3 and 6 at version 5 are stored as that."""
    stub = StubEngine()
    stub.answer = reply(list(range(10)), spans=[("1:3", 0, 4), ("1:5", 4, 10)])
    async with stub.client() as client:
        completion = await ask(client)
        assert completion.policy_versions.tolist() == [3] * 4 + [5] * 6
        stub.answer = reply([1, 2], reason={"type": "abort", "message": "Aborted", "status_code": None})
        aborted = await ask(client)
        assert (aborted.finish_reason, aborted.policy_versions.tolist()) == ("abort", [3, 3])
        stub.answer = reply([], reason={"type": "abort", "message": "Aborted"})
        assert len((await ask(client)).token_ids) == 0


NONSENSE = [
    [],
    {},
    {"output_ids": [1]},
    reply([1], output_token_logprobs=[]),
    reply([1], output_token_logprobs=[[-0.5, 2, None]]),
    reply([1], output_token_logprobs=[[float("nan"), 1, None]]),
    reply([1], output_token_logprobs=[[2.0, 1, None]]),
    reply([1], output_token_logprobs=[None]),
    reply([77]),
    reply([-1]),
    reply([1, 2], spans=[("1:3", 0, 1)]),
    reply([1, 2], spans=[("1:3", 1, 2)]),
    reply([1, 2], spans=[("1:3", 0, 3)]),
    reply([1, 2], spans=[]),
    reply([1], spans=[("default", 0, 1)]),
    reply([1], spans=[("2:3", 0, 1)]),
    reply([1], kv_min_version="default"),
    reply([True]),
    reply([1.5]),
    reply([1], spans=[("1:-3", 0, 1)]),
    reply([1], spans=[("1:3 ", 0, 1)]),
    reply([1], spans=[(3, 0, 1)]),
    reply([], reason={"type": "stop", "matched": None}),
    reply([], reason={"type": "length", "length": 0}),
    reply([1], reason={"type": "tired"}),
    reply([1], reason="stop"),
    reply([1], reason={"type": "abort", "message": "out of memory", "status_code": 500}),
    reply([1], reason={"type": "abort", "message": "not finite", "err_type": "EngineFailure"}),
]


@pytest.mark.parametrize("answer", NONSENSE)
async def test_an_answer_that_makes_no_sense_is_refused(answer):
    stub = StubEngine()
    stub.answer = answer
    async with stub.client() as client:
        with pytest.raises(GeneratorError):
            await ask(client)


@pytest.mark.parametrize("raw", [b"", b"\xff", b"[" * 100_000, b'"tired"'])
async def test_a_body_that_makes_no_sense_is_refused(raw):
    stub = StubEngine()
    stub.raw = raw
    async with stub.client() as client:
        with pytest.raises(GeneratorError):
            await ask(client)


async def test_waiting_for_a_place_does_not_count_as_decoding():
    stub = StubEngine()
    stub.delay_s = 0.3
    async with stub.client(max_concurrency=1) as client:
        completions = await asyncio.gather(*(ask(client, request_id=str(index)) for index in range(3)))
    assert all(completion.latency_s < 0.6 for completion in completions)
    assert stub.peak_in_flight == 1


async def test_tokens_that_are_too_old_are_refused():
    stub = StubEngine()
    async with stub.client() as client:
        assert (await ask(client, min_policy_version=3)).policy_versions.tolist() == [3]
        with pytest.raises(GeneratorError, match="at least 4"):
            await ask(client, min_policy_version=4)


async def test_ids_outside_of_the_vocabulary_are_never_sent():
    stub = StubEngine()
    async with stub.client() as client:
        for ids in ([], [50], [-1], [2**40]):
            with pytest.raises(ValueError, match="prompt"):
                await ask(client, ids=ids)
    assert stub.paths() == []


async def test_a_vocabulary_that_the_server_does_not_say_is_read_from_its_model(tmp_path):
    stub = StubEngine()
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 20}}))
    stub.model = {"model_path": str(tmp_path)}
    async with stub.client() as client:
        with pytest.raises(ValueError, match="vocabulary of 20"):
            await ask(client, ids=[20])
        await ask(client, ids=[19])
    stub.model = {"model_path": "a hub's name"}
    async with stub.client() as client:
        await ask(client, ids=[20])  # nobody knows
        await client.update_weights(weights(4, location=str(tmp_path)), mode="drain", timeout_s=5)
        with pytest.raises(ValueError, match="vocabulary of 20"):
            await ask(client, ids=[20])


async def test_no_id_of_a_request_is_the_beginning_of_another():
    """SGLang aborts every request whose id begins with the one that it is given."""
    stub = StubEngine()
    names = ["1", "10", "100", "r", "r1", "1:r", "", "2:r1"]
    async with stub.client() as client:
        await asyncio.gather(*(ask(client, request_id=name) for name in names))
    sent = [body["rid"] for path, body in stub.calls if path == "/generate"]
    assert not any(one != other and one.startswith(other) for one in sent for other in sent)
    assert len(set(sent)) == len(names)


async def test_what_a_server_would_change_by_default_is_said():
    stub = StubEngine()
    async with stub.client() as client:
        await ask(client)
    (params,) = (body["sampling_params"] for path, body in stub.calls if path == "/generate")
    assert (params["top_k"], params["min_p"], params["repetition_penalty"]) == (-1, 0.0, 1.0)


async def test_scores():
    stub = StubEngine()
    async with stub.client() as client:

        def score(ids=(7, 8, 9), num_given=1):
            return client.score(ids, num_given=num_given, deadline_s=time.monotonic() + 5)

        stub.answer = scored([7, 8, 9], [None, -1.5, -2.5])
        scores = await score()
        assert scores.logprobs.tolist() == [-1.5, -2.5]
        assert scores.version.policy_version == 3
        (body,) = (body for path, body in stub.calls if path == "/generate")
        assert (body["logprob_start_len"], body["sampling_params"]["max_new_tokens"]) == (0, 0)
        stub.answer = scored([8, 9], [None, -2.5])
        assert (await score(num_given=2)).logprobs.tolist() == [-2.5]
        stub.answer = scored([7, 0], [None, -1.5])
        assert (await score((7, 49))).logprobs.tolist() == [-1.5]  # the last id, as SGLang calls it
        for answer in (
            {},
            scored([8, 7], [None, -2.5]),
            scored([8, 0], [None, -2.5]),
            scored([9], [None]),
            scored([9], [float("nan")]),
            scored([9], [-2.5], weight_version="default"),
            scored([9], [-2.5], weight_version="2:3"),
        ):
            stub.answer = answer
            with pytest.raises(GeneratorError):
                await score(num_given=2)
        for ids, num_given in (([7], 1), ([7, 8], 0), ([7, 50], 1), ([], 1)):
            with pytest.raises(ValueError, match="prompt"):
                await score(ids, num_given)


async def test_the_clock_of_a_request_stands_still_while_the_engine_is_paused():
    stub = StubEngine()
    stub.wants = 2
    async with stub.client() as client:
        running = asyncio.create_task(ask(client, request_id="running"))
        while not stub.num_in_flight:  # noqa: ASYNC110  # polls what has no event
            await asyncio.sleep(0.01)
        started = time.monotonic()
        await client.pause()
        late = asyncio.create_task(ask(client, request_id="late"))
        cut = asyncio.create_task(ask(client, request_id="cut"))
        await asyncio.sleep(0.5)
        await client.abort("cut")
        aborted = await cut
        assert (aborted.finish_reason, len(aborted.token_ids)) == ("abort", 0)
        assert (await client.load()).num_queued == 1
        busy_s = (await client.health()).busy_s
        await asyncio.sleep(0.05)
        assert (await client.health()).busy_s == busy_s
        await client.resume()
        completions = await asyncio.gather(running, late)
        elapsed_s = time.monotonic() - started
        assert all(completion.latency_s < elapsed_s - 0.4 for completion in completions)


async def test_the_load_of_replicas_is_summed():
    stub = StubEngine()
    stub.loads = {"loads": [{"num_running_reqs": 3, "num_waiting_reqs": 1}, {"num_running_reqs": 2}]}
    async with stub.client() as client:
        load = await client.load()
        assert (load.num_running, load.num_queued) == (5, 1)
        stub.loads = {"loads": [{"num_running_reqs": "many"}]}
        with pytest.raises(GeneratorError, match="load"):
            await client.load()
    stub.loads, stub.server = None, {"num_running": 4, "num_queued": 2, "busy_s": 1.5}
    async with stub.client() as client:
        for _ in range(2):
            health = await client.health()
            assert (health.num_running, health.num_queued, health.busy_s) == (4, 2, 1.5)
        stub.server = {"busy_s": math.nan}
        assert (await client.health()).busy_s == 0.0, "the client's own count, where the server's makes no sense"
    assert [path for path, _ in stub.calls].count("/v1/loads") == 3  # asked of the second client once


async def test_an_abort_is_asked_for_again_of_an_engine_that_had_not_seen_the_request():
    stub = StubEngine()
    stub.wants = 2
    async with stub.client() as client:
        task = asyncio.create_task(ask(client))
        while not stub.num_in_flight:  # noqa: ASYNC110  # polls what has no event
            await asyncio.sleep(0.01)
        aborting = asyncio.create_task(client.abort("r"))
        while stub.paths().count("/abort_request") < 2:  # noqa: ASYNC110  # polls what has no event
            await asyncio.sleep(0.01)
        stub.all_here.set()
        await asyncio.gather(task, aborting)


async def test_a_request_that_is_cancelled_is_aborted():
    stub = StubEngine()
    stub.delay_s = 30.0
    async with stub.client() as client:
        task = asyncio.create_task(ask(client))
        while not stub.num_in_flight:  # noqa: ASYNC110  # polls what has no event
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while stub.num_in_flight or "/abort_request" not in stub.paths():  # noqa: ASYNC110  # polls what has no event
            await asyncio.sleep(0.01)


async def test_200_requests_are_under_way_at_once():
    """Case H3: the pool of connections is as wide as was configured, and closes what it opened."""
    stub = StubEngine()
    stub.wants = 200
    before = len(os.listdir("/proc/self/fd"))
    async with stub.client(max_concurrency=200) as client:
        asked = (ask(client, request_id=str(index), timeout_s=60) for index in range(300))
        await asyncio.gather(*asked)  # none is answered before 200 are there
        assert stub.peak_in_flight == 200
        warm = len(os.listdir("/proc/self/fd"))
        for _ in range(10):
            await asyncio.gather(*(ask(client, request_id=str(index), timeout_s=60) for index in range(200)))
        assert len(os.listdir("/proc/self/fd")) <= warm
    await asyncio.sleep(0.05)
    assert len(os.listdir("/proc/self/fd")) <= before + 2


async def test_control_calls_pass_when_all_connections_generate():
    stub = StubEngine()
    stub.delay_s = 30.0
    async with stub.client(max_concurrency=2) as client:
        tasks = [asyncio.create_task(ask(client, request_id=str(index))) for index in range(3)]
        while stub.num_in_flight < 2:  # noqa: ASYNC110  # polls what has no event
            await asyncio.sleep(0.01)
        async with asyncio.timeout(5):
            await client.abort("0")
            await client.health()
        assert stub.peak_in_flight == 2
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_closing_fails_all_that_is_under_way_and_all_that_waits():
    stub = StubEngine()
    stub.delay_s = 30.0
    stub.update_s = 30.0
    async with stub.client(max_concurrency=2) as client:
        await client.health()
        requests = [asyncio.create_task(ask(client, request_id=str(index))) for index in range(6)]
        updates = [
            asyncio.create_task(client.update_weights(weights(4), mode="drain", timeout_s=20)) for index in range(20)
        ]
        await asyncio.sleep(0.2)
        await client.close()
        ended = await asyncio.gather(*requests, *updates, return_exceptions=True)
    assert [type(error) for error in ended] == [GeneratorError] * 26


async def test_the_deadline_decides_and_nothing_else():
    """Case H4: no limit of the library ends a slow answer; the deadline does, and aborts the request."""
    stub = StubEngine()
    stub.delay_s = 1.5
    async with stub.client() as client:
        assert (await ask(client, timeout_s=10.0)).token_ids.tolist() == [5]
        started = time.monotonic()
        with pytest.raises(GeneratorError, match="deadline"):
            await ask(client, timeout_s=0.5, request_id="late")
        assert 0.4 < time.monotonic() - started < 1.4
    assert ("/abort_request", {"rid": "4:late"}) in stub.calls


async def test_an_engine_that_is_not_there():
    client = SGLangGenerator("http://127.0.0.1:9", incarnation=1, max_concurrency=4)
    with pytest.raises(GeneratorError, match=r"127\.0\.0\.1:9"):
        await ask(client)
    with pytest.raises(GeneratorError):
        await client.health()
    await client.close()
    with pytest.raises(GeneratorError, match="closed"):
        await ask(client)


async def test_health_wants_weights_with_a_version():
    stub = StubEngine()
    async with stub.client() as client:
        assert (await client.health()).version.policy_version == 3
        stub.version = "default"
        with pytest.raises(GeneratorError, match="incarnation:version"):
            await client.health()

"""The client of vLLM servers: against what a real one answered, and against answers that make no sense."""

import asyncio
import contextlib
import copy
import json
import time

import pytest
from aiohttp import web
from vllm_exchange import FILE, INCARNATION, PLAIN_SCENES, SCENES, play_back

from driftgym.agents.generators.vllm import VLLMGenerator
from driftgym.errors import GeneratorError
from driftgym.types import SamplingParams, WeightUpdate

EXCHANGE = json.loads(FILE.read_bytes())
SAMPLING = SamplingParams(max_tokens=4, stop_token_ids=(9,))
SPANS = [{"version": "3:0", "start": 0, "end": 2}]


@pytest.fixture
def models(tmp_path):
    for version in range(2):
        (tmp_path / str(version)).mkdir()
        (tmp_path / str(version) / "config.json").write_text('{"vocab_size": 100}')
    return tmp_path


@pytest.mark.parametrize("name", SCENES)
async def test_a_recorded_server_that_reports_versions(name, models):
    recorded = EXCHANGE["spans"][name]
    assert await play_back(SCENES[name], recorded, models) == recorded["told"]


@pytest.mark.parametrize("name", PLAIN_SCENES)
async def test_a_recorded_server_that_reports_none(name, models):
    recorded = EXCHANGE["plain"][name]
    assert await play_back(PLAIN_SCENES[name], recorded, models) == recorded["told"]


def test_what_was_recorded_holds_what_it_is_for():
    told = {name: recorded["told"] for name, recorded in EXCHANGE["spans"].items()}
    running, after, version = told["in flight"]
    assert set(running["versions"]) == {0, 1}
    assert (running["kv_min"], set(after["versions"]), version) == (None, {1}, "3:1")
    running, after, _ = told["keeping the cache"]
    assert (set(running["versions"]), running["kv_min"], after["kv_min"]) == ({0, 1}, 0, 0)
    assert told["aborting"][0]["finish_reason"] == "abort"
    assert set(told["aborting"][0]["versions"]) == {0}
    assert [each["finish_reason"] for each in told["abort"]] == ["abort", "length"]
    assert "changed" in EXCHANGE["plain"]["in flight"]["told"][0]["error"]
    assert set(EXCHANGE["plain"]["draining"]["told"][0]["versions"]) == {0}


def reply(ids=(5, 9), *, spans=SPANS, reason="stop", logprobs=None, **changed):
    content = [{"token_id": token_id, "logprob": -0.5, "rank": 1} for token_id in ids]
    choice = {
        "token_ids": list(ids),
        "finish_reason": reason,
        "weight_versions": spans,
        "logprobs": {"content": content if logprobs is None else logprobs},
    }
    return {"choices": [choice], "usage": {"prompt_tokens": 2}, "prompt_logprobs": None, **changed}


class Stub:
    """A vLLM server that answers as it is told, and records what it is asked."""

    def __init__(self):
        self.answers = {
            "/inference/v1/generate": (200, reply()),
            "/weight_info": (200, {"weight_version": "3:0"}),
            "/v1/models": (200, {"data": [{"root": "a hub's name"}]}),
            "/reset_prefix_cache": (200, {"success": True}),
        }
        self.has_token_route = True
        self.calls = []
        self.num_running = 0
        self.delay_s = 0.0

    async def handle(self, request):
        raw = await request.read()
        body = json.loads(raw) if raw else None
        if request.path == "/inference/v1/generate" and not body:
            return web.json_response({}, status=400 if self.has_token_route else 403)
        self.calls.append((request.path_qs, body))
        if request.path == "/metrics":
            return web.Response(text=self.answers["/metrics"])
        if "generate" in request.path or "completions" in request.path:
            self.num_running += 1
            try:
                await asyncio.sleep(self.delay_s)
            finally:
                self.num_running -= 1
        if request.path == "/update_weight_version":
            self.answers["/weight_info"] = (200, {"weight_version": body["new_version"]})
        status, answer = self.answers.get(request.path, (200, {}))
        return web.json_response(answer, status=status)

    def paths(self):
        return [path for path, _ in self.calls if not path.startswith(("/weight_info", "/v1/models"))]

    @contextlib.asynccontextmanager
    async def client(self, **options):
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = "http://{}:{}".format(*runner.addresses[0][:2])
        try:
            async with VLLMGenerator(url, incarnation=INCARNATION, max_concurrency=8, **options) as client:
                yield client
        finally:
            await runner.cleanup()


def ask(client, *, ids=(1, 2), timeout_s=20.0, request_id="r", **options):
    return client.generate(
        ids, SAMPLING, request_id=request_id, session_id="s", deadline_s=time.monotonic() + timeout_s, **options
    )


def weights(models, version, *, location=None, **options):
    return WeightUpdate(
        policy_version=version,
        incarnation=INCARNATION,
        location=location or str(models / str(version)),
        checksum="sha256:0",
        **options,
    )


def logprob(value, token_id=5):
    return [{"token_id": token_id, "logprob": value, "rank": 1}]


ONE = [{"version": "3:0", "start": 0, "end": 1}]
NONSENSE = [
    {},
    {"choices": []},
    {"choices": [7], "usage": {"prompt_tokens": 2}},
    {"choices": [*reply()["choices"], *reply()["choices"]], "usage": {"prompt_tokens": 2}},
    reply(spans=None),
    reply(spans=[]),
    reply(spans=ONE),
    reply(spans=[{"version": "default", "start": 0, "end": 2}]),
    reply(spans=[{"version": "2:0", "start": 0, "end": 2}]),
    reply(spans=[{"version": "3:0", "start": 0}]),
    reply([5], spans=ONE, logprobs=logprob(-9999.0)),
    reply([5], spans=ONE, logprobs=logprob(None)),
    reply([5], spans=ONE, logprobs=logprob("-0.5")),
    reply([5], spans=ONE, logprobs=logprob(2.0)),
    reply([5], spans=ONE, logprobs=logprob(-0.5, 6)),
    reply([5], spans=ONE, logprobs=[]),
    reply([5], spans=ONE, reason="repetition"),
    reply([5], spans=ONE, reason=None),
    reply([77], spans=ONE),
    reply(reason="length"),
    reply([], spans=[]),
]


@pytest.mark.parametrize("answer", NONSENSE)
async def test_an_answer_that_makes_no_sense_is_refused(answer):
    stub = Stub()
    stub.answers["/inference/v1/generate"] = (200, answer)
    async with stub.client(vocab_size=50) as client:
        with pytest.raises(GeneratorError):
            await ask(client)


async def test_what_a_server_would_change_by_default_is_said():
    stub = Stub()
    async with stub.client(vocab_size=50) as client:
        completion = await ask(client)
    assert (completion.token_ids.tolist(), completion.finish_reason) == ([5, 9], "stop")
    ((path, body),) = stub.calls
    params = body["sampling_params"]
    assert (path, body["token_ids"], body["request_id"]) == ("/inference/v1/generate", [1, 2], "r")
    assert (params["ignore_eos"], params["top_k"], params["min_p"], params["repetition_penalty"]) == (True, 0, 0.0, 1.0)
    assert (params["stop_token_ids"], params["max_tokens"], params["logprobs"]) == ([9], 4, 0)
    assert "seed" not in params


async def test_ids_outside_of_the_vocabulary_are_never_sent(models):
    stub = Stub()
    stub.answers["/v1/models"] = (200, {"data": [{"root": str(models / "0")}]})
    async with stub.client() as client:
        for ids in ([], [100], [-1], [2**40]):
            with pytest.raises(ValueError, match="prompt"):
                await ask(client, ids=ids)
        assert stub.paths() == []
        await ask(client, ids=[99])


SCORES = [None, {"2": {"logprob": -1.5, "rank": 3}}, {"3": {"logprob": -2.5, "rank": 1}}]


async def test_scores():
    stub = Stub()
    answer = reply([8], spans=ONE, reason="length", prompt_logprobs=SCORES)
    async with stub.client(vocab_size=50) as client:

        def score(num_given):
            return client.score([1, 2, 3], num_given=num_given, deadline_s=time.monotonic() + 5)

        stub.answers["/inference/v1/generate"] = (200, answer)
        scores = await score(1)
        assert (scores.logprobs.tolist(), str(scores.version)) == ([-1.5, -2.5], "3:0")
        assert (await score(2)).logprobs.tolist() == [-2.5]
        assert stub.calls[0][1]["sampling_params"]["prompt_logprobs"] == 0
        for wrong in (
            {"prompt_logprobs": None},
            {"prompt_logprobs": SCORES[:2]},
            {"prompt_logprobs": [*SCORES[:2], {"4": {"logprob": -2.5}}]},
            {"prompt_logprobs": [*SCORES[:2], {"3": {"logprob": -9999.0}}]},
            {"choices": []},
            reply([8], spans=[{"version": "2:0", "start": 0, "end": 1}], prompt_logprobs=SCORES),
        ):
            stub.answers["/inference/v1/generate"] = (200, {**copy.deepcopy(answer), **wrong})
            with pytest.raises(GeneratorError):
                await score(1)


async def test_an_update_drops_the_cache_and_names_the_version_last(models):
    """Case C6: what the server is asked for, in order; a cache that was not dropped is an error."""
    stub = Stub()
    in_flight = [
        "/pause?mode=keep&clear_cache=true",
        "/collective_rpc",
        "/reset_prefix_cache?reset_running_requests=true&reset_external=true",
        "/update_weight_version",
        "/resume",
    ]
    async with stub.client(vocab_size=50) as client:
        await client.update_weights(weights(models, 1), mode="in_flight", timeout_s=5)
        assert stub.paths() == in_flight
        bodies = dict(stub.calls)
        assert bodies["/collective_rpc"]["kwargs"] == {"weights_path": str(models / "1")}
        assert bodies["/update_weight_version"] == {"new_version": "3:1"}
        stub.calls.clear()
        await client.update_weights(weights(models, 0), mode="abort_resume", timeout_s=5)
        assert stub.paths() == ["/pause?mode=abort&clear_cache=true", *in_flight[1:]]
        stub.calls.clear()
        await client.update_weights(weights(models, 1), mode="drain", timeout_s=5)
        assert stub.paths() == in_flight[1:4]
        stub.calls.clear()
        await client.update_weights(weights(models, 0), mode="in_flight", keep_kv=True, timeout_s=5)
        assert stub.paths() == ["/pause?mode=keep&clear_cache=false", in_flight[1], *in_flight[3:]]
        stub.answers["/reset_prefix_cache"] = (200, {"success": False})
        with pytest.raises(GeneratorError, match="cache"):
            await client.update_weights(weights(models, 1), mode="in_flight", timeout_s=5)
        assert stub.paths()[-1] == "/resume"
        with pytest.raises(GeneratorError, match="unknown"):
            await ask(client)


async def test_weights_that_it_cannot_take_are_not_asked_for(models):
    stub = Stub()
    async with stub.client(vocab_size=50) as client:
        for update, said in (
            (weights(models, 1, location=str(models / "nowhere")), "no model"),
            (weights(models, 1, kind="lora"), "full weights alone"),
            (weights(models, 1, transport="nccl"), "disk alone"),
        ):
            with pytest.raises(GeneratorError, match=said):
                await client.update_weights(update, mode="in_flight", timeout_s=5)
        assert stub.paths() == []
        await ask(client)  # nothing was begun


async def test_a_server_that_can_be_given_no_weights_says_what_it_lacks(models):
    stub = Stub()
    stub.answers["/weight_info"] = (404, {"detail": "Not Found"})
    async with stub.client(vocab_size=50) as client:
        with pytest.raises(GeneratorError, match="VLLM_SERVER_DEV_MODE"):
            await client.health()


async def test_the_load_of_replicas_is_summed():
    stub = Stub()
    gauges = [
        "# TYPE vllm:num_requests_running gauge",
        'vllm:num_requests_running{engine="0",model_name="m"} 3.0',
        'vllm:num_requests_running{engine="1",model_name="m"} 2.0',
        'vllm:num_requests_waiting{engine="0",model_name="m"} 1.0',
        'vllm:num_requests_waiting{engine="1",model_name="m"} 0.0',
        'vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 7.0',
    ]
    stub.answers["/metrics"] = "\n".join(gauges)
    async with stub.client(vocab_size=50) as client:
        load = await client.load()
        assert (load.num_running, load.num_queued) == (5, 1)
        for nonsense in ("", "vllm:num_requests_running many"):
            stub.answers["/metrics"] = nonsense
            with pytest.raises(GeneratorError, match="load"):
                await client.load()


async def test_a_request_that_nobody_waits_for_is_aborted():
    stub = Stub()
    stub.delay_s = 30.0
    async with stub.client(vocab_size=50) as client:
        with pytest.raises(GeneratorError, match="deadline"):
            await ask(client, request_id="late", timeout_s=0.3)
        assert dict(stub.calls)["/abort_requests"] == {"request_ids": ["generate-tokens-late", "cmpl-late-0"]}
        while stub.num_running:  # noqa: ASYNC110  # polls what has no event
            await asyncio.sleep(0.01)


async def test_a_server_that_reports_no_versions_is_asked_after_each_answer(models):
    stub = Stub()
    stub.has_token_route = False
    choice = {"token_ids": [5, 9], "finish_reason": "stop", "logprobs": {"token_logprobs": [-0.5, -0.25]}}
    stub.answers["/v1/completions"] = (200, {"choices": [choice], "usage": {"prompt_tokens": 2}})
    async with stub.client(vocab_size=50) as client:
        completion = await ask(client)
        assert completion.logprobs.tolist() == [-0.5, -0.25]
        assert completion.policy_versions.tolist() == [0, 0]
        assert [path for path, _ in stub.calls] == ["/v1/completions", "/weight_info"]
        body = stub.calls[0][1]
        assert (body["prompt"], body["return_token_ids"], body["request_id"]) == ([1, 2], True, "r")
        stub.delay_s = 0.3
        task = asyncio.create_task(ask(client))
        await asyncio.sleep(0.1)
        await client.update_weights(weights(models, 1), mode="in_flight", timeout_s=5)
        with pytest.raises(GeneratorError, match="changed"):
            await task

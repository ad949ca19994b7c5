"""The embedded server over HTTP, in the test's own loop."""

import asyncio
import json
import os
import time

import aiohttp
import numpy as np
import pytest

from driftgym.agents.generators.embedded.server import main
from driftgym.agents.generators.sglang import SGLangGenerator
from driftgym.types import SamplingParams


async def post(session, url, path, body):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with session.post(url + path, data=data) as response:
        raw = await response.read()
        return response.status, json.loads(raw) if raw else None


def generate_body(ids, **params):
    return {"input_ids": ids, "sampling_params": {"max_new_tokens": 5, **params}, "return_logprob": True}


async def test_the_answer_has_the_shape_of_sglang(model_of, engine_of, served):
    async with served(engine_of(model_of("qwen3"))) as url, aiohttp.ClientSession() as session:
        status, reply = await post(session, url, "/generate", {**generate_body([1, 2, 3]), "rid": "me"})
        assert status == 200
        meta = reply["meta_info"]
        assert meta["id"] == "me"
        assert meta["finish_reason"] == {"type": "length", "length": 5}
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, 5)
        assert meta["weight_versions"] == [{"version": "1:0", "start": 0, "end": 5}]
        pairs = meta["output_token_logprobs"]
        assert [pair[1] for pair in pairs] == reply["output_ids"]
        assert all(float(np.float32(pair[0])) == pair[0] for pair in pairs)
        stop = reply["output_ids"][0]
        _, reply = await post(session, url, "/generate", generate_body([1, 2, 3], stop_token_ids=[stop], temperature=0))
        _, greedy = await post(session, url, "/generate", generate_body([1, 2, 3], temperature=0))
        if greedy["output_ids"][0] == stop:
            assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


NONSENSE = [
    b"",
    b"{",
    b"[1, 2]",
    b"\xff\xfe",
    b"[" * 100_000,
    {},
    {"input_ids": []},
    {"input_ids": [[1, 2]]},
    {"input_ids": "1 2"},
    {"input_ids": [1, 2.5]},
    {"input_ids": [True]},
    {"input_ids": [1, -2]},
    {"input_ids": [1, 120]},
    {"input_ids": [1, 2**40]},
    {"input_ids": [1] * 300},
    {"input_ids": [1], "rid": 7},
    {"input_ids": [1], "stream": True},
    {"input_ids": [1], "sampling_params": [1]},
    generate_body([1], temperature=-1),
    generate_body([1], temperature="hot"),
    generate_body([1], top_p=0),
    generate_body([1], top_p=1.5),
    generate_body([1], max_new_tokens=-1),
    generate_body([1], max_new_tokens=False),
    generate_body([1], max_new_tokens=10**9),
    generate_body([1], max_new_tokens=2.5),
    generate_body([1], stop_token_ids=["</s>"]),
    generate_body([1], sampling_seed="x"),
    generate_body([1], top_k=5),
    {**generate_body([1, 2, 3]), "logprob_start_len": 0},
]
SCORE_NONSENSE: list[dict] = [
    {},
    {"logprob_start_len": -1},
    {"logprob_start_len": 2},
    {"logprob_start_len": 10**12},
    {"logprob_start_len": "0"},
    {"logprob_start_len": True},
    {"logprob_start_len": 0, "return_logprob": False},
    {"logprob_start_len": 0, "input_ids": [1]},
    {"logprob_start_len": 0, "input_ids": []},
    {"logprob_start_len": 0, "input_ids": [1, 120]},
    {"logprob_start_len": 0, "input_ids": [1] * 257},
    {"logprob_start_len": 0, "rid": 3},
]
UPDATE_NONSENSE = [
    {"model_path": 3},
    {"weight_version": None},
    {"flush_cache": "yes"},
    {"kind": "patch"},
    {"kind": "delta"},
    {"kind": "lora", "base_weight_version": 0},
    {"base_weight_version": "1:0"},
    {"checksum": 7},
]


async def test_nonsense_gets_400_and_the_server_lives(model_of, engine_of, served):
    async with served(engine_of(model_of("qwen3"))) as url, aiohttp.ClientSession() as session:
        for body in NONSENSE:
            status, reply = await post(session, url, "/generate", body)
            assert status == 400, body
            assert reply["error"]["message"], body
        assert (await post(session, url, "/pause_generation", {"mode": "x"}))[0] == 400
        assert (await post(session, url, "/abort_request", {}))[0] == 400
        for body in SCORE_NONSENSE:
            scored = {**generate_body([1, 2, 3], max_new_tokens=0), **body}
            status, reply = await post(session, url, "/generate", scored)
            assert status == 400, body
            assert reply["error"]["message"], body
        for body in UPDATE_NONSENSE:
            update = {"model_path": "x", "weight_version": "1:1", **body}
            assert (await post(session, url, "/update_weights_from_disk", update))[0] == 400, body
        assert (await post(session, url, "/nowhere", {}))[0] == 404
        assert (await post(session, url, "/abort_request", {"rid": "unknown"}))[0] == 200
        assert (await post(session, url, "/generate", generate_body([1, 2])))[0] == 200


async def test_a_client_that_goes_away_takes_its_request_along(model_of, engine_of, served):
    engine = engine_of(model_of("qwen3"))
    async with served(engine) as url, aiohttp.ClientSession() as session:
        await post(session, url, "/pause_generation", {"mode": "in_place"})
        task = asyncio.create_task(post(session, url, "/generate", generate_body([1, 2], max_new_tokens=200)))
        await until(lambda: engine.num_queued == 1)
        task.cancel()
        await until(lambda: engine.num_queued == 0)
        await post(session, url, "/continue_generation", {})
        assert engine.num_running == 0


async def until(condition, timeout_s=10.0):
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  # polls what has no event
            await asyncio.sleep(0.005)


@pytest.mark.slow
async def test_a_flood_of_200_is_taken_at_once_and_2000_requests_leak_nothing(model_of, engine_of, served):
    engine = engine_of(model_of("qwen3"), max_batch_size=64)
    async with (
        served(engine) as url,
        SGLangGenerator(url, incarnation=1, max_concurrency=200) as generator,
        aiohttp.ClientSession() as session,
    ):

        async def ask(index):
            return await generator.generate(
                [index % 120, 5, 9],
                SamplingParams(max_tokens=2),
                request_id=f"{index}",
                session_id=f"{index}",
                deadline_s=time.monotonic() + 60,
            )

        await post(session, url, "/pause_generation", {"mode": "in_place"})
        tasks = [asyncio.create_task(ask(index)) for index in range(200)]
        await until(lambda: engine.num_queued == 200)
        open_files = len(os.listdir("/proc/self/fd"))
        await post(session, url, "/continue_generation", {})
        completions = await asyncio.gather(*tasks)
        assert sorted(int(completion.request_id) for completion in completions) == list(range(200))
        assert all(len(completion.token_ids) == 2 for completion in completions)
        for start in range(200, 2000, 200):
            await asyncio.gather(*(ask(index) for index in range(start, start + 200)))
        assert len(os.listdir("/proc/self/fd")) <= open_files


async def test_an_update_without_pause_drains(model_of, engine_of, served, save_model):
    engine = engine_of(model_of("qwen3"), max_batch_size=2)
    folder = save_model(model_of("qwen3", seed=1), "new")
    async with served(engine) as url, aiohttp.ClientSession() as session:
        bodies = [generate_body([1, 2, index], max_new_tokens=60) for index in range(4)]
        tasks = [asyncio.create_task(post(session, url, "/generate", body)) for body in bodies]
        await until(lambda: engine.num_running == 2)
        body = {"model_path": str(folder), "weight_version": "1:1"}
        assert (await post(session, url, "/update_weights_from_disk", body))[0] == 200
        spans = [(await task)[1]["meta_info"]["weight_versions"] for task in tasks]
        assert sorted(span[0]["version"] for span in spans) == ["1:0", "1:0", "1:1", "1:1"]
        assert all(len(span) == 1 for span in spans)


async def test_a_refused_update_answers_400_and_changes_nothing(model_of, engine_of, served, tmp_path):
    engine = engine_of(model_of("qwen3"))
    async with served(engine) as url, aiohttp.ClientSession() as session:
        body = {"model_path": str(tmp_path / "absent"), "weight_version": "1:1"}
        status, reply = await post(session, url, "/update_weights_from_disk", body)
        assert (status, reply["success"]) == (400, False)
        assert engine.version == "1:0"


async def test_queue_time_is_what_was_waited_and_paused(model_of, engine_of, served):
    engine = engine_of(model_of("qwen3"))
    async with (
        served(engine) as url,
        SGLangGenerator(url, incarnation=1, max_concurrency=8) as generator,
        aiohttp.ClientSession() as session,
    ):
        await post(session, url, "/pause_generation", {"mode": "in_place"})
        task = asyncio.create_task(
            generator.generate(
                [1, 2],
                SamplingParams(max_tokens=3),
                request_id="r",
                session_id="s",
                deadline_s=time.monotonic() + 60,
            )
        )
        await until(lambda: engine.num_queued == 1)
        await asyncio.sleep(0.5)
        await post(session, url, "/continue_generation", {})
        assert (await task).latency_s < 0.45


def test_a_folder_without_a_model_is_bad_input(tmp_path, capsys):
    assert main([str(tmp_path / "absent")]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert "no model here" in said[0]
    (tmp_path / "config.json").write_text("{}")
    assert main([str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_context_that_the_model_does_not_take_is_bad_input(model_of, save_model, capsys):
    folder = save_model(model_of("qwen3"), "tiny")
    assert main([str(folder), "--max-context-tokens", "100000"]) == 2
    assert "at most 512" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--max-batch-size", "--num-threads"])
def test_a_size_of_nought_is_bad_input(model_of, save_model, capsys, flag):
    folder = save_model(model_of("qwen3"), "tiny")
    assert main([str(folder), flag, "0"]) == 2
    assert "at least 1" in capsys.readouterr().err

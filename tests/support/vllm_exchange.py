"""What a client and a vLLM server say to each other: played against a real server and recorded, or played back.

An exchange is a list of calls in the order in which they were answered, each with what was asked and what came back.
"""

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from driftgym.agents.generators.vllm import VLLMGenerator
from driftgym.errors import GeneratorError
from driftgym.types import Completion, SamplingParams, WeightUpdate

FILE = Path(__file__).resolve().parents[1] / "data" / "vllm_exchange.json"
INCARNATION = 3
_MODELS = "MODELS"  # in the place of the folder that holds them
_CANDIDATES = re.compile(r',"top_logprobs":\[[^]]*\]')  # half of every answer, and nobody reads it
_SCORE = "score-"  # ids of scorings differ from run to run

Scene = Callable[[VLLMGenerator, Path], Awaitable[Any]]
"""Asks a client for something, with a folder of models by version; returns what JSON can hold."""


async def _ask(client: VLLMGenerator, name: str, *, max_tokens: int = 8, **sampling: Any) -> Completion:
    return await client.generate(
        [5, 6, 7],
        SamplingParams(max_tokens=max_tokens, **sampling),
        request_id=name,
        session_id="s",
        deadline_s=time.monotonic() + 60,
    )


async def _update(client: VLLMGenerator, models: Path, version: int, **options: Any) -> None:
    update = WeightUpdate(
        policy_version=version, incarnation=INCARNATION, location=str(models / str(version)), checksum="sha256:0"
    )
    await client.update_weights(update, **{"mode": "in_flight", "timeout_s": 60, **options})


def _told(completion: Completion) -> dict[str, Any]:
    return {
        "ids": completion.token_ids.tolist(),
        "logprobs": completion.logprobs.round(5).tolist(),
        "versions": completion.policy_versions.tolist(),
        "finish_reason": completion.finish_reason,
        "kv_min": completion.kv_min_policy_version,
    }


async def _answers(client: VLLMGenerator, models: Path) -> Any:
    await _update(client, models, 0)
    greedy = await _ask(client, "greedy", temperature=0.0)
    stopped = await _ask(client, "stopped", max_tokens=50, temperature=0.7, stop_token_ids=tuple(range(0, 100, 5)))
    seeded = [await _ask(client, f"seeded{index}", seed=11) for index in range(2)]
    scores = await client.score([5, 6, 7, *greedy.token_ids], num_given=3, deadline_s=time.monotonic() + 60)
    return [
        *(_told(completion) for completion in (greedy, stopped, *seeded)),
        [scores.logprobs.round(5).tolist(), str(scores.version)],
    ]


async def _over(client: VLLMGenerator, models: Path, **options: Any) -> Any:
    """One that runs over an update to version 1, and one that comes after it."""
    await _update(client, models, 0)
    running = asyncio.create_task(_ask(client, "running", max_tokens=250))
    await asyncio.sleep(0.15)
    await _update(client, models, 1, **options)
    try:
        first = _told(await running)
    except GeneratorError as error:
        first = {"error": str(error)}
    return [first, _told(await _ask(client, "after")), str((await client.health()).version)]


async def _in_flight(client: VLLMGenerator, models: Path) -> Any:
    return await _over(client, models)


async def _keeping(client: VLLMGenerator, models: Path) -> Any:
    return await _over(client, models, keep_kv=True)


async def _aborting(client: VLLMGenerator, models: Path) -> Any:
    return await _over(client, models, mode="abort_resume")


async def _draining(client: VLLMGenerator, models: Path) -> Any:
    return await _over(client, models, mode="drain")


async def _abort(client: VLLMGenerator, models: Path) -> Any:
    await _update(client, models, 0)
    tasks = [asyncio.create_task(_ask(client, name, max_tokens=250)) for name in ("r1", "r10")]
    await asyncio.sleep(0.1)
    await client.abort("r1")
    return [_told(await task) for task in tasks]


async def _pause(client: VLLMGenerator, models: Path) -> Any:
    await _update(client, models, 0)
    running = asyncio.create_task(_ask(client, "running", max_tokens=100))
    await asyncio.sleep(0.05)
    await client.pause()
    paused = await client.load()
    await client.resume()
    told = _told(await running)
    health = await client.health()
    return [told, paused.num_running, health.num_running, health.num_queued, str(health.version)]


async def _refused(client: VLLMGenerator, models: Path) -> Any:
    await _update(client, models, 0)
    try:
        await _ask(client, "hot", temperature=1000.0)
    except GeneratorError as error:
        return str(error).split(": ", 1)[1]


SCENES: dict[str, Scene] = {
    "answers": _answers,
    "in flight": _in_flight,
    "keeping the cache": _keeping,
    "aborting": _aborting,
    "draining": _draining,
    "abort": _abort,
    "pause": _pause,
    "refused": _refused,
}
"""Of a server that reports the weights of each token."""
PLAIN_SCENES: dict[str, Scene] = {name: SCENES[name] for name in ("answers", "in flight", "draining", "abort")}
"""Of one that does not."""


def _normal(body: Any, models: Path) -> Any:
    """A body as it is in every run."""
    text = json.dumps(body).replace(str(models), _MODELS)
    body = json.loads(text)
    if isinstance(body, dict) and str(body.get("request_id", "")).startswith(_SCORE):
        body["request_id"] = _SCORE
    return body


@contextlib.asynccontextmanager
async def _serving(handle: Callable[[web.Request], Awaitable[web.Response]]) -> AsyncIterator[str]:
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield "http://{}:{}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def _client(handle: Callable[[web.Request], Awaitable[web.Response]]) -> AsyncIterator[VLLMGenerator]:
    async with (
        _serving(handle) as url,
        VLLMGenerator(url, incarnation=INCARNATION, max_concurrency=8, vocab_size=100) as client,
    ):
        yield client


async def record(scene: Scene, url: str, models: Path) -> dict[str, Any]:
    """Plays `scene` against the server at `url`, with the models in `models`."""
    calls: list[dict[str, Any]] = []

    async def handle(request: web.Request) -> web.Response:
        raw = await request.read()
        async with (
            aiohttp.ClientSession(headers={"Content-Type": "application/json"}) as session,
            session.request(request.method, url + request.path_qs, data=raw) as response,
        ):
            text = await response.text()
        if request.path == "/metrics":
            text = "\n".join(line for line in text.splitlines() if "vllm:num_requests" in line)
        asked = _normal(json.loads(raw), models) if raw else None
        answer = _CANDIDATES.sub("", text.replace(str(models), _MODELS))
        calls.append(
            {
                "method": request.method,
                "path": request.path_qs,
                "body": asked,
                "status": response.status,
                "answer": answer,
            }
        )
        return web.Response(text=text, status=response.status)

    async with _client(handle) as client:
        told = await scene(client, models)
    return {"calls": calls, "told": told}


class Playback:
    """Answers as a recorded server did, in the order in which it did; what it is asked must be what that one was."""

    def __init__(self, calls: list[dict[str, Any]], models: Path) -> None:
        self._calls = calls
        self._models = models
        self._is_taken = [False] * len(calls)
        self._num_answered = 0
        self._progress = asyncio.Condition()
        self.unexpected: list[str] = []

    @property
    def num_left(self) -> int:
        """Calls that nobody made."""
        return self._is_taken.count(False)

    async def handle(self, request: web.Request) -> web.Response:
        """Waits for its turn, and answers."""
        raw = await request.read()
        asked = (request.method, request.path_qs, _normal(json.loads(raw), self._models) if raw else None)
        index = self._take(asked)
        if index is None:
            self.unexpected.append(f"{asked}")
            return web.json_response({"error": "nobody asked this"}, status=418)
        async with self._progress:
            await self._progress.wait_for(lambda: self._num_answered == index)
            self._num_answered += 1
            self._progress.notify_all()
        call = self._calls[index]
        return web.Response(text=call["answer"].replace(_MODELS, str(self._models)), status=call["status"])

    def _take(self, asked: tuple[str, str, Any]) -> int | None:
        for index, call in enumerate(self._calls):
            if not self._is_taken[index] and (call["method"], call["path"], call["body"]) == asked:
                self._is_taken[index] = True
                return index
        return None


async def play_back(scene: Scene, recorded: dict[str, Any], models: Path) -> Any:
    """What `scene` returns against the recording. Raises AssertionError when it asked anything else, or less."""
    playback = Playback(recorded["calls"], models)
    async with _client(playback.handle) as client:
        told = await scene(client, models)
    assert not playback.unexpected, playback.unexpected[0]
    assert not playback.num_left
    return told

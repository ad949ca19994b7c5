"""An engine that answers as it is told, over HTTP, and records what it is asked; and what a test asks a client."""

import asyncio
import contextlib
import json
import time

from aiohttp import web

from driftgym.agents.generators.sglang import SGLangGenerator
from driftgym.types import SamplingParams, WeightUpdate

SAMPLING = SamplingParams(max_tokens=8)


def reply(ids, *, spans=None, reason=None, **meta):
    """What an engine answers with, its tokens all of weights 1:3 unless `spans` says otherwise."""
    spans = spans if spans is not None else [("1:3", 0, len(ids))]
    return {
        "output_ids": ids,
        "meta_info": {
            "id": "r",
            "finish_reason": reason or {"type": "stop", "matched": ids[-1] if ids else None},
            "weight_version": spans[-1][0] if spans else "1:3",
            "weight_versions": [{"version": v, "start": s, "end": e} for v, s, e in spans],
            "output_token_logprobs": [[-0.5, token_id, None] for token_id in ids],
            **meta,
        },
    }


class StubEngine:
    """Answers `/generate` with `answer`, when `wants` requests are there, after `delay_s`."""

    def __init__(self):
        self.answer = reply([5])
        self.delay_s = 0.0
        self.update_s = 0.0
        self.calls = []
        self.num_in_flight = 0
        self.peak_in_flight = 0
        self.version = "1:3"
        self.update = (200, {"success": True})
        self.takes_updates = True
        self.raw = None
        self.model = {"vocab_size": 50}
        self.server = {}
        self.loads = None
        self.all_here = asyncio.Event()
        self.wants = 0

    async def handle(self, request):
        raw = await request.read()
        body = json.loads(raw) if raw else {}
        self.calls.append((request.path, body))
        if self.raw is not None and request.path == "/generate":
            return web.Response(body=self.raw, content_type="application/json")
        status, answer = await self.respond(request.path, body)
        return web.json_response(answer, status=status)

    async def respond(self, path, body):
        if path == "/generate":
            self.num_in_flight += 1
            self.peak_in_flight = max(self.peak_in_flight, self.num_in_flight)
            if self.num_in_flight >= self.wants:
                self.all_here.set()
            try:
                await self.all_here.wait()
                await asyncio.sleep(self.delay_s)
            finally:
                self.num_in_flight -= 1
            return 200, self.answer
        if path == "/update_weights_from_disk":
            await asyncio.sleep(self.update_s)
            if self.takes_updates and self.update[0] == 200:
                self.version = body["weight_version"]
            return self.update
        if path == "/v1/loads":
            return (200, self.loads) if self.loads is not None else (404, {"detail": "Not Found"})
        if path == "/server_info":
            return 200, self.server
        return 200, {"weight_version": self.version, **self.model}

    def paths(self):
        """What it was asked, in order, but for the questions of which weights it has."""
        return [path for path, _ in self.calls if path != "/model_info"]

    @contextlib.asynccontextmanager
    async def client(self, **options):
        """A client of it, of life 1."""
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=512).start()
        url = "http://{}:{}".format(*runner.addresses[0][:2])
        try:
            async with SGLangGenerator(url, incarnation=1, max_concurrency=options.pop("max_concurrency", 8)) as client:
                yield client
        finally:
            await runner.cleanup()


def ask(client, *, request_id="r", timeout_s=20.0, ids=(1, 2), **options):
    return client.generate(
        ids, SAMPLING, request_id=request_id, session_id="s", deadline_s=time.monotonic() + timeout_s, **options
    )


def weights(version, incarnation=1, location="/w", **options):
    return WeightUpdate(
        policy_version=version, incarnation=incarnation, location=location, checksum="sha256:0", **options
    )


def scored(ids, logprobs, **meta):
    pairs = [[logprob, token_id, None] for logprob, token_id in zip(logprobs, ids, strict=True)]
    return {"output_ids": [], "meta_info": {"input_token_logprobs": pairs, "weight_version": "1:3", **meta}}

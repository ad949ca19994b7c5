"""A server that answers every request with the same tokens, in the part of SGLang's protocol that a rollout uses.

It is a process of its own, so that what it costs is not counted where a client is measured. It ends when its standard
input does.

    python benchmarks/scripted_engine.py --token-ids 5,6,7 [--latency-s 0.2]
"""

import argparse
import asyncio
import json
import sys
from typing import Any

from aiohttp import web

VERSION = "1:0"
VOCAB_SIZE = 2**20


class ScriptedEngine:
    """Answers with `token_ids` after `latency_s`."""

    def __init__(self, token_ids: list[int], *, latency_s: float) -> None:
        self._token_ids = token_ids
        self._latency_s = latency_s
        self._num_running = 0

    def application(self) -> web.Application:
        """Its routes."""
        application = web.Application()
        application.router.add_post("/generate", self._generate)
        application.router.add_get("/model_info", self._model_info)
        application.router.add_get("/server_info", self._server_info)
        return application

    async def _generate(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        self._num_running += 1
        try:
            await asyncio.sleep(self._latency_s)
        finally:
            self._num_running -= 1
        return web.json_response({"output_ids": self._token_ids, "meta_info": self._meta_info(body)})

    def _meta_info(self, body: dict[str, Any]) -> dict[str, Any]:
        """As much as a real server says."""
        ids = self._token_ids
        return {
            "id": body["rid"],
            "finish_reason": {"type": "stop", "matched": ids[-1]},
            "prompt_tokens": len(body["input_ids"]),
            "weight_version": VERSION,
            "num_retractions": 0,
            "input_token_logprobs": [],
            "output_token_logprobs": [[-0.123456789 * (1 + index), ids[index], None] for index in range(len(ids))],
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_versions": [{"version": VERSION, "start": 0, "end": len(ids)}],
            "dp_rank": None,
            "e2e_latency": self._latency_s,
        }

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "", "weight_version": VERSION, "vocab_size": VOCAB_SIZE})

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response({"num_running": self._num_running, "num_queued": 0, "busy_s": 0.0})


async def serve(engine: ScriptedEngine) -> None:
    """Prints where it listens, and answers until standard input ends."""
    runner = web.AppRunner(engine.application(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=2048).start()
    print(json.dumps({"url": "http://{}:{}".format(*runner.addresses[0][:2])}), flush=True)
    try:
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await runner.cleanup()


def main() -> None:
    """Serves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--token-ids", required=True, help="of every answer, with commas; the last one ends it")
    parser.add_argument("--latency-s", type=float, default=0.0, help="of every answer")
    arguments = parser.parse_args()
    token_ids = [int(each) for each in arguments.token_ids.split(",")]
    asyncio.run(serve(ScriptedEngine(token_ids, latency_s=arguments.latency_s)))


if __name__ == "__main__":
    main()

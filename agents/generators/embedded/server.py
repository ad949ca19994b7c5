"""The embedded generator's server: a process of its own that speaks a part of SGLang's native HTTP API.

`driftgym serve MODEL` and `python -m driftgym.agents.generators.embedded.server MODEL` start it. When it is ready it
prints one line of JSON to standard output: `{"url": ..., "pid": ...}`.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeVar

import torch
from aiohttp import web

from driftgym.agents.generators.embedded import protocol
from driftgym.agents.generators.embedded.engine import Engine
from driftgym.agents.generators.embedded.loop import EngineLoop
from driftgym.agents.generators.embedded.model import ModelRunner, load_model
from driftgym.agents.generators.embedded.weights import WeightsRefusedError
from driftgym.errors import ConfigError

_MAX_BODY_BYTES = 64 * 2**20
_PAUSE_MODES = ("abort", "retract", "in_place")
_EXIT_GRACE_S = 5.0
_MAX_PREFILL_TOKENS = 8192
_MIN_PREFILL_TOKENS = 256
_STEP_FLOP = 1e11  # one to five seconds of one core

_AnyEngine = TypeVar("_AnyEngine", bound=Engine)


class GeneratorServer:
    """The HTTP side of an `EngineLoop`."""

    def __init__(self, loop: EngineLoop, *, model_path: str) -> None:
        self._loop = loop
        self._engine = loop.engine
        self._model_path = model_path

    def application(self) -> web.Application:
        """The routes. Whatever a client sends, it gets an answer and the server lives."""
        application = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_answer_bad_requests])
        application.router.add_post("/generate", self._generate)
        application.router.add_post("/abort_request", self._abort)
        application.router.add_post("/pause_generation", self._pause)
        application.router.add_post("/continue_generation", self._continue)
        application.router.add_post("/update_weights_from_disk", self._update_weights)
        application.router.add_post("/update_weights_from_tensor", self._name_weights)
        application.router.add_get("/health", self._health)
        application.router.add_get("/model_info", self._model_info)
        application.router.add_get("/server_info", self._server_info)
        return application

    async def _generate(self, request: web.Request) -> web.Response:
        wanted = protocol.parse_generate(protocol.parse_body(await request.read()))
        request_id = wanted.request_id or uuid.uuid4().hex
        try:
            if wanted.score_start is None:
                answer = await self._loop.generate(request_id, wanted.input_ids, wanted.sampling)
                return _json(protocol.format_answer(answer))
            scores = await self._loop.score(request_id, wanted.input_ids, start=wanted.score_start)
            return _json(protocol.format_scores(scores))
        except ValueError as error:
            raise protocol.BadRequestError(str(error)) from None

    async def _abort(self, request: web.Request) -> web.Response:
        body = protocol.parse_body(await request.read())
        request_id = body.get("rid")
        if body.get("abort_all"):
            self._loop.abort(None)
        elif isinstance(request_id, str):
            self._loop.abort(request_id)
        else:
            raise protocol.BadRequestError("give rid, or abort_all")
        return web.Response()

    async def _pause(self, request: web.Request) -> web.Response:
        mode = protocol.parse_body(await request.read()).get("mode", "abort")
        if mode not in _PAUSE_MODES:
            raise protocol.BadRequestError(f"mode: one of {', '.join(_PAUSE_MODES)}")
        self._loop.pause(mode)
        return _json({"status": "ok", "message": "Generation paused successfully."})

    async def _continue(self, request: web.Request) -> web.Response:
        await request.read()
        self._loop.resume()
        return _json({"status": "ok", "message": "Generation continued successfully."})

    async def _update_weights(self, request: web.Request) -> web.Response:
        order, flush_cache = protocol.parse_weights(protocol.parse_body(await request.read()))
        try:
            await self._loop.update_weights(order, flush_cache=flush_cache)
        except WeightsRefusedError as error:
            return _json({"success": False, "message": str(error)}, status=400)
        return _json({"success": True, "message": f"Weight version updated to {order.version}."})

    async def _name_weights(self, request: web.Request) -> web.Response:
        version = protocol.parse_version(protocol.parse_body(await request.read()))
        try:
            await self._loop.name_weights(version)
        except WeightsRefusedError as error:
            return _json({"success": False, "message": str(error)}, status=400)
        return _json({"success": True, "message": f"Weight version updated to {version}."})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _model_info(self, request: web.Request) -> web.Response:
        return _json(
            {
                "model_path": self._model_path,
                "weight_version": self._engine.version,
                "base_weight_version": self._engine.weights.base_version,
                "weight_kinds": self._engine.weights.kinds,
                "weight_transports": self._engine.weights.transports,
                "max_context_tokens": self._engine.max_context_tokens,
                "vocab_size": self._engine.vocab_size,
            }
        )

    async def _server_info(self, request: web.Request) -> web.Response:
        return _json(
            {
                "num_running": self._engine.num_running,
                "num_queued": self._engine.num_queued,
                "busy_s": self._engine.busy_s,
                "num_sampled_tokens": self._engine.num_sampled_tokens,
                "is_paused": self._engine.is_paused,
            }
        )


@web.middleware
async def _answer_bad_requests(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        response: web.StreamResponse = await handler(request)
    except protocol.BadRequestError as error:
        return _json({"error": {"message": str(error)}}, status=400)
    except web.HTTPException as error:
        return _json({"error": {"message": f"{request.method} {request.path}: {error.reason}"}}, status=error.status)
    return response


def _json(value: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=json.dumps(value).encode(), status=status, content_type="application/json")


def serve(
    model: str,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    max_batch_size: int = 64,
    max_context_tokens: int = 1024,
    num_threads: int = 1,
    weight_version: str = "0:0",
    device: str = "cpu",
    dtype: str = "float32",
    exit_with_stdin: bool = False,
) -> None:
    """Serves the model in the folder `model` until SIGTERM or SIGINT. Blocks.

    Args:
        model: a folder that transformers can load.
        host, port: where to listen; port 0 takes a free one.
        max_batch_size: requests that decode together; more wait.
        max_context_tokens: prompt and answer of one request.
        num_threads: of torch, on the CPU.
        weight_version: the name of the weights in the folder.
        device, dtype: as torch calls them.
        exit_with_stdin: end when standard input does, so that no server outlives the process that started it.

    Raises:
        ConfigError: the model cannot be served, or the address cannot be had; one line.
    """
    if min(max_batch_size, max_context_tokens, num_threads) < 1:
        raise ConfigError("max_batch_size, max_context_tokens and num_threads must be at least 1")
    torch.set_num_threads(num_threads)
    module = load_model(model, device=device, dtype=dtype)
    engine = make_engine(
        Engine,
        module,
        model_path=model,
        max_batch_size=max_batch_size,
        max_context_tokens=max_context_tokens,
        weight_version=weight_version,
    )
    asyncio.run(_serve(engine, model_path=model, host=host, port=port, exit_with_stdin=exit_with_stdin))


def make_engine(
    kind: type[_AnyEngine],
    module: Any,
    *,
    model_path: str,
    max_batch_size: int,
    max_context_tokens: int,
    weight_version: str,
) -> _AnyEngine:
    """An engine over a transformers model.

    Args:
        kind: `Engine`, or one like it.
        module: the model; not copied.
        model_path: how errors call it.
        max_batch_size, max_context_tokens, weight_version: see `serve`.

    Raises:
        ConfigError: the model does not take so many tokens, or cannot be served.
    """
    longest = getattr(module.config.get_text_config(), "max_position_embeddings", max_context_tokens)
    if max_context_tokens > longest:
        raise ConfigError(
            f"{model_path}: max_context_tokens is {max_context_tokens}, the model takes at most {longest}"
        )
    return kind(
        ModelRunner(module, num_slots=max_batch_size, max_context_tokens=max_context_tokens),
        max_batch_size=max_batch_size,
        max_context_tokens=max_context_tokens,
        weight_version=weight_version,
        max_prefill_tokens=_max_prefill_tokens(module),
    )


def _max_prefill_tokens(module: Any) -> int:
    """How many prompt tokens one step may read: on the CPU so few that HTTP is answered again within seconds."""
    if module.device.type != "cpu":
        return _MAX_PREFILL_TOKENS
    affordable = int(_STEP_FLOP / (2 * module.num_parameters()))
    return min(_MAX_PREFILL_TOKENS, max(_MIN_PREFILL_TOKENS, affordable))


async def _serve(engine: Engine, *, model_path: str, host: str, port: int, exit_with_stdin: bool) -> None:
    loop = EngineLoop(engine)
    async with listening(loop, model_path=model_path, host=host, port=port) as url:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        if exit_with_stdin:
            _watch_stdin(asyncio.get_running_loop(), stop)
        print(json.dumps({"url": url, "pid": os.getpid()}), flush=True)
        await run_until(stop, loop)


@contextlib.asynccontextmanager
async def listening(loop: EngineLoop, *, model_path: str, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Answers HTTP for `loop`, which the caller runs, while the context is open; yields the server's root.

    Raises:
        ConfigError: the address cannot be had.
    """
    # `handler_cancellation`: a client that goes away takes its request with it.
    runner = web.AppRunner(
        GeneratorServer(loop, model_path=model_path).application(),
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=1.0,
    )
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port, backlog=1024).start()
        except OSError as error:
            raise ConfigError(f"{host}:{port}: cannot listen there: {error.strerror}") from None
        address, bound_port = runner.addresses[0][:2]
        yield f"http://[{address}]:{bound_port}" if ":" in address else f"http://{address}:{bound_port}"
    finally:
        await runner.cleanup()


async def run_until(stop: asyncio.Event, loop: EngineLoop) -> None:
    """Runs the engine until `stop` is set; raises what the engine raises."""
    running = asyncio.create_task(loop.run())
    stopping = asyncio.create_task(stop.wait())
    done, pending = await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    for task in done:
        task.result()


def _watch_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Sets `stop` when standard input ends; a process that has not ended some seconds later is ended hard."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        with contextlib.suppress(RuntimeError):  # the loop has closed
            loop.call_soon_threadsafe(stop.set)
        time.sleep(_EXIT_GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, name="stdin", daemon=True).start()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of the server. Returns the exit code: 2 on bad input."""
    parser = argparse.ArgumentParser(prog="python -m driftgym.agents.generators.embedded.server")
    parser.add_argument("model", help="a folder that transformers can load")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--max-batch-size", type=int, default=64)
    parser.add_argument("--max-context-tokens", type=int, default=1024)
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--weight-version", default="0:0")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--exit-with-stdin", action="store_true")
    try:
        serve(**vars(parser.parse_args(arguments)))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Connections to one engine: no limit of the library, and every failure a GeneratorError."""

import asyncio
import contextlib

import pytest
from aiohttp import web

from driftgym.agents.generators.http import EngineHttp, EngineRefusedError
from driftgym.errors import GeneratorError


@contextlib.asynccontextmanager
async def connected(handle, *, max_concurrency=2):
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    http = EngineHttp("http://{}:{}/".format(*runner.addresses[0][:2]), max_concurrency=max_concurrency)
    try:
        yield http
    finally:
        await http.close()
        await runner.cleanup()


async def test_no_session_has_a_limit_of_its_own():
    """Case H4: aiohttp's default would end a call after 300 s."""

    async def handle(request):
        return web.json_response({"path": request.path_qs})

    async with connected(handle) as http:
        assert await http.get("/a?b=c") == {"path": "/a?b=c"}
        for session in http._sessions:
            timeout = session.timeout
            assert (timeout.total, timeout.connect, timeout.sock_connect, timeout.sock_read) == (None,) * 4
        assert [session.connector.limit for session in http._sessions] == [2, 8]


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (b'{"error": {"message": "too long"}}', "too long"),
        (b'{"error": "too long"}', "too long"),
        (b'{"message": "too long", "success": false}', "too long"),
        (b"too long", "b'too long'"),
        (b"", "b''"),
    ],
)
async def test_a_refusal_says_why(body, detail):
    async def handle(request):
        return web.Response(body=body, status=400)

    async with connected(handle) as http:
        with pytest.raises(EngineRefusedError) as caught:
            await http.post("/x", {})
        assert (caught.value.status, caught.value.detail) == (400, detail)
        with pytest.raises(EngineRefusedError):
            await http.get_text("/x")


async def test_text_is_no_json():
    async def handle(request):
        return web.Response(text="num_running 3")

    async with connected(handle) as http:
        assert await http.get_text("/metrics") == "num_running 3"
        with pytest.raises(GeneratorError, match="no JSON object"):
            await http.get("/metrics")


async def test_a_call_that_is_cancelled_closes_its_connection():
    gone, here = asyncio.Event(), asyncio.Event()

    async def handle(request):
        here.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            gone.set()
            raise

    async with connected(handle) as http:
        task = asyncio.create_task(http.post("/x", {}, generates=True))
        await here.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(gone.wait(), 10)


async def test_closing_ends_what_is_under_way():
    here = asyncio.Event()

    async def handle(request):
        here.set()
        await asyncio.sleep(60)

    async with connected(handle, max_concurrency=1) as http:
        tasks = [asyncio.create_task(http.post("/x", {}, generates=True)) for _ in range(3)]
        await here.wait()
        await http.close()
        assert {type(error) for error in await asyncio.gather(*tasks, return_exceptions=True)} == {GeneratorError}
        with pytest.raises(GeneratorError, match="closed"):
            await http.get("/x")

"""Egress by name from real boxes: a server of this machine, reached through the proxy within the box."""

import asyncio
import resource
import socket
import time
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio
from aiohttp import web
from docker_engine import require_gvisor

from driftgym.sandboxes.base import MIB, ExecResult, SandboxProcess, SandboxSpec
from driftgym.sandboxes.docker import DockerSandbox
from driftgym.sandboxes.docker_provider import DockerProvider

pytestmark = pytest.mark.docker

START_TIMEOUT_S = 60.0
NUM_BYTES = 50 * MIB
CHUNK = b"z" * 65536


class Target:
    """A server that counts, floods, stalls and swallows."""

    def __init__(self) -> None:
        self.port = 0
        self.num_received = 0
        self.num_open = 0
        self.runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=0)
        app.router.add_get("/hello", self.hello)
        app.router.add_get("/many", self.many)
        app.router.add_get("/endless", self.endless)
        app.router.add_put("/take", self.take)
        app.router.add_put("/stall", self.stall)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
        await self.runner.setup()
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)  # what nobody reads is soon full
        listener.bind(("127.0.0.1", 0))
        await web.SockSite(self.runner, listener).start()
        self.port = self.runner.addresses[0][1]

    async def hello(self, request: web.Request) -> web.Response:
        return web.Response(text=f"hello {request.host}")

    async def many(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(NUM_BYTES)})
        await response.prepare(request)
        for _ in range(NUM_BYTES // len(CHUNK)):
            await response.write(CHUNK)
        return response

    async def endless(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        self.num_open += 1
        try:
            while True:
                await response.write(CHUNK)
        finally:
            self.num_open -= 1

    async def take(self, request: web.Request) -> web.Response:
        num_bytes = 0
        async for data in request.content.iter_any():
            num_bytes += len(data)
        return web.Response(text=str(num_bytes))

    async def stall(self, request: web.Request) -> web.Response:
        self.num_open += 1
        try:
            await asyncio.sleep(3600)
        finally:
            self.num_open -= 1
        return web.Response()


@pytest_asyncio.fixture
async def target() -> AsyncIterator[Target]:
    target = Target()
    await target.start()
    assert target.runner is not None
    yield target
    await target.runner.cleanup()


@pytest_asyncio.fixture(params=[None, pytest.param("runsc", marks=pytest.mark.gvisor)], ids=["docker", "gvisor"])
async def plain(request: pytest.FixtureRequest, docker_provider: DockerProvider) -> SandboxSpec:
    """A box of each runtime."""
    if request.param is not None:
        await require_gvisor(docker_provider.engine)
    return SandboxSpec(runtime=request.param)


@pytest_asyncio.fixture
async def box(plain: SandboxSpec, docker_provider: DockerProvider, target: Target) -> DockerSandbox:
    """A box without network that may reach the server, by the one name that leads to this machine."""
    spec = plain.model_copy(update={"egress": (f"localhost:{target.port}", "pypi.org"), "max_pids": 128})
    box = await docker_provider.start(spec, timeout_s=START_TIMEOUT_S)
    assert isinstance(box, DockerSandbox)
    return box


FETCH = """
import sys, urllib.request, urllib.error
for url in sys.argv[1:]:
    try:
        print(200, urllib.request.urlopen(url, timeout=20).read().decode())
    except urllib.error.HTTPError as error:
        print(error.code, error.read().decode().strip())
    except OSError as error:
        print(0, error)
"""


async def run(box: DockerSandbox, script: str, *args: str, **env: str) -> ExecResult:
    # The server is this machine's `localhost`, which programs rightly take for their own.
    argv: Sequence[str] = ["python3", "-c", script, *args]
    return await box.exec(argv, env={"no_proxy": "", **env}, timeout_s=120)


async def test_programs_reach_what_is_named_and_nothing_else(box: DockerSandbox, target: Target) -> None:
    here = f"http://localhost:{target.port}/hello"
    result = await run(box, FETCH, here, "http://localhost/", "http://evil.example/", "https://evil.example/")
    lines = result.stdout.splitlines()
    assert lines[0] == f"200 hello localhost:{target.port}", result
    assert lines[1].startswith("403 driftgym: localhost:80 may not be reached from this box")
    assert lines[2].startswith("403 driftgym: evil.example:80 may not be reached from this box")
    assert "403" in lines[3]
    assert (await run(box, FETCH, f"http://127.0.0.1:{target.port}/hello")).stdout.startswith("403")
    direct = await run(box, FETCH, here, http_proxy="", HTTP_PROXY="")
    assert direct.stdout.startswith("0 ")


async def test_proxy_is_in_the_environment(box: DockerSandbox) -> None:
    lines = (await box.exec("echo $http_proxy $https_proxy; echo $HTTP_PROXY $HTTPS_PROXY; echo $no_proxy")).stdout
    assert lines == "http://127.0.0.1:3128 http://127.0.0.1:3128\n" * 2 + "localhost,127.0.0.1\n"
    process = await box.spawn(["sh", "-c", "read line; echo $https_proxy"])
    assert (await process.ask("go", timeout_s=10)).text == "http://127.0.0.1:3128"


async def test_box_without_egress_has_no_proxy(plain: SandboxSpec, docker_provider: DockerProvider) -> None:
    box = await docker_provider.start(plain, timeout_s=START_TIMEOUT_S)
    assert (await box.exec("echo $http_proxy")).stdout == "\n"
    probe = "import socket; socket.create_connection(('127.0.0.1', 3128))"
    assert (await box.exec(["python3", "-c", probe])).exit_code == 1


CONNECT = """
import socket, sys, threading
port, num_connections, num_bytes = map(int, sys.argv[1:4])
failures = []
def play(index):
    try:
        peer = socket.create_connection(("127.0.0.1", 3128), timeout=50)
        peer.sendall(b"CONNECT localhost:%d HTTP/1.1\\r\\n\\r\\n" % port)
        answers = peer.makefile("rb")
        assert b" 200 " in answers.readline()
        answers.readline()
        peer.sendall(b"PUT /take HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n")
        peer.sendall(b"Content-Length: %d\\r\\n\\r\\n" % num_bytes)
        for start in range(0, num_bytes, 65536):
            peer.sendall(bytes(min(65536, num_bytes - start)))
        answer = answers.read()
        assert answer.endswith(b"\\r\\n\\r\\n%d" % num_bytes), answer
    except Exception as error:
        failures.append(repr(error))
threads = [threading.Thread(target=play, args=(i,)) for i in range(num_connections)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(len(failures), failures[:3])
"""


async def test_many_connections_at_once(box: DockerSandbox, target: Target) -> None:
    result = await run(box, CONNECT, str(target.port), "64", "200000")
    assert result.stdout == "0 []\n", result
    assert box._gate is not None
    await none_left(box)
    assert box._gate.num_allowed == 64


DOWNLOAD = """
import sys, urllib.request
answer = urllib.request.urlopen(sys.argv[1])
print(sum(map(len, iter(lambda: answer.read(65536), b""))))
"""


async def toolbox_peak_bytes(box: DockerSandbox) -> int:
    """The most memory that the toolbox has had; under gVisor, which does not tell, what it has."""
    script = (
        "for f in /proc/[0-9]*/cmdline; do grep -q toolbox_relay $f && cat ${f%cmdline}status; done 2>/dev/null"
        " | sed -n 's/^Vm\\(HWM\\|RSS\\)://p' | sort -n | tail -n 1"
    )
    words = (await box.exec(script)).stdout.split()
    return int(words[0]) * 1024


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_large_transfers_need_little_memory(box: DockerSandbox, target: Target) -> None:
    own_before, box_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, await toolbox_peak_bytes(box)
    started = time.monotonic()
    down = await run(box, DOWNLOAD, f"http://localhost:{target.port}/many")
    assert down.stdout == f"{NUM_BYTES}\n", down
    half = time.monotonic()
    up = await run(box, CONNECT, str(target.port), "1", str(NUM_BYTES))
    assert up.stdout == "0 []\n", up
    own_after, box_after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, await toolbox_peak_bytes(box)
    print(
        f"down {NUM_BYTES / MIB / (half - started):.0f}, up {NUM_BYTES / MIB / (time.monotonic() - half):.0f} MiB/s, "
        f"own peak +{(own_after - own_before) / 1024:.1f} MiB, toolbox +{(box_after - box_before) / MIB:.1f} MiB"
    )
    assert (own_after - own_before) * 1024 < 20 * MIB
    assert box_after - box_before < 8 * MIB


async def none_left(box: DockerSandbox) -> None:
    """Waits until the gate serves no connection."""
    assert box._gate is not None
    for _ in range(1000):
        if box._gate.num_connections == 0:
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"{box._gate.num_connections} connections are left")


async def test_killed_program_leaves_no_connection(box: DockerSandbox, target: Target) -> None:
    url = f"http://localhost:{target.port}/endless"
    result = await box.exec(["python3", "-c", DOWNLOAD, url], env={"no_proxy": ""}, timeout_s=1.0)
    assert result.timed_out
    await none_left(box)
    for _ in range(500):
        if not target.num_open:
            break
        await asyncio.sleep(0.01)
    assert target.num_open == 0


STALL = """
import socket, sys
num_sent, peers = 0, []
for _ in range(40):
    peer = socket.create_connection(("127.0.0.1", 3128))
    peer.sendall(b"PUT http://localhost:%s/stall HTTP/1.1\\r\\n" % sys.argv[1].encode())
    peer.sendall(b"Content-Length: 9999999999\\r\\n\\r\\n")
    peer.setblocking(False)
    peers.append(peer)
for line in sys.stdin:
    for peer in peers:
        try: num_sent += peer.send(bytes(65536))
        except BlockingIOError: pass
    print(num_sent, flush=True)
"""


async def stall(box: DockerSandbox, target: Target) -> SandboxProcess:
    """A program whose 40 connections to the server have filled whatever is in between."""
    process = await box.spawn(["python3", "-c", STALL, str(target.port)])
    counts = ["first", "second"]
    while target.num_open < 40 or len(set(counts[-5:])) > 1:
        counts.append((await process.ask("more", timeout_s=30)).text)
        await asyncio.sleep(0.05)
    print(f"{int(counts[-1]) / 40 / 1024:.0f} KiB a connection")
    return process


async def exec_latency_s(box: DockerSandbox) -> float:
    """The median of some commands."""
    samples = []
    for _ in range(15):
        started = time.monotonic()
        assert (await box.exec(["true"])).exit_code == 0
        samples.append(time.monotonic() - started)
    return sorted(samples)[len(samples) // 2]


@pytest.mark.slow
async def test_stalled_connections_hold_up_no_command_and_end_at_reset(box: DockerSandbox, target: Target) -> None:
    before_s = await exec_latency_s(box)
    process = await stall(box, target)
    during_s = await exec_latency_s(box)
    print(f"exec p50 {before_s * 1000:.1f} ms, with 40 stalled connections {during_s * 1000:.1f} ms")
    result = await run(box, FETCH, f"http://localhost:{target.port}/hello")
    assert result.stdout.startswith("200 hello"), result
    await box.reset()
    assert not process.is_alive
    await none_left(box)
    assert (await run(box, FETCH, f"http://localhost:{target.port}/hello")).stdout.startswith("200 hello")


async def test_close_ends_connections(box: DockerSandbox, target: Target) -> None:
    await stall(box, target)
    await box.close()
    assert box._gate is not None
    assert box._gate.num_connections == 0

"""Egress by name: what the rules let through, the proxy's answers, flow control, deadlines."""

import asyncio
import contextlib
import ipaddress
import logging
import os
import resource
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import pytest_asyncio

from driftgym.config import parse_config
from driftgym.errors import ConfigError
from driftgym.sandboxes.base import SandboxSpec
from driftgym.sandboxes.egress import EgressGate, check_rules
from driftgym.sandboxes.egress_dial import Resolver
from driftgym.sandboxes.egress_http import RefusedError, parse_head
from driftgym.sandboxes.egress_rules import is_public, parse_host, parse_rule
from driftgym.sandboxes.toolbox_io import Poller
from driftgym.sandboxes.toolbox_relay import MAX_CONNECTIONS, TOTAL_WINDOW_BYTES, WINDOW_BYTES, Relay

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
MIB = 1024 * 1024


class Pair:
    """Both ends, joined in memory: a relay on a free port of this machine, and its gate."""

    def __init__(self, *allowed: str, **options: Any) -> None:
        self.poller = Poller()
        self.relay = Relay(self.poller, self, port=0)  # type: ignore[arg-type]
        self.gate = EgressGate(allowed, self._to_box, **options)
        self.loop = asyncio.get_running_loop()
        self.loop.add_reader(self.poller.epoll.fileno(), self.poller.wait, 0)
        self.num_under_way = 0
        self.most_under_way = 0
        self.is_held = False
        self.held: list[Callable[[], None]] = []

    @property
    def port(self) -> int:
        return int(self.relay.listener.getsockname()[1])

    def send(self, message: dict[str, Any], payload: bytes = b"") -> None:
        """The channel of the relay."""
        self._carry(self.gate.on_relay, message, payload)

    def _to_box(self, message: Mapping[str, Any], payload: bytes) -> None:
        self._carry(self.relay.on_request, message, payload)

    def _carry(self, take: Callable[..., None], message: Mapping[str, Any], payload: bytes) -> None:
        self.num_under_way += len(payload)
        self.most_under_way = max(self.most_under_way, self.num_under_way)

        def arrive() -> None:
            self.num_under_way -= len(payload)
            take(dict(message), payload)

        if self.is_held:
            self.held.append(arrive)
        else:
            self.loop.call_soon(arrive)

    def release(self) -> None:
        self.is_held = False
        held, self.held = self.held, []
        for arrive in held:
            self.loop.call_soon(arrive)

    async def close(self) -> None:
        await self.gate.close()
        self.relay.close_all()
        await asyncio.sleep(0)
        self.loop.remove_reader(self.poller.epoll.fileno())
        self.relay.listener.close()
        self.relay.spare.close()
        self.poller.epoll.close()

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def ask(self, request: bytes) -> bytes:
        """The whole of an answer."""
        reader, writer = await self.open()
        try:
            writer.write(request)
            return await asyncio.wait_for(reader.read(-1), 20)
        finally:
            writer.close()

    async def tunnel(self, target: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await self.open()
        writer.write(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        assert head.startswith(b"HTTP/1.1 200"), head
        return reader, writer


MakePair = Callable[..., Pair]
Serve = Callable[[Handler], Awaitable[int]]


@pytest_asyncio.fixture
async def make_pair() -> AsyncIterator[MakePair]:
    pairs: list[Pair] = []

    def make(*allowed: str, **options: Any) -> Pair:
        pairs.append(Pair(*allowed, **options))
        return pairs[-1]

    yield make
    for pair in pairs:
        await pair.close()
        assert pair.gate.num_connections == 0
        assert not pair.relay.connections


@pytest_asyncio.fixture
async def serve() -> AsyncIterator[Serve]:
    """Servers of this machine; gives their ports."""
    servers: list[asyncio.Server] = []
    ends: list[tuple[asyncio.Task[Any] | None, asyncio.StreamWriter]] = []

    async def start(handler: Handler) -> int:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            ends.append((asyncio.current_task(), writer))
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await handler(reader, writer)
            writer.close()

        servers.append(await asyncio.start_server(handle, "127.0.0.1", 0))
        return int(servers[-1].sockets[0].getsockname()[1])

    yield start
    for server in servers:
        server.close()
    for task, writer in ends:
        if task is not None and task.cancel():
            await asyncio.gather(task, return_exceptions=True)
        writer.transport.abort()
    await asyncio.sleep(0.01)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(4000):
        if condition():
            return
        await asyncio.sleep(0.005)
    pytest.fail("it never came to be")


# -- rules


@pytest.mark.parametrize(
    ("rule", "host", "port", "is_allowed"),
    [
        ("pypi.org", "pypi.org", 443, True),
        ("pypi.org", "pypi.org", 80, True),
        ("pypi.org", "pypi.org", 8080, False),
        ("pypi.org", "PyPI.org.", 443, True),
        ("pypi.org", "www.pypi.org", 443, False),
        ("pypi.org", "notpypi.org", 443, False),
        ("pypi.org", "pypi.org.evil.example", 443, False),
        ("*.debian.org", "deb.debian.org", 80, True),
        ("*.debian.org", "a.b.debian.org", 80, True),
        ("*.debian.org", "debian.org", 80, False),
        ("*.debian.org", "evildebian.org", 80, False),
        ("files.example:8443", "files.example", 8443, True),
        ("files.example:8443", "files.example", 443, False),
        ("*.files.example:8443", "a.files.example", 8443, True),
        ("bücher.example", "xn--bcher-kva.example", 443, True),
        ("xn--bcher-kva.example", "BÜCHER.example", 443, True),
        ("127.0.0.1:81", "127.0.0.1", 81, True),
        ("127.0.0.1", "[::ffff:127.0.0.1]", 80, True),
        ("[::1]:81", "[0:0::1]", 81, True),
        ("::1", "[::1]", 443, True),
        ("localhost:81", "localhost", 81, True),
        ("localhost:81", "127.0.0.1", 81, False),
        ("*.0.0.example", "127.0.0.1", 80, False),
    ],
)
def test_rule(rule: str, host: str, port: int, is_allowed: bool) -> None:
    check_rules([rule])
    assert parse_rule(rule).allows(host=parse_host(host), port=port) is is_allowed


BAD_RULES = """
. * *. https://pypi.org pypi.org/simple user@pypi.org pypi.org: pypi.org:0 :80 pypi.org:65536 pypi.org:http pypi.org:+80
pypi..org -a.org *.127.0.0.1 127.1 0x7f000001 2130706433 1.2.3.4.5 [::1 fe80::1%eth0 *.*.org a.*.org
"""


@pytest.mark.parametrize("rule", ["", "a b", "pypi.org\n", "a." * 200, "a" * 64 + ".org", "☃" * 70, *BAD_RULES.split()])
def test_rule_that_cannot_be_is_a_clear_error(rule: str) -> None:
    with pytest.raises(ConfigError, match=r"egress: .* is no rule .*: write `name`"):
        check_rules(["pypi.org", rule])


def test_spec_and_gate_refuse_such_a_rule() -> None:
    with pytest.raises(ConfigError, match="is no rule"):
        parse_config(SandboxSpec, {"egress": ["https://pypi.org"]}, source="run.yaml")
    with pytest.raises(ConfigError, match="is no rule"):
        EgressGate(["https://pypi.org"], lambda message, payload: None)


@pytest.mark.parametrize("text", ["127.1", "0177.0.0.1", "0x7f.1", "2130706433", "127。1", "", "[", "[::1%lo]", "a\0b"])
def test_odd_forms_of_addresses_are_no_hosts(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_host(text)


NOT_PUBLIC = """
127.0.0.1 127.9.9.9 169.254.169.254 10.0.0.1 172.16.0.1 192.168.1.1 100.64.0.1 0.0.0.0 224.0.0.1 255.255.255.255
:: ::1 fe80::1 fd00::1 fec0::1 ff02::1 ::ffff:10.0.0.1 64:ff9b::7f00:1 2002:7f00:1:: ::127.0.0.1
"""


def test_public_addresses() -> None:
    assert [text for text in NOT_PUBLIC.split() if is_public(ipaddress.ip_address(text))] == []
    assert all(
        is_public(ipaddress.ip_address(text)) for text in ("1.1.1.1", "2606:4700:4700::1111", "64:ff9b::101:101")
    )


# -- heads


def test_head_is_forwarded_in_origin_form() -> None:
    request = parse_head(
        b"POST http://Pypi.org?q=1#top HTTP/1.1\r\nHost: other.example\r\nProxy-Authorization: Basic eDp5\r\n"
        b"Connection: keep-alive, X-Hop\r\nX-Hop: 1\r\nAccept: */*\r\nContent-Length: 3\r\n\r\n"
    )
    assert request.head == (
        b"POST /?q=1 HTTP/1.1\r\nHost: Pypi.org\r\nAccept: */*\r\nContent-Length: 3\r\nConnection: close\r\n\r\n"
    )
    assert (request.host.name, request.port, request.num_body_bytes) == ("pypi.org", 80, 3)


@pytest.mark.parametrize(
    "head",
    [
        b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET http:///x HTTP/1.1\r\n\r\n",
        b"GET https://a.org/ HTTP/1.1\r\n\r\n",
        b"GET ftp://a.org/ HTTP/1.1\r\n\r\n",
        b"GET http://u:p@a.org/ HTTP/1.1\r\n\r\n",
        b"GET http://a.org:x/ HTTP/1.1\r\n\r\n",
        b"GET http://a.org\\@b.org/ HTTP/1.1\r\n\r\n",
        b"GET http://a.org/ HTTP/2\r\n\r\n",
        b"GET  http://a.org/ HTTP/1.1\r\n\r\n",
        b"CONNECT a.org HTTP/1.1\r\n\r\n",
        b"CONNECT a.org:99999 HTTP/1.1\r\n\r\n",
        b"CONNECT http://a.org:443 HTTP/1.1\r\n\r\n",
        b"CONNECT \xff\xfe:443 HTTP/1.1\r\n\r\n",
        b"GET http://a.org/ HTTP/1.1\r\nBad\r\n\r\n",
        b"GET http://a.org/ HTTP/1.1\r\n Folded: x\r\n\r\n",
        b"GET http://a.org/ HTTP/1.1\r\nA: x\nHost: b\r\n\r\n",
        b"GET http://a.org/ HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET http://a.org/ HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"GET http://a.org/ HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET http://a.org/ HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
    ],
)
def test_nonsense_is_refused(head: bytes) -> None:
    with pytest.raises(RefusedError) as caught:
        parse_head(head)
    assert caught.value.status == 400


# -- the proxy


async def test_connect_relays_both_ways_and_ends_by_halves(make_pair: MakePair, serve: Serve) -> None:
    port = await serve(echo)
    pair = make_pair(f"localhost:{port}")
    reader, writer = await pair.tunnel(f"LOCALHOST.:{port}")
    writer.write(b"one")
    assert await reader.readexactly(3) == b"one"
    writer.write(b"two")
    writer.write_eof()
    assert await reader.read(-1) == b"two"
    writer.close()
    await until(lambda: pair.gate.num_connections == 0)
    assert (pair.gate.num_allowed, pair.gate.num_refused) == (1, 0)


async def test_target_that_ends_first_still_takes_bytes(make_pair: MakePair, serve: Serve) -> None:
    taken = asyncio.get_running_loop().create_future()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.write_eof()
        taken.set_result(await reader.read(-1))

    port = await serve(handler)
    reader, writer = await make_pair(f"localhost:{port}").tunnel(f"localhost:{port}")
    assert await reader.read(-1) == b"hello"
    writer.write(b"x" * 300_000)
    writer.write_eof()
    assert len(await asyncio.wait_for(taken, 20)) == 300_000
    writer.close()


async def test_plain_http_with_a_body(make_pair: MakePair, serve: Serve) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.readexactly(200_000)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" + head + str(len(body)).encode())

    port = await serve(handler)
    pair = make_pair(f"localhost:{port}")
    request = f"POST http://localhost:{port}/a?b HTTP/1.1\r\nHost: evil\r\nContent-Length: 200000\r\n\r\n".encode()
    smuggled = b"GET http://evil/ HTTP/1.1\r\n\r\n"
    answer = await pair.ask(request + b"x" * 200_000 + smuggled)
    head = f"POST /a?b HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Length: 200000\r\nConnection: close\r\n\r\n"
    assert answer.endswith(b"ok" + head.encode() + b"200000")


async def test_chunked_body_is_passed_on(make_pair: MakePair, serve: Serve) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.readuntil(b"0\r\n\r\n"))[-13:])

    port = await serve(handler)
    head = f"POST http://localhost:{port}/ HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    body = b"3\r\nabc\r\n0\r\n\r\n"
    assert await make_pair(f"localhost:{port}").ask(head + body) == body


async def test_what_no_rule_names_is_refused(make_pair: MakePair, caplog: pytest.LogCaptureFixture) -> None:
    pair = make_pair("pypi.org", "*.debian.org", name="box 12")
    with caplog.at_level(logging.INFO):
        answer = await pair.ask(b"CONNECT evil.example:443 HTTP/1.1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 403 Forbidden\r\n")
    assert b"evil.example:443 may not be reached from this box, only pypi.org, *.debian.org" in answer
    assert (await pair.ask(b"GET http://pypi.org:81/ HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 403")
    assert (await pair.ask(b"GET http://127.0.0.1/ HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 403")
    assert (pair.gate.num_allowed, pair.gate.num_refused) == (0, 3)
    assert "egress of box 12: refused evil.example:443" in caplog.text


async def test_refusal_reaches_a_program_that_is_still_writing(make_pair: MakePair) -> None:
    pair = make_pair("pypi.org")
    request = b"POST http://evil.example/ HTTP/1.1\r\nContent-Length: 2000000\r\n\r\n" + b"x" * 2_000_000
    assert (await pair.ask(request)).startswith(b"HTTP/1.1 403")


@pytest.mark.parametrize("request_bytes", [b"\x16\x03\x01" + b"a" * 40 + b"\r\n\r\n", b"hello\r\n\r\n", b"a" * 70_000])
async def test_nonsense_is_answered(make_pair: MakePair, request_bytes: bytes) -> None:
    assert (await make_pair("pypi.org").ask(request_bytes)).startswith(b"HTTP/1.1 400 Bad Request")


async def test_program_that_says_nothing_is_told(make_pair: MakePair) -> None:
    pair = make_pair("pypi.org", head_timeout_s=0.1)
    assert (await pair.ask(b"GET http://pypi")).startswith(b"HTTP/1.1 408")
    _, writer = await pair.open()
    writer.close()
    await until(lambda: pair.gate.num_connections == 0)


async def test_closed_port_is_a_bad_gateway(make_pair: MakePair) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        pair = make_pair(f"127.0.0.1:{port}")
        answer = await pair.ask(f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 502 Bad Gateway")
    assert pair.gate.num_allowed == 1


async def test_port_that_does_not_answer_is_a_gateway_timeout(make_pair: MakePair) -> None:
    with contextlib.ExitStack() as stack:
        silent = stack.enter_context(socket.socket())
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        for _ in range(3):  # those that fill its queue
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(silent.getsockname())
        port = silent.getsockname()[1]
        pair = make_pair(f"127.0.0.1:{port}", connect_timeout_s=0.2)
        assert (await pair.ask(f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\n".encode())).startswith(b"HTTP/1.1 504")


# -- names and addresses


def answer_with(*addresses: str) -> Callable[[str], Awaitable[Sequence[str]]]:
    async def resolve(name: str) -> Sequence[str]:
        if not addresses:
            raise OSError("no such name")
        return addresses

    return resolve


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "169.254.169.254", "10.1.2.3", "::1", "::ffff:127.0.0.1", "fe80::1%lo", "0.0.0.0"]
)
async def test_name_that_leads_to_this_machine_is_refused(make_pair: MakePair, serve: Serve, address: str) -> None:
    port = await serve(echo)
    pair = make_pair(f"rebound.example:{port}", resolve=answer_with(address))
    answer = await pair.ask(f"CONNECT rebound.example:{port} HTTP/1.1\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 403")
    assert b"leads to this machine or a private network" in answer
    assert (pair.gate.num_allowed, pair.gate.num_refused) == (0, 1)


async def test_name_may_lead_to_an_address_that_is_a_rule(make_pair: MakePair, serve: Serve) -> None:
    port = await serve(echo)
    resolve = answer_with("10.1.2.3", "127.0.0.1")
    pair = make_pair(f"mirror.example:{port}", f"127.0.0.1:{port}", resolve=resolve)
    reader, writer = await pair.tunnel(f"mirror.example:{port}")
    writer.write(b"x")
    assert await reader.readexactly(1) == b"x"
    writer.close()


async def test_name_without_address(make_pair: MakePair) -> None:
    pair = make_pair("no.example", resolve=answer_with())
    assert (await pair.ask(b"CONNECT no.example:443 HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 502")


async def test_resolver_that_hangs_is_a_gateway_timeout(make_pair: MakePair) -> None:
    async def hang(name: str) -> Sequence[str]:
        await asyncio.sleep(60)
        return []

    pair = make_pair("slow.example", resolve=hang, connect_timeout_s=0.1)
    assert (await pair.ask(b"CONNECT slow.example:443 HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 504")


async def test_system_resolver() -> None:
    resolver = Resolver()
    assert "127.0.0.1" in await resolver.resolve("localhost")
    with pytest.raises(OSError):  # noqa: PT011 (the words are the system's)
        await resolver.resolve("no-such-name.invalid")
    results = await asyncio.gather(*(resolver.resolve("localhost") for _ in range(20)))
    assert all("127.0.0.1" in found for found in results)
    await until(lambda: not any(thread.name == "egress-lookup" for thread in threading.enumerate()))


# -- flow control and ends


async def test_many_connections_at_once(make_pair: MakePair, serve: Serve) -> None:
    port = await serve(echo)
    pair = make_pair(f"localhost:{port}")

    async def play(index: int) -> None:
        reader, writer = await pair.tunnel(f"localhost:{port}")
        data = bytes([index]) * 100_000
        writer.write(data)
        writer.write_eof()
        assert await reader.read(-1) == data
        writer.close()

    await asyncio.wait_for(asyncio.gather(*(play(index) for index in range(MAX_CONNECTIONS + 40))), 60)
    assert pair.gate.num_allowed == MAX_CONNECTIONS + 40
    assert pair.most_under_way <= 2 * TOTAL_WINDOW_BYTES


async def test_connections_beyond_the_bound_wait(make_pair: MakePair) -> None:
    pair = make_pair("pypi.org")
    opened = [await pair.open() for _ in range(MAX_CONNECTIONS)]
    await until(lambda: pair.gate.num_connections == MAX_CONNECTIONS)
    late = asyncio.ensure_future(pair.ask(b"CONNECT evil.example:443 HTTP/1.1\r\n\r\n"))
    await asyncio.sleep(0.1)
    assert not late.done()
    assert pair.gate.num_connections == MAX_CONNECTIONS
    opened[0][1].close()
    assert (await late).startswith(b"HTTP/1.1 403")
    for _, writer in opened:
        writer.close()


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Within the block this process can open nothing more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_without_descriptors_connections_wait_and_nothing_spins(make_pair: MakePair) -> None:
    pair = make_pair("pypi.org")
    _, first = await pair.open()
    await until(lambda: len(pair.relay.connections) == 1)
    with socket.create_connection(("127.0.0.1", pair.port)) as late:
        with no_descriptor_left():
            await asyncio.sleep(0.1)
            assert pair.poller.epoll.poll(0) == []
            assert len(pair.relay.connections) == 1
        first.close()
        await until(lambda: len(pair.relay.connections) == 1 and 2 in pair.relay.connections)
        late.sendall(b"CONNECT evil.example:443 HTTP/1.1\r\n\r\n")
        late.setblocking(False)
        assert (await pair.loop.sock_recv(late, 100)).startswith(b"HTTP/1.1 403")


async def test_without_descriptors_and_connections_one_that_comes_is_refused(make_pair: MakePair) -> None:
    pair = make_pair("pypi.org")
    with socket.create_connection(("127.0.0.1", pair.port)) as client, no_descriptor_left():
        await asyncio.sleep(0.1)
        assert pair.poller.epoll.poll(0) == []
        assert client.recv(1) == b""
    assert (await pair.ask(b"CONNECT evil.example:443 HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 403")


async def fill(writer: asyncio.StreamWriter, num_bytes: int) -> None:
    """Writes until nobody reads."""
    with contextlib.suppress(TimeoutError):
        for _ in range(num_bytes // 65536):
            writer.write(b"x" * 65536)
            await asyncio.wait_for(writer.drain(), 0.3)


async def test_stalled_target_holds_up_itself_alone(make_pair: MakePair, serve: Serve) -> None:
    async def stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    port, stalled_port = await serve(echo), await serve(stall)
    pair = make_pair(f"localhost:{port}", f"localhost:{stalled_port}")
    stalled = [await pair.tunnel(f"localhost:{stalled_port}") for _ in range(20)]
    await asyncio.gather(*(fill(writer, 20 * MIB) for _, writer in stalled))
    for connection in pair.relay.connections.values():
        assert connection.credit == 0
        assert not connection.pending
    assert pair.num_under_way == 0
    reader, writer = await pair.tunnel(f"localhost:{port}")
    writer.write(b"y" * MIB)
    writer.write_eof()
    assert await asyncio.wait_for(reader.read(-1), 20) == b"y" * MIB
    for _, other in (*stalled, (reader, writer)):
        other.transport.abort()


async def test_stalled_program_holds_up_itself_alone(make_pair: MakePair, serve: Serve) -> None:
    sent = []

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()
            sent.append(65536)

    port, flood_port = await serve(echo), await serve(flood)
    pair = make_pair(f"localhost:{port}", f"localhost:{flood_port}")
    raw = socket.create_connection(("127.0.0.1", pair.port))
    raw.sendall(f"CONNECT localhost:{flood_port} HTTP/1.1\r\n\r\n".encode())
    num_before = -1
    while num_before != len(sent) or not sent:
        num_before = len(sent)
        await asyncio.sleep(0.3)
    assert all(len(connection.pending) <= WINDOW_BYTES for connection in pair.relay.connections.values())
    reader, writer = await pair.tunnel(f"localhost:{port}")
    writer.write(b"y" * MIB)
    writer.write_eof()
    assert await asyncio.wait_for(reader.read(-1), 20) == b"y" * MIB
    writer.close()
    raw.close()  # with bytes unread: a broken connection
    await until(lambda: pair.gate.num_connections == 0)
    num_sent = len(sent)
    await asyncio.sleep(0.1)
    assert len(sent) == num_sent


async def test_stream_that_stands_still_holds_little(make_pair: MakePair, serve: Serve) -> None:
    port = await serve(echo)
    pair = make_pair(f"localhost:{port}")
    tunnels = [await pair.tunnel(f"localhost:{port}") for _ in range(40)]
    pair.is_held = True
    await asyncio.gather(*(fill(writer, MIB) for _, writer in tunnels))
    assert pair.num_under_way <= TOTAL_WINDOW_BYTES
    pair.release()
    for _, writer in tunnels:
        writer.write_eof()
    received = await asyncio.gather(*(asyncio.wait_for(reader.read(-1), 60) for reader, _ in tunnels))
    assert all(data.count(b"x") == len(data) > 0 for data in received)
    assert pair.most_under_way <= 2 * TOTAL_WINDOW_BYTES
    for _, writer in tunnels:
        writer.close()


async def test_connections_take_turns(make_pair: MakePair, serve: Serve) -> None:
    begin = asyncio.Event()

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await begin.wait()
        for _ in range(20 * 16):
            writer.write(b"x" * 65536)
            await writer.drain()

    port = await serve(flood)
    pair = make_pair(f"localhost:{port}")
    tunnels = [await pair.tunnel(f"localhost:{port}") for _ in range(24)]
    counts = [0] * len(tunnels)

    async def count(index: int, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(65536):
            counts[index] += len(data)

    tasks = [asyncio.ensure_future(count(index, reader)) for index, (reader, _) in enumerate(tunnels)]
    begin.set()
    await until(lambda: sum(counts) > 24 * 2 * MIB)
    assert min(counts) > MIB / 2
    for _, writer in tunnels:
        writer.transport.abort()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_idle_connection_is_closed(make_pair: MakePair, serve: Serve) -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(8):
            writer.write(b"x")
            await asyncio.sleep(0.1)
        await asyncio.sleep(60)

    port = await serve(drip)
    pair = make_pair(f"localhost:{port}", idle_timeout_s=0.4)
    reader, writer = await pair.tunnel(f"localhost:{port}")
    assert await asyncio.wait_for(reader.read(-1), 20) == b"x" * 8
    writer.close()
    await until(lambda: pair.gate.num_connections == 0)


async def test_connection_ends_at_the_end_of_its_life(make_pair: MakePair, serve: Serve) -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)

    port = await serve(drip)
    pair = make_pair(f"localhost:{port}", lifetime_s=0.5)
    reader, writer = await pair.tunnel(f"localhost:{port}")
    assert (await asyncio.wait_for(reader.read(-1), 20)).startswith(b"xx")
    writer.close()


async def test_program_that_never_ends_is_let_go(make_pair: MakePair) -> None:
    pair = make_pair("pypi.org", linger_s=0.2)
    reader, writer = await pair.open()
    writer.write(b"CONNECT evil.example:443 HTTP/1.1\r\n\r\n")
    assert (await reader.read(-1)).startswith(b"HTTP/1.1 403")
    await until(lambda: pair.gate.num_connections == 0 and not pair.relay.connections)
    writer.close()


async def test_reset_ends_connections_and_those_that_wait(make_pair: MakePair, serve: Serve) -> None:
    ended = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)
        ended.set()

    port = await serve(handler)
    pair = make_pair(f"localhost:{port}")
    reader, writer = await pair.tunnel(f"localhost:{port}")
    waiting = socket.create_connection(("127.0.0.1", pair.port))
    waiting.sendall(b"CONNECT pypi.org:443 HTTP/1.1\r\n\r\n")
    pair.relay.close_all()
    assert await asyncio.wait_for(reader.read(-1), 20) == b""
    await asyncio.wait_for(ended.wait(), 20)
    await until(lambda: pair.gate.num_connections == 0)
    assert (pair.gate.num_allowed, pair.gate.num_refused) == (1, 0)
    writer.close()
    waiting.close()


async def test_close_ends_everything(make_pair: MakePair, serve: Serve) -> None:
    port = await serve(echo)
    pair = make_pair(f"localhost:{port}")
    tunnels = [await pair.tunnel(f"localhost:{port}") for _ in range(5)]
    await pair.gate.close()
    for reader, writer in tunnels:
        assert await asyncio.wait_for(reader.read(-1), 20) == b""
        writer.close()
    assert pair.gate.num_connections == 0
    await pair.gate.close()


NONSENSE: list[dict[str, Any]] = [
    {},
    {"event": "relay_data"},
    {"event": "relay_open", "conn": "1"},
    {"event": "relay_open", "conn": None},
    {"event": "relay_data", "conn": 77},
    {"event": "relay_credit", "conn": 0},
    {"event": "relay_credit", "conn": 0, "num_bytes": -5},
    {"event": "relay_credit", "conn": 1, "num_bytes": "x"},
    {"event": "relay_what", "conn": 1},
    {"event": ["relay_data"], "conn": 1},
]


async def test_forged_messages_raise_nothing(caplog: pytest.LogCaptureFixture) -> None:
    posted: list[Mapping[str, Any]] = []
    gate = EgressGate(["pypi.org"], lambda message, payload: posted.append(message))
    for message in NONSENSE:
        gate.on_relay(message, b"x")
    for number in range(1000):
        gate.on_relay({"event": "relay_open", "conn": number}, b"")
    assert gate.num_connections == 2 * MAX_CONNECTIONS
    assert len(posted) == 1000 - 2 * MAX_CONNECTIONS
    gate.on_relay({"event": "relay_data", "conn": 0}, b"x" * (WINDOW_BYTES + 1))  # more than there was credit for
    gate.on_relay({"event": "relay_eof", "conn": 1}, b"")
    gate.on_relay({"event": "relay_data", "conn": 1}, b"x")  # after its end
    gate.on_relay({"event": "relay_credit", "conn": 2, "num_bytes": "x"}, b"")
    gate.on_relay({"event": "relay_credit", "conn": 3, "num_bytes": 1 << 60}, b"")
    await until(lambda: gate.num_connections <= 2 * MAX_CONNECTIONS - 3)
    await gate.close()
    assert gate.num_connections == 0
    gate.on_relay({"event": "relay_open", "conn": 5000}, b"")
    assert gate.num_connections == 0


async def test_log_is_bounded(make_pair: MakePair, caplog: pytest.LogCaptureFixture) -> None:
    pair = make_pair("pypi.org")

    async def ask_often() -> None:
        for _ in range(55):
            await pair.ask(b"CONNECT evil.example:443 HTTP/1.1\r\n\r\n")

    with caplog.at_level(logging.INFO, logger="driftgym.sandboxes.egress"):
        await asyncio.gather(*(ask_often() for _ in range(20)))
    assert pair.gate.num_refused == 1100
    assert len(caplog.records) == 1001


async def test_large_transfers_both_ways(make_pair: MakePair, serve: Serve) -> None:
    port = await serve(echo)
    pair = make_pair(f"localhost:{port}")
    reader, writer = await pair.tunnel(f"localhost:{port}")
    num_bytes = 16 * MIB

    async def send() -> None:
        for _ in range(num_bytes // 65536):
            writer.write(b"z" * 65536)
            await writer.drain()
        writer.write_eof()

    started = time.monotonic()
    sending = asyncio.ensure_future(send())
    num_received = 0
    while data := await asyncio.wait_for(reader.read(65536), 20):
        num_received += len(data)
    await sending
    writer.close()
    assert num_received == num_bytes
    assert pair.most_under_way <= 2 * WINDOW_BYTES
    print(f"{num_bytes / MIB / (time.monotonic() - started):.0f} MiB/s each way")

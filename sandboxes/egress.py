"""The owner's end of egress: an HTTP proxy for a box without network, that decides by name and connects itself.

Programs in the box reach it through the relay (`toolbox_relay`) over the toolbox's own stream, so that it works with
network none, under every runtime, and without a rule in any firewall.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from driftgym.sandboxes.egress_dial import Resolve, Resolver, connect, find_addresses
from driftgym.sandboxes.egress_http import CONNECTED, ProxyRequest, RefusedError, parse_head, refusal
from driftgym.sandboxes.egress_rules import check_rules, parse_rule
from driftgym.sandboxes.egress_tunnel import Link, Post, Tunnel
from driftgym.sandboxes.toolbox_relay import CHUNK_BYTES, MAX_CONNECTIONS

__all__ = ["EGRESS_PORT", "EgressGate", "check_rules"]

EGRESS_PORT = 3128
"""Where the proxy listens within the box."""
_MAX_TUNNELS = 2 * MAX_CONNECTIONS
"""A box has at most half as many: of those that it has closed, some may still be passing on what came last."""
_MAX_LOGGED = 1000
"""A box that asks without end fills no log; what is beyond is counted."""
_LINGER_S = 30.0
"""How long a program may take to read the end of what it was sent."""
_logger = logging.getLogger(__name__)


class EgressGate:
    """Decides for one box, and relays. Nothing that the box does raises out of it.

    Consumes `on_relay` messages, produces `post` messages; each connection is served by a task of its own, that waits
    for the program, the target and credit, and ends by its deadlines or by `close`.

    A request is `CONNECT host:port` or, for plain HTTP, `GET http://host/path`. The answer is 403 for what no rule
    names, 400 for nonsense, 502 and 504 where the target cannot be reached; its body says why. How much a box can
    have under way is bounded: `toolbox_relay.MAX_CONNECTIONS` connections of a window each way.
    """

    def __init__(
        self,
        allowed: Sequence[str],
        post: Post,
        *,
        name: str = "box",
        head_timeout_s: float = 30.0,
        connect_timeout_s: float = 10.0,
        idle_timeout_s: float = 120.0,
        lifetime_s: float = 3600.0,
        linger_s: float = _LINGER_S,
        resolve: Resolve | None = None,
    ) -> None:
        """A gate that lets through what the rules `allowed` name.

        Args:
            allowed: as `SandboxSpec.egress`; ConfigError is raised for one that cannot be.
            post: sends a message to the box.
            name: whose box it is, in the log.
            head_timeout_s: until a program has said what it wants.
            connect_timeout_s: to resolve a name, and again to connect.
            idle_timeout_s: a connection on which no byte moves for so long is closed.
            lifetime_s: any connection is closed after so long.
            linger_s: how long a program may take to read the end of what it was sent.
            resolve: the addresses of a name; the system's resolver when None.
        """
        self.num_allowed = 0
        """Requests that were let through, whatever came of them."""
        self.num_refused = 0
        """Requests that were not."""
        self._rules = [parse_rule(text) for text in allowed]
        self._allowed = ", ".join(allowed)
        self._link = Link(post)
        self._name = name
        self._head_timeout_s = head_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._lifetime_s = lifetime_s
        self._linger_s = linger_s
        self._resolve = Resolver().resolve if resolve is None else resolve
        self._tunnels: dict[int, Tunnel] = {}
        self._is_closed = False

    @property
    def num_connections(self) -> int:
        """How many connections are served now."""
        return len(self._tunnels)

    async def close(self) -> None:
        """Ends all connections, and takes no further ones. Safe to call twice."""
        self._is_closed = True
        tasks = [tunnel.task for tunnel in self._tunnels.values() if tunnel.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # sockets are closed in the loop's next pass

    # -- what the relay says

    def on_relay(self, message: Mapping[str, Any], payload: bytes) -> None:
        """Takes what the relay says. Nonsense closes the connection that it is about, and never raises."""
        number = message.get("conn")
        if self._is_closed or not isinstance(number, int):
            return
        try:
            self._take(str(message.get("event")), number, message, payload)
        except (ValueError, TypeError, KeyError) as error:
            _logger.warning("egress of %s: nonsense from its relay: %r", self._name, error)
            tunnel = self._tunnels.get(number)
            if tunnel is not None and tunnel.task is not None:
                tunnel.task.cancel()

    def _take(self, event: str, number: int, message: Mapping[str, Any], payload: bytes) -> None:
        if event == "relay_open":
            self._open(number)
            return
        if event == "relay_data":
            self._link.count_arrived(len(payload))
        if event == "relay_credit" and number == 0:
            self._link.take_credit(_num_bytes(message))
            return
        tunnel = self._tunnels.get(number)
        if tunnel is None:
            return
        if event == "relay_data":
            tunnel.feed(payload)
        elif event == "relay_credit":
            tunnel.take_credit(_num_bytes(message))
        elif event == "relay_eof":
            tunnel.feed_eof()
        elif event == "relay_close":
            tunnel.lose()

    def _open(self, number: int) -> None:
        if number in self._tunnels or len(self._tunnels) >= _MAX_TUNNELS:
            self._link.say("relay_close", number)
            return
        tunnel = self._tunnels[number] = Tunnel(self._link, number)
        tunnel.task = asyncio.get_running_loop().create_task(self._run(tunnel))
        tunnel.task.add_done_callback(lambda task: self._forget(tunnel, task))

    def _forget(self, tunnel: Tunnel, task: "asyncio.Task[None]") -> None:
        """Called when a connection is over, also one whose task was cancelled before it began."""
        del self._tunnels[tunnel.number]
        tunnel.close()
        if not task.cancelled() and task.exception() is not None:
            _logger.error("egress of %s: a connection failed", self._name, exc_info=task.exception())

    # -- one connection

    async def _run(self, tunnel: Tunnel) -> None:
        """Serves a connection to its end. A target or a program that goes away, or a deadline, ends it."""
        with contextlib.suppress(OSError, EOFError):
            async with asyncio.timeout(self._lifetime_s):
                await self._serve(tunnel)
            async with asyncio.timeout(self._linger_s):
                await _outlast(tunnel)

    async def _serve(self, tunnel: Tunnel) -> None:
        try:
            request = await self._read_request(tunnel)
            addresses = await self._decide(request)
            reader, writer = await connect(addresses, request.port, timeout_s=self._connect_timeout_s)
        except RefusedError as error:
            async with asyncio.timeout(self._linger_s):
                await tunnel.send(refusal(error))
            return
        try:
            async with self._idle_deadline(tunnel):
                await _relay(request, tunnel, reader, writer)
        finally:
            # All that was written has been drained: at once is not too early.
            writer.transport.abort()

    async def _read_request(self, tunnel: Tunnel) -> ProxyRequest:
        try:
            async with asyncio.timeout(self._head_timeout_s):
                return parse_head(await tunnel.read_head())
        except TimeoutError:
            raise RefusedError(408, f"no request within {self._head_timeout_s:g} s") from None
        except ValueError as error:
            raise RefusedError(400, str(error)) from None

    async def _decide(self, request: ProxyRequest) -> list[str]:
        """Where to connect to. Raises RefusedError where that may not be, or cannot."""
        host, port = request.host, request.port
        target = f"{host.name}:{port}"
        try:
            if not any(rule.allows(host=host, port=port) for rule in self._rules):
                raise RefusedError(403, f"{target} may not be reached from this box, only {self._allowed}")
            addresses = await find_addresses(
                host, port, rules=self._rules, resolve=self._resolve, timeout_s=self._connect_timeout_s
            )
        except RefusedError as error:
            if error.status == 403:
                self.num_refused += 1
                self._log("refused", target, f" ({error})")
            raise
        self.num_allowed += 1
        self._log("allowed", target)
        return addresses

    def _log(self, verdict: str, target: str, reason: str = "") -> None:
        num_logged = self.num_allowed + self.num_refused
        if num_logged <= _MAX_LOGGED:
            _logger.info("egress of %s: %s %s%s", self._name, verdict, target, reason)
        if num_logged == _MAX_LOGGED:
            _logger.info("egress of %s: further requests are counted alone", self._name)

    @contextlib.asynccontextmanager
    async def _idle_deadline(self, tunnel: Tunnel) -> AsyncIterator[None]:
        """Raises TimeoutError when no byte has moved for long."""
        tunnel.idle_timeout_s = self._idle_timeout_s
        async with asyncio.timeout(self._idle_timeout_s) as tunnel.deadline:
            try:
                yield
            finally:
                tunnel.deadline = None


def _num_bytes(message: Mapping[str, Any]) -> int:
    num_bytes = message["num_bytes"]
    if not isinstance(num_bytes, int) or num_bytes < 0:
        raise ValueError(f"num_bytes is {num_bytes!r}")
    return num_bytes


async def _relay(
    request: ProxyRequest, tunnel: Tunnel, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Moves bytes both ways. A tunnel ends when both sides have ended; plain HTTP when the answer has."""
    writer.transport.set_write_buffer_limits(high=0)  # what is drained has left this process
    upload = asyncio.ensure_future(_upload(request, tunnel, writer))
    try:
        if request.is_tunnel:
            await tunnel.send(CONNECTED)
        while data := await reader.read(CHUNK_BYTES):
            await tunnel.send(data)
        tunnel.send_eof()
        if request.is_tunnel:
            await upload
    finally:
        upload.cancel()
        await asyncio.gather(upload, return_exceptions=True)


async def _upload(request: ProxyRequest, tunnel: Tunnel, writer: asyncio.StreamWriter) -> None:
    """Passes on the head and the body, or all that there is of a tunnel."""
    if request.head is not None:
        writer.write(request.head)
        await writer.drain()
    num_left = request.num_body_bytes
    while num_left is None or num_left > 0:
        data = await tunnel.read(CHUNK_BYTES if num_left is None else min(CHUNK_BYTES, num_left))
        if not data:
            writer.write_eof()
            return
        writer.write(data)
        await writer.drain()
        tunnel.grant(len(data))
        if num_left is not None:
            num_left -= len(data)


async def _outlast(tunnel: Tunnel) -> None:
    """Waits until the program has all that it was sent; what it still says is for nobody.

    Ended at once, with its bytes unread, the program would see a broken connection in place of the answer.
    """
    tunnel.send_eof()
    while data := await tunnel.read(CHUNK_BYTES):
        tunnel.grant(len(data))
    await tunnel.wait_closed()

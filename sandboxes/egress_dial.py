"""From a name that may be reached to a connection: addresses that it may lead to, and no others."""

import asyncio
import contextlib
import functools
import ipaddress
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence

from driftgym.sandboxes.egress_http import RefusedError
from driftgym.sandboxes.egress_rules import Address, EgressRule, Host, is_public

Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""The addresses of a name. Raises OSError where it has none. Whoever calls it sets the deadline."""
_MAX_LOOKUPS = 4
_MAX_ADDRESSES = 4
_LOCALHOST = ("127.0.0.1", "::1")
_STREAM_LIMIT_BYTES = 64 * 1024
_SEND_BUFFER_BYTES = 256 * 1024
_RECEIVE_WINDOW_BYTES = 1024 * 1024
"""What the kernel holds of a connection that stalls would otherwise be megabytes, of each of the many of a box."""


class Resolver:
    """The system's resolver, a few names at a time.

    In threads of its own that nothing waits for: names that are slow on purpose hold up no other work of the
    process, nor its end.
    """

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(_MAX_LOOKUPS)

    async def resolve(self, name: str) -> Sequence[str]:
        """The addresses of a name. Raises OSError where it has none."""
        await self._turns.acquire()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Sequence[str]] = loop.create_future()

        def settle(found: Sequence[str] | OSError) -> None:
            self._turns.release()
            if answer.done():  # nobody waits any longer
                return
            if isinstance(found, OSError):
                answer.set_exception(found)
            else:
                answer.set_result(found)

        def look_up() -> None:
            found = _look_up(name)
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(functools.partial(settle, found))

        threading.Thread(target=look_up, name="egress-lookup", daemon=True).start()
        return await answer


def _look_up(name: str) -> Sequence[str] | OSError:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        return error if isinstance(error, OSError) else OSError(str(error))
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


async def find_addresses(
    host: Host, port: int, *, rules: Sequence[EgressRule], resolve: Resolve, timeout_s: float
) -> list[str]:
    """Where a host that the rules name may be connected to.

    A name that leads to this machine or a private network leads nowhere, whoever made it so: but `localhost` leads
    to this machine, and an address that is a rule of its own may be led to.

    Raises:
        RefusedError: 502 and 504 where the name has no addresses, 403 where it has none that may be connected to.
    """
    if host.address is not None:
        return [host.name]
    if host.name == "localhost":
        return list(_LOCALHOST)
    try:
        async with asyncio.timeout(timeout_s):
            found = await resolve(host.name)
    except TimeoutError:
        raise RefusedError(504, f"{host.name} was not resolved within {timeout_s:g} s") from None
    except OSError as error:
        raise RefusedError(502, f"{host.name} cannot be resolved: {error.strerror or error}") from None
    addresses = [ipaddress.ip_address(text.partition("%")[0]) for text in found]
    kept = [str(address) for address in addresses if is_public(address) or _is_named(address, port, rules)]
    if not kept:
        raise RefusedError(403, f"{host.name} leads to this machine or a private network, and may not")
    return kept[:_MAX_ADDRESSES]


def _is_named(address: Address, port: int, rules: Sequence[EgressRule]) -> bool:
    return any(rule.host.address == address and port in rule.ports for rule in rules)


async def connect(
    addresses: Sequence[str], port: int, *, timeout_s: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the first address that answers. Raises RefusedError (502, 504) when none does."""
    failure = RefusedError(502, "no address")
    for address in addresses:
        try:
            async with asyncio.timeout(timeout_s / len(addresses)):
                return await _open(address, port)
        except TimeoutError:
            failure = RefusedError(504, f"no answer from port {port} within {timeout_s:g} s")
        except OSError as error:
            failure = RefusedError(502, f"no connection to port {port}: {error.strerror or error}")
    raise failure


async def _open(address: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to an address, whose buffers are bounded. Raises OSError."""
    peer = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        peer.setblocking(False)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        if hasattr(socket, "TCP_WINDOW_CLAMP"):
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, _RECEIVE_WINDOW_BYTES)
        await asyncio.get_running_loop().sock_connect(peer, (address, port))
        return await asyncio.open_connection(sock=peer, limit=_STREAM_LIMIT_BYTES)
    except BaseException:
        peer.close()
        raise

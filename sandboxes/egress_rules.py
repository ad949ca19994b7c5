"""What a box without network may reach: the rules, the names in them, and the addresses that names may not lead to."""

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from driftgym.errors import ConfigError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_DEFAULT_PORTS = (80, 443)
_MAX_NAME_CHARS = 253
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_EMBEDDED_BITS = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A host as programs write it: a name in lower case without its trailing dot, or an address.

    >>> Host(name="pypi.org").address is None
    True
    """

    name: str
    """The name, or the address as text."""
    address: Address | None = None
    """The address, where the host is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressRule:
    """One rule.

    >>> parse_rule("*.Debian.org").allows(host=parse_host("deb.debian.org."), port=443)
    True
    """

    host: Host
    """The host; of a wildcard, what its names end with."""
    is_wildcard: bool
    """True when names below the host are meant, and not the host itself."""
    ports: tuple[int, ...]
    """The ports that may be reached."""

    def allows(self, *, host: Host, port: int) -> bool:
        """True when the rule names `host` and `port`."""
        if port not in self.ports:
            return False
        if self.is_wildcard:
            return host.address is None and host.name.endswith("." + self.host.name)
        return host == self.host


def parse_host(text: str) -> Host:
    """A host of a rule or a request. Raises ValueError for what is none, as are addresses of odd forms (`127.1`).

    >>> parse_host("Bücher.example.").name, parse_host("[::ffff:127.0.0.1]").name
    ('xn--bcher-kva.example', '127.0.0.1')
    """
    if text.startswith("[") and text.endswith("]"):
        return _address_host(ipaddress.IPv6Address(text[1:-1]))
    try:
        name = (text if text.isascii() else text.encode("idna").decode("ascii")).lower().removesuffix(".")
    except UnicodeError:
        raise ValueError("no host name") from None
    labels = name.split(".")
    if len(name) > _MAX_NAME_CHARS or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError("no host name")
    if _NUMBER.fullmatch(labels[-1]):
        return _address_host(ipaddress.IPv4Address(name))
    return Host(name=name)


def _address_host(address: Address) -> Host:
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:
            raise ValueError("an address with a scope")
        address = address.ipv4_mapped or address
    return Host(name=str(address), address=address)


def parse_port(text: str) -> int:
    """A port in decimal. Raises ValueError when it is none."""
    if not re.fullmatch("[0-9]{1,5}", text) or not 0 < int(text) < 65536:
        raise ValueError("a port is a number from 1 to 65535")
    return int(text)


def split_port(text: str) -> tuple[str, int | None]:
    """`host` or `host:port` in its parts; an IPv6 address with a port is in brackets. Raises ValueError.

    >>> split_port("[::1]:80"), split_port("pypi.org")
    (('[::1]', 80), ('pypi.org', None))
    """
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        return text, None
    return host, parse_port(port)


def parse_rule(text: str) -> EgressRule:
    """The rule that `text` writes. Raises ConfigError where it cannot be one."""
    try:
        if "/" in text or "@" in text:
            raise ValueError("leave out scheme, user and path")
        is_bare_v6 = text.count(":") > 1 and not text.startswith("[")
        host_text, port = (f"[{text}]", None) if is_bare_v6 else split_port(text)
        is_wildcard = host_text.startswith("*.")
        host = parse_host(host_text.removeprefix("*."))
        if is_wildcard and host.address is not None:
            raise ValueError("an address has no names below it")
    except ValueError as error:
        wanted = "`name`, `*.name`, `name:port`, or an address in place of the name"
        raise ConfigError(f"egress: {text!r} is no rule ({error}): write {wanted}") from None
    return EgressRule(host=host, is_wildcard=is_wildcard, ports=_DEFAULT_PORTS if port is None else (port,))


def check_rules(rules: Sequence[str]) -> None:
    """Raises ConfigError for the first rule that cannot be one: empty, with a scheme or a path, with a bad port."""
    for text in rules:
        parse_rule(text)


def is_public(address: Address) -> bool:
    """True for an address of the internet: not of this machine, a private network or a group.

    What carries an IPv4 address within (6to4, Teredo, NAT64) is as public as that is.
    """
    if isinstance(address, ipaddress.IPv6Address):
        embedded = _embedded(address)
        if embedded is not None:
            return is_public(embedded)
        if address.is_site_local:
            return False
    return address.is_global and not address.is_multicast and not _is_own(address)


def _embedded(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address within."""
    if address in _NAT64 or int(address) <= _EMBEDDED_BITS:
        return ipaddress.IPv4Address(int(address) & _EMBEDDED_BITS)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (teredo[1] if teredo else None)


def _is_own(address: Address) -> bool:
    """True when an interface of this machine has the address: only then can a socket be bound to it."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True

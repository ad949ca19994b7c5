"""The head of what a program asks a proxy for: `CONNECT host:port`, or `GET http://host/path` for plain HTTP."""

import re
from dataclasses import dataclass

from driftgym.sandboxes.egress_rules import Host, parse_host, split_port

_REQUEST_LINE = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([!-~\x80-\xff]+) (HTTP/1\.[01])")
_HEADER_LINE = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t -~\x80-\xff]*)")
_AUTHORITY_END = re.compile(r"[/?#]")
_HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-connection", "proxy-authenticate", "proxy-authorization", "te", "upgrade")
)
_MAX_LENGTH_DIGITS = 18
_REASONS = {400: "Bad Request", 403: "Forbidden", 408: "Request Timeout", 502: "Bad Gateway", 504: "Gateway Timeout"}
CONNECTED = b"HTTP/1.1 200 Connection established\r\n\r\n"


class RefusedError(Exception):
    """A request that is answered by the gate itself."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyRequest:
    """What a program wants.

    >>> parse_head(b"CONNECT pypi.org:443 HTTP/1.1\\r\\n\\r\\n").port
    443
    """

    host: Host
    """The host to connect to."""
    port: int
    """Its port."""
    head: bytes | None
    """What to send it first; None for CONNECT, whose bytes are nobody's business."""
    num_body_bytes: int | None
    """The length of the body that follows; None when its end is not known (chunks, or a tunnel)."""

    @property
    def is_tunnel(self) -> bool:
        """True for CONNECT."""
        return self.head is None


def parse_head(head: bytes) -> ProxyRequest:
    """The request whose head, with the empty line at its end, this is. Raises RefusedError for nonsense."""
    first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    match = _REQUEST_LINE.fullmatch(first)
    if match is None:
        raise RefusedError(400, "this is an HTTP proxy, and that is no request")
    method, target, version = match.groups()
    try:
        headers = _parse_headers(lines)
        if method == "CONNECT":
            host_text, port = split_port(_utf8(target))
            if port is None:
                raise ValueError("CONNECT needs a port")
            return ProxyRequest(host=parse_host(host_text), port=port, head=None, num_body_bytes=None)
        authority, path = _split_target(target)
        host_text, port = split_port(_utf8(authority))
        num_body_bytes = _body_length(headers)
        return ProxyRequest(
            host=parse_host(host_text),
            port=port or 80,
            head=_forwarded_head(f"{method} {path} {version}", authority, headers),
            num_body_bytes=num_body_bytes,
        )
    except ValueError as error:
        raise RefusedError(400, str(error)) from None


def _utf8(text: str) -> str:
    return text.encode("latin-1").decode("utf-8")


def _parse_headers(lines: list[str]) -> list[tuple[str, str]]:
    headers = []
    for line in lines:
        match = _HEADER_LINE.fullmatch(line)
        if match is None:
            raise ValueError("a header line that is none")
        headers.append((match[1], match[2].rstrip(" \t")))
    return headers


def _split_target(target: str) -> tuple[str, str]:
    """Authority and path of an `http://` URL."""
    if target[:7].lower() != "http://":
        raise ValueError("this is a proxy: ask it for `http://host/path`, or CONNECT for everything else")
    rest = target[7:]
    match = _AUTHORITY_END.search(rest)
    end = match.start() if match else len(rest)
    path = rest[end:].partition("#")[0]
    return rest[:end], path if path.startswith("/") else "/" + path


def _body_length(headers: list[tuple[str, str]]) -> int | None:
    """The length of the body; what two servers could read in two ways is refused."""
    lengths = [value for name, value in headers if name.lower() == "content-length"]
    codings = [value.lower() for name, value in headers if name.lower() == "transfer-encoding"]
    if codings:
        if lengths or codings != ["chunked"]:
            raise ValueError("a body is of one Content-Length, or chunked")
        return None
    if not lengths:
        return 0
    if len(lengths) > 1 or not re.fullmatch(f"[0-9]{{1,{_MAX_LENGTH_DIGITS}}}", lengths[0]):
        raise ValueError("a body has one Content-Length")
    return int(lengths[0])


def _forwarded_head(first: str, authority: str, headers: list[tuple[str, str]]) -> bytes:
    """The head for the target: its own Host, whatever the program says, and one request to a connection."""
    named = {name.strip().lower() for key, value in headers if key.lower() == "connection" for name in value.split(",")}
    dropped = (_HOP_BY_HOP | named | {"host"}) - {"content-length", "transfer-encoding"}
    kept = [f"{name}: {value}" for name, value in headers if name.lower() not in dropped]
    return "\r\n".join([first, f"Host: {authority}", *kept, "Connection: close", "", ""]).encode("latin-1")


def refusal(error: RefusedError) -> bytes:
    """The answer to a request that is refused."""
    body = f"driftgym: {error}\n".encode("utf-8", "replace")
    head = (
        f"HTTP/1.1 {error.status} {_REASONS[error.status]}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body

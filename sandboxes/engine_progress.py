"""Requests to the Docker engine that go on for minutes and tell how far they are: builds and pulls.

Each is one HTTP request, whose end, for whatever reason, ends the work in the engine too: a thread that reads the
SDK's answer could not be told to stop.
"""

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import IO, Any

import aiohttp

from driftgym.errors import SandboxError
from driftgym.sandboxes.docker_engine import Engine
from driftgym.sandboxes.docker_request import RefusedError

_CONNECT_TIMEOUT_S = 10.0
_MAX_LINE_BYTES = 8 * 2**20


@contextlib.asynccontextmanager
async def progress_of(
    engine: Engine,
    path: str,
    *,
    query: Mapping[str, str],
    headers: Mapping[str, str] | None = None,
    body: IO[bytes] | None = None,
) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """Posts to `path`; the engine's messages, one by one, as they come. The request ends with the block.

    The caller sets the deadline.

    Raises:
        RefusedError: the engine answers with an HTTP error.
        SandboxError: it does not answer, or the connection breaks.
    """
    connector = aiohttp.UnixConnector(path=engine.socket_path, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None, connect=_CONNECT_TIMEOUT_S)
    url = f"http://docker{engine.path(path, **query)}"
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            session.post(url, headers=headers, data=body) as response,
        ):
            if response.status >= 400:
                raise RefusedError(_reason(await response.text()), status=response.status)
            yield _messages(response.content)
    except (aiohttp.ClientError, OSError) as error:
        raise SandboxError(f"the Docker engine does not answer: {error or type(error).__name__}") from None


def _reason(text: str) -> str:
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text.strip()[:300]


async def _messages(content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    pending = b""
    async for piece in content.iter_any():
        *lines, pending = (pending + piece).split(b"\n")
        for line in lines:
            if line.strip():
                yield _message(line)
        if len(pending) > _MAX_LINE_BYTES:
            raise SandboxError("the Docker engine answers nonsense: a line without an end")
    if pending.strip():
        yield _message(pending)


def _message(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise SandboxError(f"the Docker engine answers nonsense: {line[:200]!r}")
    return message

"""HTTP to one engine: connections without hidden limits, and every failure a GeneratorError."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from driftgym.errors import GeneratorError

_KEEPALIVE_S = 3.0  # shorter than any server's own (uvicorn: 5 s), so that no request meets a closing connection
_CONTROL_CONNECTIONS = 8


class EngineRefusedError(GeneratorError):
    """The engine answered with a status other than 200: it is there, and did not do what it was asked for."""

    def __init__(self, message: str, *, status: int, detail: str) -> None:
        """Takes the HTTP status and what the engine said."""
        super().__init__(message)
        self.status = status
        self.detail = detail


class EngineHttp:
    """The connections to the server at one root. Control calls pass while every other connection generates.

    No call has a time limit of its own: the caller has one. A call that is cancelled closes its connection, by which
    a server learns that nobody waits for the answer.
    """

    def __init__(self, url: str, *, max_concurrency: int) -> None:
        """Takes no connection yet; `max_concurrency` is how many generating calls have one at once, more wait."""
        self.url = url.rstrip("/")
        self._max_concurrency = max_concurrency
        self._sessions: tuple[aiohttp.ClientSession, aiohttp.ClientSession] | None = None
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """True from the beginning of `close` on."""
        return self._is_closed

    async def post(self, path: str, body: Mapping[str, Any], *, generates: bool = False) -> Mapping[str, Any]:
        """The JSON object that the server answers with; {} for an empty body.

        Args:
            path: below the root, with its query.
            body: sent as JSON.
            generates: the call samples tokens, and is one of `max_concurrency`.

        Raises:
            EngineRefusedError: the status is not 200.
            GeneratorError: the engine is gone, or its answer is no JSON object.
        """
        return self._decoded(path, await self._call("POST", path, json.dumps(body).encode(), generates=generates))

    async def get(self, path: str) -> Mapping[str, Any]:
        """As `post`, of a GET."""
        return self._decoded(path, await self._call("GET", path, None, generates=False))

    async def get_text(self, path: str) -> str:
        """The body that the server answers a GET with, as text. Raises as `get`."""
        return (await self._call("GET", path, None, generates=False)).decode(errors="replace")

    async def close(self) -> None:
        """Gives up the connections: calls under way, and calls made from now on, end with GeneratorError."""
        self._is_closed = True
        sessions, self._sessions = self._sessions, None
        for session in sessions or ():
            await asyncio.shield(session.close())

    async def _call(self, method: str, path: str, data: bytes | None, *, generates: bool) -> bytes:
        session = self._session(generates=generates)
        try:
            async with session.request(method, self.url + path, data=data) as response:
                raw = await response.read()
        except asyncio.CancelledError:
            # aiohttp cancels those who wait for a connection when the session is closed: that is nobody's wish here.
            task = asyncio.current_task()
            if self._is_closed and task is not None and not task.cancelling():
                raise GeneratorError(f"{self.url}: closed") from None
            raise
        except (aiohttp.ClientError, OSError) as error:
            if self._is_closed:
                raise GeneratorError(f"{self.url}: closed") from None
            raise GeneratorError(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        if response.status != 200:
            detail = _detail(raw)
            message = f"{self.url}{path}: answered {response.status}: {detail}"
            raise EngineRefusedError(message, status=response.status, detail=detail)
        return raw

    def _decoded(self, path: str, raw: bytes) -> Mapping[str, Any]:
        reply = _parsed(raw) if raw.strip() else {}
        if not isinstance(reply, dict):
            raise GeneratorError(f"{self.url}{path}: answered something that is no JSON object: {raw[:80]!r}")
        return reply

    def _session(self, *, generates: bool) -> aiohttp.ClientSession:
        if self._is_closed:
            raise GeneratorError(f"{self.url}: closed")
        if self._sessions is None:
            self._sessions = (_new_session(self._max_concurrency), _new_session(_CONTROL_CONNECTIONS))
        return self._sessions[0 if generates else 1]


def _new_session(num_connections: int) -> aiohttp.ClientSession:
    """A session without a time limit of its own: the library's default of 300 s must not be what decides."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=num_connections, keepalive_timeout=_KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None),
        headers={"Content-Type": "application/json"},
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def _detail(raw: bytes) -> str:
    """What a refusal says: engines put it under `error` or `message`, the one in the other or not."""
    reply = _parsed(raw)
    detail = reply.get("error") or reply.get("message") if isinstance(reply, dict) else None
    if isinstance(detail, dict):
        detail = detail.get("message")
    return str(detail) if detail else repr(raw[:200])

"""The client of engines that speak SGLang's native HTTP API: real SGLang servers, and the embedded one."""

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

import aiohttp
import numpy as np

from driftgym.agents.generators.answers import parse_answer
from driftgym.agents.generators.base import GeneratorHealth, WeightVersion
from driftgym.errors import GeneratorError
from driftgym.types import Completion, SamplingParams, WeightUpdate

_CONTROL_S = 10.0  # any call but a generation or a weight update
_ABORT_S = 2.0  # the caller's deadline has passed already
_KEEPALIVE_S = 3.0  # shorter than any server's own (uvicorn: 5 s), so that no request meets a closing connection
_CONTROL_CONNECTIONS = 8


class OwnedServer(Protocol):
    """A server that a client started, and ends."""

    async def close(self, *, timeout_s: float) -> None:
        """Ends the server."""
        ...


class SGLangGenerator:
    """One engine behind `url`. Answers of another life of the run, or of unknown weights, are refused."""

    def __init__(
        self,
        url: str,
        *,
        incarnation: int,
        max_concurrency: int,
        vocab_size: int | None = None,
        server: OwnedServer | None = None,
        close_timeout_s: float = 10.0,
    ) -> None:
        """Takes no connection yet.

        Args:
            url: the server's root.
            incarnation: the life of the run; answers and weights of another are refused.
            max_concurrency: as many generations can be under way at once; more wait here, which counts as queued.
            vocab_size: ids from there on are refused; None asks the server, and refuses negative ids alone when it
                does not say.
            server: ended by `close`.
            close_timeout_s: bounds the end of `server`.
        """
        self.url = url.rstrip("/")
        self._incarnation = incarnation
        self._max_concurrency = max_concurrency
        self._places = asyncio.Semaphore(max_concurrency)
        self._vocab_size = vocab_size
        self._knows_vocabulary = vocab_size is not None
        self._learning = asyncio.Lock()
        self._server = server
        self._close_timeout_s = close_timeout_s
        self._sessions: tuple[aiohttp.ClientSession, aiohttp.ClientSession] | None = None
        self._is_closed = False
        self._is_paused = False
        self._num_changes = 0  # beginnings and ends of weight updates: the weights may change between two

    async def __aenter__(self) -> "SGLangGenerator":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        session_id: str,
        deadline_s: float,
        min_policy_version: int = 0,
    ) -> Completion:
        """As `Generator.generate`. Engines find shared prefixes by the tokens, so `session_id` is not sent."""
        del session_id
        try:
            async with asyncio.timeout(deadline_s - time.monotonic()):
                if not self._knows_vocabulary:
                    await self._learn_vocabulary()
                body = _generate_body(_checked_ids(prompt_token_ids, self._vocab_size), sampling, request_id)
                async with self._places:
                    sent, num_changes = time.monotonic(), self._num_changes
                    reply = await self._post("/generate", body, generates=True)
        except TimeoutError:
            await self._abort_quietly(request_id)
            raise GeneratorError(f"{self.url}: request {request_id} got no answer by its deadline") from None
        completion = parse_answer(
            reply,
            request_id=request_id,
            incarnation=self._incarnation,
            vocab_size=self._vocab_size,
            elapsed_s=time.monotonic() - sent,
            # Sent within an update, it may have been begun with the weights before it.
            had_update=self._num_changes != num_changes or self._num_changes % 2 == 1,
        )
        if len(completion.policy_versions) and completion.policy_versions.min() < min_policy_version:
            oldest = int(completion.policy_versions.min())
            raise GeneratorError(f"{self.url}: tokens of version {oldest}, at least {min_policy_version} was asked for")
        return completion

    async def abort(self, request_id: str | None = None) -> None:
        """As `Generator.abort`."""
        await self._control("/abort_request", {"abort_all": True} if request_id is None else {"rid": request_id})

    async def pause(self) -> None:
        """As `Generator.pause`. Running requests lose their KV, so that weights can be taken in the meantime."""
        self._is_paused = True
        await self._control("/pause_generation", {"mode": "retract"})

    async def resume(self) -> None:
        """As `Generator.resume`."""
        self._is_paused = False
        await self._control("/continue_generation", {})

    async def update_weights(self, update: WeightUpdate, *, drain: bool, timeout_s: float) -> None:
        """As `Generator.update_weights`."""
        version = WeightVersion(incarnation=update.incarnation, policy_version=update.policy_version)
        if update.incarnation != self._incarnation:
            raise GeneratorError(f"{self.url}: weights {version} are of another life, this is {self._incarnation}")
        self._num_changes += 1
        pauses = not drain and not self._is_paused
        try:
            async with asyncio.timeout(timeout_s):
                if pauses:
                    await self._post("/pause_generation", {"mode": "retract"})
                await self._load(update.location, version)
        except TimeoutError:
            raise GeneratorError(f"{self.url}: weights {version} were not taken within {timeout_s} s") from None
        finally:
            self._num_changes += 1
            if pauses:
                await asyncio.shield(self._control("/continue_generation", {}))

    async def _load(self, location: str, version: WeightVersion) -> None:
        body = {"model_path": location, "weight_version": str(version), "flush_cache": True}
        reply = await self._post("/update_weights_from_disk", body)
        if reply.get("success") is not True:
            raise GeneratorError(f"{self.url}: weights {version} were refused: {reply.get('message')}")
        # The reply could come from a server that did nothing; what it now reports is what its tokens will carry.
        reported = (await self._get("/model_info")).get("weight_version")
        if reported != str(version):
            raise GeneratorError(f"{self.url}: took weights {version} and reports {reported!r}")

    async def health(self) -> GeneratorHealth:
        """As `Generator.health`. Figures that a server does not report are 0."""
        try:
            async with asyncio.timeout(_CONTROL_S):
                model = await self._get("/model_info")
                server = await self._get("/server_info")
        except TimeoutError:
            raise GeneratorError(f"{self.url}: no answer within {_CONTROL_S} s") from None
        try:
            version = WeightVersion.parse(str(model.get("weight_version")))
            return GeneratorHealth(
                version=version,
                num_running=int(server.get("num_running") or 0),
                num_queued=int(server.get("num_queued") or 0),
                busy_s=float(server.get("busy_s") or 0.0),
            )
        except (TypeError, ValueError, OverflowError):
            raise GeneratorError(
                f"{self.url}: reports weights {model.get('weight_version')!r}; start the server with a weight version "
                f"of the form incarnation:version"
            ) from None

    async def close(self) -> None:
        """As `Generator.close`. Generations under way end with GeneratorError."""
        self._is_closed = True
        sessions, self._sessions = self._sessions, None
        server, self._server = self._server, None
        for session in sessions or ():
            await asyncio.shield(session.close())
        if server is not None:
            await asyncio.shield(server.close(timeout_s=self._close_timeout_s))

    async def _learn_vocabulary(self) -> None:
        async with self._learning:
            if self._knows_vocabulary:
                return
            size = (await self._get("/model_info")).get("vocab_size")
            self._vocab_size = size if isinstance(size, int) else None
            self._knows_vocabulary = True

    async def _abort_quietly(self, request_id: str) -> None:
        with contextlib.suppress(GeneratorError, TimeoutError):
            async with asyncio.timeout(_ABORT_S):
                await self._post("/abort_request", {"rid": request_id})

    async def _control(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            async with asyncio.timeout(_CONTROL_S):
                return await self._post(path, body)
        except TimeoutError:
            raise GeneratorError(f"{self.url}{path}: no answer within {_CONTROL_S} s") from None

    async def _post(self, path: str, body: Mapping[str, Any], *, generates: bool = False) -> Mapping[str, Any]:
        return await self._call("POST", path, body, generates=generates)

    async def _get(self, path: str) -> Mapping[str, Any]:
        return await self._call("GET", path, None, generates=False)

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, generates: bool
    ) -> Mapping[str, Any]:
        """The JSON object that the server answers with; {} for an empty body.

        Raises GeneratorError for everything else. Has no time limit of its own: the caller has one.
        """
        session = self._session(generates=generates)
        data = None if body is None else json.dumps(body).encode()
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
        return self._decoded(path, response.status, raw)

    def _decoded(self, path: str, status: int, raw: bytes) -> Mapping[str, Any]:
        try:
            reply = json.loads(raw) if raw.strip() else {}
        except (ValueError, RecursionError):
            reply = None
        if status != 200:
            detail = reply.get("error") or reply.get("message") if isinstance(reply, dict) else None
            if isinstance(detail, dict):
                detail = detail.get("message")
            raise GeneratorError(f"{self.url}{path}: answered {status}: {detail or raw[:200]!r}")
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
        trust_env=False,
    )


def _checked_ids(prompt_token_ids: Sequence[int], vocab_size: int | None) -> list[int]:
    ids = np.asarray(prompt_token_ids, dtype=np.int64).reshape(-1)
    if len(ids) == 0:
        raise ValueError("the prompt is empty")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or (vocab_size is not None and high >= vocab_size):
        raise ValueError(f"the prompt has ids outside of the vocabulary of {vocab_size}: {low} to {high}")
    return ids.tolist()


def _generate_body(ids: list[int], sampling: SamplingParams, request_id: str) -> Mapping[str, Any]:
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_new_tokens": sampling.max_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
    }
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    return {"input_ids": ids, "sampling_params": params, "return_logprob": True, "rid": request_id}

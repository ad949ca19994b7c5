"""The client of engines that speak SGLang's native HTTP API: real SGLang servers, and the embedded one."""

from collections.abc import Mapping
from typing import Any

from driftgym.agents.generators.base import WeightVersion
from driftgym.agents.generators.controls import SGLangCalls, wire_id
from driftgym.agents.generators.engine_info import EngineInfo
from driftgym.agents.generators.http import EngineHttp
from driftgym.agents.generators.remote import OwnedServer, RemoteGenerator
from driftgym.errors import GeneratorError
from driftgym.types import SamplingParams, WeightUpdate

_NEUTRAL: Mapping[str, Any] = {
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}
"""What would change the distribution, at the values at which it does not: a server may have other defaults."""
_PATH = "path"  # of a plan: what is posted to


class SGLangGenerator(RemoteGenerator):
    """One engine behind `url`. Answers of another life of the run, or of unknown weights, are refused.

    A real server reads weights from the same path as whoever published them. Weights are taken in the forms that are
    right: `retract` and a flush; `in_place` and none; `abort` and a flush; or nothing that runs.
    """

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
            vocab_size: ids from there on are refused. None takes what the server says, or the `config.json` of its
                model where that can be read; without both, negative ids alone are refused.
            server: ended by `close`.
            close_timeout_s: bounds the end of `server`.
        """
        http = EngineHttp(url, max_concurrency=max_concurrency)
        info = EngineInfo(http, vocab_size=vocab_size)
        super().__init__(
            http,
            info=info,
            wire=SGLangWire(http, info),
            calls=SGLangCalls(),
            incarnation=incarnation,
            max_concurrency=max_concurrency,
            server=server,
            close_timeout_s=close_timeout_s,
        )


class SGLangWire:
    """Asks an engine for answers and gives it weights, by SGLang's native API."""

    def __init__(self, http: EngineHttp, info: EngineInfo) -> None:
        """Calls nothing yet."""
        self._http = http
        self._info = info

    async def generate(self, ids: list[int], sampling: SamplingParams, *, request_id: str) -> Mapping[str, Any]:
        """As `EngineWire.generate`."""
        params: dict[str, Any] = {
            **_NEUTRAL,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_new_tokens": sampling.max_tokens,
            "stop_token_ids": list(sampling.stop_token_ids),
        }
        if sampling.seed is not None:
            params["sampling_seed"] = sampling.seed
        return await self._ask(ids, params, request_id)

    async def score(self, ids: list[int], *, start: int, request_id: str) -> Mapping[str, Any]:
        """As `EngineWire.score`."""
        params = {"temperature": 1.0, "max_new_tokens": 0}
        return await self._ask(ids, params, request_id, logprob_start_len=start)

    async def _ask(
        self, ids: list[int], params: Mapping[str, Any], request_id: str, **options: int
    ) -> Mapping[str, Any]:
        body = {"input_ids": ids, "sampling_params": params, "return_logprob": True, "rid": wire_id(request_id)}
        return await self._http.post("/generate", {**body, **options}, generates=True)

    async def plan(self, update: WeightUpdate, version: WeightVersion) -> Mapping[str, Any]:
        """As `EngineWire.plan`."""
        body = await self._info.update_body(update, version)
        return {**body, _PATH: f"/update_weights_from_{update.transport}"}

    async def take(self, plan: Mapping[str, Any], *, flushes: bool) -> None:
        """As `EngineWire.take`."""
        body = {key: value for key, value in plan.items() if key != _PATH}
        reply = await self._http.post(str(plan[_PATH]), {**body, "flush_cache": flushes})
        if reply.get("success") is not True:
            raise GeneratorError(
                f"{self._http.url}: weights {plan['weight_version']} were refused: {reply.get('message')}"
            )

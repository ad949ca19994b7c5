"""The client of vLLM servers, by their HTTP API of token ids in and token ids out."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from driftgym.agents.generators.base import WeightVersion
from driftgym.agents.generators.controls import ControlCall, PauseMode
from driftgym.agents.generators.http import EngineHttp
from driftgym.agents.generators.remote import OwnedServer, RemoteGenerator
from driftgym.agents.generators.vllm_info import VLLMInfo
from driftgym.errors import GeneratorError
from driftgym.types import SamplingParams, WeightUpdate

_NO_LOGPROB = -9999.0  # vLLM's word for one that is not a number, or that it does not know
_NEUTRAL: Mapping[str, Any] = {
    "n": 1,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "ignore_eos": True,  # the request's own stop tokens end it, and no others
}
"""What would change the distribution, at the values at which it does not: a server may have other defaults."""


class VLLMGenerator(RemoteGenerator):
    """One vLLM server behind `url`. Answers of another life of the run, or of unknown weights, are refused.

    The server is started with VLLM_SERVER_DEV_MODE=1, without which it takes no weights, and with
    `--logprobs-mode processed_logprobs`. With `--enable-scale-out` it reports which weights wrote each token; without,
    the weights that it has after an answer wrote all of it, or the answer is refused.
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
            vocab_size: ids from there on are refused. None takes that of the `config.json` of the server's model,
                where that can be read; else negative ids alone are refused.
            server: ended by `close`.
            close_timeout_s: bounds the end of `server`.
        """
        http = EngineHttp(url, max_concurrency=max_concurrency)
        info = VLLMInfo(http, vocab_size=vocab_size)
        super().__init__(
            http,
            info=info,
            wire=VLLMWire(http, info),
            calls=VLLMCalls(),
            incarnation=incarnation,
            max_concurrency=max_concurrency,
            server=server,
            close_timeout_s=close_timeout_s,
        )


class VLLMCalls:
    """vLLM's control calls. Its `keep` lets running requests stand still, with their KV cache or without."""

    def pause(self, mode: PauseMode) -> ControlCall:
        """As `ControlCalls.pause`."""
        is_cache_dropped = "false" if mode == "in_place" else "true"
        return f"/pause?mode={'abort' if mode == 'abort' else 'keep'}&clear_cache={is_cache_dropped}", {}

    def resume(self) -> ControlCall:
        """As `ControlCalls.resume`."""
        return "/resume", {}

    def abort(self, request_id: str | None) -> ControlCall:
        """As `ControlCalls.abort`. The server puts the route before the id, and after it the prompt's number."""
        names = None if request_id is None else [f"generate-tokens-{request_id}", f"cmpl-{request_id}-0"]
        return "/abort_requests", {"request_ids": names} if names else {}


class VLLMWire:
    """Asks a vLLM server for answers and gives it weights; its answers take on the form of SGLang's."""

    def __init__(self, http: EngineHttp, info: VLLMInfo) -> None:
        """Calls nothing yet."""
        self._http = http
        self._info = info

    async def generate(self, ids: list[int], sampling: SamplingParams, *, request_id: str) -> Mapping[str, Any]:
        """As `EngineWire.generate`."""
        params = _sampling_params(sampling)
        if await self._info.reports_spans():
            reply = await self._ask_tokens(ids, {**params, "detokenize": False}, request_id)
            return _answer(reply, max_tokens=sampling.max_tokens, version=None)
        reply = await self._ask_completions(ids, params, request_id)
        return _answer(reply, max_tokens=sampling.max_tokens, version=await self._info.reported_version())

    async def score(self, ids: list[int], *, start: int, request_id: str) -> Mapping[str, Any]:
        """As `EngineWire.score`. The server computes all anew, and samples one token that nobody takes."""
        params = {**_sampling_params(SamplingParams(max_tokens=1)), "prompt_logprobs": 0}
        if await self._info.reports_spans():
            reply = await self._ask_tokens(ids, {**params, "detokenize": False}, request_id)
            return _scores(reply, reply, ids=ids, start=start, version=None)
        reply = await self._ask_completions(ids, params, request_id)
        choice = _choice(reply)
        return _scores(reply, choice, ids=ids, start=start, version=await self._info.reported_version())

    async def _ask_tokens(self, ids: list[int], params: Mapping[str, Any], request_id: str) -> Mapping[str, Any]:
        body = {"request_id": request_id, "token_ids": ids, "sampling_params": params}
        return await self._http.post("/inference/v1/generate", body, generates=True)

    async def _ask_completions(self, ids: list[int], params: Mapping[str, Any], request_id: str) -> Mapping[str, Any]:
        body = {**params, "request_id": request_id, "prompt": ids, "return_token_ids": True}
        return await self._http.post("/v1/completions", body, generates=True)

    async def plan(self, update: WeightUpdate, version: WeightVersion) -> Mapping[str, Any]:
        """As `EngineWire.plan`. A folder that is not there would end the server."""
        plan = await self._info.update_body(update, version)
        if not await asyncio.to_thread(Path(update.location, "config.json").is_file):
            raise GeneratorError(f"{self._http.url}: weights {version}: no model in {update.location}")
        return plan

    async def take(self, plan: Mapping[str, Any], *, flushes: bool) -> None:
        """As `EngineWire.take`."""
        folder = {"weights_path": plan["model_path"]}
        await self._http.post("/collective_rpc", {"method": "reload_weights", "kwargs": folder})
        if flushes:
            reply = await self._http.post("/reset_prefix_cache?reset_running_requests=true&reset_external=true", {})
            if reply.get("success") is not True:
                raise GeneratorError(f"{self._http.url}: took weights and did not drop its KV cache")
        await self._http.post("/update_weight_version", {"new_version": plan["weight_version"]})


def _sampling_params(sampling: SamplingParams) -> Mapping[str, Any]:
    params: dict[str, Any] = {
        **_NEUTRAL,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "logprobs": 0,  # of the sampled token alone
    }
    if sampling.seed is not None:
        params["seed"] = sampling.seed
    return params


def _choice(reply: Mapping[str, Any]) -> Mapping[str, Any]:
    """The one answer in a reply. Raises GeneratorError when there is none."""
    try:
        (choice,) = reply["choices"]
        if not isinstance(choice, dict):
            raise TypeError("a choice that is none")
        return choice
    except (KeyError, TypeError, ValueError) as error:
        raise _nonsense(error) from error


def _answer(reply: Mapping[str, Any], *, max_tokens: int, version: Any) -> Mapping[str, Any]:
    """A reply in SGLang's form.

    Args:
        reply: the JSON object of either route.
        max_tokens: that were asked for.
        version: the weights that the server has; None where the reply must tell for each token.
    """
    choice = _choice(reply)
    try:
        ids, reason = choice["token_ids"], choice["finish_reason"]
        logprobs = _sampled_logprobs(choice["logprobs"], ids)
        if reason == "length" and len(ids) != max_tokens:
            raise ValueError(f"{len(ids)} of {max_tokens} tokens: the server's --max-model-len is too short")
        meta = {
            "finish_reason": {"type": reason},
            "output_token_logprobs": [[logprob, token_id] for logprob, token_id in zip(logprobs, ids, strict=True)],
            "prompt_tokens": reply["usage"]["prompt_tokens"],
        }
        spans = choice["weight_versions"] if version is None else None
        if version is None and not isinstance(spans, list):
            raise ValueError("no weight_versions")
    except (KeyError, TypeError, ValueError) as error:
        raise _nonsense(error) from error
    # What was found in the cache is not told, though a server can: it counts a request that it preempted as new.
    return {"output_ids": ids, "meta_info": {**meta, **_weights(spans, version)}}


def _weights(spans: Any, version: Any) -> Mapping[str, Any]:
    return {"weight_version": version} if spans is None else {"weight_versions": spans}


def _sampled_logprobs(logprobs: Mapping[str, Any], ids: Sequence[int]) -> list[float]:
    if "content" not in logprobs:
        return [_real(logprob) for logprob in logprobs["token_logprobs"]]
    if [entry["token_id"] for entry in logprobs["content"]] != list(ids):
        raise ValueError("the log-probs are not those of the tokens")
    return [_real(entry["logprob"]) for entry in logprobs["content"]]


def _scores(
    reply: Mapping[str, Any], scored: Mapping[str, Any], *, ids: Sequence[int], start: int, version: Any
) -> Mapping[str, Any]:
    """The scores in SGLang's form; `scored` is what holds them: the reply, or its choice."""
    try:
        entries = scored["prompt_logprobs"]
        if len(entries) != len(ids):
            raise ValueError(f"{len(entries)} scores of {len(ids)} tokens")
        pairs = [
            [_real(entry[str(token_id)]["logprob"]), token_id]
            for entry, token_id in zip(entries[start + 1 :], ids[start + 1 :], strict=True)
        ]
        if version is None:
            (span,) = _choice(reply)["weight_versions"]
            version = span["version"]
    except (KeyError, TypeError, ValueError) as error:
        raise _nonsense(error) from error
    return {"output_ids": [], "meta_info": {"input_token_logprobs": pairs, "weight_version": version}}


def _real(logprob: Any) -> float:
    if not isinstance(logprob, float | int) or not math.isfinite(logprob) or logprob <= _NO_LOGPROB:
        raise ValueError("log-probs that are none")
    return float(logprob)


def _nonsense(error: Exception) -> GeneratorError:
    return GeneratorError(f"the answer makes no sense: {type(error).__name__}: {error}")

"""The wire: the part of SGLang's native HTTP API that the embedded server speaks. No torch.

Requests that ask for what the engine does not do are refused, rather than answered with something else.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from driftgym.agents.generators.embedded.requests import Answer, ScoreAnswer, WeightsOrder
from driftgym.types import Int32Array, SamplingParams, int32_array

_MAX_ID = 2**31 - 1
_MAX_STOP_IDS = 256
_SAMPLING_KEYS = ("temperature", "top_p", "max_new_tokens", "stop_token_ids", "sampling_seed")
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "top_k": (-1,),
    "min_p": (0,),
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_new_tokens": (0,),
    "ignore_eos": (False,),
    "stop": (None, [], ""),
    "skip_special_tokens": (True, False),
    "spaces_between_special_tokens": (True, False),
    "no_stop_trim": (True, False),
}
"""Parameters that are accepted at the values at which they change nothing."""


class BadRequestError(Exception):
    """The request is wrong; the message says how."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerateRequest:
    """A request for one completion, or for the log-probs of the prompt.

    >>> request = parse_generate({"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4}, "rid": "r"})
    >>> request.sampling.max_tokens
    4
    """

    request_id: str | None
    """The caller's id for it; None when it gave none."""
    input_ids: Int32Array
    """[P] the prompt."""
    sampling: SamplingParams
    """How tokens are drawn."""
    score_start: int | None
    """None samples a completion; else nothing is sampled, and the prompt's tokens after this one are scored."""


def parse_body(raw: bytes) -> Mapping[str, Any]:
    """The JSON object in `raw`. Raises BadRequestError."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequestError(f"the body must be a JSON object, it is {type(body).__name__}")
    return body


def parse_generate(body: Mapping[str, Any]) -> GenerateRequest:
    """The request in `body`. Raises BadRequestError."""
    if body.get("stream"):
        raise BadRequestError("stream: answers are not streamed")
    if body.get("text") is not None:
        raise BadRequestError("text: give input_ids")
    request_id = body.get("rid")
    if request_id is not None and not isinstance(request_id, str):
        raise BadRequestError("rid: must be a string (one request a call)")
    ids = body.get("input_ids")
    params = body.get("sampling_params") or {}
    if not isinstance(ids, list) or not ids:
        raise BadRequestError("input_ids: must be a list of at least one token id")
    return GenerateRequest(
        request_id=request_id,
        input_ids=_ids("input_ids", ids),
        sampling=_parse_sampling(params),
        score_start=_parse_score_start(body, params),
    )


def _parse_score_start(body: Mapping[str, Any], params: Mapping[str, Any]) -> int | None:
    start = body.get("logprob_start_len")
    scores = params.get("max_new_tokens") == 0
    if start is not None and type(start) is not int:
        raise BadRequestError("logprob_start_len: must be a whole number")
    if not scores:
        if start not in (None, -1):
            raise BadRequestError("logprob_start_len: the prompt is scored with max_new_tokens 0 alone")
        return None
    if not body.get("return_logprob") or start is None or not 0 <= start <= len(body["input_ids"]) - 2:
        raise BadRequestError(
            "with max_new_tokens 0 give return_logprob, and logprob_start_len from 0 to the prompt's length - 2: "
            "log-probs of the prompt are all that there is to answer"
        )
    return start


def parse_weights(body: Mapping[str, Any]) -> tuple[WeightsOrder, bool]:
    """The weights that `body` asks for, and whether the cache is flushed. Raises BadRequestError."""
    path, version, flush_cache = body.get("model_path"), body.get("weight_version"), body.get("flush_cache", True)
    if not isinstance(path, str) or not isinstance(version, str) or not isinstance(flush_cache, bool):
        raise BadRequestError("give model_path and weight_version (strings), and flush_cache (bool)")
    kind, base, checksum = body.get("kind", "full"), body.get("base_weight_version"), body.get("checksum")
    if kind not in ("full", "delta", "lora"):
        raise BadRequestError("kind: one of full, delta, lora")
    if not isinstance(checksum, str | None):
        raise BadRequestError("checksum: must be a string")
    if (kind == "full") != (base is None) or not isinstance(base, str | None):
        raise BadRequestError("base_weight_version: give it (a string) exactly when kind is delta or lora")
    order = WeightsOrder(folder=Path(path), version=version, kind=kind, base_version=base, checksum=checksum)
    return order, flush_cache


def parse_version(body: Mapping[str, Any]) -> str:
    """The name of the weights in memory that `body` asks for. Raises BadRequestError."""
    version = body.get("weight_version")
    if not isinstance(version, str) or body.get("flush_cache", True) is not True:
        raise BadRequestError("give weight_version (a string); the cache is always flushed")
    return version


def _parse_sampling(params: Any) -> SamplingParams:
    if not isinstance(params, dict):
        raise BadRequestError("sampling_params: must be an object")
    for key, value in params.items():
        if key not in _SAMPLING_KEYS and value not in _NEUTRAL.get(key, ()):
            raise BadRequestError(f"sampling_params.{key}: {value!r} is not supported")
    stops = params.get("stop_token_ids") or []
    if not isinstance(stops, list) or len(stops) > _MAX_STOP_IDS:
        raise BadRequestError(f"sampling_params.stop_token_ids: must be a list of at most {_MAX_STOP_IDS} ids")
    seed = params.get("sampling_seed")
    if seed is not None and type(seed) is not int:
        raise BadRequestError("sampling_params.sampling_seed: must be a whole number")
    max_tokens = params.get("max_new_tokens", 128)
    if type(max_tokens) is not int or not 0 <= max_tokens <= _MAX_ID:
        raise BadRequestError("sampling_params.max_new_tokens: must be a whole number, at least 0")
    try:
        return SamplingParams(
            temperature=_number("temperature", params),
            top_p=_number("top_p", params),
            max_tokens=max(1, max_tokens),  # 0 samples nothing: see `score_start`
            stop_token_ids=tuple(_ids("sampling_params.stop_token_ids", stops).tolist()),
            seed=seed,
        )
    except ValueError:
        raise BadRequestError("sampling_params: temperature must be at least 0, top_p above 0 and at most 1") from None


def _number(key: str, params: Mapping[str, Any]) -> float:
    value = params.get(key, 1.0)
    if type(value) not in (int, float) or not math.isfinite(value):
        raise BadRequestError(f"sampling_params.{key}: must be a number")
    return float(value)


def _ids(key: str, values: list[Any]) -> Int32Array:
    if any(type(value) is not int for value in values):
        raise BadRequestError(f"{key}: must hold whole numbers only")
    if values and (min(values) < 0 or max(values) > _MAX_ID):
        raise BadRequestError(f"{key}: an id is out of range")
    return int32_array(values)


def format_answer(answer: Answer) -> dict[str, Any]:
    """The reply to `/generate`. Log-probs are written so that float32 is read back exactly."""
    finish: dict[str, Any] = {"type": answer.finish_reason}
    if answer.finish_reason == "stop":
        finish["matched"] = answer.matched
    elif answer.finish_reason == "length":
        finish["length"] = len(answer.token_ids)
    else:
        finish |= _cut_short(answer)
    token_ids = answer.token_ids.tolist()
    return {
        "output_ids": token_ids,
        "meta_info": {
            "id": answer.request_id,
            "finish_reason": finish,
            "prompt_tokens": answer.num_prompt_tokens,
            "completion_tokens": len(token_ids),
            "cached_tokens": answer.num_cached_tokens,
            "weight_version": answer.version,
            "weight_versions": [
                {"version": span.version, "start": span.start, "end": span.end} for span in answer.spans
            ],
            "kv_min_version": answer.kv_min_version,
            "output_token_logprobs": [
                [logprob, token_id, None] for logprob, token_id in zip(answer.logprobs.tolist(), token_ids, strict=True)
            ],
            "e2e_latency": answer.latency_s,
            "queue_time": answer.queue_s,
        },
    }


def format_scores(answer: ScoreAnswer) -> dict[str, Any]:
    """The reply to `/generate` that samples nothing: token `start` without a log-prob, then each token with its own."""
    logprobs = None if answer.logprobs is None else [None, *answer.logprobs.tolist()]
    token_ids = answer.token_ids[answer.start :].tolist()
    is_done = logprobs is not None
    return {
        "output_ids": [],
        "meta_info": {
            "id": answer.request_id,
            "finish_reason": {"type": "length", "length": 0} if is_done else {"type": "abort", **_cut_short(answer)},
            "prompt_tokens": len(answer.token_ids),
            "completion_tokens": 0,
            "cached_tokens": answer.num_cached_tokens,
            "weight_version": answer.version,
            "weight_versions": [],
            "kv_min_version": None,
            "input_token_logprobs": [
                [logprob, token_id, None] for logprob, token_id in zip(logprobs or [], token_ids, strict=is_done)
            ],
            "output_token_logprobs": [],
            "e2e_latency": answer.latency_s,
        },
    }


def _cut_short(answer: Answer | ScoreAnswer) -> dict[str, Any]:
    return {"message": answer.message, "err_type": "EngineFailure" if answer.is_failure else None}

"""The wire: the part of SGLang's native HTTP API that the embedded server speaks. No torch.

Requests that ask for what the engine does not do are refused, rather than answered with something else.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from driftgym.agents.generators.embedded.requests import Answer
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
    """A request for one completion.

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
    if not isinstance(ids, list) or not ids:
        raise BadRequestError("input_ids: must be a list of at least one token id")
    return GenerateRequest(
        request_id=request_id,
        input_ids=_ids("input_ids", ids),
        sampling=_parse_sampling(body.get("sampling_params") or {}),
    )


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
    if type(max_tokens) is not int or not 1 <= max_tokens <= _MAX_ID:
        raise BadRequestError("sampling_params.max_new_tokens: must be a whole number of at least 1")
    try:
        return SamplingParams(
            temperature=_number("temperature", params),
            top_p=_number("top_p", params),
            max_tokens=max_tokens,
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
        finish |= {"message": answer.message, "err_type": "EngineFailure" if answer.is_failure else None}
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

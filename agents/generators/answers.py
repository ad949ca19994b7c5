"""Reading what an engine answered, strictly: a completion is exact, or it is an error."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from driftgym.agents.generators.base import WeightVersion
from driftgym.errors import GeneratorError
from driftgym.types import Completion, FinishReason, Float32Array, Int32Array, float32_array, int32_array

_EXTRAS = ("prompt_tokens", "cached_tokens", "num_retractions", "e2e_latency")


def parse_answer(
    reply: Mapping[str, Any],
    *,
    request_id: str,
    incarnation: int,
    vocab_size: int | None,
    elapsed_s: float,
    had_update: bool,
) -> Completion:
    """The completion in a reply of `/generate`.

    Args:
        reply: the JSON object.
        request_id: what it should answer.
        incarnation: the life whose weights are taken.
        vocab_size: ids from there on are nonsense; None does not check.
        elapsed_s: from sending the request to the reply.
        had_update: the weights changed meanwhile, so that one version for all tokens says nothing.

    Raises:
        GeneratorError: it is not what an engine answers, or its tokens are of unknown or foreign weights.
    """
    try:
        meta = reply["meta_info"]
        token_ids, logprobs = _tokens(reply["output_ids"], meta["output_token_logprobs"], vocab_size)
        kv_min = meta.get("kv_min_version")
        return Completion(
            request_id=request_id,
            token_ids=token_ids,
            logprobs=logprobs,
            policy_versions=_versions(meta, len(token_ids), incarnation, had_update),
            kv_min_policy_version=None if kv_min is None else _policy_version(kv_min, incarnation),
            finish_reason=_finish_reason(meta["finish_reason"], num_tokens=len(token_ids)),
            latency_s=max(0.0, elapsed_s - float(meta.get("queue_time") or 0.0)),
            extras={key: meta[key] for key in _EXTRAS if key in meta},
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise GeneratorError(f"request {request_id}: the answer makes no sense: {reason}") from error


def _tokens(output_ids: Any, pairs: Any, vocab_size: int | None) -> tuple[Int32Array, Float32Array]:
    if any(type(token_id) is not int for token_id in output_ids):
        raise ValueError("token ids that are none")
    token_ids = int32_array(output_ids)
    logprobs = float32_array([pair[0] for pair in pairs])
    if [pair[1] for pair in pairs] != list(output_ids):
        raise ValueError("the log-probs are not those of the tokens")
    if not np.isfinite(logprobs).all() or (logprobs > 1e-3).any():
        raise ValueError("log-probs that are none")
    if len(token_ids) and (token_ids.min() < 0 or (vocab_size is not None and token_ids.max() >= vocab_size)):
        raise ValueError("token ids outside of the vocabulary")
    return token_ids, logprobs


def _finish_reason(reason: Mapping[str, Any], *, num_tokens: int) -> FinishReason:
    kind = reason["type"]
    if kind not in ("stop", "length", "abort"):
        raise ValueError(f"unknown finish reason {kind!r}")
    if kind == "abort" and (reason.get("status_code") or reason.get("err_type")):
        raise ValueError(f"the engine gave up: {reason.get('message')}")
    if kind != "abort" and not num_tokens:
        raise ValueError("it ended without a token, which no policy can do")
    finish: FinishReason = kind
    return finish


def _versions(meta: Mapping[str, Any], length: int, incarnation: int, had_update: bool) -> Int32Array:
    """[L] the version of each token, from the engine's spans."""
    spans: Sequence[Mapping[str, Any]] | None = meta.get("weight_versions")
    if spans is None:
        if had_update:
            raise ValueError("no weight_versions, and the weights changed while it was written")
        spans = [{"version": meta["weight_version"], "start": 0, "end": length}]
    versions = np.empty(length, np.int32)
    filled = 0
    for span in spans:
        start, end = int(span["start"]), int(span["end"])
        if start != filled or not start <= end <= length:
            raise ValueError(f"weight_versions {spans} do not cover {length} tokens")
        versions[start:end] = _policy_version(span["version"], incarnation)
        filled = end
    if filled != length:
        raise ValueError(f"weight_versions {spans} do not cover {length} tokens")
    return int32_array(versions)


def _policy_version(name: Any, incarnation: int) -> int:
    try:
        version = WeightVersion.parse(name)
    except (TypeError, ValueError):
        raise ValueError(f"weights {name!r}, which no run published") from None
    if version.incarnation != incarnation:
        raise ValueError(f"weights {name!r} of another life of the run, this is {incarnation}")
    return version.policy_version

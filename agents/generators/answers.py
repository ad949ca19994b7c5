"""Reading what an engine answered, strictly: a completion is exact, or it is an error."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from driftgym.agents.generators.base import Scores, WeightVersion
from driftgym.agents.generators.traffic import older
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
    halted_s: float = 0.0,
    kept_version: int | None = None,
    cached_version: int | None = None,
) -> Completion:
    """The completion in a reply of `/generate`.

    Args:
        reply: the JSON object.
        request_id: what it should answer.
        incarnation: the life whose weights are taken.
        vocab_size: ids from there on are nonsense; None does not check.
        elapsed_s: from sending the request to the reply.
        had_update: the weights changed meanwhile, so that one version for all tokens says nothing.
        halted_s: how long of that the engine stood still; taken when the engine reports no `queue_time`.
        kept_version: the oldest version whose KV it went on with over an update; None when there was none.
        cached_version: the oldest version whose KV was in the engine's cache when the request was sent; None when
            that was of the engine's own version. Both are taken when the engine reports no `kv_min_version`.

    Raises:
        GeneratorError: it is not what an engine answers, or its tokens are of unknown or foreign weights.
    """
    try:
        meta = reply["meta_info"]
        token_ids, logprobs = _tokens(reply["output_ids"], meta["output_token_logprobs"], vocab_size)
        versions = _versions(meta, len(token_ids), incarnation, had_update)
        queued_s = meta.get("queue_time")
        return Completion(
            request_id=request_id,
            token_ids=token_ids,
            logprobs=logprobs,
            policy_versions=versions,
            kv_min_policy_version=_kv_min(meta, versions, incarnation, kept_version, cached_version),
            finish_reason=_finish_reason(meta["finish_reason"], num_tokens=len(token_ids)),
            latency_s=max(0.0, elapsed_s - (halted_s if queued_s is None else float(queued_s))),
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


def _kv_min(
    meta: Mapping[str, Any],
    versions: Int32Array,
    incarnation: int,
    kept_version: int | None,
    cached_version: int | None,
) -> int | None:
    """The engine's own report where it makes one; else the oldest version that a token can rest on."""
    if "kv_min_version" in meta:
        name = meta["kv_min_version"]
        return None if name is None else _policy_version(name, incarnation)
    # A request that was retracted reads its prompt again, which the engine may not count as found in the cache.
    is_cache_used = meta.get("cached_tokens") != 0 or bool(meta.get("num_retractions"))
    oldest = older(kept_version, cached_version if is_cache_used else None)
    if oldest is None or not len(versions) or oldest >= int(versions.max()):
        return None
    return oldest


def empty_completion(request_id: str) -> Completion:
    """Of a request that was aborted before an engine had it."""
    return Completion(
        request_id=request_id,
        token_ids=int32_array([]),
        logprobs=float32_array([]),
        policy_versions=int32_array([]),
        finish_reason="abort",
    )


def parse_scores(
    reply: Mapping[str, Any],
    *,
    token_ids: Sequence[int],
    num_given: int,
    incarnation: int,
    vocab_size: int | None,
) -> Scores:
    """The log-probs in a reply of `/generate` that samples nothing.

    Args:
        reply: the JSON object; it may report on tokens before the scored ones too.
        token_ids: [L] what was asked about.
        num_given: tokens at its start that are not scored.
        incarnation: the life whose weights are taken.
        vocab_size: of the model; None when it is not known.

    Raises:
        GeneratorError: it is not what an engine answers, or of unknown or foreign weights.
    """
    try:
        meta = reply["meta_info"]
        scored = list(token_ids[num_given:])
        # SGLang scores the vocabulary's last id as every other, and reports it as 0.
        last_id = max(token_ids) if vocab_size is None else vocab_size - 1
        pairs = [
            (pair[0], token_id if token_id == last_id and pair[1] == 0 else pair[1])
            for pair, token_id in zip(meta["input_token_logprobs"][-len(scored) :], scored, strict=True)
        ]
        _, logprobs = _tokens(scored, pairs, vocab_size)
        version = _policy_version(meta["weight_version"], incarnation)
        return Scores(logprobs=logprobs, version=WeightVersion(incarnation=incarnation, policy_version=version))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise GeneratorError(f"the scores make no sense: {type(error).__name__}: {error}") from error


def _policy_version(name: Any, incarnation: int) -> int:
    try:
        version = WeightVersion.parse(name)
    except (TypeError, ValueError):
        raise ValueError(f"weights {name!r}, which no run published") from None
    if version.incarnation != incarnation:
        raise ValueError(f"weights {name!r} of another life of the run, this is {incarnation}")
    return version.policy_version

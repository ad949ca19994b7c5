"""Refuses an engine whose log-probs are not those of the distribution that it samples from."""

import time
import uuid

import numpy as np

from driftgym.agents.generators.base import Generator
from driftgym.agents.generators.http import EngineRefusedError
from driftgym.errors import ConfigError, GeneratorError
from driftgym.types import Completion, SamplingParams

_TEMPERATURES = (1000.0, 2.0)  # the first that the engine takes: vLLM takes none above 2
_NUM_TOKENS = 16
_MIN_SPREAD = 1e-3  # below it, the model finds all tokens as likely, and nothing tells the two apart
_SAME = 0.05  # of the spread: by less differ scores of the same weights, in bfloat16 too
_REFUSED = 400


async def check_logprobs(generator: Generator, *, name: str, token_id: int, timeout_s: float) -> bool:
    """Samples a few tokens at a high temperature, and has the engine score them, which it does at temperature 1.

    An engine that reports log-probs of before the temperature reports those scores when it samples; trained on, every
    ratio would be wrong. Returns False where the engine samples and does not score: then nobody can tell.

    Args:
        generator: asked twice.
        name: of the engine, for the message.
        token_id: any that the model knows; the prompt.
        timeout_s: for each answer.

    Raises:
        ConfigError: the log-probs are those of before the temperature.
        GeneratorError: the engine does not answer.
    """
    completion = await _sample(generator, token_id, timeout_s=timeout_s)
    if not len(completion.logprobs):
        raise GeneratorError(f"{name} ended the request that asks what its log-probs are of")
    ids = [token_id, *completion.token_ids.tolist()]
    try:
        scores = await generator.score(ids, num_given=1, deadline_s=time.monotonic() + timeout_s)
    except GeneratorError:
        return False
    spread = float(np.ptp(scores.logprobs))
    if spread > _MIN_SPREAD and np.abs(completion.logprobs - scores.logprobs).max() <= _SAME * spread:
        raise ConfigError(
            f"generator: {name} reports log-probs of before the temperature (at a high one they are those of "
            f"temperature 1); start an SGLang server without SGLANG_RETURN_ORIGINAL_LOGPROB, vLLM's with "
            f"--logprobs-mode processed_logprobs"
        )
    return True


async def _sample(generator: Generator, token_id: int, *, timeout_s: float) -> Completion:
    *higher, highest_for_all = _TEMPERATURES
    for temperature in higher:
        try:
            return await _sample_at(temperature, generator, token_id, timeout_s=timeout_s)
        except EngineRefusedError as error:
            if error.status != _REFUSED:
                raise
    return await _sample_at(highest_for_all, generator, token_id, timeout_s=timeout_s)


async def _sample_at(temperature: float, generator: Generator, token_id: int, *, timeout_s: float) -> Completion:
    return await generator.generate(
        [token_id],
        SamplingParams(temperature=temperature, max_tokens=_NUM_TOKENS),
        request_id=f"probe-{uuid.uuid4().hex}",
        session_id="probe",
        deadline_s=time.monotonic() + timeout_s,
    )

"""Refuses an engine whose log-probs are not those of the distribution that it samples from."""

import time
import uuid

import numpy as np

from driftgym.agents.generators.base import Generator
from driftgym.errors import ConfigError
from driftgym.types import Float32Array, SamplingParams

_TEMPERATURE = 1000.0
_NUM_TOKENS = 16
_MIN_SPREAD = 1e-3  # below it, the model finds all tokens as likely, and nothing tells the two apart


async def check_logprobs(generator: Generator, *, name: str, token_id: int, timeout_s: float) -> None:
    """Samples a few tokens at a temperature so high that all are about as likely, and has the engine score them.

    The scores are at temperature 1, so they differ by a thousand times as much as the log-probs of what was sampled
    may. An engine that reports log-probs of before the temperature reports those scores instead; trained on, every
    ratio would be wrong.

    Args:
        generator: asked twice.
        name: of the engine, for the message.
        token_id: any that the model knows; the prompt.
        timeout_s: for each answer.

    Raises:
        ConfigError: the log-probs are those of before the temperature.
        GeneratorError: the engine does not answer.
    """
    completion = await generator.generate(
        [token_id],
        SamplingParams(temperature=_TEMPERATURE, max_tokens=_NUM_TOKENS),
        request_id=f"probe-{uuid.uuid4().hex}",
        session_id="probe",
        deadline_s=time.monotonic() + timeout_s,
    )
    ids = [token_id, *completion.token_ids.tolist()]
    scores = await generator.score(ids, num_given=1, deadline_s=time.monotonic() + timeout_s)
    sampled, scored = _spread(completion.logprobs), _spread(scores.logprobs)
    if scored > _MIN_SPREAD and sampled > scored / 2:
        raise ConfigError(
            f"generator: {name} reports log-probs of before the temperature (at {_TEMPERATURE:.0f} they differ by "
            f"{sampled:.3f}); start an SGLang server without SGLANG_RETURN_ORIGINAL_LOGPROB, vLLM's with "
            f"--logprobs-mode processed_logprobs"
        )


def _spread(logprobs: Float32Array) -> float:
    return float(np.ptp(logprobs)) if len(logprobs) else 0.0

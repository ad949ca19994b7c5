"""Refuses an engine whose log-probs are not those of the distribution that it samples from."""

import time
import uuid

from driftgym.agents.generators.base import Generator
from driftgym.errors import ConfigError
from driftgym.types import SamplingParams

_TEMPERATURE = 1000.0
_NUM_TOKENS = 8
_MAX_SPREAD = 0.3  # logits within ±100 differ by at most 0.2 at that temperature


async def check_logprobs(generator: Generator, *, name: str, token_id: int, timeout_s: float) -> None:
    """Samples a few tokens at a temperature so high that all are about as likely: their log-probs must then agree.

    An engine that reports log-probs of before the temperature reports those of the model, which differ by whole
    nats; trained on, every ratio would be wrong.

    Args:
        generator: asked once.
        name: of the engine, for the message.
        token_id: any that the model knows; the prompt.
        timeout_s: for the answer.

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
    spread = float(completion.logprobs.max() - completion.logprobs.min())
    if spread > _MAX_SPREAD:
        raise ConfigError(
            f"generator: {name} reports log-probs of before the temperature (at {_TEMPERATURE:.0f} they differ by "
            f"{spread:.2f}); start an SGLang server without SGLANG_RETURN_ORIGINAL_LOGPROB"
        )

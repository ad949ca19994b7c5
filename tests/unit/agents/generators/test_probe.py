"""The check that an engine's log-probs are those of the distribution that it samples from."""

import pytest

from driftgym.agents.generators.probe import check_logprobs
from driftgym.agents.generators.scripted import ScriptedGenerator
from driftgym.agents.generators.sglang import SGLangGenerator
from driftgym.errors import ConfigError
from driftgym.types import Completion


class RawGenerator(ScriptedGenerator):
    """Reports the model's own log-probs, whatever temperature it sampled at."""

    async def generate(self, prompt_token_ids, sampling, **options):
        completion = await super().generate(prompt_token_ids, sampling, **options)
        return Completion(
            request_id=completion.request_id,
            token_ids=completion.token_ids,
            logprobs=[-0.5 * index for index in range(len(completion.token_ids))],
            policy_versions=completion.policy_versions,
            finish_reason=completion.finish_reason,
        )


async def test_log_probs_of_before_the_temperature_are_refused_in_one_line():
    with pytest.raises(ConfigError, match="SGLANG_RETURN_ORIGINAL_LOGPROB") as caught:
        await check_logprobs(RawGenerator(lambda request: range(8)), name="http://x", token_id=1, timeout_s=5)
    assert len(str(caught.value).splitlines()) == 1


async def test_an_engine_that_reports_what_it_samples_from_passes(model_of, engine_of, served):
    async with (
        served(engine_of(model_of("qwen3"))) as url,
        SGLangGenerator(url, incarnation=1, max_concurrency=1) as client,
    ):
        await check_logprobs(client, name=url, token_id=1, timeout_s=30)

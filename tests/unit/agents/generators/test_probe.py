"""The check that an engine's log-probs are those of the distribution that it samples from."""

import numpy as np
import pytest
from stub_engine import StubEngine, reply

from driftgym.agents.generators.base import Scores, WeightVersion
from driftgym.agents.generators.probe import check_logprobs
from driftgym.agents.generators.scripted import ScriptedGenerator
from driftgym.agents.generators.sglang import SGLangGenerator
from driftgym.errors import ConfigError
from driftgym.types import Completion

VERSION = WeightVersion(incarnation=0, policy_version=0)


class ModelGenerator(ScriptedGenerator):
    """A model whose log-probs lie `spread` apart; reports those of before the temperature where `is_raw`."""

    def __init__(self, *, spread, is_raw):
        super().__init__(lambda request: range(16))
        self.spread = spread
        self.is_raw = is_raw

    async def generate(self, prompt_token_ids, sampling, **options):
        completion = await super().generate(prompt_token_ids, sampling, **options)
        logprobs = self.logprobs(len(completion.token_ids))
        return Completion(
            request_id=completion.request_id,
            token_ids=completion.token_ids,
            logprobs=logprobs if self.is_raw else logprobs / sampling.temperature,
            policy_versions=completion.policy_versions,
            finish_reason=completion.finish_reason,
        )

    async def score(self, token_ids, *, num_given, deadline_s):
        return Scores(logprobs=self.logprobs(len(token_ids) - num_given), version=VERSION)

    def logprobs(self, count):
        return -5.0 - np.linspace(0.0, self.spread, count, dtype=np.float32)


@pytest.mark.parametrize("spread", [0.02, 1.0, 90.0])
async def test_log_probs_of_before_the_temperature_are_refused_in_one_line(spread):
    with pytest.raises(ConfigError, match="SGLANG_RETURN_ORIGINAL_LOGPROB") as caught:
        await check_logprobs(ModelGenerator(spread=spread, is_raw=True), name="http://x", token_id=1, timeout_s=5)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("spread", [0.0, 0.02, 1.0, 90.0])
async def test_log_probs_of_after_the_temperature_pass(spread):
    assert await check_logprobs(ModelGenerator(spread=spread, is_raw=False), name="http://x", token_id=1, timeout_s=5)


async def test_of_an_engine_that_does_not_score_nobody_can_tell():
    engine = StubEngine()
    engine.answer = reply([5, 6, 7])
    async with engine.client() as client:
        assert not await check_logprobs(client, name="http://x", token_id=1, timeout_s=5)


async def test_a_model_that_finds_all_tokens_as_likely_passes():
    await check_logprobs(ModelGenerator(spread=0.0, is_raw=True), name="http://x", token_id=1, timeout_s=5)


async def test_an_engine_that_reports_what_it_samples_from_passes(model_of, engine_of, served):
    async with (
        served(engine_of(model_of("qwen3"))) as url,
        SGLangGenerator(url, incarnation=1, max_concurrency=1) as client,
    ):
        await check_logprobs(client, name=url, token_id=1, timeout_s=30)

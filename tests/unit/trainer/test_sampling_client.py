"""Sampling and scoring beside any episode, over a scripted engine and over a pool of them."""

import asyncio
from collections.abc import Sequence

import pytest

from driftgym.agents.generators.pool import GeneratorPool
from driftgym.agents.generators.scripted import ScriptedGenerator, ScriptedRequest
from driftgym.agents.rendering import make_renderer
from driftgym.config import Limits
from driftgym.errors import GeneratorError
from driftgym.trainer.sampling_client import SamplingClient
from driftgym.types import Message, SamplingParams

MODEL = "configs/models/tiny-qwen3"


class Engine:
    """A scripted engine that notes what it is asked, and answers with ten tokens."""

    def __init__(self, **options: float) -> None:
        self.requests: list[ScriptedRequest] = []
        self.generator = ScriptedGenerator(self._answer, **options)

    def _answer(self, request: ScriptedRequest) -> Sequence[int]:
        self.requests.append(request)
        return [30 + len(self.requests)] * 10


async def test_completions_of_one_prompt_share_a_session_and_draw_apart() -> None:
    engine = Engine()
    answers = await SamplingClient(engine.generator).sample([1, 2], SamplingParams(max_tokens=3, seed=5), n=3)
    assert [answer.token_ids.tolist() for answer in answers] == [[31] * 3, [32] * 3, [33] * 3]
    assert [answer.policy_versions.tolist() for answer in answers] == [[0] * 3] * 3
    assert [list(request.prompt_token_ids) for request in engine.requests] == [[1, 2]] * 3
    assert [request.sampling.seed for request in engine.requests] == [5, 6, 7]
    assert len({request.session_id for request in engine.requests}) == 1
    assert len({request.request_id for request in engine.requests}) == 3


async def test_without_a_seed_each_completion_takes_the_engines_own_draws() -> None:
    engine = Engine()
    await SamplingClient(engine.generator).sample([1], n=2)
    assert [request.sampling.seed for request in engine.requests] == [None, None]


async def test_messages_are_rendered_and_end_where_a_turn_does(request: pytest.FixtureRequest) -> None:
    renderer = make_renderer("compact", request.config.rootpath / MODEL)
    engine = Engine()
    messages = [Message(role="user", content="hi")]
    client = SamplingClient(engine.generator, renderer=renderer)
    await client.sample(messages, SamplingParams(max_tokens=2))
    await client.sample(messages, SamplingParams(max_tokens=2, stop_token_ids=(9,)))
    first, second = engine.requests
    assert list(first.prompt_token_ids) == renderer.first_prompt(messages, ())
    assert first.sampling.stop_token_ids == renderer.stop_token_ids
    assert second.sampling.stop_token_ids == (9,)


async def test_scores_are_of_what_was_not_given() -> None:
    scores = await SamplingClient(Engine().generator).score([1, 2, 3, 4], num_given=2)
    assert scores.logprobs.shape == (2,)
    assert scores.version.policy_version == 0


async def test_a_pool_is_a_generator_too() -> None:
    pool = GeneratorPool([Engine().generator, Engine().generator], policy_version=0, chunk_tokens=2)
    client = SamplingClient(pool)
    sampled, scored = client.sample([1], SamplingParams(max_tokens=6), n=2), client.score([1, 2])
    assert [len(answer.token_ids) for answer in await sampled] == [6, 6]
    assert len((await scored).logprobs) == 1
    await pool.close()


async def test_calls_begin_at_once_and_one_that_is_cancelled_ends_its_requests() -> None:
    engine = Engine(token_latency_s=0.005)
    client = SamplingClient(engine.generator)
    given_up, kept = client.sample([1], SamplingParams(max_tokens=10), n=3), client.sample([1])
    await asyncio.sleep(0.01)
    assert engine.generator.num_running == 4
    given_up.cancel()
    assert len((await kept)[0].token_ids) == 10
    assert engine.generator.num_running == 0


async def test_wrong_calls_and_late_answers_are_errors_of_their_futures() -> None:
    slow = SamplingClient(Engine(token_latency_s=1.0).generator, limits=Limits(generation_s=0.05))
    with pytest.raises(GeneratorError, match="deadline"):
        await slow.sample([1], n=2)
    client = SamplingClient(Engine().generator)
    with pytest.raises(ValueError, match="goes with a renderer"):
        await client.sample([Message(role="user", content="hi")])
    with pytest.raises(ValueError, match="n must be at least 1"):
        await client.sample([1], n=0)
    with pytest.raises(ValueError, match="nothing to score"):
        await client.score([1], num_given=1)

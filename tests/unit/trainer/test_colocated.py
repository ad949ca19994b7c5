"""A learner and an engine on one copy of the weights: they take turns, and every token says which weights wrote it."""

import asyncio
import dataclasses
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from driftgym.agents.generators.launch import GeneratorConfig
from driftgym.agents.generators.sglang import SGLangGenerator
from driftgym.agents.generators.turns import TurnTakingPool
from driftgym.config import Limits
from driftgym.errors import ConfigError, GeneratorError, NotDoneError, TrainingError
from driftgym.trainer.colocated import ColocatedProcess
from driftgym.trainer.colocated_client import ColocatedTrainingClient, while_it_lives
from driftgym.trainer.learner_config import LearnerSpec
from driftgym.trainer.models import LoraConfig
from driftgym.types import Completion, SamplingParams, Segment, Task, WeightUpdate

_GENERATOR = GeneratorConfig(max_batch_size=8, max_context_tokens=128)
_PROMPT = [5, 9, 13, 7, 21, 5, 30, 8]


class Colocated:
    """The process' calls, made in this one, and a client of its engine."""

    def __init__(self, spec: LearnerSpec) -> None:
        self.process = ColocatedProcess()
        self._methods = self.process.methods()
        self._methods["start"](spec)
        self.client = SGLangGenerator(self._methods["serve"](_GENERATOR), incarnation=1, max_concurrency=16)

    async def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """One call, beside this loop as it would be in another process."""
        return await asyncio.to_thread(self._methods[name], *args, **kwargs)

    async def take(self, update: WeightUpdate) -> None:
        """Gives the engine a publication, as a pool does."""
        await self.client.update_weights(update, mode="in_flight", timeout_s=10)

    async def ask(self, *, seed: int = 1, max_tokens: int = 24) -> Completion:
        """One answer."""
        return await self.client.generate(
            _PROMPT,
            SamplingParams(max_tokens=max_tokens, seed=seed),
            request_id=f"r{seed}-{time.monotonic_ns()}",
            session_id="s",
            deadline_s=time.monotonic() + 30,
        )


@pytest.fixture
async def colocated(learner_spec: Callable[..., LearnerSpec]) -> AsyncIterator[Callable[..., Colocated]]:
    """Makes one; options are those of the specification."""
    made: list[Colocated] = []

    def make(*, lora: LoraConfig | None = None, **config: Any) -> Colocated:
        spec = learner_spec(**config)
        spec = dataclasses.replace(spec, model=spec.model.model_copy(update={"lora": lora}))
        made.append(Colocated(spec))
        return made[-1]

    yield make
    for each in made:
        await each.client.close()
        await asyncio.to_thread(each.process.close)


def segment_of(completion: Completion, *, advantage: float = 1.0) -> Segment:
    """The row that trains it."""
    num_tokens = len(completion.token_ids)
    mask = np.repeat([False, True], [len(_PROMPT), num_tokens])
    return Segment(
        trajectory_id=completion.request_id,
        segment_index=0,
        token_ids=np.array([*_PROMPT, *completion.token_ids.tolist()]),
        loss_mask=mask,
        behaviour_logprobs=np.concatenate([np.zeros(len(_PROMPT)), completion.logprobs]),
        policy_versions=np.concatenate([np.full(len(_PROMPT), -1), completion.policy_versions]),
        advantages=np.where(mask, advantage, 0.0),
    )


async def test_there_is_one_copy_of_the_weights(colocated: Callable[..., Colocated]) -> None:
    both = colocated()
    learner, engine = both.process._process.learner, both.process._engine
    assert learner is not None
    assert engine is not None
    trained = {name: parameter.data_ptr() for name, parameter in learner.parameters.items()}
    runner = engine._engine._runner
    assert runner.is_lean
    assert {name: parameter.data_ptr() for name, parameter in runner.model.named_parameters()} == trained
    await both.call("forward_backward", [segment_of(await both.ask())], is_followed=True)
    await both.call("optim_step")
    assert {name: parameter.data_ptr() for name, parameter in runner.model.named_parameters()} == trained


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4, alpha=32.0)], ids=["full", "lora"])
async def test_what_is_generated_after_a_step_is_of_the_weights_that_it_made(
    colocated: Callable[..., Colocated], lora: LoraConfig | None, tmp_path: Path
) -> None:
    """The learner computes the same log-probs at each version: no KV of older weights is left, adapters are applied."""
    both = colocated(lora=lora, objective={"name": "reinforce"})
    logprobs = []
    for version in range(3):
        answers = [await both.ask(seed=seed) for seed in range(4)]
        assert {v for answer in answers for v in answer.policy_versions.tolist()} == {version}
        assert not any(answer.kv_min_policy_version for answer in answers)
        logprobs.append(answers[0].logprobs[0])
        segments = [segment_of(answer, advantage=(-1.0) ** index) for index, answer in enumerate(answers)]
        await both.call("forward_backward", segments, is_followed=True)
        report = await both.call("optim_step")
        assert report.num_lag0_tokens == sum(len(answer.token_ids) for answer in answers)
        assert report.lag0_ratio_sum / report.num_lag0_tokens == pytest.approx(1.0, abs=1e-4)
        assert report.metrics["ratio_max"] == pytest.approx(1.0, abs=1e-3)
        update = await both.call("publish", tmp_path)
        assert (update.policy_version, update.transport, update.checksum) == (version + 1, "tensor", "")
        await both.take(update)
    assert len(set(logprobs)) == 3
    assert os.listdir(tmp_path) == [], "nothing was written"
    last = await both.call("publish", tmp_path, is_last=True)
    assert (Path(last.location) / "model.safetensors").is_file()


async def test_requests_wait_during_a_turn_and_until_the_new_weights_have_their_name(
    colocated: Callable[..., Colocated], tmp_path: Path
) -> None:
    both = colocated()
    running = asyncio.create_task(both.ask(max_tokens=100))
    while not (await both.client.health()).num_running:  # noqa: ASYNC110  # the engine's side has no event for us
        await asyncio.sleep(0.002)
    rows = [segment_of(await both.ask(seed=2))]
    await both.call("forward_backward", rows, is_followed=True)
    assert (await running).policy_versions.tolist() == [0] * len((await running).token_ids), "it was drained"
    waiting = asyncio.create_task(both.ask(seed=3))
    while not (await both.client.health()).num_queued:  # noqa: ASYNC110  # HTTP is answered within the turn
        await asyncio.sleep(0.002)
    health = await both.client.health()
    assert (health.num_running, str(health.version)) == (0, "1:0")
    await both.call("optim_step")
    await asyncio.sleep(0.05)
    health = await both.client.health()
    assert (health.num_running, health.num_queued, str(health.version)) == (0, 1, "1:0")
    assert not waiting.done()
    await both.take(await both.call("publish", tmp_path))
    assert set((await waiting).policy_versions.tolist()) == {1}


async def test_a_pass_alone_gives_the_turn_back_with_the_weights_as_they_were(
    colocated: Callable[..., Colocated],
) -> None:
    both = colocated()
    answer = await both.ask()
    await both.call("forward_backward", [segment_of(answer)])
    again = await both.ask()
    assert again.logprobs.tolist() == pytest.approx(answer.logprobs.tolist(), abs=1e-5)
    assert set(again.policy_versions.tolist()) == {0}


async def test_a_step_that_fails_gives_the_turn_back_with_the_weights_as_they_were(
    colocated: Callable[..., Colocated],
) -> None:
    both = colocated()
    answer = await both.ask()
    bad = segment_of(answer)
    bad = dataclasses.replace(bad, advantages=np.full_like(bad.advantages, math.nan))
    with pytest.raises(TrainingError, match="not finite"):
        await both.call("forward_backward", [bad], is_followed=True)
    with pytest.raises(NotDoneError):
        await both.call("optim_step")
    again = await both.ask()
    assert again.logprobs.tolist() == pytest.approx(answer.logprobs.tolist(), abs=1e-5)
    assert set(again.policy_versions.tolist()) == {0}


async def test_a_checkpoint_that_is_loaded_is_what_generates(
    colocated: Callable[..., Colocated], tmp_path: Path
) -> None:
    """Also where it is of the version that the engine has: no KV of the weights before is used."""
    one, other = colocated(), colocated(optimizer={"learning_rate": 0.1})
    segments = [segment_of(await other.ask())]
    for each in (one, other):
        await each.call("forward_backward", segments, is_followed=True)
        await each.call("optim_step")
        await each.take(await each.call("publish", tmp_path))
    expected, before = await other.ask(), await one.ask()
    await other.call("save", tmp_path / "1")
    await one.call("load", tmp_path / "1", policy_version=1)
    found = await one.ask()
    assert found.token_ids.tolist() == expected.token_ids.tolist() != before.token_ids.tolist()
    assert found.logprobs.tolist() == pytest.approx(expected.logprobs.tolist(), abs=1e-4)


async def test_weights_from_elsewhere_are_refused(colocated: Callable[..., Colocated], tmp_path: Path) -> None:
    both = colocated()
    answer = await both.ask()
    await both.call("forward_backward", [segment_of(answer)], is_followed=True)
    await both.call("optim_step")
    update = await both.call("publish", tmp_path)
    from_disk = WeightUpdate(policy_version=1, incarnation=1, location=str(tmp_path), checksum="sha256:0")
    with pytest.raises(GeneratorError, match="trained in this process"):
        await both.take(from_disk)
    with pytest.raises(GeneratorError, match="the memory holds 1:1"):
        await both.take(dataclasses.replace(update, policy_version=2))
    await both.take(update)
    assert set((await both.ask()).policy_versions.tolist()) == {1}


async def test_what_would_change_the_weights_without_a_version_is_refused(
    colocated: Callable[..., Colocated],
) -> None:
    both = colocated()
    with pytest.raises(TrainingError, match="warm_up comes before serve"):
        await both.call("warm_up", [segment_of(await both.ask())])
    with pytest.raises(TrainingError, match="served already"):
        await both.call("serve", _GENERATOR)


def test_a_model_that_cannot_be_served_is_one_clear_line(learner_spec: Callable[..., LearnerSpec]) -> None:
    methods = ColocatedProcess().methods()
    with pytest.raises(TrainingError, match="before start"):
        methods["forward_backward"]([])
    methods["start"](learner_spec())
    with pytest.raises(ConfigError, match="the model takes at most 256"):
        methods["serve"](_GENERATOR.model_copy(update={"max_context_tokens": 512}))


@pytest.mark.slow
async def test_a_process_of_its_own_takes_steps_in_one_turn_and_its_death_ends_what_is_played(
    learner_spec: Callable[..., LearnerSpec], tmp_path: Path
) -> None:
    client = await ColocatedTrainingClient.start(learner_spec(), limits=Limits(learner_s=60.0, close_s=5.0))
    first = await client.publish(tmp_path / "weights")
    assert first.transport == "disk"
    url = await client.serve(_GENERATOR)
    engine = SGLangGenerator(url, incarnation=1, max_concurrency=16)
    pool = TurnTakingPool([engine], policy_version=0, came_with=first, max_concurrency=8)
    client.takes_turns_with(pool)
    options = {"session_id": "s", "deadline_s": time.monotonic() + 60}
    asks = [
        asyncio.create_task(pool.generate(_PROMPT, SamplingParams(max_tokens=40), request_id=f"r{i}", **options))
        for i in range(4)
    ]
    answers = await asyncio.gather(*asks)
    os.kill(client.pid, signal.SIGSTOP)
    passed, stepped = client.forward_backward([segment_of(answer) for answer in answers]), client.optim_step()
    published = client.publish(tmp_path / "weights")
    await asyncio.sleep(0.1)
    soon = {"session_id": "s", "deadline_s": time.monotonic() + 2.0}
    late = asyncio.create_task(pool.generate(_PROMPT, SamplingParams(max_tokens=4), request_id="late", **soon))
    await asyncio.sleep(3.0)
    assert not late.done(), "its clock stands still while the learner has its turn"
    os.kill(client.pid, signal.SIGCONT)
    await passed
    assert (await stepped).policy_version == 1
    await pool.update_weights(await published, mode="drain", timeout_s=10)
    assert set((await late).policy_versions.tolist()) == {1}
    again = await pool.generate(_PROMPT, SamplingParams(max_tokens=4), request_id="again", **options)
    assert set(again.policy_versions.tolist()) == {1}

    async def play(task: Task, *, group_id: str, min_policy_version: int) -> Any:
        await asyncio.sleep(60)

    playing = asyncio.create_task(
        while_it_lives(play, client)(Task(task_id="t", env_id="e", seed=0), group_id="g", min_policy_version=0)
    )
    await asyncio.sleep(0.05)
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(TrainingError, match="the learner is gone, and with it the engine"):
        await playing
    with pytest.raises(TrainingError, match="the learner is gone"):
        await client.optim_step()
    await pool.close()
    await client.close()

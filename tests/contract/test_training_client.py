"""What every TrainingClient keeps: the learner in its process, and its scripted twin."""

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from driftgym.config import Limits
from driftgym.errors import NotDoneError, TrainingError
from driftgym.trainer.scripted import ScriptedTrainingClient
from driftgym.trainer.training_client import (
    BatchShape,
    LearnerConfig,
    LearnerSpec,
    ModelConfig,
    ObjectiveConfig,
    ProcessTrainingClient,
    TrainingClient,
    WarmupConfig,
    train_step,
)
from driftgym.types import Segment

MODEL = Path(__file__).resolve().parents[2] / "configs" / "models" / "tiny-qwen3"
PROCESS = pytest.param("process", marks=pytest.mark.slow)


def spec() -> LearnerSpec:
    return LearnerSpec(
        model=ModelConfig(path=str(MODEL), init="random"),
        model_folder=MODEL,
        config=LearnerConfig(),
        warmup=WarmupConfig(),
        seed=0,
        temperature=1.0,
        incarnation=3,
    )


def segment(number: int, *, advantage: float = 1.0, version: int = 0) -> Segment:
    """Two prompt tokens and three sampled ones."""
    mask = np.arange(5) >= 2
    return Segment(
        trajectory_id=f"t{number}",
        segment_index=0,
        token_ids=np.arange(5) + 10 + number,
        loss_mask=mask,
        behaviour_logprobs=np.where(mask, -6.0, 0.0),
        policy_versions=np.where(mask, version, -1),
        advantages=np.where(mask, advantage, 0.0),
    )


SEGMENTS = [segment(number, advantage=(-1.0) ** number) for number in range(4)]
BAD = segment(7, advantage=math.nan)


@pytest_asyncio.fixture(params=["scripted", PROCESS])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[TrainingClient]:
    """Each client, at version 0."""
    opened: TrainingClient
    if request.param == "scripted":
        opened = ScriptedTrainingClient(incarnation=3)
    else:
        opened = await ProcessTrainingClient.start(spec(), limits=Limits(learner_s=60.0, close_s=5.0))
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(opened.close)
        yield opened


async def test_what_was_submitted_runs_in_that_order(client: TrainingClient, tmp_path: Path) -> None:
    """Two steps, the first of two passes, with publications and a checkpoint in between; nothing is waited for."""
    shape = BatchShape.of(SEGMENTS)
    done: list[str] = []

    def noted(name: str, future: asyncio.Future) -> asyncio.Future:
        future.add_done_callback(lambda _: done.append(name))
        return future

    begin = noted("begin", client.publish(tmp_path / "weights"))
    one = noted("one", client.forward_backward(SEGMENTS[:1], batch=shape))
    two = noted("two", client.forward_backward(SEGMENTS[1:], batch=shape))
    first = noted("first", client.optim_step())
    weights = noted("weights", client.publish(tmp_path / "weights"))
    saved = noted("saved", client.save(tmp_path / "1"))
    again = noted("again", client.forward_backward(SEGMENTS, objective=ObjectiveConfig(name="reinforce")))
    second = noted("second", client.optim_step())
    loaded = noted("loaded", client.load(tmp_path / "1", policy_version=1))
    last = noted("last", client.publish(tmp_path / "weights", is_last=True))
    assert done == []
    final = await last
    assert done == ["begin", "one", "two", "first", "weights", "saved", "again", "second", "loaded", "last"]
    assert (begin.result().policy_version, weights.result().policy_version, final.policy_version) == (0, 1, 1)
    assert {begin.result().incarnation, final.incarnation} == {3}
    assert (one.result().num_lag0_tokens, two.result().num_lag0_tokens) == (3, 9)
    assert first.result().num_lag0_tokens == 12
    assert again.result().num_lag0_tokens == second.result().num_lag0_tokens == 0
    assert (first.result().policy_version, second.result().policy_version) == (1, 2)
    assert saved.result() is loaded.result() is None
    assert (Path(final.location) / "config.json").is_file()
    assert "loss" in first.result().metrics


@pytest.mark.parametrize("bad_first", [True, False])
async def test_a_failed_pass_fails_its_step_whole_and_no_other(
    client: TrainingClient, tmp_path: Path, bad_first: bool
) -> None:
    first, second = (
        client.forward_backward([BAD] if is_bad else SEGMENTS)
        for is_bad in ((True, False) if bad_first else (False, True))
    )
    dropped = client.optim_step()
    published = client.publish(tmp_path)
    good, taken = client.forward_backward(SEGMENTS), client.optim_step()
    with pytest.raises(TrainingError, match=r"not finite.*Trajectories: t7$") as caught:
        await (first if bad_first else second)
    assert not isinstance(caught.value, NotDoneError)
    if bad_first:
        with pytest.raises(NotDoneError, match=r"^forward_backward was not done.*not finite.*t7$"):
            await second
    else:
        assert (await first).num_lag0_tokens == 12
    with pytest.raises(NotDoneError, match=r"^optim_step was not done.*not finite.*t7$"):
        await dropped
    assert (await published).policy_version == 0, "the weights are as before"
    assert (await good).num_lag0_tokens == 12
    report = await taken
    assert (report.policy_version, report.num_lag0_tokens) == (1, 12)


async def test_a_part_that_is_of_another_batch_is_refused(client: TrainingClient) -> None:
    passed, step = client.forward_backward(SEGMENTS, batch=BatchShape.of(SEGMENTS[:2])), client.optim_step()
    with pytest.raises(TrainingError, match="no part of the batch"):
        await passed
    with pytest.raises(NotDoneError, match="no part of the batch"):
        await step


async def test_a_step_is_forward_backward_and_optim_step(client: TrainingClient) -> None:
    assert (await train_step(client, SEGMENTS)).policy_version == 1
    assert (await train_step(client, [])).policy_version == 2, "a step, though it changes nothing"
    assert (await client.optim_step()).policy_version == 3
    with pytest.raises(TrainingError, match=r"not finite.*t7$"):
        await train_step(client, [BAD])
    old = [dataclasses.replace(each, policy_versions=np.where(each.loss_mask, 3, -1)) for each in SEGMENTS]
    assert (await train_step(client, old)).num_lag0_tokens == 12


async def test_a_checkpoint_is_of_one_version_and_load_begins_a_step_anew(
    client: TrainingClient, tmp_path: Path
) -> None:
    await client.save(tmp_path / "0")
    with pytest.raises(TrainingError, match="0, not 7"):
        await client.load(tmp_path / "0", policy_version=7)
    await train_step(client, SEGMENTS)
    client.forward_backward([BAD])
    client.load(tmp_path / "0", policy_version=0)
    assert (await client.optim_step()).policy_version == 1


async def test_what_cannot_be_written_is_said_and_costs_no_step(client: TrainingClient, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    await train_step(client, SEGMENTS)
    with pytest.raises(TrainingError, match="taken"):
        await client.publish(tmp_path / "taken")
    with pytest.raises(TrainingError, match="taken"):
        await client.save(tmp_path / "taken" / "1")
    assert (await client.publish(tmp_path / "free")).policy_version == 1
    assert (await train_step(client, SEGMENTS)).policy_version == 2


async def test_after_a_close_nothing_is_done(client: TrainingClient) -> None:
    await client.close()
    calls: list[Callable[[], asyncio.Future]] = [lambda: client.forward_backward(SEGMENTS), client.optim_step]
    for call in calls:
        with pytest.raises(NotDoneError, match="closed"):
            await call()

"""The learner as a process: what it answers, and what becomes of a call when it dies."""

import asyncio
import contextlib
import dataclasses
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from driftgym.config import Limits, parse_config
from driftgym.errors import ConfigError, NotDoneError, TrainingError
from driftgym.trainer.learner import Learner
from driftgym.trainer.training_client import (
    LearnerConfig,
    ModelConfig,
    ProcessTrainingClient,
    WarmupConfig,
    train_step,
)

_LIMITS = Limits(learner_s=60.0, close_s=5.0)


@pytest.fixture
def segments(make_segment):
    return [make_segment(seed=index, advantage=(-1) ** index * 0.5) for index in range(4)]


def _children():
    """The ids of this process's children."""
    children = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # gone meanwhile
            number, _, rest = path.read_text().partition(" ")
            if int(rest.rpartition(")")[2].split()[1]) == os.getpid():
                children.add(int(number))
    return children


def _is_gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_a_run_of_calls(learner_spec, segments, tmp_path):
    spec = learner_spec(warmup=WarmupConfig(num_steps=2, batch_size=2))
    client = await ProcessTrainingClient.start(spec, limits=_LIMITS)
    assert (await client.warm_up(segments))["warmup_num_steps"] == 2.0
    first = await client.publish(tmp_path / "weights")
    report = await train_step(client, segments)
    assert report.policy_version == 1
    assert (await client.publish(tmp_path / "weights")).checksum != first.checksum
    await client.save(tmp_path / "1")
    with pytest.raises(TrainingError, match="not 7"):
        await client.load(tmp_path / "1", policy_version=7)
    await client.load(tmp_path / "1", policy_version=1)
    assert (await train_step(client, [])).policy_version == 2
    await client.close()
    assert _is_gone(client.pid)


@pytest.mark.slow
async def test_errors_of_a_step_leave_a_learner_that_goes_on(learner_spec, segments):
    client = await ProcessTrainingClient.start(learner_spec(), limits=_LIMITS)
    bad = dataclasses.replace(segments[0], advantages=np.full_like(segments[0].advantages, math.nan))
    with pytest.raises(TrainingError, match="t0"):
        await train_step(client, [bad, *segments[1:]])
    with pytest.raises(TrainingError, match="forward_backward failed"):
        await train_step(client, [None])
    there = await train_step(client, segments)
    await client.close()
    assert there.policy_version == 1
    here = Learner(learner_spec()).train_step(segments)
    assert there.metrics["loss"] == pytest.approx(here.metrics["loss"], rel=1e-5)
    assert there.metrics["grad_norm"] == pytest.approx(here.metrics["grad_norm"], rel=1e-4)


async def test_killed_in_the_middle_of_a_step(learner_spec, make_segment):
    client = await ProcessTrainingClient.start(learner_spec(micro_batch_tokens=1), limits=_LIMITS)
    step = asyncio.create_task(train_step(client, [make_segment(seed=index) for index in range(2000)]))
    await asyncio.sleep(0.5)
    assert not step.done()
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(TrainingError, match="the learner is gone"):
        await step
    with pytest.raises(NotDoneError, match=r"was not done: the learner is gone: learner \(pid \d+\) ended"):
        await train_step(client, [])
    await client.close()


@pytest.mark.slow
async def test_a_step_past_its_deadline_kills_the_learner(learner_spec, make_segment, tmp_path):
    client = await ProcessTrainingClient.start(learner_spec(micro_batch_tokens=1), limits=_LIMITS)
    hasty = ProcessTrainingClient(client._process, Limits(learner_s=0.3, close_s=5.0))
    with pytest.raises(TrainingError, match=r"limits\.learner_s = 0\.3"):
        await train_step(hasty, [make_segment(seed=index) for index in range(2000)])
    with pytest.raises(NotDoneError, match=r"publish was not done: the learner did not finish forward_backward"):
        await hasty.publish(tmp_path)
    await hasty.close()
    assert _is_gone(client.pid)


async def test_a_model_that_cannot_be_loaded_is_the_users_error_and_leaves_no_process(learner_spec, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no-such-family"}')
    spec = dataclasses.replace(learner_spec(), model_folder=tmp_path)
    before = _children()
    with pytest.raises(ConfigError, match="cannot load"):
        await ProcessTrainingClient.start(spec, limits=_LIMITS)
    assert _children() <= before


def test_the_clients_module_needs_no_torch():
    code = (
        "import sys, driftgym.trainer.training_client, driftgym.trainer.checkpoint; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"objective": {"name": "nonesuch"}}, "objective"),
        ({"objective": {"name": "ppo", "cap": 2.0}}, "objective"),
        ({"objective": {"name": "ppo", "dual_clip": 0.5}}, "dual_clip"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "betas"),
        ({"normalisation": "fixed"}, "fixed_num_tokens"),
        ({"fixed_num_tokens": 5}, "fixed_num_tokens"),
        ({"learning_rate": 1e-3}, "learning_rate"),
    ],
)
def test_a_wrong_configuration_is_refused_in_one_line(data, key):
    with pytest.raises(ConfigError, match=key) as caught:
        parse_config(LearnerConfig, data, source="run.yaml")
    assert "\n" not in str(caught.value)


def test_objectives_are_chosen_by_name():
    config = parse_config(LearnerConfig, {"objective": {"name": "ppo", "eps_high": 0.3}}, source="run.yaml")
    assert config.objective.name == "ppo"
    assert LearnerConfig.model_validate(config.model_dump(mode="json")) == config
    assert ModelConfig(path="m").init == "pretrained"

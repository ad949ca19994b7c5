"""Two processes train as one does: loss, gradients, figures, weights, checkpoints; and what becomes of lost ones."""

import asyncio
import contextlib
import dataclasses
import json
import os
import pickle
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from driftgym.config import Limits
from driftgym.errors import NotDoneError, TrainingError
from driftgym.trainer.batch_shape import BatchShape
from driftgym.trainer.learner import Learner
from driftgym.trainer.packing import pays
from driftgym.trainer.training_client import (
    LearnerConfig,
    LearnerSpec,
    ModelConfig,
    PassFigures,
    ProcessTrainingClient,
    StepReport,
    WarmupConfig,
    train_step,
)
from driftgym.types import Segment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

MODEL = Path(__file__).resolve().parents[3] / "configs" / "models" / "tiny-qwen3"
LIMITS = Limits(learner_s=120.0, close_s=5.0)
NUM_STEPS = 4
OF_THE_SPLIT = {"num_micro_batches", "padding_fraction", "learner_step_s"}

CASES: Mapping[str, Mapping[str, Any]] = {
    "robust": {},
    "token": {"objective": {"name": "cispo"}, "normalisation": "token"},
    "sequence": {"objective": {"name": "gspo", "eps_low": 0.5, "eps_high": 0.5}, "normalisation": "sequence"},
    "prompt": {"objective": {"name": "topr"}, "normalisation": "prompt"},
    "fixed": {"objective": {"name": "ppo"}, "normalisation": "fixed", "fixed_num_tokens": 16},
    "m2po": {"objective": {"name": "m2po"}, "normalisation": "prompt"},
    "opmd": {"objective": {"name": "opmd"}},
    "gepo": {"objective": {"name": "gepo"}, "normalisation": "sequence"},
    "tba": {"objective": {"name": "tba"}},
    "kl": {"objective": {"name": "dppo_tv"}, "kl": {"coef": 0.1}, "max_failure_drift": 0.1},
    "kl in reward": {"objective": {"name": "tis"}, "kl": {"coef": 0.1, "place": "reward", "estimator": "k1"}},
    "small micro-batches": {"micro_batch_tokens": 16},
    "one micro-batch": {"micro_batch_tokens": 10_000, "objective": {"name": "cispo"}},
}
"""Configurations of a learner; those whose names say no more train what `batches` gives, in micro-batches of 96."""


def segment(seed: int, *, group: str, advantage: float, rewritten: int = 0, version: int = 0) -> Segment:
    """A row that begins like the others of its group; `rewritten` rows of a trajectory come after its first."""
    prompt = np.random.default_rng(sum(group.encode())).integers(3, 512, 24)
    rng = np.random.default_rng(seed)
    ids = np.concatenate([prompt, rng.integers(3, 512, 6 + seed % 7)])
    mask = (np.arange(len(ids)) >= 24) & (np.arange(len(ids)) != 26)
    return Segment(
        trajectory_id=f"t{seed - rewritten}",
        group_id=group,
        segment_index=rewritten,
        token_ids=ids,
        loss_mask=mask,
        behaviour_logprobs=np.where(mask, rng.uniform(-6.6, -5.6, len(ids)), 0.0),
        policy_versions=np.where(mask, version, -1),
        advantages=np.where(mask, advantage, 0.0),
        reward=float(advantage > 0),
    )


def batches() -> list[list[Segment]]:
    """The rows of a few steps: groups of unlike sizes, one without an advantage, rows of which little is trained, a
    trajectory of two rows, and one alone."""
    made = []
    for step in range(NUM_STEPS):
        rows = [
            segment(100 * step + index, group=f"g{index // 4}", advantage=(-1) ** index * 0.5) for index in range(10)
        ]
        rows += [segment(100 * step + 20 + index, group="flat", advantage=0.0) for index in range(3)]
        rows.append(segment(100 * step + 9 + 1, group="g2", advantage=-0.5, rewritten=1))
        rows.append(segment(100 * step + 40, group="", advantage=0.3))
        few = rows[1].loss_mask & (np.arange(len(rows[1].loss_mask)) > 27)
        rows[1] = dataclasses.replace(rows[1], train_mask=few)
        rows[5] = dataclasses.replace(rows[5], train_mask=rows[5].loss_mask & False)
        made.append(rows)
    return made


def specification(num_processes: int, config: Mapping[str, Any], *, dtype: str = "float32") -> LearnerSpec:
    settings = {
        "micro_batch_tokens": 96,
        "optimizer": {"learning_rate": 3e-5, "max_grad_norm": 1e9},
        "num_processes": num_processes,
        **config,
    }
    return LearnerSpec(
        model=ModelConfig(path=str(MODEL), init="random", dtype=dtype),
        model_folder=MODEL,
        config=LearnerConfig.model_validate(settings),
        warmup=WarmupConfig(num_steps=2, batch_size=8),
        seed=3,
        temperature=0.9,
        incarnation=1,
    )


Call: TypeAlias = Callable[..., Awaitable[Any]]


def calls_of(learner: Learner) -> Call:
    """Calls a learner in this process as one in another is called."""

    async def call(method: str, *args: Any) -> Any:
        return getattr(learner, method)(*args)

    return call


async def trained(call: Call, folder: Path) -> list[StepReport]:
    """Some steps; `first` and `last` below `folder` are what was saved after them."""
    reports = []
    for step, rows in enumerate(batches()):
        await call("forward_backward", rows)
        reports.append(await call("optim_step"))
        if step == 0:
            await call("save", folder / "first")
    await call("save", folder / "last")
    return reports


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one case came to: with one process, and with two."""

    reports: tuple[list[StepReport], list[StepReport]]
    folders: tuple[Path, Path]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Outcome]:
    """Every case, on one pair of processes."""
    return asyncio.run(_outcomes(tmp_path_factory.mktemp("sharding")))


async def _outcomes(folder: Path) -> dict[str, Outcome]:
    client = await ProcessTrainingClient.start(specification(2, {}), limits=LIMITS)
    found = {}
    try:
        for name, config in CASES.items():
            folders = (folder / name / "one", folder / name / "two")
            one = await trained(calls_of(Learner(specification(1, config))), folders[0])
            await client._call("start", specification(2, config))
            found[name] = Outcome(reports=(one, await trained(client._call, folders[1])), folders=folders)
    finally:
        await client.close()
    return found


def moments(folder: Path) -> dict[int, dict[str, torch.Tensor]]:
    state: dict[int, dict[str, torch.Tensor]] = torch.load(folder / "optimizer.pt")["optimizer"]["state"]
    return state


def check_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * max(1e-3, float(expected.abs().max())))


def test_the_rows_are_packed_where_they_begin_alike() -> None:
    rows = batches()[0]
    shared = 24 * (len(rows) - len({row.group_id for row in rows}))
    num_read = sum(len(row.token_ids) for row in rows)
    assert pays(num_packed=num_read - shared, num_padded=num_read)


@pytest.mark.parametrize("name", CASES)
def test_figures_are_those_of_one_process(outcomes: Mapping[str, Outcome], name: str) -> None:
    for one, two in zip(*outcomes[name].reports, strict=True):
        assert (two.policy_version, two.num_lag0_tokens) == (one.policy_version, one.num_lag0_tokens)
        assert two.lag0_ratio_sum == pytest.approx(one.lag0_ratio_sum, rel=1e-5)
        assert two.metrics.keys() == one.metrics.keys()
        for key in one.metrics.keys() - OF_THE_SPLIT:
            assert two.metrics[key] == pytest.approx(one.metrics[key], rel=1e-5, abs=1e-5), key
    assert outcomes[name].reports[1][0].metrics["update_skipped"] == 0.0


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_process(outcomes: Mapping[str, Outcome], name: str) -> None:
    """After one unclipped step the first moment is a tenth of the gradient."""
    one, two = (moments(folder / "first") for folder in outcomes[name].folders)
    assert one.keys() == two.keys()
    for index, expected in one.items():
        assert bool(expected["exp_avg"].any())
        check_close(two[index]["exp_avg"] * 10.0, expected["exp_avg"] * 10.0)


@pytest.mark.parametrize("name", CASES)
def test_weights_after_some_steps_are_those_of_one_process(outcomes: Mapping[str, Outcome], name: str) -> None:
    one, two = (load_file(folder / "last" / "weights.safetensors") for folder in outcomes[name].folders)
    first = load_file(outcomes[name].folders[0] / "first" / "weights.safetensors")
    assert one.keys() == two.keys()
    assert not any("lm_head" in key for key in one)  # tied: there once
    for key, expected in one.items():
        assert float((two[key] - expected).abs().max()) <= 1e-5, key
        assert float((first[key] - expected).abs().max()) >= 5e-5, key


@pytest.mark.parametrize("name", CASES)
def test_files_of_a_checkpoint_are_those_of_one_process(outcomes: Mapping[str, Outcome], name: str) -> None:
    one, two = (folder / "last" for folder in outcomes[name].folders)
    assert {path.name for path in one.iterdir()} == {path.name for path in two.iterdir()}
    assert json.loads((one / "state.json").read_text()) == json.loads((two / "state.json").read_text())
    for expected, found in zip(moments(one).values(), moments(two).values(), strict=True):
        assert {key: (type(each), each.shape, each.dtype) for key, each in found.items()} == {
            key: (type(each), each.shape, each.dtype) for key, each in expected.items()
        }


@pytest.mark.parametrize("config", [{"micro_batch_tokens": 16}, {"objective": {"name": "opmd"}}])
async def test_batches_of_fewer_trajectories_than_processes(config: Mapping[str, Any]) -> None:
    """One row, one trajectory in two rows beside another, nothing that is trained: some have nothing to compute."""
    rows = batches()[0]
    masked = [dataclasses.replace(row, train_mask=row.loss_mask & False) for row in rows[:2]]
    alone = Learner(specification(1, config))
    client = await ProcessTrainingClient.start(specification(3, config), limits=LIMITS)
    try:
        for batch in (rows[:1], [rows[9], rows[13], rows[0]], masked, [*masked, rows[2]]):
            found, expected = await train_step(client, batch), alone.train_step(batch)
            for key in expected.metrics.keys() - OF_THE_SPLIT:
                assert found.metrics[key] == pytest.approx(expected.metrics[key], rel=1e-5, abs=1e-5), key
    finally:
        await client.close()


async def test_a_checkpoint_of_two_is_gone_on_with_by_one_and_the_other_way_round(tmp_path: Path) -> None:
    config = {"objective": {"name": "cispo"}, "kl": {"coef": 0.1}}
    steps = batches()
    straight = Learner(specification(1, config))
    straight.train_step(steps[0])
    straight.save(tmp_path / "by-one")
    client = await ProcessTrainingClient.start(specification(2, config), limits=LIMITS)
    try:
        await client.load(tmp_path / "by-one", policy_version=1)
        await train_step(client, steps[1])
        await client.save(tmp_path / "by-two")
        published = await client.publish(tmp_path / "weights")
    finally:
        await client.close()
    straight.train_step(steps[1])
    resumed = Learner(dataclasses.replace(specification(1, config), seed=99))
    resumed.load(tmp_path / "by-two", policy_version=2)
    for learner in (straight, resumed):
        assert load_file(f"{published.location}/model.safetensors").keys() == dict(learner.weights()).keys()
        for name, tensor in load_file(f"{published.location}/model.safetensors").items():
            torch.testing.assert_close(tensor, dict(learner.weights())[name], rtol=0.0, atol=1e-5)
        learner.train_step(steps[2])
        learner.save(tmp_path / f"last-{id(learner)}")
    for name, parameter in straight.parameters.items():
        torch.testing.assert_close(resumed.parameters[name], parameter, rtol=0.0, atol=1e-5)
    one, two = (moments(tmp_path / f"last-{id(learner)}") for learner in (straight, resumed))
    for index, expected in one.items():
        check_close(two[index]["exp_avg"], expected["exp_avg"])
        assert float(two[index]["step"]) == float(expected["step"]) == 3.0


async def test_a_batch_in_parts_the_warm_up_and_bfloat16(tmp_path: Path) -> None:
    """What else goes through all processes, beside one that does the same alone."""
    rows = batches()[0]
    shape, half = BatchShape.of(rows), 7
    client = await ProcessTrainingClient.start(specification(2, {}, dtype="bfloat16"), limits=LIMITS)
    alone = Learner(specification(1, {}, dtype="bfloat16"))
    try:
        there, here = await client.warm_up(rows), alone.warm_up(rows)
        for name in ("warmup_loss_first", "warmup_loss_last"):
            assert there[name] == pytest.approx(here[name], rel=1e-2)
        for part in (rows[:half], rows[half:]):
            passed: PassFigures = await client.forward_backward(part, batch=shape)
            assert passed.metrics["loss"] == pytest.approx(
                alone.forward_backward(part, batch=shape).metrics["loss"], rel=1e-2, abs=1e-3
            )
        there_step, here_step = await client.optim_step(), alone.optim_step()
        assert there_step.metrics["grad_norm"] == pytest.approx(here_step.metrics["grad_norm"], rel=3e-2)
        published = load_file(f"{(await client.publish(tmp_path)).location}/model.safetensors")
    finally:
        await client.close()
    assert {tensor.dtype for tensor in published.values()} == {tensor.dtype for _, tensor in alone.weights()}


async def test_a_step_that_fails_fails_everywhere_and_the_learner_goes_on(tmp_path: Path) -> None:
    rows = batches()[0]
    bad, large = (
        [
            dataclasses.replace(row, advantages=np.where(row.loss_mask, advantage, 0.0)) if index in (2, 7) else row
            for index, row in enumerate(rows)
        ]
        for advantage in (3e38, 1e30)
    )
    unknown = dataclasses.replace(rows[3], token_ids=np.full_like(rows[3].token_ids, 10_000))
    client = await ProcessTrainingClient.start(specification(2, {}), limits=LIMITS)
    try:
        before = await client.publish(tmp_path / "before")
        with pytest.raises(TrainingError, match=r"step 1: the loss is not finite.*Trajectories: t2, t7$"):
            await train_step(client, bad)
        with pytest.raises(TrainingError, match=r"step 1: a gradient is not finite.*Trajectories: t2, t7$"):
            await train_step(client, large)
        with pytest.raises(TrainingError, match="t3: token 10000 is unknown"):
            await train_step(client, [*rows[:3], unknown])
        (tmp_path / "a file").write_text("")
        with pytest.raises(TrainingError, match="publish failed"):
            await client.publish(tmp_path / "a file" / "weights")
        with pytest.raises(TrainingError, match="checkpoint"):
            await client.load(tmp_path / "nothing", policy_version=1)
        assert (await client.publish(tmp_path / "after")).checksum == before.checksum
        nothing = await train_step(client, [])
        assert (nothing.policy_version, nothing.metrics["update_skipped"]) == (1, 1.0)
        report = await train_step(client, rows)
    finally:
        await client.close()
    alone = Learner(specification(1, {}))
    alone.train_step([])
    assert report.metrics["loss"] == pytest.approx(alone.train_step(rows).metrics["loss"], rel=1e-5)


def processes_below(pid: int) -> list[int]:
    """The ids of the running processes that `pid` has started, directly or not."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # gone meanwhile
            number, _, rest = path.read_text().partition(" ")
            state, parent = rest.rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(number)] = int(parent)
    below = [pid]
    for parent in below:
        below += [child for child, started_by in parents.items() if started_by == parent]
    return below[1:]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def wait_until_gone(*pids: int) -> None:
    deadline = time.monotonic() + 20
    while left := [pid for pid in pids if not is_gone(pid)]:
        assert time.monotonic() < deadline, left
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def learner_of_two(limits: Limits) -> AsyncIterator[tuple[ProcessTrainingClient, int]]:
    """A client, and the id of its second process."""
    client = await ProcessTrainingClient.start(specification(2, {"micro_batch_tokens": 1}), limits=limits)
    try:
        (second,) = processes_below(client.pid)
        yield client, second
    finally:
        await client.close()
    await wait_until_gone(client.pid, second)


@pytest.mark.parametrize("in_a_step", [False, True])
async def test_a_killed_second_process_ends_the_learner_and_is_named(in_a_step: bool) -> None:
    async with learner_of_two(LIMITS) as (client, second):
        step = asyncio.create_task(train_step(client, batches()[0] * 100)) if in_a_step else None
        await asyncio.sleep(1.0)
        assert step is None or not step.done()
        os.kill(second, signal.SIGKILL)
        with pytest.raises(TrainingError, match=rf"the learner is gone: process 1 .*\(pid {second}\) was killed"):
            await (step or train_step(client, batches()[0]))
        with pytest.raises(NotDoneError, match="was not done: the learner is gone: process 1"):
            await train_step(client, [])


async def test_a_killed_first_process_leaves_no_other() -> None:
    async with learner_of_two(LIMITS) as (client, second):
        step = asyncio.create_task(train_step(client, batches()[0] * 100))
        await asyncio.sleep(0.5)
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(TrainingError, match="the learner is gone: learner"):
            await step
        await wait_until_gone(second)


async def test_a_second_process_that_hangs_ends_the_learner_at_the_deadline() -> None:
    async with learner_of_two(Limits(learner_s=60.0, close_s=5.0)) as (client, second):
        hasty = ProcessTrainingClient(client._process, Limits(learner_s=1.5, close_s=5.0))
        os.kill(second, signal.SIGSTOP)
        with pytest.raises(TrainingError, match=r"did not finish forward_backward within limits\.learner_s = 1\.5"):
            await train_step(hasty, batches()[0])
        await wait_until_gone(second)


PARENT = """
import asyncio, dataclasses, pathlib, pickle, sys
from driftgym.config import Limits
from driftgym.trainer.training_client import ProcessTrainingClient

async def main():
    spec = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())
    client = await ProcessTrainingClient.start(spec, limits=Limits())
    print(client.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_both_processes_end_with_their_killed_parent(tmp_path: Path) -> None:
    (tmp_path / "spec").write_bytes(pickle.dumps(specification(2, {})))
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", PARENT, str(tmp_path / "spec")), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    first = int(await parent.stdout.readline())
    (second,) = processes_below(first)
    parent.kill()
    await parent.wait()
    await wait_until_gone(first, second)

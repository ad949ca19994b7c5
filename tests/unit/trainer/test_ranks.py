"""How rows are shared between processes, how calls are carried to all of them, and what is refused."""

import dataclasses
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from driftgym.errors import ConfigError, DriftgymError, NotDoneError, TrainingError
from driftgym.processes import ChildDiedError
from driftgym.trainer.batching import Row, TokenScorer, micro_batch, score_tokens
from driftgym.trainer.model_loading import load_model
from driftgym.trainer.models import LoraConfig, ModelConfig
from driftgym.trainer.rank_processes import RankProcesses
from driftgym.trainer.ranks import shares
from driftgym.trainer.run_config import RunConfig, load_run_config
from driftgym.trainer.training_client import LearnerSpec
from driftgym.types import Segment

QUICKSTART = Path(__file__).resolve().parents[3] / "configs" / "quickstart.yaml"


def row(number: int, *, num_tokens: int, trajectory: int, group: int | None) -> Row:
    mask = [False] + [True] * num_tokens
    segment = Segment(
        trajectory_id=f"g{group}-{trajectory}",
        group_id="" if group is None else f"g{group}",
        segment_index=number,
        token_ids=[5] * len(mask),
        loss_mask=mask,
        behaviour_logprobs=[0.0] * len(mask),
        policy_versions=[0 if sampled else -1 for sampled in mask],
        advantages=[0.0] * len(mask),
    )
    return Row(segment=segment, token_weight=1.0)


DRAWN = st.tuples(st.integers(0, 30), st.integers(0, 3), st.one_of(st.none(), st.integers(0, 3)))


@given(drawn=st.lists(DRAWN, max_size=20), num=st.integers(1, 4))
def test_each_row_is_in_one_share_and_trajectories_stay_whole(
    drawn: list[tuple[int, int, int | None]], num: int
) -> None:
    rows = [
        row(number, num_tokens=num_tokens, trajectory=trajectory, group=group)
        for number, (num_tokens, trajectory, group) in enumerate(drawn)
    ]
    dealt = shares(rows, num=num)
    assert len(dealt) == num
    assert sorted(each.segment.segment_index for share in dealt for each in share) == list(range(len(rows)))
    owners: dict[str, set[int]] = {}
    for owner, share in enumerate(dealt):
        indices = [each.segment.segment_index for each in share]
        assert indices == sorted(indices)
        for each in share:
            owners.setdefault(each.segment.trajectory_id, set()).add(owner)
    assert all(len(of_one) == 1 for of_one in owners.values())


def test_groups_stay_together_where_they_are_no_more_than_an_even_share() -> None:
    rows = [row(index, num_tokens=10, trajectory=index, group=index // 4) for index in range(16)]
    for share in shares(rows, num=2):
        assert sorted(Counter(each.segment.group_id for each in share).values()) == [4, 4]
    one_group = [row(index, num_tokens=10, trajectory=index, group=0) for index in range(8)]
    assert [len(share) for share in shares(one_group, num=2)] == [4, 4]


def test_a_pass_over_nothing_gives_gradients_of_zero(learner_spec: Callable[..., LearnerSpec]) -> None:
    spec = learner_spec()
    device = torch.device("cpu")
    model = load_model(spec.model, spec.model_folder, seed=0, device=device)
    nothing = micro_batch([], policy_version=3, device=device)
    for scored in (model, TokenScorer(model)):
        model.zero_grad()
        scores = score_tokens(scored, nothing, temperature=0.7)
        assert scores.logprobs.shape == scores.entropies.shape == (0,)
        scores.logprobs.sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        assert all(gradient is not None and not bool(gradient.any()) for gradient in gradients)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["model.lora={}"], "trained by one process: set it from 2 to 1"),
        (["trainer.placement=colocated", "trainer.publish_every_steps=1"], "one process: set learner.num_processes"),
        (["learner.num_processes=0"], "learner.num_processes"),
    ],
)
def test_what_several_processes_cannot_do_is_refused(overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        load_run_config(QUICKSTART, ["learner.num_processes=2", *overrides])
    assert "\n" not in str(caught.value)
    assert isinstance(load_run_config(QUICKSTART, ["learner.num_processes=2"]), RunConfig)


def test_a_learner_of_several_processes_with_adapters_is_refused(learner_spec: Callable[..., LearnerSpec]) -> None:
    spec = learner_spec(num_processes=2)
    with pytest.raises(ValueError, match="trained by one process"):
        dataclasses.replace(spec, model=ModelConfig(path="m", init="random", lora=LoraConfig()))


FOLLOWER = """
import os, pathlib, signal, sys, time
from driftgym.errors import DriftgymError, TrainingError
from driftgym.processes import serve_calls

def refuse():
    raise TrainingError("no")

def fail():
    if sys.argv[1] == "2":
        raise ValueError("a bug")
    while pathlib.Path("/proc", OF_THE_SECOND.read_text()).exists():
        time.sleep(0.01)
    raise ConnectionError("another process is gone")

OF_THE_SECOND = pathlib.Path(__file__).with_name("pid")
if sys.argv[1] == "2":
    OF_THE_SECOND.write_text(str(os.getpid()))

serve_calls(
    {"same": lambda: None, "refuse": refuse, "save": lambda: None, "fail": fail, "hang": lambda: time.sleep(60),
     "die": lambda: os.kill(os.getpid(), signal.SIGKILL), "end": lambda: os._exit(3)},
    ends_after=lambda error: not isinstance(error, DriftgymError),
)
"""


@pytest.fixture
def follower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What further processes run."""
    (tmp_path / "a_follower.py").write_text(FOLLOWER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "a_follower"


@pytest.fixture
def processes(follower: str) -> Iterator[RankProcesses]:
    """Two further processes beside this one."""
    started = RankProcesses.start(follower, num=2)
    started.carry("same", lambda: None)
    yield started
    started.close()


def refuse() -> None:
    raise TrainingError("no")


def full_disk() -> None:
    raise OSError("the disk is full")


def test_a_call_has_one_outcome_and_errors_of_all_are_those_of_the_first(processes: RankProcesses) -> None:
    assert processes.carry("same", lambda: "mine") == "mine"
    with pytest.raises(TrainingError, match=r"^no$"):
        processes.carry("refuse", refuse)
    with pytest.raises(OSError, match="full"):  # the first alone writes
        processes.carry("save", full_disk)
    assert processes.carry("same", lambda: "still") == "still"


@pytest.mark.parametrize(
    ("method", "call", "problem"),
    [
        ("refuse", lambda: None, r"process [12] of the learner \(pid \d+\) and the first came to different ends"),
        ("same", refuse, r"came to different ends in same: done, and no"),
        ("same", full_disk, r"process 0 of the learner failed in same\n.*the disk is full"),
        ("fail", lambda: None, r"process 2 of the learner \(pid \d+\) failed in fail\n.*a bug"),  # the cause
        ("die", lambda: None, r"process [12] of the learner \(pid \d+\) was killed by SIGKILL"),
        ("end", full_disk, r"process [12] of the learner \(pid \d+\) ended with exit code 3"),
    ],
)
def test_processes_that_differ_or_are_lost_end_the_learner(
    processes: RankProcesses, method: str, call: Callable[[], None], problem: str
) -> None:
    with pytest.raises(ChildDiedError, match=f"(?s){problem}") as caught:
        processes.carry(method, call)
    assert isinstance(caught.value, DriftgymError)
    with pytest.raises(NotDoneError, match=r"same was not done: process [012] of the learner"):
        processes.carry("same", lambda: None)


def test_processes_that_wait_in_vain_for_a_first_one_that_failed_are_killed(follower: str) -> None:
    hasty = RankProcesses.start(follower, num=3, settle_s=0.2)
    with pytest.raises(ChildDiedError, match="came to different ends in hang: no answer, and no"):
        hasty.carry("hang", refuse)
    assert all(process._process.poll() is not None for process in hasty._processes)


def test_one_that_was_killed_between_calls_is_noticed_at_the_next(processes: RankProcesses) -> None:
    victim = next(process._process for process in processes._processes)
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    time.sleep(0.05)
    with pytest.raises(ChildDiedError, match="was killed by SIGKILL"):
        processes.carry("same", lambda: None)
    assert all(process._process.poll() is not None for process in processes._processes)

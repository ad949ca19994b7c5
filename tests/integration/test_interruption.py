"""Answers that were interrupted for their length, as the trainer, the journal and a real run see them."""

import contextlib
import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from driftgym.agents.rendering import make_renderer
from driftgym.errors import ConfigError
from driftgym.trainer.parts import prepare
from driftgym.trainer.records import group_from_json, group_to_json, read_group, write_group
from driftgym.trainer.run_config import load_run_config
from driftgym.trainer.segments import segments_of
from driftgym.trainer.staleness import stale_by_turn
from driftgym.types import Completion, Message, Task, Trajectory, TrajectoryGroup, TrajectoryStatus, Turn

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "configs" / "models" / "tiny-qwen3"
SHORT = (
    *("demonstrations.num_episodes=64", "warmup.num_steps=20", "trainer.max_steps=6", "trainer.groups_per_step=2"),
    *("trainer.group_size=4", "trainer.max_in_flight_groups=4", "trainer.publish_every_steps=1"),
)
AFTER_TOKENS = 6


def turn(new: list[int], sampled: list[int], version: int, **fields: Any) -> Turn:
    completion = Completion(
        request_id="r",
        token_ids=sampled,
        logprobs=[-float(token) for token in sampled],
        policy_versions=np.full(len(sampled), version),
        finish_reason="length" if fields.get("is_interrupted") else "stop",
        kv_min_policy_version=2 if version == 4 else None,
    )
    return Turn(new_prompt_token_ids=new, completion=completion, action=Message(role="assistant"), **fields)


def group_of_one() -> TrajectoryGroup:
    """An episode of two turns, of which the first was interrupted by the tokens 90, 91."""
    trajectory = Trajectory(
        trajectory_id="g-0-0",
        group_id="g",
        member=0,
        attempt=0,
        task_id="t",
        turns=(turn([1, 2], [10, 11], 3, is_interrupted=True), turn([90, 91], [12], 4), turn([7], [13, 14], 5)),
        status=TrajectoryStatus.COMPLETED,
        reward=1.0,
        events={"interrupted": 1},
    )
    return TrajectoryGroup(group_id="g", task=Task(task_id="t", env_id="e"), trajectories=(trajectory,))


def test_what_was_forced_is_never_trained_and_all_else_is() -> None:
    (segment,) = segments_of(group_of_one().trajectories[0], advantage=0.5)
    sampled = np.array([0, 0, 1, 1, 0, 0, 1, 0, 1, 1], dtype=bool)
    assert segment.token_ids.tolist() == [1, 2, 10, 11, 90, 91, 12, 7, 13, 14]
    assert segment.loss_mask.tolist() == sampled.tolist()
    assert segment.train_mask.tolist() == sampled.tolist()
    assert segment.behaviour_logprobs.tolist() == [0, 0, -10, -11, 0, 0, -12, 0, -13, -14]
    assert segment.policy_versions.tolist() == [-1, -1, 3, 3, -1, -1, 4, -1, 5, 5]
    assert segment.advantages.tolist() == (0.5 * sampled).tolist()
    assert segment.exact_mask.tolist() == [False, False, True, True, False, False, False, False, True, True]


def test_the_parts_of_an_answer_are_one_turn() -> None:
    group = group_of_one()
    assert group.trajectories[0].num_turns == 2
    assert stale_by_turn([group], now=7, max_lag=3) == ((2, 3), (0, 2))


def test_the_record_comes_back_and_one_without_interruptions_is_still_read(tmp_path: Path) -> None:
    group = group_of_one()
    write_group(tmp_path / "g.json.gz", group)
    data = group_to_json(read_group(tmp_path / "g.json.gz"))
    assert data == group_to_json(group)
    turns = data["trajectories"][0]["turns"]
    assert [each.pop("is_interrupted") for each in turns] == [True, False, False]
    assert [each.is_interrupted for each in group_from_json(data).trajectories[0].turns] == [False] * 3


async def test_a_text_that_ends_the_turn_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    overrides = ["agent.interrupt_after_tokens=8", 'agent.interrupt_text="Stop.<|im_end|>"', f"run_dir={tmp_path}"]
    config = load_run_config(ROOT / "configs" / "quickstart.yaml", overrides)
    async with contextlib.AsyncExitStack() as stack:
        with pytest.raises(ConfigError, match=r"agent\.interrupt_text"):
            await prepare(config, stack, say=print)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_learns_from_interrupted_answers(tmp_path: Path) -> None:
    """At lag 0 the ratio is 1 on both sides of the text: the trainer scores the context that the engine had."""
    run_dir = tmp_path / "run"
    overrides = [
        *SHORT,
        *("trainer.mode=sync", "trainer.max_lag=0", "trainer.weight_update=drain"),
        f"agent.interrupt_after_tokens={AFTER_TOKENS}",
        'agent.interrupt_text="</think>1"',
    ]
    command = [sys.executable, "-P", "-m", "driftgym.cli", "train", "configs/quickstart.yaml", f"run_dir={run_dir}"]
    finished = subprocess.run(
        [*command, *overrides], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["ratio_mean_at_lag0"] == pytest.approx(1.0, abs=1e-3)
    trajectories = [
        trajectory for path in (run_dir / "trajectories").iterdir() for trajectory in read_group(path).trajectories
    ]
    num_interrupted = sum(each.is_interrupted for trajectory in trajectories for each in trajectory.turns)
    assert num_interrupted > 0
    check_totals(run_dir, summary, trajectories)
    for trajectory in trajectories:
        check_interruptions(trajectory)


def check_totals(run_dir: Path, summary: dict[str, Any], trajectories: list[Trajectory]) -> None:
    """The summary and the journal tell what the trajectories do."""
    assert summary["events"]["interrupted"] == sum(each.events.get("interrupted", 0) for each in trajectories)
    with contextlib.closing(sqlite3.connect(run_dir / "journal.sqlite")) as journal:
        (num_turns,) = journal.execute("SELECT SUM(num_turns) FROM episodes").fetchone()
    assert num_turns == sum(each.num_turns for each in trajectories)
    resolved = yaml.safe_load((run_dir / "config.resolved.yaml").read_text())
    assert resolved["agent"]["interrupt_after_tokens"] == AFTER_TOKENS


def check_interruptions(trajectory: Trajectory) -> None:
    """Each interruption came after so many tokens, by the same text, and the answer ended after it.

    The tag stands in it where the model, which is random, has begun to think.
    """
    renderer = make_renderer("compact", TINY)
    ((begins,), (ends,), (forced,)) = map(renderer.encode_text, ("<think>", "</think>", "1"))
    turns = trajectory.turns
    assert trajectory.events.get("interrupted", 0) == sum(each.is_interrupted for each in turns)
    for begun, ended in zip(turns, (*turns[1:], None), strict=True):
        if begun.is_interrupted:
            assert ended is not None
            assert (len(begun.completion.token_ids), begun.completion.finish_reason) == (AFTER_TOKENS, "length")
            tags = [each for each in begun.completion.token_ids.tolist() if each in (begins, ends)]
            assert ended.new_prompt_token_ids.tolist() == ([ends, forced] if tags[-1:] == [begins] else [forced])
            assert 1 <= len(ended.completion.token_ids) <= 32 - AFTER_TOKENS
    if trajectory.status.is_scored:
        masks = [segment.loss_mask.sum() for segment in segments_of(trajectory, advantage=1.0)]
        assert sum(masks) == trajectory.num_sampled_tokens

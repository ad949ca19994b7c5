"""The loop with scripted parts: zero-variance groups filtered or kept, solved tasks left out, also over a resume."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import scripted_run as scripted
import yaml

from driftgym.errors import ConfigError, TrainingError
from driftgym.trainer.records import read_group
from driftgym.trainer.scripted import Play

FINITE = ("trainer.num_tasks=5", "trainer.solved_above=0.9", "trainer.max_lag=1", "trainer.publish_every_steps=1")


def even_tasks_tell(index: int, member: int) -> Play:
    """Every other task is worth the same to everybody, and takes longer."""
    return Play(reward=float(member == 0) if index % 2 == 0 else 1.0, num_tokens=4 if index % 2 == 0 else 12)


def tasks_of(run_dir: Path) -> list[int]:
    """The seeds of the groups that were played, in their order."""
    return [read_group(path).task.seed for path in sorted((run_dir / "trajectories").iterdir())]


async def test_filtered_groups_are_consumed_and_not_trained(tmp_path: Path) -> None:
    parts = scripted.ScriptedParts(script=even_tasks_tell)
    result = await scripted.begin(scripted.run_config(tmp_path, "trainer.zero_variance=filter"), parts)
    trained = scripted.trained_groups(tmp_path / "run")
    assert all(int(group_id[1:]) % 2 == 0 for group_id in trained)
    rows = scripted.rows(tmp_path / "run")
    assert all(row["groups_trained"] + row["groups_filtered"] == 2 for row in rows), "they count as consumed"
    assert all(row["groups_filtered"] == row["groups_zero_variance"] for row in rows)
    assert (
        sum(row["groups_filtered"] for row in rows) == 24 - len(trained) == result.summary["events"]["groups_filtered"]
    )
    assert result.summary["episodes_trained"] == 3 * len(trained) == rows[-1]["episodes_trained"]
    # Rewards are those of all that was played; the length ratio says that the filtered episodes were longer.
    assert sum(row["reward_mean"] for row in rows) / 12 == pytest.approx((12 * 1.0 + 12 / 3) / 24)
    assert rows[-1]["trained_length_ratio"] == pytest.approx(4 / 8)
    assert [len(step) for step in parts.client.trained] == [3 * row["groups_trained"] for row in rows]


async def test_kept_groups_are_trained_with_an_advantage_of_0(tmp_path: Path) -> None:
    result = await scripted.begin(scripted.run_config(tmp_path), scripted.ScriptedParts(script=even_tasks_tell))
    rows = scripted.rows(tmp_path / "run")
    assert sum(row["groups_zero_variance"] for row in rows) == 12
    assert all((row["groups_trained"], row["groups_filtered"]) == (2, 0) for row in rows)
    assert "groups_filtered" not in result.summary["events"]


async def test_a_batch_of_which_nothing_is_left_is_a_step_without_rows(tmp_path: Path) -> None:
    parts = scripted.ScriptedParts(script=lambda *_: Play(reward=1.0))
    result = await scripted.begin(scripted.run_config(tmp_path, "trainer.zero_variance=filter"), parts)
    rows = scripted.rows(tmp_path / "run")
    assert [row["policy_version"] for row in rows] == list(range(1, 13))
    assert parts.client.trained == [()] * 12
    assert all(row["num_tokens_trained"] == 0 and row["reward_mean"] == 1.0 for row in rows)
    assert rows[-1]["trained_length_ratio"] is None
    assert (result.summary["steps"], result.summary["episodes_trained"]) == (12, 0)


async def test_filtered_groups_are_consumed_exactly_once_over_a_resume(tmp_path: Path) -> None:
    config = scripted.run_config(tmp_path, "trainer.zero_variance=filter")
    with pytest.raises(TrainingError, match="the learner is gone"):
        await scripted.begin(config, scripted.ScriptedParts(script=even_tasks_tell, fail_at_step=8))
    result = await scripted.go_on(tmp_path / "run", scripted.ScriptedParts(script=even_tasks_tell))
    rows = scripted.rows(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, 13))
    trained = scripted.trained_groups(tmp_path / "run")
    assert len(trained) + result.summary["events"]["groups_filtered"] == 24
    assert len(tasks_of(tmp_path / "run")) == 24


def late_or_early(index: int, member: int) -> Play:
    """All have the same grade; of three members, the first earns its turn reward in the second turn."""
    return Play(turn_rewards=(0.0, 1.0) if member == 0 else (1.0, 0.0))


@pytest.mark.parametrize("zero_variance", ["keep", "filter"])
@pytest.mark.parametrize("credit", ["episode", "turn"])
async def test_turns_are_credited_by_choice(tmp_path: Path, credit: str, zero_variance: str) -> None:
    parts = scripted.ScriptedParts(script=late_or_early)
    overrides = (f"trainer.credit={credit}", f"trainer.zero_variance={zero_variance}")
    await scripted.begin(scripted.run_config(tmp_path, *overrides), parts)
    rows = scripted.rows(tmp_path / "run")
    assert {row["groups_zero_variance"] for row in rows} == {2 if credit == "episode" else 0}
    num_filtered = 2 if (credit, zero_variance) == ("episode", "filter") else 0
    assert {row["groups_filtered"] for row in rows} == {num_filtered}
    segments = [segment for step in parts.client.segments for segment in step]
    assert len(segments) == (2 - num_filtered) * 3 * 12
    for segment in segments:
        of_second_turn = 0.0 if credit == "episode" else 2 / 3 if "-0-" in segment.trajectory_id else -1 / 3
        assert segment.advantages[segment.loss_mask].tolist() == pytest.approx([0.0] * 4 + [of_second_turn] * 4)


async def test_when_every_task_is_solved_the_run_ends_cleanly_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = scripted.run_config(tmp_path, *FINITE)
    parts = scripted.ScriptedParts(script=lambda *_: Play(reward=1.0))
    result = await scripted.begin(config, parts)
    steps = result.summary["steps"]
    assert not result.is_interrupted
    assert 3 <= steps < 12
    assert f"all 5 tasks are solved: the run ends after step {steps} of 12" in capsys.readouterr().out
    assert (tmp_path / "run" / "checkpoints" / f"{steps:08d}").is_dir()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == steps
    num_played = len(tasks_of(tmp_path / "run"))
    again = await scripted.go_on(tmp_path / "run", scripted.ScriptedParts(script=lambda *_: Play(reward=1.0)))
    assert again.summary["steps"] == steps, "a resume finds that all is done"
    assert len(tasks_of(tmp_path / "run")) == num_played


def all_but_the_third(index: int, member: int) -> Play:
    """Task 2 is never solved."""
    return Play(reward=float(index != 2), duration_s=0.002)


async def test_what_is_solved_stays_solved_over_a_resume(tmp_path: Path) -> None:
    config = scripted.run_config(tmp_path, *FINITE)
    with pytest.raises(TrainingError, match="the learner is gone"):
        await scripted.begin(config, scripted.ScriptedParts(script=all_but_the_third, fail_at_step=8))
    before = Counter(tasks_of(tmp_path / "run"))
    assert before[2] >= 4
    assert all(before[seed] <= 2 for seed in (0, 1, 3, 4)), "a second group may have begun before the first was scored"
    result = await scripted.go_on(tmp_path / "run", scripted.ScriptedParts(script=all_but_the_third))
    after = Counter(tasks_of(tmp_path / "run"))
    assert result.summary["steps"] == 12
    assert {seed: after[seed] for seed in (0, 1, 3, 4)} == {seed: before[seed] for seed in (0, 1, 3, 4)}
    assert after[2] > before[2]


async def test_a_run_does_not_go_on_with_another_number_of_tasks(tmp_path: Path) -> None:
    """Group 5 played task 0 of 5; it must not count as task 5 of 7."""
    with pytest.raises(TrainingError, match="the learner is gone"):
        await scripted.begin(
            scripted.run_config(tmp_path, *FINITE), scripted.ScriptedParts(script=all_but_the_third, fail_at_step=8)
        )
    resolved = tmp_path / "run" / "config.resolved.yaml"
    data = yaml.safe_load(resolved.read_text())
    for number in (7, None):
        data["trainer"] |= {"num_tasks": number, "solved_above": 0.9 if number else None}
        resolved.write_text(yaml.safe_dump(data))
        with pytest.raises(ConfigError, match=rf"num_tasks: {number} does not go on with a run that began with 5"):
            await scripted.go_on(tmp_path / "run", scripted.ScriptedParts())
    data["trainer"] |= {"num_tasks": 5, "max_steps": 9}
    resolved.write_text(yaml.safe_dump(data))
    assert (await scripted.go_on(tmp_path / "run", scripted.ScriptedParts())).summary["steps"] == 9


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.solved_above=0.9", "solved_above goes with num_tasks"),
        ("trainer.advantage=dr_grpo", "trainer.advantage"),
        ("trainer.zero_variance=drop", "trainer.zero_variance"),
        ("trainer.num_tasks=0", "trainer.num_tasks"),
        ("trainer={advantage: max_rl, credit: turn}", "max_rl goes with credit: episode"),
    ],
)
def test_what_does_not_go_together_is_said(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scripted.run_config(tmp_path, override)


async def test_rewards_that_max_rl_cannot_divide_by_end_the_run(tmp_path: Path) -> None:
    def below_zero(index: int, member: int) -> Any:
        return Play(reward=-float(member))

    with pytest.raises(TrainingError, match="max_rl divides by the mean reward"):
        await scripted.begin(
            scripted.run_config(tmp_path, "trainer.advantage=max_rl"), scripted.ScriptedParts(script=below_zero)
        )

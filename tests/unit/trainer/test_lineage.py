"""Checkpoints and going on from them, where the loop's own tests do not look."""

import asyncio
import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from driftgym.errors import ConfigError, TrainingError
from driftgym.trainer.journal import Journal
from driftgym.trainer.lineage import learner_part, lock_run, take_up, write_checkpoint
from driftgym.trainer.scripted import NumberedTasks, ScriptedEngines, ScriptedRollouts, ScriptedTrainingClient
from driftgym.trainer.staleness import LagHistogram, LagRule
from driftgym.trainer.training_client import train_step

RULE = LagRule(max_lag=2, groups_per_step=1, on_lag="wait")


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    (tmp_path / "checkpoints").mkdir()
    with contextlib.closing(Journal.open(tmp_path)) as opened:
        opened.begin_life()
        yield opened


async def play(journal: Journal, index: int, *, version: int = 0) -> str:
    rollouts = ScriptedRollouts(ScriptedEngines(policy_version=version), group_size=2)
    group = await rollouts(NumberedTasks().task(index), group_id=f"g{index:06d}", min_policy_version=version)
    journal.issue(group_id=group.group_id, task_index=index, group_size=2, min_policy_version=version)
    journal.write_trajectories(group)
    journal.finish(group, failed=False)
    return group.group_id


def consume(journal: Journal, step: int, *group_ids: str) -> None:
    journal.consume(step=step, trained=group_ids, dropped=(), row={"step": step}, lags=LagHistogram())


async def steps(run_dir: Path, journal: Journal, num: int) -> ScriptedTrainingClient:
    """So many steps, each of one group, each with a checkpoint."""
    client = ScriptedTrainingClient()
    for step in range(1, num + 1):
        consume(journal, step, await play(journal, step - 1, version=step - 1))
        await train_step(client, [])
        await write_checkpoint(run_dir, client, journal, policy_version=step)
    return client


async def test_the_two_newest_checkpoints_are_kept(tmp_path: Path, journal: Journal) -> None:
    await steps(tmp_path, journal, 5)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["00000004", "00000005"]
    lineage = take_up(tmp_path, journal, RULE, say=print)
    assert lineage.policy_version == 5
    assert lineage.checkpoint is not None
    client = ScriptedTrainingClient()
    await client.load(learner_part(lineage.checkpoint), policy_version=5)


async def test_the_newest_are_those_of_the_highest_versions_however_their_names_are_written(
    tmp_path: Path, journal: Journal
) -> None:
    await steps(tmp_path, journal, 2)
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "00000001").rename(checkpoints / "1")
    (checkpoints / "00000002").rename(checkpoints / "2")
    await write_checkpoint(tmp_path, ScriptedTrainingClient(), journal, policy_version=10)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["00000010", "2"]


async def test_what_ends_while_a_checkpoint_is_written_is_as_safe_as_the_journal_that_tells_of_it(
    tmp_path: Path, journal: Journal
) -> None:
    """Where the journal outlived the trajectories, a power failure would leave a group that nobody can read."""
    unflushed: list[int] = []

    class Saving(ScriptedTrainingClient):
        def save(self, folder: Path) -> "asyncio.Future[None]":
            unflushed.append(len(journal._unflushed))  # the journal was flushed right before
            return super().save(folder)

    await play(journal, 0)
    ends_meanwhile = asyncio.create_task(play(journal, 1))
    await write_checkpoint(tmp_path, Saving(), journal, policy_version=0)
    await ends_meanwhile
    assert unflushed == [0]


async def test_what_could_not_be_flushed_is_flushed_the_next_time(tmp_path: Path, journal: Journal) -> None:
    await play(journal, 0)
    trajectories = tmp_path / "trajectories"
    trajectories.rename(tmp_path / "moved")
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            journal.flush_trajectories()
    (tmp_path / "moved").rename(trajectories)
    journal.flush_trajectories()
    assert not journal._unflushed


async def test_trajectories_that_somebody_removes_cost_no_checkpoint(tmp_path: Path, journal: Journal) -> None:
    group_id = await play(journal, 0)
    (tmp_path / "trajectories" / f"{group_id}.json.gz").unlink()
    await write_checkpoint(tmp_path, ScriptedTrainingClient(), journal, policy_version=0)
    lineage = take_up(tmp_path, journal, RULE, say=print)
    assert [row.group_id for row in lineage.again] == [group_id], "it is played again"


async def test_a_checkpoint_that_fails_leaves_nothing_and_the_earlier_one_stands(
    tmp_path: Path, journal: Journal
) -> None:
    class Dead(ScriptedTrainingClient):
        async def save(self, folder: Path) -> None:
            raise TrainingError("the learner is gone")

    await steps(tmp_path, journal, 1)
    with pytest.raises(TrainingError, match="gone"):
        await write_checkpoint(tmp_path, Dead(), journal, policy_version=2)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["00000001"]


async def test_a_damaged_newest_checkpoint_is_set_aside_for_good(tmp_path: Path, journal: Journal) -> None:
    await steps(tmp_path, journal, 3)
    damaged = tmp_path / "checkpoints" / "00000003"
    (learner_part(damaged) / "state.json").write_text("{")
    said: list[str] = []
    lineage = take_up(tmp_path, journal, RULE, say=said.append)
    assert lineage.policy_version == 2
    assert "00000003" in said[0]
    assert not damaged.exists()
    assert (tmp_path / "checkpoints" / ".lost-00000003").is_dir()
    assert [row.group.group_id for row in lineage.restored] == ["g000002"], "written by version 2, which stands"


async def test_a_checkpoint_that_was_replaced_by_a_file_is_set_aside_twice(tmp_path: Path, journal: Journal) -> None:
    """The second time over the first."""
    for content in ("x", "y"):
        await steps(tmp_path, journal, 2)
        replaced = tmp_path / "checkpoints" / "00000002"
        shutil.rmtree(replaced)
        replaced.write_text(content)
        assert take_up(tmp_path, journal, RULE, say=print).policy_version == 1
        assert (tmp_path / "checkpoints" / ".lost-00000002").read_text() == content
        take_back(tmp_path, journal)


def take_back(run_dir: Path, journal: Journal) -> None:
    """To the beginning."""
    shutil.rmtree(run_dir / "checkpoints" / "00000001")
    take_up(run_dir, journal, RULE, say=print)


async def test_what_a_killed_writer_left_of_a_checkpoint_is_removed(tmp_path: Path, journal: Journal) -> None:
    await steps(tmp_path, journal, 1)
    (tmp_path / "checkpoints" / ".partial-00000007" / "learner").mkdir(parents=True)
    take_up(tmp_path, journal, RULE, say=print)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["00000001"]


async def test_without_a_complete_checkpoint_nothing_is_rolled_back(tmp_path: Path, journal: Journal) -> None:
    await steps(tmp_path, journal, 3)
    for number in (2, 3):
        (tmp_path / "checkpoints" / f"{number:08d}" / "manifest.json").write_text("{}")
    said: list[str] = []
    with pytest.raises(ConfigError, match=r"no checkpoint is complete: .*00000003.*; .*00000002.*Put one back"):
        take_up(tmp_path, journal, RULE, say=said.append)
    assert said == []
    assert journal.last_step() == 3
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["00000002", "00000003"]
    shutil.rmtree(tmp_path / "checkpoints")
    assert take_up(tmp_path, journal, RULE, say=said.append).policy_version == 0
    assert journal.last_step() == 0


async def test_without_a_checkpoint_a_run_begins_anew_with_the_same_tasks(tmp_path: Path, journal: Journal) -> None:
    consume(journal, 1, await play(journal, 0))
    await play(journal, 1, version=1)
    journal.issue(group_id="g000002", task_index=2, group_size=2, min_policy_version=1)
    lineage = take_up(tmp_path, journal, RULE, say=print)
    assert (lineage.checkpoint, lineage.policy_version) == (None, 0)
    assert [restored.row.group_id for restored in lineage.restored] == ["g000000"]
    assert [row.group_id for row in lineage.again] == ["g000001", "g000002"]


async def test_more_than_can_be_trained_in_time_is_played_again(tmp_path: Path, journal: Journal) -> None:
    """With one group a step and a bound of 2, three groups of version 0 can be trained from version 0 on, no more."""
    for index in range(5):
        await play(journal, index)
    lineage = take_up(tmp_path, journal, RULE, say=print)
    assert [restored.row.group_id for restored in lineage.restored] == ["g000000", "g000001", "g000002"]
    assert [row.group_id for row in lineage.again] == ["g000003", "g000004"]


async def test_a_journal_that_ends_before_the_checkpoint_is_refused(tmp_path: Path, journal: Journal) -> None:
    await steps(tmp_path, journal, 2)
    journal.roll_back(1)
    with pytest.raises(TrainingError, match="ends at step 1, before checkpoint 2"):
        take_up(tmp_path, journal, RULE, say=print)


async def test_the_state_says_which_moment_and_which_life(tmp_path: Path, journal: Journal) -> None:
    await steps(tmp_path, journal, 1)
    state = json.loads((tmp_path / "checkpoints" / "00000001" / "state.json").read_text())
    assert state == {"policy_version": 1, "incarnation": 1}


def test_a_run_is_held_by_one_process(tmp_path: Path) -> None:
    import os

    lock = lock_run(tmp_path)
    with pytest.raises(ConfigError, match="another process"):
        lock_run(tmp_path)
    os.close(lock)
    os.close(lock_run(tmp_path))

"""The journal: what it counts, and what a rollback gives back."""

import contextlib
import dataclasses
import sqlite3
from pathlib import Path

import pytest

from driftgym.errors import TrainingError
from driftgym.trainer.journal import Journal, leave_out
from driftgym.trainer.staleness import LagHistogram
from driftgym.types import (
    Completion,
    Message,
    Task,
    Trajectory,
    TrajectoryGroup,
    TrajectoryStatus,
    Turn,
    float32_array,
    int32_array,
)

BOTH = ("completed", "completed")


def make_group(index: int, *, version: int = 0, statuses: tuple[str, ...] = BOTH) -> TrajectoryGroup:
    completion = Completion(
        request_id="r",
        token_ids=int32_array([1, 2]),
        logprobs=float32_array([-0.1, -0.2]),
        policy_versions=int32_array([version, version]),
        finish_reason="stop",
    )
    turn = Turn(new_prompt_token_ids=int32_array([7]), completion=completion, action=Message(role="assistant"))
    members = [
        Trajectory(
            trajectory_id=f"g{index:06d}-{member}-0",
            group_id=f"g{index:06d}",
            member=member,
            attempt=0,
            task_id=f"t{index}",
            turns=(turn,),
            status=TrajectoryStatus(status),
            reward=float(index) if TrajectoryStatus(status).is_scored else None,
            error=None if TrajectoryStatus(status).is_scored else "it broke",
            ended_at=float(index),
            events={"policy_error": 1, "tool_timeout": 2} if member else {},
        )
        for member, status in enumerate(statuses)
    ]
    return TrajectoryGroup(
        group_id=f"g{index:06d}", task=Task(task_id=f"t{index}", env_id="e"), trajectories=tuple(members)
    )


def play(journal: Journal, index: int, *, version: int = 0, statuses: tuple[str, ...] = BOTH) -> str:
    group = make_group(index, version=version, statuses=statuses)
    issue(journal, index, version=version)
    journal.write_trajectories(group)
    journal.finish(group, failed=not any(t.status.is_scored for t in group.trajectories), step=99)
    return group.group_id


def issue(journal: Journal, index: int, *, version: int = 0) -> None:
    journal.issue(group_id=f"g{index:06d}", task_index=index, group_size=2, min_policy_version=version)


def consume(journal: Journal, step: int, *trained: str, dropped: tuple[str, ...] = ()) -> None:
    journal.consume(step=step, trained=trained, dropped=dropped, row={"step": step}, lags=LagHistogram.of([1, 2]))


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    opened = Journal.open(tmp_path)
    opened.begin_life()
    return opened


def names(journal: Journal, state: str) -> list[str]:
    return [row.group_id for row in journal.groups(state)]  # type: ignore[arg-type]


def test_rewards_come_in_the_order_of_the_tasks_not_in_that_of_the_ends(journal: Journal) -> None:
    for index in (2, 0, 1):
        play(journal, index)
    assert journal.rewards() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]


def test_counts_and_tally_of_what_happened(journal: Journal) -> None:
    first = play(journal, 0)
    second = play(journal, 1, statuses=("completed", "infra_error"))
    play(journal, 2, statuses=("env_error", "infra_error"))
    dropped = play(journal, 3)
    issue(journal, 4)
    consume(journal, 1, first, second, dropped=(dropped,))
    counts = journal.counts()
    assert (counts.started, counts.finished, counts.trained) == (10, 8, 3)
    assert (counts.groups_failed, counts.groups_dropped) == (1, 1)
    assert journal.tally.errors == {"env": 1, "infra": 2, "policy": 4}
    assert journal.tally.events == {"policy_error": 4, "tool_timeout": 8}
    assert journal.rewards() == [0.0, 0.0, 1.0, 3.0, 3.0]
    assert journal.lags().counts == (0, 1, 1)
    assert (journal.last_step(), journal.next_task_index()) == (1, 5)
    journal.close()


def test_it_is_the_same_after_it_was_closed_and_opened(journal: Journal, tmp_path: Path) -> None:
    consume(journal, 1, play(journal, 0), play(journal, 1))
    before = (journal.counts(), journal.tally.row(), journal.lags(), journal.step_rows())
    journal.close()
    journal.close()
    again = Journal.open(tmp_path)
    assert (again.counts(), again.tally.row(), again.lags(), again.step_rows()) == before
    assert again.begin_life() == 2
    again.close()


def test_a_rollback_gives_back_what_later_steps_consumed_and_plays_lost_versions_again(journal: Journal) -> None:
    groups = [play(journal, index, version=version) for index, version in enumerate((0, 0, 1, 2, 3))]
    consume(journal, 1, groups[0])
    consume(journal, 2, groups[1], dropped=(groups[2],))
    consume(journal, 3, groups[3])
    issue(journal, 5)
    journal.roll_back(1)
    assert names(journal, "trained") == [groups[0]]
    assert names(journal, "finished") == [groups[1], groups[2]]
    assert names(journal, "issued") == [groups[3], groups[4], "g000005"], "versions 2 and 3 are lost"
    assert journal.last_step() == 1
    assert journal.counts().trained == 2
    assert journal.counts().finished == 6
    assert journal.tally.events["tool_timeout"] == 6
    assert journal.next_task_index() == 6, "no task is issued under two names"
    journal.close()


def test_filtered_groups_are_consumed_counted_apart_and_given_back_by_a_rollback(journal: Journal) -> None:
    trained, filtered = play(journal, 0), play(journal, 1)
    row = {"step": 1}
    journal.consume(step=1, trained=[trained], dropped=[], filtered=[filtered], row=row, lags=LagHistogram())
    assert (journal.counts().trained, journal.counts().groups_filtered) == (2, 1)
    assert names(journal, "filtered") == [filtered]
    with pytest.raises(TrainingError, match="not finished and unconsumed"):
        journal.consume(step=2, trained=[filtered], dropped=[], row=row, lags=LagHistogram())
    journal.roll_back(0)
    assert names(journal, "finished") == [trained, filtered]
    assert journal.counts().groups_filtered == 0
    journal.close()


def test_the_rewards_of_each_group_are_those_of_the_lineage_that_stands(journal: Journal) -> None:
    play(journal, 2, version=1)
    play(journal, 0)
    play(journal, 1, statuses=("env_error", "completed"))
    play(journal, 3, statuses=("env_error", "infra_error"))
    assert journal.rewards_by_group() == [(0, [0.0, 0.0]), (1, [1.0]), (2, [2.0, 2.0])]
    journal.roll_back(0)
    assert journal.rewards_by_group() == [(0, [0.0, 0.0]), (1, [1.0])], "version 1 is lost"
    journal.close()


def test_a_group_that_is_played_again_counts_once(journal: Journal) -> None:
    issue(journal, 0)
    journal.roll_back(0)
    play(journal, 0)
    assert journal.counts().started == 2
    assert names(journal, "finished") == ["g000000"]
    journal.close()


def test_a_group_that_failed_since_the_checkpoint_is_played_again(journal: Journal) -> None:
    for index, step in enumerate((1, 3)):
        group = make_group(index, statuses=("infra_error", "env_error"))
        issue(journal, index)
        journal.finish(group, failed=True, step=step)
    assert journal.tally.errors == {"env": 2, "infra": 2, "policy": 2}
    journal.roll_back(2)
    assert names(journal, "failed") == ["g000000"]
    assert names(journal, "issued") == ["g000001"]
    assert journal.tally.errors == {"env": 1, "infra": 1, "policy": 1}
    assert journal.counts().finished == 2
    journal.close()


def test_an_error_is_told_whatever_characters_it_quotes(journal: Journal, tmp_path: Path) -> None:
    group = make_group(0, statuses=("env_error",))
    odd = dataclasses.replace(group.trajectories[0], error="cannot decode \udcff\x00")
    issue(journal, 0)
    journal.finish(dataclasses.replace(group, trajectories=(odd,)), failed=True, step=1)
    journal.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "journal.sqlite")) as reader:
        assert reader.execute("SELECT error FROM groups").fetchall() == [("cannot decode \\udcff\x00",)]
        assert reader.execute("SELECT error FROM episodes").fetchall() == [("cannot decode \\udcff\x00",)]


def test_attempts_that_infrastructure_failed_are_counted(journal: Journal) -> None:
    group = make_group(0)
    retried = dataclasses.replace(group.trajectories[0], attempt=2)
    issue(journal, 0)
    journal.finish(dataclasses.replace(group, trajectories=(retried, group.trajectories[1])), failed=False)
    assert journal.tally.events["infra_retries"] == 2
    journal.close()


def test_a_group_that_is_not_finished_or_was_trained_before_cannot_be_consumed(journal: Journal) -> None:
    issue(journal, 0)
    done = play(journal, 1)
    with pytest.raises(TrainingError, match="step 1 consumed g000000, which is not finished"):
        consume(journal, 1, done, "g000000")
    assert names(journal, "issued") == ["g000000"]
    assert names(journal, "finished") == [done]
    assert journal.last_step() == 0
    consume(journal, 1, done)
    with pytest.raises(TrainingError, match="step 2 consumed g000001"):
        consume(journal, 2, done)
    journal.close()


def test_a_step_is_journalled_once_and_a_refused_change_changes_nothing(journal: Journal) -> None:
    first, second = play(journal, 0), play(journal, 1)
    consume(journal, 1, first)
    with pytest.raises(TrainingError, match="journal cannot be written"):
        consume(journal, 1, second)
    assert names(journal, "finished") == [second]
    journal.close()


def test_a_file_that_is_no_journal_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(TrainingError, match="cannot be opened as a journal"):
        Journal.open(tmp_path)


def test_what_happened_to_the_run_stays_counted_in_every_life(journal: Journal, tmp_path: Path) -> None:
    journal.count_event("generator_lost")
    play(journal, 0)
    journal.count_event("generator_lost")
    assert journal.tally.events["generator_lost"] == 2
    journal.roll_back(0)
    assert journal.tally.events["generator_lost"] == 2
    assert journal.tally.row()["events/generator_lost"] == 2
    journal.close()
    with contextlib.closing(Journal.open(tmp_path)) as again:
        assert again.begin_life() == journal.incarnation + 1
        assert again.tally.events["generator_lost"] == 2


def test_groups_left_out_after_the_last_step_are_of_it_and_its_row_counts_them(tmp_path: Path) -> None:
    with contextlib.closing(Journal.open(tmp_path)) as journal:
        journal.begin_life()
        first, second, third = (play(journal, index) for index in range(3))
        consume(journal, 1, first)
        before = journal.step_rows()[0]
        with pytest.raises(TrainingError, match=f"step 1 consumed {first}"):
            leave_out(journal, [make_group(1), make_group(0)], step=1, figures={"tasks_left_out": 9})
        assert journal.step_rows() == [before]
        leave_out(journal, [make_group(1)], step=1, figures={"tasks_left_out": 1})
        assert journal.step_rows() == [before | {"tasks_left_out": 1}]
        assert journal.counts().groups_dropped == 1
        assert [row.group_id for row in journal.groups("finished")] == [third]
        journal.roll_back(1)
        assert [row.group_id for row in journal.groups("dropped")] == [second]
        journal.roll_back(0)
        assert [row.group_id for row in journal.groups("finished")] == [first, second, third]

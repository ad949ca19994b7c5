"""Tasks that are always dropped: who counts as one, when it is said, and what another life of the run knows."""

from pathlib import Path

from driftgym.trainer.buffer import Batch
from driftgym.trainer.journal import Journal
from driftgym.trainer.left_out import LeftOut
from driftgym.trainer.scripted import NumberedTasks
from driftgym.trainer.staleness import LagHistogram, LagRule, OnLag
from driftgym.types import Task, Trajectory, TrajectoryGroup, TrajectoryStatus


def rule(on_lag: OnLag = "drop") -> LagRule:
    return LagRule(max_lag=2, groups_per_step=1, on_lag=on_lag)


def group(index: int, *, task: int | None = None) -> TrajectoryGroup:
    task_id = f"scripted-{index if task is None else task}"
    group_id = f"g{index:06d}"
    member = Trajectory(
        trajectory_id=f"{group_id}-0-0",
        group_id=group_id,
        member=0,
        attempt=0,
        task_id=task_id,
        turns=(),
        status=TrajectoryStatus.COMPLETED,
        reward=1.0,
        started_at=10.0,
        ended_at=12.5,
    )
    return TrajectoryGroup(group_id=group_id, task=Task(task_id=task_id, env_id="e"), trajectories=(member,))


def batch(*, taken: tuple[int, ...] = (), dropped: tuple[int, ...] = (), filtered: tuple[int, ...] = ()) -> Batch:
    """The numbers are those of tasks."""
    chosen = (tuple(group(100 * number, task=number) for number in part) for part in (taken, dropped, filtered))
    trained_groups, dropped_groups, filtered_groups = chosen
    return Batch(groups=trained_groups, dropped=dropped_groups, filtered=filtered_groups)


def test_a_task_is_left_out_until_a_step_takes_it() -> None:
    left_out = LeftOut()
    left_out.add(batch(dropped=(0, 1, 2)), now=5, rule=rule())
    assert left_out.num_tasks == 3
    left_out.add(batch(taken=(1,), filtered=(2,), dropped=(0,)), now=6, rule=rule())
    assert left_out.num_tasks == 1
    left_out.add(batch(dropped=(1, 2)), now=7, rule=rule())
    assert left_out.num_tasks == 1, "they had their turn"


def test_it_is_said_with_the_first_one_and_whenever_there_are_twice_as_many() -> None:
    left_out = LeftOut()
    said = [left_out.add(batch(dropped=(number // 2,)), now=5, rule=rule()) for number in range(20)]
    assert [place for place, line in enumerate(said) if line] == [0, 2, 6, 14]
    assert said[0] is not None
    assert "1 tasks were left out so far" in said[0]
    assert "the last is scripted-0, whose episodes took up to 2.5 s" in said[0]
    assert "2 being allowed" in said[0]
    assert said[14] is not None
    assert "8 tasks" in said[14]


def test_other_rules_leave_nothing_out() -> None:
    left_out = LeftOut()
    assert left_out.add(batch(taken=(0,)), now=5, rule=rule("mask")) is None
    assert left_out.num_tasks == 0


def test_another_life_knows_what_was_left_out(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    journal.begin_life()
    for index in range(4):
        journal.issue(group_id=f"g{index:06d}", task_index=index, group_size=1, min_policy_version=0)
        journal.finish(group(index), failed=False)
    names = [f"g{index:06d}" for index in range(4)]
    journal.consume(step=1, trained=names[:1], dropped=names[1:3], row={}, lags=LagHistogram())
    left_out = LeftOut.of(journal, NumberedTasks(), rule())
    assert left_out.num_tasks == 2
    assert left_out.add(batch(dropped=(1,)), now=5, rule=rule()) is None, "that was said before"
    left_out.add(batch(taken=(2,)), now=6, rule=rule())
    assert left_out.num_tasks == 1
    assert LeftOut.of(journal, NumberedTasks(), rule("wait")).num_tasks == 0
    journal.close()

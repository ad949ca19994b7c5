"""The lag rules through the real loop: the bound and one beyond, slow tasks, episodes over updates, members masked.

In virtual time: which episode ends during which step follows from the lengths given here, on any machine.
"""

import contextlib
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scripted_run as scripted
from virtual_time import in_virtual_time

from driftgym.envs.base import StepResult
from driftgym.errors import SandboxError, TrainingError
from driftgym.trainer.scripted import Play
from driftgym.trainer.scripted_rollouts import PacedEnv, PacedParts
from driftgym.trainer.scripted_runs import PacedSetup, lags_of_learner, lags_of_records, play_paced
from driftgym.trainer.staleness import OnLag
from driftgym.types import Message

MODEL = Path(__file__).parents[2] / "configs" / "models" / "tiny-qwen3"

RULES: tuple[OnLag, ...] = ("wait", "mask", "drop")


def groups(run_dir: Path, state: str) -> list[sqlite3.Row]:
    """The groups in `state`, in the order of issue."""
    with contextlib.closing(sqlite3.connect(run_dir / "journal.sqlite")) as journal:
        journal.row_factory = sqlite3.Row
        return journal.execute("SELECT * FROM groups WHERE state = ? ORDER BY task_index", (state,)).fetchall()


def check_tokens(run_dir: Path, parts: Any, *, max_lag: int) -> Counter[int]:
    """Token by token: trained is what the records hold up to the bound, and nothing else. Returns those by lag."""
    trained = lags_of_learner(parts.client)
    recorded = lags_of_records(run_dir, num_steps=len(trained))
    for learned, held in zip(trained, recorded, strict=True):
        assert learned == Counter({lag: n for lag, n in held.items() if lag <= max_lag})
    return sum(trained, Counter())


@pytest.mark.parametrize("on_lag", RULES)
def test_what_waits_in_the_queue_is_judged_when_it_is_consumed(tmp_path: Path, on_lag: OnLag) -> None:
    """Case C3: limit 1. Six groups are finished at once at version 0, and steps take two each: of those that wait, the
    ones that are taken at version 1 are in time, and at version 2 nothing of version 0 is."""
    config = scripted.run_config(
        tmp_path,
        *("trainer.max_lag=1", "trainer.publish_every_steps=1", f"trainer.on_lag={on_lag}", "trainer.max_steps=6"),
    )
    parts = scripted.ScriptedParts(script=lambda *_: Play(), step_s=0.05)
    result = in_virtual_time(scripted.begin(config, parts))
    run_dir = tmp_path / "run"
    lags = check_tokens(run_dir, parts, max_lag=1)
    assert max(lags) == result.summary["lag_max"] == 1
    scripted.assert_exactly_once(run_dir, steps=6, groups_per_step=2)
    late = [group for group in groups(run_dir, "dropped") if group["newest_version"] == 0]
    masked = sum(row["num_tokens_masked"] for row in result.rows)
    assert (bool(late), bool(masked)) == (on_lag == "drop", on_lag == "mask")
    if on_lag == "drop":
        assert {group["step"] - 1 - group["oldest_version"] for group in late} == {2}
        assert [group["step"] for group in groups(run_dir, "trained")][:4] == [1, 1, 2, 2]
    if on_lag == "mask":
        assert result.rows[2]["num_tokens_trained"] == 0, "all that was there at version 2 was of version 0"
        assert result.rows[2]["reward_mean"] == 1.0


@pytest.mark.parametrize("on_lag", RULES)
def test_with_limit_0_no_trained_token_was_there_before_the_last_update(tmp_path: Path, on_lag: OnLag) -> None:
    """Case C3: an episode that spans an update is not started, loses its old tokens, or is left out."""
    config = scripted.run_config(
        tmp_path,
        *("trainer.max_lag=0", "trainer.publish_every_steps=1", f"trainer.on_lag={on_lag}", "trainer.max_steps=8"),
    )
    parts = scripted.ScriptedParts(script=lambda index, _: Play(duration_s=0.01 * (index % 5)), step_s=0.02)
    in_virtual_time(scripted.begin(config, parts))
    run_dir = tmp_path / "run"
    assert set(check_tokens(run_dir, parts, max_lag=0)) == {0}
    spans = [group["newest_version"] - group["oldest_version"] for group in groups(run_dir, "trained")]
    if on_lag != "mask":
        assert set(spans) == {0}
    assert (len(groups(run_dir, "dropped")) > 0) == (on_lag == "drop")


def slow_first(index: int, _member: int) -> Play:
    """Task 0 takes six steps and more, the others one; each half of an episode writes its tokens at its end."""
    return Play(duration_s=0.4 if index == 0 else 0.02)


def slow_task_run(tmp_path: Path, on_lag: OnLag) -> tuple[Any, Any]:
    config = scripted.run_config(
        tmp_path,
        *("trainer.max_lag=2", "trainer.publish_every_steps=1", f"trainer.on_lag={on_lag}", "trainer.max_steps=40"),
        *("trainer.group_size=1", "trainer.num_tasks=10", "trainer.max_in_flight_groups=4"),
    )
    parts = scripted.ScriptedParts(script=slow_first, step_s=0.04)
    return in_virtual_time(scripted.begin(config, parts)), parts


@pytest.mark.parametrize("on_lag", ["wait", "mask"])
def test_a_task_that_takes_many_steps_is_trained_with_limit_2(tmp_path: Path, on_lag: OnLag) -> None:
    """Case C4: ten tasks, forty steps; the slow one has tokens in training again and again."""
    result, parts = slow_task_run(tmp_path, on_lag)
    check_tokens(tmp_path / "run", parts, max_lag=2)
    of_slow = {f"g{index:06d}-0-0" for index in range(0, 200, 10)}
    steps = [
        step
        for step, segments in enumerate(parts.client.segments, start=1)
        if any(s.trajectory_id in of_slow and s.train_mask.any() for s in segments)
    ]
    assert steps[0] <= 15
    assert max(np.diff([*steps, 40])) <= 20
    assert result.rows[-1]["tasks_left_out"] == 0
    assert "tasks_left_out" not in result.summary["events"]


def test_a_task_that_drop_always_leaves_out_is_counted_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cases C4 and C5: the slow task never makes it, although its newest token would; neither is silent."""
    result, parts = slow_task_run(tmp_path, "drop")
    run_dir = tmp_path / "run"
    check_tokens(run_dir, parts, max_lag=2)
    slow = [group for group in groups(run_dir, "dropped") if group["task_index"] % 10 == 0]
    assert len(slow) >= 2
    assert all(group["step"] - 1 - group["oldest_version"] > 2 for group in slow)
    assert any(group["step"] - 1 - group["newest_version"] <= 2 for group in slow), "the oldest token decides"
    assert {row["tasks_left_out"] for row in result.rows[15:35]} == {1}
    # At the very end steps wait for what is left, and the slow task may be in time.
    assert result.summary["events"].get("tasks_left_out", 0) == result.rows[-1]["tasks_left_out"]
    printed = " ".join(capsys.readouterr().out.split())
    assert "on_lag drop: 1 tasks were left out so far" in printed
    assert "the last is scripted-0, whose episodes took up to 0." in printed
    assert printed.count("tasks were left out") == 1, "once, and again when there are twice as many"


FINITE_DROP = (
    *("trainer.on_lag=drop", "trainer.max_lag=1", "trainer.publish_every_steps=1", "trainer.max_steps=60"),
    *("trainer.num_tasks=3", "trainer.solved_above=0.9", "trainer.max_in_flight_groups=12", "trainer.group_size=1"),
)


def solved_late(num_before: int) -> Callable[[int, int], Play]:
    """Task 2 takes long, and is solved at once; the others when they were played `num_before` times."""
    played: Counter[int] = Counter()

    def script(index: int, _member: int) -> Play:
        played[index] += 1
        is_slow = index == 2
        return Play(duration_s=0.5 if is_slow else 0.02, reward=float(is_slow or played[index] > num_before))

    return script


def states(run_dir: Path) -> dict[str, tuple[str, int]]:
    """By group: what became of it, and at which step."""
    with contextlib.closing(sqlite3.connect(run_dir / "journal.sqlite")) as journal:
        return {
            group: (state, step) for group, state, step in journal.execute("SELECT group_id, state, step FROM groups")
        }


def test_what_drop_leaves_out_when_no_step_follows_is_consumed_and_counted(tmp_path: Path) -> None:
    """The last groups of a run whose tasks are all solved are too old, and no batch takes them along."""
    config = scripted.run_config(tmp_path, *FINITE_DROP)
    parts = scripted.ScriptedParts(script=solved_late(6), step_s=0.04)
    result = in_virtual_time(scripted.begin(config, parts))
    run_dir, steps = tmp_path / "run", result.summary["steps"]
    consumed = states(run_dir)
    assert {state for state, _ in consumed.values()} == {"trained", "dropped"}
    dropped = groups(run_dir, "dropped")
    assert result.summary["events"]["groups_dropped"] == len(dropped)
    num_late = len(dropped) - sum(row["groups_dropped"] for row in scripted.rows(run_dir))
    assert num_late >= 2, "more than the steps have left out"
    assert sum(group["step"] == steps and group["oldest_version"] < steps - 1 for group in dropped) >= num_late
    assert result.rows[-1]["length_sums"][3] == len(consumed), "each group was offered once"
    again = in_virtual_time(scripted.go_on(run_dir, scripted.ScriptedParts(script=solved_late(0))))
    assert states(run_dir) == consumed
    assert again.summary["events"] == result.summary["events"]


def test_a_task_that_a_dropped_group_solved_is_solved_in_every_life(tmp_path: Path) -> None:
    """The lag rule leaves a group out of training; what it scored was scored."""
    config = scripted.run_config(tmp_path, *FINITE_DROP, "trainer.checkpoint_every_steps=4")
    never = 10**6
    parts = scripted.ScriptedParts(script=solved_late(never), step_s=0.04, fail_at_step=25)
    with pytest.raises(TrainingError, match="the learner is gone"):
        in_virtual_time(scripted.begin(config, parts))
    run_dir = tmp_path / "run"
    slow = {group for group, (state, _) in states(run_dir).items() if int(group[1:]) % 3 == 2 and state != "issued"}
    assert "dropped" in {states(run_dir)[group][0] for group in slow}
    num_begun = len(states(run_dir))
    in_virtual_time(scripted.go_on(run_dir, scripted.ScriptedParts(script=solved_late(never), step_s=0.04)))
    later = [group for group in states(run_dir) if int(group[1:]) >= num_begun]
    assert len(later) > 20
    assert not [group for group in later if int(group[1:]) % 3 == 2]


def test_mask_keeps_the_reward_and_the_baseline_of_a_member_whose_tokens_are_all_too_old(
    tmp_path: Path,
) -> None:
    """Case C5: of a slow group, the member that ended first is masked whole; its siblings are compared with it."""

    def script(index: int, member: int) -> Play:
        is_slow = index == 1
        return Play(duration_s=0.3 if is_slow and member == 2 else 0.001, reward=float(member) if is_slow else 1.0)

    config = scripted.run_config(
        tmp_path, "trainer.max_lag=2", "trainer.publish_every_steps=1", "trainer.on_lag=mask", "trainer.max_steps=12"
    )
    parts = scripted.ScriptedParts(script=script, step_s=0.05)
    result = in_virtual_time(scripted.begin(config, parts))
    check_tokens(tmp_path / "run", parts, max_lag=2)
    members = [s for segments in parts.client.segments for s in segments if s.group_id == "g000001"]
    assert [(s.train_mask.any(), s.loss_mask.any()) for s in members] == [(False, True)] * 2 + [(True, True)]
    assert [set(s.advantages[s.loss_mask].tolist()) for s in members] == [{-1.0}, {0.0}, {1.0}]
    assert [s.reward for s in members] == [0.0, 1.0, 2.0]
    slow = members[2]
    versions = slow.policy_versions[slow.loss_mask]
    assert len(set(versions.tolist())) == 2
    assert slow.train_mask[slow.loss_mask].tolist() == (versions == versions.max()).tolist()
    (row,) = (row for row in result.rows if row["step"] == scripted.trained_groups(tmp_path / "run")["g000001"])
    first, second = row["masked_share_by_turn"]
    assert first > second, "a later turn is a younger one"


class FlakyEnv(PacedEnv):
    """Loses its box in the first turn of every fifth task, the first time that it is played."""

    lost: set[int]

    async def areset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """As PacedEnv."""
        self._is_lost = seed is not None and seed % 5 == 0 and seed not in self.lost
        self.lost.add(seed or 0)
        return await super().areset(seed=seed, options=options)

    async def astep(self, action: Message) -> StepResult:
        """As PacedEnv."""
        reply = await super().astep(action)
        if self._is_lost:
            raise SandboxError("the box is gone")
        return reply


class FlakyParts(PacedParts):
    """Parts with such environments."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._lost: set[int] = set()

    def make_env(self) -> PacedEnv:
        """As PacedParts."""
        env = FlakyEnv(self._pace, self._duration_s)
        env.lost = self._lost
        return env


@pytest.mark.parametrize("on_lag", RULES)
def test_real_rollouts_with_heavy_tails_and_retries_keep_the_bound(tmp_path: Path, on_lag: OnLag) -> None:
    """Another attempt has newer tokens, and is due when its group is. Checked token by token."""
    trainer = {"on_lag": on_lag, "max_lag": 3, "groups_per_step": 4, "max_in_flight_groups": 12, "max_steps": 16}
    setup = PacedSetup(
        name="flaky",
        times=np.minimum(np.random.default_rng(5).lognormal(-0.5, 1.0, 2000), 6.0),
        trainer=trainer,
        steps=0.1,
        unit_s=0.08,
        turn=0.5,
        tokens_per_unit=16,
        generation_share=0.1,
    )
    run = in_virtual_time(play_paced(setup, tmp_path / "run", model=MODEL, parts_type=FlakyParts))
    assert run.max_lag <= 3
    assert run.num_unexplained == 0
    assert run.result.summary["events"]["infra_retries"] >= 5
    for group in groups(tmp_path / "run", "trained"):
        assert group["oldest_version"] >= group["min_policy_version"]
        assert on_lag != "wait" or group["step"] - 1 <= group["min_policy_version"] + 3
    offered = run.consumed()
    assert (len(run.trained()) < len(offered)) == (on_lag == "drop")
    assert (run.total("num_tokens_masked") > 0) == (on_lag == "mask")
    ratio = run.result.rows[-1]["trained_length_ratio"]
    assert ratio == pytest.approx(run.trained().num_tokens.mean() / offered.num_tokens.mean())
    assert (ratio < 0.95) == (on_lag == "drop")

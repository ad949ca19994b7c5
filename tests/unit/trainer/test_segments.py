"""Trajectories are cut into training rows: sampled tokens, each in one segment only."""

import numpy as np
import pytest

from driftgym.trainer.buffer import Batch
from driftgym.trainer.segments import (
    batch_segments,
    group_segments,
    mask_stale,
    segments_of,
    without_zero_variance,
)
from driftgym.types import Completion, Message, Task, Trajectory, TrajectoryGroup, TrajectoryStatus, Turn


def _turn(prompt, sampled, *, versions=None, rewrites_context=False, kv_min=None, reward=0.0):
    completion = Completion(
        request_id="r",
        token_ids=sampled,
        logprobs=[-0.1 * (index + 1) for index in range(len(sampled))],
        policy_versions=versions or [3] * len(sampled),
        finish_reason="stop",
        kv_min_policy_version=kv_min,
    )
    return Turn(
        new_prompt_token_ids=prompt,
        completion=completion,
        action=Message(role="assistant", content="x"),
        rewrites_context=rewrites_context,
        reward=reward,
    )


def _trajectory(*turns, reward=1.0, member=1, group_id="g0"):
    return Trajectory(
        trajectory_id=f"{group_id}-{member}-0",
        group_id=group_id,
        member=member,
        attempt=0,
        task_id="t0",
        turns=turns,
        status=TrajectoryStatus.ENV_ERROR if reward is None else TrajectoryStatus.COMPLETED,
        reward=reward,
    )


def _group(*rewards, group_id="g0"):
    members = [_trajectory(_turn([1], [5, 6]), reward=r, member=m, group_id=group_id) for m, r in enumerate(rewards)]
    return TrajectoryGroup(group_id=group_id, task=Task(task_id="t0", env_id="e"), trajectories=tuple(members))


def test_one_segment_holds_every_turn_in_the_order_the_model_saw_it():
    # A prompt with a worked example: assistant turns in it are prompt all the same.
    trajectory = _trajectory(_turn([1, 2, 3, 4], [10, 11]), _turn([5, 6], [12], versions=[5]))
    (segment,) = segments_of(trajectory, advantage=0.5)
    assert segment.token_ids.tolist() == [1, 2, 3, 4, 10, 11, 5, 6, 12]
    assert segment.loss_mask.tolist() == [False] * 4 + [True] * 2 + [False] * 2 + [True]
    assert segment.behaviour_logprobs.tolist() == np.float32([0, 0, 0, 0, -0.1, -0.2, 0, 0, -0.1]).tolist()
    assert segment.policy_versions.tolist() == [-1, -1, -1, -1, 3, 3, -1, -1, 5]
    assert segment.advantages.tolist() == [0, 0, 0, 0, 0.5, 0.5, 0, 0, 0.5]
    assert segment.loss_mask.sum() == trajectory.num_sampled_tokens
    assert (segment.behaviour_logprobs[segment.loss_mask] < 0).all()


def test_a_rewritten_context_starts_a_new_segment():
    trajectory = _trajectory(
        _turn([1], [10]),
        _turn([1, 9], [11, 12], rewrites_context=True),
        _turn([4], [13]),
        _turn([2], [14], rewrites_context=True),
    )
    segments = segments_of(trajectory, advantage=1.0)
    assert [segment.token_ids.tolist() for segment in segments] == [[1, 10], [1, 9, 11, 12, 4, 13], [2, 14]]
    assert [segment.segment_index for segment in segments] == [0, 1, 2]
    assert {segment.trajectory_id for segment in segments} == {"g0-1-0"}
    assert sum(int(segment.loss_mask.sum()) for segment in segments) == trajectory.num_sampled_tokens


def test_a_part_without_sampled_tokens_gives_no_row():
    trajectory = _trajectory(_turn([1], []), _turn([2], [10], rewrites_context=True))
    (segment,) = segments_of(trajectory, advantage=1.0)
    assert segment.token_ids.tolist() == [2, 10]
    assert segment.segment_index == 0
    assert segments_of(_trajectory(), advantage=1.0) == []


def test_an_empty_completion_within_a_segment_keeps_its_prompt():
    (segment,) = segments_of(_trajectory(_turn([1], []), _turn([2], [10])), advantage=1.0)
    assert segment.token_ids.tolist() == [1, 2, 10]


def test_tokens_on_an_older_kv_cache_are_not_exact():
    trajectory = _trajectory(_turn([1], [10, 11, 12], versions=[3, 4, 5], kv_min=3), _turn([2], [13]))
    (segment,) = segments_of(trajectory, advantage=1.0)
    assert segment.exact_mask.tolist() == [False, True, False, False, False, True]
    assert segment.train_mask.tolist() == segment.loss_mask.tolist()


def test_stale_tokens_leave_the_train_mask_and_nothing_else():
    trajectory = _trajectory(_turn([1], [10, 11, 12], versions=[3, 5, 6]))
    (segment,) = segments_of(trajectory, advantage=1.0)
    masked = mask_stale(segment, now=7, max_lag=2)
    assert masked.train_mask.tolist() == [False, False, True, True]
    assert masked.loss_mask.tolist() == segment.loss_mask.tolist()
    assert mask_stale(segment, now=7, max_lag=4).train_mask.tolist() == [False, True, True, True]
    assert not mask_stale(segment, now=7, max_lag=0).train_mask.any()


def test_masking_never_adds_a_token_back():
    (segment,) = segments_of(_trajectory(_turn([1], [10, 11], versions=[3, 5])), advantage=1.0)
    twice = mask_stale(mask_stale(segment, now=7, max_lag=2), now=7, max_lag=9)
    assert twice.train_mask.tolist() == [False, False, True]


def test_each_turn_may_have_an_advantage_of_its_own():
    trajectory = _trajectory(_turn([1, 2], [10, 11]), _turn([3], [12]), _turn([4], [13, 14], rewrites_context=True))
    first, second = segments_of(trajectory, advantage=[0.5, -1.0, 2.0])
    assert first.advantages.tolist() == [0, 0, 0.5, 0.5, 0, -1.0]
    assert second.advantages.tolist() == [0, 2.0, 2.0]
    with pytest.raises(ValueError, match="zip"):
        segments_of(trajectory, advantage=[0.5, -1.0])


def test_the_rows_of_a_group_are_its_scored_members():
    rows = group_segments(_group(1.0, None, 0.0, 1.0), method="group_mean")
    assert [row.trajectory_id for row in rows] == ["g0-0-0", "g0-2-0", "g0-3-0"]
    assert [row.reward for row in rows] == [1.0, 0.0, 1.0]
    assert {row.group_id for row in rows} == {"g0"}
    assert [row.advantages[1] for row in rows] == pytest.approx([1 / 3, -2 / 3, 1 / 3])
    assert group_segments(_group(None, None), method="leave_one_out") == []
    with pytest.raises(ValueError, match="whole batch"):
        group_segments(_group(1.0, 0.0), method="batch_normalised")


def test_the_rows_of_a_batch_are_scaled_together():
    groups = [_group(1.0, 0.0, group_id="g0"), _group(5.0, 1.0, group_id="g1"), _group(1.0, 1.0, group_id="g2")]
    rows = batch_segments(groups, method="batch_normalised")
    std = (2 * (0.5**2 + 2.0**2) / 4) ** 0.5
    expected = [0.5 / std, -0.5 / std, 2.0 / std, -2.0 / std, 0.0, 0.0]
    assert [row.advantages[1] for row in rows] == pytest.approx(expected, abs=1e-5)


def test_turns_are_credited_one_by_one():
    members = [
        _trajectory(_turn([1], [5], reward=1.0), _turn([2], [6]), member=0),
        _trajectory(_turn([1], [5]), _turn([2], [6], reward=1.0), member=1),
    ]
    group = TrajectoryGroup(group_id="g0", task=Task(task_id="t0", env_id="e"), trajectories=tuple(members))
    rows = group_segments(group, method="group_mean", credit="turn")
    assert [row.advantages.tolist() for row in rows] == [[0, 0, 0, -0.5], [0, 0, 0, 0.5]]
    assert [row.advantages.any() for row in group_segments(group, method="group_mean")] == [False, False]


def test_groups_that_tell_nothing_leave_the_batch_or_stay_in_it_with_advantage_0():
    groups = tuple(
        _group(*rewards, group_id=f"g{index}")
        for index, rewards in enumerate([[1.0, 1.0], [1.0, 0.0], [0.3, None], [None, None]])
    )
    batch = Batch(groups=groups, dropped=groups[:1])
    assert without_zero_variance(batch, zero_variance="keep", credit="episode") == batch
    kept = batch_segments(groups, method="group_mean")
    assert [row.advantages[1] for row in kept] == [0.0, 0.0, 0.5, -0.5, 0.0]
    filtered = without_zero_variance(batch, zero_variance="filter", credit="episode")
    assert [group.group_id for group in filtered.groups] == ["g1"]
    assert [group.group_id for group in filtered.filtered] == ["g0", "g2", "g3"]
    assert filtered.dropped == batch.dropped

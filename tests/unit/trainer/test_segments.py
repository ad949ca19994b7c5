"""Trajectories are cut into training rows: sampled tokens, each in one segment only."""

import numpy as np

from driftgym.trainer.segments import mask_stale, segments_of
from driftgym.types import Completion, Message, Trajectory, TrajectoryStatus, Turn


def _turn(prompt, sampled, *, versions=None, rewrites_context=False, kv_min=None):
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
    )


def _trajectory(*turns):
    return Trajectory(
        trajectory_id="g0-1-0",
        group_id="g0",
        member=1,
        attempt=0,
        task_id="t0",
        turns=turns,
        status=TrajectoryStatus.COMPLETED,
        reward=1.0,
    )


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

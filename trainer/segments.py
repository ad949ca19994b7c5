"""Trajectories become training rows."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from driftgym.trainer.advantages import AdvantageMethod, group_advantages
from driftgym.types import BoolArray, Completion, Segment, Trajectory, TrajectoryGroup, Turn


def segments_of(trajectory: Trajectory, *, advantage: float) -> list[Segment]:
    """The training rows of a trajectory: one, and a further one wherever its context was rewritten.

    The loss mask is true on the tokens that the engine sampled, and each of them is in one segment only. The prompt
    of a turn is the whole of the turn before and what was added, or, where the context was rewritten, what was added
    alone. A part in which nothing was sampled gives no row.

    Args:
        trajectory: what happened.
        advantage: given to each sampled token.
    """
    parts: list[list[Turn]] = []
    for turn in trajectory.turns:
        if turn.rewrites_context or not parts:
            parts.append([])
        parts[-1].append(turn)
    sampled = [part for part in parts if any(len(turn.completion.token_ids) for turn in part)]
    return [_segment(part, trajectory, segment_index=index, advantage=advantage) for index, part in enumerate(sampled)]


def group_segments(group: TrajectoryGroup, *, method: AdvantageMethod) -> list[Segment]:
    """The training rows of a group: its scored members, each with its advantage over its siblings."""
    rewards = [trajectory.reward for trajectory in group.trajectories]
    advantages = group_advantages(rewards, method=method)
    return [
        segment
        for trajectory, advantage in zip(group.trajectories, advantages, strict=True)
        if advantage is not None
        for segment in segments_of(trajectory, advantage=advantage)
    ]


def mask_stale(segment: Segment, *, now: int, max_lag: int) -> Segment:
    """`segment` with the tokens whose lag is above `max_lag` left out of its `train_mask`.

    Args:
        segment: a training row.
        now: the trainer's policy version at the optimizer step that will train it.
        max_lag: tokens of this lag still stay in.
    """
    fresh = now - segment.policy_versions <= max_lag
    return dataclasses.replace(segment, train_mask=segment.train_mask & fresh)


def _segment(turns: Sequence[Turn], trajectory: Trajectory, *, segment_index: int, advantage: float) -> Segment:
    loss_mask = _join(turns, False, lambda completion: np.ones(len(completion.token_ids), dtype=np.bool_))
    token_ids = [ids for turn in turns for ids in (turn.new_prompt_token_ids, turn.completion.token_ids)]
    return Segment(
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.group_id,
        reward=trajectory.reward or 0.0,
        segment_index=segment_index,
        token_ids=np.concatenate(token_ids),
        loss_mask=loss_mask,
        behaviour_logprobs=_join(turns, 0.0, lambda completion: completion.logprobs),
        policy_versions=_join(turns, -1, lambda completion: completion.policy_versions),
        advantages=np.where(loss_mask, advantage, 0.0),
        exact_mask=_join(turns, False, _exact),
    )


def _join(turns: Sequence[Turn], filler: float, of_completion: Callable[[Completion], NDArray[Any]]) -> NDArray[Any]:
    """[L] `filler` on prompt tokens, and on the sampled ones what `of_completion` says."""
    pieces: list[NDArray[Any]] = []
    for turn in turns:
        sampled = of_completion(turn.completion)
        pieces += [np.full(len(turn.new_prompt_token_ids), filler, dtype=sampled.dtype), sampled]
    return np.concatenate(pieces)


def _exact(completion: Completion) -> BoolArray:
    """[L] true where the token rests on KV of its own version, so that re-scoring reproduces its log-prob."""
    oldest = completion.kv_min_policy_version
    if oldest is None:
        return np.ones(len(completion.token_ids), dtype=np.bool_)
    return np.asarray(completion.policy_versions <= oldest)

"""Trajectories become training rows."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from driftgym.trainer.advantages import AdvantageMethod
from driftgym.trainer.buffer import Batch
from driftgym.trainer.credit import Credit, tells_apart, turn_advantages
from driftgym.types import BoolArray, Completion, Segment, Trajectory, TrajectoryGroup, Turn, float32_array

ZeroVariance: TypeAlias = Literal["keep", "filter"]


def segments_of(trajectory: Trajectory, *, advantage: float | Sequence[float]) -> list[Segment]:
    """The training rows of a trajectory: one, and a further one wherever its context was rewritten.

    The loss mask is true on the tokens that the engine sampled, and each of them is in one segment only. The prompt
    of a turn is the whole of the turn before and what was added, or, where the context was rewritten, what was added
    alone. A part in which nothing was sampled gives no row.

    Args:
        trajectory: what happened.
        advantage: given to each sampled token; or [turns], given to those of each turn.
    """
    by_turn = [advantage] * len(trajectory.turns) if isinstance(advantage, float | int) else advantage
    parts: list[list[tuple[Turn, float]]] = []
    for turn, value in zip(trajectory.turns, by_turn, strict=True):
        if turn.rewrites_context or not parts:
            parts.append([])
        parts[-1].append((turn, value))
    sampled = [part for part in parts if any(len(turn.completion.token_ids) for turn, _ in part)]
    return [_segment(part, trajectory, segment_index=index) for index, part in enumerate(sampled)]


def group_segments(group: TrajectoryGroup, *, method: AdvantageMethod, credit: Credit = "episode") -> list[Segment]:
    """The training rows of a group: its scored members, each with its advantage over its siblings.

    Raises:
        ValueError: the method needs the whole batch, or a reward is not finite.
        TrainingError: see `advantages.group_advantages`.
    """
    if method == "batch_normalised":
        raise ValueError("batch_normalised is of a whole batch: see batch_segments")
    return batch_segments([group], method=method, credit=credit)


def batch_segments(
    groups: Sequence[TrajectoryGroup], *, method: AdvantageMethod, credit: Credit = "episode"
) -> list[Segment]:
    """The training rows of a batch: the scored members of its groups, with their advantages.

    Raises:
        ValueError: a reward is not finite.
        TrainingError: see `advantages.group_advantages`.
    """
    return [
        segment
        for group, advantages in zip(groups, turn_advantages(groups, method=method, credit=credit), strict=True)
        for trajectory, of_turns in zip(group.trajectories, advantages, strict=True)
        if of_turns is not None
        for segment in segments_of(trajectory, advantage=of_turns)
    ]


def without_zero_variance(batch: Batch, *, zero_variance: ZeroVariance, credit: Credit) -> Batch:
    """`batch` with its zero-variance groups filtered out, or with `keep` as it is."""
    if zero_variance == "keep":
        return batch
    kept = tuple(group for group in batch.groups if tells_apart(group, credit=credit))
    filtered = tuple(group for group in batch.groups if group not in kept)
    return dataclasses.replace(batch, groups=kept, filtered=filtered)


def mask_stale(segment: Segment, *, now: int, max_lag: int) -> Segment:
    """`segment` with the tokens whose lag is above `max_lag` left out of its `train_mask`.

    Args:
        segment: a training row.
        now: the trainer's policy version at the optimizer step that will train it.
        max_lag: tokens of this lag still stay in.
    """
    fresh = now - segment.policy_versions <= max_lag
    return dataclasses.replace(segment, train_mask=segment.train_mask & fresh)


def not_finite(segments: Sequence[Segment]) -> list[str]:
    """The trajectories of which a trained token has a log-prob or an advantage that is not finite, each once.

    A log-prob of minus infinity is no less a fault than a NaN: a token of probability 0 cannot have been sampled.
    Bounds on ratios would hide it.
    """
    named = [
        segment.trajectory_id
        for segment in segments
        if not np.isfinite(segment.advantages[segment.train_mask]).all()
        or not np.isfinite(segment.behaviour_logprobs[segment.train_mask]).all()
    ]
    return list(dict.fromkeys(named))


def _segment(part: Sequence[tuple[Turn, float]], trajectory: Trajectory, *, segment_index: int) -> Segment:
    turns = [turn for turn, _ in part]
    token_ids = [ids for turn in turns for ids in (turn.new_prompt_token_ids, turn.completion.token_ids)]
    advantages = [
        np.repeat([0.0, advantage], [len(turn.new_prompt_token_ids), len(turn.completion.token_ids)])
        for turn, advantage in part
    ]
    return Segment(
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.group_id,
        reward=trajectory.reward or 0.0,
        segment_index=segment_index,
        token_ids=np.concatenate(token_ids),
        loss_mask=_join(turns, False, lambda completion: np.ones(len(completion.token_ids), dtype=np.bool_)),
        behaviour_logprobs=_join(turns, 0.0, lambda completion: completion.logprobs),
        policy_versions=_join(turns, -1, lambda completion: completion.policy_versions),
        advantages=float32_array(np.concatenate(advantages)),
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

"""The supervised warm-up: cross entropy on demonstrations, mixed with random tokens said twice.

A model of random weights learns the format of an episode within a few hundred steps. What holds it up is copying (the
answer repeats what the tool returned): rows in which a span of random tokens is said twice, with the loss on the second
saying, teach it directly.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from driftgym.trainer.batching import Row
from driftgym.trainer.learner_config import WarmupConfig
from driftgym.trainer.objectives import token_weights
from driftgym.types import Segment, float32_array

_COPY_NUM_TOKENS = 30
_RAMP_FRACTION = 0.05
_FINAL_LEARNING_RATE = 0.1


def warmup_batches(
    demonstrations: Sequence[Segment], *, config: WarmupConfig, ordinary_token_ids: Sequence[int], seed: int
) -> Iterator[list[Row]]:
    """`config.num_steps` batches of rows. Every demonstration is seen once before any is seen again.

    Args:
        demonstrations: rows whose sampled tokens are to be imitated; advantages and versions do not matter.
        config: sizes and shares.
        ordinary_token_ids: what the copied spans are drawn from.
        seed: of the order and of the spans.

    Raises:
        ValueError: there is no demonstration.
    """
    if not demonstrations:
        raise ValueError("the warm-up needs demonstrations, and has none")
    rng = np.random.default_rng(seed)
    num_copies = round(config.copy_fraction * config.batch_size)
    wanted = config.batch_size - num_copies
    order: list[int] = []
    for _ in range(config.num_steps):
        while len(order) < wanted:
            order += rng.permutation(len(demonstrations)).tolist()
        chosen, order = order[:wanted], order[wanted:]
        segments = [imitated(demonstrations[index]) for index in chosen]
        segments += [copy_segment(rng, ordinary_token_ids, number=number) for number in range(num_copies)]
        weights = token_weights([int(s.loss_mask.sum()) for s in segments], normalisation="token")
        yield [Row(segment=s, token_weight=weight) for s, weight in zip(segments, weights, strict=True)]


def imitated(segment: Segment) -> Segment:
    """`segment` with advantage 1 on each sampled token: `reinforce` is then the cross entropy."""
    return dataclasses.replace(
        segment, advantages=float32_array(segment.loss_mask), train_mask=segment.loss_mask, exact_mask=segment.loss_mask
    )


def copy_segment(rng: np.random.Generator, ordinary_token_ids: Sequence[int], *, number: int) -> Segment:
    """A span of random tokens said twice, with the loss on the second saying; `number` tells those of a batch apart."""
    span = rng.choice(np.asarray(ordinary_token_ids), size=_COPY_NUM_TOKENS)
    second = np.arange(2 * _COPY_NUM_TOKENS) >= _COPY_NUM_TOKENS
    return Segment(
        trajectory_id=f"copy-{number}",
        segment_index=0,
        token_ids=np.concatenate([span, span]),
        loss_mask=second,
        behaviour_logprobs=float32_array(np.zeros(len(second))),
        policy_versions=np.where(second, 0, -1),
        advantages=float32_array(second),
    )


def warmup_learning_rate(config: WarmupConfig, step: int) -> float:
    """Of step `step`, from 0: a linear rise over the first twentieth, then a linear fall to a tenth."""
    ramp = max(1, round(_RAMP_FRACTION * config.num_steps))
    if step < ramp:
        return config.learning_rate * (step + 1) / ramp
    progress = (step - ramp) / max(1, config.num_steps - ramp)
    return config.learning_rate * (1.0 - (1.0 - _FINAL_LEARNING_RATE) * progress)

"""`BatchShape`: the sizes of a whole batch, by which the losses of its tokens are divided. No torch."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from driftgym.types import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """How many sampled tokens, sequences and prompts a batch has; `objectives.token_weights` divides by them.

    A batch that is given in several parts has one shape, made from all of it: each part then gets the weights that it
    would have in one piece.

    >>> BatchShape.of_lengths([3, 5, 0, 2], groups=["a", "a", "b", None]).num_prompts
    2
    """

    num_tokens: int
    """Sampled tokens, trained or not."""
    num_sequences: int
    """Sequences that have any."""
    num_prompts: int
    """Groups that have any; a sequence without a group is one of its own."""
    tokens_by_group: Mapping[Hashable, int]
    """The sampled tokens of each group."""

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> "BatchShape":
        """The shape of the batch that `segments` are all of."""
        return cls.of_lengths(sampled_lengths(segments), groups=group_names(segments))

    @classmethod
    def of_lengths(cls, num_tokens: Sequence[int], *, groups: Sequence[Hashable | None] = ()) -> "BatchShape":
        """The shape of a batch.

        Args:
            num_tokens: the sampled tokens of each sequence.
            groups: the group of each; None: it has none. Empty: none has one.

        Raises:
            ValueError: `groups` is of another length.
        """
        groups = groups or [None] * len(num_tokens)
        if len(groups) != len(num_tokens):
            raise ValueError(f"{len(num_tokens)} sequences, but the groups of {len(groups)}")
        totals: Counter[Hashable] = Counter()
        num_alone = 0
        for group, num in zip(groups, num_tokens, strict=True):
            if group is None:
                num_alone += num > 0
            else:
                totals[group] += num
        return cls(
            num_tokens=sum(num_tokens),
            num_sequences=sum(num > 0 for num in num_tokens),
            num_prompts=num_alone + sum(total > 0 for total in totals.values()),
            tokens_by_group=dict(totals),
        )

    def holds(self, part: "BatchShape") -> bool:
        """True when a part of this shape can be a part of this batch."""
        sizes = (
            (part.num_tokens, self.num_tokens),
            (part.num_sequences, self.num_sequences),
            (part.num_prompts, self.num_prompts),
            *((num, self.tokens_by_group.get(group, 0)) for group, num in part.tokens_by_group.items()),
        )
        return all(small <= large for small, large in sizes)


def sampled_lengths(segments: Sequence[Segment]) -> list[int]:
    """The number of sampled tokens of each segment."""
    return [int(segment.loss_mask.sum()) for segment in segments]


def group_names(segments: Sequence[Segment]) -> list[Hashable | None]:
    """The group of each segment; None where it has none."""
    return [segment.group_id or None for segment in segments]

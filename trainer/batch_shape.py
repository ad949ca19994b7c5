"""`BatchShape`: the sizes of a whole batch, by which the losses of its tokens are divided. No torch."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from driftgym.types import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """How many sampled tokens, sequences and prompts a batch has; `objectives.token_weights` divides by them.

    A sequence is a trajectory, in as many rows as it was cut into. A batch that is given in several parts has one
    shape, made from all of it: each part then gets the weights that it would have in one piece.

    >>> BatchShape.of_lengths([3, 5, 0, 2], groups=["a", "a", "b", None]).num_prompts
    2
    >>> BatchShape.of_lengths([3, 5, 2], sequences=["x", "x", "y"]).num_sequences
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
    tokens_by_sequence: Mapping[Hashable, int]
    """The sampled tokens of each sequence."""

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> "BatchShape":
        """The shape of the batch that `segments` are all of."""
        return cls.of_lengths(
            sampled_lengths(segments), groups=group_names(segments), sequences=sequence_names(segments)
        )

    @classmethod
    def of_lengths(
        cls, num_tokens: Sequence[int], *, groups: Sequence[Hashable | None] = (), sequences: Sequence[Hashable] = ()
    ) -> "BatchShape":
        """The shape of a batch.

        Args:
            num_tokens: the sampled tokens of each row.
            groups: the group of each; None: it has none. Empty: none has one.
            sequences: the sequence of each. Empty: each is one of its own.

        Raises:
            ValueError: `groups` or `sequences` is of another length.
        """
        groups = groups or [None] * len(num_tokens)
        sequences = sequences or range(len(num_tokens))
        if len(groups) != len(num_tokens):
            raise ValueError(f"{len(num_tokens)} sequences, but the groups of {len(groups)}")
        if len(sequences) != len(num_tokens):
            raise ValueError(f"{len(num_tokens)} rows, but the sequences of {len(sequences)}")
        by_group: Counter[Hashable] = Counter()
        by_sequence: Counter[Hashable] = Counter()
        alone: Counter[Hashable] = Counter()
        for group, sequence, num in zip(groups, sequences, num_tokens, strict=True):
            by_sequence[sequence] += num
            if group is None:
                alone[sequence] += num
            else:
                by_group[group] += num
        return cls(
            num_tokens=sum(num_tokens),
            num_sequences=_num_above_0(by_sequence),
            num_prompts=_num_above_0(alone) + _num_above_0(by_group),
            tokens_by_group=dict(by_group),
            tokens_by_sequence=dict(by_sequence),
        )

    def holds(self, part: "BatchShape") -> bool:
        """True when a part of this shape can be a part of this batch."""
        sizes = (
            (part.num_tokens, self.num_tokens),
            (part.num_sequences, self.num_sequences),
            (part.num_prompts, self.num_prompts),
            *((num, self.tokens_by_group.get(group, 0)) for group, num in part.tokens_by_group.items()),
            *((num, self.tokens_by_sequence.get(name, 0)) for name, num in part.tokens_by_sequence.items()),
        )
        return all(small <= large for small, large in sizes)

    def cuts_a_sequence(self, part: "BatchShape") -> bool:
        """True when `part` has some of the tokens of a sequence of this batch, and not all."""
        return any(0 < num < self.tokens_by_sequence.get(name, 0) for name, num in part.tokens_by_sequence.items())


def sampled_lengths(segments: Sequence[Segment]) -> list[int]:
    """The number of sampled tokens of each segment."""
    return [int(segment.loss_mask.sum()) for segment in segments]


def group_names(segments: Sequence[Segment]) -> list[Hashable | None]:
    """The group of each segment; None where it has none."""
    return [segment.group_id or None for segment in segments]


def sequence_names(segments: Sequence[Segment]) -> list[Hashable]:
    """The sequence of each segment: its trajectory, of which it may be one row of several."""
    return [(segment.group_id, segment.trajectory_id) for segment in segments]


def _num_above_0(counts: Mapping[Hashable, int]) -> int:
    return sum(count > 0 for count in counts.values())

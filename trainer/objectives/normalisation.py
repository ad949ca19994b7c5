"""How the losses of tokens are added up."""

from collections.abc import Hashable, Iterable, Sequence

from driftgym.trainer.batch_shape import BatchShape
from driftgym.trainer.objective_config import Normalisation


def token_weights(
    num_tokens: Sequence[int],
    *,
    normalisation: Normalisation,
    groups: Sequence[Hashable | None] = (),
    sequences: Sequence[Hashable] = (),
    fixed_num_tokens: int | None = None,
    batch: BatchShape | None = None,
) -> list[float]:
    """The weight w of each token of each row, so that the loss of the batch is Σ w·l.

    With n the sampled tokens of a sequence (trained or not; of all its rows), N their sum, B the sequences that have
    any, m the sum of n over the group and P the groups that have any:

    - `token`: 1 / N. Every token counts the same (DAPO arXiv:2503.14476).
    - `sequence`: 1 / (B·n). Every sequence counts the same (GRPO arXiv:2402.03300).
    - `prompt`: 1 / (P·m). Every prompt counts the same, and within it every token (ScaleRL arXiv:2510.13786).
    - `fixed`: 1 / (B·fixed_num_tokens). No sequence's length enters (Dr. GRPO arXiv:2503.20783).

    Made from the whole batch before any token is left out: a split into micro-batches, calls or ranks, and what lag
    rules and objectives mask, never change what a token counts.

    Args:
        num_tokens: the sampled tokens of each row.
        normalisation: one of the above.
        groups: for `prompt`: the group of each row; None: its sequence is one of its own.
        sequences: the sequence of each row. Empty: each is one of its own, and `batch` is not given.
        fixed_num_tokens: for `fixed` alone.
        batch: the whole batch, where these rows are a part of it; None: they are all of it.

    Raises:
        ValueError: `groups` or `fixed_num_tokens` is missing.
    """
    if normalisation == "prompt" and len(groups) != len(num_tokens):
        raise ValueError(f"token_weights: {len(num_tokens)} sequences, but the groups of {len(groups)}")
    if normalisation == "fixed" and fixed_num_tokens is None:
        raise ValueError("token_weights: normalisation `fixed` needs fixed_num_tokens")
    sequences = sequences or range(len(num_tokens))
    batch = batch or BatchShape.of_lengths(num_tokens, groups=groups, sequences=sequences)
    if not batch.num_tokens:
        return [0.0] * len(num_tokens)
    if normalisation == "token":
        return [1.0 / batch.num_tokens] * len(num_tokens)
    if normalisation == "sequence":
        return _inverses(batch.num_sequences * batch.tokens_by_sequence.get(name, 0) for name in sequences)
    if normalisation == "prompt":
        of_sequence, of_group = batch.tokens_by_sequence, batch.tokens_by_group
        return _inverses(
            batch.num_prompts * (of_sequence.get(name, 0) if group is None else of_group.get(group, 0))
            for group, name in zip(groups, sequences, strict=True)
        )
    assert fixed_num_tokens is not None
    return [1.0 / (batch.num_sequences * fixed_num_tokens)] * len(num_tokens)


def _inverses(divisors: Iterable[int]) -> list[float]:
    """0 for a divisor of 0: there is no token to weigh."""
    return [1.0 / divisor if divisor else 0.0 for divisor in divisors]

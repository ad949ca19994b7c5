"""How the losses of tokens are added up."""

from collections import Counter
from collections.abc import Hashable, Sequence

from driftgym.trainer.objective_config import Normalisation


def token_weights(
    num_tokens: Sequence[int],
    *,
    normalisation: Normalisation,
    groups: Sequence[Hashable] = (),
    fixed_num_tokens: int | None = None,
) -> list[float]:
    """The weight w of each token of each sequence, so that the loss of the batch is Σ w·l.

    With n the sampled tokens of a sequence (trained or not), N their sum, B the sequences that have any, m the sum of
    n over the group and P the groups that have any:

    - `token`: 1 / N. Every token counts the same (DAPO arXiv:2503.14476).
    - `sequence`: 1 / (B·n). Every sequence counts the same (GRPO arXiv:2402.03300).
    - `prompt`: 1 / (P·m). Every prompt counts the same, and within it every token (ScaleRL arXiv:2510.13786).
    - `fixed`: 1 / (B·fixed_num_tokens). No sequence's length enters (Dr. GRPO arXiv:2503.20783).

    Made from the whole batch before any token is left out: a split into micro-batches or ranks, and what lag rules and
    objectives mask, never change what a token counts.

    Args:
        num_tokens: n of each sequence of the whole batch.
        normalisation: one of the above.
        groups: for `prompt`: the group of each sequence.
        fixed_num_tokens: for `fixed` alone.

    Raises:
        ValueError: `groups` or `fixed_num_tokens` is missing.
    """
    num_sequences = sum(num > 0 for num in num_tokens)
    total = sum(num_tokens)
    if not total:
        return [0.0] * len(num_tokens)
    if normalisation == "token":
        return [1.0 / total] * len(num_tokens)
    if normalisation == "sequence":
        return [1.0 / (num_sequences * num) if num else 0.0 for num in num_tokens]
    if normalisation == "prompt":
        return _by_prompt(num_tokens, groups)
    if fixed_num_tokens is None:
        raise ValueError("token_weights: normalisation `fixed` needs fixed_num_tokens")
    return [1.0 / (num_sequences * fixed_num_tokens)] * len(num_tokens)


def _by_prompt(num_tokens: Sequence[int], groups: Sequence[Hashable]) -> list[float]:
    if len(groups) != len(num_tokens):
        raise ValueError(f"token_weights: {len(num_tokens)} sequences, but the groups of {len(groups)}")
    totals: Counter[Hashable] = Counter()
    for group, num in zip(groups, num_tokens, strict=True):
        totals[group] += num
    num_prompts = sum(total > 0 for total in totals.values())
    return [1.0 / (num_prompts * totals[group]) if totals[group] else 0.0 for group in groups]

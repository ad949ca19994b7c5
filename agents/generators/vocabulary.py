"""Which token ids a model knows: an id that it does not know can end an engine, so none is sent."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def checked_ids(token_ids: Sequence[int], vocab_size: int | None) -> list[int]:
    """`token_ids` as JSON takes them.

    Args:
        token_ids: [P] a prompt.
        vocab_size: ids from there on are refused; None refuses negative ones alone.

    Raises:
        ValueError: the prompt is empty, or holds an id that the model does not know.
    """
    ids = np.asarray(token_ids, dtype=np.int64).reshape(-1)
    if len(ids) == 0:
        raise ValueError("the prompt is empty")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or (vocab_size is not None and high >= vocab_size):
        raise ValueError(f"the prompt has ids outside of the vocabulary of {vocab_size}: {low} to {high}")
    return ids.tolist()


def read_vocab_size(model_folder: str) -> int | None:
    """The vocabulary of the model in a folder, from its `config.json`; None when that cannot be read."""
    try:
        config = json.loads(Path(model_folder, "config.json").read_bytes())
        size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
    return size if isinstance(size, int) else None

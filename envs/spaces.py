"""`Unicode`: the space of texts. Gymnasium's `Text` takes an alphabet of letters and refuses ordinary sentences."""

from collections.abc import Iterable
from typing import Any

import gymnasium
import numpy as np

DEFAULT_MAX_LENGTH = 1 << 20
_MAX_SAMPLE_LENGTH = 64
_FIRST_SURROGATE, _LAST_SURROGATE = 0xD800, 0xDFFF
# One range per length of a character in UTF-8, each as likely: a uniform draw would hardly ever give ASCII.
_RANGES = ((0x20, 0x7F), (0x80, 0x800), (0x800, 0x10000), (0x10000, 0x110000))


class Unicode(gymnasium.Space[str]):
    """Every text of at most `max_length` Unicode scalar values: any character but a lone surrogate.

    >>> Unicode(max_length=8).contains("Zürich")
    True
    """

    def __init__(self, *, max_length: int = DEFAULT_MAX_LENGTH, seed: int | np.random.Generator | None = None) -> None:
        """The space of texts of at most `max_length` characters. Raises ValueError when that is below 1."""
        if max_length < 1:
            raise ValueError(f"Unicode: max_length must be at least 1, got {max_length}")
        self.max_length = max_length
        super().__init__(seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """False: texts have no fixed length."""
        return False

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> str:
        """A text of at most 64 characters, of every script. Raises ValueError when given a mask or probabilities."""
        if mask is not None or probability is not None:
            raise ValueError("Unicode: sample takes no mask and no probability")
        length = int(self.np_random.integers(0, min(self.max_length, _MAX_SAMPLE_LENGTH), endpoint=True))
        return "".join(self._sample_character() for _ in range(length))

    def _sample_character(self) -> str:
        low, high = _RANGES[int(self.np_random.integers(len(_RANGES)))]
        code = int(self.np_random.integers(low, high))
        is_surrogate = _FIRST_SURROGATE <= code <= _LAST_SURROGATE
        return "\N{REPLACEMENT CHARACTER}" if is_surrogate else chr(code)

    def contains(self, x: Any) -> bool:
        """True when `x` is a text of this space."""
        return isinstance(x, str) and len(x) <= self.max_length and is_scalar_text(x)

    def to_jsonable(self, sample_n: Iterable[str]) -> list[str]:
        """The texts themselves."""
        return list(sample_n)

    def from_jsonable(self, sample_n: list[Any]) -> list[str]:
        """The texts themselves."""
        return [str(text) for text in sample_n]

    def __eq__(self, other: object) -> bool:
        """True for a space of the same texts."""
        return isinstance(other, Unicode) and other.max_length == self.max_length

    def __hash__(self) -> int:
        return hash((Unicode, self.max_length))

    def __repr__(self) -> str:
        return f"Unicode(max_length={self.max_length})"


def is_scalar_text(text: str) -> bool:
    """True when `text` holds no lone surrogate, so that it can be encoded.

    >>> is_scalar_text("\\ud800")
    False
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def scalar_text(text: str) -> str:
    """`text` with each lone surrogate replaced by U+FFFD.

    >>> scalar_text("a\\ud800") == "a\\N{REPLACEMENT CHARACTER}"
    True
    """
    if is_scalar_text(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

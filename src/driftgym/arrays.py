"""One-dimensional read-only arrays: what the nouns hold of tokens."""

from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
BoolArray = NDArray[np.bool_]

_Scalar = TypeVar("_Scalar", bound=np.generic)


def int32_array(values: ArrayLike) -> Int32Array:
    """`values` as a read-only one-dimensional int32 array."""
    return _read_only(np.asarray(values, dtype=np.int32).reshape(-1))


def float32_array(values: ArrayLike) -> Float32Array:
    """`values` as a read-only one-dimensional float32 array."""
    return _read_only(np.asarray(values, dtype=np.float32).reshape(-1))


def bool_array(values: ArrayLike) -> BoolArray:
    """`values` as a read-only one-dimensional bool array."""
    return _read_only(np.asarray(values, dtype=np.bool_).reshape(-1))


def _read_only(array: NDArray[_Scalar]) -> NDArray[_Scalar]:
    view = array.view()
    view.flags.writeable = False
    return view

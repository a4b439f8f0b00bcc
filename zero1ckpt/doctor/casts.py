"""Main params as the model's dtype holds them, as bits: numpy has no bfloat16."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.casting import BITS, cast_bits, one_nan

__all__ = ["BITS", "cast", "exact_in_bfloat16", "one_nan", "ulps_apart", "widen"]

Array = NDArray[Any]


def cast(values: Array, dtype: str) -> Array:
    """Float32 values rounded to ``dtype`` as torch does (to nearest, ties to even), as bits; NaNs all alike. Pure."""
    made = np.empty(values.shape, BITS[dtype])
    if values.size:
        cast_bits(_flat(values), "float32", dtype, _flat(made))
    return one_nan(made, dtype)


def _flat(values: Array) -> memoryview:
    """The bytes of an array, in its order."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def widen(bits: Array, dtype: str) -> Array:
    """The float32 values of a weight's bits. Pure."""
    if dtype == "float32":
        return bits.view(np.float32)
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def exact_in_bfloat16(values: Array) -> bool:
    """Whether bfloat16 can hold every value as it is. Pure."""
    return not (values.view(np.uint32) & 0xFFFF).any()


def ulps_apart(a: Array, b: Array, dtype: str) -> Array:
    """How many representable numbers lie between each two, by their bits; the sign counts through zero, and two NaNs
    are one. Pure.
    """
    apart: Array = np.abs(_ordered(one_nan(a, dtype)) - _ordered(one_nan(b, dtype)))
    return apart


def _ordered(bits: Array) -> Array:
    half = 1 << (8 * bits.dtype.itemsize - 1)
    wide = bits.astype(np.int64)
    return np.where(wide >= half, half - wide, wide)

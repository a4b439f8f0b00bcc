"""Main params as the model's dtype holds them, as bits: numpy has no bfloat16."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["BITS", "cast", "exact_in_bfloat16", "ulps_apart", "widen"]

Array = NDArray[Any]
BITS: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.uint32),
    "float16": np.dtype(np.uint16),
    "bfloat16": np.dtype(np.uint16),
}
"""The unsigned type that holds a weight's bits, of the dtypes that have a cast."""


def cast(values: Array, dtype: str) -> Array:
    """Float32 values rounded to ``dtype`` as torch does (to nearest, ties to even), as bits. Pure."""
    if dtype == "float32":
        return values.view(np.uint32)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


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


def ulps_apart(a: Array, b: Array) -> Array:
    """How many representable numbers lie between each two, by their bits; the sign counts through zero. Pure."""
    apart: Array = np.abs(_ordered(a) - _ordered(b))
    return apart


def _ordered(bits: Array) -> Array:
    half = 1 << (8 * bits.dtype.itemsize - 1)
    wide = bits.astype(np.int64)
    return np.where(wide >= half, half - wide, wide)

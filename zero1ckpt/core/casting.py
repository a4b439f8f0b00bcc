"""Casts of float values by their bits: numpy only, bfloat16 as its 16-bit patterns."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["BITS", "cast_bits", "one_nan", "same_after_cast"]

BITS: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.uint32),
    "float16": np.dtype(np.uint16),
    "bfloat16": np.dtype(np.uint16),
}
"""The unsigned type that holds a weight's bits, of the dtypes that have a cast."""

_BLOCK = 2**13
"""Values that are cast at once, so that what numpy makes on the way stays small."""
_EXPONENT = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F80_0000}


def cast_bits(data: memoryview, dtype: str, to: str, out: memoryview) -> int:
    """Casts values from one float dtype to another, to the nearest, ties to even; the number that became infinite.

    Rule: IEEE 754-2019 section 4.3.1, as torch's ``.to()``, which takes float64 through float32 to the 16-bit dtypes.
    A NaN becomes a quiet NaN (torch has several, by device and by vector length).
    """
    raw = np.uint16 if dtype == "bfloat16" else np.dtype(dtype)
    values = np.frombuffer(data, raw)
    target = np.frombuffer(out, np.uint16 if to == "bfloat16" else np.dtype(to))
    overflows = 0
    with np.errstate(over="ignore", invalid="ignore"):
        for low in range(0, len(values), _BLOCK):
            block = values[low : low + _BLOCK]
            wide = (block.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else block
            made = _narrow(wide, to)
            target[low : low + _BLOCK] = made
            finite = np.isfinite(wide)
            infinite = (made & 0x7FFF) == 0x7F80 if to == "bfloat16" else np.isinf(made)
            overflows += int((finite & infinite).sum())
    return overflows


def _narrow(values: npt.NDArray[Any], to: str) -> npt.NDArray[Any]:
    if to in ("float64", "float32"):
        return values.astype(to)
    single = values.astype(np.float32)
    if to == "float16":
        return single.astype(np.float16)
    bits = single.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    made: npt.NDArray[Any] = np.where(np.isnan(single), 0x7FC0, rounded).astype(np.uint16)
    return made


def same_after_cast(values: memoryview, dtype: str, weights: memoryview, to: str) -> npt.NDArray[np.bool_]:
    """Which values, cast to the weights' dtype, have the weights' bits. Two NaNs are equal: which one a cast makes
    depends on the device.
    """
    kind = BITS[to]
    stored = np.frombuffer(weights, kind)
    made = np.empty(len(stored), kind)
    if dtype == to:
        made[:] = np.frombuffer(values, kind)
    else:
        cast_bits(values, dtype, to, memoryview(made.view(np.uint8).data))
    same: npt.NDArray[np.bool_] = (made == stored) | (_is_nan(made, to) & _is_nan(stored, to))
    return same


def one_nan(bits: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """Bits of ``dtype`` with one quiet NaN for all: what is then equal is equal to ``same_after_cast``. Pure."""
    nan = _is_nan(bits, dtype)
    if not nan.any():
        return bits
    quiet = _EXPONENT[dtype] | (_EXPONENT[dtype] & -_EXPONENT[dtype]) >> 1
    return np.where(nan, bits.dtype.type(quiet), bits)


def _is_nan(bits: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.bool_]:
    kind, exponent = BITS[dtype].type, _EXPONENT[dtype]
    found: npt.NDArray[np.bool_] = (bits & kind(exponent | (exponent & -exponent) - 1)) > kind(exponent)
    return found

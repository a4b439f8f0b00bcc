"""What can be said of stored numbers from their bits: without torch, for bfloat16 too.

Rule: IEEE 754-2019 section 3.4 (a value with all exponent bits set is an infinity or NaN); bfloat16 is the upper half
of a binary32.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["first_negative", "first_nonfinite"]

_FLOATS: dict[str, tuple[type[np.unsignedinteger], int, int]] = {
    "float64": (np.uint64, 0x7FF0_0000_0000_0000, 0x8000_0000_0000_0000),
    "float32": (np.uint32, 0x7F80_0000, 0x8000_0000),
    "float16": (np.uint16, 0x7C00, 0x8000),
    "bfloat16": (np.uint16, 0x7F80, 0x8000),
}


def first_nonfinite(data: memoryview, dtype: str) -> int | None:
    """Index of the first infinity or NaN, or None; None for dtypes that have none."""
    row = _FLOATS.get(dtype)
    if row is None:
        return None
    kind, exponent, _ = row
    bits = np.frombuffer(data, kind)
    return _first((bits & kind(exponent)) == kind(exponent))


def first_negative(data: memoryview, dtype: str) -> int | None:
    """Index of the first value below zero (minus zero is not), or None."""
    row = _FLOATS.get(dtype)
    if row is None:
        return None
    kind, exponent, sign = row
    bits = np.frombuffer(data, kind)
    magnitude = bits & kind(sign - 1)
    return _first((bits >= kind(sign)) & (magnitude != 0) & (magnitude <= kind(exponent)))


def _first(mask: npt.NDArray[np.bool_]) -> int | None:
    at = int(mask.argmax()) if mask.size else 0
    return at if mask.size and mask[at] else None

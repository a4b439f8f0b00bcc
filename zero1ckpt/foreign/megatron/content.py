"""Which weights a stretch of main params may be: its cast has their first and last elements, and, where several units
have, all elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...core.casting import cast_bits
from .weights import Unit, Weights

__all__ = ["Content", "ReadMain"]

ReadMain = Callable[[int, int], "bytearray | bytes"]
"""Bytes of elements [start, start + size) of the main params of a bucket."""

_ENDS = 64
"""Elements at each end that are looked at first."""
_WINDOW = 2**20
_FLOATS = {"bfloat16": ("<u2", 0x7F80, 0x7FFF), "float16": ("<u2", 0x7C00, 0x7FFF), "float32": ("<u4", 0x7F80_0000, -1)}


@dataclass
class Content:
    """Looks units up by content. ``main_dtype``: of the main params as stored."""

    units: Sequence[Unit]
    weights: Weights
    main_dtype: str
    _index: dict[tuple[str, int], dict[bytes, list[int]]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        sizes: dict[tuple[str, int], list[int]] = {}
        for i, unit in enumerate(self.units):
            sizes.setdefault((unit.dtype, unit.numel), []).append(i)
        self._sizes = sizes

    def numels(self, dtype: str) -> set[int]:
        """Sizes, in elements, that units of a dtype have."""
        return {numel for kind, numel in self._sizes if kind == dtype and numel}

    def of_size(self, dtype: str, numel: int) -> tuple[int, ...]:
        return tuple(self._sizes.get((dtype, numel), ()))

    def matches(self, read: ReadMain, start: int, numel: int, dtype: str) -> tuple[int, ...]:
        """Units of a dtype that elements [start, start + numel) of ``read`` may be."""
        if (dtype, numel) not in self._sizes or dtype not in _FLOATS:
            return ()
        found = self._ends(dtype, numel).get(self._ends_of_main(read, start, numel, dtype), ())
        if len(found) > 1 and numel > 2 * _ENDS:
            return tuple(unit for unit in found if self.equal(read, start, unit))
        return tuple(found)

    def equal(self, read: ReadMain, start: int, unit: int) -> bool:
        """Whether all elements are those of a unit."""
        own = self.units[unit]
        for at in range(0, own.numel, _WINDOW):
            size = min(_WINDOW, own.numel - at)
            stored = _plain(bytes(self.weights.read(own.boxes, at, size)), own.dtype)
            if self._cast(read(start + at, size), own.dtype) != stored:
                return False
        return True

    def _ends(self, dtype: str, numel: int) -> dict[bytes, list[int]]:
        """Units of one dtype and size by their first and last elements; read when first asked for."""
        table = self._index.get((dtype, numel))
        if table is None:
            table = self._index[dtype, numel] = {}
            for unit in self._sizes[dtype, numel]:
                table.setdefault(self._ends_of_unit(unit), []).append(unit)
        return table

    def _ends_of_unit(self, index: int) -> bytes:
        unit = self.units[index]
        size = min(_ENDS, unit.numel)
        first = self.weights.read(unit.boxes, 0, size)
        last = self.weights.read(unit.boxes, unit.numel - size, size)
        return _plain(bytes(first), unit.dtype) + _plain(bytes(last), unit.dtype)

    def _ends_of_main(self, read: ReadMain, start: int, numel: int, dtype: str) -> bytes:
        size = min(_ENDS, numel)
        first = self._cast(read(start, size), dtype)
        return first + self._cast(read(start + numel - size, size), dtype)

    def _cast(self, data: bytes | bytearray, dtype: str) -> bytes:
        if self.main_dtype == dtype:
            return _plain(bytes(data), dtype)
        values = memoryview(data)
        made = bytearray(len(np.frombuffer(values, _numpy(self.main_dtype))) * np.dtype(_FLOATS[dtype][0]).itemsize)
        cast_bits(values, self.main_dtype, dtype, memoryview(made))
        return _plain(bytes(made), dtype)


def _numpy(dtype: str) -> str:
    return {"float64": "<f8", "float32": "<f4"}.get(dtype, "<u2")


def _plain(data: bytes, dtype: str) -> bytes:
    """The bytes with one pattern for all NaNs: which one a cast makes depends on the device."""
    code, exponent, _ = _FLOATS[dtype]
    bits = np.frombuffer(data, code)
    top = np.array(exponent, bits.dtype)
    magnitude = bits & np.array(exponent | ((exponent & -exponent) - 1), bits.dtype)
    nan = magnitude > top
    if not nan.any():
        return data
    return np.where(nan, magnitude.dtype.type(exponent + 1), bits).astype(bits.dtype).tobytes()

"""N-dimensional boxes and flat ranges of a row-major array, and grids of blocks that are both at once.

A block grid cuts an array into boxes of one shape. Where a block's shape is ``(1, ..., 1, k, n, ..., m)``, with every
axis behind ``k`` whole, each block is one run of the flattened array and the blocks follow each other in it: a
``RunGrid``. Chunks of tensors are chosen so here, since what a data-parallel rank owns of a tensor is a run of it too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from .ranges import IntColumn, Range

__all__ = ["Box", "RunGrid", "block_shape", "range_boxes"]


@dataclass(frozen=True, slots=True)
class Box:
    """The elements ``start[i] <= x[i] < start[i] + shape[i]``."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(low, low + n) for low, n in zip(self.start, self.shape, strict=True))


def range_boxes(shape: Sequence[int], flat: Range) -> Iterator[Box]:
    """The fewest boxes that hold a range of the flattened array, in its order: at most two an axis, less one. Pure."""
    if flat.size == 0:
        return
    if len(shape) < 2:
        yield Box((flat.start,), (flat.size,)) if shape else Box((), ())
        return
    row = prod(shape[1:])
    first, last = -(-flat.start // row), flat.end // row
    if first > last:  # inside one row
        yield from _row_boxes(shape, last, flat.shift(-last * row))
        return
    if flat.start < first * row:
        yield from _row_boxes(shape, first - 1, Range(flat.start - (first - 1) * row, row))
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if last * row < flat.end:
        yield from _row_boxes(shape, last, Range(0, flat.end - last * row))


def _row_boxes(shape: Sequence[int], row: int, flat: Range) -> Iterator[Box]:
    for box in range_boxes(shape[1:], flat):
        yield Box((row, *box.start), (1, *box.shape))


def block_shape(shape: Sequence[int], most: int) -> tuple[int, ...]:
    """The largest block of at most ``most`` elements (or of one) that is one run of the flattened array. Pure.

    Along the axis that is cut, blocks are equal where a number of half to all of that many steps divides it, else as
    equal as they can be: what a block has beyond the array's end is small.
    """
    inner = 1
    for axis in reversed(range(len(shape))):
        length = max(shape[axis], 1)
        if inner * length > most:
            step = _even_step(length, max(most // inner, 1))
            return (*(1 for _ in range(axis)), step, *(max(n, 1) for n in shape[axis + 1 :]))
        inner *= length
    return tuple(max(n, 1) for n in shape)


def _even_step(length: int, most: int) -> int:
    """The largest divisor of ``length`` from half of ``most`` on, looked for among steps or counts, what is fewer."""
    least = (most - 1) // 2 + 1
    if most <= length // most:
        steps = np.arange(most, least - 1, -1)
        even = steps[length % steps == 0]
    else:
        counts = np.arange(-(-length // most), length // least + 1)
        even = length // counts[length % counts == 0]
    return int(even[0]) if len(even) else -(-length // -(-length // most))


@dataclass(frozen=True)
class RunGrid:
    """Blocks of a row-major array that are runs of it. Blocks are counted in row-major order, as are elements.

    ``shape``: of the array, no axis empty. ``block``: of a block; the axes behind the first that is not 1 are whole (or
    longer than the array's). Raises ``ValueError`` for a block that is no run.
    """

    shape: tuple[int, ...]
    block: tuple[int, ...]

    def __post_init__(self) -> None:
        whole = all(b >= n for b, n in zip(self.block[self.axis + 1 :], self.shape[self.axis + 1 :], strict=True))
        if len(self.block) != len(self.shape) or min(self.shape, default=1) < 1 or not whole:
            raise ValueError(f"blocks of shape {self.block} are no runs of an array of shape {self.shape}")

    @cached_property
    def axis(self) -> int:
        """The axis that is cut: the first along which a block is longer than 1."""
        return next((i for i, n in enumerate(self.block) if n > 1), max(len(self.block) - 1, 0))

    @cached_property
    def inner(self) -> int:
        """Elements of a step along the axis that is cut."""
        return prod(self.shape[self.axis + 1 :])

    @cached_property
    def row(self) -> int:
        """Elements of the axis that is cut with all behind it: blocks begin anew with each."""
        return prod(self.shape[self.axis :])

    @cached_property
    def run(self) -> int:
        """Elements of a block that does not reach over the array's end."""
        return self.inner * (self.block[self.axis] if self.block else 1)

    @cached_property
    def per_row(self) -> int:
        return -(-self.row // self.run)

    @cached_property
    def count(self) -> int:
        return prod(self.shape) // self.row * self.per_row

    def index(self, block: int) -> tuple[int, ...]:
        """Place of a block in the grid of blocks."""
        if not self.shape:
            return ()
        outer, along = divmod(block, self.per_row)
        before = np.unravel_index(outer, self.shape[: self.axis]) if self.axis else ()
        return (*(int(i) for i in before), along, *(0 for _ in self.shape[self.axis + 1 :]))

    def range(self, block: int) -> Range:
        """The elements of a block that the array has."""
        outer, along = divmod(block, self.per_row)
        start = outer * self.row + along * self.run
        return Range(start, min(start + self.run, (outer + 1) * self.row))

    def find(self, element: int) -> int:
        """The block that holds an element of the flattened array."""
        outer, inside = divmod(element, self.row)
        return outer * self.per_row + inside // self.run

    @property
    def columns(self) -> IntColumn:
        """``row``, ``run`` and ``per_row``: all that ``range`` and ``find`` of many elements at once need."""
        return np.array([self.row, self.run, self.per_row], np.int64)

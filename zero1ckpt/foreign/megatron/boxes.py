"""Placement of params whose pieces are N-dimensional boxes: tensor-parallel cuts, stacked layers, fused gates.

A box of a param is a set of runs of the flattened param; the box's own elements, row by row, lie in one chunk or in
several fragments of it. Runs are computed for the tensor that is asked for, never for all: a column-cut weight has one
for each of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import prod

import numpy as np

from ...core.boxes import Box
from ...core.ranges import IntColumn
from ...model.catalog import Extents
from .entries import Chunks

__all__ = ["BoxPiece", "BoxPlacement", "box_runs"]


@dataclass(frozen=True, slots=True)
class BoxPiece:
    """Elements [start, start + size) of the flattened ``box`` of a (param, slot) lie in ``chunk`` from byte ``at`` on.

    ``box`` is in the coordinates of the param's own shape.
    """

    param: int
    slot: int
    box: Box
    start: int
    size: int
    chunk: int
    at: int = 0


def box_runs(shape: Sequence[int], box: Box) -> tuple[IntColumn, int]:
    """Where the runs of a box begin in the flattened array, in order, and the elements of each. Pure."""
    axis = len(shape)
    while axis > 0 and box.shape[axis - 1] == shape[axis - 1]:
        axis -= 1
    axis = max(axis - 1, 0)  # along this axis, and whole behind it, elements follow each other
    strides = [*accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1)][::-1] if shape else []
    starts = np.array([sum(s * n for s, n in zip(box.start, strides, strict=True))], np.int64)
    for d in range(axis):
        steps = np.arange(box.shape[d], dtype=np.int64) * strides[d]
        starts = (starts[:, None] + steps[None, :]).reshape(-1)
    return starts, prod(box.shape[axis:])


@dataclass(frozen=True)
class BoxPlacement:
    """Where boxes lie (``model.catalog.Placement``); blobs are chunks.

    ``shapes``: of the params, in the catalog's order. ``itemsizes``: bytes an element, by slot.
    """

    shapes: tuple[tuple[int, ...], ...]
    itemsizes: tuple[int, ...]
    pieces: tuple[BoxPiece, ...]
    chunks: Chunks

    @property
    def blob_count(self) -> int:
        return len(self.chunks)

    def blob_key(self, blob: int) -> str:
        return self.chunks.file(blob)

    def payload_nbytes(self, blob: int) -> int:
        return int(self.chunks.nbytes[blob])

    def extents(self, blob: int) -> Extents:
        rows = [self._rows(index) for index in self._of_chunk.get(blob, ())]
        found = Extents.concatenate(rows)
        return found.take(np.argsort(found.at, kind="stable"))

    def locate(self, param: IntColumn, slot: IntColumn, start: IntColumn, size: IntColumn) -> tuple[IntColumn, Extents]:
        tensor = param * len(self.itemsizes) + slot
        asked = np.flatnonzero((param >= 0) & (slot >= 0) & (size > 0))
        order = asked[np.argsort(tensor[asked], kind="stable")]
        bounds = np.flatnonzero(np.diff(tensor[order], prepend=-1, append=-1)) if len(order) else np.empty(0, np.int64)
        rows, tables = [], []
        for low, high in pairwise(bounds.tolist()):
            group = order[low:high]
            row, found = _cut(self._runs_of(int(tensor[group[0]])), start[group], (start + size)[group])
            rows.append(group[row])
            tables.append(found)
        row = np.concatenate(rows) if rows else np.empty(0, np.int64)
        table = Extents.concatenate(tables)
        sequence = np.lexsort((table.start, row))
        return row[sequence], table.take(sequence)

    @cached_property
    def _of_tensor(self) -> dict[int, list[int]]:
        index: dict[int, list[int]] = {}
        for i, piece in enumerate(self.pieces):
            index.setdefault(piece.param * len(self.itemsizes) + piece.slot, []).append(i)
        return index

    @cached_property
    def _of_chunk(self) -> dict[int, list[int]]:
        index: dict[int, list[int]] = {}
        for i, piece in enumerate(self.pieces):
            index.setdefault(piece.chunk, []).append(i)
        return index

    @cached_property
    def _runs_of(self) -> Callable[[int], Extents]:
        """A cache that lives as long as the placement."""
        return lru_cache(maxsize=16)(self._sorted_runs)

    def _sorted_runs(self, tensor: int) -> Extents:
        """All runs of one tensor, by where they begin in it."""
        found = Extents.concatenate([self._rows(index) for index in self._of_tensor.get(tensor, ())])
        return found.take(np.argsort(found.start, kind="stable"))

    def _rows(self, index: int) -> Extents:
        """The runs of one piece: those of its box, cut where the piece begins and ends."""
        piece = self.pieces[index]
        item = self.itemsizes[piece.slot]
        starts, run = box_runs(self.shapes[piece.param], piece.box)
        inside = np.arange(len(starts), dtype=np.int64) * run
        low = np.maximum(inside, piece.start)
        high = np.minimum(inside + run, piece.start + piece.size)
        keep = np.flatnonzero(high > low)
        low, high, inside, starts = low[keep], high[keep], inside[keep], starts[keep]
        count = len(keep)
        at = piece.at + (low - piece.start) * item
        return Extents(
            np.full(count, piece.param, np.int64),
            np.full(count, piece.slot, np.int64),
            starts + low - inside,
            high - low,
            np.full(count, piece.chunk, np.int64),
            at,
            (high - low) * item,
        )


def _cut(runs: Extents, start: IntColumn, end: IntColumn) -> tuple[IntColumn, Extents]:
    """Parts of sorted runs of one tensor that lie in the asked ranges, and which range each is for."""
    low = np.searchsorted(runs.start + runs.size, start, side="right")
    high = np.searchsorted(runs.start, end, side="left")
    count = np.maximum(high - low, 0)
    row = np.repeat(np.arange(len(start)), count)
    found = runs.take(np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + np.repeat(low, count))
    begin = np.maximum(found.start, start[row])
    stop = np.minimum(found.start + found.size, end[row])
    item = found.nbytes // np.maximum(found.size, 1)
    return row, Extents(
        found.param,
        found.slot,
        begin,
        stop - begin,
        found.blob,
        found.at + (begin - found.start) * item,
        (stop - begin) * item,
    )

"""Bytes that are carried over: runs of a file of the source, bytes made here, and weights that main params are cast to.

All items of a target are one part of its copy: params of raw bytes, blob ``i`` is item ``i``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ....core.boxes import Box
from ....core.casting import cast_bits
from ....core.errors import CorruptError
from ....core.ranges import IntColumn
from ....encodings.torch_archive import tensor_itemsize
from ....model.catalog import Catalog, Extents, TablePlacement
from ....model.protocols import Source, Store
from ....model.state import ParamSpec, PartState, SlotSpec
from ..boxes import box_runs
from ..entries import Place

__all__ = [
    "CastItem",
    "FileItem",
    "Item",
    "ItemSource",
    "Items",
    "MadeItem",
    "Piece",
    "SliceItem",
    "box_ranges",
    "read_piece",
]


class Item(Protocol):
    """A run of bytes."""

    @property
    def nbytes(self) -> int: ...

    def read(self, at: int, buffers: Sequence[memoryview]) -> None:
        """Fills ``buffers`` one after the other from byte ``at`` on. Raises ``CorruptError``, ``MissingError``."""

    def label(self) -> str: ...


@dataclass(frozen=True, slots=True)
class FileItem:
    """Bytes of a file; ``place`` may read a header to know where they begin."""

    store: Store
    place: Callable[[], Place]
    nbytes: int

    def read(self, at: int, buffers: Sequence[memoryview]) -> None:
        file, begin = self.place()
        self.store.readv_into(file, begin + at, buffers)

    def label(self) -> str:
        return self.store.label(self.place()[0])


@dataclass(frozen=True, slots=True)
class MadeItem:
    """Bytes in memory."""

    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def read(self, at: int, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            buffer[:] = self.data[at : at + buffer.nbytes]
            at += buffer.nbytes

    def label(self) -> str:
        return "(made here)"


@dataclass(frozen=True, slots=True)
class SliceItem:
    """Bytes [begin, begin + nbytes) of another item."""

    whole: Item
    begin: int
    nbytes: int

    def read(self, at: int, buffers: Sequence[memoryview]) -> None:
        self.whole.read(self.begin + at, buffers)

    def label(self) -> str:
        return self.whole.label()


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of an array that lies in a param: the array of ``shape`` begins at element ``begin`` of the flattened
    param.
    """

    param: int
    begin: int
    shape: tuple[int, ...]
    box: Box

    def ranges(self, low: int, high: int) -> tuple[IntColumn, IntColumn]:
        """First element in the flattened param, and size, of the runs of elements [low, high) of the flattened box."""
        return box_ranges(self.begin, self.shape, self.box, low, high)


def box_ranges(begin: int, shape: Sequence[int], box: Box, low: int, high: int) -> tuple[IntColumn, IntColumn]:
    """The runs of elements [low, high) of a flattened box of an array of ``shape`` that begins at element ``begin``:
    where each begins, and its size. Pure.
    """
    starts, run = box_runs(shape, box)
    first, last = low // run, -(-high // run)
    inside = np.arange(first, last, dtype=np.int64) * run
    start = np.maximum(inside, low)
    end = np.minimum(inside + run, high)
    return begin + starts[first:last] + start - inside, end - start


def read_piece(catalog: Catalog, source: Source, slot: int, piece: Piece, low: int, high: int) -> NDArray[np.uint8]:
    """The bytes of elements [low, high) of a piece of one slot. Raises ``CorruptError`` where not all are stored."""
    item = catalog.state.slots[slot].itemsize
    starts, sizes = piece.ranges(low, high)
    param, slots = np.full(len(starts), piece.param, np.int64), np.full(len(starts), slot, np.int64)
    row, found = catalog.placement.locate(param, slots, starts, sizes)
    offset = np.cumsum(sizes) - sizes
    at = (offset[row] + found.start - starts[row]) * item
    ends = at + found.nbytes
    if not len(row) or at[0] or ends[-1] != (high - low) * item or (at[1:] != ends[:-1]).any():
        raise CorruptError(
            f"slot {catalog.state.slots[slot].name} is not covered exactly once by the source",
            param=catalog.state.params[piece.param].name,
        )
    data = np.empty((high - low) * item, np.uint8)
    view = memoryview(data.data)
    for blob, byte, begin, end in zip(found.blob.tolist(), found.at.tolist(), at.tolist(), ends.tolist(), strict=True):
        source.read_run(blob, byte, [view[begin:end]])
    return data


@dataclass(frozen=True, slots=True)
class CastItem:
    """Elements of a model weight: those of a piece of its main param (float32), cast to ``dtype``."""

    catalog: Catalog
    source: Source
    slot: int
    piece: Piece
    dtype: str

    @property
    def nbytes(self) -> int:
        return self.piece.box.size * tensor_itemsize(self.dtype)

    def read(self, at: int, buffers: Sequence[memoryview]) -> None:
        item = tensor_itemsize(self.dtype)
        end = at + sum(buffer.nbytes for buffer in buffers)
        low, high = at // item, -(-end // item)
        single = read_piece(self.catalog, self.source, self.slot, self.piece, low, high)
        whole = memoryview(np.empty((high - low) * item, np.uint8).data)
        cast_bits(memoryview(single.data), "float32", self.dtype, whole)
        made = whole[at - low * item :]
        for buffer in buffers:
            buffer[:] = made[: buffer.nbytes]
            made = made[buffer.nbytes :]

    def label(self) -> str:
        return self.catalog.state.params[self.piece.param].name


@dataclass(frozen=True)
class ItemSource:
    """``model.protocols.Source`` of items."""

    items: tuple[Item, ...]

    def label(self, blob: int) -> str:
        return self.items[blob].label()

    def read_run(self, blob: int, at: int, buffers: Sequence[memoryview]) -> None:
        self.items[blob].read(at, buffers)

    def view(self, blob: int, at: int, nbytes: int) -> memoryview | None:
        return None

    def segments(self, blob: int) -> IntColumn:
        return np.empty(0, np.int64)

    def pieces(self, blob: int) -> tuple[IntColumn, Sequence[int]] | None:
        return None


@dataclass(frozen=True)
class Items:
    """The part that all items make up: its state (params of raw bytes) and its catalog as a source."""

    items: tuple[Item, ...]

    @cached_property
    def state(self) -> PartState:
        params = tuple(ParamSpec(str(i), (item.nbytes,), "uint8", "uint8") for i, item in enumerate(self.items))
        return PartState(params, (SlotSpec("bytes", "uint8"),))

    @cached_property
    def catalog(self) -> Catalog:
        sizes = np.array([item.nbytes for item in self.items], np.int64)
        index, zero = np.arange(len(sizes)), np.zeros(len(sizes), np.int64)
        table = Extents(index, zero, zero, sizes, index, zero, sizes)
        keys = tuple(str(i) for i in range(len(sizes)))
        placement = TablePlacement(keys, tuple(sizes.tolist()), table, 1)
        return Catalog("bytes", "bytes", "bytes", self.state, None, placement)

    @property
    def source(self) -> ItemSource:
        return ItemSource(self.items)

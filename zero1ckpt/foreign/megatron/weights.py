"""The model's own tensors: read by boxes, and cut into the params that a model-parallel rank may hold."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from ...core.boxes import Box
from ...core.errors import CorruptError
from ...core.ranges import IntColumn
from ...model.catalog import Extents
from .boxes import BoxPiece, BoxPlacement, box_runs
from .entries import ChunkSource, Entries, StoredTensor
from .model import KeyBox
from .stacks import layer_name, stacked_keys

__all__ = ["Unit", "Weights", "read_rows", "units"]

_ITEMSIZES = (1, 2, 4, 8)
_EXPERT = re.compile(r"(?:^|\.)experts\.")
_GATED = re.compile(r"(?:^|\.)linear_fc1\.(?:weight|bias)$")
"""Keys whose tensor may be two halves, of gate and value, each cut by tensor parallelism: ``swiglu`` and the like."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What one param of a model-parallel rank may be: a chunk of the model, by layer, or two chunks of a fused gate.

    ``shape``: of the param in its part, less the axis of experts. ``index``: place along that axis, else None.
    ``boxes`` are its pieces in flattened order.
    """

    name: str
    boxes: tuple[KeyBox, ...]
    shape: tuple[int, ...]
    dtype: str
    expert: bool
    index: int | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def label(self) -> str:
        """Unique name: that of the param, and the expert."""
        return self.name if self.index is None else f"{self.name}[{self.index}]"


def units(entries: Entries, keys: Sequence[str], num_layers: int | None = None) -> tuple[Unit, ...]:
    """All units of the model's tensors, in the order of ``keys``. Pure."""
    tensors = {key: entries.tensors[key] for key in keys}
    stacked = stacked_keys(tensors, num_layers)
    return tuple(
        unit
        for key, tensor in tensors.items()
        for unit in _of_key(tensor, key in stacked, _gate_of(key, tensors, key in stacked))
    )


def _gate_of(key: str, tensors: Mapping[str, StoredTensor], stacked: bool) -> bool | None:
    """Whether the first linear layer of an MLP is a fused gate: tensor parallelism cuts the second one's inputs once a
    rank, and a fused gate twice. None where the cuts do not tell.
    """
    head, _, tail = key.rpartition("linear_fc1.")
    second = tensors.get(f"{head}linear_fc2.weight")
    if not tail or second is None:
        return None
    first = tensors[key]
    axis = -2 if tail == "weight" else -1
    if len(second.shape) < 2 or len(first.shape) < -axis + stacked:
        return None
    rows, columns = _starts(first, axis), _starts(second, -1)
    if len(rows) == len(columns):
        return False
    return True if len(rows) == 2 * len(columns) else None


def _starts(tensor: StoredTensor, axis: int) -> set[int]:
    return set(tensor.offsets[:, axis].tolist())


@dataclass(frozen=True, slots=True)
class _Cell:
    """A box of a tensor within one layer and one expert: their axes are the first ``lead`` of it."""

    box: Box
    lead: int
    layer: int | None
    expert: int | None


def _of_key(tensor: StoredTensor, stacked: bool, gate: bool | None) -> Iterator[Unit]:
    """``gate``: whether two halves are one param, None where it is not known."""
    expert = bool(_EXPERT.search(tensor.key))
    groups: dict[tuple[int | None, int | None], list[_Cell]] = {}
    for cell in _cells(tensor, stacked, expert):
        groups.setdefault((cell.layer, cell.expert), []).append(cell)
    for cells in groups.values():
        pairs = [] if gate is False else list(_halves(tensor, cells))
        singles = [] if gate and len(pairs) * 2 == len(cells) else [(cell,) for cell in cells]
        for pieces in [*singles, *pairs]:
            yield _unit(tensor, pieces, expert)


def _unit(tensor: StoredTensor, pieces: Sequence[_Cell], expert: bool) -> Unit:
    first = pieces[0]
    name = tensor.key if first.layer is None else layer_name(tensor.key, first.layer)
    shape = list(first.box.shape[first.lead :])
    if len(pieces) > 1:
        shape[0] *= len(pieces)
    boxes = tuple(KeyBox(tensor.key, cell.box) for cell in pieces)
    return Unit(name, boxes, tuple(shape), tensor.dtype, expert, first.expert)


def _cells(tensor: StoredTensor, stacked: bool, expert: bool) -> Iterator[_Cell]:
    """Chunks, cut by layers and experts."""
    numbered = expert and not any(part.isdecimal() for part in tensor.key.rpartition("experts.")[2].split("."))
    lead = stacked + (numbered and len(tensor.shape) > stacked + 1)
    for start, size in zip(tensor.offsets.tolist(), tensor.sizes.tolist(), strict=True):
        for index in np.ndindex(*size[:lead]):
            corner = tuple(low + i for low, i in zip(start, index, strict=False))
            box = Box((*corner, *start[lead:]), (*(1 for _ in index), *size[lead:]))
            layer = corner[0] if stacked else None
            yield _Cell(box, lead, layer, corner[-1] if lead > stacked else None)


def _halves(tensor: StoredTensor, cells: Sequence[_Cell]) -> Iterator[tuple[_Cell, _Cell]]:
    """Pairs of cells of which one lies half the axis behind the other: the two halves of one rank's fused gate."""
    lead = cells[0].lead
    if not _GATED.search(tensor.key) or len(tensor.shape) <= lead or tensor.shape[lead] % 2:
        return
    half = tensor.shape[lead] // 2
    by_start = {cell.box.start[lead]: cell for cell in cells}
    for start, cell in by_start.items():
        other = by_start.get(start + half)
        if start < half and other is not None and other.box.shape == cell.box.shape:
            yield cell, other


# ------------------------------------------------------------------------------------------------------------- reading


def read_rows(source: ChunkSource, rows: Extents, out: memoryview) -> None:
    """Fills ``out`` with what consecutive rows of a placement hold; rows that adjoin in a chunk are one read."""
    filled = 0
    pending: list[int] = []  # chunk, at, nbytes
    for _, _, _, _, blob, at, nbytes in rows.rows():
        if pending and pending[0] == blob and pending[1] + pending[2] == at:
            pending[2] += nbytes
            continue
        filled = _flush(source, pending, out, filled)
        pending = [blob, at, nbytes]
    filled = _flush(source, pending, out, filled)
    if filled != len(out):
        raise CorruptError("chunks do not hold all elements of a tensor", found=filled, expected=f"{len(out)} bytes")


def _flush(source: ChunkSource, pending: Sequence[int], out: memoryview, filled: int) -> int:
    if not pending:
        return filled
    blob, at, nbytes = pending
    if filled + nbytes > len(out):
        raise CorruptError("chunks of a tensor overlap", found=filled + nbytes, expected=f"{len(out)} bytes")
    source.read_run(blob, at, [out[filled : filled + nbytes]])
    return filled + nbytes


@dataclass(frozen=True)
class Weights:
    """Reads boxes of the model's tensors."""

    entries: Entries
    keys: tuple[str, ...]

    @property
    def source(self) -> ChunkSource:
        return ChunkSource(self.entries.store, self.entries.chunks)

    def read(self, boxes: Sequence[KeyBox], start: int, size: int) -> bytearray:
        """Bytes of elements [start, start + size) of boxes that follow each other, each flattened."""
        item = self.entries.tensors[boxes[0].key].itemsize
        out = bytearray(size * item)
        view, at = memoryview(out), 0
        for held in boxes:
            low, high = max(start - at, 0), min(start + size - at, held.box.size)
            if high > low:
                begin = (at + low - start) * item
                self._read_box(held, low, high - low, view[begin : begin + (high - low) * item])
            at += held.box.size
        if start + size > at:
            raise CorruptError("a read reaches beyond a weight", param=boxes[0].key)
        return out

    def _read_box(self, held: KeyBox, start: int, size: int, out: memoryview) -> None:
        tensor = self.entries.tensors[held.key]
        chunk = self._chunk_of.get((held.key, held.box.start, held.box.shape))
        if chunk is not None:
            self.source.read_run(chunk, start * tensor.itemsize, [out])
            return
        starts, run = box_runs(tensor.shape, held.box)
        low = np.maximum(np.arange(len(starts), dtype=np.int64) * run, start)
        high = np.minimum(np.arange(1, len(starts) + 1, dtype=np.int64) * run, start + size)
        keep = np.flatnonzero(high > low)
        begin = starts[keep] + low[keep] - keep * run
        _, rows = self._placement.locate(*self._columns(held.key, tensor, len(keep)), begin, (high - low)[keep])
        read_rows(self.source, rows, out)

    def _columns(self, key: str, tensor: StoredTensor, count: int) -> tuple[IntColumn, IntColumn]:
        slot = _ITEMSIZES.index(tensor.itemsize)
        return np.full(count, self._index[key], np.int64), np.full(count, slot, np.int64)

    @cached_property
    def _index(self) -> dict[str, int]:
        return {key: i for i, key in enumerate(self.keys)}

    @cached_property
    def _chunk_of(self) -> dict[tuple[str, tuple[int, ...], tuple[int, ...]], int]:
        return {
            (key, tuple(start), tuple(size)): chunk
            for key in self.keys
            for start, size, chunk in _rows(self.entries.tensors[key])
        }

    @cached_property
    def _placement(self) -> BoxPlacement:
        """All tensors of the model; the slot says the element's size."""
        pieces = []
        for i, key in enumerate(self.keys):
            tensor = self.entries.tensors[key]
            slot = _ITEMSIZES.index(tensor.itemsize)
            for start, size, chunk in _rows(tensor):
                pieces.append(BoxPiece(i, slot, Box(tuple(start), tuple(size)), 0, prod(size), chunk))
        shapes = tuple(self.entries.tensors[key].shape for key in self.keys)
        return BoxPlacement(shapes, _ITEMSIZES, tuple(pieces), self.entries.chunks)


def _rows(tensor: StoredTensor) -> Iterator[tuple[list[int], list[int], int]]:
    yield from zip(tensor.offsets.tolist(), tensor.sizes.tolist(), tensor.chunks.tolist(), strict=True)

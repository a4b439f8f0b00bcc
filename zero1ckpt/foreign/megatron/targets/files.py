"""Files of a target: tensors' archives end to end, or the tensors of one archive, and where their elements come from.

A file is a *blob* of a catalog: its payload is the whole file, its *holes* are the bytes that are copied into it, and
all other bytes (zip structure) follow from the plan and from the holes' CRC-32s. So the copy loop of ``resharding``
streams into these files as into any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import prod

import numpy as np

from ....core.boxes import Box
from ....core.layout import Layout
from ....core.ranges import IntColumn
from ....encodings.dcp_metadata import TensorEntry
from ....encodings.framed_file import FramedFile
from ....encodings.torch_archive import ArchivePlan, plan_tensor
from ....model.catalog import PIECE_BYTES, Catalog, Extents, TablePlacement, piece_cuts
from ....model.manifest import FileEntry, FormatOptions
from ....model.protocols import Area, Source, Store
from ....model.state import PartState
from .items import box_ranges

__all__ = [
    "FILE_BYTES",
    "Cell",
    "ChunkRow",
    "FileFormat",
    "FilePlacement",
    "Fill",
    "TargetFile",
    "TargetPart",
    "pack_chunks",
    "single_archive",
    "tensor_entries",
]

FILE_BYTES = 2**30
"""Files that no rank owns are closed when they hold this much."""


@dataclass(frozen=True, slots=True)
class Fill:
    """What a run of bytes of a file is filled with: a box of an array that lies in a param, row by row.

    The array of ``shape`` begins at element ``begin`` of the flattened (param, slot); of the flattened box it is
    elements [low, high), ``high`` None to its end. ``at`` is the byte of the file.
    """

    param: int
    slot: int
    begin: int
    shape: tuple[int, ...]
    box: Box
    at: int
    low: int = 0
    high: int | None = None

    def moved(self, by: int) -> Fill:
        """The same at another byte."""
        return replace(self, at=self.at + by)

    @classmethod
    def run(cls, param: int, slot: int, start: int, size: int, at: int) -> Fill:
        """Elements [start, start + size) of the flattened (param, slot)."""
        return cls(param, slot, start, (size,), Box((0,), (size,)), at)


@dataclass(frozen=True, slots=True)
class Cell:
    """A hole of a file: bytes [begin, end)."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class TargetFile:
    """A planned file. ``frames``: (byte, archive) of all structure in it, each with its ``holes`` in ``cells``."""

    key: str
    nbytes: int
    cells: tuple[Cell, ...]
    archives: tuple[tuple[int, ArchivePlan], ...]
    fills: tuple[Fill, ...]

    def frames(self, crcs: Sequence[int]) -> list[tuple[int, bytes]]:
        """All bytes outside of holes, with their offsets; runs that touch are one. ``crcs``: of all cells, in order."""
        found: list[tuple[int, bytes]] = []
        crc_of = {cell.begin: crc for cell, crc in zip(self.cells, crcs, strict=True)}
        for begin, plan in self.archives:
            own = [crc_of[begin + hole.offset] for hole in plan.holes]
            for at, run in plan.runs(own):
                if found and found[-1][0] + len(found[-1][1]) == begin + at:
                    found[-1] = (found[-1][0], found[-1][1] + run)
                else:
                    found.append((begin + at, run))
        return found


@dataclass(frozen=True)
class FilePlacement:
    """Where the slices of a part lie in the planned files (``model.catalog.Placement``)."""

    files: tuple[TargetFile, ...]
    itemsizes: tuple[int, ...]

    @property
    def blob_count(self) -> int:
        return len(self.files)

    def blob_key(self, blob: int) -> str:
        return self.files[blob].key

    def payload_nbytes(self, blob: int) -> int:
        return self.files[blob].nbytes

    def extents(self, blob: int) -> Extents:
        rows = [_extents_of(fill, blob, self.itemsizes[fill.slot]) for fill in self.files[blob].fills]
        found = Extents.concatenate([row for row in rows if len(row)])
        return found.take(np.argsort(found.at, kind="stable"))

    def locate(self, param: IntColumn, slot: IntColumn, start: IntColumn, size: IntColumn) -> tuple[IntColumn, Extents]:
        return self._table.locate(param, slot, start, size)

    @cached_property
    def _table(self) -> TablePlacement:
        every = Extents.concatenate([self.extents(blob) for blob in range(self.blob_count)])
        keys = tuple(file.key for file in self.files)
        return TablePlacement(keys, tuple(file.nbytes for file in self.files), every, len(self.itemsizes))


def _extents_of(fill: Fill, blob: int, item: int) -> Extents:
    """The runs of one fill."""
    high = fill.box.size if fill.high is None else fill.high
    if high <= fill.low:
        return Extents.concatenate([])
    starts, sizes = box_ranges(fill.begin, fill.shape, fill.box, fill.low, high)
    count = len(starts)
    return Extents(
        np.full(count, fill.param, np.int64),
        np.full(count, fill.slot, np.int64),
        starts,
        sizes,
        np.full(count, blob, np.int64),
        fill.at + (np.cumsum(sizes) - sizes) * item,
        sizes * item,
    )


class FileFormat:
    """The plug-in that writes planned files (``model.protocols.Format``); it plans nothing itself."""

    keeps_layout = False
    shared_blobs = False
    zero_padding = False

    def __init__(self, name: str, container: str) -> None:
        self.name = name
        self.container = container

    def normalize(self, options: FormatOptions) -> FormatOptions:
        return options.only(self.name)

    def plan(self, state: PartState, layout: Layout | None, part: str, prefix: str, options: FormatOptions) -> Catalog:
        raise NotImplementedError("a Megatron checkpoint is planned as a whole")

    def blob_files(self, catalog: Catalog, blob: int) -> Sequence[str]:
        return [catalog.placement.blob_key(blob)]

    def cuts(self, catalog: Catalog, blob: int) -> IntColumn:
        file = _file(catalog, blob)
        edges = np.array([edge for cell in file.cells for edge in (cell.begin, cell.end)], np.int64)
        pieces = piece_cuts(catalog.placement.extents(blob), file.nbytes, PIECE_BYTES)
        return np.union1d(pieces, edges)

    def stops(self, catalog: Catalog, blob: int) -> IntColumn:
        return np.empty(0, np.int64)

    def source(self, store: Store, catalog: Catalog, files: Mapping[str, FileEntry]) -> Source:
        raise NotImplementedError("Megatron checkpoints are read by foreign.megatron.reading")

    def create(self, area: Area, catalog: Catalog, blob: int) -> FramedFile:
        file = _file(catalog, blob)
        holes = [(cell.begin, cell.end) for cell in file.cells]
        cuts = self.cuts(catalog, blob)
        return FramedFile(area.path(file.key), file.key, cuts, holes, file.frames, create=True, sidecar=False)

    def attach(self, area: Area, catalog: Catalog, blob: int) -> FramedFile:
        raise NotImplementedError("one process writes a Megatron checkpoint")

    def adopt(self, area: Area, catalog: Catalog, blob: int) -> tuple[list[FileEntry], Sequence[int]] | None:
        return None

    def derived(self, catalog: Catalog) -> list[tuple[str, bytes]]:
        return []


def _file(catalog: Catalog, blob: int) -> TargetFile:
    assert isinstance(catalog.placement, FilePlacement)
    return catalog.placement.files[blob]


@dataclass(frozen=True)
class TargetPart:
    """One copy of a target: what is read (``src``, ``source``) and the files that it fills (``dst``)."""

    src: Catalog
    source: Source
    dst: Catalog


# ------------------------------------------------------------------------------------------------------------ planning


@dataclass(frozen=True, slots=True)
class ChunkRow:
    """A chunk of tensor ``key`` before it has a place: its box in the tensor, and what fills it.

    ``fills`` have ``at`` relative to the chunk's first element. ``dtype`` None: ``nbytes`` raw bytes, no archive around
    them (an object's own archive, which is copied).
    """

    key: str
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    fills: tuple[Fill, ...] = ()
    dtype: str | None = None
    nbytes: int = 0


@dataclass(frozen=True)
class Packed:
    """Chunks with their places: ``rows[i]`` lies at bytes [at[i], at[i] + nbytes[i]) of ``files[file[i]]``."""

    files: tuple[TargetFile, ...]
    rows: tuple[ChunkRow, ...]
    file: tuple[int, ...]
    at: tuple[int, ...]
    nbytes: tuple[int, ...]


@dataclass
class _Open:
    """A file while it is filled."""

    used: int = 0
    cells: list[Cell] = field(default_factory=list)
    archives: list[tuple[int, ArchivePlan]] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)

    def add(self, row: ChunkRow, plan: ArchivePlan | None) -> tuple[int, int]:
        at = self.used
        hole = at if plan is None else at + plan.holes[0].offset
        inside = row.nbytes if plan is None else plan.holes[0].nbytes
        self.cells.append(Cell(hole, hole + inside))
        if plan is not None:
            self.archives.append((at, plan))
        self.fills += [fill.moved(hole) for fill in row.fills]
        self.used += row.nbytes if plan is None else plan.nbytes
        return at, self.used - at

    def close(self, key: str) -> TargetFile:
        return TargetFile(key, self.used, tuple(self.cells), tuple(self.archives), tuple(self.fills))


def pack_chunks(groups: Sequence[Sequence[ChunkRow]], name: Callable[[int], str], file_bytes: int | None) -> Packed:
    """Archives end to end: one file a group, or several where ``file_bytes`` bounds them. Pure.

    ``name(i)``: path of the i-th file.
    """
    files: list[TargetFile] = []
    rows: list[ChunkRow] = []
    places: list[tuple[int, int, int]] = []
    for group in groups:
        current = _Open()
        for row in group:
            plan = None if row.dtype is None else _archive(row.dtype, row.sizes)
            size = row.nbytes if plan is None else plan.nbytes
            if file_bytes is not None and current.used and current.used + size > file_bytes:
                files.append(current.close(name(len(files))))
                current = _Open()
            places.append((len(files), *current.add(row, plan)))
            rows.append(row)
        if current.used:
            files.append(current.close(name(len(files))))
    file, at, nbytes = zip(*places, strict=True) if places else ((), (), ())
    return Packed(tuple(files), tuple(rows), tuple(file), tuple(at), tuple(nbytes))


def single_archive(key: str, plan: ArchivePlan, fills: Sequence[Sequence[Fill]]) -> TargetFile:
    """A file that is one archive: ``fills[i]`` are those of its i-th storage, ``at`` from the storage's start. Pure."""
    cells = tuple(Cell(hole.offset, hole.offset + hole.nbytes) for hole in plan.holes)
    placed = tuple(fill.moved(hole.offset) for hole, own in zip(plan.holes, fills, strict=True) for fill in own)
    return TargetFile(key, plan.nbytes, cells, ((0, plan),), placed)


@lru_cache(maxsize=4096)
def _archive(dtype: str, shape: tuple[int, ...]) -> ArchivePlan:
    return plan_tensor(dtype, shape)


def tensor_entries(
    packed: Sequence[tuple[Packed, int]], shapes: Mapping[str, tuple[str, tuple[int, ...]]]
) -> dict[str, TensorEntry]:
    """Entries of ``.metadata``, by key in sorted order; ``packed`` with the number of files before each. Pure.

    ``shapes``: dtype and shape of each tensor.
    """
    found: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], int, int, int]]] = {key: [] for key in shapes}
    for own, before in packed:
        for row, file, at, nbytes in zip(own.rows, own.file, own.at, own.nbytes, strict=True):
            if row.key in found:
                found[row.key].append((row.offset, row.sizes, before + file, at, nbytes))
    return {key: _entry(key, *shapes[key], sorted(found[key])) for key in sorted(found)}


def _entry(
    key: str,
    dtype: str,
    shape: tuple[int, ...],
    rows: Sequence[tuple[tuple[int, ...], tuple[int, ...], int, int, int]],
) -> TensorEntry:
    offsets = np.array([row[0] for row in rows], np.int64).reshape(len(rows), len(shape))
    sizes = np.array([row[1] for row in rows], np.int64).reshape(len(rows), len(shape))
    file, at, nbytes = (np.array([row[i] for row in rows], np.int64) for i in (2, 3, 4))
    entry = TensorEntry(key, dtype, shape, offsets, sizes, file, at, nbytes)
    assert prod(shape) == int(np.prod(sizes, axis=1, dtype=np.int64).sum()), key
    return entry

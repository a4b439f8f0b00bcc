"""``fully_reshardable`` as a zarr version 3 group: ``<param>/<slot>``, one array each in the param's shape.

Specification: formats/fully_reshardable/ZARR.md. A blob is one shard, a file with one writer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from ..core.errors import CorruptError, UsageError
from ..core.layout import Layout
from ..core.ranges import IntColumn
from ..encodings.zarr_array.metadata import COMPRESSIONS, ArraySpec, encode_node, group_node
from ..encodings.zarr_array.reading import ShardSource
from ..encodings.zarr_array.shards import Shard, ShardFile, ShardHeader, read_header
from ..model.catalog import PIECE_BYTES, Catalog, Extents, piece_cuts
from ..model.manifest import FileEntry, FormatOptions, scalar_to_json
from ..model.protocols import Area, Store
from ..model.state import PartState
from ..storage.local import LocalStore
from .fully_reshardable import tensor_name, whole_tensors

__all__ = ["FullyReshardableZarr", "ZarrPlacement", "array_path"]

DEFAULT_CHUNK_BYTES = 2**20
DEFAULT_SHARD_BYTES = 64 * 2**20
"""A shard is held in memory while it is written, twice while it is encoded."""
_NODE = "zarr.json"


def array_path(param: str, slot: str) -> str:
    """Path of an array below the root group: the names as in the safetensors container, and none that is reserved."""
    path = "/".join(_free(name) for name in tensor_name(param, slot).split("/"))
    return f"%70{path[1:]}" if path.startswith("part-") else path  # where the other parts of a checkpoint lie


def _free(name: str) -> str:
    """A name that is no file of a checkpoint, and that zarr and a manifest allow.

    Not empty, not of dots alone, not after ``__``, and without a backslash, which some systems take for a slash.
    """
    if not name:
        return "%"
    name = name.replace("\\", "%5C")
    if not name.strip(".") or name.endswith((".json", ".safetensors")):
        head, _, tail = name.rpartition(".")
        return f"{head}%2E{tail}"
    return f"%5F{name[1:]}" if name.startswith("__") else name


@dataclass(frozen=True)
class ZarrPlacement:
    """Whole tensors by param, then slot, each in shards. A shard is a blob; a tensor without elements has none."""

    state: PartState
    options: FormatOptions
    prefix: str = ""
    _shards: dict[int, Shard] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def pairs(self) -> IntColumn:
        """(param, slot) of each tensor."""
        return np.array(whole_tensors(self.state), np.int64).reshape(-1, 2)

    @cached_property
    def arrays(self) -> list[ArraySpec]:
        made: dict[tuple[tuple[int, ...], str], ArraySpec] = {}
        found = []
        chunk, shard = self.options.chunk_bytes, self.options.shard_bytes
        assert chunk is not None and shard is not None
        for param, slot in self.pairs.tolist():
            key = (self.state.shape_of(param, slot), self.state.slots[slot].dtype)
            if key not in made:
                made[key] = ArraySpec(*key, chunk, shard, self.options.compression)
            found.append(made[key])
        return found

    @cached_property
    def _grids(self) -> IntColumn:
        """By tensor: row, run and count of runs a row of its chunks, then of its shards, then where slices are cut."""
        rows = [self._grid(array) if array.shard_count else [1] * 7 for array in self.arrays]
        return np.array(rows, np.int64).reshape(-1, 7)

    @staticmethod
    def _grid(array: ArraySpec) -> list[int]:
        chunks, shards = array.chunks, array.shards
        whole = chunks.count * chunks.run
        padded = chunks.row % chunks.run != 0
        return [*chunks.columns.tolist(), *shards.columns.tolist(), chunks.row if padded else whole]

    @cached_property
    def _first(self) -> IntColumn:
        """First blob of each tensor, and one more for the end."""
        counts = np.array([array.shard_count for array in self.arrays], np.int64)
        return np.concatenate(([0], np.cumsum(counts))).astype(np.int64)

    @cached_property
    def _tensor_of(self) -> IntColumn:
        """Place of each (param x slots + slot) in the order; -1 where absent."""
        rows = np.full(len(self.state.params) * len(self.state.slots), -1, np.int64)
        rows[self.pairs[:, 0] * len(self.state.slots) + self.pairs[:, 1]] = np.arange(len(self.pairs))
        return rows

    def folder(self, tensor: int) -> str:
        param, slot = self.pairs[tensor].tolist()
        return self.prefix + array_path(self.state.params[param].name, self.state.slots[slot].name)

    def tensor(self, blob: int) -> int:
        """The tensor that a blob is a shard of."""
        return int(np.searchsorted(self._first, blob, side="right")) - 1

    def shard(self, blob: int) -> Shard:
        made = self._shards.get(blob)
        if made is None:
            tensor = self.tensor(blob)
            made = Shard(self.arrays[tensor], blob - int(self._first[tensor]), self.folder(tensor))
            self._shards[blob] = made
        return made

    @property
    def blob_count(self) -> int:
        return int(self._first[-1])

    def blob_key(self, blob: int) -> str:
        return self.shard(blob).key

    def payload_nbytes(self, blob: int) -> int:
        return self.shard(blob).payload_nbytes

    def extents(self, blob: int) -> Extents:
        elements = self.shard(blob).elements
        tensor, start, end = (np.array([n], np.int64) for n in (self.tensor(blob), elements.start, elements.end))
        return self._slices(tensor, start, end)[1]

    def locate(self, param: IntColumn, slot: IntColumn, start: IntColumn, size: IntColumn) -> tuple[IntColumn, Extents]:
        tensor = self._tensor_of[param * len(self.state.slots) + slot]
        asked = np.flatnonzero((tensor >= 0) & (size > 0))
        row, found = self._slices(tensor[asked], start[asked], (start + size)[asked])
        return asked[row], found

    def _slices(self, tensor: IntColumn, start: IntColumn, end: IntColumn) -> tuple[IntColumn, Extents]:
        """Slices of tensors, cut where a shard or padding begins; the slice that each is of, and where it lies."""
        row, tensor, start, end = _cut(np.arange(len(tensor)), tensor, start, end, self._grids[:, 3:])
        cuts = np.stack((self._grids[:, 6],) * 2 + (np.ones(len(self._grids), np.int64),), axis=1)
        row, tensor, start, end = _cut(row, tensor, start, end, cuts)
        chunk_run = self._grids[tensor, 1]
        shard = _find(self._grids[tensor, 3:6], start)
        first_chunk = _find(self._grids[tensor, :3], _start(self._grids[tensor, 3:6], shard))
        chunk = _find(self._grids[tensor, :3], start)
        inside = start - _start(self._grids[tensor, :3], chunk)
        param, slot = self.pairs[tensor, 0], self.pairs[tensor, 1]
        item = self.state.slot_bytes[slot]
        at = ((chunk - first_chunk) * chunk_run + inside) * item
        size = end - start
        return row, Extents(param, slot, start, size, self._first[tensor] + shard, at, size * item)

    @cached_property
    def nodes(self) -> dict[str, bytes]:
        """All ``zarr.json``, by path: the root's last, for it repeats the others."""
        members: dict[str, Any] = {}
        for tensor, (param, slot) in enumerate(self.pairs.tolist()):
            path = self.folder(tensor).removeprefix(self.prefix)
            members.setdefault(path.rpartition("/")[0], group_node(self._param(param)))
            own = {"param": self.state.params[param].name, "slot": self.state.slots[slot].name}
            members[path] = self.arrays[tensor].node({**own, "dtype": self.state.slots[slot].dtype})
        made = {f"{self.prefix}{path}/{_NODE}": encode_node(node) for path, node in members.items()}
        root = {"format": "fully_reshardable", "step": self.state.step}
        return made | {self.prefix + _NODE: encode_node(group_node(root, members))}

    def _param(self, param: int) -> dict[str, Any]:
        spec = self.state.params[param]
        scalars = {name: scalar_to_json(own.value) for name, own in sorted(self.state.scalars_of(param).items())}
        return {"param": spec.name, "dtype": spec.dtype, "scalars": scalars}

    def nodes_of(self, blob: int) -> list[tuple[str, bytes]]:
        """Metadata that is proved when a blob is read: each node with one blob, the first below it.

        Those of tensors without elements, and the root's, go with blob 0.
        """
        tensor = self.tensor(blob)
        if blob == 0:
            empty = [t for t, array in enumerate(self.arrays) if not array.shard_count]
            wanted = [self.prefix + _NODE, *(key for t in empty for key in self._keys(t))]
        else:
            wanted = []
        if blob == self._first[tensor]:
            wanted += self._keys(tensor)
        return [(key, self.nodes[key]) for key in dict.fromkeys(wanted)]

    def _keys(self, tensor: int) -> list[str]:
        """The array's node, and its param's where it is the param's first."""
        folder = self.folder(tensor)
        first = tensor == 0 or self.pairs[tensor - 1, 0] != self.pairs[tensor, 0]
        group = [f"{folder.rpartition('/')[0]}/{_NODE}"] if first else []
        return [*group, f"{folder}/{_NODE}"]


def _find(grid: IntColumn, element: IntColumn) -> IntColumn:
    """The run that holds an element; ``grid``: row, run and runs a row, for each element (``core.boxes.RunGrid``)."""
    found: IntColumn = element // grid[:, 0] * grid[:, 2] + element % grid[:, 0] // grid[:, 1]
    return found


def _start(grid: IntColumn, block: IntColumn) -> IntColumn:
    """First element of a run."""
    found: IntColumn = block // grid[:, 2] * grid[:, 0] + block % grid[:, 2] * grid[:, 1]
    return found


def _cut(
    row: IntColumn, tensor: IntColumn, start: IntColumn, end: IntColumn, grids: IntColumn
) -> tuple[IntColumn, IntColumn, IntColumn, IntColumn]:
    """Cuts slices of tensors where the runs of the tensors' grids begin."""
    low = _find(grids[tensor], start)
    count = _find(grids[tensor], end - 1) + 1 - low
    pick = np.repeat(np.arange(len(tensor)), count)
    block = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + low[pick]
    first, after = _start(grids[tensor[pick]], block), _start(grids[tensor[pick]], block + 1)
    return row[pick], tensor[pick], np.maximum(first, start[pick]), np.minimum(after, end[pick])


class FullyReshardableZarr:
    """The zarr container, written and read through tensorstore. Blobs have one writer each, whatever ranks hold."""

    name = "fully_reshardable"
    container = "zarr"
    keeps_layout = False
    shared_blobs = False
    zero_padding = True

    def normalize(self, options: FormatOptions) -> FormatOptions:
        chunk = DEFAULT_CHUNK_BYTES if options.chunk_bytes is None else options.chunk_bytes
        shard = max(DEFAULT_SHARD_BYTES, chunk) if options.shard_bytes is None else options.shard_bytes
        if chunk < 1:
            raise UsageError("chunk size", found=chunk, expected="at least 1 byte")
        if shard < chunk:
            raise UsageError("shard size", found=shard, expected=f"at least a chunk of {chunk} bytes")
        compression = None if options.compression == "none" else options.compression
        if compression is not None and compression not in COMPRESSIONS:
            choices = ", ".join(["none", *COMPRESSIONS])
            raise UsageError("compression", found=compression, expected=f"one of {choices}")
        return FormatOptions(shard, chunk, compression)

    def plan(self, state: PartState, layout: Layout | None, part: str, prefix: str, options: FormatOptions) -> Catalog:
        return Catalog(self.name, self.container, part, state, None, ZarrPlacement(state, options, prefix))

    def blob_files(self, catalog: Catalog, blob: int) -> Sequence[str]:
        return [catalog.placement.blob_key(blob)]

    def least_nbytes(self, catalog: Catalog, blob: int) -> int:
        shard = _placement(catalog).shard(blob)
        return shard.header_nbytes(0) + (0 if shard.array.compression else shard.payload_nbytes)

    def cuts(self, catalog: Catalog, blob: int) -> IntColumn:
        """Pieces end with chunks too: what is read of a chunk can be proved."""
        placement, shard = catalog.placement, _placement(catalog).shard(blob)
        grid = piece_cuts(placement.extents(blob), shard.payload_nbytes, PIECE_BYTES)
        chunks = np.arange(0, shard.payload_nbytes, shard.array.chunk_nbytes)
        return np.union1d(grid, chunks).astype(np.int64)

    def stops(self, catalog: Catalog, blob: int) -> IntColumn:
        """A shard is written whole."""
        return np.array([0, catalog.placement.payload_nbytes(blob)], np.int64)

    def source(self, store: Store, catalog: Catalog, files: Mapping[str, FileEntry]) -> ShardSource:
        placement = _placement(catalog)
        return ShardSource(store, files, placement.shard, partial(self.cuts, catalog), placement.nodes_of)

    def create(self, area: Area, catalog: Catalog, blob: int) -> ShardFile:
        shard = _placement(catalog).shard(blob)
        return ShardFile(area.path(shard.key), shard)

    def attach(self, area: Area, catalog: Catalog, blob: int) -> ShardFile:
        raise AssertionError("a shard has one writer")

    def adopt(self, area: Area, catalog: Catalog, blob: int) -> tuple[list[FileEntry], Sequence[int]] | None:
        shard = _placement(catalog).shard(blob)
        if not (area.root / shard.key).exists():
            return None
        header = self._adopted(area, shard, len(self.cuts(catalog, blob)) - 1)
        return None if header is None else ([FileEntry(shard.key, header.nbytes, header.digest)], header.pieces)

    def _adopted(self, area: Area, shard: Shard, pieces: int) -> ShardHeader | None:
        store = LocalStore(area.root)
        try:
            header = read_header(store, shard, pieces)
            return header if store.size(shard.key) == header.nbytes else None
        except CorruptError:
            return None
        finally:
            store.close()

    def derived(self, catalog: Catalog) -> list[tuple[str, bytes]]:
        return list(_placement(catalog).nodes.items())


def _placement(catalog: Catalog) -> ZarrPlacement:
    assert isinstance(catalog.placement, ZarrPlacement)
    return catalog.placement

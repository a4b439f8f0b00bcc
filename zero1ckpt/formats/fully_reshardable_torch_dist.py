"""``fully_reshardable`` as a torch distributed checkpoint, which ``torch.distributed.checkpoint.load`` reads.

Specification: formats/fully_reshardable/TORCH_DIST.md. The state dict is ``{"state": {param: {slot: tensor}}}``; every
tensor is one chunk, the archive that ``torch.save`` would make of it, and several stand in one file. Nothing of this
needs torch: the ``.metadata`` and all structure follow from the catalog.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..core.errors import CorruptError, MissingError, UnsupportedError
from ..core.layout import Layout
from ..core.ranges import IntColumn
from ..encodings.dcp_metadata import DcpMetadata, dump_metadata, whole_tensor
from ..encodings.framed_file import FramedFile, FramedSource, read_sidecar, sidecar_key
from ..encodings.payload_file import entry_of
from ..encodings.torch_archive import ArchivePlan, plan_tensor
from ..model.catalog import PIECE_BYTES, Catalog, Extents, piece_cuts
from ..model.manifest import FileEntry, FormatOptions
from ..model.protocols import Area, Store
from ..model.state import PartState
from ..storage.filesystem import is_local
from ..storage.local import LocalStore
from .fully_reshardable import FullyReshardable, shard_options, whole_tensors

__all__ = ["ArchivePlacement", "FullyReshardableTorchDist"]

_ROOT = "state"


@dataclass(frozen=True, slots=True)
class _Archive:
    """One tensor's archive: where it begins in its file, and its plan."""

    param: int
    slot: int
    blob: int
    at: int
    plan: ArchivePlan

    @property
    def data_at(self) -> int:
        return self.at + self.plan.holes[0].offset


@dataclass(frozen=True)
class ArchivePlacement:
    """Whole tensors in registration order, each in an archive, cut into files at archive bounds."""

    state: PartState
    shard_bytes: int
    prefix: str = ""

    @cached_property
    def archives(self) -> tuple[_Archive, ...]:
        found = []
        blob = used = 0
        for param, slot in whole_tensors(self.state):
            plan = plan_tensor(self.state.slots[slot].dtype, self.state.shape_of(param, slot))
            if used and used + plan.nbytes > self.shard_bytes:
                blob, used = blob + 1, 0
            found.append(_Archive(param, slot, blob, used, plan))
            used += plan.nbytes
        return tuple(found)

    @cached_property
    def _by_blob(self) -> tuple[tuple[_Archive, ...], ...]:
        lists: list[list[_Archive]] = [[] for _ in range(self.blob_count)]
        for archive in self.archives:
            lists[archive.blob].append(archive)
        return tuple(tuple(own) for own in lists)

    @cached_property
    def _table(self) -> tuple[IntColumn, IntColumn]:
        """File, and payload byte of the values, of each (param x slots + slot); -1 where absent."""
        size = len(self.state.params) * len(self.state.slots)
        blob, at = np.full(size, -1, np.int64), np.zeros(size, np.int64)
        for archive in self.archives:
            row = archive.param * len(self.state.slots) + archive.slot
            blob[row], at[row] = archive.blob, archive.data_at
        return blob, at

    @property
    def blob_count(self) -> int:
        return self.archives[-1].blob + 1 if self.archives else 1

    def blob_key(self, blob: int) -> str:
        return f"{self.prefix}__{blob}_0.distcp"

    def payload_nbytes(self, blob: int) -> int:
        own = self._by_blob[blob]
        return own[-1].at + own[-1].plan.nbytes if own else 0

    def in_blob(self, blob: int) -> tuple[_Archive, ...]:
        return self._by_blob[blob]

    def extents(self, blob: int) -> Extents:
        rows = [
            (a.param, a.slot, 0, a.plan.holes[0].nbytes, blob, a.data_at, a.plan.holes[0].nbytes)
            for a in self._by_blob[blob]
            if a.plan.holes[0].nbytes
        ]
        columns = np.array(rows, np.int64).reshape(-1, 7).T
        table = Extents(*columns)
        size = table.nbytes // self.state.slot_bytes[table.slot] if len(table) else table.size
        return Extents(table.param, table.slot, table.start, size, table.blob, table.at, table.nbytes)

    def locate(self, param: IntColumn, slot: IntColumn, start: IntColumn, size: IntColumn) -> tuple[IntColumn, Extents]:
        blobs, ats = self._table
        tensor = param * len(self.state.slots) + slot
        row = np.flatnonzero((blobs[tensor] >= 0) & (size > 0))
        tensor, item = tensor[row], self.state.slot_bytes[slot[row]]
        at = ats[tensor] + start[row] * item
        return row, Extents(param[row], slot[row], start[row], size[row], blobs[tensor], at, size[row] * item)


class FullyReshardableTorchDist:
    """The torch_dist container (``model.protocols.Format``)."""

    name = FullyReshardable.name
    container = "torch_dist"
    keeps_layout = False
    shared_blobs = True
    zero_padding = False

    def normalize(self, options: FormatOptions) -> FormatOptions:
        return shard_options(options, f"{self.name} in {self.container}")

    def plan(self, state: PartState, layout: Layout | None, part: str, prefix: str, options: FormatOptions) -> Catalog:
        assert options.shard_bytes is not None
        _check_keys(state)
        placement = ArchivePlacement(state, options.shard_bytes, prefix)
        return Catalog(self.name, self.container, part, state, None, placement)

    def blob_files(self, catalog: Catalog, blob: int) -> Sequence[str]:
        key = catalog.placement.blob_key(blob)
        return [key, sidecar_key(key)]

    def least_nbytes(self, catalog: Catalog, blob: int) -> int:
        return catalog.placement.payload_nbytes(blob)

    def cuts(self, catalog: Catalog, blob: int) -> IntColumn:
        placement = catalog.placement
        return piece_cuts(placement.extents(blob), placement.payload_nbytes(blob), PIECE_BYTES)

    def stops(self, catalog: Catalog, blob: int) -> IntColumn:
        return np.empty(0, np.int64)

    def source(self, store: Store, catalog: Catalog, files: Mapping[str, FileEntry]) -> FramedSource:
        def cuts(blob: int) -> IntColumn:
            return self.cuts(catalog, blob)

        return FramedSource(store, catalog, files, cuts)

    def create(self, area: Area, catalog: Catalog, blob: int) -> FramedFile:
        return self._file(area, catalog, blob, create=True)

    def attach(self, area: Area, catalog: Catalog, blob: int) -> FramedFile:
        return self._file(area, catalog, blob, create=False, whole_pages=not is_local(area.root))

    def _file(self, area: Area, catalog: Catalog, blob: int, *, create: bool, whole_pages: bool = False) -> FramedFile:
        archives = _placement(catalog).in_blob(blob)
        tensors = [(a.data_at, a.data_at + a.plan.holes[0].nbytes) for a in archives]

        def frames(crcs: Sequence[int]) -> list[tuple[int, bytes]]:
            return _frames(archives, crcs)

        key = catalog.placement.blob_key(blob)
        cuts = self.cuts(catalog, blob)
        return FramedFile(area.path(key), key, cuts, tensors, frames, create=create, whole_pages=whole_pages)

    def adopt(self, area: Area, catalog: Catalog, blob: int) -> tuple[list[FileEntry], Sequence[int]] | None:
        key = catalog.placement.blob_key(blob)
        cuts = self.cuts(catalog, blob)
        store = LocalStore(area.root)
        try:
            if store.size(key) != int(cuts[-1]):
                return None
            crcs, own = read_sidecar(store, key, len(cuts) - 1)
            side = FileEntry(sidecar_key(key), store.size(sidecar_key(key)), f"{own:016x}")
        except (MissingError, CorruptError):
            return None
        finally:
            store.close()
        return [entry_of(key, 0, 0, cuts, crcs), side], crcs

    def derived(self, catalog: Catalog) -> list[tuple[str, bytes]]:
        """The ``.metadata``."""
        placement = _placement(catalog)
        state = catalog.state
        tensors, paths = {}, {}
        for a in placement.archives:
            path = (_ROOT, state.params[a.param].name, state.slots[a.slot].name)
            key = ".".join(path)
            shape = state.shape_of(a.param, a.slot)
            dtype = state.slots[a.slot].dtype
            tensors[key] = whole_tensor(key, dtype, shape, file=a.blob, at=a.at, nbytes=a.plan.nbytes)
            paths[key] = path
        files = tuple(placement.blob_key(b).removeprefix(placement.prefix) for b in range(placement.blob_count))
        return [(f"{placement.prefix}.metadata", dump_metadata(DcpMetadata(tensors, {}, files, paths)))]


def _placement(catalog: Catalog) -> ArchivePlacement:
    assert isinstance(catalog.placement, ArchivePlacement)
    return catalog.placement


def _frames(archives: Sequence[_Archive], crcs: Sequence[int]) -> list[tuple[int, bytes]]:
    """All bytes between tensors: the end of one archive and the beginning of the next are one frame. Pure."""
    frames: list[tuple[int, bytes]] = []
    for archive, crc in zip(archives, crcs, strict=True):
        for at, run in archive.plan.runs([crc]):
            begin = archive.at + at
            if frames and frames[-1][0] + len(frames[-1][1]) == begin:
                frames[-1] = (frames[-1][0], frames[-1][1] + run)
            else:
                frames.append((begin, run))
    return frames


def _check_keys(state: PartState) -> None:
    """A flat key must mean one tensor: "a.b" with slot "c" and "a" with slot "b.c" would be the same."""
    dotted = [slot.name for slot in state.slots if "." in slot.name]
    if dotted:
        raise UnsupportedError(
            "a slot with a dot in its name cannot be told from a param's in this container",
            found=dotted[0],
            hint="use the safetensors or zarr container",
        )

"""``bucket_shards``: every rank dumps what it owns, one contiguous tensor for each bucket and slot.

Specification: formats/bucket_shards/SPEC.md. Every rank's payload has the same shape, so all addresses follow from the
layout, and a file needs no table of fragments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..core.errors import CorruptError
from ..core.layout import Fragments, Layout
from ..core.ranges import IntColumn
from ..encodings.safetensors_file import Header, TensorEntry, build_header, read_header
from ..model.catalog import PIECE_BYTES, Catalog, Extents, piece_cuts
from ..model.protocols import Store
from ..model.state import PartState, SlotSpec

__all__ = ["BucketShards", "ShardPlacement"]


@dataclass(frozen=True)
class ShardPlacement:
    """Payload of rank ``r``: for each buffer, for each bucket, for each slot, the rank's shard; padding included.

    Absent tensors keep their place, as zeros, so the payload's shape depends on nothing but layout and slots.
    """

    layout: Layout
    slots: tuple[SlotSpec, ...]
    absent: frozenset[tuple[int, int]]
    prefix: str = ""

    @property
    def blob_count(self) -> int:
        return self.layout.rules.dp_size

    def blob_key(self, blob: int) -> str:
        return f"{self.prefix}rank-{blob:05d}-of-{self.blob_count:05d}.safetensors"

    def payload_nbytes(self, blob: int) -> int:
        return int(self._buffer_base[-1])

    @cached_property
    def _slot_bytes(self) -> IntColumn:
        return np.array([slot.itemsize for slot in self.slots], np.int64)

    @cached_property
    def _slot_prefix(self) -> IntColumn:
        """Bytes an element that come before each slot in a bucket."""
        before: IntColumn = np.cumsum(self._slot_bytes) - self._slot_bytes
        return before

    @cached_property
    def _buffer_base(self) -> IntColumn:
        sizes = [int(buffer.shard_offset[-1]) * int(self._slot_bytes.sum()) for buffer in self.layout.buffers]
        return np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)

    def segment(self, buffer: int, bucket: int, slot: int) -> tuple[int, int]:
        """Payload bytes ``[begin, end)`` of one bucket's shard of one slot."""
        begin = int(self._addresses(buffer, np.array([bucket]), np.array([slot]), np.array([0]))[0])
        numel = int(self.layout.buffers[buffer].shard_numel[bucket])
        return begin, begin + numel * int(self._slot_bytes[slot])

    def tensors(self) -> tuple[TensorEntry, ...]:
        """The tensors of any rank's file."""
        entries = []
        for b, buffer in enumerate(self.layout.buffers):
            for k, numel in enumerate(buffer.shard_numel.tolist()):
                for s, slot in enumerate(self.slots):
                    begin, end = self.segment(b, k, s)
                    entries.append(TensorEntry(f"buffer.{b}.bucket.{k}.{slot.name}", slot.dtype, (numel,), begin, end))
        return tuple(entries)

    def _addresses(self, buffer: int, bucket: IntColumn, slot: IntColumn, local: IntColumn) -> IntColumn:
        layout = self.layout.buffers[buffer]
        per_element = self._slot_bytes.sum()
        base = self._buffer_base[buffer] + layout.shard_offset[bucket] * per_element
        at: IntColumn = base + layout.shard_numel[bucket] * self._slot_prefix[slot] + local * self._slot_bytes[slot]
        return at

    def _extents(self, buffer: int, found: Fragments, slot: IntColumn) -> Extents:
        return Extents(
            found.param,
            slot,
            found.param_start,
            found.size,
            found.rank,
            self._addresses(buffer, found.bucket, slot, found.local),
            found.size * self._slot_bytes[slot],
        )

    def extents(self, blob: int) -> Extents:
        tables = []
        for index, buffer in enumerate(self.layout.buffers):
            found = buffer.fragments(blob)
            tables += [self._extents(index, found, np.full(len(found), slot)) for slot in range(len(self.slots))]
        table = Extents.concatenate(tables)
        if self.absent:
            pairs = table.param * len(self.slots) + table.slot
            gone = np.array([param * len(self.slots) + slot for param, slot in self.absent], np.int64)
            table = table.take(np.flatnonzero(~np.isin(pairs, gone)))
        return table.take(np.argsort(table.at, kind="stable"))

    def locate(self, param: IntColumn, slot: IntColumn, start: IntColumn, size: IntColumn) -> tuple[IntColumn, Extents]:
        rows, tables = [], []
        owner = self.layout.buffer_of[param]
        for index, buffer in enumerate(self.layout.buffers):
            mine = np.flatnonzero(owner == index)
            place = self.layout.place_of[param[mine]]
            row, found = buffer.owners(place, start[mine], start[mine] + size[mine])
            rows.append(mine[row])
            tables.append(self._extents(index, found, slot[mine][row]))
        row = np.concatenate(rows) if rows else np.empty(0, np.int64)
        order = np.argsort(row, kind="stable")
        return row[order], Extents.concatenate(tables).take(order)


class BucketShards:
    """The format's plug-in (``model.protocols.Format``)."""

    name = "bucket_shards"
    containers = ("safetensors",)

    def plan(self, state: PartState, layout: Layout, part: str, prefix: str) -> Catalog:
        placement = ShardPlacement(layout, state.slots, state.absent, prefix)
        return Catalog(self.name, self.containers[0], part, state, layout, placement)

    def cuts(self, catalog: Catalog, blob: int) -> IntColumn:
        placement = catalog.placement
        return piece_cuts(placement.extents(blob), placement.payload_nbytes(blob), PIECE_BYTES)

    def header(self, catalog: Catalog, blob: int, pieces: Sequence[int]) -> bytes:
        return build_header(_placement(catalog).tensors(), pieces, PIECE_BYTES)

    def read_header(self, store: Store, catalog: Catalog, blob: int) -> Header:
        """Raises ``CorruptError`` where tensors are missing, foreign, or of another size or dtype than laid out."""
        key = catalog.placement.blob_key(blob)
        header = read_header(store, key)
        expected = {entry.name: entry for entry in _placement(catalog).tensors()}
        found = {entry.name: entry for entry in header.tensors}
        for name in [*expected, *found]:
            if found.get(name) != expected.get(name):
                raise CorruptError(
                    f"tensor {name} is not what the layout says: the file was altered or is from another save",
                    file=store.label(key),
                    found=_describe(found.get(name)),
                    expected=_describe(expected.get(name)),
                    hint="restore it from a copy",
                )
        return header


def _placement(catalog: Catalog) -> ShardPlacement:
    assert isinstance(catalog.placement, ShardPlacement)
    return catalog.placement


def _describe(entry: TensorEntry | None) -> str:
    return "none" if entry is None else f"{entry.dtype}{list(entry.shape)} at bytes {entry.begin} to {entry.end}"

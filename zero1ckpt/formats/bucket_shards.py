"""``bucket_shards``: every rank dumps what it owns, one contiguous tensor for each bucket and slot.

Specification: formats/bucket_shards/SPEC.md. Every rank's payload has the same shape, so all addresses follow from the
layout, and a file needs no table of fragments.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ..core.layout import Fragments, Layout
from ..core.ranges import IntColumn
from ..encodings.safetensors_file import TensorEntry
from ..model.catalog import Catalog, Extents
from ..model.manifest import FormatOptions
from ..model.state import PartState
from ..model.whole import whole_extents, whole_owners
from .fully_reshardable import tensor_name
from .payload_format import PayloadFormat

__all__ = ["BucketShards", "ShardPlacement"]

_MOST_HELD = 8


@dataclass(frozen=True)
class ShardPlacement:
    """Payload of rank ``r``: for each buffer, for each bucket, for each slot, the rank's shard; padding included.

    Absent tensors keep their place, as zeros, so all of this depends on nothing but layout and slots. Then come the
    whole tensors that the rank carries.
    """

    state: PartState
    layout: Layout
    prefix: str = ""
    _held: dict[int, Extents] = field(default_factory=dict, compare=False, repr=False)

    @property
    def blob_count(self) -> int:
        return self.layout.rules.dp_size

    def blob_key(self, blob: int) -> str:
        return f"{self.prefix}rank-{blob:05d}-of-{self.blob_count:05d}.safetensors"

    def payload_nbytes(self, blob: int) -> int:
        return int(self._buffer_base[-1]) + int(whole_extents(self.state, self.layout, blob).nbytes.sum())

    @cached_property
    def _slots(self) -> list[int]:
        """The elementwise slots."""
        return np.flatnonzero(~self.state.whole_mask).tolist()

    @cached_property
    def _element_bytes(self) -> int:
        """Bytes of one element over all elementwise slots."""
        return int(self.state.slot_bytes[self._slots].sum())

    @cached_property
    def _slot_prefix(self) -> IntColumn:
        """Bytes an element that come before each slot in a bucket."""
        sizes = np.where(self.state.whole_mask, 0, self.state.slot_bytes)
        before: IntColumn = np.cumsum(sizes) - sizes
        return before

    @cached_property
    def _buffer_base(self) -> IntColumn:
        sizes = [int(buffer.shard_offset[-1]) * self._element_bytes for buffer in self.layout.buffers]
        return np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)

    def segment(self, buffer: int, bucket: int, slot: int) -> tuple[int, int]:
        """Payload bytes ``[begin, end)`` of one bucket's shard of one slot."""
        begin = int(self._addresses(buffer, np.array([bucket]), np.array([slot]), np.array([0]))[0])
        numel = int(self.layout.buffers[buffer].shard_numel[bucket])
        return begin, begin + numel * int(self.state.slot_bytes[slot])

    def tensors(self, blob: int) -> tuple[TensorEntry, ...]:
        """The tensors of a rank's file."""
        entries = []
        for b, buffer in enumerate(self.layout.buffers):
            for k, numel in enumerate(buffer.shard_numel.tolist()):
                for s in self._slots:
                    slot = self.state.slots[s]
                    name = f"buffer.{b}.bucket.{k}.{slot.name}"
                    entries.append(TensorEntry(name, slot.dtype, (numel,), *self.segment(b, k, s)))
        for p, s, _, _, _, at, nbytes in self._whole(blob).rows():
            slot = self.state.slots[s]
            name = f"whole.{tensor_name(self.state.params[p].name, slot.name)}"
            entries.append(TensorEntry(name, slot.dtype, self.state.shape_of(p, s), at, at + nbytes))
        return tuple(entries)

    def _whole(self, blob: int) -> Extents:
        held = whole_extents(self.state, self.layout, blob)
        return replace(held, at=held.at + int(self._buffer_base[-1]))

    def _addresses(self, buffer: int, bucket: IntColumn, slot: IntColumn, local: IntColumn) -> IntColumn:
        layout = self.layout.buffers[buffer]
        base = self._buffer_base[buffer] + layout.shard_offset[bucket] * self._element_bytes
        inside = layout.shard_numel[bucket] * self._slot_prefix[slot] + local * self.state.slot_bytes[slot]
        at: IntColumn = base + inside
        return at

    def _extents(self, buffer: int, found: Fragments, slot: IntColumn) -> Extents:
        return Extents(
            found.param,
            slot,
            found.param_start,
            found.size,
            found.rank,
            self._addresses(buffer, found.bucket, slot, found.local),
            found.size * self.state.slot_bytes[slot],
        )

    def extents(self, blob: int) -> Extents:
        """Kept for the blobs that are at work: it is asked for several times while one is written."""
        held = self._held.get(blob)
        if held is None:
            held = self._made(blob)
            if len(self._held) >= _MOST_HELD:
                self._held.clear()
            self._held[blob] = held
        return held

    def _made(self, blob: int) -> Extents:
        tables = []
        for index, buffer in enumerate(self.layout.buffers):
            found = buffer.fragments(blob)
            tables += [self._extents(index, found, np.full(len(found), slot)) for slot in self._slots]
        table = Extents.concatenate(tables)
        table = table.take(np.flatnonzero(self.state.has(table.param, table.slot)))
        return Extents.concatenate([table.take(np.argsort(table.at, kind="stable")), self._whole(blob)])

    def locate(self, param: IntColumn, slot: IntColumn, start: IntColumn, size: IntColumn) -> tuple[IntColumn, Extents]:
        rows, tables = [], []
        elementwise = ~self.state.whole_mask[slot] & self.state.has(param, slot)
        owner = self.layout.buffer_of[param]
        for index, buffer in enumerate(self.layout.buffers):
            mine = np.flatnonzero(elementwise & (owner == index))
            place = self.layout.place_of[param[mine]]
            row, found = buffer.owners(place, start[mine], start[mine] + size[mine])
            rows.append(mine[row])
            tables.append(self._extents(index, found, slot[mine][row]))
        for row, whole in self._locate_whole(param, slot, start, size):
            rows.append(row)
            tables.append(whole)
        asked = np.concatenate(rows) if rows else np.empty(0, np.int64)
        order = np.argsort(asked, kind="stable")
        return asked[order], Extents.concatenate(tables).take(order)

    def _locate_whole(
        self, param: IntColumn, slot: IntColumn, start: IntColumn, size: IntColumn
    ) -> Iterator[tuple[IntColumn, Extents]]:
        row, rank, begin, count = whole_owners(self.state, self.layout, param, slot, start, size)
        for blob in np.unique(rank).tolist():
            at_of = {(p, s): at for p, s, _, _, _, at, _ in self._whole(blob).rows()}
            mine = np.flatnonzero(rank == blob)
            p, s = param[row[mine]], slot[row[mine]]
            item = self.state.slot_bytes[s]
            at = np.array([at_of[key] for key in zip(p.tolist(), s.tolist(), strict=True)], np.int64)
            there = np.full(len(mine), blob)
            yield row[mine], Extents(p, s, begin[mine], count[mine], there, at + begin[mine] * item, count[mine] * item)


class BucketShards(PayloadFormat):
    """The format's plug-in (``model.protocols.Format``)."""

    name = "bucket_shards"

    def plan(self, state: PartState, layout: Layout | None, part: str, prefix: str, options: FormatOptions) -> Catalog:
        assert layout is not None
        placement = ShardPlacement(state, layout, prefix)
        return Catalog(self.name, self.container, part, state, layout, placement)

    def tensors(self, catalog: Catalog, blob: int) -> tuple[TensorEntry, ...]:
        assert isinstance(catalog.placement, ShardPlacement)
        return catalog.placement.tensors(blob)

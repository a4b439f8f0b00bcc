"""``fully_sharded_model_space``: each rank writes its flat slices of params; no bucket, gap or padding remains.

Specification: formats/fully_sharded_model_space/SPEC.md. A tensor of a file is one slice, named
``param/slot/start:end`` in elements of the flattened param, so a file tells what it holds without the manifest.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from ..core.layout import Layout
from ..core.ranges import IntColumn
from ..encodings.safetensors_file import TensorEntry
from ..model.catalog import Catalog, Extents
from ..model.manifest import FormatOptions
from ..model.state import PartState
from ..model.whole import whole_extents, whole_owners
from .fully_reshardable import tensor_name
from .payload_format import PayloadFormat

__all__ = ["FullyShardedModelSpace", "SlicePlacement"]

_SAMPLE = 16
"""Ranks whose sizes are looked at when a checkpoint is opened."""


@dataclass(frozen=True)
class SlicePlacement:
    """Payload of rank ``r``: the slices that it owns by the layout, by param, then start, then slot, end to end."""

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
        return int(self.extents(blob).nbytes.sum())

    def extents(self, blob: int) -> Extents:
        held = self._held.get(blob)
        if held is None:
            held = self._slices(blob)
            if len(self._held) >= _MOST_HELD:
                self._held.clear()
            self._held[blob] = held
        return held

    def _slices(self, blob: int) -> Extents:
        found = [buffer.fragments(blob) for buffer in self.layout.buffers]
        param, start, size = (
            np.concatenate([getattr(f, column) for f in found] or [np.empty(0, np.int64)])
            for column in ("param", "param_start", "size")
        )
        slots = len(self.state.slots)
        order = np.lexsort((start, param))
        rows = np.repeat(order, slots)
        slot = np.tile(np.arange(slots), len(order))
        keep = np.flatnonzero(self.state.has(param[rows], slot) & ~self.state.whole_mask[slot])
        rows, slot = rows[keep], slot[keep]
        table = Extents(
            param[rows],
            slot,
            start[rows],
            size[rows],
            np.full(len(rows), blob),
            np.zeros(len(rows), np.int64),
            size[rows] * self.state.slot_bytes[slot],
        )
        table = Extents.concatenate([table, whole_extents(self.state, self.layout, blob)])
        return replace(table, at=np.cumsum(table.nbytes) - table.nbytes)

    def tensors(self, blob: int) -> tuple[TensorEntry, ...]:
        held = self.extents(blob)
        return tuple(
            TensorEntry(
                f"{tensor_name(self.state.params[p].name, self.state.slots[s].name)}/{start}:{start + size}",
                self.state.slots[s].dtype,
                self.state.shape_of(p, s) if self.state.slots[s].whole else (size,),
                at,
                at + nbytes,
            )
            for p, s, start, size, _, at, nbytes in held.rows()
        )

    def locate(self, param: IntColumn, slot: IntColumn, start: IntColumn, size: IntColumn) -> tuple[IntColumn, Extents]:
        row, rank, begin, count = self._owners(param, slot, start, size)
        tables, rows = [], []
        for blob in np.unique(rank).tolist():
            mine = np.flatnonzero(rank == blob)
            at = self._addresses(blob, param[row[mine]], slot[row[mine]], begin[mine])
            item = self.state.slot_bytes[slot[row[mine]]]
            there = np.full(len(mine), blob)
            tables.append(
                Extents(param[row[mine]], slot[row[mine]], begin[mine], count[mine], there, at, count[mine] * item)
            )
            rows.append(row[mine])
        asked = np.concatenate(rows) if rows else np.empty(0, np.int64)
        found = Extents.concatenate(tables)
        order = np.lexsort((found.start, asked))
        return asked[order], found.take(order)

    def _owners(
        self, param: IntColumn, slot: IntColumn, start: IntColumn, size: IntColumn
    ) -> tuple[IntColumn, IntColumn, IntColumn, IntColumn]:
        """(asked row, rank, start, size) of the owned pieces of slices."""
        asked = [whole_owners(self.state, self.layout, param, slot, start, size)]
        elementwise = ~self.state.whole_mask[slot] & self.state.has(param, slot)
        for index, buffer in enumerate(self.layout.buffers):
            mine = np.flatnonzero(elementwise & (self.layout.buffer_of[param] == index))
            row, found = buffer.owners(self.layout.place_of[param[mine]], start[mine], start[mine] + size[mine])
            asked.append((mine[row], found.rank, found.param_start, found.size))
        row, rank, begin, count = (np.concatenate(columns) for columns in zip(*asked, strict=True))
        return row, rank, begin, count

    def _addresses(self, blob: int, param: IntColumn, slot: IntColumn, start: IntColumn) -> IntColumn:
        """Payload byte of element ``start`` of each tensor in a rank's file, which holds it."""
        held = self.extents(blob)
        keys = (held.param * len(self.state.slots) + held.slot) * _STRIDE + held.start
        order = np.argsort(keys, kind="stable")
        wanted = (param * len(self.state.slots) + slot) * _STRIDE + start
        place = order[np.searchsorted(keys[order], wanted, side="right") - 1]
        at: IntColumn = held.at[place] + (start - held.start[place]) * self.state.slot_bytes[slot]
        return at


_MOST_HELD = 64
"""Blobs whose slices are kept: neighbours are asked for again and again, and all of them would not fit in memory."""
_STRIDE = 2**40
"""Above any element count, so that (tensor, start) sorts as one integer."""


class FullyShardedModelSpace(PayloadFormat):
    """The format's plug-in (``model.protocols.Format``)."""

    name = "fully_sharded_model_space"

    def plan(self, state: PartState, layout: Layout | None, part: str, prefix: str, options: FormatOptions) -> Catalog:
        assert layout is not None
        return Catalog(self.name, self.container, part, state, layout, SlicePlacement(state, layout, prefix))

    def least_nbytes(self, catalog: Catalog, blob: int) -> int:
        """Of a few ranks spread over all: to plan one takes a millisecond, and a larger shape makes all larger."""
        step = -(-catalog.placement.blob_count // _SAMPLE)
        return 0 if blob % step else catalog.placement.payload_nbytes(blob)

    def tensors(self, catalog: Catalog, blob: int) -> tuple[TensorEntry, ...]:
        assert isinstance(catalog.placement, SlicePlacement)
        return catalog.placement.tensors(blob)

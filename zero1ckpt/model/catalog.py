"""A checkpoint as one value: which tensors, which slices of them, in which blob, at which byte.

Slices are kept as int64 columns (``Extents``), computed on demand for the blobs or tensors that are asked for: half a
million rows as objects took 90 s to join, as columns they take milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np

from ..core.digest import shift, tensor_digest
from ..core.layout import Layout
from ..core.ranges import IntColumn
from .state import PartState

__all__ = [
    "PIECE_BYTES",
    "Catalog",
    "Extents",
    "Placement",
    "TablePlacement",
    "digest_tensors",
    "fold_pieces",
    "piece_cuts",
]

PIECE_BYTES = 4 * 2**20
"""Checksummed pieces of a payload end at multiples of this many bytes, and wherever a slice begins or ends."""


@dataclass(frozen=True, slots=True)
class Extents:
    """Slices of tensors inside blobs. All columns are int64 of one length.

    ``start`` and ``size`` count elements of the flattened tensor; ``at`` and ``nbytes`` count bytes of the payload.
    """

    param: IntColumn
    slot: IntColumn
    start: IntColumn
    size: IntColumn
    blob: IntColumn
    at: IntColumn
    nbytes: IntColumn

    def __len__(self) -> int:
        return len(self.param)

    def take(self, rows: IntColumn | slice) -> Extents:
        return Extents(*(column[rows] for column in self.columns))

    @property
    def columns(self) -> tuple[IntColumn, ...]:
        return (self.param, self.slot, self.start, self.size, self.blob, self.at, self.nbytes)

    def rows(self) -> Iterator[tuple[int, ...]]:
        """Each slice as (param, slot, start, size, blob, at, nbytes)."""
        return zip(*(column.tolist() for column in self.columns), strict=True)

    @classmethod
    def concatenate(cls, tables: Sequence[Extents]) -> Extents:
        if not tables:
            return cls(*(np.empty(0, np.int64) for _ in range(7)))
        return cls(*(np.concatenate(columns) for columns in zip(*(t.columns for t in tables), strict=True)))


class Placement(Protocol):
    """Where the slices of a part's tensors lie. Pure: nothing is read to answer."""

    @property
    def blob_count(self) -> int: ...

    def blob_key(self, blob: int) -> str:
        """Path of the blob inside the checkpoint."""

    def payload_nbytes(self, blob: int) -> int: ...

    def extents(self, blob: int) -> Extents:
        """What one blob holds, ordered by ``at``, none empty; bytes between extents are padding."""

    def locate(self, param: IntColumn, slot: IntColumn, start: IntColumn, size: IntColumn) -> tuple[IntColumn, Extents]:
        """Where slices of tensors lie: the asked row of each extent found, and the extents.

        Rows come back ordered by asked row, then by ``start``; what is nowhere has no extent.
        """


@dataclass(frozen=True)
class Catalog:
    """One part of a checkpoint. ``digests`` maps (param index, slot index) to a tensor's digest, where known."""

    format: str
    container: str
    part: str
    state: PartState
    layout: Layout | None
    placement: Placement
    digests: Mapping[tuple[int, int], int] = field(default_factory=dict)


@dataclass(frozen=True)
class TablePlacement:
    """Placement by an explicit table, for state without a layout rule (whole tensors in memory, foreign files)."""

    keys: Sequence[str]
    payloads: Sequence[int]
    table: Extents
    slot_count: int

    @property
    def blob_count(self) -> int:
        return len(self.keys)

    def blob_key(self, blob: int) -> str:
        return self.keys[blob]

    def payload_nbytes(self, blob: int) -> int:
        return self.payloads[blob]

    def extents(self, blob: int) -> Extents:
        rows = np.flatnonzero((self.table.blob == blob) & (self.table.nbytes > 0))
        return self.table.take(rows[np.argsort(self.table.at[rows], kind="stable")])

    def locate(self, param: IntColumn, slot: IntColumn, start: IntColumn, size: IntColumn) -> tuple[IntColumn, Extents]:
        table, tensor, bounds = self._sorted
        wanted = param * self.slot_count + slot
        first = np.searchsorted(tensor, wanted, side="left")
        last = np.searchsorted(tensor, wanted, side="right")
        # Inside one tensor the extents are sorted and disjoint, so (tensor, position) sorts the whole table.
        low = np.array(
            [f + np.searchsorted(bounds[f:e, 1], s, side="right") for f, e, s in zip(first, last, start, strict=True)],
            np.int64,
        )
        high = np.array(
            [
                f + np.searchsorted(bounds[f:e, 0], s + n, side="left")
                for f, e, s, n in zip(first, last, start, size, strict=True)
            ],
            np.int64,
        )
        count = np.maximum(high - low, 0)
        row = np.repeat(np.arange(len(wanted)), count)
        pick = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + np.repeat(low, count)
        found = table.take(pick)
        begin = np.maximum(found.start, start[row])
        end = np.minimum(found.start + found.size, (start + size)[row])
        item = found.nbytes // np.maximum(found.size, 1)
        return row, Extents(
            found.param,
            found.slot,
            begin,
            end - begin,
            found.blob,
            found.at + (begin - found.start) * item,
            (end - begin) * item,
        )

    @cached_property
    def _sorted(self) -> tuple[Extents, IntColumn, IntColumn]:
        """The table by tensor and start, the tensor of each row, and where it begins and ends."""
        table = self.table.take(np.flatnonzero(self.table.size > 0))
        tensor = table.param * self.slot_count + table.slot
        order = np.lexsort((table.start, tensor))
        table = table.take(order)
        return table, tensor[order], np.stack((table.start, table.start + table.size), axis=1)


def piece_cuts(extents: Extents, payload: int, piece_bytes: int) -> IntColumn:
    """Bounds of the checksummed pieces of a payload: the grid, and both ends of every extent. Pure.

    ``n`` pieces have ``n + 1`` bounds; each piece lies inside one extent or inside padding.
    """
    grid = np.arange(0, payload, piece_bytes, dtype=np.int64)
    return np.unique(np.concatenate((grid, [0, payload], extents.at, extents.at + extents.nbytes))).astype(np.int64)


def fold_pieces(state: PartState, extents: Extents, cuts: IntColumn, crcs: Sequence[int]) -> dict[tuple[int, int], int]:
    """What one blob's pieces add to the value checksum of each (param, slot). Pure.

    The xor over all blobs is the checksum of the whole tensor's bytes.
    """
    partial: dict[tuple[int, int], int] = {}
    owner = np.searchsorted(extents.at, cuts[:-1], side="right") - 1
    inside = owner >= 0
    if len(extents):
        inside &= cuts[:-1] < (extents.at + extents.nbytes)[owner]
    pieces = np.flatnonzero(inside)
    rows = owner[pieces]
    end_in_tensor = extents.start[rows] * state.slot_bytes[extents.slot[rows]] + cuts[pieces + 1] - extents.at[rows]
    for piece, param, slot, end in zip(
        pieces.tolist(), extents.param[rows].tolist(), extents.slot[rows].tolist(), end_in_tensor.tolist(), strict=True
    ):
        key = (param, slot)
        partial[key] = partial.get(key, 0) ^ shift(crcs[piece], state.tensor_nbytes(param, slot) - end)
    return partial


def digest_tensors(state: PartState, values: Mapping[tuple[int, int], int]) -> dict[tuple[int, int], int]:
    """Digests of all present tensors from their value checksums; a tensor of 0 elements needs none. Pure.

    Raises ``KeyError`` for another tensor without one: nobody has written it.
    """
    digests = {}
    for param, spec in enumerate(state.params):
        for slot, kind in enumerate(state.slots):
            if (param, slot) not in state.absent:
                nbytes = state.tensor_nbytes(param, slot)
                crc = values[param, slot] if nbytes else 0
                shape = state.shape_of(param, slot)
                digests[param, slot] = tensor_digest(spec.name, kind.name, kind.dtype, shape, crc, nbytes)
    return digests

"""Several parts read as one: for files that hold the state of more than one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ....core.errors import UnsupportedError
from ....core.ranges import IntColumn
from ....model.catalog import Catalog, Extents, Placement
from ....model.protocols import Source
from ....model.state import ParamSpec, PartState
from .origin import OriginPart

__all__ = ["JoinedPlacement", "JoinedSource", "Parts", "join_parts"]


@dataclass(frozen=True)
class JoinedPlacement:
    """Params and blobs of several placements, numbered through (``model.catalog.Placement``)."""

    placements: tuple[Placement, ...]
    params: tuple[int, ...]
    """Number of params of each."""

    @cached_property
    def blob_offsets(self) -> IntColumn:
        """First blob of each placement, and one more entry for the end."""
        return np.cumsum([0, *(p.blob_count for p in self.placements)]).astype(np.int64)

    @cached_property
    def param_offsets(self) -> IntColumn:
        return np.cumsum([0, *self.params]).astype(np.int64)

    @property
    def blob_count(self) -> int:
        return int(self.blob_offsets[-1])

    def _of_blob(self, blob: int) -> tuple[int, int]:
        """Placement of a blob, and its number there."""
        index = int(np.searchsorted(self.blob_offsets, blob, side="right")) - 1
        return index, blob - int(self.blob_offsets[index])

    def blob_key(self, blob: int) -> str:
        index, inside = self._of_blob(blob)
        return self.placements[index].blob_key(inside)

    def payload_nbytes(self, blob: int) -> int:
        index, inside = self._of_blob(blob)
        return self.placements[index].payload_nbytes(inside)

    def extents(self, blob: int) -> Extents:
        index, inside = self._of_blob(blob)
        return self._moved(self.placements[index].extents(inside), index)

    def locate(self, param: IntColumn, slot: IntColumn, start: IntColumn, size: IntColumn) -> tuple[IntColumn, Extents]:
        owner = np.searchsorted(self.param_offsets, param, side="right") - 1
        rows, tables = [], []
        for index in np.unique(owner).tolist():
            asked = np.flatnonzero(owner == index)
            own = param[asked] - self.param_offsets[index]
            row, found = self.placements[index].locate(own, slot[asked], start[asked], size[asked])
            rows.append(asked[row])
            tables.append(self._moved(found, index))
        row = np.concatenate(rows) if rows else np.empty(0, np.int64)
        table = Extents.concatenate(tables)
        order = np.lexsort((table.start, row))
        return row[order], table.take(order)

    def _moved(self, table: Extents, index: int) -> Extents:
        param, blob = table.param + self.param_offsets[index], table.blob + self.blob_offsets[index]
        return Extents(param, table.slot, table.start, table.size, blob, table.at, table.nbytes)


@dataclass(frozen=True)
class JoinedSource:
    """Blobs of several sources, numbered through (``model.protocols.Source``)."""

    sources: tuple[Source, ...]
    offsets: IntColumn

    def _of(self, blob: int) -> tuple[Source, int]:
        index = int(np.searchsorted(self.offsets, blob, side="right")) - 1
        return self.sources[index], blob - int(self.offsets[index])

    def label(self, blob: int) -> str:
        source, inside = self._of(blob)
        return source.label(inside)

    def read_run(self, blob: int, at: int, buffers: Sequence[memoryview]) -> None:
        source, inside = self._of(blob)
        source.read_run(inside, at, buffers)

    def view(self, blob: int, at: int, nbytes: int) -> memoryview | None:
        source, inside = self._of(blob)
        return source.view(inside, at, nbytes)

    def segments(self, blob: int) -> IntColumn:
        source, inside = self._of(blob)
        return source.segments(inside)

    def pieces(self, blob: int) -> tuple[IntColumn, Sequence[int]] | None:
        source, inside = self._of(blob)
        return source.pieces(inside)


@dataclass(frozen=True)
class Parts:
    """Joined parts: one catalog and one source. ``offsets``: number of each part's first param."""

    catalog: Catalog
    source: JoinedSource
    offsets: tuple[int, ...]


def join_parts(parts: Sequence[OriginPart]) -> Parts:
    """Several parts as one. Raises ``UnsupportedError`` where they keep different slots."""
    slots = parts[0].catalog.state.slots
    for part in parts:
        if part.catalog.state.slots != slots:
            raise UnsupportedError("parts that share a file keep different slots", found=f"part {part.name!r}")
    params: list[ParamSpec] = []
    absent: set[tuple[int, int]] = set()
    for part in parts:
        state = part.catalog.state
        absent |= {(len(params) + param, slot) for param, slot in state.absent}
        params += [replace(spec, name=f"{part.name}/{spec.name}", group=0) for spec in state.params]
    placements = tuple(part.catalog.placement for part in parts)
    placement = JoinedPlacement(placements, tuple(len(part.catalog.state.params) for part in parts))
    first = parts[0].catalog
    joined = PartState(tuple(params), slots, absent=frozenset(absent))
    catalog = Catalog(first.format, first.container, "+".join(part.name for part in parts), joined, None, placement)
    source = JoinedSource(tuple(part.source for part in parts), placement.blob_offsets)
    return Parts(catalog, source, tuple(placement.param_offsets[:-1].tolist()))

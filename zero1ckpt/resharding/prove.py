"""Proves what was read against the source's checksums, from the checksums of the parts it was read in."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..core.digest import shift
from ..core.errors import CorruptError
from ..core.ranges import IntColumn
from ..model.catalog import Catalog
from ..model.protocols import Source

__all__ = ["Prover", "SourcePieces"]


@dataclass(slots=True)
class _Open:
    """A piece of which some bytes were seen."""

    crc: int = 0
    seen: int = 0


@dataclass(frozen=True, slots=True)
class SourcePieces:
    bounds: IntColumn
    crcs: Sequence[int]


@dataclass
class Prover:
    """Collects checksums of source bytes as they pass, in any order and from any thread; each byte is told once.

    A piece is compared when its last byte was seen; one that is never seen whole proves nothing.
    Raises ``CorruptError`` that names file, param, slot and elements.
    """

    catalog: Catalog
    source: Source
    _pieces: dict[int, SourcePieces | None] = field(default_factory=dict)
    _open: dict[tuple[int, int], _Open] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def pieces(self, blob: int) -> SourcePieces | None:
        with self._lock:
            known = blob in self._pieces
            found = self._pieces.get(blob)
        if not known:
            made = self.source.pieces(blob)
            found = None if made is None else SourcePieces(*made)
            with self._lock:
                self._pieces[blob] = found
        return found

    def tell(self, blob: int, piece: int, end: int, nbytes: int, crc: int) -> None:
        """``nbytes`` bytes of a piece that end at payload byte ``end`` have the checksum ``crc``."""
        known = self._pieces[blob]
        assert known is not None
        low, high = int(known.bounds[piece]), int(known.bounds[piece + 1])
        if nbytes == high - low:
            self._compare(blob, piece, crc)
            return
        with self._lock:
            state = self._open.setdefault((blob, piece), _Open())
            state.crc ^= shift(crc, high - end)
            state.seen += nbytes
            if state.seen < high - low:
                return
            del self._open[blob, piece]
        self._compare(blob, piece, state.crc)

    def _compare(self, blob: int, piece: int, crc: int) -> None:
        known = self._pieces[blob]
        assert known is not None
        if crc != known.crcs[piece]:
            raise damaged(self.catalog, self.source.label(blob), blob, known.bounds, piece)


def damaged(catalog: Catalog, label: str, blob: int, bounds: IntColumn, piece: int) -> CorruptError:
    """The error for a piece whose bytes do not have their checksum."""
    low, high = int(bounds[piece]), int(bounds[piece + 1])
    table = catalog.placement.extents(blob)
    row = int(np.searchsorted(table.at, low, side="right")) - 1
    hint = "restore the file from a copy"
    if row < 0 or low >= int(table.at[row] + table.nbytes[row]):
        return CorruptError(f"padding at payload bytes {low} to {high} is damaged", file=label, hint=hint)
    slot = catalog.state.slots[int(table.slot[row])]
    start = int(table.start[row]) + (low - int(table.at[row])) // slot.itemsize
    size = (high - low) // slot.itemsize
    return CorruptError(
        f"{slot.name} elements {start} to {start + size} do not match their checksum",
        file=label,
        param=catalog.state.params[int(table.param[row])].name,
        hint=hint,
    )

"""Joins two catalogs: which bytes of which source blob go to which byte of a destination blob. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..core.errors import CorruptError, UnsupportedError
from ..core.ranges import IntColumn
from ..model.catalog import Catalog
from ..model.state import PartState

__all__ = ["Correspondence", "Moves", "correspond", "cut_moves", "plan_blob", "plan_push", "window_bounds"]


@dataclass(frozen=True, slots=True)
class Moves:
    """Copies into one destination blob, ordered by ``dst_at``; int64 columns of one length, in bytes of payloads."""

    src_blob: IntColumn
    src_at: IntColumn
    dst_at: IntColumn
    nbytes: IntColumn

    def __len__(self) -> int:
        return len(self.nbytes)

    def take(self, rows: IntColumn | slice) -> Moves:
        return Moves(self.src_blob[rows], self.src_at[rows], self.dst_at[rows], self.nbytes[rows])


@dataclass(frozen=True, slots=True)
class Correspondence:
    """Source index of each destination param and slot; -1 where the source has none."""

    param: IntColumn
    slot: IntColumn


def correspond(src: PartState, dst: PartState) -> Correspondence:
    """Matches params and slots by name, and refuses what would change a value or its meaning.

    Raises ``UnsupportedError`` that names the first param or slot whose shape or dtype differs.
    """
    for spec in dst.params:
        other = src.index.get(spec.name)
        if other is not None and src.params[other].shape != spec.shape:
            raise UnsupportedError(
                "the param has another shape in the checkpoint",
                param=spec.name,
                found=list(src.params[other].shape),
                expected=list(spec.shape),
                hint="load it into the model that it was saved from",
            )
    for slot in dst.slots:
        index = src.slot_index.get(slot.name)
        if index is not None and src.slots[index].dtype != slot.dtype:
            raise UnsupportedError(
                f"slot {slot.name} has another dtype in the checkpoint, and nothing is cast",
                found=src.slots[index].dtype,
                expected=slot.dtype,
                hint="use an optimizer that keeps this slot in the stored dtype",
            )
    return Correspondence(
        np.array([src.index.get(spec.name, -1) for spec in dst.params], np.int64),
        np.array([src.slot_index.get(slot.name, -1) for slot in dst.slots], np.int64),
    )


def plan_blob(src: Catalog, dst: Catalog, match: Correspondence, blob: int) -> Moves:
    """The copies that fill one destination blob. Pure.

    Raises ``CorruptError`` that names the first slice which the source does not cover exactly once.
    """
    wanted = dst.placement.extents(blob)
    row, found = src.placement.locate(match.param[wanted.param], match.slot[wanted.slot], wanted.start, wanted.size)
    _check_coverage(dst, wanted.start, wanted.size, wanted.param, wanted.slot, row, found.start, found.size)
    item = wanted.nbytes[row] // wanted.size[row]
    moves = Moves(found.blob, found.at, wanted.at[row] + (found.start - wanted.start[row]) * item, found.nbytes)
    return moves.take(np.argsort(moves.dst_at, kind="stable"))


def plan_push(src: Catalog, dst: Catalog, match: Correspondence, src_blob: int) -> Iterator[tuple[int, Moves]]:
    """Where what one source blob holds lies in the destination: for each of its blobs, the copies into it. Pure."""
    held = src.placement.extents(src_blob)
    param, slot = _inverse(match.param, len(src.state.params)), _inverse(match.slot, len(src.state.slots))
    wanted = np.flatnonzero((param[held.param] >= 0) & (slot[held.slot] >= 0))
    held = held.take(wanted)
    row, found = dst.placement.locate(param[held.param], slot[held.slot], held.start, held.size)
    item = held.nbytes[row] // held.size[row]
    at = held.at[row] + (found.start - held.start[row]) * item
    moves = Moves(np.full(len(row), src_blob), at, found.at, found.nbytes)
    for blob in np.unique(found.blob).tolist():
        mine = moves.take(np.flatnonzero(found.blob == blob))
        yield blob, mine.take(np.argsort(mine.dst_at, kind="stable"))


def _inverse(index: IntColumn, size: int) -> IntColumn:
    """Place of each of ``size`` numbers in ``index``; -1 for those that are not in it."""
    places = np.full(size, -1, np.int64)
    known = np.flatnonzero(index >= 0)
    places[index[known]] = known
    return places


def _check_coverage(
    dst: Catalog,
    start: IntColumn,
    size: IntColumn,
    param: IntColumn,
    slot: IntColumn,
    row: IntColumn,
    found_start: IntColumn,
    found_size: IntColumn,
) -> None:
    """Rows come ordered by (row, start): each must begin where the one before ended."""
    expected = np.empty_like(found_start)
    first = np.concatenate(([True], row[1:] != row[:-1])) if len(row) else np.empty(0, bool)
    ends = found_start + found_size
    expected[first] = start[row[first]]
    expected[~first] = ends[:-1][~first[1:]]
    bad = np.flatnonzero(expected != found_start)
    covered = np.zeros(len(size), np.int64)
    np.add.at(covered, row, found_size)
    short = np.flatnonzero(covered != size)
    if not len(bad) and not len(short):
        return
    at = int(row[bad[0]]) if len(bad) else int(short[0])
    raise CorruptError(
        f"slot {dst.state.slots[int(slot[at])].name} is not covered exactly once by the source",
        param=dst.state.params[int(param[at])].name,
        found=f"{int(covered[at])} elements",
        expected=f"elements {int(start[at])} to {int(start[at] + size[at])}",
    )


def window_bounds(payload: int, window_bytes: int, stops: IntColumn) -> IntColumn:
    """Bounds of the windows that a payload is written in: at most ``window_bytes`` each, none across a stop. Pure."""
    edges = np.unique(np.concatenate(([0, payload], stops[(stops > 0) & (stops < payload)]))).astype(np.int64)
    pieces = [np.arange(low, high, window_bytes) for low, high in pairwise(edges.tolist())]
    return np.concatenate([*pieces, [payload]]).astype(np.int64) if payload else np.zeros(1, np.int64)


def cut_moves(moves: Moves, bounds: IntColumn) -> tuple[Moves, IntColumn]:
    """Cuts moves at window bounds. Pure.

    Returns the cut moves, ordered by ``dst_at``, and for each window the row of its first move (one more for the end).
    """
    first = np.searchsorted(bounds, moves.dst_at, side="right") - 1
    last = np.searchsorted(bounds, moves.dst_at + moves.nbytes, side="left") - 1
    count = last - first + 1
    row = np.repeat(np.arange(len(moves)), count)
    window = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + first[row]
    low = np.maximum(moves.dst_at[row], bounds[window])
    high = np.minimum((moves.dst_at + moves.nbytes)[row], bounds[window + 1])
    cut = Moves(moves.src_blob[row], moves.src_at[row] + low - moves.dst_at[row], low, high - low)
    return cut, np.searchsorted(window, np.arange(len(bounds)), side="left").astype(np.int64)

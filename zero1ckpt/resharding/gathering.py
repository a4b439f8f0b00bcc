"""Writes blobs that have one writer each, from a source whose blobs lie on different ranks.

The owner of a blob is the rank that holds most of it, of several the lowest. It gets what the others hold, puts all in
its place, and writes the blob whole. There are rounds, in each of which every rank writes one blob, and in a round
ranks send to one other at a time: a rank holds one blob, one part that it sends and one that it has got.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import numpy as np

from ..core.digest import crc64
from ..core.ranges import IntColumn
from ..model.catalog import Extents
from ..model.protocols import Area, BlobWriter
from .coalesce import read_moves
from .copying import BlobReport, PartCopy, report_blob
from .plan import Moves, plan_blob

__all__ = ["GatherPlan", "Peers", "gather_part"]


class Peers(Protocol):
    """The ranks that hold the source, rank ``r`` its blob ``r``."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def swap(self, to: int, out: memoryview, origin: int, into: memoryview) -> None:
        """Sends ``out`` to one rank and fills ``into`` from another, at once; what is empty does not travel."""


@dataclass(frozen=True)
class GatherPlan:
    """Who holds what of each destination blob, and who writes it. A value, the same on every rank."""

    part: PartCopy
    ranks: int

    @cached_property
    def _held(self) -> tuple[IntColumn, IntColumn, IntColumn]:
        """Blob, rank and bytes, for each pair of which a rank holds something; by blob, most bytes first."""
        part = self.part
        placement = part.dst.placement
        wanted = Extents.concatenate([placement.extents(blob) for blob in range(placement.blob_count)])
        assert part.match is not None
        param, slot = part.match.param[wanted.param], part.match.slot[wanted.slot]
        row, found = part.src.placement.locate(param, slot, wanted.start, wanted.size)
        pair, place = np.unique(wanted.blob[row] * self.ranks + found.blob, return_inverse=True)
        nbytes = np.zeros(len(pair), np.int64)
        np.add.at(nbytes, place, found.nbytes)
        blob, rank = pair // self.ranks, pair % self.ranks
        order = np.lexsort((rank, -nbytes, blob))
        return blob[order], rank[order], nbytes[order]

    @cached_property
    def owners(self) -> IntColumn:
        """The rank that writes each blob."""
        blob, rank, _ = self._held
        first = np.searchsorted(blob, np.arange(self.part.dst.placement.blob_count))
        return rank[first]

    @property
    def sent(self) -> int:
        """Bytes that travel, over all ranks."""
        blob, rank, nbytes = self._held
        return int(nbytes[rank != self.owners[blob]].sum())

    def rounds(self) -> Iterator[list[int]]:
        """The blob that each rank writes, -1 for none."""
        own = [np.flatnonzero(self.owners == rank).tolist() for rank in range(self.ranks)]
        for turn in range(max(map(len, own), default=0)):
            yield [blobs[turn] if turn < len(blobs) else -1 for blobs in own]

    def moves(self, blob: int, rank: int) -> Moves:
        """The copies into a blob of which a rank has a part to do, its own and the others'; none for -1."""
        blobs, ranks, _ = self._held
        low, high = np.searchsorted(blobs, [blob, blob + 1])
        if rank not in ranks[low:high]:
            return Moves(*(np.empty(0, np.int64) for _ in range(4)))
        assert self.part.match is not None
        return plan_blob(self.part.src, self.part.dst, self.part.match, blob)


def gather_part(part: PartCopy, area: Area, peers: Peers) -> list[BlobReport]:
    """Writes the blobs of a part that this rank owns; all ranks call it. An error of this rank is raised at the end.

    Until then it goes on to send and to take, for the others wait for it. Raises ``OutputError``.
    """
    plan = GatherPlan(part, peers.size)
    reports: list[BlobReport] = []
    failure: BaseException | None = None
    for owned in plan.rounds():
        blob = owned[peers.rank]
        writer = None
        if blob >= 0 and failure is None:
            try:
                writer = part.format.create(area, part.dst, blob)
            except BaseException as error:
                failure = error
        _fill(plan, peers, owned, writer)
        if writer is not None:
            try:
                reports.append(_seal(part, blob, writer))
            except BaseException as error:
                failure = error
    if failure is not None:
        raise failure
    return reports


def _fill(plan: GatherPlan, peers: Peers, owned: list[int], writer: BlobWriter | None) -> None:
    """Sends to each owner what this rank holds of its blob, and puts what it gets for its own into the writer."""
    blob = owned[peers.rank]
    mine = plan.moves(blob, peers.rank)
    for distance in range(peers.size):
        to, origin = (peers.rank + distance) % peers.size, (peers.rank - distance) % peers.size
        out = _packed(plan.part, _held_by(peers.rank, mine if distance == 0 else plan.moves(owned[to], peers.rank)))
        coming, into = _held_by(origin, mine), out
        if distance:
            into = memoryview(bytearray(int(coming.nbytes.sum())))
            peers.swap(to, out, origin, into)
        if writer is not None:
            _unpack(writer, blob, coming, into)


def _held_by(rank: int, moves: Moves) -> Moves:
    return moves.take(np.flatnonzero(moves.src_blob == rank))


def _packed(part: PartCopy, moves: Moves) -> memoryview:
    """The bytes of moves end to end, in the order of the destination."""
    ends = np.cumsum(moves.nbytes)
    data = memoryview(bytearray(int(ends[-1]) if len(ends) else 0))
    read_moves(part.source, Moves(moves.src_blob, moves.src_at, ends - moves.nbytes, moves.nbytes), data, 0)
    return data


def _unpack(writer: BlobWriter, blob: int, moves: Moves, data: memoryview) -> None:
    done = 0
    for at, nbytes in zip(moves.dst_at.tolist(), moves.nbytes.tolist(), strict=True):
        writer.write(blob, at, data[done : done + nbytes])
        done += nbytes


def _seal(part: PartCopy, blob: int, writer: BlobWriter) -> BlobReport:
    data = writer.view(blob, 0, part.dst.placement.payload_nbytes(blob))
    assert data is not None  # what is written whole is held whole
    cuts = part.format.cuts(part.dst, blob).tolist()
    pieces = [crc64(data[low:high]) for low, high in pairwise(cuts)]
    return report_blob(part.dst, part.format, blob, writer.seal(pieces), pieces)

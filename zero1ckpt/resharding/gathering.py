"""Writes blobs that have one writer each, from a source whose blobs lie on different ranks.

The owner of a blob is the rank that holds most of it, of several the lowest. It gets what the others hold, puts all in
its place, and writes the blob whole. There are rounds, in each of which every rank writes one blob, and in a round
ranks send to one other at a time: a rank holds one blob, one part that it sends and one that it has got. Before bytes
travel both ends tell whether they can, so that no rank waits for one that has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Protocol, TypeVar

import numpy as np

from ..core.digest import crc64
from ..core.errors import LostRankError
from ..core.ranges import IntColumn
from ..model.catalog import Extents
from ..model.protocols import Area, BlobWriter
from .coalesce import read_moves
from .copying import BlobReport, PartCopy, report_blob
from .plan import Moves, plan_blob

__all__ = ["GatherPlan", "Peers", "gather_part"]

_T = TypeVar("_T")
_NOTHING = memoryview(b"")


class Peers(Protocol):
    """The ranks that hold the source, rank ``r`` its blob ``r``."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def swap(self, to: int, out: memoryview, origin: int, into: memoryview) -> None:
        """Sends ``out`` to one rank and fills ``into`` from another, at once; what is empty does not travel."""

    def greet(self, to: int, origin: int, culprit: int) -> tuple[int, int]:
        """Tells both ranks the number of a rank that has failed, -1 for none, and hears theirs; a rank -1 says -1."""

    def lost(self, rank: int) -> LostRankError:
        """The error on this rank where another has failed."""


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

    def nbytes(self, blob: int, rank: int) -> int:
        """Bytes that a rank holds of a blob; 0 for blob -1."""
        blobs, ranks, nbytes = self._held
        low, high = np.searchsorted(blobs, [blob, blob + 1])
        return int(nbytes[low:high][ranks[low:high] == rank].sum())

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

    Until then it goes on to greet the others, which would wait for it; who is told that a rank has failed, in its place
    or in another's, raises ``LostRankError`` that names the rank. Raises ``OutputError``.
    """
    run = _Gathering(GatherPlan(part, peers.size), area, peers)
    for owned in run.plan.rounds():
        run.round(owned)
    if run.failure is not None:
        raise run.failure
    return run.reports


@dataclass
class _Gathering:
    """One rank's rounds. ``culprit``: the rank that has failed first, as far as this one has heard; -1 for none."""

    plan: GatherPlan
    area: Area
    peers: Peers
    reports: list[BlobReport] = field(default_factory=list)
    failure: BaseException | None = None
    culprit: int = -1

    def round(self, owned: list[int]) -> None:
        """Sends to each owner what this rank holds of its blob; fills and seals its own."""
        blob, rank, part = owned[self.peers.rank], self.peers.rank, self.plan.part
        writer = self._try(lambda: part.format.create(self.area, part.dst, blob)) if blob >= 0 else None
        mine = self._try(lambda: self.plan.moves(blob, rank))
        for distance in range(self.peers.size):
            to, origin = (rank + distance) % self.peers.size, (rank - distance) % self.peers.size
            if distance:
                self._trade(to, owned[to], origin, mine, blob, writer)
            elif self.plan.nbytes(blob, rank):
                self._try(lambda: self._keep(_of(mine), blob, _of(writer)))
        if writer is not None:
            report = self._try(lambda: _seal(part, blob, _of(writer)))
            self.reports += [] if report is None else [report]

    def _keep(self, mine: Moves, blob: int, writer: BlobWriter) -> None:
        own = _held_by(self.peers.rank, mine)
        _unpack(writer, blob, own, _packed(self.plan.part, own))

    def _trade(
        self, to: int, theirs: int, origin: int, mine: Moves | None, blob: int, writer: BlobWriter | None
    ) -> None:
        """Sends what it holds of blob ``theirs``, and takes what ``origin`` holds of its own ``blob``.

        Bytes travel only where both ends have said before that they are able to.
        """
        out_bytes, into_bytes = self.plan.nbytes(theirs, self.peers.rank), self.plan.nbytes(blob, origin)
        out = self._try(lambda: self._pack(theirs)) if out_bytes else None
        into = self._try(lambda: memoryview(bytearray(into_bytes))) if into_bytes else None
        told = self.peers.greet(to if out_bytes else -1, origin if into_bytes else -1, self.culprit)
        fit = self.failure is None
        data = out if fit and told[0] < 0 and out is not None else _NOTHING
        room = into if fit and told[1] < 0 and into is not None else _NOTHING
        self.peers.swap(to, data, origin, room)
        for other in told:
            self._hear(other)
        if room.nbytes:
            self._try(lambda: _unpack(_of(writer), blob, _held_by(origin, _of(mine)), room))

    def _pack(self, blob: int) -> memoryview:
        rank = self.peers.rank
        return _packed(self.plan.part, _held_by(rank, self.plan.moves(blob, rank)))

    def _try(self, work: Callable[[], _T]) -> _T | None:
        """The result; None after a failure, this one or an earlier, whatever it is."""
        if self.failure is not None:
            return None
        try:
            return work()
        except BaseException as error:
            self.failure, self.culprit = error, self.peers.rank
            return None

    def _hear(self, culprit: int) -> None:
        if culprit >= 0 and self.failure is None:
            self.failure, self.culprit = self.peers.lost(culprit), culprit


def _of(value: _T | None) -> _T:
    assert value is not None  # without a failure all are there
    return value


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

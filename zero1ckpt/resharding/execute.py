"""Executes copy plans in bounded memory, with a pool of threads.

The unit of memory and of parallelism is a window of a destination blob. Bytes go from the source into their final place
in one buffer, are checksummed there once, and go on to the destination. The checksummed runs are the common refinement
of the source's and the destination's pieces, so that one pass proves the one and makes the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ..core.digest import crc64, crc64_zeros, shift
from ..core.ranges import IntColumn
from ..model.protocols import Progress, Sink, Source
from .coalesce import read_moves
from .plan import Moves, cut_moves, window_bounds
from .prove import Prover

__all__ = ["Copier", "Job", "in_parallel", "run_jobs"]

_T = TypeVar("_T")


@dataclass
class Job:
    """One destination blob. ``moves`` None: the destination mirrors the source byte for byte, padding included.

    ``cuts`` are the bounds of the destination's pieces, whose checksums are collected in ``crcs``; no window crosses
    one of ``stops``; with ``pad`` what no move fills becomes zero, else it stays as it is; ``finish`` is called once,
    by the worker that has done the last window.
    """

    blob: int
    payload: int
    moves: Moves | None
    cuts: IntColumn
    stops: IntColumn
    sink: Sink
    finish: Callable[[Job], None]
    pad: bool = True
    crcs: dict[int, int] = field(init=False, default_factory=dict)
    remaining: int = field(init=False, default=0)

    def pieces(self) -> list[int]:
        """The checksums of all pieces, once all windows are done."""
        return [self.crcs.get(piece, 0) for piece in range(len(self.cuts) - 1)]


@dataclass(frozen=True, slots=True)
class _Window:
    job: Job
    at: int
    nbytes: int
    moves: Moves | None


@dataclass
class Copier:
    """What all windows of a run share. ``window_bytes`` bounds each worker's buffer."""

    source: Source
    prover: Prover | None
    window_bytes: int
    checksum: bool = True
    progress: Progress | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _local: threading.local = field(default_factory=threading.local)

    def windows(self, job: Job) -> Iterator[_Window]:
        """The windows of one blob, in order; an empty payload has one empty window."""
        bounds = window_bounds(job.payload, self.window_bytes, job.stops)
        cut, first = cut_moves(job.moves, bounds) if job.moves is not None else (None, bounds)
        wanted = np.arange(len(bounds) - 1) if job.pad else np.flatnonzero(np.diff(first))
        job.remaining = max(len(wanted), 1)
        if not len(wanted):
            yield _Window(job, 0, 0, None)
        for i in wanted.tolist():
            low, high = int(bounds[i]), int(bounds[i + 1])
            part = None if cut is None else cut.take(slice(int(first[i]), int(first[i + 1])))
            yield _Window(job, low, high - low, part)

    def run(self, window: _Window) -> None:
        """Copies one window; the last one of a blob finishes it."""
        job = window.job
        if window.nbytes:
            self._copy(window)
        with self._lock:
            job.remaining -= 1
            last = job.remaining == 0
        if last:
            job.finish(job)
        if self.progress is not None:
            self.progress.advance(window.nbytes)

    def _copy(self, window: _Window) -> None:
        job, at, nbytes = window.job, window.at, window.nbytes
        if window.moves is None:
            data = self.source.view(job.blob, at, nbytes)
            if data is None:
                data = self._buffer(nbytes)
                self.source.read_run(job.blob, at, [data])
            self._hash_mirror(window, data)
            job.sink.write(job.blob, at, data)
            return
        target = job.sink.view(job.blob, at, nbytes)
        data = self._buffer(nbytes) if target is None else target
        if job.pad:
            _zero_gaps(data, window.moves, at)
        read_moves(self.source, window.moves, data, at)
        self._hash_moves(window, data)
        if target is None:
            for low, high in [(at, at + nbytes)] if job.pad else _filled(window.moves):
                job.sink.write(job.blob, low, data[low - at : high - at])

    def _buffer(self, nbytes: int) -> memoryview:
        """This worker's buffer; grown to what it needs, kept for the next window."""
        held: memoryview | None = getattr(self._local, "buffer", None)
        if held is None or held.nbytes < nbytes:
            self._local.buffer = None
            held = memoryview(np.empty(nbytes, np.uint8).data)
            self._local.buffer = held
        return held[:nbytes]

    def _hash_mirror(self, window: _Window, data: memoryview) -> None:
        if not self.checksum:
            return
        cuts = _inside(window.job.cuts, window.at, window.at + window.nbytes)
        piece = np.searchsorted(window.job.cuts, cuts[:-1], side="right") - 1
        crcs = [crc64(data[low - window.at : high - window.at]) for low, high in _pairs(cuts)]
        self._add(window.job, piece.tolist(), cuts[1:].tolist(), crcs)

    def _hash_moves(self, window: _Window, data: memoryview) -> None:
        if not self.checksum and self.prover is None:
            return
        job, at, moves = window.job, window.at, window.moves
        assert moves is not None
        cuts = _inside(job.cuts, at, at + window.nbytes)
        runs = np.unique(np.concatenate([cuts, moves.dst_at, moves.dst_at + moves.nbytes, *self._source_cuts(moves)]))
        row = np.searchsorted(moves.dst_at, runs[:-1], side="right") - 1
        inside = row >= 0
        if len(moves):
            inside &= runs[:-1] < (moves.dst_at + moves.nbytes)[row]
        piece = np.searchsorted(job.cuts, runs[:-1], side="right") - 1
        crcs = []
        for (low, high), full in zip(_pairs(runs), inside.tolist(), strict=True):
            crcs.append(crc64(data[low - at : high - at]) if full else crc64_zeros(high - low))
        if self.checksum:
            known = np.arange(len(crcs)) if job.pad else np.flatnonzero(inside)
            self._add(job, piece[known].tolist(), runs[1:][known].tolist(), [crcs[i] for i in known.tolist()])
        if self.prover is not None:
            self._prove(self.prover, moves, runs, row, inside, crcs)

    def _source_cuts(self, moves: Moves) -> list[IntColumn]:
        """Bounds of the source's pieces, as bytes of the destination."""
        if self.prover is None:
            return []
        found = []
        for blob in np.unique(moves.src_blob).tolist():
            pieces = self.prover.pieces(blob)
            if pieces is None:
                continue
            mine = moves.take(np.flatnonzero(moves.src_blob == blob))
            first = np.searchsorted(pieces.bounds, mine.src_at, side="right")
            last = np.searchsorted(pieces.bounds, mine.src_at + mine.nbytes, side="left")
            count = np.maximum(last - first, 0)
            row = np.repeat(np.arange(len(mine)), count)
            pick = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + first[row]
            found.append(pieces.bounds[pick] - mine.src_at[row] + mine.dst_at[row])
        return found

    def _prove(
        self,
        prover: Prover,
        moves: Moves,
        runs: IntColumn,
        row: IntColumn,
        inside: npt.NDArray[np.bool_],
        crcs: Sequence[int],
    ) -> None:
        rows = np.flatnonzero(inside)
        offset = (moves.src_at - moves.dst_at)[row[rows]]
        low, high = runs[rows] + offset, runs[rows + 1] + offset
        blob = moves.src_blob[row[rows]]
        for b in np.unique(blob).tolist():
            pieces = prover.pieces(b)
            if pieces is None:
                continue
            mine = np.flatnonzero(blob == b)
            piece = np.searchsorted(pieces.bounds, low[mine], side="right") - 1
            for i, p, begin, end in zip(
                rows[mine].tolist(), piece.tolist(), low[mine].tolist(), high[mine].tolist(), strict=True
            ):
                prover.tell(b, p, end, end - begin, crcs[i])

    def _add(self, job: Job, piece: list[int], end: list[int], crcs: Sequence[int]) -> None:
        following = [int(job.cuts[p + 1]) - e for p, e in zip(piece, end, strict=True)]
        moved = [shift(crc, n) if n else crc for crc, n in zip(crcs, following, strict=True)]
        with self._lock:
            for p, crc in zip(piece, moved, strict=True):
                job.crcs[p] = job.crcs.get(p, 0) ^ crc


def run_jobs(copier: Copier, jobs: Iterator[Job], workers: int) -> None:
    """Runs all windows of all jobs, ``workers`` at a time; jobs are made as they are needed.

    The first error stops the others at their next window and is raised.
    """
    in_parallel((window for job in jobs for window in copier.windows(job)), copier.run, workers)


def in_parallel(jobs: Iterator[_T], work: Callable[[_T], None], workers: int) -> None:
    """Does all jobs, which are made as they are needed; the first error stops the others and is raised."""
    lock = threading.Lock()
    stop = threading.Event()

    def run() -> None:
        try:
            while not stop.is_set():
                with lock:
                    try:
                        job = next(jobs)
                    except StopIteration:
                        return
                work(job)
        except BaseException:
            stop.set()
            raise

    if workers == 1:
        run()
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="zero1ckpt") as pool:
        futures = [pool.submit(run) for _ in range(workers)]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:
            stop.set()
            raise
    for future in futures:
        future.result()


def _inside(cuts: IntColumn, low: int, high: int) -> IntColumn:
    """The cuts strictly inside ``[low, high]``, and both ends."""
    first, last = np.searchsorted(cuts, [low, high], side="left")
    return np.unique(np.concatenate((cuts[first:last], [low, high]))).astype(np.int64)


def _pairs(bounds: IntColumn) -> Iterator[tuple[int, int]]:
    return pairwise(bounds.tolist())


def _filled(moves: Moves) -> Iterator[tuple[int, int]]:
    """Runs of bytes that moves fill without a gap between them."""
    ends = moves.dst_at + moves.nbytes
    breaks = np.flatnonzero(moves.dst_at[1:] != ends[:-1]) + 1
    first = np.concatenate(([0], breaks)) if len(moves) else breaks
    last = np.concatenate((breaks, [len(moves)])) if len(moves) else breaks
    return zip(moves.dst_at[first].tolist(), ends[last - 1].tolist(), strict=True)


def _zero_gaps(data: memoryview, moves: Moves, at: int) -> None:
    """Padding is zero: what no move fills."""
    ends = np.concatenate(([0], moves.dst_at + moves.nbytes - at))
    starts = np.concatenate((moves.dst_at - at, [data.nbytes]))
    gaps = np.flatnonzero(starts > ends)
    if len(gaps):
        view = np.frombuffer(data, np.uint8)
        for low, high in zip(ends[gaps].tolist(), starts[gaps].tolist(), strict=True):
            view[low:high] = 0

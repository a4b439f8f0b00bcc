"""Copies one part of a checkpoint: whole blobs (pull), or a rank's share of blobs that ranks write together (push)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ..core.digest import crc64, format_digest, shift
from ..core.errors import CorruptError, MissingError, UsageError
from ..model.catalog import Catalog, fold_pieces
from ..model.manifest import FileEntry
from ..model.protocols import Area, BlobWriter, Format, Progress, Source
from ..storage.local import LocalStore
from .execute import Copier, Job, run_jobs
from .plan import Correspondence, plan_blob, plan_push
from .prove import Prover

__all__ = ["BlobReport", "PartCopy", "Share", "copy_part", "push_part", "report_blob", "seal_blobs"]

_LARGE_WINDOW = 16 * 2**20
"""Smaller windows mean that memory is short."""
_ALWAYS_HELD = 2**17


@dataclass(frozen=True, slots=True)
class BlobReport:
    """What was written of one blob: its files, and what it adds to the value checksum of each (param, slot)."""

    files: Sequence[FileEntry]
    values: Mapping[tuple[int, int], int]


@dataclass(frozen=True, slots=True)
class Share:
    """One process's share of a blob: what it added to the checksum of each piece, and what its writer has to tell.

    ``sent``: bytes of tensors in that.
    """

    crcs: Mapping[int, int]
    told: object
    sent: int = 0


@dataclass(frozen=True)
class PartCopy:
    """One part's copy, from a source to a planned catalog. ``match`` None: the source is the destination's image."""

    src: Catalog
    source: Source
    dst: Catalog
    format: Format
    match: Correspondence | None


@dataclass
class _Reports:
    """Reports of blobs as they are completed, by several threads."""

    part: PartCopy
    done: dict[int, BlobReport] = field(default_factory=dict)
    writers: list[BlobWriter] = field(default_factory=list)

    def close(self) -> None:
        """Lets go of the files of blobs that were not completed, so that what is then removed is not held open."""
        for writer in self.writers:
            writer.close()

    def add(self, blob: int, files: Sequence[FileEntry], pieces: Sequence[int]) -> None:
        self.done[blob] = report_blob(self.part.dst, self.part.format, blob, files, pieces)


def copy_part(
    part: PartCopy,
    area: Area,
    blobs: Iterable[int],
    *,
    workers: int,
    window_bytes: int,
    prove: bool,
    progress: Progress | None = None,
) -> list[BlobReport]:
    """Writes whole blobs of one part into an area and reports each, in the order of ``blobs``.

    Blobs that a resumed area holds already are taken over. Raises ``CorruptError``, ``OutputError``, and ``UsageError``
    where there is not the memory for a blob that is written whole.
    """
    reports = _Reports(part)
    prover = Prover(part.src, part.source) if prove else None
    copier = Copier(part.source, prover, window_bytes, progress=progress)
    wanted = list(blobs)
    threads = _threads(part, wanted, workers, window_bytes)

    def jobs() -> Iterator[Job]:
        for blob in wanted:
            done = _adopt(part, area, blob, window_bytes) if area.resumed else None
            if done is None:
                yield _job(part, area, blob, reports)
            else:
                reports.add(blob, *done)
                if progress is not None:
                    progress.advance(part.dst.placement.payload_nbytes(blob))

    try:
        run_jobs(copier, jobs(), threads)
    finally:
        reports.close()
    return [reports.done[blob] for blob in wanted]


def _adopt(part: PartCopy, area: Area, blob: int, window_bytes: int) -> tuple[list[FileEntry], Sequence[int]] | None:
    """Files and pieces of a blob that an interrupted run has completed, if its bytes are still what was written."""
    done = part.format.adopt(area, part.dst, blob)
    if done is None:
        return None
    store = LocalStore(area.root)
    try:
        whole = all(_file_digest(store, entry, window_bytes) == entry.digest for entry in done[0])
    except (CorruptError, MissingError):
        return None
    finally:
        store.close()
    return done if whole else None


def _file_digest(store: LocalStore, entry: FileEntry, window_bytes: int) -> str:
    window = memoryview(bytearray(min(window_bytes, max(entry.bytes, 1))))
    crc = 0
    for at in range(0, entry.bytes, window.nbytes):
        data = window[: min(window.nbytes, entry.bytes - at)]
        store.readv_into(entry.path, at, [data])
        crc = shift(crc, data.nbytes) ^ crc64(data)
    return format_digest(crc)


def _threads(part: PartCopy, blobs: Sequence[int], workers: int, window_bytes: int) -> int:
    """Workers for which there is memory: a blob that is written whole is held, its values and what is stored of them.

    Raises ``UsageError`` where one does not fit into windows that are smaller than they could be.
    """
    whole = [blob for blob in blobs if len(part.format.stops(part.dst, blob))]
    held = 2 * max((part.dst.placement.payload_nbytes(blob) for blob in whole), default=0)
    if held > max(workers * window_bytes, _ALWAYS_HELD) and window_bytes < _LARGE_WINDOW:
        raise UsageError(
            "the memory limit is too small for a file that is written whole",
            found=f"{workers * window_bytes} bytes",
            expected=f"at least {held} bytes",
            hint="raise --memory-limit or choose a smaller shard size",
        )
    return min(workers, max(workers * window_bytes // held, 1)) if held else workers


def _job(part: PartCopy, area: Area, blob: int, reports: _Reports) -> Job:
    placement = part.dst.placement
    moves = None if part.match is None else plan_blob(part.src, part.dst, part.match, blob)
    cuts = part.format.cuts(part.dst, blob)
    stops = part.format.stops(part.dst, blob)
    if moves is None:
        stops = np.union1d(stops, part.source.segments(blob))
    writer = part.format.create(area, part.dst, blob)
    reports.writers.append(writer)

    def finish(job: Job) -> None:
        pieces = job.pieces()
        reports.add(blob, writer.seal(pieces), pieces)
        reports.writers.remove(writer)

    return Job(blob, placement.payload_nbytes(blob), moves, cuts, stops, writer, finish)


def push_part(
    part: PartCopy, area: Area, src_blob: int, *, window_bytes: int, progress: Progress | None = None
) -> dict[int, Share]:
    """Writes what one source blob holds into the blobs of the destination, which exist, and makes it durable.

    Returns this process's share by destination blob. Raises ``OutputError``.
    """
    assert part.match is not None
    added: dict[int, Share] = {}

    def jobs() -> Iterator[Job]:
        assert part.match is not None
        for blob, moves in plan_push(part.src, part.dst, part.match, src_blob):
            writer = part.format.attach(area, part.dst, blob)
            finish = partial(_keep, writer, added)
            payload = part.dst.placement.payload_nbytes(blob)
            cuts, stops = part.format.cuts(part.dst, blob), part.format.stops(part.dst, blob)
            yield Job(blob, payload, moves, cuts, stops, writer, finish, pad=False)

    run_jobs(Copier(part.source, None, window_bytes, progress=progress), jobs(), 1)
    return added


def _keep(writer: BlobWriter, added: dict[int, Share], job: Job) -> None:
    added[job.blob] = Share(job.crcs, writer.sync(), writer.told_bytes)


def seal_blobs(format: Format, catalog: Catalog, area: Area, added: Sequence[Mapping[int, Share]]) -> list[BlobReport]:
    """Completes blobs that several processes have written, from the share of each."""
    reports = []
    for blob in range(catalog.placement.blob_count):
        pieces = [0] * (len(format.cuts(catalog, blob)) - 1)
        shares = [own[blob] for own in added if blob in own]
        for share in shares:
            for piece, crc in share.crcs.items():
                pieces[piece] ^= crc
        files = format.attach(area, catalog, blob).seal(pieces, [share.told for share in shares])
        reports.append(report_blob(catalog, format, blob, files, pieces))
    return reports


def report_blob(
    catalog: Catalog, format: Format, blob: int, files: Sequence[FileEntry], pieces: Sequence[int]
) -> BlobReport:
    """What a blob's files and pieces come to. Pure."""
    extents, cuts = catalog.placement.extents(blob), format.cuts(catalog, blob)
    return BlobReport(files, fold_pieces(catalog.state, extents, cuts, pieces))

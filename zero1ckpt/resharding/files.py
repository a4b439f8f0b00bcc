"""Checkpoint files as source and sink of the copy loop, and what was written of each."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..core.digest import crc64, format_digest
from ..core.errors import CorruptError
from ..core.ranges import IntColumn
from ..encodings.safetensors_file import file_crc
from ..model.catalog import Catalog, fold_pieces
from ..model.manifest import FileEntry
from ..model.protocols import BlobHeader, Format, Progress, Source, Store
from ..storage.local import LocalStore, OutputFile, writing
from ..storage.staging import Area
from .execute import Copier, Job, run_jobs
from .plan import Correspondence, plan_blob
from .prove import Prover

__all__ = ["BlobReport", "FileSource", "PartCopy", "copy_part"]


@dataclass(frozen=True, slots=True)
class BlobReport:
    """What was written of one blob: its file, and what it adds to the value checksum of each (param, slot)."""

    file: FileEntry
    values: Mapping[tuple[int, int], int]


@dataclass
class FileSource:
    """Payloads of a committed checkpoint. A header is read when its blob is first needed, and proved by the manifest.

    ``files`` maps paths to manifest entries. Thread-safe.
    """

    store: Store
    catalog: Catalog
    format: Format
    files: Mapping[str, FileEntry]
    _headers: dict[int, tuple[BlobHeader, IntColumn]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def label(self, blob: int) -> str:
        return self.store.label(self.catalog.placement.blob_key(blob))

    def header(self, blob: int) -> tuple[BlobHeader, IntColumn]:
        """The blob's header and the bounds of its pieces."""
        with self._lock:
            known = self._headers.get(blob)
            if known is None:
                known = self._headers[blob] = self._read(blob)
            return known

    def _read(self, blob: int) -> tuple[BlobHeader, IntColumn]:
        header = self.format.read_header(self.store, self.catalog, blob)
        cuts = self.format.cuts(self.catalog, blob)
        entry = self.files[self.catalog.placement.blob_key(blob)]
        actual = None
        if len(header.pieces) == len(cuts) - 1:
            actual = format_digest(file_crc(header.crc, cuts, header.pieces))
        if actual != entry.digest:
            raise CorruptError(
                "the file is not the one that the manifest describes: altered, swapped, or from another save",
                file=self.label(blob),
                found=f"digest {actual}",
                expected=entry.digest,
                hint="restore it from a copy",
            )
        return header, cuts

    def read_run(self, blob: int, at: int, buffers: Sequence[memoryview]) -> None:
        header, _ = self.header(blob)
        self.store.readv_into(self.catalog.placement.blob_key(blob), header.payload + at, buffers)

    def view(self, blob: int, at: int, nbytes: int) -> memoryview | None:
        return None

    def segments(self, blob: int) -> IntColumn:
        return np.empty(0, np.int64)

    def pieces(self, blob: int) -> tuple[IntColumn, Sequence[int]] | None:
        header, cuts = self.header(blob)
        return cuts, header.pieces


class _BlobFile:
    """One destination file while it is written: aside, then durable, then under its name."""

    def __init__(self, path: Path, payload_at: int, payload: int) -> None:
        self.path = path
        self.payload_at = payload_at
        self.file = OutputFile(path.with_name(path.name + ".part"), payload_at + payload)

    def view(self, blob: int, at: int, nbytes: int) -> memoryview | None:
        return None

    def write(self, blob: int, at: int, data: memoryview) -> None:
        self.file.write(self.payload_at + at, data)

    def seal(self, header: bytes) -> None:
        self.file.write(0, memoryview(header))
        self.file.sync_and_close()
        with writing(self.path):
            self.file.path.rename(self.path)


@dataclass(frozen=True)
class PartCopy:
    """One part's copy, from a source to a planned catalog. ``match`` None: the source is the destination's image."""

    src: Catalog
    source: Source
    dst: Catalog
    format: Format
    match: Correspondence | None


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
    """Writes blobs of one part into an area and reports each, in the order of ``blobs``.

    Blobs that a resumed area holds already are taken over. Raises ``CorruptError``, ``OutputError``.
    """
    reports: dict[int, BlobReport] = {}
    prover = Prover(part.src, part.source) if prove else None
    copier = Copier(part.source, prover, window_bytes, progress=progress)
    wanted = list(blobs)

    def jobs() -> Iterator[Job]:
        for blob in wanted:
            done = _taken_over(part, area, blob)
            if done is None:
                yield _job(part, area, blob, reports)
            else:
                reports[blob] = done
                if progress is not None:
                    progress.advance(part.dst.placement.payload_nbytes(blob))

    run_jobs(copier, jobs(), workers)
    return [reports[blob] for blob in wanted]


def _job(part: PartCopy, area: Area, blob: int, reports: dict[int, BlobReport]) -> Job:
    placement = part.dst.placement
    moves = None if part.match is None else plan_blob(part.src, part.dst, part.match, blob)
    cuts = part.format.cuts(part.dst, blob)
    payload = placement.payload_nbytes(blob)
    blank = part.format.header(part.dst, blob, [0] * (len(cuts) - 1))
    file = _BlobFile(area.path(placement.blob_key(blob)), len(blank), payload)

    def finish(job: Job) -> None:
        header = part.format.header(part.dst, blob, job.crcs)
        file.seal(header)
        reports[blob] = _report(part.dst, blob, len(header), crc64(header), cuts, job.crcs)

    stops = part.source.segments(blob) if moves is None else np.empty(0, np.int64)
    return Job(blob, payload, moves, cuts, stops, file, finish)


def _report(
    catalog: Catalog, blob: int, header_nbytes: int, header_crc: int, cuts: IntColumn, crcs: Sequence[int]
) -> BlobReport:
    """The report of a blob from its header and its pieces' checksums. Pure."""
    nbytes = header_nbytes + int(cuts[-1])
    digest = format_digest(file_crc(header_crc, cuts, crcs))
    entry = FileEntry(catalog.placement.blob_key(blob), nbytes, digest)
    return BlobReport(entry, fold_pieces(catalog.state, catalog.placement.extents(blob), cuts, crcs))


def _taken_over(part: PartCopy, area: Area, blob: int) -> BlobReport | None:
    """The report of a blob that an earlier, interrupted run of the same job has finished, from its own header."""
    key = part.dst.placement.blob_key(blob)
    if not area.resumed or not (area.root / key).exists():
        return None
    store = LocalStore(area.root)
    try:
        header = part.format.read_header(store, part.dst, blob)
    except CorruptError:
        return None
    finally:
        store.close()
    return _report(part.dst, blob, header.payload, header.crc, part.format.cuts(part.dst, blob), header.pieces)

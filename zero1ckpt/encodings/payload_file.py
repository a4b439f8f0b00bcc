"""Blobs that are one safetensors file each: a header, then the payload. As source, and while they are written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np

from ..core.digest import crc64, format_digest
from ..core.errors import CorruptError
from ..core.ranges import IntColumn
from ..model.catalog import Catalog
from ..model.manifest import FileEntry
from ..model.protocols import Store
from ..storage.local import writing
from .part_file import Edge, PartFile
from .safetensors_file import Header, file_crc

__all__ = ["PayloadFile", "PayloadSource", "entry_of", "proved_header"]

ReadHeader = Callable[[int], Header]
Cuts = Callable[[int], IntColumn]


@dataclass(frozen=True, slots=True)
class _Payload:
    """What is kept of a blob's header: its tensors, a million of them over all blobs, are checked and let go of."""

    offset: int
    cuts: IntColumn
    pieces: Sequence[int]


@dataclass
class PayloadSource:
    """Payloads of a committed checkpoint. A header is read when its blob is first needed, and proved by the manifest.

    ``read_header`` reads and checks a blob's header, ``cuts`` tells the bounds of its pieces. Thread-safe.
    """

    store: Store
    catalog: Catalog
    files: Mapping[str, FileEntry]
    read_header: ReadHeader
    cuts: Cuts
    _known: dict[int, _Payload] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def label(self, blob: int) -> str:
        return self.store.label(self.catalog.placement.blob_key(blob))

    def _payload(self, blob: int) -> _Payload:
        with self._lock:
            known = self._known.get(blob)
            if known is None:
                cuts = self.cuts(blob)
                entry = self.files[self.catalog.placement.blob_key(blob)]
                header = proved_header(self.read_header(blob), cuts, entry, self.label(blob))
                known = self._known[blob] = _Payload(header.payload, cuts, header.pieces)
            return known

    def read_run(self, blob: int, at: int, buffers: Sequence[memoryview]) -> None:
        self.store.readv_into(self.catalog.placement.blob_key(blob), self._payload(blob).offset + at, buffers)

    def view(self, blob: int, at: int, nbytes: int) -> memoryview | None:
        return None

    def segments(self, blob: int) -> IntColumn:
        return np.empty(0, np.int64)

    def pieces(self, blob: int) -> tuple[IntColumn, Sequence[int]] | None:
        known = self._payload(blob)
        return known.cuts, known.pieces


def proved_header(header: Header, cuts: IntColumn, entry: FileEntry, label: str) -> Header:
    """The header, if it and the pieces it states have the digest that the manifest states for the file.

    Raises ``CorruptError`` otherwise.
    """
    actual = None
    if len(header.pieces) == len(cuts) - 1:
        actual = format_digest(file_crc(header.crc, cuts, header.pieces))
    if actual != entry.digest:
        raise CorruptError(
            "the file is not the one that the manifest describes: altered, swapped, or from another save",
            file=label,
            found=f"digest {actual}",
            expected=entry.digest,
            hint="restore it from a copy",
        )
    return header


class PayloadFile:
    """One file while it is written: aside under ``.part``, then durable, then under its name.

    ``header`` makes the bytes before the payload from the pieces' checksums; its length does not depend on them.
    ``whole_pages``: see ``PartFile``.
    """

    def __init__(
        self,
        path: Path,
        key: str,
        cuts: IntColumn,
        header: Callable[[Sequence[int]], bytes],
        *,
        create: bool,
        whole_pages: bool = False,
    ) -> None:
        self.path = path
        self.key = key
        self._cuts = cuts
        self._header = header
        self._payload_at = len(header([0] * (len(cuts) - 1)))
        aside = path.with_name(path.name + ".part")
        self._file = PartFile(aside, self._payload_at + int(cuts[-1]), create=create, whole_pages=whole_pages)

    def view(self, blob: int, at: int, nbytes: int) -> memoryview | None:
        return None

    def write(self, blob: int, at: int, data: memoryview) -> None:
        self._file.write_part(self._payload_at + at, data)

    def sync(self) -> list[Edge]:
        return self._file.sync()

    @property
    def told_bytes(self) -> int:
        return self._file.told_bytes

    def seal(self, pieces: Sequence[int], shares: Sequence[object] = ()) -> list[FileEntry]:
        for edges in shares:
            self._file.write_edges(cast(list[Edge], edges))
        header = self._header(pieces)
        assert len(header) == self._payload_at
        self._file.write(0, memoryview(header))
        self._file.sync_and_close()
        with writing(self.path):
            self._file.path.rename(self.path)
        return [entry_of(self.key, len(header), crc64(header), self._cuts, pieces)]

    def close(self) -> None:
        self._file.close()


def entry_of(key: str, header_nbytes: int, header_crc: int, cuts: IntColumn, pieces: Sequence[int]) -> FileEntry:
    """The manifest entry of a file from its header and its payload's pieces. Pure."""
    digest = format_digest(file_crc(header_crc, cuts, pieces))
    return FileEntry(key, header_nbytes + int(cuts[-1]), digest)

"""Blobs whose tensors lie between bytes of structure (zip archives end to end), with their checksums in a sidecar.

The payload is the whole file. Structure before a tensor is known beforehand; structure after it holds the CRC-32 of the
tensor's bytes (``encodings.torch_archive``), so the frames are written when all bytes are there, from the partial
CRC-32s of whoever wrote them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
from awscrt.checksums import combine_crc32, crc32

from ..core.digest import CHECKSUM, crc64, format_digest, parse_digest
from ..core.errors import CorruptError
from ..core.ranges import IntColumn
from ..model.catalog import PIECE_BYTES, Catalog
from ..model.manifest import FileEntry
from ..model.protocols import Store
from ..storage.local import OutputFile, writing
from .part_file import Edge, PartFile
from .payload_file import entry_of

__all__ = ["FramedFile", "FramedSource", "Sidecar", "read_sidecar", "sidecar_key"]

Frames = Callable[[Sequence[int]], list[tuple[int, bytes]]]
"""The structure of a file, with its offsets, from the CRC-32 of each tensor's bytes."""
_Told = tuple[list[tuple[int, int]], list[Edge]]


class Sidecar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Checksums of a file's pieces, as hexadecimal text; what a blob of another container has in its header."""

    checksum: str
    piece_bytes: int
    pieces: str

    def crcs(self) -> tuple[int, ...]:
        return tuple(parse_digest(self.pieces[i : i + 16]) for i in range(0, len(self.pieces), 16))


def sidecar_key(key: str) -> str:
    return f"{key}.checksums.json"


def encode_sidecar(pieces: Sequence[int]) -> bytes:
    text = "".join(format_digest(crc) for crc in pieces)
    return msgspec.json.encode(Sidecar(CHECKSUM, PIECE_BYTES, text)) + b"\n"


def read_sidecar(store: Store, key: str, pieces: int) -> tuple[tuple[int, ...], int]:
    """The checksums of the ``pieces`` pieces of file ``key``, and the checksum of the sidecar itself.

    Raises ``MissingError``, ``CorruptError``.
    """
    side = sidecar_key(key)
    data = bytearray(store.size(side))
    store.readv_into(side, 0, [memoryview(data)])
    try:
        found = msgspec.json.decode(data, type=Sidecar)
        crcs = found.crcs()
    except (msgspec.DecodeError, ValueError) as error:
        raise CorruptError(f"the checksums cannot be parsed: {error}", file=store.label(side)) from error
    if found.checksum != CHECKSUM or found.piece_bytes != PIECE_BYTES or len(crcs) != pieces:
        raise CorruptError(
            "the checksums are not those of this file",
            file=store.label(side),
            found=f"{len(crcs)} pieces of {found.piece_bytes} bytes",
            expected=f"{pieces} of {PIECE_BYTES}",
        )
    return crcs, crc64(data)


@dataclass
class FramedSource:
    """Payloads of a committed checkpoint whose checksums lie in sidecars, which the manifest proves. Thread-safe."""

    store: Store
    catalog: Catalog
    files: Mapping[str, FileEntry]
    cuts: Callable[[int], IntColumn]
    _known: dict[int, tuple[IntColumn, tuple[int, ...]]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def label(self, blob: int) -> str:
        return self.store.label(self.catalog.placement.blob_key(blob))

    def read_run(self, blob: int, at: int, buffers: Sequence[memoryview]) -> None:
        self.pieces(blob)
        self.store.readv_into(self.catalog.placement.blob_key(blob), at, buffers)

    def view(self, blob: int, at: int, nbytes: int) -> memoryview | None:
        return None

    def segments(self, blob: int) -> IntColumn:
        return np.empty(0, np.int64)

    def pieces(self, blob: int) -> tuple[IntColumn, Sequence[int]] | None:
        with self._lock:
            known = self._known.get(blob)
            if known is None:
                known = self._known[blob] = self._read(blob)
            return known

    def _read(self, blob: int) -> tuple[IntColumn, tuple[int, ...]]:
        key = self.catalog.placement.blob_key(blob)
        cuts = self.cuts(blob)
        crcs, own = read_sidecar(self.store, key, len(cuts) - 1)
        for name, found in (
            (sidecar_key(key), format_digest(own)),
            (key, entry_of(key, 0, 0, cuts, crcs).digest),
        ):
            if found != self.files[name].digest:
                raise CorruptError(
                    "the file is not the one that the manifest describes: altered, swapped, or from another save",
                    file=self.store.label(name),
                    found=f"digest {found}",
                    expected=self.files[name].digest,
                    hint="restore it from a copy",
                )
        return cuts, crcs


class FramedFile:
    """One file while it is written: aside, then durable, then under its name, its sidecar first.

    ``tensors``: begin and end of each tensor's bytes, ascending. ``frames`` makes all other bytes. ``whole_pages``: see
    ``PartFile``. ``sidecar``: False for a file of another system, which has none.
    """

    def __init__(
        self,
        path: Path,
        key: str,
        cuts: IntColumn,
        tensors: Sequence[tuple[int, int]],
        frames: Frames,
        *,
        create: bool,
        whole_pages: bool = False,
        sidecar: bool = True,
    ) -> None:
        self.path = path
        self.key = key
        self._sidecar = sidecar
        self._cuts = cuts
        self._tensors = tensors
        self._begins = np.array([begin for begin, _ in tensors], np.int64)
        self._frames = frames
        self._crcs = [0] * len(tensors)
        self._lock = threading.Lock()
        aside = path.with_name(path.name + ".part")
        self._file = PartFile(aside, int(cuts[-1]), create=create, whole_pages=whole_pages)

    def view(self, blob: int, at: int, nbytes: int) -> memoryview | None:
        return None

    def write(self, blob: int, at: int, data: memoryview) -> None:
        """Writes the tensors' bytes of a window; what lies between them is written when the file is sealed."""
        first = max(int(np.searchsorted(self._begins, at, side="right")) - 1, 0)
        for index in range(first, len(self._tensors)):
            begin, end = self._tensors[index]
            low, high = max(begin, at), min(end, at + data.nbytes)
            if low < high:
                piece = data[low - at : high - at]
                self._file.write_part(low, piece)
                partial = combine_crc32(crc32(piece), 0, end - high)
                with self._lock:
                    self._crcs[index] ^= partial
            if begin >= at + data.nbytes:
                break

    def sync(self) -> _Told:
        """The partial CRC-32s of the tensors that this process wrote a part of, and edges of pages."""
        return [(index, crc) for index, crc in enumerate(self._crcs) if crc], self._file.sync()

    @property
    def told_bytes(self) -> int:
        return self._file.told_bytes

    def seal(self, pieces: Sequence[int], shares: Sequence[object] = ()) -> list[FileEntry]:
        for share in shares:
            crcs, edges = cast(_Told, share)
            for index, crc in crcs:
                self._crcs[index] ^= crc
            self._file.write_edges(edges)
        known = list(pieces)
        for at, frame in self._frames(self._crcs):
            self._file.write(at, memoryview(frame))
            self._hash_frame(known, at, memoryview(frame))
        self._file.sync_and_close()
        beside = [self._write_sidecar(known)] if self._sidecar else []
        with writing(self.path):
            self._file.path.rename(self.path)
        return [entry_of(self.key, 0, 0, self._cuts, known), *beside]

    def _write_sidecar(self, pieces: Sequence[int]) -> FileEntry:
        data = encode_sidecar(pieces)
        side = OutputFile(self.path.with_name(sidecar_key(self.path.name)), len(data))
        side.write(0, memoryview(data))
        side.sync_and_close()
        return FileEntry(sidecar_key(self.key), len(data), format_digest(crc64(data)))

    def _hash_frame(self, pieces: list[int], at: int, frame: memoryview) -> None:
        """A frame is one or more whole pieces: pieces are cut where tensors begin and end."""
        piece = int(np.searchsorted(self._cuts, at, side="left"))
        done = 0
        while done < frame.nbytes:
            size = int(self._cuts[piece + 1]) - at - done
            pieces[piece] = crc64(frame[done : done + size])
            done, piece = done + size, piece + 1

    def close(self) -> None:
        self._file.close()

"""Small safetensors files of whole tensors beside the state: extra, rank-bound state, model buffers.

Their pieces are cut at the tensors, so ``verify`` needs nothing but the file to name a damaged one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from ..core.digest import crc64, format_digest, shift
from ..core.errors import CorruptError
from ..model.catalog import PIECE_BYTES
from ..model.manifest import FileEntry
from ..model.protocols import Store
from ..storage.local import OutputFile, writing
from .payload_file import proved_header
from .safetensors_file import Header, build_header, file_crc, lay_out, read_header, tensor_cuts

__all__ = ["TensorData", "check_tensor_file", "copy_file", "read_tensor", "write_tensor_file"]

TensorData = tuple[str, str, tuple[int, ...], memoryview]
"""Name, dtype, shape and the bytes of the values, row-major and little-endian."""


def write_tensor_file(
    path: Path, key: str, tensors: Sequence[TensorData], metadata: Mapping[str, str] | None = None
) -> FileEntry:
    """Writes ``path`` durably, in one pass, and returns its manifest entry under ``key``. Raises ``OutputError``."""
    entries = lay_out([(name, dtype, shape) for name, dtype, shape, _ in tensors])
    cuts = tensor_cuts(entries, PIECE_BYTES)
    crcs = []
    for entry, (_, _, _, data) in zip(entries, tensors, strict=True):
        inside = [*cuts[(cuts >= entry.begin) & (cuts < entry.end)].tolist(), entry.end]
        flat = data.cast("B") if data.nbytes else memoryview(b"")
        for low, high in pairwise(inside):
            crcs.append(crc64(flat[low - entry.begin : high - entry.begin]))
    header = build_header(entries, crcs, PIECE_BYTES, metadata)
    nbytes = len(header) + int(cuts[-1])
    file = OutputFile(path.with_name(path.name + ".part"), nbytes)
    try:
        file.write(0, memoryview(header))
        for entry, (_, _, _, data) in zip(entries, tensors, strict=True):
            if data.nbytes:
                file.write(len(header) + entry.begin, data.cast("B"))
        file.sync_and_close()
    finally:
        file.close()
    with writing(path):
        file.path.rename(path)
    return FileEntry(key, nbytes, format_digest(file_crc(crc64(header), cuts, crcs)))


def check_tensor_file(store: Store, entry: FileEntry) -> Header:
    """Reads a file's header and proves it by the manifest. Raises ``CorruptError``, ``MissingError``."""
    header = read_header(store, entry.path)
    label = store.label(entry.path)
    if header.piece_bytes != PIECE_BYTES:  # before bounds are made of it: a byte a piece would fill the memory
        raise CorruptError("pieces of another size", file=label, found=header.piece_bytes, expected=PIECE_BYTES)
    return proved_header(header, header.own_cuts, entry, label)


def read_tensor(store: Store, key: str, header: Header, name: str) -> bytearray:
    """The bytes of one tensor, proved piece by piece. Raises ``CorruptError`` that names the tensor and the bytes."""
    entry = header.by_name.get(name)
    if entry is None:
        raise CorruptError("the file holds no such tensor", file=store.label(key), param=name)
    data = bytearray(entry.end - entry.begin)
    store.readv_into(key, header.payload + entry.begin, [memoryview(data)])
    first, last = np.searchsorted(header.own_cuts, [entry.begin, entry.end]).tolist()
    bounds = header.own_cuts[first : last + 1].tolist() if last > first else []
    for piece, (low, high) in enumerate(pairwise(bounds), first):
        if crc64(memoryview(data)[low - entry.begin : high - entry.begin]) != header.pieces[piece]:
            raise CorruptError(
                f"bytes {low - entry.begin} to {high - entry.begin} of it do not match their checksum",
                file=store.label(key),
                param=name,
                hint="restore the file from a copy",
            )
    return data


def copy_file(store: Store, entry: FileEntry, path: Path, *, window_bytes: int, prove: bool) -> None:
    """Copies a file as it is, durably. Raises ``CorruptError`` where its bytes do not have the stated digest."""
    if store.size(entry.path) != entry.bytes:
        raise CorruptError(
            "the file's size is not what the manifest says",
            file=store.label(entry.path),
            found=f"{store.size(entry.path)} bytes",
            expected=f"{entry.bytes} bytes",
        )
    file = OutputFile(path.with_name(path.name + ".part"), entry.bytes)
    crc = 0
    try:
        buffer = memoryview(bytearray(min(window_bytes, max(entry.bytes, 1))))
        for at in range(0, entry.bytes, window_bytes):
            window = buffer[: min(window_bytes, entry.bytes - at)]
            store.readv_into(entry.path, at, [window])
            crc = shift(crc, window.nbytes) ^ crc64(window)
            file.write(at, window)
        file.sync_and_close()
    finally:
        file.close()
    if prove and format_digest(crc) != entry.digest:
        os.unlink(file.path)
        raise CorruptError(
            "the file does not match its digest",
            file=store.label(entry.path),
            found=format_digest(crc),
            expected=entry.digest,
            hint="restore it from a copy",
        )
    with writing(path):
        file.path.rename(path)

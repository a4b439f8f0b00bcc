"""The safetensors container, written so that its payload starts on a page and its checksums lie in its header.

Rule: the safetensors format description (8 bytes header length, little-endian; a JSON header, padded with spaces; the
tensors' bytes, tiling the rest). ``__metadata__`` holds the checksums of the payload's pieces as hexadecimal text of a
length that the layout decides, so a header has its final size before a byte of data is known. The pieces, shifted and
xored with the header's own checksum, give the file's digest, which the manifest states: stored checksums are proved
without reading a byte of data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import msgspec
import numpy as np

from ..core.digest import CHECKSUM, crc64, format_digest, parse_digest, shift
from ..core.dtypes import from_safetensors, itemsize, to_safetensors
from ..core.errors import CorruptError, UnsupportedError, Zero1CkptError
from ..core.ranges import IntColumn
from ..model.protocols import Store

__all__ = ["PAGE", "Header", "TensorEntry", "build_header", "file_crc", "lay_out", "read_header", "tensor_cuts"]

PAGE = 4096
"""Payloads start at a multiple of this many bytes, as direct I/O wants."""
_LENGTH_BYTES = 8
_MAX_HEADER = 100_000_000  # the bound that the safetensors reader enforces
_META = "__metadata__"
_PIECES = "zero1ckpt.pieces"
_PIECE_BYTES = "zero1ckpt.piece_bytes"
_CHECKSUM = "zero1ckpt.checksum"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file; ``begin`` and ``end`` are bytes of the payload."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """A parsed header. ``payload`` is the file offset of the data, ``crc`` the checksum of all bytes before it.

    ``pieces`` are the stored checksums of the payload's pieces, ``metadata`` what else stands in ``__metadata__``.
    """

    tensors: tuple[TensorEntry, ...]
    metadata: Mapping[str, str]
    payload: int
    crc: int
    pieces: tuple[int, ...]
    piece_bytes: int

    @property
    def payload_nbytes(self) -> int:
        return self.tensors[-1].end if self.tensors else 0

    @cached_property
    def by_name(self) -> Mapping[str, TensorEntry]:
        return {entry.name: entry for entry in self.tensors}

    @cached_property
    def own_cuts(self) -> IntColumn:
        """``tensor_cuts`` of its tensors."""
        return tensor_cuts(self.tensors, self.piece_bytes)


def lay_out(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> tuple[TensorEntry, ...]:
    """Entries of tensors (name, dtype, shape) that follow one another in a payload. Pure."""
    entries = []
    at = 0
    for name, dtype, shape in tensors:
        nbytes = prod(shape) * itemsize(dtype)
        entries.append(TensorEntry(name, dtype, shape, at, at + nbytes))
        at += nbytes
    return tuple(entries)


def build_header(
    tensors: Sequence[TensorEntry],
    pieces: Sequence[int],
    piece_bytes: int,
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """All bytes before the payload. Its length does not depend on the checksums' values. Pure.

    Raises ``UnsupportedError`` for one that readers of the format would refuse as too long.
    """
    meta = {
        **(metadata or {}),
        _CHECKSUM: CHECKSUM,
        _PIECE_BYTES: str(piece_bytes),
        _PIECES: "".join(format_digest(crc) for crc in pieces),
    }
    table: dict[str, Any] = {_META: meta}
    for entry in tensors:
        table[entry.name] = {
            "dtype": to_safetensors(entry.dtype),
            "shape": list(entry.shape),
            "data_offsets": [entry.begin, entry.end],
        }
    text = msgspec.json.encode(table)
    room = -(len(text) + _LENGTH_BYTES) % PAGE
    text += b" " * room
    if len(text) > _MAX_HEADER:
        raise UnsupportedError(
            "too many tensors for one file: its header is longer than the format allows",
            found=f"{len(text)} bytes",
            expected=f"at most {_MAX_HEADER}",
            hint="choose a larger bucket size or a smaller shard size",
        )
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def file_crc(header_crc: int, cuts: IntColumn, pieces: Sequence[int]) -> int:
    """Checksum of a whole file from those of its header and of the payload's pieces between ``cuts``. Pure."""
    payload = int(cuts[-1])
    crc = shift(header_crc, payload)
    for end, piece in zip(cuts[1:].tolist(), pieces, strict=True):
        crc ^= shift(piece, payload - end)
    return crc


def tensor_cuts(tensors: Sequence[TensorEntry], piece_bytes: int) -> IntColumn:
    """Bounds of the pieces of a payload that is cut at its tensors only. Pure."""
    payload = tensors[-1].end if tensors else 0
    bounds = [entry.begin for entry in tensors] + [0, payload]
    return np.unique(np.concatenate((np.arange(0, payload, piece_bytes), bounds))).astype(np.int64)


def read_header(store: Store, key: str) -> Header:
    """Reads and checks the header of a file.

    Raises ``CorruptError`` for a file that is truncated or whose header is not what the format says.
    """
    label = store.label(key)
    nbytes = store.size(key)

    def refuse(problem: str, **facts: object) -> CorruptError:
        return CorruptError(problem, file=label, **facts)  # type: ignore[arg-type]

    if nbytes < _LENGTH_BYTES:
        raise refuse("the file is truncated", found=f"{nbytes} bytes", expected="at least 8")
    raw = bytearray(_LENGTH_BYTES)
    store.readv_into(key, 0, [memoryview(raw)])
    length = int.from_bytes(raw, "little")
    if length > min(_MAX_HEADER, nbytes - _LENGTH_BYTES):
        raise refuse(
            "the header is longer than the file or than the format allows",
            found=f"{length} bytes",
            expected=f"at most {min(_MAX_HEADER, nbytes - _LENGTH_BYTES)}",
        )
    text = bytearray(length)
    store.readv_into(key, _LENGTH_BYTES, [memoryview(text)])
    try:
        header = _parse(bytes(text), _LENGTH_BYTES + length, crc64(bytes(raw) + text))
    except (ValueError, TypeError, KeyError, RecursionError, msgspec.DecodeError, Zero1CkptError) as error:
        raise refuse(f"the header cannot be parsed: {error}") from error
    if header.payload + header.payload_nbytes != nbytes:
        raise refuse(
            "the file's size is not what its header declares",
            found=f"{nbytes} bytes",
            expected=f"{header.payload + header.payload_nbytes} bytes",
            hint="restore it from a copy",
        )
    return header


def _parse(text: bytes, payload: int, crc: int) -> Header:
    table = msgspec.json.decode(text, type=dict[str, dict[str, Any]])
    meta = table.pop(_META, {})
    entries = []
    for name, row in table.items():
        begin, end = row["data_offsets"]
        shape = tuple(row["shape"])
        dtype = from_safetensors(row["dtype"])
        if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
            raise ValueError(f"{name}: sizes must be integers that are not negative")
        if end - begin != prod(shape) * itemsize(dtype):
            raise ValueError(f"{name}: {end - begin} bytes do not hold {shape} of {dtype}")
        entries.append(TensorEntry(name, dtype, shape, begin, end))
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    at = 0
    for entry in entries:
        if entry.begin != at:
            raise ValueError(f"{entry.name}: starts at byte {entry.begin}, expected {at}")
        at = entry.end
    if not all(isinstance(value, str) for value in meta.values()):
        raise ValueError("metadata must be text")
    stored = meta.pop(_PIECES, "")
    pieces = tuple(parse_digest(stored[i : i + 16]) for i in range(0, len(stored), 16))
    piece_bytes = int(meta.pop(_PIECE_BYTES, "1"))
    if not 1 <= piece_bytes <= 2**40:
        raise ValueError(f"piece_bytes {piece_bytes} is out of range")
    if meta.pop(_CHECKSUM, CHECKSUM) != CHECKSUM:
        raise ValueError("unknown checksum")
    return Header(tuple(entries), meta, payload, crc, pieces, piece_bytes)

"""One shard of an array: a file with a header, then its chunks. Its layout, and writing it.

    shard index     16 bytes a chunk and a CRC-32C, as ``sharding_indexed`` has it at the start of a shard
    pieces          CRC-64/NVME of each piece of the values, 8 bytes each
    stored          CRC-64/NVME of all bytes behind the header
    header          CRC-64/NVME of the header up to here
    chunks          in row-major order, each as its codecs made it

A reader of zarr finds the chunks by the index and passes over what lies between. All numbers are little-endian.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from awscrt.checksums import crc32c

from ...core.digest import crc64, format_digest, shift
from ...core.errors import CorruptError
from ...core.ranges import IntColumn, Range
from ...model.manifest import FileEntry
from ...model.protocols import Store
from ...storage.local import OutputFile, writing
from .metadata import ArraySpec

__all__ = ["UNSIGNED", "Shard", "ShardFile", "ShardHeader", "read_header"]

UNSIGNED = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}
_MISSING = 2**64 - 1


@dataclass(frozen=True)
class Shard:
    """The shard ``number`` of an array, which lies below ``folder``. Its payload is all of its chunks, uncompressed.

    What chunks have beyond the array's end is padding, and zero.
    """

    array: ArraySpec
    number: int
    folder: str

    @property
    def key(self) -> str:
        return "/".join((self.folder, "c", *(str(i) for i in self.array.shards.index(self.number))))

    @cached_property
    def elements(self) -> Range:
        return self.array.shards.range(self.number)

    @cached_property
    def first_chunk(self) -> int:
        return self.array.chunks.find(self.elements.start)

    @cached_property
    def chunk_count(self) -> int:
        return self.array.chunks.find(self.elements.end - 1) + 1 - self.first_chunk

    @property
    def payload_nbytes(self) -> int:
        return self.chunk_count * self.array.chunk_nbytes

    def runs(self, low: int, high: int) -> Iterator[tuple[int, int, Range | None]]:
        """What elements ``low`` to ``high`` of the payload are: begin, end, and the array's elements; None: padding."""
        grid = self.array.chunks
        padded = grid.row % grid.run
        while low < high:
            chunk, inside = divmod(low, grid.run)
            held = grid.range(self.first_chunk + chunk)
            at = held.start + inside
            if at >= held.end:
                end, found = min((chunk + 1) * grid.run, high), None
            else:
                last = at // grid.row * grid.row + grid.row if padded else self.elements.end
                end = min(low + last - at, high)
                found = Range(at, at + end - low)
            yield low, end, found
            low = end

    def header_nbytes(self, pieces: int) -> int:
        return 16 * self.array.slots + 4 + 8 * pieces + 16


@dataclass(frozen=True)
class ShardHeader:
    """A header as read: checksums of the pieces, of the bytes behind the header, and of the whole file's."""

    pieces: Sequence[int]
    nbytes: int
    digest: str


def encode_header(shard: Shard, chunks: IntColumn, pieces: Sequence[int], stored: int) -> bytes:
    """The header for chunks of these sizes. Pure."""
    index = np.full((shard.array.slots, 2), _MISSING, "<u8")
    index[: len(chunks), 0] = shard.header_nbytes(len(pieces)) + np.cumsum(chunks) - chunks
    index[: len(chunks), 1] = chunks
    head = index.tobytes()
    head += int(crc32c(head)).to_bytes(4, "little") + np.array([*pieces, stored], "<u8").tobytes()
    return head + crc64(head).to_bytes(8, "little")


def read_header(store: Store, shard: Shard, pieces: int) -> ShardHeader:
    """The header of a shard of so many pieces. Raises ``CorruptError`` for one that is not sound in itself."""
    key, size = shard.key, shard.header_nbytes(pieces)
    data = bytearray(size)
    store.readv_into(key, 0, [memoryview(data)])
    head, sums = bytes(data[:-8]), np.frombuffer(data[16 * shard.array.slots + 4 :], "<u8").tolist()
    index = np.frombuffer(head, "<u8", 2 * shard.array.slots).reshape(-1, 2)[: shard.chunk_count]
    chunks = index[:, 1].astype(np.int64)
    if sums[-1] != crc64(head) or bytes(data) != encode_header(shard, chunks, sums[:-2], sums[-2]):
        raise CorruptError(
            "the header of the shard is damaged", file=store.label(key), hint="restore the file from a copy"
        )
    stored = int(chunks.sum())
    return ShardHeader(sums[:-2], size + stored, format_digest(shift(crc64(data), stored) ^ sums[-2]))


class ShardFile:
    """A shard while it is written. Its values are held until it is sealed: it is encoded, and written once, as a whole.

    Memory: the payload, and its encoded form while it is sealed.
    """

    def __init__(self, path: Path, shard: Shard) -> None:
        self.path = path
        self.shard = shard
        self._payload: memoryview | None = memoryview(np.zeros(shard.payload_nbytes, np.uint8).data)

    def view(self, blob: int, at: int, nbytes: int) -> memoryview | None:
        assert self._payload is not None
        return self._payload[at : at + nbytes]

    def write(self, blob: int, at: int, data: memoryview) -> None:
        assert self._payload is not None
        self._payload[at : at + data.nbytes] = data

    def sync(self) -> object:
        raise AssertionError("a shard has one writer")

    @property
    def told_bytes(self) -> int:
        return 0

    def seal(self, pieces: Sequence[int], shares: Sequence[object] = ()) -> list[FileEntry]:
        assert self._payload is not None
        chunks, body = _encode(self.shard, self._payload)
        self._payload = None
        stored = crc64(body)
        header = encode_header(self.shard, chunks, pieces, stored)
        file = OutputFile(self.path.with_name(self.path.name + ".part"), len(header) + body.nbytes)
        file.write(0, memoryview(header))
        file.write(len(header), body)
        file.sync_and_close()
        with writing(self.path):
            file.path.rename(self.path)
        digest = format_digest(shift(crc64(header), body.nbytes) ^ stored)
        return [FileEntry(self.shard.key, len(header) + body.nbytes, digest)]

    def close(self) -> None:
        self._payload = None


def _encode(shard: Shard, payload: memoryview) -> tuple[IntColumn, memoryview]:
    """Stored sizes of the chunks, and the chunks end to end, as tensorstore makes them.

    Without compression they are the payload itself; tensorstore would copy it three times to say so (2.8 to 3.4 times
    the time of ``cp``). tests/formats/test_zarr.py holds both to the same bytes.

    The shard of a flat array is the same bytes as that of the array in its shape, for chunks are runs of it. Values go
    as unsigned integers, so that no bit pattern has a meaning.
    """
    array = shard.array
    if array.compression is None:
        return np.full(shard.chunk_count, array.chunk_nbytes, np.int64), payload
    import tensorstore as ts

    values = np.frombuffer(payload, UNSIGNED[array.itemsize])
    chunk = array.chunk_nbytes // array.itemsize
    codec: dict[str, Any] = array.codec
    codec["configuration"]["chunk_shape"] = [chunk]
    metadata = {
        "shape": [len(values)],
        "data_type": UNSIGNED[array.itemsize],
        "fill_value": 0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [chunk * array.slots]}},
        "codecs": [codec],
    }
    store = ts.open(
        {
            "driver": "zarr3",
            "kvstore": {"driver": "memory"},
            "metadata": metadata,
            "assume_metadata": True,
            "store_data_equal_to_fill_value": True,  # a chunk of zeros that is left out looks like one that is lost
        },
        context=ts.Context(),  # a memory of its own, gone with the store
    ).result()
    store.write(values, can_reference_source_data_indefinitely=True).result()
    kvstore = store.kvstore
    assert kvstore is not None
    data = kvstore.read("c/0").result().value
    index = np.frombuffer(data, "<u8", 2 * array.slots).reshape(-1, 2).astype(np.int64)[: shard.chunk_count]
    sizes, begin = index[:, 1], 16 * array.slots + 4
    ends = begin + np.cumsum(sizes)
    assert np.array_equal(index[:, 0], ends - sizes) and ends[-1] == len(data), "chunks lie in row-major order"
    return sizes, memoryview(data)[begin:]

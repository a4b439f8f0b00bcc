"""What ``zarr.json`` files say: of arrays, how they are cut into shards and chunks, and of groups.

Zarr core specification 3.1 (https://zarr-specs.readthedocs.io/en/latest/v3/core/), with the codecs
``sharding_indexed``, ``bytes``, ``crc32c``, ``zstd``, ``blosc`` and ``gzip`` of that collection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import msgspec

from ...core.boxes import RunGrid, block_shape
from ...core.dtypes import itemsize

__all__ = ["COMPRESSIONS", "ArraySpec", "encode_node", "group_node"]

Json = dict[str, Any]

_BYTES: Json = {"name": "bytes", "configuration": {"endian": "little"}}
_CRC32C: Json = {"name": "crc32c"}
COMPRESSIONS: Mapping[str, Json] = {
    "zstd": {"name": "zstd", "configuration": {"level": 3, "checksum": False}},
    "blosc": {
        "name": "blosc",
        "configuration": {"cname": "lz4", "clevel": 5, "shuffle": "shuffle", "typesize": 1, "blocksize": 0},
    },
    "gzip": {"name": "gzip", "configuration": {"level": 5}},
}
"""Codecs that chunks may be compressed with, by the name of the choice."""
_STORED_AS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
"""Types that zarr-python 3 does not know; their bits stand in unsigned integers, which every reader opens."""


@dataclass(frozen=True)
class ArraySpec:
    """One array: shape, torch's name of the dtype, and how it is cut. ``compression``: a key of ``COMPRESSIONS``."""

    shape: tuple[int, ...]
    dtype: str
    chunk_bytes: int
    shard_bytes: int
    compression: str | None = None

    @cached_property
    def itemsize(self) -> int:
        return itemsize(self.dtype)

    @cached_property
    def chunk(self) -> tuple[int, ...]:
        """Shape of an inner chunk."""
        return block_shape(self.shape, max(self.chunk_bytes // self.itemsize, 1))

    @cached_property
    def shard(self) -> tuple[int, ...]:
        """Shape of a shard, in whole chunks."""
        blocks = [-(-max(n, 1) // c) for n, c in zip(self.shape, self.chunk, strict=True)]
        most = max(self.shard_bytes // (prod(self.chunk) * self.itemsize), 1)
        return tuple(c * b for c, b in zip(self.chunk, block_shape(blocks, most), strict=True))

    @cached_property
    def chunks(self) -> RunGrid:
        """Only for an array that has elements."""
        return RunGrid(self.shape, self.chunk)

    @cached_property
    def shards(self) -> RunGrid:
        """Only for an array that has elements."""
        return RunGrid(self.shape, self.shard)

    @cached_property
    def shard_count(self) -> int:
        return self.shards.count if prod(self.shape) else 0

    @property
    def chunk_nbytes(self) -> int:
        return prod(self.chunk) * self.itemsize

    @property
    def slots(self) -> int:
        """Chunks that a shard has room for."""
        return prod(self.shard) // prod(self.chunk)

    @property
    def codec(self) -> Json:
        """The codec of a shard. Compressed chunks carry a CRC-32C, for a flipped bit might not change the values."""
        inner = [_BYTES]
        if self.compression is not None:
            codec = msgspec.json.decode(msgspec.json.encode(COMPRESSIONS[self.compression]))
            if "typesize" in codec["configuration"]:
                codec["configuration"]["typesize"] = self.itemsize
            inner = [_BYTES, codec, _CRC32C]
        return {
            "name": "sharding_indexed",
            "configuration": {
                "chunk_shape": list(self.chunk),
                "codecs": inner,
                "index_codecs": [_BYTES, _CRC32C],
                "index_location": "start",
            },
        }

    def node(self, attributes: Json) -> Json:
        """The array's metadata."""
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.shape),
            "data_type": _STORED_AS.get(self.dtype, self.dtype),
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(self.shard)}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": self._fill_value,
            "codecs": [self.codec],
            "attributes": attributes,
        }

    @property
    def _fill_value(self) -> float | int | bool:
        if self.dtype == "bool":
            return False
        return 0.0 if "float" in self.dtype and self.dtype not in _STORED_AS else 0


def group_node(attributes: Json, members: Mapping[str, Json] | None = None) -> Json:
    """The metadata of a group. ``members``: metadata of all nodes below it, by path, so that one read tells all."""
    node: Json = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    if members is not None:
        node["consolidated_metadata"] = {"kind": "inline", "must_understand": False, "metadata": dict(members)}
    return node


def encode_node(node: Json) -> bytes:
    """The bytes of a ``zarr.json``. Pure."""
    return msgspec.json.encode(node) + b"\n"

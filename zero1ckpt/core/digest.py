"""CRC-64/NVME checksums that combine, so that no byte is hashed twice.

Rule: the CRC catalogue's CRC-64/NVME (NVM Express NVM Command Set specification 1.0d, section 5.2.1.3.4; the same that
S3 computes for whole objects). For bytes ``X`` and ``Y``, ``crc(X + Y) = shift(crc(X), len(Y)) ^ crc(Y)``. A checksum
of a whole is therefore the xor of its pieces' checksums, each shifted by the bytes that follow the piece, in any order
and from any number of ranks. tests/core/test_digest.py holds the law.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache

from awscrt.checksums import combine_crc64nvme, crc64nvme

__all__ = [
    "CHECKSUM",
    "crc64",
    "crc64_zeros",
    "format_digest",
    "merge_digests",
    "parse_digest",
    "shift",
    "tensor_digest",
]

CHECKSUM = "crc64nvme"
"""Name of the checksum, as it stands in manifests and file headers."""


def crc64(data: bytes | bytearray | memoryview) -> int:
    """CRC-64/NVME of the bytes of a C-contiguous buffer."""
    return int(crc64nvme(data))


def shift(crc: int, following: int) -> int:
    """What a piece with checksum ``crc`` adds to a whole in which ``following`` bytes come after it."""
    return int(combine_crc64nvme(crc, 0, following))


@lru_cache(maxsize=4096)
def crc64_zeros(nbytes: int) -> int:
    """CRC-64/NVME of ``nbytes`` zero bytes, in O(log nbytes)."""
    if nbytes <= 64:
        return crc64(bytes(nbytes))
    half = nbytes // 2
    return shift(crc64_zeros(half), nbytes - half) ^ crc64_zeros(nbytes - half)


def tensor_digest(name: str, slot: str, dtype: str, shape: Iterable[int], values: int, nbytes: int) -> int:
    """Digest of one (param, slot): checksum of a line that names it, followed by its values in row-major order.

    ``values`` is the CRC-64/NVME of the ``nbytes`` bytes of the values, little-endian.
    """
    head = json.dumps([name, slot, dtype, [int(n) for n in shape]], separators=(",", ":"), ensure_ascii=True)
    return shift(crc64(head.encode("ascii")), nbytes) ^ values


def merge_digests(rows: Iterable[tuple[str, str, str]]) -> str:
    """Digest of a set of named digests, independent of their order: (param, slot, digest) or (part, "", digest)."""
    lines = sorted(json.dumps(row, separators=(",", ":"), ensure_ascii=True) for row in rows)
    return format_digest(crc64("\n".join(lines).encode("ascii")))


def format_digest(crc: int) -> str:
    return f"{crc:016x}"


def parse_digest(text: str) -> int:
    """Inverse of ``format_digest``. Raises ``ValueError`` for anything but 16 lower-case hexadecimal digits."""
    if len(text) != 16 or text.strip("0123456789abcdef"):
        raise ValueError(f"not a digest: {text!r}")
    return int(text, 16)

"""Buckets as ``dp_reshardable`` and ``fully_sharded_bucket_space`` store them: keys, chunks, sizes. No params yet."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...core.errors import CorruptError, UnsupportedError
from ...core.ranges import IntColumn
from ...encodings.inert_pickle import Dtype, Value
from .entries import ChunkSource, Entries, StoredTensor, unwrapped

__all__ = ["MAIN_FIELD", "RawBucket", "RawBuffer", "RawField", "RawPart", "read_raw_parts"]

MAIN_FIELD = "param"
_KEY = re.compile(
    r"((?:chained_\d+\.)*)optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)"
    r"\.dtype_\(torch\.(\w+), torch\.(\w+)\)\.bucket_idx_(\d+)\.(\w+)"
)
_NO_STATE = frozenset({"padding"})
"""Bookkeeping that some versions store beside the fields."""


@dataclass(frozen=True)
class RawField:
    """One field of a bucket: chunks by where they begin, in elements."""

    dtype: str
    itemsize: int
    start: IntColumn
    size: IntColumn
    chunk: IntColumn

    def rows(self, low: int, high: int) -> Iterator[tuple[int, int, int, int]]:
        """(start, size, chunk, first element in the chunk) of what holds elements [low, high)."""
        first = int(np.searchsorted(self.start + self.size, low, side="right"))
        last = int(np.searchsorted(self.start, high, side="left"))
        for i in range(first, last):
            begin, end = max(int(self.start[i]), low), min(int(self.start[i] + self.size[i]), high)
            if end > begin:
                yield begin, end - begin, int(self.chunk[i]), begin - int(self.start[i])

    def read(self, source: ChunkSource, low: int, size: int) -> bytearray:
        """Bytes of elements [low, low + size)."""
        out = bytearray(size * self.itemsize)
        view, at = memoryview(out), 0
        for _, count, chunk, inside in self.rows(low, low + size):
            nbytes = count * self.itemsize
            source.read_run(chunk, inside * self.itemsize, [view[at : at + nbytes]])
            at += nbytes
        if at != len(out):
            raise CorruptError("a bucket's chunks do not hold all of its elements")
        return out


@dataclass(frozen=True)
class RawBucket:
    """``numel``: padded size as stated, else None."""

    index: int
    numel_unpadded: int
    numel: int | None
    fields: Mapping[str, RawField]

    @property
    def edges(self) -> list[int]:
        main = self.fields[MAIN_FIELD]
        return sorted({0, *main.start.tolist(), *(main.start + main.size).tolist()})


@dataclass(frozen=True)
class RawBuffer:
    index: int
    param_dtype: str
    grad_dtype: str
    buckets: tuple[RawBucket, ...]


@dataclass(frozen=True)
class RawPart:
    """``prefix``: of the keys of its objects, up to and with ``dp_group_idx_<n>``."""

    prefix: str
    chained: int | None
    group: int
    buffers: tuple[RawBuffer, ...]


def read_raw_parts(entries: Entries) -> list[RawPart]:
    """All data-parallel groups, by optimizer and number. Raises ``CorruptError`` for chunks that leave holes."""
    table: dict[tuple[str, int], dict[tuple[int, str, str], dict[int, dict[str, StoredTensor]]]] = {}
    for key, tensor in entries.tensors.items():
        found = _KEY.fullmatch(key)
        if found is None or found[7] in _NO_STATE:
            continue
        part = table.setdefault((found[1], int(found[2])), {})
        buckets = part.setdefault((int(found[3]), found[4], found[5]), {})
        buckets.setdefault(int(found[6]), {})[found[7]] = tensor
    return [_part(entries, chained, group, table[chained, group]) for chained, group in sorted(table, key=_order)]


def _order(key: tuple[str, int]) -> tuple[list[int], int]:
    return [int(number) for number in re.findall(r"\d+", key[0])], key[1]


def _part(
    entries: Entries,
    chained: str,
    group: int,
    table: Mapping[tuple[int, str, str], Mapping[int, Mapping[str, StoredTensor]]],
) -> RawPart:
    prefix = f"{chained}optimizer.distributed.dp_group_idx_{group}"
    padded = _sizes(entries, f"{prefix}.per_bucket_numel/")
    unpadded = _sizes(entries, f"{prefix}.per_bucket_numel_unpadded/")
    buffers = []
    for index, param_dtype, grad_dtype in sorted(table):
        stored = table[index, param_dtype, grad_dtype]
        of = (index, param_dtype, grad_dtype)
        if sorted(stored) != list(range(len(stored))):
            raise CorruptError("a bucket is missing", file=entries.path, param=prefix, found=sorted(stored))
        sizes = [(unpadded.get(of, ()), padded.get(of, ()))]
        buckets = tuple(_bucket(entries, prefix, b, stored[b], *sizes[0]) for b in range(len(stored)))
        for name, stated in (("per_bucket_numel_unpadded", sizes[0][0]), ("per_bucket_numel", sizes[0][1])):
            if stated and len(stated) != len(buckets):
                raise CorruptError(
                    f"{name} speaks of another number of buckets",
                    file=entries.path,
                    param=prefix,
                    found=len(stated),
                    expected=len(buckets),
                )
        buffers.append(RawBuffer(index, param_dtype, grad_dtype, buckets))
    numbers = [int(number) for number in re.findall(r"\d+", chained)]
    return RawPart(prefix, numbers[-1] if numbers else None, group, tuple(buffers))


def _sizes(entries: Entries, prefix: str) -> dict[tuple[int, str, str], tuple[int, ...]]:
    """What ``per_bucket_numel`` says: for each buffer the size of each bucket."""
    key = next((key for key in entries.objects if key.startswith(prefix)), None)
    archive = None if key is None else entries.find_archive(key)
    value: Value = None if archive is None else unwrapped(archive.value)
    if isinstance(value, dict):  # one buffer: the list around it was taken for the list around the object
        value = [value]
    if not isinstance(value, list):
        return {}
    found = {}
    for index, row in enumerate(value):
        for kinds, sizes in row.items() if isinstance(row, dict) else ():
            named = kinds if isinstance(kinds, tuple) and len(kinds) == 2 else (None, None)
            param, grad = named
            if isinstance(param, Dtype) and isinstance(grad, Dtype) and isinstance(sizes, list):
                if not all(type(n) is int and n >= 0 for n in sizes):
                    raise CorruptError("sizes of buckets are no numbers", file=entries.path, param=key, found=sizes[:4])
                found[index, param.name, grad.name] = tuple(sizes)
    return found


def _bucket(
    entries: Entries,
    prefix: str,
    index: int,
    stored: Mapping[str, StoredTensor],
    unpadded: Sequence[int],
    padded: Sequence[int],
) -> RawBucket:
    where = f"{prefix}, bucket {index}"
    if MAIN_FIELD not in stored:
        raise CorruptError("a bucket has no main params", file=entries.path, param=where, found=sorted(stored))
    fields = {name: _field(entries, where, tensor) for name, tensor in stored.items()}
    lengths = {name: tensor.shape[0] for name, tensor in stored.items()}
    if len(set(lengths.values())) != 1:
        raise CorruptError("fields of a bucket differ in size", file=entries.path, param=where, found=lengths)
    held = lengths[MAIN_FIELD]
    real = unpadded[index] if index < len(unpadded) else held
    if real > held:
        raise CorruptError("a bucket is smaller than stated", file=entries.path, param=where, found=held, expected=real)
    full = padded[index] if index < len(padded) else (held if held > real else None)
    return RawBucket(index, real, full, fields)


def _field(entries: Entries, where: str, tensor: StoredTensor) -> RawField:
    if len(tensor.shape) != 1:
        raise UnsupportedError("a bucket is no flat tensor", file=entries.path, param=where, found=list(tensor.shape))
    order = np.argsort(tensor.offsets[:, 0], kind="stable")
    start, size = tensor.offsets[order, 0], tensor.sizes[order, 0]
    order, start, size = order[size > 0], start[size > 0], size[size > 0]
    ends = np.concatenate(([0], start + size))
    begins = np.concatenate((start, [tensor.shape[0]]))
    bad = np.flatnonzero(ends != begins)
    if len(bad):
        low, high = sorted((int(ends[bad[0]]), int(begins[bad[0]])))
        kind = "in no chunk" if ends[bad[0]] < begins[bad[0]] else "in two chunks"
        raise CorruptError(
            f"the chunks of {tensor.key} do not hold each element once",
            file=entries.path,
            param=where,
            found=f"elements [{low}, {high}) {kind}",
            hint="the checkpoint is not whole; restore it from a copy",
        )
    return RawField(tensor.dtype, tensor.itemsize, start, size, tensor.chunks[order])

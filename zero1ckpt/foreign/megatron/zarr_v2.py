"""The zarr container of Megatron-Core up to 0.15: a zarr v2 array a tensor, a ``.pt`` file an object, ``common.pt``.

Arrays are uncompressed. A chunk's file holds the chunk's full shape, beyond the array's edge too; what lies inside the
array is cut into runs there, so that a chunk of ours is always one piece of a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import numpy as np

from ...core.errors import CorruptError, MissingError, UnsupportedError
from ...encodings.torch_archive import Archive, read_archive, tensor_itemsize
from ...storage.local import LocalStore
from .entries import Chunks, Entries, Place, StoredTensor

__all__ = ["open_zarr"]

_COMMON_FILE = "common.pt"
_ARRAY = ".zarray"
_DTYPES = {"bfloat16": "bfloat16", "<f4": "float32", "<f2": "float16", "<f8": "float64", "<i8": "int64", "<i4": "int32"}
_DTYPES |= {"<i2": "int16", "|i1": "int8", "|u1": "uint8", "|b1": "bool", "<u2": "uint16", "<u4": "uint32"}
_DTYPES |= {"<u8": "uint64"}
_MAX_CHUNKS = 1 << 22
"""Of one array."""
_MAX_PIECES = 1 << 20
"""Of all arrays: ten times what a run of 100 B params has. Only chunks beyond an edge fall into several."""


class _ArrayMetadata(msgspec.Struct, frozen=True):
    """``.zarray`` (zarr storage specification 2)."""

    zarr_format: int
    shape: list[int]
    chunks: list[int]
    dtype: str | list[Any]
    order: str
    compressor: Any = None
    filters: Any = None
    fill_value: Any = None
    dimension_separator: str = "."


def open_zarr(path: Path) -> Entries:
    """Reads the arrays' metadata and the common state of an iteration folder; no tensor.

    Raises ``MissingError`` (a chunk's file is missing: nothing is filled in), ``CorruptError``, ``UnsupportedError``.
    """
    store = LocalStore(path)
    listed = store.keys()
    files = {key: store.size(key) for key in listed}
    if _COMMON_FILE not in files:
        raise MissingError("the common state is missing", file=path / _COMMON_FILE, hint="restore it from a copy")
    tensors: dict[str, StoredTensor] = {}
    pieces: list[_Piece] = []
    for key in _array_keys(files):
        spec = _read_spec(store, key)
        _check_count(store, key, spec, len(pieces))
        found = list(_pieces(store, files, key, spec))
        tensors[key] = _tensor(key, spec, found, len(pieces))
        pieces += found
    objects = _objects(files)

    def load(key: str) -> Archive:
        if key not in objects:
            raise CorruptError("the checkpoint lacks an entry", file=path, param=key)
        archive = read_archive(store, f"{key}.pt")
        return replace(archive, value=[archive.value])  # torch_dist puts a list of one around each

    common = read_archive(store, _COMMON_FILE).value
    if not isinstance(common, dict):
        raise CorruptError("the common state is no dict", file=path / _COMMON_FILE, found=type(common).__name__)
    return Entries(path, "zarr", store, tensors, objects, load, _chunks(pieces), common, files)


@dataclass(frozen=True, slots=True)
class _Spec:
    """An array. ``dtype``: as torch names it; ``separator``: what stands between indices in a chunk's file name."""

    dtype: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    separator: str

    @property
    def itemsize(self) -> int:
        return tensor_itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A box of an array that lies in one piece: ``at`` is the byte in ``file``."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    at: int
    nbytes: int


def _array_keys(files: Mapping[str, int]) -> list[str]:
    """Folders with an array's metadata; ``.sync`` folders hold the empty lock files of a writer."""
    folders = [PurePosixPath(name).parent.as_posix() for name in files if PurePosixPath(name).name == _ARRAY]
    return sorted(f for f in folders if not (f.endswith(".sync") and not files[f"{f}/{_ARRAY}"]))


def _objects(files: Mapping[str, int]) -> dict[str, int]:
    """Keys of the ShardedObjects: files ``<key>/shard_<offsets>_<shape>.pt``, as torch_dist calls them."""
    return {
        name.removesuffix(".pt"): size
        for name, size in files.items()
        if name.endswith(".pt") and PurePosixPath(name).name.startswith("shard_") and "/" in name
    }


def _read_spec(store: LocalStore, key: str) -> _Spec:
    name = f"{key}/{_ARRAY}"
    label = store.label(name)
    try:
        raw = msgspec.json.decode(store.read(name), type=_ArrayMetadata)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptError(f"the array's metadata cannot be read: {error}", file=label) from error
    _check_supported(raw, label)
    chunks, shape = tuple(raw.chunks), tuple(raw.shape)
    if len(chunks) != len(shape) or any(n < 0 for n in shape) or any(n < 1 for n in chunks):
        raise CorruptError("the array's shape and chunks cannot be", file=label, found=f"{raw.shape}, {raw.chunks}")
    return _Spec(_DTYPES[str(raw.dtype)], shape, chunks, raw.dimension_separator)


def _check_supported(raw: _ArrayMetadata, label: str) -> None:
    if raw.zarr_format != 2:
        raise UnsupportedError("the array is in another version of zarr", file=label, found=raw.zarr_format, expected=2)
    if raw.compressor is not None or raw.filters:
        raise UnsupportedError(
            "the array is compressed or filtered, which Megatron does not do",
            file=label,
            found=str(raw.compressor or raw.filters)[:80],
            hint="write it again without a compressor",
        )
    if raw.order != "C":
        raise UnsupportedError("the array is not stored row by row", file=label, found=raw.order, expected="C")
    if str(raw.dtype) not in _DTYPES:
        raise UnsupportedError(
            "the array's element type is not supported", file=label, found=raw.dtype, expected=", ".join(_DTYPES)
        )
    if raw.dimension_separator not in (".", "/"):
        raise CorruptError("the array's separator of dimensions is unknown", file=label, found=raw.dimension_separator)


def _check_count(store: LocalStore, key: str, spec: _Spec, before: int) -> None:
    """Refuses what no machine should make a list of. ``before``: pieces of other arrays."""
    label = store.label(f"{key}/{_ARRAY}")
    if prod(-(-n // c) for n, c in zip(spec.shape, spec.chunk, strict=True)) > _MAX_CHUNKS:
        raise CorruptError("the array has more chunks than can be", file=label)
    count = _piece_count(spec)
    if before + count > _MAX_PIECES:
        raise UnsupportedError(
            "the array's edge cuts its chunks into too many pieces",
            file=label,
            param=key,
            found=f"{before + count} pieces with those of the arrays before it",
            expected=f"at most {_MAX_PIECES}",
            hint="write it again in chunks that divide its shape",
        )


def _piece_count(spec: _Spec) -> int:
    """How many pieces ``_pieces`` makes. Pure.

    The last axis on which the edge cuts a chunk decides: what lies before it falls into single rows.
    """
    grid = [-(-n // c) for n, c in zip(spec.shape, spec.chunk, strict=True)]
    whole = [n // c for n, c in zip(spec.shape, spec.chunk, strict=True)]
    cut = [axis for axis in range(len(grid)) if whole[axis] < grid[axis]]
    return prod(whole) + sum(prod(spec.shape[:axis]) * prod(whole[axis + 1 :]) for axis in cut)


def _pieces(store: LocalStore, files: Mapping[str, int], key: str, spec: _Spec) -> Iterator[_Piece]:
    """All pieces of an array; each chunk's file must be there, of the full size of a chunk."""
    if not prod(spec.shape):
        return
    grid = [range(-(-n // c)) for n, c in zip(spec.shape, spec.chunk, strict=True)]
    expected = prod(spec.chunk) * spec.itemsize
    for index in product(*grid):
        file = f"{key}/{spec.separator.join(map(str, index)) or '0'}"
        size = files.get(file)
        if size is None:
            raise MissingError(
                "a chunk of the array is missing", file=store.label(file), param=key, hint="restore it from a copy"
            )
        if size != expected:
            raise CorruptError(
                "a chunk of the array has another size than its metadata says",
                file=store.label(file),
                param=key,
                found=f"{size} bytes",
                expected=f"{expected} bytes",
            )
        yield from _runs(file, spec, index)


def _runs(file: str, spec: _Spec, index: Sequence[int]) -> Iterator[_Piece]:
    """What of one chunk lies inside the array, in pieces that are contiguous in the chunk's file."""
    low = [i * c for i, c in zip(index, spec.chunk, strict=True)]
    inside = [min(c, n - at) for c, n, at in zip(spec.chunk, spec.shape, low, strict=True)]
    cut = max((axis for axis, (a, c) in enumerate(zip(inside, spec.chunk, strict=True)) if a < c), default=0)
    # Behind the last axis that the edge cuts, the chunk is whole: so along that axis, elements follow each other.
    shape = (*(1 for _ in inside[:cut]), *inside[cut:])
    nbytes = prod(shape) * spec.itemsize
    for steps in product(*(range(n) for n in inside[:cut])):
        at = 0
        for step, size in zip((*steps, *(0 for _ in inside[cut:])), spec.chunk, strict=True):
            at = at * size + step
        start = (*(a + s for a, s in zip(low, steps, strict=False)), *low[cut:])
        yield _Piece(start, shape, file, at * spec.itemsize, nbytes)


def _tensor(key: str, spec: _Spec, pieces: Sequence[_Piece], first: int) -> StoredTensor:
    shape = (len(pieces), len(spec.shape))
    offsets = np.array([piece.start for piece in pieces], np.int64).reshape(shape)
    sizes = np.array([piece.shape for piece in pieces], np.int64).reshape(shape)
    chunks = np.arange(first, first + len(pieces), dtype=np.int64)
    return StoredTensor(key, spec.dtype, spec.shape, offsets, sizes, chunks)


def _chunks(pieces: Sequence[_Piece]) -> Chunks:
    def locate(chunk: int) -> Place:
        return pieces[chunk].file, pieces[chunk].at

    return Chunks(
        np.array([p.nbytes for p in pieces], np.int64).reshape(-1), np.full(len(pieces), -1, np.int64), locate
    )

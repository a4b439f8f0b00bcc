"""The ``.metadata`` of a torch.distributed.checkpoint folder: the tensors, their chunks, and where each chunk lies.

It is a pickle of ``torch.distributed.checkpoint.metadata.Metadata``: ``state_dict_metadata`` (key -> dtype, global
shape and chunks, or the mark of a bytes entry), ``storage_data`` ((key, chunk offset) -> file, offset, length) and
``planner_data`` (key -> path in the nested state dict). It is read inertly, and comes out as columns: a large
checkpoint has a hundred thousand chunks. What Megatron-Core adds (``mcore_data``, classes of its own) is kept or left
alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import CorruptError, UsageError
from ..core.ranges import IntColumn
from .inert_pickle import Dtype, EnumValue, GlobalRef, Record, Value, load, no_collector
from .inert_pickle.tree import check_tree
from .inert_pickle.writer import dump

__all__ = ["BytesEntry", "DcpMetadata", "TensorEntry", "dump_metadata", "parse_metadata", "whole_tensor"]

_PREFIX = "torch.distributed.checkpoint."
_VERSION = "1.0.0"
_MAX_DIMENSIONS = 64
_MAX_GRID = 1 << 24
_FIELDS = ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version")
_LEFT_OUT = "all_local_plans"  # of Megatron-Core: the ranks' plans, as large as all the rest and of no use to a reader

IntTable = NDArray[np.int64]
Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TensorEntry:
    """One tensor: row ``i`` of each column is a chunk.

    ``offsets`` and ``sizes`` (chunks x dimensions) are its box in the tensor; ``files`` an index into the metadata's
    files; ``at`` and ``nbytes`` where its archive lies in that file. ``transforms`` names what a chunk's bytes went
    through (compression), by chunk; of most checkpoints it is empty.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    offsets: IntTable
    sizes: IntTable
    files: IntColumn
    at: IntColumn
    nbytes: IntColumn
    transforms: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.at)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def coverage_problem(self) -> str | None:
        """Why the chunks do not cover each element exactly once, in a few words; None if they do. Pure."""
        covered = sum(prod(row) for row in self.sizes.tolist())
        if covered != self.numel:
            return f"chunks hold {covered} elements of {self.numel}"
        if not self.numel:
            return None
        overlap = self._overlap()
        return None if overlap is None else f"chunks overlap at {overlap}"

    def _overlap(self) -> tuple[int, ...] | None:
        """The first cell that two chunks hold, by a difference count on the grid of all chunk edges."""
        rows = np.flatnonzero((self.sizes > 0).all(axis=1))
        low, high = self.offsets[rows], (self.offsets + self.sizes)[rows]
        edges = [np.unique(np.concatenate((low[:, d], high[:, d]))) for d in range(len(self.shape))]
        if prod(len(edge) for edge in edges) > _MAX_GRID:
            return self._overlap_by_sweep(low, high)
        grid = np.zeros([len(edge) for edge in edges], np.int32)
        for corner in np.ndindex(*(2,) * len(edges)):
            where = tuple(np.searchsorted(edges[d], (low, high)[end][:, d]) for d, end in enumerate(corner))
            np.add.at(grid, where, (-1) ** sum(corner))
        for axis in range(grid.ndim):
            np.cumsum(grid, axis=axis, out=grid)
        cells = np.argwhere(grid > 1)
        return None if not len(cells) else tuple(int(edges[d][i]) for d, i in enumerate(cells[0].tolist()))

    def _overlap_by_sweep(self, low: IntTable, high: IntTable) -> tuple[int, ...] | None:
        """The same by comparing each chunk with those that begin before it ends along the first axis."""
        order = np.argsort(low[:, 0], kind="stable")
        low, high = low[order], high[order]
        for i in range(len(low)):
            stop = int(np.searchsorted(low[:, 0], high[i, 0]))
            meets = (low[i + 1 : stop] < high[i]).all(axis=1) & (high[i + 1 : stop] > low[i]).all(axis=1)
            if meets.any():
                return tuple(np.maximum(low[i], low[i + 1 + int(meets.argmax())]).tolist())
        return None


@dataclass(frozen=True, slots=True)
class BytesEntry:
    """An object that is no tensor: an archive of its own at bytes [at, at + nbytes) of a file."""

    key: str
    file: int
    at: int
    nbytes: int
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class DcpMetadata:
    """A parsed ``.metadata``.

    ``files`` are relative paths, sorted when parsed; ``paths`` say where a key stands in the nested state dict.
    ``extras`` are attributes of the object that torch does not define, such as ``mcore_data``.
    """

    tensors: Mapping[str, TensorEntry]
    objects: Mapping[str, BytesEntry]
    files: tuple[str, ...]
    paths: Mapping[str, Path] | None = None
    version: str | None = _VERSION
    extras: Mapping[str, Value] = field(default_factory=dict)

    def original_shape(self, key: str) -> tuple[int, ...]:
        """A tensor's shape before Megatron-Core cut its axes up (``nd_reformulated_orig_global_shape``)."""
        mcore = self.extras.get("mcore_data")
        row = mcore.get(key) if isinstance(mcore, dict) else None
        shape = row.get("nd_reformulated_orig_global_shape") if isinstance(row, dict) else None
        return tuple(shape) if shape is not None and _is_shape(shape) else self.tensors[key].shape


def whole_tensor(key: str, dtype: str, shape: Sequence[int], *, file: int, at: int, nbytes: int) -> TensorEntry:
    """The entry of a tensor that is one chunk. Pure."""
    sizes = np.array([tuple(shape)], np.int64).reshape(1, len(shape))
    files, begins, lengths = (np.array([value], np.int64) for value in (file, at, nbytes))
    return TensorEntry(key, dtype, tuple(shape), np.zeros_like(sizes), sizes, files, begins, lengths)


# ------------------------------------------------------------------------------------------------------------- reading


def parse_metadata(
    data: bytes | bytearray | memoryview,
    *,
    file: object = None,
    max_bytes: int = 1 << 29,
    max_opcodes: int = 1 << 27,
    max_nodes: int = 1 << 24,
) -> DcpMetadata:
    """The metadata of a ``.metadata`` file. ``max_nodes`` bounds the values beside the chunks.

    Raises ``CorruptError`` for one that is damaged or hostile, or that does not say where each chunk lies.
    """
    top = load(data, file=file, max_bytes=max_bytes, max_opcodes=max_opcodes, max_nodes=None)
    try:
        with no_collector():
            return _parse(top, max_nodes)
    except CorruptError as error:
        raise (error if file is None else error.at(file)) from error.__cause__
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise CorruptError(f"the metadata is not what torch writes: {error!r:.200}", file=file) from error


def _parse(top: Value, max_nodes: int) -> DcpMetadata:
    if not isinstance(top, Record) or type(top.get("state_dict_metadata")) is not dict:
        raise CorruptError("the file is no metadata of torch.distributed.checkpoint", found=_shown(top))
    located = _Located(top.get("storage_data"))
    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, BytesEntry] = {}
    for key, row in top.get("state_dict_metadata").items():
        if type(key) is not str:
            raise CorruptError("a key of the metadata is not text", found=type(key).__name__)
        kind = _kind(row)
        if kind == "TensorStorageMetadata":
            tensors[key] = _tensor_entry(key, row.state, located)
        elif kind == "BytesStorageMetadata":
            objects[key] = located.bytes_entry(key)
        else:
            raise CorruptError("an entry of the metadata is of an unknown kind", param=key, found=_shown(row))
    located.check_all_taken()
    extras = {name: value for name, value in top.fields.items() if name not in (*_FIELDS, _LEFT_OUT)}
    planned, version = top.get("planner_data"), top.get("version")
    check_tree((extras, planned), max_depth=100, max_nodes=max_nodes)
    if version is not None and type(version) is not str:
        raise CorruptError("the metadata's version is not text")
    return DcpMetadata(tensors, objects, tuple(located.files), _paths(planned), version, extras)


def _shown(value: Value) -> str:
    """A value in a message. Of one that holds others only the type: sharing makes them endless, nesting too deep."""
    if value is None or isinstance(value, (bool, str, float)) or (isinstance(value, int) and abs(value) < 1 << 64):
        return ascii(value)[:100]
    return type(value).__name__


def _kind(row: Value) -> str | None:
    """The name of a class of the metadata module."""
    if type(row) is not Record or row.type.module != _PREFIX + "metadata":
        return None
    return row.type.name


class _Located:
    """``storage_data``, by key. Each entry and each list of chunks is taken once, or sharing would multiply them."""

    def __init__(self, table: Value) -> None:
        if type(table) is not dict:
            raise CorruptError("the metadata has no storage_data", found=type(table).__name__)
        self.lists: set[int] = set()
        self.by_key: dict[str, list[tuple[Value, Value]]] = {}
        paths: set[str] = set()
        for index, info in table.items():
            if _kind(index) != "MetadataIndex" or type(info) is not Record or info.type.name != "_StorageInfo":
                raise CorruptError("an entry of storage_data is of an unknown kind", found=_shown(info))
            at = index.state
            self.by_key.setdefault(at["fqn"], []).append((at.get("offset"), info.state))
            path = info.state["relative_path"]
            if path not in paths:
                _check_path(at["fqn"], path)
                paths.add(path)
        self.files = {path: i for i, path in enumerate(sorted(paths))}

    def take(self, key: str) -> list[tuple[Value, Value]]:
        """(chunk offset, place) of the chunks of a key."""
        return self.by_key.pop(key, [])

    def own_list(self, key: str, chunks: Value) -> None:
        if type(chunks) is not list or id(chunks) in self.lists:
            raise CorruptError("a tensor's chunks are not a list of its own", param=key)
        self.lists.add(id(chunks))

    def bytes_entry(self, key: str) -> BytesEntry:
        found = self.take(key)
        if len(found) != 1:
            raise CorruptError("storage_data has not one place for an object", param=key, found=len(found))
        state = found[0][1]
        return BytesEntry(key, *self.place(key, state), transforms=_transforms(state))

    def place(self, key: str, state: Value) -> tuple[int, int, int]:
        """File, offset and length of one ``_StorageInfo``."""
        at, nbytes = state["offset"], state["length"]
        if type(at) is not int or type(nbytes) is not int or at < 0 or nbytes < 0:
            raise CorruptError(
                "a place in storage_data is malformed", param=key, found=f"{_shown(at)}, {_shown(nbytes)}"
            )
        return self.files[state["relative_path"]], at, nbytes

    def check_all_taken(self) -> None:
        for key in self.by_key:
            raise CorruptError("storage_data has an entry that the metadata does not", param=str(key)[:200])


def _check_path(key: str, path: Value) -> None:
    """Files lie in the folder of the checkpoint."""
    if type(path) is not str or not path or path.startswith("/") or ".." in path.split("/") or "\0" in path:
        raise CorruptError("storage_data names a file outside of the checkpoint", param=key, found=_shown(path))


def _transforms(state: Value) -> tuple[str, ...]:
    names = state.get("transform_descriptors") or ()
    if type(names) not in (list, tuple) or not all(type(name) is str for name in names):
        raise CorruptError("transforms in storage_data are malformed", found=_shown(names))
    return tuple(names)


def _tensor_entry(key: str, state: Value, located: _Located) -> TensorEntry:
    shape, chunks = state["size"], state["chunks"]
    located.own_list(key, chunks)
    if not _is_shape(shape) or not all(_kind(chunk) == "ChunkStorageMetadata" for chunk in chunks):
        raise CorruptError("a tensor's shape or chunks are malformed", param=key, found=_shown(shape))
    dtype = _dtype(key, state["properties"])
    offsets = _table(key, [chunk.state["offsets"] for chunk in chunks], len(shape))
    sizes = _table(key, [chunk.state["sizes"] for chunk in chunks], len(shape))
    outside = np.flatnonzero((sizes > np.array(shape, np.int64) - offsets).any(axis=1))
    if len(outside):
        i = int(outside[0])
        box = f"{offsets[i].tolist()} + {sizes[i].tolist()}"
        raise CorruptError("a chunk reaches beyond its tensor", param=key, found=box, expected=f"within {list(shape)}")
    placed = located.take(key)
    stored = _table(key, [offset for offset, _ in placed], len(shape))
    kept = _holding(sizes, prod(shape))
    order = _matched(key, offsets, kept, stored)
    places = np.array([located.place(key, placed[i][1]) for i in order], np.int64).reshape(len(order), 3)
    transforms = {row: names for row, i in enumerate(order) if (names := _transforms(placed[i][1]))}
    files, at, nbytes = (np.ascontiguousarray(column) for column in places.T)
    return TensorEntry(key, dtype, shape, offsets[kept], sizes[kept], files, at, nbytes, transforms)


def _holding(sizes: IntTable, numel: int) -> IntColumn:
    """Rows of the chunks that hold an element; of an empty tensor the first. Ranks without a part write empty ones."""
    return np.flatnonzero((sizes > 0).all(axis=1)) if numel else np.arange(min(len(sizes), 1))


def _matched(key: str, offsets: IntTable, kept: IntColumn, stored: IntTable) -> list[int]:
    """For each kept chunk the place that has its offset. By sorting: hashes of offsets could be made to collide."""
    every = np.concatenate((offsets, stored))
    if every.shape[1]:
        numbers = np.unique(every, axis=0, return_inverse=True)[1].reshape(-1)
    else:
        numbers = np.zeros(len(every), np.int64)
    ours, theirs = numbers[: len(offsets)], numbers[len(offsets) :]
    if len(np.unique(ours[kept])) != len(kept) or len(np.unique(theirs)) != len(theirs):
        raise CorruptError("two chunks of a tensor begin at one place", param=key)
    place = np.full(len(every), -1)
    place[theirs] = np.arange(len(theirs))
    order: list[int] = place[ours[kept]].tolist()
    if -1 in order:
        at = offsets[kept[order.index(-1)]].tolist()
        raise CorruptError("storage_data does not say where a chunk lies", param=key, found=f"chunk at {at}")
    if not np.isin(theirs, ours).all():
        raise CorruptError("storage_data has a chunk that the tensor does not have", param=key)
    return order


def _table(key: str, rows: list[Value], dimensions: int) -> IntTable:
    for row in rows:
        if type(row) is not tuple or len(row) != dimensions:
            raise CorruptError("a chunk has another number of dimensions than its tensor", param=key, found=_shown(row))
        for n in row:
            if type(n) is not int or not 0 <= n < 2**62:
                raise CorruptError("a chunk's place or size is no sound number", param=key, found=_shown(row))
    return np.array(rows, np.int64).reshape(len(rows), dimensions)


def _is_shape(shape: Value) -> bool:
    return (
        type(shape) is tuple and len(shape) <= _MAX_DIMENSIONS and all(type(n) is int and 0 <= n < 2**62 for n in shape)
    )


def _dtype(key: str, properties: Value) -> str:
    state = properties.state
    dtype = state[0] if type(state) is tuple and state else properties.get("dtype")
    if type(dtype) is not Dtype:
        raise CorruptError("a tensor's dtype is malformed", param=key, found=_shown(dtype))
    return dtype.name


def _paths(planned: Value) -> dict[str, Path] | None:
    """Planner data of torch: key -> path. Any other planner's is left alone."""
    if type(planned) is not dict:
        return None
    sound = all(
        type(key) is str and type(path) is tuple and all(type(part) in (str, int) for part in path)
        for key, path in planned.items()
    )
    return planned if sound else None


# ------------------------------------------------------------------------------------------------------------- writing


def dump_metadata(metadata: DcpMetadata) -> bytes:
    """The bytes of a ``.metadata`` that torch 2.6 and later loads; the same for the same metadata. Pure.

    No place or id of the writing run is in it. Raises ``UsageError``.
    """
    with no_collector():
        return dump(_metadata_record(metadata))


def _metadata_record(metadata: DcpMetadata) -> Record:
    both = metadata.tensors.keys() & metadata.objects.keys()
    if both:
        raise UsageError("a key is a tensor and an object", param=min(both))
    entries: dict[str, Value] = {key: _tensor_record(entry) for key, entry in metadata.tensors.items()}
    entries |= {key: _record("metadata", "BytesStorageMetadata") for key in metadata.objects}
    state = {
        "state_dict_metadata": entries,
        "planner_data": None if metadata.paths is None else dict(metadata.paths),
        "storage_data": dict(_storage_rows(metadata)),
        "storage_meta": _storage_meta(),
        "version": metadata.version,
        **metadata.extras,
    }
    return _record("metadata", "Metadata", state)


def _record(module: str, name: str, state: Value = None) -> Record:
    made = Record(GlobalRef(_PREFIX + module, name), (), "new")
    made._state = state
    return made


def _size(values: Sequence[int]) -> Record:
    return Record(GlobalRef("torch", "Size"), (tuple(values),), "call")


def _storage_meta() -> Record:
    return _record("metadata", "StorageMeta", {"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []})


def _tensor_record(entry: TensorEntry) -> Record:
    contiguous = EnumValue(GlobalRef(_PREFIX + "metadata", "_MEM_FORMAT_ENCODING"), 0)
    properties = (Dtype(entry.dtype), GlobalRef("torch", "strided"), False, contiguous, False)
    chunks = [
        _record("metadata", "ChunkStorageMetadata", {"offsets": _size(offset), "sizes": _size(size)})
        for offset, size in zip(entry.offsets.tolist(), entry.sizes.tolist(), strict=True)
    ]
    state: dict[str, Any] = {
        "properties": _record("metadata", "TensorProperties", properties),
        "size": _size(entry.shape),
        "chunks": chunks,
    }
    return _record("metadata", "TensorStorageMetadata", state)


def _storage_rows(metadata: DcpMetadata) -> Iterator[tuple[Record, Record]]:
    for key, entry in metadata.tensors.items():
        columns = zip(entry.files.tolist(), entry.at.tolist(), entry.nbytes.tolist(), strict=True)
        for i, (offset, place) in enumerate(zip(entry.offsets.tolist(), columns, strict=True)):
            index = {"fqn": key, "index": i, "offset": _size(offset)}
            yield _record("metadata", "MetadataIndex", index), _place(metadata, *place, entry.transforms.get(i, ()))
    for key, item in metadata.objects.items():
        where = _place(metadata, item.file, item.at, item.nbytes, item.transforms)
        yield _record("metadata", "MetadataIndex", {"fqn": key, "index": None}), where


def _place(metadata: DcpMetadata, file: int, at: int, nbytes: int, transforms: tuple[str, ...]) -> Record:
    state: dict[str, Any] = {"relative_path": metadata.files[file], "offset": at, "length": nbytes}
    if transforms:
        state["transform_descriptors"] = list(transforms)
    return _record("filesystem", "_StorageInfo", state)

"""The torch_dist container: ``.metadata``, ``*.distcp`` and the common state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import CorruptError, MissingError, UnsupportedError
from ...encodings.dcp_metadata import DcpMetadata, TensorEntry, parse_metadata
from ...encodings.inert_pickle import TensorRef
from ...encodings.torch_archive import Archive, read_archive, tensor_itemsize
from ...storage.local import LocalStore
from .entries import Chunks, Entries, Place, StoredTensor, writer_of

__all__ = ["COMMON_ENTRY", "COMMON_FILE", "METADATA", "open_torch_dist"]

METADATA = ".metadata"
COMMON_FILE = "common.pt"
COMMON_ENTRY = "common_state/shard_0_1"


def open_torch_dist(path: Path) -> Entries:
    """Reads ``.metadata`` and the common state of an iteration folder; no tensor. ``Entries.check_files`` says whether
    all files are there.

    Raises ``MissingError``, ``CorruptError``, ``UnsupportedError``.
    """
    store = LocalStore(path)
    metadata = parse_metadata(store.read(METADATA), file=path / METADATA)
    tensors, chunks = _index(store, metadata)
    listed = store.keys()
    files = {key: store.size(key) for key in listed}

    def load(key: str) -> Archive:
        return _load(store, metadata, key)

    common, where = _common(store, files, metadata, load)
    objects = {key: entry.nbytes for key, entry in metadata.objects.items()}

    def original_shape(key: str) -> tuple[int, ...] | None:
        shape = metadata.original_shape(key)
        return None if shape == metadata.tensors[key].shape else shape

    def place(key: str) -> Place:
        entry = metadata.objects[key]
        return metadata.files[entry.file], entry.at

    return Entries(
        path,
        "torch_dist",
        store,
        tensors,
        objects,
        load,
        chunks,
        common,
        files,
        where,
        original_shape,
        place,
        _needed(metadata),
    )


def _needed(metadata: DcpMetadata) -> dict[str, int]:
    """How far into each file its entries reach."""
    ends = np.zeros(len(metadata.files), np.int64)
    for entry in metadata.tensors.values():
        np.maximum.at(ends, entry.files, entry.at + entry.nbytes)
    for held in metadata.objects.values():
        ends[held.file] = max(int(ends[held.file]), held.at + held.nbytes)
    return dict(zip(metadata.files, ends.tolist(), strict=True))


def _index(store: LocalStore, metadata: DcpMetadata) -> tuple[dict[str, StoredTensor], Chunks]:
    """All tensors with their chunks numbered through, in the order of the metadata."""
    tensors = {}
    rows: list[tuple[TensorEntry, int]] = []
    nbytes = []
    for key, entry in metadata.tensors.items():
        tensor_itemsize(entry.dtype)
        index = np.arange(len(rows), len(rows) + len(entry), dtype=np.int64)
        tensors[key] = StoredTensor(key, entry.dtype, entry.shape, entry.offsets, entry.sizes, index)
        rows += [(entry, row) for row in range(len(entry))]
        nbytes.append(np.prod(entry.sizes, axis=1, dtype=np.int64) * tensor_itemsize(entry.dtype))
    writers = np.array([writer_of(name) for name in metadata.files], np.int64)
    writer = [writers[entry.files] for entry in metadata.tensors.values()]

    def locate(chunk: int) -> Place:
        return _locate(store, metadata.files, *rows[chunk])

    def archive(chunk: int) -> tuple[str, Archive]:
        entry, row = rows[chunk]
        return metadata.files[int(entry.files[row])], _archive(store, metadata.files, entry, row)

    def file_of(chunk: int) -> str:
        entry, row = rows[chunk]
        return metadata.files[int(entry.files[row])]

    return tensors, Chunks(_joined(nbytes), _joined(writer), locate, archive=archive, file_of=file_of)


def _joined(columns: list[Any]) -> Any:
    return np.concatenate(columns).astype(np.int64) if columns else np.empty(0, np.int64)


def _archive(store: LocalStore, files: tuple[str, ...], entry: TensorEntry, row: int) -> Archive:
    file = files[int(entry.files[row])]
    if row in entry.transforms:
        raise UnsupportedError("a chunk's bytes are compressed", file=store.label(file), param=entry.key)
    return read_archive(store, file, offset=int(entry.at[row]), length=int(entry.nbytes[row]))


def _locate(store: LocalStore, files: tuple[str, ...], entry: TensorEntry, row: int) -> Place:
    """Where the elements of one chunk begin. Its archive must hold one tensor of the size that ``.metadata`` states."""
    file = files[int(entry.files[row])]
    archive = _archive(store, files, entry, row)
    value = archive.value
    wanted = tuple(entry.sizes[row].tolist())
    if not isinstance(value, TensorRef) or value.dtype != entry.dtype or tuple(value.shape) != wanted:
        found = f"{value.dtype}{list(value.shape)}" if isinstance(value, TensorRef) else type(value).__name__
        raise CorruptError(
            "a chunk is not what .metadata says",
            file=store.label(file),
            param=entry.key,
            found=found,
            expected=f"{entry.dtype}{list(wanted)}",
            hint="restore the file from a copy",
        )
    place = archive.locate(value)
    if not place.contiguous:
        raise UnsupportedError("a chunk is not stored row by row", file=store.label(file), param=entry.key)
    return file, place.offset


def _load(store: LocalStore, metadata: DcpMetadata, key: str) -> Archive:
    entry = metadata.objects.get(key)
    if entry is None:
        raise CorruptError("the checkpoint lacks an entry", file=store.label(METADATA), param=key)
    if entry.transforms:
        raise UnsupportedError("an entry's bytes are compressed", file=store.label(METADATA), param=key)
    return read_archive(store, metadata.files[entry.file], offset=entry.at, length=entry.nbytes)


def _common(
    store: LocalStore, files: Mapping[str, int], metadata: DcpMetadata, load: Callable[[str], Archive]
) -> tuple[Mapping[str, Any], str]:
    """The common state: ``common.pt`` up to Megatron-Core 0.18, an entry from 0.19 on."""
    if COMMON_FILE in files:
        value, where = read_archive(store, COMMON_FILE).value, "file"
    elif COMMON_ENTRY in metadata.objects:
        value, where = load(COMMON_ENTRY).value, "entry"
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
    else:
        raise MissingError(
            "there is neither common.pt nor an entry common_state",
            file=store.label(COMMON_FILE),
            hint="a Megatron checkpoint has one of them; restore it",
        )
    if not isinstance(value, dict):
        raise CorruptError("the common state is no dict", file=store.label(COMMON_FILE), found=type(value).__name__)
    return value, where

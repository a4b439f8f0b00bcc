"""What a checkpoint's container holds, by key: tensors in chunks, objects, the common state.

Three containers come out the same: torch_dist (``.metadata`` and ``*.distcp``), zarr (one array a key) and the legacy
``.pt`` files. A **chunk** is a row-major box of a tensor whose bytes lie in one piece of one file; it is a *blob* of
the catalogs made from it, and its payload is its elements. Where a chunk's bytes begin is looked up when it is first
read: a large checkpoint has a hundred thousand of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.errors import CorruptError, MissingError
from ...core.ranges import IntColumn
from ...encodings.inert_pickle import Value
from ...encodings.torch_archive import Archive, tensor_itemsize
from ...storage.local import LocalStore

__all__ = ["ChunkSource", "Chunks", "Entries", "Place", "StoredTensor", "unwrapped", "writer_of"]

IntTable = NDArray[np.int64]

Place = tuple[str, int]
"""File, and byte in it where a chunk's elements begin."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """One tensor: row ``i`` of ``offsets`` and ``sizes`` (chunks x dimensions) is the box of chunk ``chunks[i]``."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    offsets: IntTable
    sizes: IntTable
    chunks: IntColumn

    @property
    def itemsize(self) -> int:
        return tensor_itemsize(self.dtype)


@dataclass(frozen=True)
class Chunks:
    """All chunks of a checkpoint: index -> bytes of its elements, its writer where that is known, and where it lies.

    ``writer``: rank in the name of the file (``__<rank>_<n>.distcp``), else -1. ``locate`` may read a header.
    ``archive``: the archive that a tensor's chunk is alone in, with its checksum; None where there is none. ``file_of``
    tells a chunk's file without a look into it.
    """

    nbytes: IntColumn
    writer: IntColumn
    locate: Callable[[int], Place]
    _places: dict[int, Place] = field(default_factory=dict)
    archive: Callable[[int], tuple[str, Archive]] | None = None
    file_of: Callable[[int], str] | None = None

    def __len__(self) -> int:
        return len(self.nbytes)

    def place(self, chunk: int) -> Place:
        """File and byte where a chunk's elements begin. Raises ``CorruptError``, ``MissingError``."""
        found = self._places.get(chunk)
        if found is None:
            found = self._places[chunk] = self.locate(chunk)
        return found

    def file(self, chunk: int) -> str:
        return self.place(chunk)[0] if self.file_of is None else self.file_of(chunk)

    def extended(self, places: Sequence[Place], nbytes: Sequence[int]) -> tuple[Chunks, IntColumn]:
        """These chunks and more, whose places are known; and the indices of the new ones."""
        count = len(self)
        known = dict(enumerate(places, count))

        def locate(chunk: int) -> Place:
            return known[chunk] if chunk >= count else self.place(chunk)

        def file_of(chunk: int) -> str:
            return known[chunk][0] if chunk >= count else self.file(chunk)

        sizes = np.concatenate((self.nbytes, np.array(nbytes, np.int64).reshape(-1))).astype(np.int64)
        writers = np.array([writer_of(file) for file, _ in places], np.int64).reshape(-1)
        writer = np.concatenate((self.writer, writers)).astype(np.int64)
        grown = Chunks(sizes, writer, locate, archive=self.archive, file_of=file_of)
        return grown, np.arange(count, count + len(places))


@dataclass(frozen=True)
class Entries:
    """A checkpoint's content.

    ``objects``: keys of objects that are no tensors, with the bytes that each takes; those of torch_dist end in
    ``/shard_<offsets>_<shape>``. ``load_archive``: an object's archive: its inert value, and where the storages of
    tensors inside it lie. ``common``: the common state, from ``common_in``: "file" (``common.pt``) or "entry".
    ``files``: what the folder holds, by path relative to it, with its bytes. ``original_shape``: of a key whose axes
    Megatron-Core cut up (``nd_reformulated_orig_global_shape``), else None. ``needed``: bytes that each file must have.
    ``lenient``: files may be missing, and what lies in them is then not known; to show the rest.
    """

    path: Path
    container: str
    store: LocalStore
    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, int]
    load_archive: Callable[[str], Archive]
    chunks: Chunks
    common: Mapping[str, Any]
    files: Mapping[str, int]
    common_in: str = "file"
    original_shape: Callable[[str], tuple[int, ...] | None] = lambda key: None
    place_object: Callable[[str], Place] | None = None
    needed: Mapping[str, int] = field(default_factory=dict)
    lenient: bool = False

    def check_files(self) -> None:
        """Raises ``MissingError`` or ``CorruptError`` for the first file that is not there or too short."""
        for name, nbytes in self.needed.items():
            found = self.files.get(name)
            if found is None:
                raise MissingError(
                    "a file that .metadata names is missing",
                    file=self.store.label(name),
                    hint="restore it from a copy",
                )
            if found < nbytes:
                raise CorruptError(
                    "the file is truncated",
                    file=self.store.label(name),
                    found=f"{found} bytes",
                    expected=f"at least {nbytes} bytes",
                    hint="restore it from a copy",
                )

    def find_archive(self, key: str) -> Archive | None:
        """An object's archive; where files may be missing, None for one that cannot be read."""
        if not self.lenient:
            return self.load_archive(key)
        try:
            return self.load_archive(key)
        except (CorruptError, MissingError):
            return None

    def object_place(self, key: str) -> Place:
        """File and first byte of an object's archive: one of its own, unless the container says otherwise."""
        return (f"{key}.pt", 0) if self.place_object is None else self.place_object(key)

    def load_object(self, key: str) -> Value:
        """The inert value of an object, without the list of one that torch_dist puts around it."""
        return unwrapped(self.load_archive(key).value)

    def with_chunks(self, places: Sequence[Place], nbytes: Sequence[int]) -> tuple[Entries, IntColumn]:
        """These entries and more chunks (tensors that lie inside objects), and the indices of the new ones."""
        chunks, added = self.chunks.extended(places, nbytes)
        return replace(self, chunks=chunks), added


def unwrapped(value: Value) -> Value:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def writer_of(file: str) -> int:
    """The rank that wrote a ``.distcp`` file, by its name; -1 for another file."""
    found = re.fullmatch(r"__(\d+)_\d+\.distcp", file)
    return int(found[1]) if found else -1


@dataclass(frozen=True)
class ChunkSource:
    """Elements of chunks (``model.protocols.Source``).

    Nothing proves them on the way: what these containers have are checksums of whole archives, if any.
    """

    store: LocalStore
    chunks: Chunks

    def label(self, blob: int) -> str:
        return self.store.label(self.chunks.file(blob))

    def read_run(self, blob: int, at: int, buffers: Sequence[memoryview]) -> None:
        file, begin = self.chunks.place(blob)
        if at + sum(len(buffer) for buffer in buffers) > int(self.chunks.nbytes[blob]):
            raise CorruptError("a read reaches beyond a chunk", file=self.store.label(file))
        self.store.readv_into(file, begin + at, buffers)

    def view(self, blob: int, at: int, nbytes: int) -> memoryview | None:
        return None

    def segments(self, blob: int) -> IntColumn:
        return np.empty(0, np.int64)

    def pieces(self, blob: int) -> tuple[IntColumn, Sequence[int]] | None:
        return None

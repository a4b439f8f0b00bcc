"""What a checkpoint's container holds, by key: tensors in chunks, objects, the common state.

Three containers come out the same: torch_dist (``.metadata`` and ``*.distcp``), zarr (one array a key) and the legacy
``.pt`` files. A **chunk** is a row-major box of a tensor whose bytes lie in one piece of one file; it is a *blob* of the
catalogs made from it, and its payload is its elements. Where a chunk's bytes begin is looked up when it is first read:
a large checkpoint has a hundred thousand of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.errors import CorruptError
from ...core.ranges import IntColumn
from ...encodings.inert_pickle import Value
from ...encodings.torch_archive import tensor_itemsize
from ...storage.local import LocalStore

__all__ = ["Chunks", "ChunkSource", "Entries", "StoredTensor"]

IntTable = NDArray[np.int64]

Locate = Callable[[int], tuple[str, int]]
"""File and first byte of a chunk's elements."""


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
    """

    nbytes: IntColumn
    writer: IntColumn
    locate: Locate
    _places: dict[int, tuple[str, int]] = field(default_factory=dict)

    def place(self, chunk: int) -> tuple[str, int]:
        """File and byte where a chunk's elements begin. Raises ``CorruptError``, ``MissingError``."""
        found = self._places.get(chunk)
        if found is None:
            found = self._places[chunk] = self.locate(chunk)
        return found


@dataclass(frozen=True)
class Entries:
    """A checkpoint's content. ``load_object(key)``: the inert value of an object, without the list of one around it.

    ``objects``: keys of objects that are no tensors, with the bytes that each takes; torch_dist keys end in
    ``/shard_<offsets>_<shape>``. ``common``: the common state (``common.pt``, or the entry that replaced it).
    ``files``: what the folder holds, by path relative to it, with its bytes. ``common_in``: "file" or "entry".
    """

    path: Path
    container: str
    store: LocalStore
    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, int]
    load_object: Callable[[str], Value]
    chunks: Chunks
    common: Mapping[str, Any]
    files: Mapping[str, int]
    common_in: str = "file"
    original_shape: Callable[[str], tuple[int, ...] | None] = lambda key: None


@dataclass(frozen=True)
class ChunkSource:
    """Elements of chunks (``model.protocols.Source``). Nothing proves them: these containers have no checksums
    of pieces that are worth their cost.
    """

    store: LocalStore
    chunks: Chunks

    def label(self, blob: int) -> str:
        return self.store.label(self.chunks.place(blob)[0])

    def read_run(self, blob: int, at: int, buffers: Sequence[memoryview]) -> None:
        file, begin = self.chunks.place(blob)
        if at + sum(len(b) for b in buffers) > int(self.chunks.nbytes[blob]):
            raise CorruptError("a read reaches beyond a chunk", file=self.store.label(file))
        self.store.readv_into(file, begin + at, buffers)

    def view(self, blob: int, at: int, nbytes: int) -> memoryview | None:
        return None

    def segments(self, blob: int) -> IntColumn:
        return np.empty(0, np.int64)

    def pieces(self, blob: int) -> tuple[IntColumn, Sequence[int]] | None:
        return None

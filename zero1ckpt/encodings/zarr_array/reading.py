"""Payloads of committed zarr arrays, read through tensorstore and proved by the manifest."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...core.boxes import range_boxes
from ...core.errors import CorruptError, UnsupportedError
from ...core.ranges import IntColumn, Range
from ...model.manifest import FileEntry
from ...model.protocols import Store
from ...storage.local import LocalStore
from .metadata import ArraySpec
from .shards import UNSIGNED, Shard, ShardHeader, read_header

__all__ = ["ShardSource"]

_CACHE_BYTES = 16 * 2**20
"""Decoded chunks that a source keeps: a window takes small parts of several arrays by turns."""
_MAX_SOURCES = 8
_MAX_OPEN = 256


@dataclass
class _Opened:
    """Arrays that one source has open, by folder, and the context with their cache."""

    context: Any
    arrays: dict[str, Any] = field(default_factory=dict)


class _Recent:
    """What the sources that read last have open, and no others: a verifier keeps a source for each blob."""

    def __init__(self) -> None:
        self._kept: OrderedDict[object, _Opened] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, source: object) -> _Opened:
        import tensorstore as ts

        with self._lock:
            found = self._kept.pop(source, None)
            if found is None:
                found = _Opened(ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}}))
            self._kept[source] = found
            if len(self._kept) > _MAX_SOURCES:
                self._kept.popitem(last=False)
            return found

    def drop(self, source: object) -> None:
        self._kept.pop(source, None)  # without the lock: a finalizer may run while it is held


_RECENT = _Recent()


@dataclass
class ShardSource:
    """Blobs that are shards. A shard's header is read when it is first needed, and proved by the manifest. Thread-safe.

    ``cuts``: bounds of a blob's pieces. ``nodes``: metadata files that are proved before a blob is read, with what they
    must hold; reading does not depend on them, but a checkpoint with a wrong one is not copied.
    """

    store: Store
    files: Mapping[str, FileEntry]
    shard: Callable[[int], Shard]
    cuts: Callable[[int], IntColumn]
    nodes: Callable[[int], Sequence[tuple[str, bytes]]]
    _headers: dict[int, tuple[ShardHeader, IntColumn]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _token: object = field(default_factory=object)

    def __post_init__(self) -> None:
        weakref.finalize(self, _RECENT.drop, self._token)

    def label(self, blob: int) -> str:
        return self.store.label(self.shard(blob).key)

    def view(self, blob: int, at: int, nbytes: int) -> memoryview | None:
        return None

    def segments(self, blob: int) -> IntColumn:
        return np.empty(0, np.int64)

    def pieces(self, blob: int) -> tuple[IntColumn, Sequence[int]] | None:
        header, cuts = self._header(blob)
        return cuts, header.pieces

    def read_run(self, blob: int, at: int, buffers: Sequence[memoryview]) -> None:
        self._header(blob)
        self._prove_nodes(blob)
        if len(buffers) == 1:
            self._read(blob, at, buffers[0])
            return
        # One read of the run: read by the buffer, a chunk would be decoded once for each of them.
        run = memoryview(np.empty(sum(b.nbytes for b in buffers), np.uint8).data)
        self._read(blob, at, run)
        done = 0
        for buffer in buffers:
            buffer[:] = run[done : done + buffer.nbytes]
            done += buffer.nbytes

    def _header(self, blob: int) -> tuple[ShardHeader, IntColumn]:
        with self._lock:
            known = self._headers.get(blob)
        if known is None:
            shard, cuts = self.shard(blob), self.cuts(blob)
            header = read_header(self.store, shard, len(cuts) - 1)
            stated = self.files[shard.key]
            if (header.digest, header.nbytes) != (stated.digest, stated.bytes):
                raise CorruptError(
                    "the file is not the one that the manifest describes: altered, swapped, or from another save",
                    file=self.store.label(shard.key),
                    found=f"digest {header.digest}",
                    expected=stated.digest,
                    hint="restore it from a copy",
                )
            known = (header, cuts)
            with self._lock:
                self._headers[blob] = known
        return known

    def _prove_nodes(self, blob: int) -> None:
        for key, data in self.nodes(blob):
            found = bytearray(min(self.store.size(key), len(data) + 1))
            self.store.readv_into(key, 0, [memoryview(found)])
            if bytes(found) != data:
                raise CorruptError(
                    "it is not what follows from the manifest",
                    file=self.store.label(key),
                    hint="restore it from a copy",
                )

    def _read(self, blob: int, at: int, data: memoryview) -> None:
        shard = self.shard(blob)
        item = shard.array.itemsize
        low, high = at // item, -(-(at + data.nbytes) // item)
        values = np.frombuffer(bytearray(0), UNSIGNED[item])
        whole = low * item == at and high * item == at + data.nbytes
        if whole:
            values = np.frombuffer(data, UNSIGNED[item])
        whole = whole and values.flags.aligned  # tensorstore reads into aligned memory only; windows may begin anywhere
        if not whole:
            values = np.frombuffer(bytearray((high - low) * item), UNSIGNED[item])
        waiting = []
        for begin, end, elements in shard.runs(low, high):
            part = values[begin - low : end - low]
            if elements is None:
                self._read_padding(blob, shard, begin * item, part.view(np.uint8).data)
            else:
                waiting += self._begin(shard, elements, part)
        self._await(shard, waiting)
        if not whole:
            data[:] = values.view(np.uint8).data[at - low * item :][: data.nbytes]

    def _read_padding(self, blob: int, shard: Shard, at: int, data: memoryview) -> None:
        """Padding as it is stored, where it lies in plain sight; in compressed chunks it has its CRC-32C."""
        if shard.array.compression is None:
            _, cuts = self._header(blob)
            self.store.readv_into(shard.key, shard.header_nbytes(len(cuts) - 1) + at, [data])
        else:
            data[:] = bytes(data.nbytes)

    def _begin(self, shard: Shard, elements: Range, values: Any) -> list[Any]:
        """Begins to read elements of the array into ``values``."""
        import tensorstore as ts

        opened = _RECENT.of(self._token)
        array = self._array(opened, shard.folder, shard.array)
        begun: list[Any] = []
        done = 0
        for box in range_boxes(shard.array.shape, elements):
            target = ts.array(values[done : done + box.size].reshape(box.shape), context=opened.context, copy=False)
            found = array[box.slices].translate_to[(0,) * len(box.shape)]
            begun.append(target.write(found))
            done += box.size
        return begun

    def _await(self, shard: Shard, begun: Sequence[Any]) -> None:
        try:
            for read in begun:
                read.result()
        except (ValueError, OSError, NotImplementedError) as error:
            for read in begun:
                read.exception()  # none may go on to write into the caller's buffer
            entry = self.files[shard.key]
            nbytes = self.store.size(shard.key)
            raise CorruptError(
                f"the shard cannot be read: {str(error).split(' [')[0]}",
                file=self.store.label(shard.key),
                found=f"{nbytes} bytes" if nbytes != entry.bytes else None,
                expected=f"{entry.bytes} bytes" if nbytes != entry.bytes else None,
                hint="restore it from a copy",
            ) from error

    def _array(self, opened: _Opened, folder: str, array: ArraySpec) -> Any:
        """The array as tensorstore has it; its metadata is that of the manifest, and no missing chunk is zero."""
        import tensorstore as ts

        found = opened.arrays.get(folder)
        if found is None:
            if not isinstance(self.store, LocalStore):
                raise UnsupportedError("zarr arrays are read from local files only", file=self.store.label(folder))
            node = array.node({}) | {"data_type": UNSIGNED[array.itemsize], "fill_value": 0}
            spec = {
                "driver": "zarr3",
                "kvstore": {"driver": "file", "path": f"{self.store.root / folder}/"},
                "metadata": node,
                "assume_metadata": True,
                "fill_missing_data_reads": False,
                "recheck_cached_data": False,
                "recheck_cached_metadata": False,
            }
            found = ts.open(spec, context=opened.context).result()
            if len(opened.arrays) >= _MAX_OPEN:
                opened.arrays.clear()
            opened.arrays[folder] = found
        return found

"""Payloads that lie in memory: whole tensors, a buffer to read into, a live optimizer's shards."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import numpy as np

from ..core.ranges import IntColumn

__all__ = ["MemoryBlobs"]


class MemoryBlobs:
    """A source and a sink whose blobs are runs of memory, each laid end to end from payload byte 0.

    ``blobs[b]`` holds the byte views of blob ``b`` in payload order. Nothing is copied but by ``read_run``.
    """

    def __init__(self, blobs: Mapping[int, Sequence[memoryview]], label: str = "memory") -> None:
        self._views = {blob: [view.cast("B") for view in views if view.nbytes] for blob, views in blobs.items()}
        self._ends = {
            blob: np.cumsum([view.nbytes for view in views], dtype=np.int64) for blob, views in self._views.items()
        }
        self._label = label

    def label(self, blob: int) -> str:
        return f"{self._label} {blob}"

    def pieces(self, blob: int) -> tuple[IntColumn, Sequence[int]] | None:
        return None

    def segments(self, blob: int) -> IntColumn:
        return self._ends[blob]

    def view(self, blob: int, at: int, nbytes: int) -> memoryview | None:
        index, inside = self._find(blob, at)
        found = self._views[blob][index]
        return found[inside : inside + nbytes] if inside + nbytes <= found.nbytes else None

    def read_run(self, blob: int, at: int, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            done = 0
            while done < buffer.nbytes:
                index, inside = self._find(blob, at)
                step = min(buffer.nbytes - done, self._views[blob][index].nbytes - inside)
                buffer[done : done + step] = self._views[blob][index][inside : inside + step]
                done, at = done + step, at + step

    def write(self, blob: int, at: int, data: memoryview) -> None:
        done = 0
        while done < data.nbytes:
            index, inside = self._find(blob, at + done)
            step = min(data.nbytes - done, self._views[blob][index].nbytes - inside)
            self._views[blob][index][inside : inside + step] = data[done : done + step]
            done += step

    def _find(self, blob: int, at: int) -> tuple[int, int]:
        ends = self._ends[blob]
        index = bisect_right(ends, at)
        return index, at - (int(ends[index - 1]) if index else 0)

"""A file that several processes may write parts of, none of them a page of another's where hosts cache whole pages."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

from ..storage.local import OutputFile
from .safetensors_file import PAGE

__all__ = ["Edge", "PartFile"]

Edge = tuple[int, bytes]
"""File offset and bytes of a part of a page."""


class PartFile:
    """An ``OutputFile``, or with ``whole_pages`` the pages of it that this process writes alone.

    Hosts that share a file system over a network cache whole pages, and of two that write a part of one page the later
    undoes the earlier. Such edges, at most two a run, go to the process that completes the file, by way of ``sync``.
    """

    def __init__(self, path: Path, nbytes: int, *, create: bool, whole_pages: bool) -> None:
        self.path = path
        self._whole_pages = whole_pages
        self._edges: list[Edge] = []
        self._lock = threading.Lock()
        self._file = OutputFile(path, nbytes, create=create)

    def write_part(self, low: int, data: memoryview) -> None:
        """Writes a part of the file, or what of it are whole pages."""
        if not self._whole_pages:
            self._file.write(low, data)
            return
        high = low + data.nbytes
        first = min(-(-low // PAGE) * PAGE, high)
        last = max(first, high // PAGE * PAGE)
        self._file.write(first, data[first - low : last - low])
        edges = [(low, bytes(data[: first - low])), (last, bytes(data[last - low :]))]
        with self._lock:
            self._edges += [(offset, edge) for offset, edge in edges if edge]

    def sync(self) -> list[Edge]:
        """Makes durable what was written, lets go of the file, and returns what the completing process must write."""
        self._file.sync_and_close()
        return self._edges

    @property
    def told_bytes(self) -> int:
        """Bytes of the edges that ``sync`` returns."""
        return sum(len(edge) for _, edge in self._edges)

    def write(self, offset: int, data: memoryview) -> None:
        """For the process that completes the file, when no other writes to it any more."""
        self._file.write(offset, data)

    def write_edges(self, edges: Iterable[Edge]) -> None:
        for offset, edge in edges:
            self._file.write(offset, memoryview(edge))

    def sync_and_close(self) -> None:
        self._file.sync_and_close()

    def close(self) -> None:
        self._file.close()

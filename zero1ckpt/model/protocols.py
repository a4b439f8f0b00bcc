"""The seams: a store of bytes, a source that is copied from, a sink that is copied to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..core.layout import Layout
from ..core.ranges import IntColumn
from .catalog import Catalog
from .state import PartState

__all__ = ["BlobHeader", "Format", "Progress", "Sink", "Source", "Store"]


class Store(Protocol):
    """Bytes by key. Synchronous; the caller owns every buffer."""

    def size(self, key: str) -> int:
        """Bytes under ``key``; raises ``MissingError``."""

    def readv_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fills ``buffers`` one after the other from ``offset`` on; raises ``MissingError`` or ``CorruptError``."""

    def label(self, key: str) -> str:
        """What error messages call ``key``."""

    def keys(self) -> list[str]: ...


class Source(Protocol):
    """Payloads that moves are read from: files, or live tensors."""

    def read_run(self, blob: int, at: int, buffers: Sequence[memoryview]) -> None:
        """Fills ``buffers`` one after the other from payload byte ``at`` on."""

    def view(self, blob: int, at: int, nbytes: int) -> memoryview | None:
        """The payload bytes themselves, where they lie in memory in one piece; else None."""

    def segments(self, blob: int) -> IntColumn:
        """Payload bytes that a view does not cross (ends of the tensors in memory); sorted, may be empty."""

    def pieces(self, blob: int) -> tuple[IntColumn, Sequence[int]] | None:
        """Bounds and checksums of the payload's pieces, or None where there are none to prove against."""

    def label(self, blob: int) -> str: ...


class Sink(Protocol):
    """Payloads that windows are written to: files, or live tensors."""

    def view(self, blob: int, at: int, nbytes: int) -> memoryview | None:
        """The destination bytes themselves, where they lie in memory in one piece; else None."""

    def write(self, blob: int, at: int, data: memoryview) -> None: ...


class Progress(Protocol):
    """Told of bytes as they are done; called from several threads."""

    def advance(self, nbytes: int) -> None: ...


class BlobHeader(Protocol):
    """What a blob says of itself: where its payload begins, checksums of its header and of its payload's pieces."""

    @property
    def payload(self) -> int: ...
    @property
    def crc(self) -> int: ...
    @property
    def pieces(self) -> Sequence[int]: ...


class Format(Protocol):
    """How a part's state is laid out in blobs. A new one is one file in ``formats/`` and one line in ``registry``."""

    @property
    def name(self) -> str: ...
    @property
    def containers(self) -> tuple[str, ...]: ...

    def plan(self, state: PartState, layout: Layout, part: str, prefix: str) -> Catalog:
        """The catalog of a part as this format will hold it, below the folder ``prefix``. Pure."""

    def cuts(self, catalog: Catalog, blob: int) -> IntColumn:
        """Bounds of the checksummed pieces of a blob's payload. Pure."""

    def header(self, catalog: Catalog, blob: int, pieces: Sequence[int]) -> bytes:
        """All bytes before the payload; their number does not depend on the checksums. Pure."""

    def read_header(self, store: Store, catalog: Catalog, blob: int) -> BlobHeader:
        """Reads a blob's header and checks it against the catalog; raises ``CorruptError`` or ``MissingError``."""

"""The seams: a store of bytes, a source that is copied from, a sink that is copied to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ..core.layout import Layout
from ..core.ranges import IntColumn
from .catalog import Catalog
from .manifest import FileEntry, FormatOptions
from .state import PartState

__all__ = ["Area", "BlobWriter", "Format", "NativeFormat", "Progress", "Sink", "Source", "Store"]


class Store(Protocol):
    """Bytes by key. Synchronous; the caller owns every buffer."""

    def size(self, key: str) -> int:
        """Bytes under ``key``; raises ``MissingError``."""

    def readv_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fills ``buffers`` one after the other from ``offset`` on; raises ``MissingError`` or ``CorruptError``."""

    def label(self, key: str) -> str:
        """What error messages call ``key``."""

    def keys(self) -> list[str]: ...


class Area(Protocol):
    """A folder that blobs are written to. ``resumed``: it may hold blobs of an interrupted run of the same job."""

    root: Path
    resumed: bool

    def path(self, key: str) -> Path:
        """Where a file of the folder is written; its parents are made."""


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


class BlobWriter(Sink, Protocol):
    """One blob while it is written, aside; several processes may write parts of the same one."""

    def sync(self) -> object:
        """Makes durable what this process wrote, lets go of it, and returns what the sealing process must know."""

    @property
    def told_bytes(self) -> int:
        """Bytes of tensors in what ``sync`` returns: they travel to the sealing process, and are counted."""

    def seal(self, pieces: Sequence[int], shares: Sequence[object] = ()) -> list[FileEntry]:
        """Completes the blob with the checksums of all pieces, makes it durable and puts it under its name.

        ``shares``: what ``sync`` returned in the processes that wrote parts of it.
        """

    def close(self) -> None:
        """Lets go of the file; for a blob that will not be completed. May be called twice."""


class Format(Protocol):
    """How a part's state is laid out in blobs of one container.

    A new one is a file in ``formats/`` and a line in ``registry``; it gets the contract suite by registering.
    """

    @property
    def name(self) -> str: ...
    @property
    def container(self) -> str: ...
    @property
    def keeps_layout(self) -> bool:
        """Whether the files depend on dp and bucket size; if not, the manifest states no layout."""

    @property
    def shared_blobs(self) -> bool:
        """Whether several ranks write parts of one blob.

        If not, each blob has one writer: of blob ``r`` it is rank ``r`` where the layout is kept, else the rank that
        holds most of it, to which the others send what they hold.
        """

    @property
    def zero_padding(self) -> bool:
        """Whether bytes of a payload that belong to no tensor are zero; if not, they are structure of the container."""

    def normalize(self, options: FormatOptions) -> FormatOptions:
        """The options that this format knows, with its defaults. Raises ``UsageError`` for values out of range."""

    def plan(self, state: PartState, layout: Layout | None, part: str, prefix: str, options: FormatOptions) -> Catalog:
        """The catalog of a part as this format will hold it, below the folder ``prefix``. Pure."""

    def blob_files(self, catalog: Catalog, blob: int) -> Sequence[str]:
        """Paths of the files that a blob consists of. Pure."""

    def cuts(self, catalog: Catalog, blob: int) -> IntColumn:
        """Bounds of the checksummed pieces of a blob's payload. Pure."""

    def stops(self, catalog: Catalog, blob: int) -> IntColumn:
        """Bytes of a blob's payload that no write may cross (a chunk is written whole). Pure."""

    def source(self, store: Store, catalog: Catalog, files: Mapping[str, FileEntry]) -> Source:
        """Payloads of a committed part; ``files`` are the manifest's, by path, and prove what is read."""

    def create(self, area: Area, catalog: Catalog, blob: int) -> BlobWriter:
        """Makes a blob of its final size. Raises ``OutputError``."""

    def attach(self, area: Area, catalog: Catalog, blob: int) -> BlobWriter:
        """Another process's blob, to write a part of it. Raises ``OutputError``."""

    def adopt(self, area: Area, catalog: Catalog, blob: int) -> tuple[list[FileEntry], Sequence[int]] | None:
        """Files and pieces of a blob that an interrupted run has completed, or None."""

    def derived(self, catalog: Catalog) -> list[tuple[str, bytes]]:
        """Files that follow from the catalog alone, such as an index: path and bytes. Pure."""


class NativeFormat(Format, Protocol):
    """A format of this package's own, whose files a manifest lists."""

    def least_nbytes(self, catalog: Catalog, blob: int) -> int:
        """The fewest bytes that a blob's first file can have, as far as that is quickly known. Pure."""

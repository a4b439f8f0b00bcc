"""What formats in the safetensors container share: a blob is one file, its tensors tile the payload."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np

from ..core.errors import CorruptError
from ..core.layout import Layout
from ..core.ranges import IntColumn
from ..encodings.payload_file import PayloadFile, PayloadSource, entry_of
from ..encodings.safetensors_file import Header, TensorEntry, build_header, read_header
from ..model.catalog import PIECE_BYTES, Catalog, piece_cuts
from ..model.manifest import FileEntry, FormatOptions
from ..model.protocols import Area, Store
from ..model.state import PartState
from ..storage.filesystem import is_local
from ..storage.local import LocalStore

__all__ = ["PayloadFormat"]


class PayloadFormat(ABC):
    """A ``model.protocols.Format`` whose blobs are safetensors files. Subclasses say which tensors a file holds."""

    name: str
    container = "safetensors"
    keeps_layout = True
    shared_blobs = False
    zero_padding = True

    @abstractmethod
    def plan(
        self, state: PartState, layout: Layout | None, part: str, prefix: str, options: FormatOptions
    ) -> Catalog: ...

    @abstractmethod
    def tensors(self, catalog: Catalog, blob: int) -> tuple[TensorEntry, ...]:
        """The tensors of a file, in payload order. Pure."""

    def normalize(self, options: FormatOptions) -> FormatOptions:
        return options.only(f"{self.name} in {self.container}")

    def blob_files(self, catalog: Catalog, blob: int) -> Sequence[str]:
        return [catalog.placement.blob_key(blob)]

    def least_nbytes(self, catalog: Catalog, blob: int) -> int:
        return catalog.placement.payload_nbytes(blob)

    def cuts(self, catalog: Catalog, blob: int) -> IntColumn:
        placement = catalog.placement
        return piece_cuts(placement.extents(blob), placement.payload_nbytes(blob), PIECE_BYTES)

    def stops(self, catalog: Catalog, blob: int) -> IntColumn:
        return np.empty(0, np.int64)

    def source(self, store: Store, catalog: Catalog, files: Mapping[str, FileEntry]) -> PayloadSource:
        def header(blob: int) -> Header:
            return self.read_header(store, catalog, blob)

        def cuts(blob: int) -> IntColumn:
            return self.cuts(catalog, blob)

        return PayloadSource(store, catalog, files, header, cuts)

    def create(self, area: Area, catalog: Catalog, blob: int) -> PayloadFile:
        return self._file(area, catalog, blob, create=True)

    def attach(self, area: Area, catalog: Catalog, blob: int) -> PayloadFile:
        return self._file(area, catalog, blob, create=False, whole_pages=not is_local(area.root))

    def _file(self, area: Area, catalog: Catalog, blob: int, *, create: bool, whole_pages: bool = False) -> PayloadFile:
        key = catalog.placement.blob_key(blob)
        tensors = self.tensors(catalog, blob)

        def header(pieces: Sequence[int]) -> bytes:
            return build_header(tensors, pieces, PIECE_BYTES)

        cuts = self.cuts(catalog, blob)
        return PayloadFile(area.path(key), key, cuts, header, create=create, whole_pages=whole_pages)

    def adopt(self, area: Area, catalog: Catalog, blob: int) -> tuple[list[FileEntry], Sequence[int]] | None:
        key = catalog.placement.blob_key(blob)
        if not (area.root / key).exists():
            return None
        store = LocalStore(area.root)
        try:
            header = self.read_header(store, catalog, blob)
        except CorruptError:
            return None
        finally:
            store.close()
        cuts = self.cuts(catalog, blob)
        if len(header.pieces) != len(cuts) - 1:
            return None
        return [entry_of(key, header.payload, header.crc, cuts, header.pieces)], header.pieces

    def derived(self, catalog: Catalog) -> list[tuple[str, bytes]]:
        return []

    def read_header(self, store: Store, catalog: Catalog, blob: int) -> Header:
        """Raises ``CorruptError`` where tensors are missing, foreign, or of another size or dtype than laid out."""
        key = catalog.placement.blob_key(blob)
        header = read_header(store, key)
        expected = {entry.name: entry for entry in self.tensors(catalog, blob)}
        found = {entry.name: entry for entry in header.tensors}
        for name in [*expected, *found]:
            if found.get(name) != expected.get(name):
                raise CorruptError(
                    f"tensor {name} is not what the layout says: the file was altered or is from another save",
                    file=store.label(key),
                    found=_describe(found.get(name)),
                    expected=_describe(expected.get(name)),
                    hint="restore it from a copy",
                )
        return header


def _describe(entry: TensorEntry | None) -> str:
    return "none" if entry is None else f"{entry.dtype}{list(entry.shape)} at bytes {entry.begin} to {entry.end}"

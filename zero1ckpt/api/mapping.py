"""Names a map from params to places, so that processes which convert together, or one after another, have the same."""

from __future__ import annotations

from ..core.digest import crc64, format_digest, shift
from ..foreign.megatron.boxes import BoxPlacement
from ..model.catalog import Catalog, TablePlacement
from .stored import Stored

__all__ = ["map_digest"]


def map_digest(stored: Stored) -> str:
    """Digest of where every slice of a foreign checkpoint lies, and of the order of its params."""
    crc = 0
    for catalog in stored.catalogs.values():
        for data in _rows(catalog):
            crc = shift(crc, len(data)) ^ crc64(data)
    return format_digest(crc)


def _rows(catalog: Catalog) -> list[bytes]:
    names = "\n".join(f"{param.name} {param.group}" for param in catalog.state.params).encode(errors="replace")
    placement = catalog.placement
    if isinstance(placement, TablePlacement):
        return [names, *(column.tobytes() for column in placement.table.columns)]
    pieces = repr(placement.pieces) if isinstance(placement, BoxPlacement) else repr(placement)
    return [names, pieces.encode(errors="replace")]

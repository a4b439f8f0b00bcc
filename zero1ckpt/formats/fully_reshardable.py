"""``fully_reshardable``: one whole tensor for each param and slot, as an unsharded optimizer would have it.

Specification: formats/fully_reshardable/SPEC.md. Nothing of dp, buckets or padding remains, so anybody's tools read it.
Several ranks write parts of one file, each its own bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from urllib.parse import quote

import msgspec
import numpy as np

from ..core.errors import UsageError
from ..core.layout import Layout
from ..core.ranges import IntColumn
from ..encodings.safetensors_file import TensorEntry
from ..model.catalog import Catalog, Extents
from ..model.manifest import FormatOptions
from ..model.state import PartState
from .payload_format import PayloadFormat

__all__ = ["FullyReshardable", "WholePlacement", "shard_options", "tensor_name", "whole_tensors"]

DEFAULT_SHARD_BYTES = 5_000_000_000
"""A new file is begun before one grows beyond this, as is the custom for model weights."""


def tensor_name(param: str, slot: str) -> str:
    """Name of one tensor: the param's name and the slot's, joined by a slash; a slash in either stands as %2F."""
    return f"{quote(param, safe=_KEPT)}/{quote(slot, safe=_KEPT)}"


_KEPT = "".join(chr(c) for c in range(33, 127) if chr(c) not in "/%")


def whole_tensors(state: PartState) -> list[tuple[int, int]]:
    """(param, slot) of all tensors that have a value, by param, then slot."""
    return [
        (param, slot)
        for param in range(len(state.params))
        for slot in range(len(state.slots))
        if (param, slot) not in state.absent
    ]


def shard_options(options: FormatOptions, format: str) -> FormatOptions:
    """The options of a format whose only choice is the size of its files. Raises ``UsageError``."""
    options.only(format, "shard_bytes")
    shard_bytes = DEFAULT_SHARD_BYTES if options.shard_bytes is None else options.shard_bytes
    if shard_bytes < 1:
        raise UsageError("shard size", found=shard_bytes, expected="at least 1 byte")
    return FormatOptions(shard_bytes=shard_bytes)


@dataclass(frozen=True)
class WholePlacement:
    """Whole tensors in registration order, end to end, cut into files at tensor bounds."""

    state: PartState
    shard_bytes: int
    prefix: str = ""

    @cached_property
    def _tensors(self) -> tuple[IntColumn, IntColumn, IntColumn, IntColumn]:
        """Param, slot, bytes and file of each tensor, in order."""
        pairs = np.array(whole_tensors(self.state), np.int64).reshape(-1, 2)
        sizes = [self.state.tensor_nbytes(param, slot) for param, slot in pairs.tolist()]
        blob, used, blobs = 0, 0, []
        for nbytes in sizes:
            if used and used + nbytes > self.shard_bytes:
                blob, used = blob + 1, 0
            used += nbytes
            blobs.append(blob)
        return pairs[:, 0], pairs[:, 1], np.array(sizes, np.int64), np.array(blobs, np.int64)

    @cached_property
    def _at(self) -> IntColumn:
        """Payload byte of each tensor in its file."""
        _, _, nbytes, blob = self._tensors
        before = np.cumsum(nbytes) - nbytes
        first = self._bounds[:-1]
        at: IntColumn = before - before[first][blob] if len(blob) else before
        return at

    @cached_property
    def _bounds(self) -> IntColumn:
        """Place of the first tensor of each file, and one more entry for the end."""
        return np.searchsorted(self._tensors[3], np.arange(self.blob_count + 1), side="left").astype(np.int64)

    def _rows(self, blob: int) -> slice:
        return slice(int(self._bounds[blob]), int(self._bounds[blob + 1]))

    @cached_property
    def _row_of(self) -> IntColumn:
        """Place of each (param x slots + slot) in the order; -1 where absent."""
        param, slot, _, _ = self._tensors
        rows = np.full(len(self.state.params) * len(self.state.slots), -1, np.int64)
        rows[param * len(self.state.slots) + slot] = np.arange(len(param))
        return rows

    @property
    def blob_count(self) -> int:
        blob = self._tensors[3]
        return int(blob[-1]) + 1 if len(blob) else 1

    def blob_key(self, blob: int) -> str:
        return f"{self.prefix}optimizer-{blob + 1:05d}-of-{self.blob_count:05d}.safetensors"

    def payload_nbytes(self, blob: int) -> int:
        return int(self._tensors[2][self._rows(blob)].sum())

    def tensors(self, blob: int) -> tuple[TensorEntry, ...]:
        param, slot, nbytes, _ = self._tensors
        rows = self._rows(blob)
        return tuple(
            TensorEntry(
                tensor_name(self.state.params[p].name, self.state.slots[s].name),
                self.state.slots[s].dtype,
                self.state.shape_of(p, s),
                at,
                at + size,
            )
            for p, s, at, size in zip(
                param[rows].tolist(), slot[rows].tolist(), self._at[rows].tolist(), nbytes[rows].tolist(), strict=True
            )
        )

    def extents(self, blob: int) -> Extents:
        param, slot, nbytes, blobs = self._tensors
        inside = self._rows(blob)
        rows = inside.start + np.flatnonzero(nbytes[inside] > 0)
        size = nbytes[rows] // self.state.slot_bytes[slot[rows]]
        zero = np.zeros(len(rows), np.int64)
        return Extents(param[rows], slot[rows], zero, size, blobs[rows], self._at[rows], nbytes[rows])

    def locate(self, param: IntColumn, slot: IntColumn, start: IntColumn, size: IntColumn) -> tuple[IntColumn, Extents]:
        tensor = self._row_of[param * len(self.state.slots) + slot]
        row = np.flatnonzero((tensor >= 0) & (size > 0))
        tensor, item = tensor[row], self.state.slot_bytes[slot[row]]
        at = self._at[tensor] + start[row] * item
        found = Extents(param[row], slot[row], start[row], size[row], self._tensors[3][tensor], at, size[row] * item)
        return row, found


class FullyReshardable(PayloadFormat):
    """The safetensors container: shards with an index that follows the convention of Hugging Face."""

    name = "fully_reshardable"
    keeps_layout = False
    shared_blobs = True

    def normalize(self, options: FormatOptions) -> FormatOptions:
        return shard_options(options, f"{self.name} in {self.container}")

    def plan(self, state: PartState, layout: Layout | None, part: str, prefix: str, options: FormatOptions) -> Catalog:
        assert options.shard_bytes is not None
        placement = WholePlacement(state, options.shard_bytes, prefix)
        return Catalog(self.name, self.container, part, state, None, placement)

    def tensors(self, catalog: Catalog, blob: int) -> tuple[TensorEntry, ...]:
        assert isinstance(catalog.placement, WholePlacement)
        return catalog.placement.tensors(blob)

    def derived(self, catalog: Catalog) -> list[tuple[str, bytes]]:
        """The index: which file holds which tensor, and the bytes of all of them."""
        placement = catalog.placement
        assert isinstance(placement, WholePlacement)
        weights: dict[str, str] = {}
        for blob in range(placement.blob_count):
            file = placement.blob_key(blob).removeprefix(placement.prefix)
            weights.update({entry.name: file for entry in placement.tensors(blob)})
        total = sum(placement.payload_nbytes(blob) for blob in range(placement.blob_count))
        index = {"metadata": {"total_size": total}, "weight_map": weights}
        text = msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n"
        return [(f"{placement.prefix}optimizer.safetensors.index.json", text)]

"""Slots of another shape than their param's (factored or block-quantised state): carried whole, each by one rank.

Owner rule: the rank that owns the param's first element; rank 0 for a param of 0 elements.
"""

from __future__ import annotations

import numpy as np

from ..core.layout import Layout
from ..core.ranges import IntColumn
from .catalog import Extents
from .state import PartState

__all__ = ["whole_extents", "whole_owners"]


def owner_ranks(layout: Layout) -> IntColumn:
    """Rank that owns the first element of each param, in registration order. Pure."""
    ranks = np.zeros(layout.param_count, np.int64)
    for buffer in layout.buffers:
        shard = np.maximum(buffer.shard_numel[buffer.bucket_of], 1)
        first = (buffer.start - buffer.bucket_offset[buffer.bucket_of]) // shard
        ranks[buffer.param] = np.where(buffer.end > buffer.start, first, 0)
    return ranks


def whole_extents(state: PartState, layout: Layout, blob: int) -> Extents:
    """The whole tensors that one rank carries, by param, then slot, end to end from byte 0. Pure."""
    slots = np.flatnonzero(state.whole_mask)
    if not len(slots):
        return Extents.concatenate([])
    mine = np.flatnonzero(owner_ranks(layout) == blob)
    param, slot = np.repeat(mine, len(slots)), np.tile(slots, len(mine))
    size = state.numels[param, slot]
    keep = np.flatnonzero(state.has(param, slot) & (size > 0))
    param, slot, size = param[keep], slot[keep], size[keep]
    nbytes = size * state.slot_bytes[slot]
    zero = np.zeros(len(param), np.int64)
    return Extents(param, slot, zero, size, np.full(len(param), blob), np.cumsum(nbytes) - nbytes, nbytes)


def whole_owners(
    state: PartState, layout: Layout, param: IntColumn, slot: IntColumn, start: IntColumn, size: IntColumn
) -> tuple[IntColumn, IntColumn, IntColumn, IntColumn]:
    """(asked row, rank, start, size) of those asked slices that are of whole tensors; each lies with one rank. Pure."""
    rows = np.flatnonzero(state.whole_mask[slot] & state.has(param, slot) & (size > 0))
    return rows, owner_ranks(layout)[param[rows]] if len(rows) else rows, start[rows], size[rows]

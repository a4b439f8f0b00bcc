"""A Megatron part's buffers as a layout of ours, to be looked at: buckets, and what each rank owns of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate

import numpy as np

from ..core.layout import BufferKey, BufferLayout, Layout, LayoutRules
from ..foreign.megatron.model import Buffer, MegatronPart
from ..model.catalog import Catalog
from .stored import Stored

__all__ = ["shown_catalogs", "shown_layout"]


def shown_catalogs(stored: Stored) -> Mapping[str, Catalog]:
    """The parts' catalogs, those of a Megatron checkpoint with the layout that its buffers have."""
    if stored.megatron is None:
        return stored.catalogs
    parts = stored.megatron.parts
    return {name: replace(catalog, layout=shown_layout(parts[name])) for name, catalog in stored.catalogs.items()}


def shown_layout(part: MegatronPart) -> Layout | None:
    """A part's buffers; None in model space. Pure.

    Experts that make up one param together are each a place of it. Where no file tells the dp size it is as of one
    rank, and a bucket whose padded size is not stated ends where its params do.
    """
    layout = part.layout
    if layout is None:
        return None
    rules = LayoutRules(layout.dp_size or 1, layout.bucket_size, pad_for_high_nccl_busbw=layout.pad_for_high_nccl_busbw)
    buffers = tuple(_shown(part, buffer, rules) for buffer in layout.buffers)
    return Layout(rules, buffers, len(part.catalog.state.params))


def _shown(part: MegatronPart, buffer: Buffer, rules: LayoutRules) -> BufferLayout:
    locals_ = [part.local_params[i] for i in buffer.params]
    numel = [bucket.numel_unpadded if bucket.numel is None else bucket.numel for bucket in buffer.buckets]
    offset = [0, *accumulate(numel)][:-1]
    home = [at for at, bucket in zip(offset, buffer.buckets, strict=True) for _ in range(bucket.first, bucket.last)]
    start = np.array(home, np.int64) + np.array(buffer.starts, np.int64)
    size = np.array([local.numel for local in locals_], np.int64)
    expert = any(local.expert for local in locals_)
    return BufferLayout(
        BufferKey(buffer.param_dtype, buffer.grad_dtype, expert),
        rules,
        tuple(local.name for local in locals_),
        np.array([local.param for local in locals_], np.int64),
        start,
        start + size,
        np.array(offset, np.int64),
        np.array(numel, np.int64),
        np.array([bucket.numel_unpadded for bucket in buffer.buckets], np.int64),
        np.array([0, *(bucket.last for bucket in buffer.buckets)], np.int64),
    )

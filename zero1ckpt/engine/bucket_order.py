"""All buckets of a layout in one order, the same on every rank: that in which a backward pass completes them."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.layout import Layout

__all__ = ["BucketRef", "backward_order"]


@dataclass(frozen=True, slots=True)
class BucketRef:
    """One bucket: its buffer, its number there, and its params (indices in registration order)."""

    buffer: int
    bucket: int
    params: tuple[int, ...]


def backward_order(layout: Layout) -> tuple[BucketRef, ...]:
    """Buckets by falling index of their first-registered param, which is the last to get its gradient. Pure.

    Within a buffer this is the order of the buckets. Across buffers it keeps a few late params of one buffer (float32
    norms among bfloat16 layers) from holding back another buffer that is complete.
    """
    refs = []
    for number, buffer in enumerate(layout.buffers):
        params = buffer.param.tolist()
        for bucket in buffer.buckets:
            refs.append(BucketRef(number, bucket.index, tuple(params[bucket.first : bucket.last])))
    return tuple(sorted(refs, key=lambda ref: (-min(ref.params, default=0), ref.buffer, ref.bucket)))

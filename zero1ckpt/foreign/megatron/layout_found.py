"""What made a part's buckets: dp size, bucket size, shared embeddings, read off the buckets and checked by the rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...core.layout import BUCKET_ALIGN, HIGH_BUSBW_ALIGN, LayoutRules, layout_buffer
from .entries import Entries
from .model import Buffer, LocalParam, PartLayout
from .raw_buckets import MAIN_FIELD, RawBucket, RawPart

if TYPE_CHECKING:
    from .bucket_space import PartOptions

__all__ = ["dp_size_of", "find_layout", "shard_numel"]

_EMBEDDINGS = ("word_embeddings.weight", "output_layer.weight")


def find_layout(
    entries: Entries,
    raw: RawPart,
    buffers: Sequence[Buffer],
    locals_: Sequence[LocalParam],
    options: PartOptions,
) -> tuple[PartLayout, frozenset[int], tuple[str, ...]]:
    """The layout, the local params with a bucket of their own for being shared, and what does not fit. Pure."""
    dp_size = dp_size_of(entries, raw)
    undivided = bool(options.one_bucket or options.pipeline_rank)
    choices = list(_shared_choices(buffers, locals_, options))
    for only_shared, shared in [(undivided, one) for one in choices] + [(False, one) for one in choices]:
        size = _bucket_size(buffers, locals_, shared, options)
        if size is None or (only_shared and size[0] is not None):
            continue
        chosen, stated = size
        busbw = _padded_for_busbw(raw, dp_size)
        rules = LayoutRules(dp_size or 1, chosen, pad_for_high_nccl_busbw=busbw)
        if all(_follows(buffer, locals_, shared, rules) for buffer in buffers):
            return PartLayout(tuple(buffers), dp_size, chosen, stated, busbw), shared, ()
    notice = f"{raw.prefix}: no bucket size gives these buckets"
    return PartLayout(tuple(buffers), dp_size), frozenset(), (notice,)


# -------------------------------------------------------------------------------------------------------------- dp size


def dp_size_of(entries: Entries, raw: RawPart) -> int | None:
    """The largest number of equal shards whose ends are edges of chunks, and for which there are writers."""
    buckets = [bucket for buffer in raw.buffers for bucket in buffer.buckets]
    if not buckets or (any(bucket.numel is None for bucket in buckets) and not entries.lenient):
        return None
    if all(len(bucket.edges) <= 2 for bucket in buckets) and any(b.numel_unpadded > BUCKET_ALIGN for b in buckets):
        return None  # a writer that made one chunk of each bucket: shards have left no trace
    most = _writers(entries, buckets)
    if most is None:
        most = max(len(bucket.edges) for bucket in buckets)
    return next((dp for dp in range(most, 0, -1) if all(_cut_by(bucket, dp) for bucket in buckets)), 1)


def _writers(entries: Entries, buckets: Sequence[RawBucket]) -> int | None:
    """How many ranks wrote chunks of these buckets; None where files do not say."""
    chunks = np.concatenate([bucket.fields[MAIN_FIELD].chunk for bucket in buckets])
    writers = set(entries.chunks.writer[chunks].tolist())
    return None if -1 in writers else len(writers)


def _cut_by(bucket: RawBucket, dp: int) -> bool:
    shard = shard_numel(bucket, dp)
    if not shard:
        return False
    edges = set(bucket.edges)
    return all(end in edges for end in range(shard, bucket.numel_unpadded, shard))


def shard_numel(bucket: RawBucket, dp: int) -> int:
    """Elements of a bucket that each of ``dp`` ranks has; 0 where it cannot be cut so."""
    numel = bucket.numel
    if numel is None:
        align = int(np.lcm(dp, BUCKET_ALIGN))
        numel = -(-bucket.numel_unpadded // align) * align
    return numel // dp if numel % dp == 0 else 0


def _padded_for_busbw(raw: RawPart, dp_size: int | None) -> bool:
    """Whether padded sizes are multiples of 65536 that lcm(dp, 128) alone would not ask for."""
    sizes = [(b.numel_unpadded, b.numel) for buffer in raw.buffers for b in buffer.buckets if b.numel is not None]
    plain = int(np.lcm(dp_size or 1, BUCKET_ALIGN))
    if not sizes or any(numel % HIGH_BUSBW_ALIGN for _, numel in sizes):
        return False
    return any(-(-real // plain) * plain != numel for real, numel in sizes)


# ---------------------------------------------------------------------------------------------------------- bucket size


def _shared_choices(
    buffers: Sequence[Buffer], locals_: Sequence[LocalParam], options: PartOptions
) -> Iterator[frozenset[int]]:
    """Which params may be shared embeddings, the likeliest first: they stand alone in their bucket."""
    alone = [
        buffer.params[bucket.first]
        for buffer in buffers
        if len(buffer.buckets) > 1
        for bucket in buffer.buckets
        if bucket.last - bucket.first == 1
    ]
    embeddings = frozenset(i for i in alone if _is_embedding(locals_[i]))
    rounded = frozenset(i for i in alone if _after_rounded_bucket(buffers, locals_, i))
    choices = [frozenset[int](), embeddings, rounded, *(frozenset((i,)) for i in alone)]
    if options.tied or options.one_bucket:
        choices = [embeddings, *choices]
    yield from dict.fromkeys([rounded, *choices] if rounded else choices)


def _is_embedding(local: LocalParam) -> bool:
    names = [local.name, *(held.key for held in local.boxes)]
    return any(name.endswith(_EMBEDDINGS) for name in names)


def _after_rounded_bucket(buffers: Sequence[Buffer], locals_: Sequence[LocalParam], index: int) -> bool:
    """Whether the bucket before a param's own ends behind its last param: only a shared embedding leaves that."""
    for buffer in buffers:
        for bucket, follows in zip(buffer.buckets, buffer.buckets[1:], strict=False):
            alone = follows.last - follows.first == 1 and buffer.params[follows.first] == index
            if alone and bucket.last > bucket.first:
                last = bucket.last - 1
                end = buffer.starts[last] + locals_[buffer.params[last]].numel
                return bucket.numel_unpadded != end
    return False


def _bucket_size(
    buffers: Sequence[Buffer], locals_: Sequence[LocalParam], shared: frozenset[int], options: PartOptions
) -> tuple[int | None, bool] | None:
    """A threshold that gives these buckets and whether the run's arguments state it; None where there is none."""
    above, most = 0, None
    for buffer in buffers:
        for k, bucket in enumerate(buffer.buckets):
            if buffer.params[bucket.first] in shared:
                continue
            ends = [buffer.starts[i] + locals_[buffer.params[i]].numel for i in range(bucket.first, bucket.last)]
            before = ends[-2] if len(ends) > 1 else 0
            above = max(above, before) if len(buffer.buckets) > 1 else above
            follows = buffer.buckets[k + 1 : k + 2]
            if follows and buffer.params[follows[0].first] not in shared:
                most = ends[-1] if most is None else min(most, ends[-1])
    if most is None:
        return None, options.one_bucket is True
    if above >= most:
        return None
    stated = options.stated_bucket_size
    if stated is not None and above < stated <= most:
        return stated, True
    return most, False


def _follows(buffer: Buffer, locals_: Sequence[LocalParam], shared: frozenset[int], rules: LayoutRules) -> bool:
    """Whether the layout rule makes these very buckets."""
    params = [_Laid(locals_[i], i in shared) for i in reversed(buffer.params)]
    if not params:
        return True
    if len(buffer.buckets) == 1 and rules.bucket_size is not None:  # a later model chunk, or a buffer below it
        rules = LayoutRules(rules.dp_size, None, pad_for_high_nccl_busbw=rules.pad_for_high_nccl_busbw)
    made = layout_buffer(params[0].buffer_key, params, range(len(params)), rules)
    sizes = made.bucket_numel_unpadded.tolist() == [bucket.numel_unpadded for bucket in buffer.buckets]
    places = (made.start - made.bucket_offset[made.bucket_of]).tolist() == list(buffer.starts)
    padded = [bucket.numel for bucket in buffer.buckets]
    return sizes and places and (None in padded or made.bucket_numel.tolist() == padded)


class _Laid:
    """A local param as the layout rule takes it."""

    def __init__(self, local: LocalParam, shared: bool) -> None:
        self.name, self.numel, self.buffer_key = local.name, local.numel, local.buffer_key
        self.shared_embedding = shared

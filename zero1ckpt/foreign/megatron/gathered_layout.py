"""The buckets of a gathered buffer by Megatron's layout rule, where the rule gives the places that were found.

Where a bucket ends at a multiple of 64 and without a tail, places alone do not show it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...core.layout import BufferKey, BufferLayout, LayoutRules, default_bucket_size, layout_buffer
from .common import Args
from .model import Bucket

__all__ = ["FoundLayout", "PlacedParam", "buckets_by_rule", "starts_by_rule"]


@dataclass(frozen=True, slots=True)
class PlacedParam:
    """A param in place order (``core.layout.LayoutParam``). ``start``: in the gathered buffer; ``world``: in the padded
    one, where a file shows it.
    """

    name: str
    numel: int
    buffer_key: BufferKey
    shared_embedding: bool
    start: int
    world: int | None = None


@dataclass(frozen=True, slots=True)
class FoundLayout:
    """Buckets, and the rule that gives them. ``dp_size``: where padded places agree with it; ``stated``: whether the
    args say so.
    """

    buckets: tuple[Bucket, ...]
    dp_size: int | None
    bucket_size: int | None
    stated: bool


def buckets_by_rule(
    params: Sequence[PlacedParam], total: int, args: Args, thresholds: Sequence[int], *, overlaps: bool
) -> FoundLayout | None:
    """The first rule whose buffer has every param where it was found; None where there is none. Pure.

    ``thresholds``: further bucket sizes to try; ``overlaps``: whether bucket sizes act on this buffer at all.
    """
    padded = all(param.world is not None for param in params)
    own = _dp_size(args, params[0].buffer_key.expert)
    for size, stated, layout in _layouts(params, args, thresholds, overlaps, padded):
        if _agrees(layout, params, total, padded) and _compact(layout) == [param.start for param in params]:
            known = layout.rules.dp_size if padded and layout.rules.dp_size == own else None
            return FoundLayout(_buckets(layout, padded), known, size, stated)
    return None


def starts_by_rule(params: Sequence[PlacedParam], total: int, args: Args, *, overlaps: bool) -> tuple[int, ...] | None:
    """Where the params lie in the gathered buffer, by the rule that gives their places in the padded one; None where
    there is none. ``start`` of the params is not looked at. Pure.
    """
    for _, _, layout in _layouts(params, args, (), overlaps, padded=True):
        if _agrees(layout, params, total, padded=True):
            return tuple(_compact(layout))
    return None


def _layouts(
    params: Sequence[PlacedParam], args: Args, thresholds: Sequence[int], overlaps: bool, padded: bool
) -> Iterator[tuple[int | None, bool, BufferLayout]]:
    """Layouts that are possible, likeliest first, with the bucket size and whether the args state it."""
    own = _dp_size(args, params[0].buffer_key.expert)
    for size, stated in _sizes(args, thresholds, overlaps):
        for dp in _dp_sizes(own, args) if padded else [1]:
            for high in (False, True) if padded else (False,):
                rules = LayoutRules(dp, size, pad_for_high_nccl_busbw=high)
                yield size, stated, layout_buffer(params[0].buffer_key, params, range(len(params))[::-1], rules)


def _sizes(args: Args, thresholds: Sequence[int], overlaps: bool) -> Iterator[tuple[int | None, bool]]:
    if overlaps and args.overlap_grad_reduce:
        stated = args.ddp_bucket_size
        yield (default_bucket_size(args.data_parallel or 1) if stated is None else stated), True
    yield None, args.overlap_grad_reduce is False
    if overlaps:
        yield from ((size, False) for size in thresholds)


def _dp_size(args: Args, expert: bool) -> int | None:
    """Ranks that a bucket is cut over, as the args state it: context-parallel ranks count, instances each do."""
    if not expert:
        whole = None if args.data_parallel is None else args.data_parallel * (args.context_parallel or 1)
        return None if whole is None else max(whole // (args.instances or 1), 1)
    tensor = args.integer("expert_tensor_parallel_size") or args.tensor_parallel
    if args.world_size is None or tensor is None or args.expert_parallel is None or args.pipeline_parallel is None:
        return None
    whole = args.world_size // max(tensor * args.expert_parallel * args.pipeline_parallel, 1)
    return max(whole // (args.instances or 1), 1)


def _dp_sizes(own: int | None, args: Args) -> list[int]:
    """The stated size, and others that padding may be that of."""
    most = max(own or 1, args.data_parallel or 1)
    return list(dict.fromkeys([*([] if own is None else [own]), *(d for d in range(1, most + 1) if most % d == 0)]))


def _agrees(layout: BufferLayout, params: Sequence[PlacedParam], total: int, padded: bool) -> bool:
    if layout.numel_unpadded != total:
        return False
    return not padded or layout.start.tolist() == [param.world for param in params]


def _compact(layout: BufferLayout) -> list[int]:
    """Where each param begins once the buckets' tails are removed."""
    before = layout.bucket_numel_unpadded.cumsum() - layout.bucket_numel_unpadded
    starts: list[int] = (layout.start - layout.bucket_offset[layout.bucket_of] + before[layout.bucket_of]).tolist()
    return starts


def _buckets(layout: BufferLayout, padded: bool) -> tuple[Bucket, ...]:
    return tuple(
        Bucket(bucket.numel_unpadded, bucket.numel if padded else None, bucket.first, bucket.last)
        for bucket in layout.buckets
    )

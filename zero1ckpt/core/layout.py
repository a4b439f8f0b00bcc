"""Where every param of a model lies in its buffer, its bucket and its rank's shard.

The rule is Megatron-Core's distributed-optimizer layout, written down in formats/layout/SPEC.md. All quantities are
counted in elements. Everything here is a pure function of params and rules, and nothing holds one object a rank or a
fragment: a rank's view is computed on demand as int64 columns, so DP 16,384 costs what DP 1 does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import lcm
from typing import NamedTuple, Protocol

import numpy as np

from .ranges import IntColumn, Range, RangeMap

__all__ = [
    "Bucket",
    "BufferKey",
    "BufferLayout",
    "Fragment",
    "Fragments",
    "Layout",
    "LayoutParam",
    "LayoutRules",
    "ParamPlacement",
    "default_bucket_size",
    "layout_buffer",
    "layout_params",
]

PARAM_ALIGN = 64
"""Each param starts at a multiple of this many elements of its buffer."""
BUCKET_ALIGN = 128
"""Each bucket ends at a multiple of lcm(dp_size, this) elements of its buffer."""
HIGH_BUSBW_ALIGN = 65536
"""Further factor of the bucket end under ``pad_for_high_nccl_busbw``."""


def default_bucket_size(dp_size: int) -> int:
    """Megatron-Core's default bucket size, in elements, where communication overlaps: it depends on the dp size."""
    return max(40_000_000, 1_000_000 * dp_size)


@dataclass(frozen=True, slots=True)
class LayoutRules:
    """What decides a layout besides the params. ``bucket_size=None`` makes one bucket a buffer.

    Raises ``ValueError`` for sizes below 1.
    """

    dp_size: int
    bucket_size: int | None = None
    param_align: int = PARAM_ALIGN
    bucket_align: int = BUCKET_ALIGN
    pad_for_high_nccl_busbw: bool = False

    def __post_init__(self) -> None:
        for name in ("dp_size", "param_align", "bucket_align"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: found {getattr(self, name)}, expected at least 1")
        if self.bucket_size is not None and self.bucket_size < 1:
            raise ValueError(f"bucket_size: found {self.bucket_size}, expected at least 1 or None")

    @property
    def bucket_end_align(self) -> int:
        """Every bucket's padded size is a multiple of this many elements."""
        extra = HIGH_BUSBW_ALIGN if self.pad_for_high_nccl_busbw else 1
        return lcm(self.dp_size, self.bucket_align, extra)

    def with_dp(self, dp_size: int) -> LayoutRules:
        return replace(self, dp_size=dp_size)


class BufferKey(NamedTuple):
    """Params that share this share a buffer."""

    param_dtype: str
    grad_dtype: str
    expert: bool = False


class LayoutParam(Protocol):
    """What the layout needs to know of a param."""

    @property
    def name(self) -> str: ...
    @property
    def numel(self) -> int: ...
    @property
    def buffer_key(self) -> BufferKey: ...
    @property
    def shared_embedding(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Bucket:
    """A slice of a buffer that is reduced and gathered as one message. ``first:last`` are positions in its params."""

    index: int
    offset: int
    numel: int
    numel_unpadded: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class ParamPlacement:
    """Where a whole param lies: its range in the buffer, and its bucket."""

    name: str
    param: int
    world: Range
    bucket: int


@dataclass(frozen=True, slots=True)
class Fragment:
    """The part of one param that one rank owns, by its four views."""

    name: str
    param_index: int
    bucket: int
    gbuf_world: Range
    gbuf_world_in_bucket: Range
    gbuf_local: Range
    param: Range

    @property
    def size(self) -> int:
        return self.param.size


@dataclass(frozen=True)
class Fragments:
    """Columns of param fragments, ordered by bucket and place. All int64 of one length, none empty.

    ``param`` is the index in registration order; ``world`` the start in the buffer, ``local`` the start in the rank's
    shard of the bucket, ``param_start`` the start in the flattened param, ``rank`` the owner.
    """

    buffer: BufferLayout
    param: IntColumn
    bucket: IntColumn
    rank: IntColumn
    world: IntColumn
    local: IntColumn
    param_start: IntColumn
    size: IntColumn

    def __len__(self) -> int:
        return len(self.param)

    def __iter__(self) -> Iterator[Fragment]:
        in_bucket = self.world - self.buffer.bucket_offset[self.bucket]
        columns = (self.param, self.bucket, self.world, in_bucket, self.local, self.param_start, self.size)
        names = self.buffer.name_of
        for param, bucket, world, inside, local, start, size in zip(*(c.tolist() for c in columns), strict=True):
            yield Fragment(
                names[param],
                param,
                bucket,
                Range(world, world + size),
                Range(inside, inside + size),
                Range(local, local + size),
                Range(start, start + size),
            )


@dataclass(frozen=True)
class BufferLayout:
    """One contiguous buffer: params in place order, cut into buckets that every rank owns 1/dp_size of."""

    key: BufferKey
    rules: LayoutRules
    names: tuple[str, ...]
    param: IntColumn = field(repr=False)
    """Index in registration order of each param, in place order."""
    start: IntColumn = field(repr=False)
    end: IntColumn = field(repr=False)
    bucket_offset: IntColumn = field(repr=False)
    bucket_numel: IntColumn = field(repr=False)
    bucket_numel_unpadded: IntColumn = field(repr=False)
    bucket_first: IntColumn = field(repr=False)
    """Place of the first param of each bucket, and one more entry for the end."""

    @property
    def numel(self) -> int:
        return int(self.bucket_numel.sum())

    @property
    def numel_unpadded(self) -> int:
        """Sum of the buckets' unpadded sizes: gaps between params count, bucket tails do not."""
        return int(self.bucket_numel_unpadded.sum())

    @property
    def bucket_count(self) -> int:
        return len(self.bucket_numel)

    @property
    def shard_numel(self) -> IntColumn:
        """Elements of each bucket that one rank owns."""
        return self.bucket_numel // self.rules.dp_size

    @cached_property
    def shard_offset(self) -> IntColumn:
        """Start of each bucket's shard when a rank's shards are laid end to end; one more for the end."""
        return np.concatenate(([0], np.cumsum(self.shard_numel))).astype(np.int64)

    @cached_property
    def name_of(self) -> dict[int, str]:
        return dict(zip(self.param.tolist(), self.names, strict=True))

    @cached_property
    def place_of(self) -> dict[int, int]:
        """Place in this buffer by index in registration order."""
        return {param: place for place, param in enumerate(self.param.tolist())}

    @cached_property
    def bucket_of(self) -> IntColumn:
        """Bucket of each param, in place order."""
        return np.repeat(np.arange(self.bucket_count), np.diff(self.bucket_first))

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return tuple(self.bucket(i) for i in range(self.bucket_count))

    def bucket(self, index: int) -> Bucket:
        return Bucket(
            index,
            int(self.bucket_offset[index]),
            int(self.bucket_numel[index]),
            int(self.bucket_numel_unpadded[index]),
            int(self.bucket_first[index]),
            int(self.bucket_first[index + 1]),
        )

    @property
    def placements(self) -> Iterator[ParamPlacement]:
        rows = zip(
            self.names,
            self.param.tolist(),
            self.start.tolist(),
            self.end.tolist(),
            self.bucket_of.tolist(),
            strict=True,
        )
        for name, param, start, end, bucket in rows:
            yield ParamPlacement(name, param, Range(start, end), bucket)

    @property
    def param_index_map(self) -> dict[str, tuple[int, int, int]]:
        """name -> (start, end, bucket), as Megatron-Core names and orders it."""
        return {p.name: (p.world.start, p.world.end, p.bucket) for p in self.placements}

    def param_map(self) -> RangeMap:
        """Map from the params, flattened and laid end to end in place order, to the buffer."""
        size = self.end - self.start
        return RangeMap.from_columns(np.cumsum(size) - size, self.start, size)

    def shard_map(self, rank: int) -> RangeMap:
        """Map from the buffer to one rank's shards of it, laid end to end in bucket order."""
        size = self.shard_numel
        return RangeMap.from_columns(self.bucket_offset + rank * size, self.shard_offset[:-1], size)

    def fragments(self, rank: int) -> Fragments:
        """What ``rank`` owns. Cost: O(buckets x log params + own fragments), whatever the dp size.

        Raises ``ValueError`` for a rank outside ``[0, dp_size)``.
        """
        if not 0 <= rank < self.rules.dp_size:
            raise ValueError(f"rank: found {rank}, expected 0 to {self.rules.dp_size - 1}")
        size = self.shard_numel
        low = self.bucket_offset + rank * size
        high = low + size
        first = np.searchsorted(self.end, low, side="right")
        last = np.searchsorted(self.start, high, side="left")
        count = np.maximum(last - first, 0)
        bucket = np.repeat(np.arange(self.bucket_count), count)
        place = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
        start = np.maximum(self.start[place], low[bucket])
        end = np.minimum(self.end[place], high[bucket])
        keep = end > start
        place, bucket, start, end = place[keep], bucket[keep], start[keep], end[keep]
        return Fragments(
            self,
            self.param[place],
            bucket,
            np.full(len(place), rank, np.int64),
            start,
            start - low[bucket],
            start - self.start[place],
            end - start,
        )

    def owners(self, place: IntColumn, start: IntColumn, end: IntColumn) -> tuple[IntColumn, Fragments]:
        """Cut param ranges at shard bounds.

        ``place`` (position in this buffer), ``start``, ``end`` (elements of the flattened param): int64 of one length.
        Returns the row that each fragment comes from, and the fragments.
        """
        keep = np.flatnonzero(end > start)
        place, start, end = place[keep], start[keep], end[keep]
        bucket = self.bucket_of[place]
        size = np.maximum(self.shard_numel[bucket], 1)
        offset = self.bucket_offset[bucket]
        low = self.start[place] + start - offset
        high = self.start[place] + end - offset
        first, last = low // size, (high - 1) // size
        count = last - first + 1
        row = np.repeat(np.arange(len(place)), count)
        rank = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + first[row]
        begin = np.maximum(low[row], rank * size[row])
        stop = np.minimum(high[row], (rank + 1) * size[row])
        return keep[row], Fragments(
            self,
            self.param[place[row]],
            bucket[row],
            rank,
            begin + offset[row],
            begin - rank * size[row],
            start[row] + begin - low[row],
            stop - begin,
        )


@dataclass(frozen=True)
class Layout:
    """All buffers of one part, in Megatron-Core's order: dense before expert, then by first param."""

    rules: LayoutRules
    buffers: tuple[BufferLayout, ...]
    param_count: int

    @cached_property
    def buffer_of(self) -> IntColumn:
        """Buffer of each param, in registration order."""
        column = np.zeros(self.param_count, np.int64)
        for index, buffer in enumerate(self.buffers):
            column[buffer.param] = index
        return column

    @cached_property
    def place_of(self) -> IntColumn:
        """Place of each param in its buffer, in registration order."""
        column = np.zeros(self.param_count, np.int64)
        for buffer in self.buffers:
            column[buffer.param] = np.arange(len(buffer.param))
        return column

    @property
    def numel(self) -> int:
        return sum(buffer.numel for buffer in self.buffers)

    def shard_numel(self) -> int:
        """Elements that each rank owns, padding included."""
        return self.numel // self.rules.dp_size


def layout_params(params: Sequence[LayoutParam], rules: LayoutRules) -> Layout:
    """Layout of params given in registration order. Pure.

    Raises ``ValueError`` when two params have the same name.
    """
    members: dict[BufferKey, list[int]] = {}
    seen: set[str] = set()
    for index, param in enumerate(params):
        if param.name in seen:
            raise ValueError(f"{param.name}: two params have this name")
        seen.add(param.name)
        members.setdefault(BufferKey(*param.buffer_key), []).append(index)
    keys = sorted(members, key=lambda key: key.expert)  # stable: dense buffers first, each kind by first param
    buffers = tuple(layout_buffer(key, params, members[key], rules) for key in keys)
    return Layout(rules, buffers, len(params))


def layout_buffer(
    key: BufferKey, params: Sequence[LayoutParam], members: Sequence[int], rules: LayoutRules
) -> BufferLayout:
    """Layout of the buffer that holds ``params[i] for i in members`` (registration order). Pure."""
    order = list(reversed(members))
    starts, ends, buckets = _place(params, order, rules)
    columns = np.array(buckets, dtype=np.int64).reshape(-1, 4)
    return BufferLayout(
        key,
        rules,
        tuple(params[i].name for i in order),
        np.array(order, dtype=np.int64),
        np.array(starts, dtype=np.int64),
        np.array(ends, dtype=np.int64),
        columns[:, 0],
        columns[:, 1],
        columns[:, 2],
        np.concatenate(([0], columns[:, 3])).astype(np.int64),
    )


def _place(
    params: Sequence[LayoutParam], order: Sequence[int], rules: LayoutRules
) -> tuple[list[int], list[int], list[tuple[int, int, int, int]]]:
    """Starts and ends in place order, and (offset, numel, numel_unpadded, end place) of each bucket."""
    starts: list[int] = []
    ends: list[int] = []
    buckets: list[tuple[int, int, int, int]] = []
    bucket_start = position = 0

    def close(unpadded_end: int) -> int:
        end = _round_up(unpadded_end, rules.bucket_end_align)
        buckets.append((bucket_start, end - bucket_start, unpadded_end - bucket_start, len(starts)))
        return end

    def bucket_is_open() -> bool:
        return len(starts) > (buckets[-1][3] if buckets else 0)

    for index in order:
        param = params[index]
        position = _round_up(position, rules.param_align)
        if param.shared_embedding and bucket_is_open():
            # The bucket before a shared embedding ends where that would have started, not at its last param's end
            # (SPEC.md, "Own buckets"; corpus case v0161_toy_tied_shared_dp2_b1).
            bucket_start = position = close(position)
        starts.append(position)
        position += param.numel
        ends.append(position)
        full = rules.bucket_size is not None and position - bucket_start >= rules.bucket_size
        if full or param.shared_embedding:
            bucket_start = position = close(position)
    if bucket_is_open():
        close(position)
    return starts, ends, buckets


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

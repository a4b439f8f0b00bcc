"""Each bucket as a bar: which params lie where in it, and which rank owns which part. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..core.layout import BufferLayout
from .narrowing import Selection

__all__ = ["Bar", "Span", "bar_of", "bars_of"]

_KEYS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
PADDING, OTHER = -1, -2


@dataclass(frozen=True, slots=True)
class Span:
    """A param in its bucket, in elements of the bucket, and the ranks that own some of it."""

    name: str
    start: int
    end: int
    key: str
    first_rank: int
    last_rank: int

    @property
    def empty(self) -> bool:
        return self.start == self.end


@dataclass(frozen=True, slots=True)
class Bar:
    """One bucket. ``spans`` are the params asked for; ``others`` ranges of params that are not."""

    buffer: int
    bucket: int
    offset: int
    numel: int
    padding: int
    dp_size: int
    spans: tuple[Span, ...]
    others: tuple[tuple[int, int], ...]

    @property
    def name(self) -> str:
        return f"{self.buffer}.{self.bucket}"

    def cells(self, width: int) -> list[int]:
        """What the middle of each of ``width`` equal cells lies in: index of a span, ``PADDING`` or ``OTHER``."""
        pieces = [(span.start, span.end, i) for i, span in enumerate(self.spans) if not span.empty]
        pieces = sorted([*pieces, *((start, end, OTHER) for start, end in self.others)])
        if not pieces or not self.numel:
            return [PADDING] * width
        start, end, what = (np.array(column, np.int64) for column in zip(*pieces, strict=True))
        middle = (2 * np.arange(width, dtype=np.int64) + 1) * self.numel // (2 * width)
        at = np.searchsorted(start, middle, side="right") - 1
        inside = (at >= 0) & (middle < end[at])
        cells: list[int] = np.where(inside, what[at], PADDING).tolist()
        return cells

    def rank_at(self, cell: int, width: int) -> int:
        """Owner of the middle of a cell."""
        return (2 * cell + 1) * self.dp_size // (2 * width)

    def ruler_step(self, width: int) -> int:
        """Every how many ranks the ruler has room for a number."""
        room = len(str(self.dp_size - 1)) + 2
        step, factor = 1, (2, 5)
        while width * step < room * self.dp_size and step < self.dp_size:
            step = step * factor[0] if str(step)[0] != "2" else step // 2 * factor[1]
        return step


def bars_of(selection: Selection) -> Iterator[Bar]:
    """A bar for each bucket that is asked for."""
    for i, buffer in selection.buffers():
        for bucket in selection.buckets[i].tolist():
            yield bar_of(selection, i, buffer, bucket)


def bar_of(selection: Selection, index: int, buffer: BufferLayout, bucket: int) -> Bar:
    it = buffer.bucket(bucket)
    span = slice(it.first, it.last)
    start = buffer.start[span] - it.offset
    end = buffer.end[span] - it.offset
    keep = selection.mask[buffer.param[span]]
    shard = max(it.numel // buffer.rules.dp_size, 1)
    last = np.maximum(end - 1, start) // shard
    wanted = np.flatnonzero(keep).tolist()
    spans = tuple(
        Span(
            buffer.names[it.first + i],
            int(start[i]),
            int(end[i]),
            _KEYS[n % len(_KEYS)],
            min(int(start[i]) // shard, buffer.rules.dp_size - 1),
            min(int(last[i]), buffer.rules.dp_size - 1),
        )
        for n, i in enumerate(wanted)
    )
    others = tuple((int(start[i]), int(end[i])) for i in np.flatnonzero(~keep & (end > start)).tolist())
    return Bar(
        index, bucket, it.offset, it.numel, selection.padding(index, bucket), buffer.rules.dp_size, spans, others
    )

"""Half-open ranges and the unit-stride maps between them, from which every layout is built.

A layout is a chain of maps ``param -> buffer -> bucket -> rank shard -> file``. Each is a ``RangeMap``: a finite set
of links ``[src, src + size) -> [dst, dst + size)`` that is one-to-one. The laws (tests/core/test_ranges.py):

* ``m.inverse().inverse() == m``
* ``m.then(m.inverse())`` is the identity on ``m``'s domain
* ``(a.then(b)).then(c) == a.then(b.then(c))``
* ``m.restrict(r)`` maps exactly the elements of ``r`` that ``m`` maps, to the same places
* ``m.gaps(r)`` and the domain of ``m.restrict(r)`` tile ``r``
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import index

import numpy as np
import numpy.typing as npt

__all__ = ["IntColumn", "Link", "Range", "RangeMap"]

IntColumn = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """Half-open interval ``[start, end)`` of elements, ``0 <= start <= end``.

    Raises ``ValueError`` for bounds that are negative or out of order, ``TypeError`` for bounds that are no integers.
    """

    start: int
    end: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", index(self.start))
        object.__setattr__(self, "end", index(self.end))
        if not 0 <= self.start <= self.end:
            raise ValueError(f"Range({self.start}, {self.end}): expected 0 <= start <= end")

    @property
    def size(self) -> int:
        return self.end - self.start

    def __len__(self) -> int:
        return self.size

    def __bool__(self) -> bool:
        return self.size > 0

    def __contains__(self, position: int) -> bool:
        return self.start <= position < self.end

    def normalize(self, start: int = 0) -> Range:
        """The range of the same size that begins at ``start``."""
        return Range(start, start + self.size)

    def shift(self, by: int) -> Range:
        """The range moved by ``by`` elements."""
        return Range(self.start + by, self.end + by)

    def intersect(self, other: Range) -> Range:
        """The common part; an empty range inside ``self`` where there is none."""
        start = min(max(self.start, other.start), self.end)
        return Range(start, max(start, min(self.end, other.end)))


@dataclass(frozen=True, slots=True)
class Link:
    """``src`` lies at ``[dst, dst + src.size)``."""

    src: Range
    dst: int

    @property
    def target(self) -> Range:
        return self.src.normalize(self.dst)


class RangeMap:
    """One-to-one, unit-stride, piecewise map between element positions. Immutable; kept as int64 columns.

    Links are sorted by source, empty ones dropped, and adjacent ones that continue each other are joined, so two maps
    are equal exactly when they map the same elements to the same places.

    Raises ``ValueError`` when two links overlap in source or in target.
    """

    __slots__ = ("_dst", "_size", "_src")

    def __init__(self, links: Iterable[Link] = ()) -> None:
        rows = [(link.src.start, link.dst, link.src.size) for link in links]
        table = np.array(rows, dtype=np.int64).reshape(-1, 3)
        self._set(table[:, 0], table[:, 1], table[:, 2])

    @classmethod
    def from_columns(cls, src: npt.ArrayLike, dst: npt.ArrayLike, size: npt.ArrayLike) -> RangeMap:
        """The map with links ``[src[i], src[i] + size[i]) -> [dst[i], dst[i] + size[i])``."""
        made = cls.__new__(cls)
        made._set(np.asarray(src, np.int64), np.asarray(dst, np.int64), np.asarray(size, np.int64))
        return made

    @classmethod
    def identity(cls, domain: Range) -> RangeMap:
        return cls([Link(domain, domain.start)])

    def _set(self, src: IntColumn, dst: IntColumn, size: IntColumn) -> None:
        if (size < 0).any() or (src < 0).any() or (dst < 0).any():
            raise ValueError("RangeMap: sizes and positions must not be negative")
        keep = size > 0
        src, dst, size = src[keep], dst[keep], size[keep]
        _refuse_overlap(dst, size, "target")
        order = np.argsort(src, kind="stable")
        src, dst, size = src[order], dst[order], size[order]
        _refuse_overlap(src, size, "source")
        if len(src):
            joins = (src[1:] == src[:-1] + size[:-1]) & (dst[1:] == dst[:-1] + size[:-1])
            first = np.concatenate(([0], np.flatnonzero(~joins) + 1))
            size = np.add.reduceat(size, first)
            src, dst = src[first], dst[first]
        self._src, self._dst, self._size = src, dst, size

    @property
    def links(self) -> tuple[Link, ...]:
        return tuple(self)

    @property
    def size(self) -> int:
        """Number of elements that are mapped."""
        return int(self._size.sum())

    def __iter__(self) -> Iterator[Link]:
        for src, dst, size in zip(self._src.tolist(), self._dst.tolist(), self._size.tolist(), strict=True):
            yield Link(Range(src, src + size), dst)

    def __len__(self) -> int:
        return len(self._src)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RangeMap):
            return NotImplemented
        return (
            np.array_equal(self._src, other._src)
            and np.array_equal(self._dst, other._dst)
            and np.array_equal(self._size, other._size)
        )

    def __hash__(self) -> int:
        return hash((self._src.tobytes(), self._dst.tobytes(), self._size.tobytes()))

    def __repr__(self) -> str:
        inside = ", ".join(f"[{k.src.start}, {k.src.end}) -> {k.dst}" for k in self)
        return f"RangeMap({inside})"

    def inverse(self) -> RangeMap:
        """The map from targets back to sources."""
        return RangeMap.from_columns(self._dst, self._src, self._size)

    def then(self, after: RangeMap) -> RangeMap:
        """Composition: ``x`` goes to ``after(self(x))``, for every ``x`` where both are defined."""
        ends = after._src + after._size
        low = np.searchsorted(ends, self._dst, side="right")
        high = np.searchsorted(after._src, self._dst + self._size, side="left")
        count = np.maximum(high - low, 0)
        mine = np.repeat(np.arange(len(self._src)), count)
        theirs = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + np.repeat(low, count)
        start = np.maximum(self._dst[mine], after._src[theirs])
        end = np.minimum(self._dst[mine] + self._size[mine], ends[theirs])
        return RangeMap.from_columns(
            self._src[mine] + start - self._dst[mine], after._dst[theirs] + start - after._src[theirs], end - start
        )

    def restrict(self, domain: Range) -> RangeMap:
        """The part of the map whose sources lie in ``domain``."""
        start = np.maximum(self._src, domain.start)
        end = np.minimum(self._src + self._size, domain.end)
        keep = end > start
        start, end = start[keep], end[keep]
        return RangeMap.from_columns(start, self._dst[keep] + start - self._src[keep], end - start)

    def gaps(self, domain: Range) -> tuple[Range, ...]:
        """The maximal ranges of ``domain`` that the map does not map."""
        inside = self.restrict(domain)
        starts = np.concatenate((inside._src, [domain.end])).tolist()
        ends = np.concatenate(([domain.start], inside._src + inside._size)).tolist()
        return tuple(Range(end, start) for end, start in zip(ends, starts, strict=True) if start > end)


def _refuse_overlap(start: IntColumn, size: IntColumn, side: str) -> None:
    order = np.argsort(start, kind="stable")
    begins, ends = start[order], start[order] + size[order]
    clash = np.flatnonzero(begins[1:] < ends[:-1])
    if len(clash):
        at = int(clash[0])
        raise ValueError(f"RangeMap: {side} [{begins[at]}, {ends[at]}) overlaps [{begins[at + 1]}, {ends[at + 1]})")

"""Finds how a buffer was laid out when its state was cut out at the wrong places (see ``shifted_state``).

Let the *padded* place of a param be where it lies in the buffer, and its *compact* place where it lies once the padding
at the ends of buckets is taken out. A param's stored values are those at its padded place of the compact buffer. So
with the right order and buckets, every stored window must show the weights of the params that lie there, and zero
between them. The search lays params one after the other, in every order that module names admit, with every bucket end
that the layout rule admits for some dp size and bucket size, and gives up a branch at the first window that shows
anything else. It counts as one solution what maps every stored element to the same place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import gcd, inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.layout import BUCKET_ALIGN, HIGH_BUSBW_ALIGN, PARAM_ALIGN
from .module_order import Walk

__all__ = ["Placed", "Search", "Solution", "Unit", "locate_shift", "search"]

Bits = NDArray[Any]
Mask = NDArray[np.bool_]
_LEAST_OVERLAP = 32
_LEAST_DISTINCT = 8
_DP_SIZES = (*range(1, 65), *range(72, 513, 8))


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """A param as one buffer holds it. ``weight``: its weights' bits, flattened.

    ``stored``: the stored main param cast to the weights' dtype, as bits, and ``occupied``: where a stored value of any
    slot is not zero; None for a copy that the checkpoint does not store. ``shared``: it has a bucket of its own.
    """

    name: str
    weight: Bits
    stored: Bits | None = None
    occupied: Mask | None = None
    shared: bool = False

    @property
    def numel(self) -> int:
        return len(self.weight)

    @property
    def right(self) -> bool:
        """Whether what is stored is the param itself."""
        return self.stored is None or np.array_equal(self.stored, self.weight)


@dataclass(frozen=True, slots=True)
class Placed:
    """Unit ``unit`` begins at ``padded`` in the buffer, and at ``compact`` without the ends of buckets."""

    unit: int
    padded: int
    compact: int

    @property
    def shift(self) -> int:
        return self.padded - self.compact


@dataclass(frozen=True, slots=True)
class Solution:
    """Units in place order. ``align``: a multiple of the saving job's bucket alignment; 0 where no bucket ends."""

    placed: tuple[Placed, ...]
    align: int

    @property
    def damaged(self) -> bool:
        return any(place.shift for place in self.placed)


@dataclass
class Search:
    """What was found. ``complete``: whether everything was tried."""

    solutions: list[Solution] = field(default_factory=list)
    complete: bool = True


@dataclass(frozen=True, slots=True)
class _State:
    """Params laid so far. Bucket and buffer places are padded; ``compact`` is that of the bucket's first element."""

    walk: Walk
    chain: tuple[object, ...] | None = None
    placed: int = 0
    last: int = -1
    bucket: int = 0
    end: int = 0
    compact: int = 0
    align: int = 0
    most_tail: int = -1
    windows: tuple[tuple[int, int], ...] = ()

    @property
    def size(self) -> int:
        return self.end - self.bucket

    @property
    def shift(self) -> int:
        return self.bucket - self.compact

    @property
    def compact_end(self) -> int:
        return self.compact + self.size

    @property
    def key(self) -> object:
        """What decides how it goes on."""
        windows = tuple((i, at - self.compact_end) for i, at in self.windows)
        return self.walk.key, self.placed, self.last, self.size, self.shift, self.align, self.most_tail, windows


def search(
    units: Sequence[Unit],
    walk: Walk,
    *,
    size_closes: bool,
    most_states: int = 100_000,
    most_solutions: int = 64,
) -> Search:
    """All layouts of one buffer under which every stored element is what it should be. Pure.

    ``size_closes``: whether buckets end at a size too, and not only at params with a bucket of their own.
    """
    layer = _Layer(units, size_closes)
    found = Search()
    stack: list[_State | _Left] = [_State(walk)]
    futile: set[object] = set()
    known: set[tuple[tuple[int, int], ...]] = set()
    states = 0
    while stack:
        state = stack.pop()
        if isinstance(state, _Left):
            if state.solutions == len(found.solutions):
                futile.add(state.key)
            continue
        key = state.key
        if key in futile:
            continue
        states += 1
        if states > most_states or len(found.solutions) >= most_solutions:
            found.complete = False
            break
        if state.placed == layer.all:
            _finish(layer, state, found, known)
            continue
        if state.shift == 0:  # what went before is in its place in whatever order: once is enough
            futile.add(key)
        else:
            stack.append(_Left(key, len(found.solutions)))
        stack.extend(reversed([*layer.next(state)]))
    return found


@dataclass(frozen=True, slots=True)
class _Left:
    """Marks on the stack that all below a state was tried, and how many solutions there were before."""

    key: object
    solutions: int


def _finish(layer: _Layer, state: _State, found: Search, known: set[tuple[tuple[int, int], ...]]) -> None:
    if not layer.rest_is_zero(state):
        return
    chain: list[Placed] = []
    link = state.chain
    while link is not None:
        place, link = link  # type: ignore[assignment]
        chain.append(place)  # type: ignore[arg-type]
    placed = tuple(reversed(chain))
    if not any(place.shift for place in placed):
        signature: tuple[tuple[int, int], ...] = ()
    else:
        first = next(i for i, place in enumerate(placed) if place.shift)
        signature = tuple((place.unit, place.shift) for place in placed[max(first - 1, 0) :])
    if signature not in known:
        known.add(signature)
        if _by_rule(layer.units, placed, layer.size_closes):
            found.solutions.append(Solution(placed, state.align))


@dataclass(frozen=True, slots=True)
class _Rule:
    """A bucket while its params are counted, and what is known of the size that closes one: (more than, at most]."""

    place: int
    bucket: int
    align: int
    most_tail: int
    more_than: int = -1
    at_most: float = inf


def _by_rule(units: Sequence[Unit], placed: Sequence[Placed], size_closes: bool) -> bool:
    """Whether some dp size and bucket size give this layout, by the rule for buckets. Pure.

    Ends of buckets that need no padding do not show: both ways are tried.
    """
    if not size_closes:
        return True  # every end is one of a param with a bucket of its own
    stack = [_Rule(0, 0, 0, -1)]
    tried = 0
    while stack:
        state = stack.pop()
        tried += 1
        here = placed[state.place]
        if state.place + 1 == len(placed) or tried > _MOST_RULES:
            return True
        then = placed[state.place + 1]
        size = here.padded + units[here.unit].numel - state.bucket
        forced = units[here.unit].shared or units[then.unit].shared
        if then.shift == here.shift and not forced:
            stack.append(replace(state, place=state.place + 1, more_than=max(state.more_than, size)))
        tail = then.padded - then.compact - here.padded + here.compact
        align, most = gcd(state.align, then.padded), max(state.most_tail, tail)
        at_most = state.at_most if forced else min(state.at_most, size)
        if align % BUCKET_ALIGN == 0 and align > most:
            stack.append(_Rule(state.place + 1, then.padded, align, most, state.more_than, at_most))
        stack = [row for row in stack if row.more_than < row.at_most]
    return False


_MOST_RULES = 20_000


class _Layer:
    """Lays one param more, in every way that the rule and the stored values admit."""

    def __init__(self, units: Sequence[Unit], size_closes: bool) -> None:
        self.units = units
        self.size_closes = size_closes
        self.all = (1 << len(units)) - 1
        self.shifts: dict[int, int] = {}
        for i, unit in enumerate(units):
            shift = locate_shift(unit)
            if shift is not None:
                self.shifts[shift] = self.shifts.get(shift, 0) | 1 << i

    def next(self, state: _State) -> Iterator[_State]:
        for unit, walk in state.walk.next():
            for opened in self._ends(state, unit):
                laid = self._lay(opened, unit, walk)
                if laid is not None:
                    yield laid

    def rest_is_zero(self, state: _State) -> bool:
        return all(
            not _occupied(self.units[i])[max(state.compact_end - start, 0) :].any() for i, start in state.windows
        )

    def _ends(self, state: _State, unit: int) -> Iterator[_State]:
        """The state as it is when the next param is laid: with the bucket left open, or closed."""
        shared = self.units[unit].shared
        if state.last < 0:
            yield state
            return
        after_shared = self.units[state.last].shared
        if shared or after_shared:
            unpadded = _up(state.size, PARAM_ALIGN) if shared and not after_shared else state.size
            yield from self._closed(state, unpadded, hidden=True)
        else:
            yield state
        if self.size_closes and not after_shared:
            yield from self._closed(state, state.size, hidden=shared)

    def _closed(self, state: _State, unpadded: int, *, hidden: bool) -> Iterator[_State]:
        """``hidden``: also an end without padding, which otherwise is as if the bucket went on."""
        for tail in self._tails(state, unpadded):
            end = state.bucket + unpadded + tail
            align, most = gcd(state.align, end), max(state.most_tail, tail)
            if align > most and (tail or hidden):
                yield replace(state, bucket=end, end=end, compact=state.compact + unpadded, align=align, most_tail=most)

    def _tails(self, state: _State, unpadded: int) -> list[int]:
        """Padding that may follow a bucket: what makes shifts that were located, or follows from a dp size."""
        limit = min((s for s, mask in self.shifts.items() if mask & ~state.placed), default=None)
        least = -(state.bucket + unpadded) % BUCKET_ALIGN
        tails = {s - state.shift for s in self.shifts} if limit is not None else set()
        tails |= {-(state.bucket + unpadded) % align for align in _alignments(state.align)}
        return sorted(
            tail
            for tail in tails
            if tail >= 0 and tail % BUCKET_ALIGN == least and (limit is None or state.shift + tail <= limit)
        )

    def _lay(self, state: _State, index: int, walk: Walk) -> _State | None:
        unit = self.units[index]
        start = state.bucket + _up(state.size, PARAM_ALIGN)
        compact = state.compact + start - state.bucket
        windows = state.windows if unit.stored is None else (*state.windows, (index, start))
        for i, at in windows:
            if not self._shows(i, at, state.compact_end, compact, unit.weight):
                return None
        end = compact + unit.numel
        open_windows = tuple((i, at) for i, at in windows if at + self.units[i].numel > end)
        chain = (Placed(index, start, compact), state.chain)
        placed = state.placed | 1 << index
        if any(mask >> index & 1 and shift != state.shift for shift, mask in self.shifts.items()):
            return None
        return replace(
            state, walk=walk, chain=chain, placed=placed, last=index, end=start + unit.numel, windows=open_windows
        )

    def _shows(self, index: int, at: int, gap: int, compact: int, weight: Bits) -> bool:
        """Whether a window shows nothing from ``gap`` to ``compact`` and the weights from there on."""
        unit = self.units[index]
        end = at + unit.numel
        if max(at, gap) < min(end, compact) and _occupied(unit)[max(at, gap) - at : compact - at].any():
            return False
        low, high = max(at, compact), min(end, compact + len(weight))
        if low >= high:
            return True
        assert unit.stored is not None
        mine, theirs = unit.stored[low - at : high - at], weight[low - compact : high - compact]
        return bool((mine[:64] == theirs[:64]).all()) and bool((mine == theirs).all())


def _alignments(known: int) -> list[int]:
    """Alignments of bucket ends that some dp size gives: all multiples of 128, of those that divide what is known."""
    ours = {BUCKET_ALIGN * n for n in _DP_SIZES} | {HIGH_BUSBW_ALIGN * n for n in _DP_SIZES[:16]}
    if known == 0:
        return sorted(ours)
    return sorted({align for align in (*ours, known) if known % align == 0})


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _occupied(unit: Unit) -> Mask:
    assert unit.occupied is not None
    return unit.occupied


def locate_shift(unit: Unit) -> int | None:
    """By how many elements a param's stored values begin too far on, where its own content tells, else None. Pure."""
    if unit.stored is None or unit.numel < 2 * _LEAST_OVERLAP:
        return None
    head = unit.stored[:_LEAST_OVERLAP]
    if len(np.unique(head)) < _LEAST_DISTINCT:
        return None
    found = [
        shift
        for shift in np.flatnonzero(unit.weight[: unit.numel - _LEAST_OVERLAP + 1] == head[0]).tolist()
        if np.array_equal(unit.weight[shift : shift + _LEAST_OVERLAP], head)
    ]
    whole = [shift for shift in found if np.array_equal(unit.weight[shift:], unit.stored[: unit.numel - shift])]
    return int(whole[0]) if len(whole) == 1 else None

"""Cuts a bucket into params: each begins at a multiple of 64 and is as long as some unit of the model.

The chunks that Megatron writes end where a param, a gap or a rank's shard ends, so that a param's end is one of their
edges. Of all ways to tile a bucket those are kept in which the fewest params differ from every weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ...core.layout import PARAM_ALIGN

__all__ = ["MOST_TILINGS", "Stretch", "tilings"]

MOST_TILINGS = 16
"""Tilings that are kept of one bucket."""
_LOST = 10**9


@dataclass(frozen=True, slots=True)
class Stretch:
    """One param of a bucket: elements [start, start + numel) of it. ``units``: what it may be; ``matched``: whether
    that is by content, else by size alone.
    """

    start: int
    numel: int
    units: tuple[int, ...]
    matched: bool


Find = Callable[[int, int], tuple[int, ...]]
"""(start, numel) -> units that are there."""


def round_up(position: int) -> int:
    return -(-position // PARAM_ALIGN) * PARAM_ALIGN


@dataclass
class _Walk:
    unpadded: int
    edges: frozenset[int] | None
    sizes: Sequence[int]
    by_content: Find
    by_size: Find | None

    def __post_init__(self) -> None:
        self.cost: dict[int, int] = {}

    def steps(self, start: int) -> Iterator[tuple[int, Stretch]]:
        """Params that can begin here, with the place where the next one would."""
        for numel in self.sizes:
            end = start + numel
            if end > self.unpadded or (self.edges is not None and end not in self.edges):
                continue
            follows = round_up(end)
            if end != self.unpadded and not self.may_begin(follows):
                continue
            found = self.by_content(start, numel)
            if found:
                yield follows, Stretch(start, numel, found, True)
            elif self.by_size is not None and (likely := self.by_size(start, numel)):
                yield follows, Stretch(start, numel, likely, False)

    def may_begin(self, at: int) -> bool:
        return self.edges is None or at >= self.unpadded or at in self.edges

    def best(self) -> None:
        """Fills ``cost``: the fewest unmatched params from each place to the end. Without recursion: buckets of
        whole models have thousands of params.
        """
        reached: dict[int, list[tuple[int, Stretch]]] = {}
        todo = [0]
        while todo:
            at = todo.pop()
            if at in reached or at >= self.unpadded:
                continue
            reached[at] = list(self.steps(at))
            todo += [follows for follows, _ in reached[at]]
        self.reached = reached
        for at in sorted(reached, reverse=True):
            costs = [self.after(follows) + (not stretch.matched) for follows, stretch in reached[at]]
            self.cost[at] = min(costs, default=_LOST)

    def after(self, at: int) -> int:
        return 0 if at >= self.unpadded else self.cost.get(at, _LOST)

    def all_best(self) -> Iterator[tuple[Stretch, ...]]:
        stack: list[tuple[int, tuple[Stretch, ...]]] = [(0, ())]
        while stack:
            at, before = stack.pop()
            if at >= self.unpadded:
                yield before
                continue
            for follows, stretch in self.reached[at]:
                if self.after(follows) + (not stretch.matched) == self.cost[at]:
                    stack.append((follows, (*before, stretch)))


def tilings(
    unpadded: int, edges: Sequence[int], sizes: Sequence[int], by_content: Find, by_size: Find
) -> list[tuple[Stretch, ...]]:
    """The best tilings of one bucket, in place order; none where no sizes fit. ``edges``: of its chunks."""
    inner = frozenset(edges)
    if any(0 < edge < unpadded for edge in inner):
        found = _tilings(_Walk(unpadded, inner | {unpadded}, sizes, by_content, by_size))
        if found and all(stretch.matched for stretch in found[0]):
            return found
        return _tilings(_Walk(unpadded, None, sizes, by_content, None)) or found
    return _tilings(_Walk(unpadded, None, sizes, by_content, None))


def _tilings(walk: _Walk) -> list[tuple[Stretch, ...]]:
    if walk.unpadded == 0:
        return [()]
    walk.best()
    if walk.cost.get(0, _LOST) >= _LOST:
        return []
    found = []
    for tiling in walk.all_best():
        found.append(tiling)
        if len(found) >= MOST_TILINGS:
            break
    return found

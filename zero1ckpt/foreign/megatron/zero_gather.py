"""Where params lie in state that data-parallel rank 0 gathered: one tensor a buffer, without the tails of its buckets.

Inside a bucket each param begins at a multiple of 64 from the bucket's start, and the gaps are kept; between buckets
nothing is left, so the next bucket begins where the last param ended, or, before a shared embedding, where that would
have begun. After a param that does not end at a multiple of 64 the next one therefore begins in one of two places, and
no file says in which. Both are tried, and kept is what agrees with the content of all params and with the total.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ...core.errors import UnsupportedError
from ...core.layout import PARAM_ALIGN
from .common import Common
from .entries import Entries
from .model import MegatronCheckpoint
from .model_space import model_keys

__all__ = ["Item", "Walk", "read_zero_gather", "walk_in_order"]

Matches = Callable[[int, int], bool]
"""(item, start) -> whether the item can be there."""
Empty = Callable[[int, int], bool]
"""(start, end) -> whether the elements between can be a gap."""

_MAX_STATES = 1 << 14


@dataclass(frozen=True, slots=True)
class Item:
    """A param in place order. ``optional``: it may be no param of the buffer at all. ``world``: its start in the
    padded buffer, where a file shows it.
    """

    numel: int
    optional: bool = False
    world: int | None = None


@dataclass(frozen=True, slots=True)
class Walk:
    """``starts``: of each item, None where it is not in the buffer. ``others``: further starts of each item in maps
    that agree as well. ``fresh``: items that begin a bucket, as far as their starts show it.
    """

    starts: tuple[int | None, ...]
    others: tuple[frozenset[int | None], ...]
    fresh: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class _State:
    """After an item: where the last one ended, and the bucket's start modulo the alignment. ``world_end``: the end of
    the last one in the padded buffer. ``bucket``: of the stated ones.
    """

    end: int
    base: int
    world_end: int | None = None
    bucket: int = 0


@dataclass
class _Node:
    """The cheapest way to a state (params left out, then buckets begun), and every step that leads to it."""

    cost: tuple[int, int]
    came: list[tuple[_State, int | None, bool, tuple[int, int]]] = field(default_factory=list)


def walk_in_order(
    items: Sequence[Item],
    total: int,
    matches: Matches,
    *,
    bounds: Sequence[int] | None = None,
    align: int = PARAM_ALIGN,
    empty: Empty = lambda start, end: True,
) -> Walk | None:
    """Where items that follow each other lie in ``total`` elements; None where no map agrees.

    ``bounds``: where buckets begin and end, if the file has them apart; their ends may be padding. ``empty``: asked of
    gaps. Of the maps that agree, those count that leave out the fewest items. Raises ``UnsupportedError`` where they
    are too many to tell.
    """
    steps = _Steps(total, tuple(bounds) if bounds else None, align)
    layers: list[dict[_State, _Node]] = [{_State(0, 0, 0): _Node((0, 0))}]
    for index, item in enumerate(items):
        layers.append(_advance(steps, layers[-1], index, item, matches, empty))
        if len(layers[-1]) > _MAX_STATES:
            raise UnsupportedError("there are too many ways to place the params of a buffer", found=len(layers[-1]))
    ends = {state: node for state, node in layers[-1].items() if steps.is_end(state)}
    return _collect(layers, ends) if ends else None


@dataclass(frozen=True, slots=True)
class _Steps:
    total: int
    bounds: tuple[int, ...] | None
    align: int

    def starts(self, state: _State, item: Item, first: bool) -> list[tuple[int, int, int, bool]]:
        """Where the next item may begin: start, base, bucket, and whether it visibly begins a bucket."""
        if first and self.bounds is None:
            return [(0, 0, 0, True)]
        near = state.end + (state.base - state.end) % self.align
        if self.bounds is not None:
            return self._stated(state, near, first)
        if near == state.end:
            return [(near, state.base, 0, False)]
        found = [(near, state.base, 0, False), (state.end, state.end % self.align, 0, True)]
        gap = self._world_gap(state, item)
        if gap is None:
            return found
        # The padded buffer shows a tail between the two: a bucket ended, at the param or at the next multiple of 64.
        return found if gap >= 0 else []

    def _world_gap(self, state: _State, item: Item) -> int | None:
        """Elements between the place behind the last item, rounded up, and the next in the padded buffer."""
        if item.world is None or state.world_end is None:
            return None
        return item.world - (state.world_end + -state.world_end % self.align)

    def _stated(self, state: _State, near: int, first: bool) -> list[tuple[int, int, int, bool]]:
        assert self.bounds is not None
        found = [(0, 0, 0, True)] if first else [(near, state.base, state.bucket, False)]
        for bucket in range(state.bucket + 1, len(self.bounds) - 1):
            found.append((self.bounds[bucket], self.bounds[bucket] % self.align, bucket, True))
            if self.bounds[bucket + 1] > self.bounds[bucket]:
                break
        return found

    def limit(self, bucket: int) -> int:
        return self.total if self.bounds is None else self.bounds[bucket + 1]

    def is_end(self, state: _State) -> bool:
        if self.bounds is None:
            return state.end == self.total
        return all(a == b for a, b in pairwise(self.bounds[state.bucket + 1 :]))


def _advance(
    steps: _Steps, layer: dict[_State, _Node], index: int, item: Item, matches: Matches, empty: Empty
) -> dict[_State, _Node]:
    after: dict[_State, _Node] = {}
    for state, node in layer.items():
        first = state.end == 0 and state.bucket == 0
        for start, base, bucket, fresh in steps.starts(state, item, first):
            end = start + item.numel
            if end > steps.limit(bucket) or not matches(index, start):
                continue
            if start > state.end and not empty(state.end, start):
                continue
            world_end = None if item.world is None else item.world + item.numel
            reached = _State(end, base, world_end, bucket)
            _arrive(after, reached, (node.cost[0], node.cost[1] + fresh), (state, start, fresh))
        if item.optional:
            _arrive(after, state, (node.cost[0] + 1, node.cost[1]), (state, None, False))
    return after


def _arrive(
    after: dict[_State, _Node], state: _State, cost: tuple[int, int], step: tuple[_State, int | None, bool]
) -> None:
    node = after.setdefault(state, _Node(cost))
    node.cost = min(node.cost, cost)
    node.came.append((*step, cost))


def _collect(layers: Sequence[dict[_State, _Node]], ends: dict[_State, _Node]) -> Walk:
    """Follows the steps back from all ends with the fewest items left out."""
    fewest = min(node.cost[0] for node in ends.values())
    chosen = min((s for s, n in ends.items() if n.cost[0] == fewest), key=lambda s: ends[s].cost)
    alive = {state for state, node in ends.items() if node.cost[0] == fewest}
    starts: list[int | None] = []
    fresh: list[bool] = []
    others: list[frozenset[int | None]] = []
    for layer in reversed(layers[1:]):
        seen: set[int | None] = set()
        before: set[_State] = set()
        for state in alive:
            node = layer[state]
            for came, start, _, cost in node.came:
                if cost[0] == node.cost[0]:
                    seen.add(start)
                    before.add(came)
        node = layer[chosen]
        chosen, start, began, _ = next(step for step in node.came if step[3] == node.cost)
        starts.append(start)
        fresh.append(began)
        others.append(frozenset(seen - {start}))
        alive = before
    return Walk(tuple(starts[::-1]), tuple(others[::-1]), tuple(fresh[::-1]))


def read_zero_gather(entries: Entries, common: Common) -> MegatronCheckpoint:
    """A ``dp_zero_gather_scatter`` checkpoint: what ``gathered.read_gathered`` makes of it."""
    from .gathered import read_gathered
    from .reading import part_options

    keys = model_keys(entries)
    return read_gathered(entries, common, lambda raw: part_options(entries, common, raw, keys))

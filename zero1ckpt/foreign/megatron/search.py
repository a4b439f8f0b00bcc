"""Which param each stretch of a buffer is, where content alone leaves a choice.

Biases that are still zero and LayerNorm weights that are still one look alike. What tells them apart is the order: a
buffer holds params in reverse registration order, and registration walks the tree of modules depth first. So in a
buffer

* the params of a module stand next to each other, whatever its depth (of a LayerNorm that Megatron-Core stores under
  the linear layer behind it, ``linear_qkv.layer_norm_weight``, this holds within ``self_attention``: with local modules
  it is a module of its own just before);
* numbered modules come in ascending order, and a module's weight before its bias;
* layers that have the same params have them in the same order;
* all that tensor parallelism has cut is the same rank's, and experts and layers are those of the params that content
  does identify.

A map is admissible if it keeps to these rules. Two that do make the params in which they differ ambiguous.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from .walk import Stretch
from .weights import Unit

__all__ = ["MAX_NODES", "Assignment", "UnitTable", "assign", "module_path"]

_MOST = 8
"""Maps that are told apart."""
MAX_NODES = 200_000
"""Steps of the search after which it gives up, and what is not sure is ambiguous."""
_NORM = re.compile(r"layer_norm_(weight|bias)$")
_FIRST_IN_MODULE = {"weight": 0, "bias": 1}
_PAIRS = {"q_layernorm": 0, "k_layernorm": 1, "q_norm": 0, "k_norm": 1}


@dataclass(frozen=True, slots=True)
class Assignment:
    """Unit of each stretch, in the order that was given; None where nothing fits. ``ambiguous``: indices of stretches
    that another admissible map makes another unit; ``complete``: whether the search came to its end.
    """

    units: tuple[int | None, ...]
    ambiguous: frozenset[int]
    complete: bool


def module_path(unit: Unit, *, experts_inside: bool = False) -> tuple[str, ...]:
    """The place of a unit in the tree of modules. ``experts_inside``: the linear layers of experts hold a weight for
    each, rather than each expert its linear layers.
    """
    path = unit.name.split(".")
    if _NORM.search(path[-1]) and len(path) > 1:
        path = [*path[:-2], f"{path[-2]}#norm", path[-1].removeprefix("layer_norm_")]
    if unit.index is not None:
        at = len(path) - 1 if experts_inside else len(path) - 2
        path.insert(max(at, 0), str(unit.index))
    return tuple(path)


class UnitTable(tuple[Unit, ...]):
    """Units, with what the search asks of all of them at once."""

    @cached_property
    def cuts(self) -> dict[int, tuple[int, int]]:
        """(rank, ranks) of units that are one of several equal cuts of a param."""
        groups: dict[tuple[str, int | None, int], set[tuple[tuple[int, ...], int]]] = {}
        for index, unit in enumerate(self):
            groups.setdefault((unit.name, unit.index, unit.numel), set()).add((unit.boxes[0].box.start, index))
        found = {}
        for members in groups.values():
            ordered = sorted(members)
            if len(ordered) > 1:
                found.update({index: (rank, len(ordered)) for rank, (_, index) in enumerate(ordered)})
        return found

    @cached_property
    def numbers(self) -> list[tuple[tuple[tuple[str, ...], str], ...]]:
        """For each unit the numbered modules on the way to it."""
        return [tuple(_numbers(unit.name)) for unit in self]

    @cached_property
    def _paths(self) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
        outside = [module_path(unit) for unit in self]
        return outside, [module_path(unit, experts_inside=True) for unit in self]

    def paths(self, experts_inside: bool) -> list[tuple[str, ...]]:
        return self._paths[experts_inside]

    @cached_property
    def _kinds(self) -> tuple[Kinds, Kinds]:
        return _kinds(self.paths(False)), _kinds(self.paths(True))

    def kinds(self, experts_inside: bool) -> Kinds:
        """For each numbered module the params that the model has in it: modules of one kind are built alike."""
        return self._kinds[experts_inside]


Kinds = Mapping[tuple[str, ...], frozenset[tuple[str, ...]]]


def _kinds(paths: Iterable[tuple[str, ...]]) -> Kinds:
    members: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for path in paths:
        for i, part in enumerate(path):
            if part.isdecimal():
                members.setdefault(path[: i + 1], set()).add(path[i + 1 :])
    return {prefix: frozenset(own) for prefix, own in members.items()}


def assign(
    stretches: Sequence[Stretch], units: Sequence[Unit], *, max_nodes: int = MAX_NODES, all_numbers: bool = False
) -> Assignment:
    """Units for the stretches of one buffer, given in registration order. Pure.

    ``all_numbers``: none of the candidates' numbered modules is left out; for candidates that are known to be of this
    buffer.
    """
    units = units if isinstance(units, UnitTable) else UnitTable(units)
    options = _narrowed(stretches, units)
    lost = [i for i, row in enumerate(options) if not row]
    rest = [i for i in range(len(options)) if options[i]]
    found: list[tuple[int, ...]] = []
    complete = True
    for strict in (True, False):
        for inside in (False, True):
            search = _Search([options[i] for i in rest], units, inside, strict, all_numbers)
            found += [one for one in search.run(max_nodes) if one not in found]
            complete = complete and not search.stopped
        if found:
            break
    if not found:
        return _unordered(options)
    chosen: list[int | None] = [None] * len(stretches)
    for i, unit in zip(rest, found[0], strict=True):
        chosen[i] = unit
    differ = {rest[k] for k in range(len(rest)) if len({one[k] for one in found}) > 1}
    if not complete:  # maps that were not looked at may differ anywhere
        differ = {i for i in rest if len(options[i]) > 1}
    assert all(chosen[i] is None for i in lost)
    return Assignment(tuple(chosen), frozenset(differ), complete)


def _unordered(options: Sequence[frozenset[int]]) -> Assignment:
    """Without an admissible map: what content leaves no choice for, once each."""
    taken: set[int] = set()
    chosen: list[int | None] = []
    for row in options:
        free = row - taken
        one = next(iter(free)) if len(row) == 1 and free else None
        taken |= {one} if one is not None else set()
        chosen.append(one)
    return Assignment(tuple(chosen), frozenset(i for i, row in enumerate(options) if len(row) > 1), False)


# ---------------------------------------------------------------------------------------------- what anchors leave open


def _narrowed(stretches: Sequence[Stretch], units: UnitTable) -> list[frozenset[int]]:
    """Candidates less what params that content identifies rule out: used units, other ranks' cuts, other experts,
    other layers.
    """
    options = [frozenset(stretch.units) for stretch in stretches]
    for _ in range(len(options) + 1):
        anchors = {next(iter(row)) for s, row in zip(stretches, options, strict=True) if len(row) == 1 and s.matched}
        rules = _Rules(anchors, units)
        narrowed = [row if len(row) == 1 else frozenset(u for u in row if rules.allow(u)) or row for row in options]
        if narrowed == options:
            return options
        options = narrowed
    return options


class _Rules:
    """What the anchors say of the part: which rank of each cut, which experts, which numbered modules."""

    def __init__(self, anchors: set[int], units: UnitTable) -> None:
        self.anchors, self.units, self.cuts = anchors, units, units.cuts
        self.ranks: dict[int, set[int]] = {}
        self.experts: set[int] = set()
        self.numbers: dict[tuple[str, ...], set[str]] = {}
        for anchor in anchors:
            unit = units[anchor]
            if anchor in self.cuts:
                rank, count = self.cuts[anchor]
                self.ranks.setdefault(count, set()).add(rank)
            if unit.index is not None:
                self.experts.add(unit.index)
            for parent, number in units.numbers[anchor]:
                self.numbers.setdefault(parent, set()).add(number)

    def allow(self, index: int) -> bool:
        unit = self.units[index]
        if index in self.anchors:
            return False
        if index in self.cuts:
            rank, count = self.cuts[index]
            seen = self.ranks.get(count, set())
            if len(seen) == 1 and rank not in seen:
                return False
        if unit.index is not None and self.experts and unit.index not in self.experts:
            return False
        return all(number in self.numbers.get(parent, {number}) for parent, number in self.units.numbers[index])


def _numbers(name: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Numbered modules on the way to a param: the module that holds them, and the number."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            yield tuple(parts[:i]), part


# --------------------------------------------------------------------------------------------------------------- search


@dataclass
class _Search:
    """Depth-first over stretches, in registration order, along the tree of modules."""

    options: Sequence[frozenset[int]]
    units: UnitTable
    experts_inside: bool
    same_layers: bool
    all_numbers: bool = False
    stopped: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        candidates = {unit for row in self.options for unit in row}
        paths = self.units.paths(self.experts_inside)
        self.path = {u: paths[u] for u in candidates}
        self.ordered = [sorted(row, key=lambda u: (self.path[u], u)) for row in self.options]
        self.kinds = self.units.kinds(self.experts_inside)
        numbers: dict[Path, set[int]] = {}
        for path in self.path.values():
            for k, part in enumerate(path[:-1]):
                if part.isdecimal():
                    numbers.setdefault(path[:k], set()).add(int(part))
        self.rank = {(parent, n): i for parent, own in numbers.items() for i, n in enumerate(sorted(own))}

    def run(self, max_nodes: int) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        nodes = 0
        chosen: list[int] = []
        states = [_State()]
        iterators = [iter(self.ordered[0])] if self.ordered else []
        if not iterators:
            return [()]
        while iterators:
            nodes += 1
            if nodes > max_nodes or len(found) >= _MOST:
                self.stopped = True
                break
            unit = next(iterators[-1], None)
            if unit is None:
                iterators.pop()
                states.pop()
                if chosen:
                    chosen.pop()
                continue
            if unit in chosen:
                continue
            state = states[-1].then(self.path[unit], self)
            if state is None:
                continue
            if len(chosen) + 1 == len(self.ordered):
                if state.closed_all(self):
                    found.append((*chosen, unit))
                continue
            chosen.append(unit)
            states.append(state)
            iterators.append(iter(self.ordered[len(chosen)]))
        return found


Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _State:
    """After some params: the path of the last one, modules that are done, and the order in numbered ones by kind."""

    path: Path = ()
    done: frozenset[Path] = frozenset()
    open_: tuple[tuple[Path, tuple[Path, ...]], ...] = ()
    templates: tuple[tuple[object, tuple[Path, ...]], ...] = ()

    def then(self, path: Path, search: _Search) -> _State | None:
        """With one more param; None where that is against a rule."""
        common = 0
        while common < min(len(path), len(self.path)) - 1 and path[common] == self.path[common]:
            common += 1
        modules = [path[:k] for k in range(common + 1, len(path))]
        if any(module in self.done for module in modules) or path in self.done:
            return None
        if self.path and not _in_order(self.path, path, common):
            return None
        closing = [self.path[:k] for k in range(common + 1, len(self.path))]
        if self.same_parent_later(path) or (search.all_numbers and self.skips(path, search)):
            return None
        templates = self._templates(closing, search)
        if templates is None:
            return None
        kept = tuple((p, rows) for p, rows in self.open_ if p not in closing)
        opened = tuple((m, ()) for m in modules if m[-1].isdecimal())
        grown = tuple((p, (*rows, path[len(p) :])) for p, rows in (*kept, *opened))
        return _State(path, self.done | set(closing) | {path}, grown, templates)

    def same_parent_later(self, path: Path) -> bool:
        """Whether a numbered module would come after one with a higher number."""
        for k, part in enumerate(path[:-1]):
            if part.isdecimal() and k < len(self.path) - 1 and self.path[:k] == path[:k]:
                last = self.path[k]
                if last.isdecimal() and int(last) > int(part):
                    return True
        return False

    def skips(self, path: Path, search: _Search) -> bool:
        """Whether a numbered module would come before the one that is next."""
        for k, part in enumerate(path[:-1]):
            if part.isdecimal():
                inside = k < len(self.path) - 1 and self.path[:k] == path[:k] and self.path[k].isdecimal()
                last = search.rank[path[:k], int(self.path[k])] if inside else -1
                if search.rank[path[:k], int(part)] > last + 1:
                    return True
        return False

    def _templates(
        self, closing: Sequence[Path], search: _Search
    ) -> tuple[tuple[object, tuple[Path, ...]], ...] | None:
        if not search.same_layers:
            return ()
        known = dict(self.templates)
        for prefix, rows in self.open_:
            if prefix in closing:
                kind = (prefix[:-1], search.kinds.get(prefix))
                if known.setdefault(kind, rows) != rows:
                    return None
        return tuple(known.items())

    def closed_all(self, search: _Search) -> bool:
        """Whether the modules that are still open at the end are built as others of their kind."""
        return self._templates([prefix for prefix, _ in self.open_], search) is not None


def _in_order(before: Path, path: Path, common: int) -> bool:
    """Rules between neighbours: in one module weight before bias, and queries before keys."""
    if before[:-1] == path[:-1]:
        a, b = (_FIRST_IN_MODULE.get(p[-1], -1) for p in (before, path))
        return not (a == 1 and b == 0)
    if common < len(before) and common < len(path):
        first, second = (_PAIRS.get(p[common]) for p in (before, path))
        return not (first == 1 and second == 0)
    return True

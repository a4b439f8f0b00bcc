"""Which param each stretch of a buffer is, where content alone leaves a choice.

Biases that are still zero and LayerNorm weights that are still one look alike. What tells them apart is the order: a
buffer holds params in reverse registration order, and registration walks the tree of modules depth first. So in a
buffer

* the params of a module stand next to each other, whatever its depth (of a LayerNorm that Megatron-Core stores under
  the linear layer behind it, ``linear_qkv.layer_norm_weight``, this holds within ``self_attention``: with local modules
  it is a module of its own just before);
* that LayerNorm is then the first of ``self_attention``, or else, where Transformer Engine fuses the two, right before
  its linear layer's own params;
* numbered modules come in ascending order, a module's weight before its bias, and ``final_layernorm`` behind all that
  its parent holds;
* layers that have the same params have them in the same order;
* all that tensor parallelism has cut is the same rank's; experts have buffers of their own, or lie among the others
  with weights that content does identify; and experts and layers are those of the params that content
  does identify.

A map is admissible if it keeps to these rules. Two that do make the params in which they differ ambiguous.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from .walk import Stretch
from .weights import Unit

__all__ = ["MAX_NODES", "Assignment", "UnitTable", "assign", "module_path"]

_MOST = 8
"""Maps that are told apart."""
MAX_NODES = 600_000
"""Steps of the search after which it gives up, and what is not sure is ambiguous."""
_NORM = re.compile(r"layer_norm_(weight|bias)$")
_FIRST_IN_MODULE = {"weight": 0, "bias": 1}
_PAIRS = {"q_layernorm": 0, "k_layernorm": 1, "enorm": 0, "hnorm": 1}
_SIBLINGS = {
    **_PAIRS,
    "input_layernorm": 0,
    "pre_cross_attn_layernorm": 1,
    "pre_mlp_layernorm": 2,
}
"""Modules of one parent that Megatron-Core registers in this order, whatever lies between them."""
_LAST = ("final_layernorm", "final_norm")
_FUSED = "#norm"
_NORMS_FIRST = ("linear_qkv", "linear_fc1")
"""Linear layers whose LayerNorm, where it is a module of its own, every transformer layer registers just before the
block that they lie in; other layers (Mamba's, latent attention's) have theirs behind.
"""


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
        path = [*path[:-2], f"{path[-2]}{_FUSED}", path[-1].removeprefix("layer_norm_")]
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
    options = _narrowed(stretches, units, by_place=True)
    wide = _narrowed(stretches, units, by_place=False)
    found = _mapped(options, units, max_nodes, all_numbers)
    if options != wide:
        # A layer or an expert may be without any anchor, where other layers' frozen weights look like its own.
        found = _both(found, _mapped(wide, units, max_nodes, all_numbers), wide)
    return found or _unordered([frozenset(stretch.units) for stretch in stretches], units)


def _both(near: Assignment | None, wide: Assignment | None, options: Sequence[frozenset[int]]) -> Assignment | None:
    """The nearer of two assignments; what the wider one, with more candidates, makes otherwise is ambiguous."""
    if near is None or wide is None:
        if near is None:
            return wide
        return Assignment(near.units, frozenset(i for i, row in enumerate(options) if len(row) > 1), False)
    differ = {i for i, pair in enumerate(zip(near.units, wide.units, strict=True)) if pair[0] != pair[1]}
    return Assignment(near.units, near.ambiguous | wide.ambiguous | differ, near.complete and wide.complete)


def _mapped(
    options: Sequence[frozenset[int]], units: UnitTable, max_nodes: int, all_numbers: bool
) -> Assignment | None:
    """The admissible maps as one; None where there is none."""
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
        return None
    chosen: list[int | None] = [None] * len(options)
    for i, unit in zip(rest, found[0], strict=True):
        chosen[i] = unit
    differ = {rest[k] for k in range(len(rest)) if len({one[k] for one in found}) > 1}
    if not complete:  # maps that were not looked at may differ anywhere
        differ = {i for i in rest if len(options[i]) > 1}
    return Assignment(tuple(chosen), frozenset(differ), complete)


def _unordered(options: Sequence[frozenset[int]], units: UnitTable) -> Assignment:
    """Without an admissible map: what content leaves no choice for, and nothing that two stretches would be."""
    alone = [next(iter(row)) if len(row) == 1 else None for row in options]
    count = Counter(units[unit].label for unit in alone if unit is not None)
    chosen = tuple(None if unit is None or count[units[unit].label] > 1 else unit for unit in alone)
    return Assignment(chosen, frozenset(i for i, row in enumerate(options) if row and chosen[i] is None), False)


# ---------------------------------------------------------------------------------------------- what anchors leave open


def _narrowed(stretches: Sequence[Stretch], units: UnitTable, *, by_place: bool) -> list[frozenset[int]]:
    """Candidates less what params that content identifies rule out: used units, other ranks' cuts, and ``by_place``
    other experts and other layers.
    """
    options = [frozenset(stretch.units) for stretch in stretches]
    for _ in range(len(options) + 1):
        anchors = {next(iter(row)) for s, row in zip(stretches, options, strict=True) if len(row) == 1 and s.matched}
        rules = _Rules(anchors, units, by_place)
        narrowed = [row if len(row) == 1 else frozenset(u for u in row if rules.allow(u)) or row for row in options]
        if narrowed == options:
            return options
        options = narrowed
    return options


class _Rules:
    """What the anchors say of the part: which rank of each cut, which experts, which numbered modules."""

    def __init__(self, anchors: set[int], units: UnitTable, by_place: bool) -> None:
        self.anchors, self.units, self.cuts = anchors, units, units.cuts
        self.ranks: dict[int, set[int]] = {}
        self.experts: set[int] = set()
        self.numbers: dict[tuple[str, ...], set[str]] = {}
        self.kinds = {units[anchor].expert for anchor in anchors} or {True, False}
        for anchor in anchors:
            unit = units[anchor]
            if anchor in self.cuts:
                rank, count = self.cuts[anchor]
                self.ranks.setdefault(count, set()).add(rank)
            if not by_place:
                continue
            if unit.index is not None:
                self.experts.add(unit.index)
            for parent, number in units.numbers[anchor]:
                self.numbers.setdefault(parent, set()).add(number)

    def allow(self, index: int) -> bool:
        unit = self.units[index]
        if index in self.anchors or unit.expert not in self.kinds:
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
        self.modules = {path[:k] for path in self.path.values() for k in range(1, len(path))}
        self.anchored: dict[Path, int] = {}
        self.numbered: dict[Path, list[tuple[int, int]]] = {}
        self._note_anchors()
        numbers: dict[Path, set[int]] = {}
        for path in self.path.values():
            for k, part in enumerate(path[:-1]):
                if part.isdecimal():
                    numbers.setdefault(path[:k], set()).add(int(part))
        self.rank = {(parent, n): i for parent, own in numbers.items() for i, n in enumerate(sorted(own))}

    def _note_anchors(self) -> None:
        """Where each module has its last certain param, and for numbered ones, from each certain param on, the lowest
        number: what would close or pass them too early is not followed up.
        """
        for at in range(len(self.options) - 1, -1, -1):
            if len(self.options[at]) != 1:
                continue
            path = self.path[next(iter(self.options[at]))]
            for k in range(1, len(path)):
                self.anchored.setdefault(path[:k], at)
                if path[k - 1].isdecimal():
                    rows = self.numbered.setdefault(path[: k - 1], [])
                    rows.append((-at, min(int(path[k - 1]), rows[-1][1] if rows else int(path[k - 1]))))

    def too_early(self, at: int, closing: Sequence[Path], opened: Sequence[Path]) -> bool:
        """Whether modules that end before stretch ``at`` have certain params later on, or numbered ones that begin
        there come before others of lower numbers that have.
        """
        if any(self.anchored.get(module, -1) >= at for module in closing):
            return True
        for module in opened:
            rows = self.numbered.get(module[:-1]) if module[-1].isdecimal() else None
            if rows:  # by falling position: those behind ``at`` come first
                last = bisect_left(rows, (-at, -1)) - 1
                if last >= 0 and rows[last][1] < int(module[-1]):
                    return True
        return False

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
            state = states[-1].then(self.path[unit], self, len(chosen))
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
    """After some params: the path of the last one, modules that are done, and the order in numbered ones by kind.

    ``awaited``: the linear layer that must follow a LayerNorm which is fused with it.
    """

    path: Path = ()
    done: frozenset[Path] = frozenset()
    open_: tuple[tuple[Path, tuple[Path, ...]], ...] = ()
    templates: tuple[tuple[object, tuple[Path, ...]], ...] = ()
    awaited: Path = ()

    def then(self, path: Path, search: _Search, at: int) -> _State | None:
        """With one more param, that of stretch ``at``; None where that is against a rule."""
        common = 0
        while common < min(len(path), len(self.path)) - 1 and path[common] == self.path[common]:
            common += 1
        modules = [path[:k] for k in range(common + 1, len(path))]
        if any(module in self.done for module in modules) or path in self.done:
            return None
        if self.path and not _in_order(self.path, path, common):
            return None
        closing = [self.path[:k] for k in range(common + 1, len(self.path))]
        if search.too_early(at, closing, modules):
            return None
        if self.same_parent_later(path) or (search.all_numbers and self.skips(path, search)):
            return None
        if search.same_layers and (self._breaks_off(path) or _behind_last(self.path, path, common)):
            return None
        if search.same_layers and any(_has_later_sibling(module, self.done | set(closing)) for module in modules):
            return None
        templates = self._templates(closing, search)
        if templates is None:
            return None
        kept = tuple((p, rows) for p, rows in self.open_ if p not in closing)
        opened = tuple((m, ()) for m in modules if m[-1].isdecimal())
        grown = tuple((p, (*rows, path[len(p) :])) for p, rows in (*kept, *opened))
        awaited = self._awaited(path, common, search)
        return _State(path, self.done | set(closing) | {path}, grown, templates, awaited)

    def _breaks_off(self, path: Path) -> bool:
        """Whether something else comes where a linear layer must follow its LayerNorm."""
        if not self.awaited or path[: len(self.awaited)] == self.awaited:
            return False
        norm = (*self.awaited[:-1], self.awaited[-1] + _FUSED)
        return path[: len(norm)] != norm

    def _awaited(self, path: Path, common: int, search: _Search) -> Path:
        """The linear layer that must follow after this param; none where the LayerNorm is the first of its block."""
        if len(path) < 2 or not path[-2].endswith(_FUSED):
            return ()
        if self.path[: len(path) - 1] == path[:-1]:
            return self.awaited
        linear = (*path[:-2], path[-2].removesuffix(_FUSED))
        if linear[-1] not in _NORMS_FIRST:
            return ()
        return linear if common >= len(path) - 2 and linear in search.modules else ()

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
        if search.same_layers and self.awaited:
            return False
        return self._templates([prefix for prefix, _ in self.open_], search) is not None


def _behind_last(before: Path, path: Path, common: int) -> bool:
    """Whether a param would follow the module that is the last of their common parent."""
    return common < len(before) - 1 and before[common] in _LAST and before[: common + 1] != path[: common + 1]


def _has_later_sibling(module: Path, done: frozenset[Path]) -> bool:
    """Whether a module that is registered behind this one is done."""
    rank = _SIBLINGS.get(module[-1])
    if rank is None:
        return False
    family = _PAIRS if module[-1] in _PAIRS else _SIBLINGS.keys() - _PAIRS.keys()
    return any(_SIBLINGS[name] > rank and (*module[:-1], name) in done for name in family)


def _in_order(before: Path, path: Path, common: int) -> bool:
    """Rules between neighbours: in one module weight before bias, and queries before keys."""
    if before[:-1] == path[:-1]:
        a, b = (_FIRST_IN_MODULE.get(p[-1], -1) for p in (before, path))
        return not (a == 1 and b == 0)
    if common < len(before) and common < len(path):
        first, second = (_PAIRS.get(p[common]) for p in (before, path))
        return not (first == 1 and second == 0)
    return True

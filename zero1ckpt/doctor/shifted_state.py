"""State in the wrong place: Megatron-LM #5077.

*How it arises.* Megatron-Core 0.15.0 to 0.19.2 saves ``fully_reshardable`` checkpoints by gathering each buffer without
the padding at its buckets' ends, and then cutting params out of it at their places *with* that padding. Params behind
the first padded bucket are stored from a wrong element on, by the padding before them; what reaches beyond the end is
filled with zeros. All slots alike; the model's weights are right. It needs a bucket that is not the last and does not
fill a multiple of lcm(DP, 128) elements: odd sizes, an odd dp size, padding for high bus bandwidth, or tied embeddings
with pipelines, which get buckets of their own. Megatron loads such a checkpoint without an error. Corrected on
2026-08-21 (32a03b77c5).

*What it looks like.* Cast to the weights' dtype, main params do not equal the weights, but do where one reads them as
many elements further on as some bucket layout gives. A checkpoint that was saved after a damaged one was loaded agrees
with itself: that cannot be seen.

*Whether it can be mended.* What lies in another param's place is put back. Lost are the elements that would lie in
padding, or in a param that this rank did not store. Lost main params come back from the weights, rounded to their
dtype; lost moments are in no file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product

import numpy as np

from ..core.boxes import Box
from ..core.errors import UnsupportedError
from .casts import cast, one_nan, widen
from .module_order import walk, without_fused_names
from .shift_search import Placed, Search, Solution, Unit, search
from .subject import Array, Damage, Subject, ranges, some_ranges

__all__ = ["KIND", "Mended", "ShiftDiagnosis", "detect", "diagnose", "repair", "unexplained"]

KIND = "shifted_state"
_MAIN = "fp32_param"
_MOST_STATES = (3_000, 20_000, 100_000)
"""Of a search, and of that of jobs that were not decided with less."""
_MOST = 256
"""Layouts of one buffer; with more of them it is not decided."""
_ONE_CUT = ("linear_proj.weight", "linear_fc2.weight", "word_embeddings.weight")
"""Keys that tensor parallelism cuts once; others may be cut into two halves each, or not at all."""
_EXPERTS = "experts."
_ONE_EXPERT = re.compile(r"experts\.(\d+)\.(.+)$")
_WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"


@dataclass(frozen=True, slots=True)
class _Part:
    """What one model-parallel rank holds of a param, or of one expert of it: boxes, end to end.

    ``stored``: whether the checkpoint has this rank's copy.
    """

    name: str
    param: int
    boxes: tuple[Box, ...]
    stored: bool = True
    shared: bool = False

    @property
    def numel(self) -> int:
        return sum(box.size for box in self.boxes)

    def gather(self, values: Array) -> Array:
        return np.concatenate([values[box.slices].reshape(-1) for box in self.boxes])

    def scatter(self, flat: Array, into: Array) -> None:
        at = 0
        for box in self.boxes:
            into[box.slices] = flat[at : at + box.size].reshape(box.shape)
            at += box.size


@dataclass(frozen=True, slots=True)
class _Job:
    """One way of dividing the params. ``buffers``: parts of each, and whether sizes close buckets."""

    buffers: tuple[tuple[tuple[_Part, ...], bool], ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Runs:
    """Where elements of one part lie: [start, start + size) at ``at`` of part ``source`` (its key in the sources)."""

    source: Array
    at: Array
    start: Array
    size: Array

    def kept(self, other: _Runs) -> _Runs:
        """What both say alike."""
        rows = []
        for source, at, start, size in zip(self.source, self.at, self.start, self.size, strict=True):
            same = (other.source == source) & (other.at - other.start == at - start)
            low = np.maximum(other.start[same], start)
            high = np.minimum((other.start + other.size)[same], start + size)
            rows += [(source, at + a - start, a, b - a) for a, b in zip(low, high, strict=True) if b > a]
        return _Runs(*np.array(rows, np.int64).reshape(-1, 4).T)


Source = tuple[int, tuple[Box, ...]]
"""Names a part: the param, and its boxes."""


@dataclass(frozen=True)
class ShiftDiagnosis:
    """What is wrong, where each element of a damaged part lies instead, and what lies nowhere.

    ``runs``: for each damaged part, by place in ``parts``. ``layouts``: how many fit; what they do not agree on counts
    as lost. ``wrong`` counts elements of one slot that are not where they should be, the lost ones among them.
    ``undecided``: jobs of which not all layouts could be tried. Then another may fit as well, and nothing is mended.
    """

    parts: tuple[_Part, ...]
    runs: Mapping[int, _Runs]
    layouts: int
    shifts: tuple[int, ...]
    wrong: int
    lost: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    affected: tuple[int, ...] = ()
    undecided: int = 0

    @property
    def lost_count(self) -> int:
        return sum(high - low for rows in self.lost.values() for low, high in rows)


@dataclass(frozen=True, slots=True, eq=False)
class Mended:
    """The values of one (param, slot) as they should be. Ranges count elements of the flattened param.

    ``moved``: found in another place; ``from_weights``: taken from the weight; ``zeroed``: lost and set to zero.
    """

    param: int
    slot: str
    values: Array
    moved: int
    from_weights: tuple[tuple[int, int], ...] = ()
    zeroed: tuple[tuple[int, int], ...] = ()


# ----------------------------------------------------------------------------------------------------------- diagnosing


def detect(subject: Subject, diagnosis: ShiftDiagnosis | None) -> Iterator[Damage]:
    """What a diagnosis comes to, one finding a param. Pure."""
    if diagnosis is None:
        return
    for index in diagnosis.affected:
        param = subject.params[index]
        lost = diagnosis.lost.get(index, ())
        count = sum(high - low for low, high in lost)
        gone = (
            f"; lost are {count} of {param.numel}: {some_ranges(lost)}" if lost else "; all of it lies in other places"
        )
        if diagnosis.undecided:
            gone = "; where each element lies is not sure"
        yield Damage(
            KIND,
            f"{param.name}: state is stored in the wrong place (Megatron-LM #5077){gone}",
            True,
            subject.part,
            param.name,
            None,
            lost[0] if len(lost) == 1 and not diagnosis.undecided else None,
            None,
            _mends(diagnosis),
        )


def _mends(diagnosis: ShiftDiagnosis) -> str:
    if diagnosis.undecided:
        return f"not mended: {diagnosis.undecided} ways of dividing the params have too many layouts to try them all"
    return (
        f"{diagnosis.wrong} elements of each slot are wrong: {diagnosis.wrong - diagnosis.lost_count} are put "
        f"back, {diagnosis.lost_count} are lost: main params of these come from the weights, moments do not"
    )


def diagnose(subject: Subject) -> ShiftDiagnosis | None:
    """The layout by which stored main params equal the weights, where they do not as they stand; None without one.

    Every job is searched to its end, with a larger budget for those that need it. What fits is told even where some
    are not, but then no element is taken for known (``ShiftDiagnosis.undecided``). Reads all main params, and the
    moments of what is damaged. Holds the weights of one buffer at a time.
    """
    if not any(_wrong(subject, i) for i in range(len(subject.params))):
        return None
    solver = _Solver(subject)
    pending, found = list(_jobs(subject)), []
    for most_states in _MOST_STATES:
        solved = [(job, solver.solve(job, most_states)) for job in pending]
        found += [(job, buffers) for job, buffers in solved if _fits(buffers) and _decided(buffers)]
        open_ = [(job, buffers) for job, buffers in solved if not _decided(buffers)]
        pending = [job for job, _ in open_]
        if not pending:
            break
    fitting = found or [(job, buffers) for job, buffers in open_ if _fits(buffers)]
    return _agreed(subject, fitting, len(pending)) if fitting else None


def unexplained(subject: Subject) -> Iterator[Damage]:
    """Where main params are not the weights, and no layout was found that explains it. Pure."""
    yield Damage(
        KIND,
        "no bucket layout was found under which the main params equal the weights; a checkpoint that Megatron-LM #5077 "
        "has damaged may look so where nearly all of it is lost",
        False,
        subject.part,
    )


def _wrong(subject: Subject, param: int) -> bool:
    values, weight = subject.values.slot(param, _MAIN), subject.values.weight(param)
    if values is None or weight is None or values.dtype != np.float32:
        return False
    dtype = subject.params[param].dtype
    return not np.array_equal(cast(values, dtype), one_nan(weight, dtype))


def _fits(buffers: Sequence[Search]) -> bool:
    return all(found.solutions for found in buffers)


def _decided(buffers: Sequence[Search]) -> bool:
    """Whether all layouts of a job are known; of one that does not fit, a buffer that has none is enough."""
    return all(found.complete for found in buffers) or any(found.complete and not found.solutions for found in buffers)


class _Solver:
    """All layouts of the buffers of jobs. Jobs share buffers: what was searched to its end is kept."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._known: dict[tuple[tuple[_Part, ...], bool], tuple[int, Search]] = {}

    def solve(self, job: _Job, most_states: int) -> list[Search]:
        """What was found for each buffer, up to the first that no layout explains."""
        solved = []
        for buffer in job.buffers:
            solved.append(self._buffer(buffer, most_states))
            if _decided(solved) and not _fits(solved):
                break
        return solved

    def _buffer(self, buffer: tuple[tuple[_Part, ...], bool], most_states: int) -> Search:
        budget, known = self._known.get(buffer, (0, Search(complete=False)))
        if not known.complete and budget < most_states:
            known = self._search(*buffer, most_states)
            self._known[buffer] = most_states, known
        return known

    def _search(self, parts: tuple[_Part, ...], size_closes: bool, most_states: int) -> Search:
        units = [_unit(self.subject, part) for part in parts]
        if any(unit is None for unit in units):
            return Search(complete=False)  # without the weights, nothing can be said
        return _layouts([unit for unit in units if unit is not None], parts, self.subject, size_closes, most_states)


def _layouts(
    units: Sequence[Unit], parts: Sequence[_Part], subject: Subject, size_closes: bool, most_states: int
) -> Search:
    """Layouts in whatever order: the listing tells which to try first, and excludes none."""
    if all(unit.right for unit in units):
        return Search([Solution(tuple(Placed(i, 0, 0) for i in range(len(units))), 0)])
    preferred = _preferred(subject, parts)
    found = Search()
    for names in _namings([part.name for part in parts]):
        result = search(
            units, walk(names, preferred), size_closes=size_closes, most_states=most_states, most_solutions=_MOST
        )
        found.solutions += [one for one in result.solutions if one not in found.solutions]
        found.complete &= result.complete
    return found


def _namings(names: Sequence[str]) -> list[list[str]]:
    """Names of modules that the keys may stand for: norms on their own, experts one by one or grouped."""
    plain = [without_fused_names(name) for name in names]
    spelled = [plain] if plain == list(names) else [plain, list(names)]
    grouped = [[_ONE_EXPERT.sub(r"experts.\2\1", name) for name in row] for row in spelled]
    return spelled if grouped == spelled else [*spelled, *grouped]


def _unit(subject: Subject, part: _Part) -> Unit | None:
    weight = subject.values.weight(part.param)
    if weight is None:
        return None
    dtype = subject.params[part.param].dtype
    if not part.stored:
        return Unit(part.name, one_nan(part.gather(weight), dtype), shared=part.shared)
    slots = [subject.values.slot(part.param, slot) for slot in subject.slots]
    main = subject.values.slot(part.param, _MAIN)
    if main is None:
        return None
    occupied = np.logical_or.reduce([part.gather(values) != 0 for values in slots if values is not None])
    bits = one_nan(part.gather(weight), dtype)
    return Unit(part.name, bits, part.gather(cast(main, dtype)), occupied, part.shared)


def _preferred(subject: Subject, parts: Sequence[_Part]) -> dict[int, float]:
    """The order in which parts are likely to lie: a rank's keys are listed in the order of its buffer.

    Of each key only the first box tells: the others stand behind it whatever their place in the buffer.
    """
    found = dict.fromkeys(range(len(parts)), 0.0)
    for i, part in enumerate(parts):
        boxes = set(part.boxes)
        pieces = [piece for piece in subject.params[part.param].pieces if piece.box in boxes]
        if pieces and part.stored:
            found[i] = float(pieces[0].order)
    return found


# ----------------------------------------------------------------------------------------------- who held which params


def _jobs(subject: Subject) -> Iterator[_Job]:
    """Ways in which ranks may have held the params, as sizes that are stated or that the boxes admit. Pure."""
    sizes = product(_tensor_sizes(subject), _pipelines(subject), _expert_sizes(subject), (False, True))
    for tensor, stages, expert, tied in sizes:
        embedding = _embedding(subject)
        if tied and embedding is None:
            continue
        last_has_copy = len(stages) > 1 and tied
        if last_has_copy != (len(stages) > 1 and embedding is not None and not _has_output(subject)):
            continue
        job = _job(subject, tensor, expert, stages, embedding if tied else None)
        if job is not None:
            yield job


def _embedding(subject: Subject) -> int | None:
    """The param that may be shared with the last stage."""
    names = [param.name for param in subject.params]
    exact = [i for i, name in enumerate(names) if name.endswith(_WORD_EMBEDDINGS)]
    near = [i for i, name in enumerate(names) if "embedding" in name and "position" not in name]
    return next(iter(exact or near), None)


def _has_output(subject: Subject) -> bool:
    return any(param.name.endswith(_OUTPUT) for param in subject.params)


def _expert_sizes(subject: Subject) -> list[int]:
    if subject.sizes.expert is not None:
        return [subject.sizes.expert]
    count = max((param.shape[0] for param in subject.params if param.expert and len(param.shape) > 2), default=1)
    return [n for n in range(1, count + 1) if count % n == 0]


def _tensor_sizes(subject: Subject) -> list[int]:
    if subject.sizes.tensor is not None:
        return [subject.sizes.tensor]
    cut = {len(param.pieces) for param in subject.params if not param.expert and param.name.endswith(_ONE_CUT)}
    if len(cut) == 1:
        return sorted(cut)
    counts = {len(param.pieces) for param in subject.params if not param.expert}
    return sorted({1} | counts)


def _layer(name: str) -> int | None:
    parts = name.split(".")
    for before, number in pairwise(parts):
        if before == "layers" and number.isdecimal():
            return int(number)
    return None


def _pipelines(subject: Subject) -> list[tuple[tuple[int, int], ...]]:
    """Ways to cut the layers into stages, as ranges: all equal, or as the ranks' files show. Pure."""
    layers = [n for param in subject.params if (n := _layer(param.name)) is not None]
    count = max(layers, default=-1) + 1
    stated = subject.sizes.pipeline
    if stated is not None:
        stated *= subject.sizes.chunks or 1
    sizes = [n for n in range(1, max(count, 1) + 1) if count % n == 0 and (stated is None or n == stated)]
    found = [tuple((i * count // n, (i + 1) * count // n) for i in range(n)) for n in sizes]
    shown = _shown_stages(subject, count)
    if shown is not None and shown not in found and (stated is None or len(shown) == stated):
        found.append(shown)
    return [stages for stages in found if _writers_apart(subject, stages)] or [((0, count),)]


def _shown_stages(subject: Subject, count: int) -> tuple[tuple[int, int], ...] | None:
    """The finest cut under which no rank wrote layers of two stages."""
    spans: dict[int, tuple[int, int]] = {}
    for param in subject.params:
        layer = _layer(param.name)
        for piece in param.pieces:
            if layer is not None and piece.writer >= 0:
                low, high = spans.get(piece.writer, (layer, layer))
                spans[piece.writer] = min(low, layer), max(high, layer)
    cuts = [n for n in range(1, count) if not any(low < n <= high for low, high in spans.values())]
    edges = [0, *cuts, count]
    return tuple(pairwise(edges)) if spans and count else None


def _stage_of(name: str, stages: Sequence[tuple[int, int]]) -> int:
    layer = _layer(name)
    if layer is not None and "mtp." not in name:
        return next(i for i, (low, high) in enumerate(stages) if low <= layer < high)
    return 0 if "embedding" in name else len(stages) - 1


def _writers_apart(subject: Subject, stages: Sequence[tuple[int, int]]) -> bool:
    """A rank belongs to one stage."""
    seen: dict[int, int] = {}
    for param in subject.params:
        stage = _stage_of(param.name, stages)
        for piece in param.pieces:
            if piece.writer >= 0 and seen.setdefault(piece.writer, stage) != stage:
                return False
    return True


def _job(
    subject: Subject, tensor: int, expert: int, stages: tuple[tuple[int, int], ...], shared: int | None
) -> _Job | None:
    buffers: dict[tuple[object, ...], list[_Part]] = {}
    for index, param in enumerate(subject.params):
        stage = _stage_of(param.name, stages)
        for key, part in _parts(subject, index, tensor, expert, shared == index):
            buffers.setdefault((stage, param.dtype, param.expert, *key), []).append(part)
    if shared is not None and len(stages) > 1:
        for (_, dtype, _, *rank), parts in [item for item in buffers.items() if item[0][0] == 0]:
            for part in [part for part in parts if part.param == shared]:
                copy = _Part(_OUTPUT, shared, part.boxes, stored=False, shared=True)
                buffers.setdefault((len(stages) - 1, dtype, False, *rank), []).append(copy)
    if any(not part.boxes for parts in buffers.values() for part in parts):
        return None
    rows = tuple((tuple(parts), key[0] == 0) for key, parts in buffers.items())
    return _Job(rows)


def _parts(
    subject: Subject, index: int, tensor: int, expert: int, shared: bool
) -> Iterator[tuple[tuple[int, ...], _Part]]:
    """What each model-parallel rank holds of a param, with the rank's coordinates beside the stage."""
    param = subject.params[index]
    boxes = sorted((piece.box for piece in param.pieces), key=lambda box: box.start)
    if _EXPERTS in param.name and len(param.shape) > 2 and all(box.shape[0] == 1 for box in boxes):
        yield from _expert_parts(subject, index, boxes, expert if param.expert else 1)
        return
    if len(boxes) == 1:
        for rank in range(tensor):
            yield (rank,), _Part(param.name, index, tuple(boxes), rank == 0, shared)
        return
    for rank in range(tensor):
        own = tuple(boxes[rank::tensor]) if len(boxes) % tensor == 0 else ()
        yield (rank,), _Part(param.name, index, own, True, shared)


def _expert_parts(
    subject: Subject, index: int, boxes: Sequence[Box], ranks: int
) -> Iterator[tuple[tuple[int, ...], _Part]]:
    """Experts are params of their own; ranks of the expert group hold equal numbers of them, in order."""
    param = subject.params[index]
    experts = sorted({box.start[0] for box in boxes})
    each = max(len(experts) // ranks, 1)
    head, _, tail = param.name.rpartition(_EXPERTS)
    for number, expert in enumerate(experts):
        own = tuple(box for box in boxes if box.start[0] == expert)
        yield (number // each,), _Part(f"{head}{_EXPERTS}{number % each}.{tail}", index, own)


# ------------------------------------------------------------------------------------------------------- what was found


def _agreed(subject: Subject, found: Sequence[tuple[_Job, Sequence[Search]]], undecided: int) -> ShiftDiagnosis | None:
    """What all layouts that fit say alike."""
    table = list(dict.fromkeys(_source(part) for job, _ in found for part in _stored(job)))
    number = {source: i for i, source in enumerate(table)}
    runs: dict[int, _Runs] = {}
    shifts: set[int] = set()
    layouts = 0
    for job, solved in found:
        for (group, _), own in zip(job.buffers, solved, strict=True):
            numbers = [number[_source(part)] if part.stored else -1 for part in group]
            for solution in own.solutions:
                layouts += 1
                shifts |= {place.shift for place in solution.placed}
                for unit, mine in _solution_runs(group, numbers, solution).items():
                    runs[unit] = runs[unit].kept(mine) if unit in runs else mine
    parts = tuple(_Part(subject.params[param].name, param, boxes) for param, boxes in table)
    damaged = {i: mine for i, mine in runs.items() if not _in_place(i, mine, parts[i])}
    _forget(damaged, parts, [{number[_source(part)] for part in _stored(job)} for job, _ in found])
    if not damaged:
        return None
    lost = _lost(subject, parts, damaged)
    affected = tuple(sorted({parts[i].param for i in damaged}))
    wrong = sum(parts[i].numel - _right(i, mine) for i, mine in damaged.items())
    return ShiftDiagnosis(parts, damaged, layouts, tuple(sorted(shifts)), wrong, lost, affected, undecided)


def _stored(job: _Job) -> Iterator[_Part]:
    return (part for group, _ in job.buffers for part in group if part.stored)


def _source(part: _Part) -> Source:
    return part.param, part.boxes


def _forget(damaged: dict[int, _Runs], parts: Sequence[_Part], jobs: Sequence[set[int]]) -> None:
    """Of a damaged param that jobs divide differently, all counts as lost: their ranges cannot be compared."""
    of_param = [{i: parts[i].param for i in own} for own in jobs]
    for param in {parts[i].param for i in damaged}:
        divisions = [frozenset(i for i, p in own.items() if p == param) for own in of_param]
        if len(set(divisions)) == 1:
            continue
        for i in frozenset().union(*divisions):
            damaged.pop(i, None)
        damaged.update(dict.fromkeys(divisions[0], _NOTHING))


_NOTHING = _Runs(*np.empty((4, 0), np.int64))


def _solution_runs(group: Sequence[_Part], numbers: Sequence[int], solution: Solution) -> dict[int, _Runs]:
    """Where the elements of each stored part lie. What several places show is taken from the first."""
    sizes = [part.numel for part in group]
    placed = solution.placed
    if not solution.damaged:
        return {numbers[p.unit]: _whole(numbers[p.unit], sizes[p.unit]) for p in placed if numbers[p.unit] >= 0}
    starts = np.array([place.padded for place in placed], np.int64)
    ends = starts + np.array([sizes[place.unit] for place in placed], np.int64)
    found = {}
    for place in placed:
        own = numbers[place.unit]
        if own < 0:
            continue
        low = int(np.searchsorted(ends, place.compact, side="right"))
        high = int(np.searchsorted(starts, place.compact + sizes[place.unit], side="left"))
        rows = []
        for window in range(low, high):
            source = numbers[placed[window].unit]
            first = max(place.compact, int(starts[window]))
            last = min(place.compact + sizes[place.unit], int(ends[window]))
            if source >= 0 and last > first:
                rows.append((source, first - int(starts[window]), first - place.compact, last - first))
        found[own] = _Runs(*np.array(rows, np.int64).reshape(-1, 4).T)
    return found


def _whole(number: int, size: int) -> _Runs:
    return _Runs(*np.array([(number, 0, 0, size)], np.int64).T)


def _right(number: int, runs: _Runs) -> int:
    """Elements of a part that lie where they should."""
    return int(runs.size[(runs.source == number) & (runs.at == runs.start)].sum())


def _in_place(number: int, runs: _Runs, part: _Part) -> bool:
    return _right(number, runs) == part.numel


def _lost(
    subject: Subject, table: Sequence[_Part], damaged: Mapping[int, _Runs]
) -> dict[int, tuple[tuple[int, int], ...]]:
    """Ranges of each param that lie nowhere."""
    masks: dict[int, Array] = {}
    for i, runs in damaged.items():
        part = table[i]
        gone = np.ones(part.numel, np.bool_)
        for start, size in zip(runs.start, runs.size, strict=True):
            gone[start : start + size] = False
        mask = masks.setdefault(part.param, np.zeros(subject.params[part.param].shape, np.bool_))
        part.scatter(gone, mask)
    return {param: tuple(ranges(mask)) for param, mask in masks.items() if mask.any()}


# ------------------------------------------------------------------------------------------------------------- mending


def repair(subject: Subject, diagnosis: ShiftDiagnosis) -> Iterator[Mended]:
    """Every damaged (param, slot) as it should be: put back, main params from the weights where lost, else zero.

    Whether lost moments may be zero is for the caller to ask. Raises ``UnsupportedError`` where it is not decided
    which layout it was.
    """
    if diagnosis.undecided:
        raise UnsupportedError(
            "the damage cannot be mended: not all layouts that the state may have had could be tried",
            found=f"{diagnosis.layouts} that fit, and {diagnosis.undecided} ways of dividing the params left undecided",
            hint="restore an earlier checkpoint",
        )
    for slot in subject.slots:
        for index in diagnosis.affected:
            values = subject.values.slot(index, slot)
            if values is None:
                continue
            made = values.copy()
            moved = 0
            for number, runs in diagnosis.runs.items():
                if diagnosis.parts[number].param == index:
                    moved += _put_back(subject, diagnosis, number, runs, slot, made)
            lost = diagnosis.lost.get(index, ())
            if slot == _MAIN:
                _from_weight(subject, index, lost, made)
            yield Mended(index, slot, made, moved, lost if slot == _MAIN else (), () if slot == _MAIN else lost)


def _put_back(subject: Subject, diagnosis: ShiftDiagnosis, number: int, runs: _Runs, slot: str, into: Array) -> int:
    part = diagnosis.parts[number]
    flat = np.zeros(part.numel, into.dtype)
    for source, at, start, size in zip(runs.source, runs.at, runs.start, runs.size, strict=True):
        other = diagnosis.parts[source]
        values = subject.values.slot(other.param, slot)
        if values is not None:
            flat[start : start + size] = other.gather(values)[at : at + size]
    part.scatter(flat, into)
    return int(runs.size.sum())


def _from_weight(subject: Subject, index: int, lost: Sequence[tuple[int, int]], into: Array) -> None:
    weight = subject.values.weight(index)
    assert weight is not None
    flat, bits = into.reshape(-1), weight.reshape(-1)
    for low, high in lost:
        flat[low:high] = widen(bits[low:high], subject.params[index].dtype)

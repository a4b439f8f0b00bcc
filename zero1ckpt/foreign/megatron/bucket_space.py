"""``dp_reshardable`` and ``fully_sharded_bucket_space``: from buckets to params.

The files say where each bucket lies and nothing of the params in it. The map is derived (``walk`` cuts buckets into
stretches, ``search`` names them) and proved afterwards (``proving``).
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import overload

import numpy as np

from ...core.errors import CorruptError, UnsupportedError
from ...model.catalog import Catalog, Extents, TablePlacement
from ...model.state import MAIN_PARAM, Group, LossScale, ParamSpec, PartState, SlotSpec
from .content import Content
from .entries import ChunkSource, Entries
from .layout_file import LayoutGroup
from .layout_found import dp_size_of, find_layout, shard_numel
from .model import Bucket, Buffer, Evidence, LocalParam, MegatronPart
from .raw_buckets import MAIN_FIELD, RawBucket, RawBuffer, RawPart
from .search import MAX_NODES, UnitTable, assign
from .walk import MOST_TILINGS, Stretch, tilings
from .weights import Unit, Weights

__all__ = ["FileKeys", "PartOptions", "part_name", "read_part"]

_SLOT_ORDER = (MAIN_PARAM, "exp_avg", "exp_avg_sq")


Memo = dict[tuple[object, ...], "list[_Found]"]


@dataclass(frozen=True, slots=True)
class PartOptions:
    """What the checkpoint says of a part beside its buckets.

    ``layers``: those that its pipeline stage has if stages are even, to be tried where nothing may be read;
    ``assign_groups``: gives params groups. ``expert``: whether the optimizer is that of experts, which then have
    data-parallel groups and buffers of their own; experts that are not spread over ranks lie among the other params.
    ``tied``: whether the model shares its embedding between pipeline stages. ``stated_bucket_size``: as the run's
    arguments give it; ``one_bucket``: whether they say that buffers have one bucket each.
    """

    groups: tuple[Group, ...] = ({},)
    step: int = 0
    loss_scale: LossScale | None = None
    assign_groups: Callable[[Sequence[ParamSpec]], Sequence[int]] = field(default=lambda params: [0] * len(params))
    tied: bool = False
    pipeline_rank: int | None = None
    stated_bucket_size: int | None = None
    one_bucket: bool | None = None
    layers: range | None = None
    expert: bool = False


@dataclass(frozen=True)
class FileKeys(Sequence[str]):
    """The file of each chunk, looked up when asked for."""

    source: ChunkSource

    def __len__(self) -> int:
        return len(self.source.chunks)

    @overload
    def __getitem__(self, chunk: int) -> str: ...
    @overload
    def __getitem__(self, chunk: slice) -> list[str]: ...
    def __getitem__(self, chunk: int | slice) -> str | list[str]:
        if isinstance(chunk, slice):
            return [self[i] for i in range(*chunk.indices(len(self)))]
        return self.source.chunks.file(chunk)


def part_name(raw: RawPart, alone: bool) -> str:
    """``dp_group_idx_0``, with the optimizer in front where there are several; "" for the only part. Pure."""
    if alone:
        return ""
    chained = "" if raw.chained is None else f"chained_{raw.chained}."
    return f"{chained}dp_group_idx_{raw.group}"


@dataclass(frozen=True, slots=True)
class _Found:
    """A stretch of a bucket and what it is: ``unit`` None where nothing fits or order leaves a choice of names."""

    buffer: int
    bucket: int
    stretch: Stretch
    unit: int | None
    ambiguous: bool

    @property
    def is_sure(self) -> bool:
        """Whether content alone names it."""
        return self.stretch.matched and len(self.stretch.units) == 1


def read_part(
    entries: Entries,
    raw: RawPart,
    name: str,
    format: str,
    found_units: Sequence[Unit],
    weights: Weights,
    options: PartOptions,
    *,
    content: bool = True,
    stated: LayoutGroup | None = None,
    memo: Memo | None = None,
) -> MegatronPart:
    """One data-parallel group with its params named. ``content=False`` reads no tensor: by sizes and order alone, and
    boxes are not told; ``memo`` then keeps what groups of the same sizes have in common. ``stated``: what a layout file
    says of it.

    Stretches that cannot be named get the name of their place, and stand in the evidence as ``unknown``. Raises
    ``UnsupportedError`` where the layout file speaks of other buckets.
    """
    if stated is not None:
        found = _as_stated(raw, stated, found_units)
        part = _assemble(entries, raw, name, format, found_units, found, options)
        return replace(part, evidence=replace(part.evidence, by="layout file"))
    source = ChunkSource(entries.store, entries.chunks)
    dp = dp_size_of(entries, raw)
    if content:
        found = [row for buffer in raw.buffers for row in _name_buffer(buffer, source, found_units, weights, dp, True)]
        return _assemble(entries, raw, name, format, found_units, _once(found), options)
    likely = _likely_units(found_units, options)
    found = []
    for buffer in raw.buffers:
        sizes = tuple((bucket.numel_unpadded, *bucket.edges) for bucket in buffer.buckets)
        key = (options.layers, buffer.index, buffer.param_dtype, sizes)
        rows = None if memo is None else memo.get(key)
        if rows is None:
            rows = _name_buffer(buffer, source, likely, weights, dp, False)
        if memo is not None:
            memo[key] = rows
        found += rows
    part = _assemble(entries, raw, name, format, likely, found, options)
    evidence = replace(part.evidence, by="sizes and order")
    return replace(part, local_params=tuple(replace(local, boxes=()) for local in part.local_params), evidence=evidence)


def _once(found: Sequence[_Found]) -> list[_Found]:
    """Without names that two buffers were given, but for where content alone says so."""
    count = Counter((row.unit, row.is_sure) for row in found)
    return [
        row
        if row.unit is None or (count[row.unit, row.is_sure] == 1 and (row.is_sure or not count[row.unit, True]))
        else replace(row, unit=None, ambiguous=True)
        for row in found
    ]


def _likely_units(all_units: Sequence[Unit], options: PartOptions) -> UnitTable:
    """Each param once, whichever tensor-parallel rank's; of stacked layers those that an even pipeline's stage has."""
    kept: dict[tuple[str, int | None, int], Unit] = {}
    for unit in all_units:
        layer = re.search(r"(?:^|\.)decoder\.layers\.(\d+)\.", unit.name)
        if options.layers is None or layer is None or int(layer[1]) in options.layers:
            kept.setdefault((unit.name, unit.index, unit.numel), unit)
    return UnitTable(kept.values())


def _as_stated(raw: RawPart, stated: LayoutGroup, all_units: Sequence[Unit]) -> list[_Found]:
    """The stretches that a layout file gives, in registration order."""
    by_boxes = {unit.boxes: i for i, unit in enumerate(all_units)}
    if len(stated.buffers) != len(raw.buffers):
        raise _other_layout(raw, "buffers", len(raw.buffers), len(stated.buffers))
    found = []
    for buffer, rows in zip(raw.buffers, stated.buffers, strict=True):
        sizes = [bucket.numel_unpadded for bucket in buffer.buckets]
        if sizes != [bucket.numel_unpadded for bucket in rows.buckets]:
            raise _other_layout(raw, "buckets", sizes, [bucket.numel_unpadded for bucket in rows.buckets])
        for row in reversed(rows.params):
            b = next(k for k, own in enumerate(rows.buckets) if row.start < own.offset + own.numel)
            unit = by_boxes.get(tuple(held.box for held in row.boxes))
            stretch = Stretch(row.start - rows.buckets[b].offset, row.numel, () if unit is None else (unit,), True)
            found.append(_Found(buffer.index, b, stretch, unit, False))
    return found


def _other_layout(raw: RawPart, what: str, found: object, expected: object) -> UnsupportedError:
    return UnsupportedError(
        f"the layout file speaks of other {what} than the checkpoint has",
        param=raw.prefix,
        found=found,
        expected=expected,
        hint="give the layout file of the run that saved it",
    )


def _name_buffer(
    buffer: RawBuffer,
    source: ChunkSource,
    all_units: Sequence[Unit],
    weights: Weights,
    dp: int | None,
    content: bool,
) -> list[_Found]:
    """The stretches of one buffer in registration order, named."""
    main = {bucket.fields[MAIN_FIELD].dtype for bucket in buffer.buckets}
    if len(main) > 1:
        raise UnsupportedError("buckets of a buffer have main params of several dtypes", found=sorted(main))
    lookup = Content(all_units, weights, next(iter(main)))
    ways = [_ways(bucket, source, lookup, buffer.param_dtype, dp, content) for bucket in buffer.buckets]
    choices, all_of_them = _combined(ways)
    maps = [_name(buffer.index, stretches, all_units, content) for stretches in choices]
    fewest = min(_unknown(rows) for rows in maps)
    named = _agreed([rows for rows in maps if _unknown(rows) == fewest])
    return named if all_of_them else [row if row.is_sure else replace(row, ambiguous=True) for row in named]


def _name(
    buffer: int, stretches: Sequence[tuple[Stretch, ...]], all_units: Sequence[Unit], content: bool
) -> list[_Found]:
    """Names for one way to cut a buffer, in registration order."""
    rows = [(b, s) for b, own in reversed(list(enumerate(stretches))) for s in reversed(own)]
    most = MAX_NODES if content else MAX_NODES // 20
    made = assign([stretch for _, stretch in rows], all_units, max_nodes=most, all_numbers=not content)
    return [
        _Found(buffer, b, stretch, unit, i in made.ambiguous)
        for i, ((b, stretch), unit) in enumerate(zip(rows, made.units, strict=True))
    ]


def _unknown(rows: Sequence[_Found]) -> int:
    return sum(row.unit is None for row in rows)


def _agreed(maps: Sequence[list[_Found]]) -> list[_Found]:
    """The first of several maps; what is not the same in all is ambiguous."""
    same = set.intersection(*({(r.bucket, r.stretch.start, r.stretch.numel, r.unit) for r in rows} for rows in maps))
    return [
        row if (row.bucket, row.stretch.start, row.stretch.numel, row.unit) in same else replace(row, ambiguous=True)
        for row in maps[0]
    ]


def _ways(
    bucket: RawBucket, source: ChunkSource, lookup: Content, dtype: str, dp: int | None, content: bool
) -> list[tuple[Stretch, ...]]:
    """Ways to cut a bucket into params; of one that cannot be cut, it as a whole."""
    main = bucket.fields[MAIN_FIELD]

    def read(start: int, size: int) -> bytearray:
        return main.read(source, start, size)

    def by_content(start: int, numel: int) -> tuple[int, ...]:
        return lookup.matches(read, start, numel, dtype) if content else ()

    shard = shard_numel(bucket, dp) if dp else 0
    ends = [edge for edge in bucket.edges if shard and edge % shard]

    def by_size(start: int, numel: int) -> tuple[int, ...]:
        """Not across an edge that is no end of a shard: there a param or a gap ends."""
        across = bisect_left(ends, start + numel) > bisect_right(ends, start)
        return () if across else lookup.of_size(dtype, numel)

    sizes = sorted(lookup.numels(dtype))
    found = tilings(bucket.numel_unpadded, bucket.edges, sizes, by_content, by_size)
    return found or [(Stretch(0, bucket.numel_unpadded, (), False),)]


def _combined(ways: Sequence[list[tuple[Stretch, ...]]]) -> tuple[list[list[tuple[Stretch, ...]]], bool]:
    """Choices of one way for each bucket, and whether they are all; the first of each where there would be too many."""
    combined: list[list[tuple[Stretch, ...]]] = [[]]
    all_of_them = all(len(own) < MOST_TILINGS for own in ways)
    for own in ways:
        fits = len(combined) * len(own) <= MOST_TILINGS
        combined = [[*before, way] for before in combined for way in (own if fits else own[:1])]
        all_of_them = all_of_them and fits
    return combined, all_of_them


# ------------------------------------------------------------------------------------------------------------- assembly


def _assemble(
    entries: Entries,
    raw: RawPart,
    name: str,
    format: str,
    all_units: Sequence[Unit],
    found: Sequence[_Found],
    options: PartOptions,
) -> MegatronPart:
    specs, places = _params(raw, all_units, found, options.expert)
    locals_ = _locals(raw, all_units, found, places, specs)
    buffers = tuple(_buffer(buffer, found) for buffer in raw.buffers)
    layout, shared, unruly = find_layout(entries, raw, buffers, locals_, options)
    locals_ = [replace(local, shared_embedding=i in shared) for i, local in enumerate(locals_)]
    flagged = {local.param for local in locals_ if local.shared_embedding}
    groups = options.assign_groups(specs)
    params = tuple(
        replace(spec, group=group, shared_embedding=i in flagged)
        for i, (spec, group) in enumerate(zip(specs, groups, strict=True))
    )
    slots = _slots(raw)
    absent = frozenset((i, k) for i in range(len(params)) for k in range(len(slots)) if not _has(raw, slots[k].name))
    state = PartState(params, slots, options.step, options.groups, absent=absent, loss_scale=options.loss_scale)
    placement = _placement(entries, raw, found, locals_, slots)
    catalog = Catalog(format, entries.container, name, state, None, placement)
    if unruly:  # buckets that the layout rule does not make: order, which is the rule's, tells nothing
        found = [row if row.is_sure else replace(row, ambiguous=True) for row in found]
    evidence = _evidence(found, all_units, locals_, params)
    return MegatronPart(name, catalog, tuple(locals_), layout, evidence, raw.chained, raw.group, options.pipeline_rank)


def _place_name(row: _Found) -> str:
    low = row.stretch.start
    return f"gbuf_idx_{row.buffer}.bucket_idx_{row.bucket}[{low}:{low + row.stretch.numel}]"


def _params(
    raw: RawPart, all_units: Sequence[Unit], found: Sequence[_Found], expert: bool
) -> tuple[list[ParamSpec], list[tuple[int, int]]]:
    """Params in registration order, and for each found stretch its param and the first element in it. Experts that lie
    on one axis are one param.
    """
    kinds = {buffer.index: (buffer.param_dtype, buffer.grad_dtype) for buffer in raw.buffers}
    members: dict[str, list[int]] = {}
    for i, row in enumerate(found):
        members.setdefault(_place_name(row) if row.unit is None else all_units[row.unit].name, []).append(i)
    specs: list[ParamSpec] = []
    places: list[tuple[int, int]] = [(0, 0)] * len(found)
    for name, rows in members.items():
        rows = sorted(rows, key=lambda i: _index_of(found[i], all_units))
        first = found[rows[0]]
        unit = None if first.unit is None else all_units[first.unit]
        shape: tuple[int, ...] = (first.stretch.numel,) if unit is None else unit.shape
        if unit is not None and unit.index is not None:
            shape = (len(rows), *shape)
        elif len(rows) > 1:
            raise CorruptError("two stretches of a part are one param", param=name)
        dtype, grad = kinds[first.buffer]
        at = 0
        for i in rows:
            places[i] = (len(specs), at)
            at += found[i].stretch.numel
        specs.append(ParamSpec(name, shape, dtype, grad, 0, expert and unit is not None and unit.expert))
    return specs, places


def _index_of(row: _Found, all_units: Sequence[Unit]) -> int:
    index = None if row.unit is None else all_units[row.unit].index
    return -1 if index is None else index


def _locals(
    raw: RawPart,
    all_units: Sequence[Unit],
    found: Sequence[_Found],
    places: Sequence[tuple[int, int]],
    specs: Sequence[ParamSpec],
) -> list[LocalParam]:
    made = []
    for row, (param, start) in zip(found, places, strict=True):
        spec = specs[param]
        unit = None if row.unit is None else all_units[row.unit]
        label = spec.name if unit is None else unit.label
        boxes = () if unit is None else unit.boxes
        expert = spec.expert
        made.append(
            LocalParam(label, param, start, row.stretch.numel, spec.dtype, spec.grad_dtype, expert, False, boxes)
        )
    return made


def _buffer(buffer: RawBuffer, found: Sequence[_Found]) -> Buffer:
    """The buffer's params in place order: the reverse of the order in which they were found."""
    mine = [i for i, row in enumerate(found) if row.buffer == buffer.index][::-1]
    buckets = []
    first = 0
    for bucket in buffer.buckets:
        last = first + sum(found[i].bucket == bucket.index for i in mine)
        buckets.append(Bucket(bucket.numel_unpadded, bucket.numel, first, last))
        first = last
    starts = tuple(found[i].stretch.start for i in mine)
    return Buffer(buffer.index, buffer.param_dtype, buffer.grad_dtype, tuple(mine), starts, tuple(buckets))


def _fields(raw: RawPart) -> list[str]:
    return list(dict.fromkeys(name for buffer in raw.buffers for b in buffer.buckets for name in b.fields))


def _slots(raw: RawPart) -> tuple[SlotSpec, ...]:
    """Slots by our names. All buckets of a part have the same fields, of one dtype each."""
    names = _fields(raw)
    dtypes: dict[str, set[str]] = {}
    for buffer in raw.buffers:
        for bucket in buffer.buckets:
            if set(bucket.fields) != set(names):
                missing = sorted(set(names) - set(bucket.fields))
                raise CorruptError("a bucket lacks fields that others have", param=raw.prefix, found=missing)
            for name, held in bucket.fields.items():
                dtypes.setdefault(name, set()).add(held.dtype)
    several = {name: sorted(own) for name, own in dtypes.items() if len(own) > 1}
    if several:
        raise UnsupportedError("a slot has several dtypes", param=raw.prefix, found=several)
    slots = [SlotSpec(_slot_name(name), next(iter(dtypes[name]))) for name in names]
    return tuple(sorted(slots, key=lambda s: (_SLOT_ORDER.index(s.name) if s.name in _SLOT_ORDER else 9, s.name)))


def _slot_name(field_name: str) -> str:
    return MAIN_PARAM if field_name == MAIN_FIELD else field_name


def _field_name(slot: str) -> str:
    return MAIN_FIELD if slot == MAIN_PARAM else slot


def _has(raw: RawPart, slot: str) -> bool:
    return any(_field_name(slot) in bucket.fields for buffer in raw.buffers for bucket in buffer.buckets)


def _placement(
    entries: Entries,
    raw: RawPart,
    found: Sequence[_Found],
    locals_: Sequence[LocalParam],
    slots: Sequence[SlotSpec],
) -> TablePlacement:
    buckets = {(b.index, k.index): k for b in raw.buffers for k in b.buckets}
    rows = []
    for row, local in zip(found, locals_, strict=True):
        low, high = row.stretch.start, row.stretch.start + row.stretch.numel
        for k, slot in enumerate(slots):
            held = buckets[row.buffer, row.bucket].fields[_field_name(slot.name)]
            for begin, size, chunk, inside in held.rows(low, high):
                start = local.start + begin - low
                rows.append((local.param, k, start, size, chunk, inside * held.itemsize, size * held.itemsize))
    table = Extents(*np.array(rows, np.int64).reshape(-1, 7).T)
    source = ChunkSource(entries.store, entries.chunks)
    return TablePlacement(FileKeys(source), entries.chunks.nbytes.tolist(), table, len(slots))


def _evidence(
    found: Sequence[_Found], all_units: Sequence[Unit], locals_: Sequence[LocalParam], params: Sequence[ParamSpec]
) -> Evidence:
    def names(rows: Sequence[bool]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(params[local.param].name for local, yes in zip(locals_, rows, strict=True) if yes))

    return Evidence(
        "content" if all(row.is_sure for row in found) else "content and order",
        sum(param.numel for param in params),
        None,
        names([row.ambiguous for row in found]),
        names([not row.stretch.matched for row in found]),
        names([row.unit is None for row in found]),
    )

"""``dp_zero_gather_scatter``: an object for each data-parallel group that holds what rank 0 gathered.

Neither the params nor the buckets are named. The gathered buffer is cut into params as a bucket is, but for the places
where a bucket may have ended (``zero_gather``): all sets of such places that agree with the content are looked at, the
params are named for each (``bucket_space``), and what is not the same in all of the best is ambiguous.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from math import prod
from pathlib import PurePath

import numpy as np

from ...core.errors import CorruptError, UnsupportedError
from ...core.layout import PARAM_ALIGN
from ...encodings.inert_pickle import Dtype, TensorRef, Value
from ...encodings.torch_archive import Archive
from .bucket_space import PartOptions, part_name, read_part
from .common import Args, Common
from .content import Content
from .entries import ChunkSource, Entries, Place, unwrapped
from .frozen import with_lookalikes
from .gathered_layout import PlacedParam, buckets_by_rule
from .model import Buffer, Doubt, Evidence, LocalParam, MegatronCheckpoint, MegatronPart, said_of
from .model_space import model_keys
from .raw_buckets import MAIN_FIELD, RawBucket, RawBuffer, RawField, RawPart
from .weights import Unit, Weights, units

__all__ = ["Options", "read_gathered"]

FORMAT = "megatron:dp_zero_gather_scatter"
_KEY = re.compile(r"((?:chained_\d+\.)*)(optimizer\.distributed\.dp_group_idx_(\d+))\.param_state/shard_[\d.]+_[\d.]+")
_MOST = 12
"""Sets of bucket bounds that are looked at."""
_MAX_STEPS = 200_000

Options = Callable[[RawPart], tuple[PartOptions, Sequence[str]]]
"""What a checkpoint says of a part beside its buckets, and notices."""
Matches = Callable[[int, int], bool]


def read_gathered(entries: Entries, common: Common, options: Options, *, content: bool = True) -> MegatronCheckpoint:
    """A checkpoint of this format. Raises ``CorruptError``, ``UnsupportedError``, ``MissingError``."""
    entries, gathered = _open(entries)
    keys = model_keys(entries)
    found_units = units(entries, keys, common.args.num_layers)
    weights = Weights(entries, keys)
    parts: dict[str, MegatronPart] = {}
    notices = list(common.notices)
    for one in gathered:
        raw = one.raw([_Cut()] * len(one.buffers))
        name = part_name(raw, len(gathered) == 1)
        told, said = options(raw)
        notices += [said_of(name, line) for line in said]
        parts[name] = _Finder(entries, one, name, found_units, weights, told, common.args, content).part()
    if content:
        parts = with_lookalikes(parts, found_units, weights)
    steps = sorted({part.catalog.state.step for part in parts.values()})
    if len(steps) > 1:
        notices.append(Doubt(f"parts are at different steps: {', '.join(map(str, steps))}"))
    made = tuple(dict.fromkeys(notices))
    return MegatronCheckpoint(
        entries, FORMAT, entries.container, max(steps, default=0), common.iteration, parts, keys, made
    )


# ------------------------------------------------------------------------------------------------------------- objects


@dataclass(frozen=True)
class _Field(RawField):
    """A field of a bucket that begins at element ``origin`` of its one chunk."""

    origin: int = 0

    def rows(self, low: int, high: int) -> Iterator[tuple[int, int, int, int]]:
        if high > low:
            yield low, high - low, int(self.chunk[0]), low + self.origin


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a gathered buffer may be cut. ``bounds``: places inside it where buckets begin, as far as known; ``edges``:
    where params begin and end, empty where that is not known.
    """

    bounds: tuple[int, ...] = ()
    edges: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _GatheredBuffer:
    """One buffer: for each field the chunk that is its whole tensor, of ``total`` elements."""

    index: int
    param_dtype: str
    grad_dtype: str
    fields: Mapping[str, int]
    total: int

    def bucket(self, index: int, low: int, high: int, cuts: Sequence[int] = ()) -> RawBucket:
        """Elements [low, high) as a bucket, in pieces that end at ``cuts``: there its params begin and end."""
        inner = sorted({cut - low for cut in cuts if low < cut < high})
        start = np.array([0, *inner], np.int64)
        size = np.array([end - begin for begin, end in pairwise([0, *inner, high - low])], np.int64)
        fields = {
            name: _Field("float32", 4, start, size, np.full(len(start), chunk, np.int64), low)
            for name, chunk in self.fields.items()
        }
        return RawBucket(index, high - low, None, fields)


@dataclass(frozen=True, slots=True)
class _Gathered:
    """One data-parallel group's object."""

    prefix: str
    chained: int | None
    group: int
    buffers: tuple[_GatheredBuffer, ...]

    def raw(self, cuts: Sequence[_Cut]) -> RawPart:
        """As buckets, each buffer cut in one way."""
        buffers = []
        for buffer, cut in zip(self.buffers, cuts, strict=True):
            bounds = [0, *cut.bounds, buffer.total]
            buckets = tuple(buffer.bucket(i, low, high, cut.edges) for i, (low, high) in enumerate(pairwise(bounds)))
            buffers.append(RawBuffer(buffer.index, buffer.param_dtype, buffer.grad_dtype, buckets))
        return RawPart(self.prefix, self.chained, self.group, tuple(buffers))


def _open(entries: Entries) -> tuple[Entries, list[_Gathered]]:
    """All groups by optimizer and number, their tensors as chunks of the entries."""
    places: list[Place] = []
    nbytes: list[int] = []
    found = []
    for key in entries.objects:
        named = _KEY.fullmatch(key)
        if named is None:
            continue
        reader = _Object(entries, key, len(entries.chunks), places, nbytes)
        numbers = [int(number) for number in re.findall(r"\d+", named[1])]
        chained = numbers[-1] if numbers else None
        found.append(_Gathered(named[1] + named[2], chained, int(named[3]), tuple(reader.buffers())))
    if not found:
        raise CorruptError("the checkpoint lacks the optimizer's gathered state", file=entries.path)
    found.sort(key=lambda one: (-1 if one.chained is None else one.chained, one.group))
    return entries.with_chunks(places, nbytes)[0], found


@dataclass(frozen=True)
class _Object:
    """Reads the object of one group; its tensors are added to ``places`` and ``nbytes``."""

    entries: Entries
    key: str
    first: int
    places: list[Place]
    nbytes: list[int]

    def buffers(self) -> Iterator[_GatheredBuffer]:
        archive = self.entries.load_archive(self.key)
        file = PurePath(archive.file).relative_to(self.entries.store.root).as_posix()
        value = unwrapped(archive.value)
        if not isinstance(value, dict):
            raise self.corrupt("the optimizer's gathered state is no dict", type(value).__name__)
        if value.get("buckets_coalesced") is not True:
            raise UnsupportedError(
                "the optimizer's gathered state is in a form that is not known", file=archive.file, param=self.key
            )
        for index in sorted(key for key in value if type(key) is int):
            yield self.buffer(archive, file, index, value[index])

    def buffer(self, archive: Archive, file: str, index: int, by_dtype: Value) -> _GatheredBuffer:
        if not isinstance(by_dtype, dict) or len(by_dtype) != 1:
            raise self.corrupt("a buffer's state is not that of one pair of dtypes", type(by_dtype).__name__)
        ((dtypes, slots),) = by_dtype.items()
        if not isinstance(dtypes, tuple) or len(dtypes) != 2 or not all(isinstance(d, Dtype) for d in dtypes):
            raise self.corrupt("a buffer's key is no pair of dtypes", repr(dtypes)[:80])
        tensors = {str(k): v for k, v in slots.items() if isinstance(v, TensorRef)} if isinstance(slots, dict) else {}
        sizes = {tensor.numel for tensor in tensors.values()}
        if MAIN_FIELD not in tensors or len(sizes) != 1:
            raise self.corrupt("fields of a buffer differ in size, or main params are missing", sorted(sizes))
        (total,) = sizes
        stated = slots.get("numel_unpadded")
        if type(stated) is int and stated != total:
            raise self.corrupt("a buffer has another size than it states", total)
        fields = {name: self.chunk(archive, file, tensor) for name, tensor in tensors.items()}
        return _GatheredBuffer(index, dtypes[0].name, dtypes[1].name, fields, total)

    def chunk(self, archive: Archive, file: str, tensor: TensorRef) -> int:
        place = archive.locate(tensor)
        if tensor.dtype != "float32" or not place.contiguous:
            raise UnsupportedError(
                "gathered state is no plain float32 tensor", file=archive.file, param=self.key, found=tensor.dtype
            )
        self.places.append((file, place.offset))
        self.nbytes.append(place.nbytes)
        return self.first + len(self.places) - 1

    def corrupt(self, problem: str, found: object) -> CorruptError:
        return CorruptError(problem, file=self.entries.path, param=self.key, found=found)


# --------------------------------------------------------------------------------------------------- bounds of buckets


def buffer_cuts(
    total: int, sizes: Sequence[int], matches: Matches, empty: Matches = lambda start, size: True
) -> list[_Cut]:
    """Ways to tile a gathered buffer with params, those with the fewest buckets first.

    Only those buckets count that begin at no multiple of 64 from the last one's start: others change no param's place.
    ``empty``: whether elements can be a gap inside a bucket; not asked where no tiling would be left.
    """
    for gaps in (empty, lambda start, size: True):
        graph = _Graph(total, sizes, matches, gaps)
        graph.explore()
        if found := list(graph.best_first()):
            return found
    return []


@dataclass
class _Graph:
    """States are (where the next param begins, its bucket's start modulo 64)."""

    total: int
    sizes: Sequence[int]
    matches: Matches
    empty: Matches

    def explore(self) -> None:
        self.edges: dict[tuple[int, int], set[tuple[int, int, int]]] = {}
        todo = [(0, 0)]
        while todo:
            state = todo.pop()
            if state in self.edges or state[0] >= self.total:
                continue
            if len(self.edges) > _MAX_STEPS:
                raise UnsupportedError("there are too many ways to cut a gathered buffer into params")
            self.edges[state] = set(self.after(*state))
            todo += [(start, base) for start, base, _ in self.edges[state]]
        self.alive()

    def after(self, start: int, base: int) -> Iterator[tuple[int, int, int]]:
        """Where the next param may begin, its bucket's start modulo 64, and where this one ends."""
        for size in self.sizes:
            end = start + size
            if end > self.total or not self.matches(start, size):
                continue
            if end == self.total:
                yield end, 0, end
                continue
            near = end + (base - end) % PARAM_ALIGN
            if near == end or (near < self.total and self.empty(end, near - end)):
                yield near, base, end
            if near != end:
                yield end, end % PARAM_ALIGN, end

    def alive(self) -> None:
        """Fewest visible bounds from each state to the end."""
        self.left: dict[tuple[int, int], int] = {(self.total, 0): 0}
        for state in sorted(self.edges, reverse=True):
            nexts = [row[:2] for row in self.edges[state] if row[:2] in self.left]
            costs = [self.left[follows] + self.begins(state, follows) for follows in nexts]
            if costs:
                self.left[state] = min(costs)

    def begins(self, state: tuple[int, int], follows: tuple[int, int]) -> bool:
        return follows[1] != state[1] and follows[0] != self.total

    def best_first(self) -> Iterator[_Cut]:
        if (0, 0) not in self.left:
            return
        tie = count()
        heap: list[tuple[int, int, int, tuple[int, int], _Cut]] = [(self.left[0, 0], 0, next(tie), (0, 0), _Cut())]
        found = 0
        for _ in range(_MAX_STEPS):
            if not heap or found >= _MOST:
                return
            _, _, _, state, cut = heapq.heappop(heap)
            if state[0] >= self.total:
                found += 1
                yield cut
                continue
            for start, base, end in sorted(self.edges[state]):
                follows = (start, base)
                if follows in self.left:
                    bounds = (*cut.bounds, start) if self.begins(state, follows) else cut.bounds
                    grown = _Cut(bounds, (*cut.edges, end, start))
                    # Of equal ones the longest first: so one tiling is finished before others are begun.
                    heapq.heappush(heap, (len(bounds) + self.left[follows], -start, next(tie), follows, grown))


# ------------------------------------------------------------------------------------------------------------ one part


@dataclass(frozen=True)
class _Finder:
    """Finds buckets and params of one group."""

    entries: Entries
    gathered: _Gathered
    name: str
    units: Sequence[Unit]
    weights: Weights
    options: PartOptions
    args: Args
    content: bool

    def part(self) -> MegatronPart:
        choices = [self.choices(buffer) for buffer in self.gathered.buffers]
        tried = [(self.read(cuts), cuts) for cuts in _combined(choices)]
        fewest = min(_doubt(part) for part, _ in tried)
        best = [(part, cuts) for part, cuts in tried if _doubt(part) == fewest]
        ruled = [inner for part, cuts in best if (inner := self.by_rule(part, cuts)) is not None]
        parts = [part for part, _ in best]
        if ruled:  # a map that Megatron's layout rule makes is admissible; one that it cannot make is not
            parts = [self.read(cuts) for cuts in dict.fromkeys(ruled)]
        agreed = _agreed(parts)
        if prod(len(own) for own in choices) < _MOST:
            return agreed
        return _with_ambiguous(agreed, agreed.catalog.state.index)  # maps that were not looked at may differ anywhere

    def read(self, cuts: Sequence[_Cut]) -> MegatronPart:
        raw = self.gathered.raw(cuts)
        args = (self.entries, raw, self.name, FORMAT, self.units, self.weights, self.options)
        return read_part(*args, content=self.content)

    def choices(self, buffer: _GatheredBuffer) -> list[_Cut]:
        """Ways to cut one buffer; without content, or where nothing fits, as one bucket."""
        if not self.content:
            return [_Cut()]
        whole = buffer.bucket(0, 0, buffer.total)
        source = ChunkSource(self.entries.store, self.entries.chunks)
        lookup = Content(self.units, self.weights, "float32")

        def read(start: int, size: int) -> bytearray:
            return whole.fields[MAIN_FIELD].read(source, start, size)

        def matches(start: int, size: int) -> bool:
            return bool(lookup.matches(read, start, size, buffer.param_dtype))

        def empty(start: int, size: int) -> bool:
            return not any(any(field.read(source, start, size)) for field in whole.fields.values())

        sizes = sorted(lookup.numels(buffer.param_dtype))
        return buffer_cuts(buffer.total, sizes, matches, empty) or [_Cut()]

    def by_rule(self, part: MegatronPart, cuts: Sequence[_Cut]) -> tuple[_Cut, ...] | None:
        """The cuts with all bounds of every buffer, by the layout rule; None where no rule gives the places found."""
        if part.layout is None or part.evidence.unknown:
            return None
        found = []
        for buffer, held, cut in zip(part.layout.buffers, self.gathered.buffers, cuts, strict=True):
            bounds = self.buffer_by_rule(part, buffer, held.total)
            if bounds is None:
                return None
            found.append(_Cut(bounds, cut.edges))
        return tuple(found)

    def buffer_by_rule(self, part: MegatronPart, buffer: Buffer, total: int) -> tuple[int, ...] | None:
        begins = np.cumsum([0, *(bucket.numel_unpadded for bucket in buffer.buckets)]).tolist()
        starts = [begins[b] + buffer.starts[i] for b, k in enumerate(buffer.buckets) for i in range(k.first, k.last)]
        locals_ = [part.local_params[i] for i in buffer.params]
        closed = [k.numel_unpadded for k in buffer.buckets[:-1]]
        thresholds = [] if not closed else [min(closed)]
        for shared in _shared_choices(locals_, self.options.tied):
            params = [
                PlacedParam(local.name, local.numel, local.buffer_key, i in shared, start)
                for i, (local, start) in enumerate(zip(locals_, starts, strict=True))
            ]
            overlaps = part.pipeline_rank in (None, 0)
            found = buckets_by_rule(params, total, self.args, thresholds, overlaps=overlaps)
            if found is not None:
                sizes = [bucket.numel_unpadded for bucket in found.buckets]
                return tuple(np.cumsum(sizes).tolist()[:-1])
        return None


def _shared_choices(locals_: Sequence[LocalParam], tied: bool) -> list[frozenset[int]]:
    """Which params may be embeddings that stages share: none, or one whose name is an embedding's. Where the model is
    ``tied``, that one first.
    """
    ends = ("embedding.weight", "embeddings.weight", "output_layer.weight")
    named = [i for i, local in enumerate(locals_) if any(held.key.endswith(ends) for held in local.boxes)]
    none, each = frozenset[int](), [frozenset((i,)) for i in named]
    return [*each, none] if tied else [none, *each]


def _combined(choices: Sequence[Sequence[_Cut]]) -> list[tuple[_Cut, ...]]:
    """One choice for each buffer; where those are too many, the first of each but one."""
    combined: list[tuple[_Cut, ...]] = [()]
    for own in choices:
        chosen = own if len(combined) * len(own) <= _MOST else own[:1]
        combined = [(*before, one) for before in combined for one in chosen]
    return combined


def _doubt(part: MegatronPart) -> tuple[int, int]:
    return len(part.evidence.unknown), len(part.evidence.unproved)


def _agreed(parts: Sequence[MegatronPart]) -> MegatronPart:
    """The first of several maps; params that another one places elsewhere are ambiguous."""
    first = parts[0]
    differ = {name for other in parts[1:] for name in _differences(first, other)}
    return _with_ambiguous(first, differ)


def _with_ambiguous(part: MegatronPart, more: Collection[str]) -> MegatronPart:
    old = part.evidence
    names = [param.name for param in part.catalog.state.params]
    ambiguous = tuple(name for name in names if name in more or name in old.ambiguous)
    return replace(part, evidence=Evidence(old.by, old.elements, old.proved, ambiguous, old.unproved, old.unknown))


def _differences(one: MegatronPart, other: MegatronPart) -> Iterator[str]:
    places = _places(other)
    for name, place in _places(one).items():
        if places.get(name) != place:
            yield name


def _places(part: MegatronPart) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Where each param's elements lie, by name."""
    found: dict[str, tuple[tuple[int, ...], ...]] = {}
    assert part.layout is not None
    params = part.catalog.state.params
    for buffer in part.layout.buffers:
        at = 0
        for bucket in buffer.buckets:
            for i in range(bucket.first, bucket.last):
                local = part.local_params[buffer.params[i]]
                name = params[local.param].name
                found[name] = (*found.get(name, ()), (buffer.index, local.start, at + buffer.starts[i]))
            at += bucket.numel_unpadded
    return {name: tuple(sorted(rows)) for name, rows in found.items()}

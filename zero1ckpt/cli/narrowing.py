"""``--rank``, ``--param``, ``--bucket`` and ``--group``: which rows of a checkpoint are asked for. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..core.errors import UsageError
from ..core.layout import BufferLayout, Fragments
from ..core.ranges import IntColumn
from ..model.catalog import Catalog
from .text import some

__all__ = ["Narrowing", "Selection", "select"]


@dataclass(frozen=True, slots=True)
class Narrowing:
    """What is asked for; None where all is.

    ``bucket`` is (buffer or None, index); ``param`` a name or a pattern; ``group`` a number, or the name of a part.
    """

    rank: int | None = None
    param: str | None = None
    bucket: tuple[int | None, int] | None = None
    group: int | str | None = None

    @property
    def whole(self) -> bool:
        return (self.rank, self.param, self.bucket, self.group) == (None,) * 4


@dataclass(frozen=True)
class Selection:
    """The rows of one part that are left. ``mask`` is over its params; ``buckets`` holds indices for each buffer."""

    catalog: Catalog
    narrowing: Narrowing
    mask: npt.NDArray[np.bool_]
    buckets: tuple[IntColumn, ...]

    @property
    def whole(self) -> bool:
        return self.narrowing.whole

    @property
    def keeps_empty_ranks(self) -> bool:
        """Whether ranks that own nothing but padding are shown."""
        only_rank = Narrowing(rank=self.narrowing.rank)
        return self.narrowing == only_rank

    @property
    def params(self) -> IntColumn:
        return np.flatnonzero(self.mask)

    @property
    def empty(self) -> bool:
        return not self.mask.any() and not any(len(buckets) for buckets in self.buckets)

    def buffers(self) -> Iterator[tuple[int, BufferLayout]]:
        """Buffers that hold something of the selection, with their index."""
        layout = self.catalog.layout
        for i, buffer in enumerate(layout.buffers if layout else ()):
            if len(self.buckets[i]):
                yield i, buffer

    def buffer(self, index: int) -> BufferLayout:
        assert self.catalog.layout is not None
        return self.catalog.layout.buffers[index]

    def padding(self, buffer: int, bucket: int) -> int:
        """Elements of a bucket that belong to no param: its tail, and the gaps before aligned params."""
        layout = self.buffer(buffer)
        it = layout.bucket(bucket)
        held = layout.end[it.first : it.last] - layout.start[it.first : it.last]
        return it.numel - int(held.sum())

    def ranks(self) -> Sequence[int]:
        """Ranks that may own something."""
        layout = self.catalog.layout
        if layout is None:
            return ()
        if self.narrowing.rank is not None:
            return (self.narrowing.rank,) if self.narrowing.rank < layout.rules.dp_size else ()
        return range(layout.rules.dp_size) if self.keeps_empty_ranks else self._owners.tolist()

    def owners(self) -> Sequence[int] | IntColumn:
        """Blobs that hold something of the selection; all of them where it is whole."""
        if self.whole:
            return range(self.catalog.placement.blob_count)
        if self.narrowing.rank is not None:
            return self.ranks()
        return self._owners

    @cached_property
    def _owners(self) -> IntColumn:
        if self.catalog.layout is None:
            return self._located()
        found = [self._all_fragments(i).rank for i, _ in self.buffers()]
        return np.unique(np.concatenate(found)) if found else np.empty(0, np.int64)

    def _located(self) -> IntColumn:
        """Blobs of the selected params where there is no layout to tell."""
        state = self.catalog.state
        params, slots = self.params, np.arange(len(state.slots))
        size = np.array([state.params[i].numel for i in params.tolist()], np.int64)
        row = np.repeat(np.arange(len(params)), len(slots))
        start = np.zeros(len(row), np.int64)
        _, extents = self.catalog.placement.locate(params[row], np.tile(slots, len(params)), start, size[row])
        blobs: IntColumn = np.unique(extents.blob)
        return blobs

    def fragments(self, buffer: int, ranks: Sequence[int]) -> Fragments:
        """What some ranks own of the selection in one buffer, ordered by rank and place."""
        if len(ranks) > 8:
            return self._all_fragments(buffer)
        layout = self.buffer(buffer)
        tables = [layout.fragments(rank) for rank in ranks] or [_take(layout.fragments(0), np.empty(0, np.int64))]
        table = _join(tables)
        return _take(table, np.flatnonzero(self.mask[table.param]))

    def _all_fragments(self, buffer: int) -> Fragments:
        layout = self.buffer(buffer)
        place = np.flatnonzero(self.mask[layout.param])
        size = (layout.end - layout.start)[place]
        _, table = layout.owners(place, np.zeros(len(place), np.int64), size)
        return _take(table, np.lexsort((table.world, table.rank)))


def select(catalogs: Mapping[str, Catalog], narrowing: Narrowing) -> dict[str, Selection]:
    """What is left of each part. Raises ``UsageError`` that names what is there where nothing is."""
    catalogs, narrowing = _of_part(catalogs, narrowing)
    _refuse_unknown(list(catalogs.values()), narrowing)
    found = {part: _select(catalog, narrowing) for part, catalog in catalogs.items()}
    if narrowing.whole:
        return found
    left = {part: selection for part, selection in found.items() if not selection.empty}
    if not left and narrowing == Narrowing(rank=narrowing.rank):
        return found  # a rank that owns nothing but padding
    if not left:
        raise UsageError(
            "nothing is left: the options of inspect narrow each other",
            found=_describe(narrowing),
            expected="a combination that some param is part of",
            hint="leave one of them out",
        )
    return left


def _of_part(catalogs: Mapping[str, Catalog], narrowing: Narrowing) -> tuple[Mapping[str, Catalog], Narrowing]:
    """A group that is the name of a part, or the end of one's name, stands for that part: no narrowing inside it."""
    wanted = narrowing.group
    if not isinstance(wanted, str):
        return catalogs, narrowing
    found = [part for part in catalogs if part == wanted] or [part for part in catalogs if wanted in part.split(".")]
    if not found:
        raise UsageError(
            "--group: there is no such group or part",
            found=wanted,
            expected="the number of a group" + (f", or one of {some(list(catalogs))}" if len(catalogs) > 1 else ""),
        )
    return {part: catalogs[part] for part in found}, replace(narrowing, group=None)


def _select(catalog: Catalog, narrowing: Narrowing) -> Selection:
    params = catalog.state.params
    mask = np.ones(len(params), np.bool_)
    if narrowing.param is not None:
        wanted = set(_matching(catalog, narrowing.param))
        mask &= np.array([param.name in wanted for param in params], np.bool_)
    if narrowing.group is not None:
        mask &= np.array([param.group == narrowing.group for param in params], np.bool_)
    layout = catalog.layout
    if layout is None:
        return Selection(catalog, narrowing, mask, ())
    if narrowing.bucket is not None:
        mask &= _in_bucket(layout.buffers, len(params), narrowing.bucket)
    if narrowing.rank is not None:
        owned = np.zeros(len(params), np.bool_)
        for buffer in layout.buffers if narrowing.rank < layout.rules.dp_size else ():
            owned[buffer.fragments(narrowing.rank).param] = True
        mask &= owned
    if narrowing.whole:
        buckets = tuple(np.arange(buffer.bucket_count) for buffer in layout.buffers)
    else:
        buckets = tuple(np.unique(buffer.bucket_of[mask[buffer.param]]) for buffer in layout.buffers)
    if narrowing.rank is not None:
        buckets = tuple(_of_rank(b, m, mask, narrowing.rank) for b, m in zip(layout.buffers, buckets, strict=True))
    return Selection(catalog, narrowing, mask, buckets)


def _of_rank(buffer: BufferLayout, buckets: IntColumn, mask: npt.NDArray[np.bool_], rank: int) -> IntColumn:
    """Those buckets in which the rank owns something that is asked for."""
    if rank >= buffer.rules.dp_size:
        return np.empty(0, np.int64)
    table = buffer.fragments(rank)
    return np.intersect1d(buckets, table.bucket[mask[table.param]])


def _in_bucket(buffers: Sequence[BufferLayout], count: int, wanted: tuple[int | None, int]) -> npt.NDArray[np.bool_]:
    mask = np.zeros(count, np.bool_)
    for i, buffer in enumerate(buffers):
        if wanted[0] in (None, i):
            mask[buffer.param[buffer.bucket_of == wanted[1]]] = True
    return mask


def _matching(catalog: Catalog, pattern: str) -> list[str]:
    """The param of that name, else those that a pattern with ``*`` matches."""
    if pattern in catalog.state.index:
        return [pattern]
    from fnmatch import fnmatchcase

    return [name for name in catalog.state.index if fnmatchcase(name, pattern)]


def _refuse_unknown(catalogs: Sequence[Catalog], narrowing: Narrowing) -> None:
    """Raises ``UsageError`` for an option that on its own means nothing here."""
    if narrowing.param is not None and not any(_matching(catalog, narrowing.param) for catalog in catalogs):
        raise UsageError("--param: there is no such param", found=narrowing.param, expected=_near(catalogs, narrowing))
    if isinstance(narrowing.group, int):
        groups = max(len(catalog.state.groups) for catalog in catalogs)
        _refuse_index("--group", "group", narrowing.group, groups)
    layouts = [catalog.layout for catalog in catalogs if catalog.layout is not None]
    if not layouts and (narrowing.rank is not None or narrowing.bucket is not None):
        raise UsageError("this format has no ranks or buckets", hint="leave out --rank and --bucket")
    if narrowing.rank is not None:
        _refuse_index("--rank", "rank", narrowing.rank, max(layout.rules.dp_size for layout in layouts))
    if narrowing.bucket is not None:
        buffer, bucket = narrowing.bucket
        if buffer is not None:
            _refuse_index("--bucket", "buffer", buffer, max(len(layout.buffers) for layout in layouts))
        counts = [
            b.bucket_count for layout in layouts for i, b in enumerate(layout.buffers) if buffer is None or i == buffer
        ]
        _refuse_index("--bucket", "bucket", bucket, max(counts, default=0))


def _refuse_index(option: str, what: str, index: int, count: int) -> None:
    if index >= count:
        expected = f"0 to {count - 1}" if count else "none: there are none"
        raise UsageError(f"{option}: there is no such {what}", found=index, expected=expected)


def _near(catalogs: Sequence[Catalog], narrowing: Narrowing) -> str:
    from difflib import get_close_matches

    names = [name for catalog in catalogs for name in catalog.state.index]
    wanted = narrowing.param or ""
    near = get_close_matches(wanted, names, 5, 0.5) or [name for name in names if wanted in name]
    return f"one like {some(near)}" if near else f"one of {some(names)}"


def _describe(narrowing: Narrowing) -> str:
    bucket = None
    if narrowing.bucket is not None:
        bucket = ".".join(str(i) for i in narrowing.bucket if i is not None)
    options = {"rank": narrowing.rank, "param": narrowing.param, "bucket": bucket, "group": narrowing.group}
    return " ".join(f"--{name} {value}" for name, value in options.items() if value is not None)


def _take(table: Fragments, rows: IntColumn) -> Fragments:
    columns = (table.param, table.bucket, table.rank, table.world, table.local, table.param_start, table.size)
    return Fragments(table.buffer, *(column[rows] for column in columns))


def _join(tables: Sequence[Fragments]) -> Fragments:
    if len(tables) == 1:
        return tables[0]
    names = ("param", "bucket", "rank", "world", "local", "param_start", "size")
    columns = (np.concatenate([getattr(table, name) for table in tables]) for name in names)
    return Fragments(tables[0].buffer, *columns)

"""Places the params of a rank in what was gathered of its buffers: by the order that files state, and by content."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...core.casting import same_after_cast
from ...core.dtypes import itemsize
from ...core.errors import UnsupportedError
from ...core.layout import BufferKey
from ...encodings.torch_archive import check_member
from ...model.state import MAIN_PARAM
from .entries import ChunkSource, Entries
from .gathered_layout import PlacedParam, starts_by_rule
from .legacy_ranks import MODEL_FILE, OPTIMIZER_FILE, RankTensors, Weight, World, world_runs
from .model import Bucket
from .zero_gather import Item, Walk, walk_in_order

__all__ = ["Placed", "distinct", "place_all"]

_QUICK = 1024
"""Elements at each end of a param that are looked at to place it."""
_WINDOW = 1 << 20


@dataclass(frozen=True, slots=True)
class Placed:
    """A buffer whose params are placed: weights in place order, with their starts in the gathered tensors."""

    world: World
    weights: tuple[Weight, ...]
    starts: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    ambiguous: tuple[str, ...]
    worlds: tuple[int | None, ...] = ()


def distinct(weights: Sequence[Weight]) -> list[Weight]:
    """Without second names of the same tensor, as ``named_parameters`` gives them."""
    seen: set[tuple[str, int, tuple[int, ...]]] = set()
    found = []
    for weight in weights:
        view = (weight.storage, weight.offset, weight.shape)
        if view not in seen or not weight.numel:
            seen.add(view)
            found.append(weight)
    return found


def place_all(
    entries: Entries, one: RankTensors, members: Sequence[Weight], worlds: Sequence[World]
) -> tuple[Placed, ...]:
    """The params of every buffer: buffers of one model chunk follow each other, those of the next come after."""
    found: list[Placed] = []
    todo = list(worlds)
    for virtual in sorted({weight.virtual for weight in members}):
        mine = [weight for weight in members if weight.virtual == virtual]
        dtypes = {weight.dtype for weight in mine}
        while todo and (todo[0].param_dtype in dtypes or (todo[0].param_dtype is None and dtypes)):
            world = todo.pop(0)
            dtype = world.param_dtype
            fitting = [weight for weight in mine if dtype in (None, weight.dtype)]
            dtypes -= {weight.dtype for weight in fitting}
            found.append(_Placer(entries, one, world, fitting).place())
    if todo:
        raise UnsupportedError(
            "the checkpoint has a buffer of a dtype that its model has no weights of",
            file=entries.store.label(one.rank.file(OPTIMIZER_FILE)),
            found=todo[0].param_dtype,
        )
    return tuple(found)


@dataclass(frozen=True)
class _Placer:
    """Places the params of one buffer."""

    entries: Entries
    one: RankTensors
    world: World
    weights: Sequence[Weight]

    @property
    def source(self) -> ChunkSource:
        return ChunkSource(self.entries.store, self.entries.chunks)

    def place(self) -> Placed:
        for order, items in self.orders():
            for align in (64, 1) if self.world.bounds is not None else (64,):
                walk = self.walk(order, items, align)
                if walk is not None:
                    return self.placed(order, items, walk)
        self.check_files()
        found = self.by_rule_alone()
        if found is not None:
            return found
        raise UnsupportedError(
            "no order of buckets makes the main params the model's weights: where each param lies cannot be known",
            file=self.entries.store.label(self.one.rank.file(OPTIMIZER_FILE)),
            param=f"buffer {self.world.index}",
            found=f"{len(self.weights)} weights for {self.world.total} elements",
        )

    def by_rule_alone(self) -> Placed | None:
        """Places by the layout rule, where it gives the padded places that the views show, and some of the content:
        weights that were changed afterwards then stand out, instead of hiding where all others are.
        """
        views = self.by_view()
        if not views:
            return None
        items = [Item(w.numel, world=w.offset) for w in views]
        expert = bool(views) and all(weight.expert for weight in views)
        key = BufferKey(views[0].dtype, self.world.grad_dtype, expert)
        choices: list[frozenset[int]] = [frozenset(), *(frozenset((i,)) for i, w in enumerate(views) if w.embedding)]
        for shared in choices:
            params = [PlacedParam(w.key, w.numel, key, i in shared, 0, w.offset) for i, w in enumerate(views)]
            overlaps = self.one.rank.pp == 0 and views[0].virtual == 0
            starts = starts_by_rule(params, self.world.total, self.one.rank.args, overlaps=overlaps)
            if starts is None or self.world.bounds is not None:
                continue
            same = [self.same(weight, start, _QUICK) for weight, start in zip(views, starts, strict=True)]
            if 2 * sum(same) > len(same):
                walk = Walk(starts, tuple(frozenset[int | None]() for _ in views), tuple(False for _ in views))
                return self.placed(views, items, walk)
        return None

    def check_files(self) -> None:
        """Proves the rank's files by their checksums. Raises ``CorruptError``: then damage is why nothing agrees."""
        rank = self.one.rank
        for name, archive in ((OPTIMIZER_FILE, rank.optimizer), (MODEL_FILE, rank.model)):
            for member in () if archive is None else archive.members.values():
                check_member(self.entries.store, rank.file(name), member)

    def orders(self) -> Iterator[tuple[list[Weight], list[Item]]]:
        """Place orders that are possible, likeliest first: by the views' places, then by the state dict, reversed."""
        views = self.by_view()
        if views:
            yield views, [Item(w.numel, world=w.offset) for w in views]
        order = list(reversed(self.weights))
        yield order, [Item(w.numel) for w in order]
        yield order, [Item(w.numel, optional=True) for w in order]

    def by_view(self) -> list[Weight]:
        """Weights that are views of one storage, by their place in it, where those places can be a buffer's."""
        storages: dict[str, list[Weight]] = {}
        for weight in self.weights:
            storages.setdefault(weight.storage, []).append(weight)
        best = max(storages.values(), key=lambda views: sum(w.numel for w in views), default=[])
        best = sorted(best, key=lambda weight: weight.offset)
        disjoint = all(a.offset + a.numel <= b.offset for a, b in pairwise(best))
        aligned = all(weight.offset % 64 == 0 for weight in best)
        return best if len(best) > 1 and disjoint and aligned and best[0].offset == 0 else []

    def walk(self, order: Sequence[Weight], items: Sequence[Item], align: int) -> Walk | None:
        known: dict[tuple[int, int], bool] = {}

        def matches(index: int, start: int) -> bool:
            if (index, start) not in known:
                known[index, start] = self.same(order[index], start, _QUICK)
            return known[index, start]

        def run(empty: Callable[[int, int], bool]) -> Walk | None:
            return walk_in_order(items, self.world.total, matches, bounds=self.world.bounds, align=align, empty=empty)

        found = run(lambda start, end: True)
        if found is None or not any(found.others):
            return found
        for index, item_starts in enumerate(found.others):
            for start in (*item_starts, found.starts[index]):
                if item_starts and start is not None:
                    known[index, start] = self.same(order[index], start, None)
        # Biases that are still zero look like the gap beside them, their moments do not: gaps are gathered as zeros.
        return run(self.empty) or run(lambda start, end: True)

    def empty(self, start: int, end: int) -> bool:
        """Whether all slots are zero in a range."""
        return not any(any(self.read(slot, start, end - start)) for slot in self.world.slots)

    def same(self, weight: Weight, start: int, ends: int | None) -> bool:
        """Whether main params from ``start`` on are a weight's, when cast; of all elements, or of those at its ends."""
        if start + weight.numel > self.world.total:
            return False
        if ends is None or weight.numel <= 2 * ends:
            windows = [(at, min(_WINDOW, weight.numel - at)) for at in range(0, weight.numel, _WINDOW)]
        else:
            windows = [(0, ends), (weight.numel - ends, ends)]
        for at, size in windows:
            main = self.read(MAIN_PARAM, start + at, size)
            stored = bytearray(size * itemsize(weight.dtype))
            self.source.read_run(weight.chunk, at * itemsize(weight.dtype), [memoryview(stored)])
            if not same_after_cast(memoryview(main), "float32", memoryview(stored), weight.dtype).all():
                return False
        return True

    def read(self, slot: str, start: int, size: int) -> bytearray:
        out = bytearray(size * 4)
        view = memoryview(out)
        for chunk, at, begin, count in world_runs(self.world, slot, start, size):
            self.source.read_run(chunk, at * 4, [view[begin * 4 : (begin + count) * 4]])
        return out

    def placed(self, order: Sequence[Weight], items: Sequence[Item], walk: Walk) -> Placed:
        rows = [i for i, start in enumerate(walk.starts) if start is not None]
        weights = tuple(order[i] for i in rows)
        starts = tuple(start for start in walk.starts if start is not None)
        ambiguous = tuple(
            order[i].name for i, others in enumerate(walk.others) if self.differ(order[i], walk, i, others)
        )
        fresh = [walk.fresh[i] for i in rows]
        worlds = [items[i].world for i in rows]
        buckets = _buckets(weights, starts, fresh, worlds)
        return Placed(self.world, weights, starts, buckets, ambiguous, tuple(worlds))

    def differ(self, weight: Weight, walk: Walk, index: int, others: frozenset[int | None]) -> bool:
        """Whether another map would give a param other values, in any slot."""
        own = walk.starts[index]
        for other in others:
            if own is None or other is None:
                return True
            for slot in self.world.slots:
                for at in range(0, weight.numel, _WINDOW):
                    size = min(_WINDOW, weight.numel - at)
                    if self.read(slot, own + at, size) != self.read(slot, other + at, size):
                        return True
        return False


def _buckets(
    weights: Sequence[Weight],
    starts: Sequence[int],
    fresh: Sequence[bool],
    worlds: Sequence[int | None],
) -> tuple[Bucket, ...]:
    """Buckets in place order, as far as the places show them. ``numel``: where views of the padded buffer tell it."""
    first = [i for i in range(len(weights)) if i == 0 or fresh[i] or _tail(weights, worlds, i)]
    edges = [*first, len(weights)]
    found = []
    for low, high in pairwise(edges):
        begin = starts[low]
        end = starts[high] if high < len(weights) else starts[-1] + weights[-1].numel
        numel = None
        at, after = worlds[low], (worlds[high] if high < len(weights) else weights[0].storage_numel)
        if at is not None and after is not None:
            numel = after - at
        found.append(Bucket(end - begin, numel, low, high))
    return tuple(found)


def _tail(weights: Sequence[Weight], worlds: Sequence[int | None], index: int) -> bool:
    """Whether the padded buffer shows a bucket's tail before a param."""
    before, at = worlds[index - 1], worlds[index]
    if before is None or at is None:
        return False
    end = before + weights[index - 1].numel
    return at > end + -end % 64

"""A legacy checkpoint as a source of torch_dist: its ranks' tensors as pieces of those of all ranks.

Where each piece lies is what the table of ``legacy_keys`` says, or a layout file of the run. What several ranks hold
(tensors that are not cut, embeddings that stages share) is written once; that they hold the same is proved when it is
written (``Origin.twins``), and here where the table does not know a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod

import numpy as np

from ....core.boxes import Box
from ....core.errors import CorruptError, UnsupportedError
from ....encodings.inert_pickle import TensorRef, Value
from ....encodings.torch_archive import Archive, read_archive, tensor_itemsize
from ..common import chained_values, common_of
from ..entries import Place
from ..layout_file import LayoutFile, LayoutParam
from ..legacy_keys import EMBEDDING, EXTRA, OUTPUT, Keys, Seat, Spot, layer_offsets, object_key
from ..legacy_ranks import CHUNK, EXPERT, MODEL_FILE, OPTIMIZER_FILE, coordinates
from ..model import KeyBox, LocalParam
from .buckets import group_prefix
from .items import FileItem, Item, Piece, SliceItem, read_piece
from .origin import Origin, OriginPart, OriginTensor, Twin
from .values import StateValue, part_of

__all__ = ["with_global_keys"]

_FOLDER = re.compile(rf"([^/]+)/{re.escape(MODEL_FILE)}")
_WINDOW = 1 << 22
"""Bytes, or elements, that are compared at a time."""


def with_global_keys(origin: Origin, layout: LayoutFile | None, *, by_key: bool) -> Origin:
    """The same source with the keys, tensors and objects that torch_dist would have. ``by_key``: a param's state goes
    by the key of its weight.

    Reads the ranks' pickles, and tensors only where nothing else tells whether ranks hold copies.
    Raises ``UnsupportedError`` for what cannot be known, ``CorruptError``.
    """
    translation = _Translation(origin, tuple(_ranks(origin)), layout)
    made = translation.made()
    if by_key:
        translation.check_names()
    return made


# --------------------------------------------------------------------------------------------------------------- ranks


@dataclass(frozen=True, eq=False)
class _Rank:
    """One rank's model file. ``at``: its seat but for the virtual chunk; ``file``: where it lies in the store."""

    folder: str
    at: Seat
    archive: Archive
    file: str

    @property
    def state(self) -> Mapping[str, Value]:
        value: Mapping[str, Value] = self.archive.value
        return value

    @cached_property
    def chunks(self) -> tuple[tuple[int, Mapping[str, Value]], ...]:
        """Virtual chunks of the model, in order."""
        found = [(int(m[1] or 0), item) for key, item in self.state.items() if (m := CHUNK.fullmatch(str(key)))]
        return tuple(sorted(found, key=lambda pair: pair[0]))

    def tensors(self) -> Iterator[tuple[Seat, str, TensorRef]]:
        """Tensors of the model, by name. Raises ``UnsupportedError`` for what is none."""
        for virtual, chunk in self.chunks:
            for name, value in chunk.items():
                if name.endswith(EXTRA):
                    continue
                if not isinstance(value, TensorRef):
                    raise UnsupportedError(
                        "the model's state holds something else than tensors, as before Megatron-Core's models",
                        file=self.archive.file,
                        param=name,
                        found=type(value).__name__,
                        hint="convert it to Megatron-Core's models first",
                    )
                yield replace(self.at, virtual=virtual), name, value

    def extras(self) -> Iterator[tuple[Seat, str, Value]]:
        for virtual, chunk in self.chunks:
            for name, value in chunk.items():
                if name.endswith(EXTRA):
                    yield replace(self.at, virtual=virtual), name, value

    def key(self, seat: Seat, name: str) -> str:
        """How the boxes of a legacy checkpoint's params name a tensor."""
        return f"{self.folder}/{f'model{seat.virtual}/' if len(self.chunks) > 1 else ''}{name}"


def _ranks(origin: Origin) -> list[_Rank]:
    """All ranks by (pp, ep, tp)."""
    opened: list[tuple[str, str, Archive]] = []
    for path, item in sorted(origin.files.items()):
        found = _FOLDER.fullmatch(path)
        if found is not None:
            file, at = item.place()
            archive = read_archive(origin.store, file, offset=at, length=item.nbytes)
            if not isinstance(archive.value, dict):
                raise CorruptError("the file holds no dict", file=archive.file, found=type(archive.value).__name__)
            opened.append((found[1], file, archive))
    if not opened:
        raise CorruptError("the checkpoint has no model of any rank", file=origin.label, expected=MODEL_FILE)
    args = common_of(opened[0][2].value).args
    ranks = [_Rank(name, Seat(*coordinates(name, args, file)), archive, file) for name, file, archive in opened]
    return sorted(ranks, key=lambda rank: (rank.at.pp, rank.at.ep, rank.at.tp))


# --------------------------------------------------------------------------------------------------------- translation


@dataclass(frozen=True)
class _Held:
    """A rank's tensor: its bytes, and where they lie in the tensor of all ranks."""

    key: str
    spot: Spot
    dtype: str
    item: Item


@dataclass(frozen=True)
class _Translation:
    origin: Origin
    ranks: tuple[_Rank, ...]
    layout: LayoutFile | None

    def made(self) -> Origin:
        held = list(self.held())
        spots = {one.key: one.spot for one in held}
        parts = tuple(self.part(part, spots) for part in self.origin.parts)
        tensors, twins = _joined(held, self.origin.label)
        self.check_guesses(held, parts)
        values = self.values(spots)
        own = (f"/{MODEL_FILE}", f"/{OPTIMIZER_FILE}")
        return replace(
            self.origin,
            parts=parts,
            tensors=tensors,
            objects=dict.fromkeys(values, 0),
            files={path: item for path, item in self.origin.files.items() if not path.endswith(own)},
            values=values,
            common_made=self.common(),
            twins=tuple(twins),
        )

    def check_names(self) -> None:
        """Raises ``UnsupportedError`` for a param of two names: Megatron keeps its state under one of their keys."""
        for rank in self.ranks:
            seen: dict[tuple[str, int, tuple[int, ...]], str] = {}
            for _, name, ref in rank.tensors():
                first = seen.setdefault((ref.storage.key, ref.offset, tuple(ref.shape)), name)
                if first != name and ref.numel:
                    raise UnsupportedError(
                        "a param has two names, and under which of them its state would lie is not known",
                        file=rank.archive.file,
                        param=name,
                        found=f"the same tensor as {first}",
                        hint="choose megatron:dp_reshardable",
                    )

    # --------------------------------------------------------------------------------------------------------- tensors

    @cached_property
    def keys(self) -> Keys:
        """What the table says; ``tied`` is settled by content where the args do not say it."""
        first = self.ranks[0]
        args = common_of(first.state).args
        shapes = {(seat, name): tuple(ref.shape) for rank in self.ranks for seat, name, ref in rank.tensors()}
        sizes = [1 + max(getattr(rank.at, axis) for rank in self.ranks) for axis in ("tp", "pp", "ep")]
        offsets = layer_offsets(((s.pp, s.virtual, n) for s, n in shapes), args.num_layers, self.origin.label)
        grid = (sizes[0], sizes[1], sizes[2])
        keys = Keys(self.origin.label, grid, args, offsets, shapes)
        return replace(keys, tied=self.tied(sizes[1], args.untied_embeddings))

    def tied(self, pipelines: int, untied: bool | None) -> bool:
        """Whether the last stage's output layer is a copy of the first's embedding."""
        first = [one for one in self.refs if one[2] == EMBEDDING and one[1].pp == 0]
        last = [one for one in self.refs if one[2] == OUTPUT and one[1].pp > 0]
        if pipelines == 1 or not first or not last:
            return False
        if untied is not None:
            return not untied
        (a, _, _, ref), (b, _, _, other) = first[0], last[0]
        return tuple(ref.shape) == tuple(other.shape) and _same(self.item(a, ref), self.item(b, other))

    @cached_property
    def refs(self) -> tuple[tuple[_Rank, Seat, str, TensorRef], ...]:
        return tuple((rank, seat, name, ref) for rank in self.ranks for seat, name, ref in rank.tensors())

    def held(self) -> Iterator[_Held]:
        for rank, seat, name, ref in self.refs:
            yield _Held(rank.key(seat, name), self.spot(rank, seat, name, ref), ref.dtype, self.item(rank, ref))

    def item(self, rank: _Rank, ref: TensorRef) -> Item:
        place = rank.archive.locate(ref)
        if not place.contiguous:
            raise UnsupportedError("a tensor is not stored row by row", file=rank.archive.file)
        at: Place = (rank.file, place.offset)
        return FileItem(self.origin.store, lambda: at, place.nbytes)

    def spot(self, rank: _Rank, seat: Seat, name: str, ref: TensorRef) -> Spot:
        """By the layout file where it has the name, else by the table."""
        row = self.row(seat, name)
        if row is None or not row.boxes:
            return self.keys.spot(seat, name)
        first = row.boxes[0]
        if tuple(row.shape) != tuple(ref.shape) or {(b.key, b.shape) for b in row.boxes} != {(first.key, first.shape)}:
            raise UnsupportedError(
                "the layout file does not fit the checkpoint's tensors",
                file=rank.archive.file,
                param=name,
                found=f"shape {list(ref.shape)}",
                expected=f"shape {list(row.shape)}",
                hint="use the layout file of the run that wrote the checkpoint",
            )
        return Spot(first.key, tuple(first.shape), tuple(box.box.box for box in row.boxes))

    def row(self, seat: Seat, name: str) -> LayoutParam | None:
        """A param's row of the layout file. Ranks that no part lies in hold what their expert rank 0 holds."""
        ep = seat.ep if EXPERT.search(name) else 0
        return None if seat.virtual else self._rows.get((seat.tp, seat.pp, ep, name))

    @cached_property
    def _rows(self) -> Mapping[tuple[int, int, int, str], LayoutParam]:
        found: dict[tuple[int, int, int, str], LayoutParam] = {}
        for part in self.origin.parts if self.layout is not None else ():
            group = self.layout.group(part.chained, part.group) if self.layout is not None else None
            seat = self.rank_of(part).at
            for buffer in () if group is None else group.buffers:
                found |= {(seat.tp, seat.pp, seat.ep, row.name): row for row in buffer.params}
        return found

    # ----------------------------------------------------------------------------------------------------------- parts

    def rank_of(self, part: OriginPart) -> _Rank:
        """The rank whose file holds a part's state."""
        folders = {held.key.partition("/")[0] for local in part.local_params for held in local.boxes}
        found = [rank for rank in self.ranks if rank.folder in folders]
        if len(found) != 1:
            raise CorruptError("the rank that holds a part is not known", file=self.origin.label, found=part.name)
        return found[0]

    def part(self, part: OriginPart, spots: Mapping[str, Spot]) -> OriginPart:
        """The part with boxes of the tensors of all ranks. Embeddings that stages share have buckets of their own."""
        rank = self.rank_of(part)
        rows = {rank.key(seat, name): self.row(seat, name) for seat, name, _ in rank.tensors()}
        made = []
        for local in part.local_params:
            old = local.boxes[0].key
            row, spot = rows[old], spots[old]
            shared = row.shared_embedding if row is not None else bool(self.keys.tied) and spot.key == EMBEDDING
            boxes = tuple(KeyBox(spot.key, box) for box in spot.boxes)
            made.append(replace(local, boxes=boxes, shared_embedding=local.shared_embedding or shared))
        return replace(part, local_params=tuple(made))

    def check_guesses(self, held: Sequence[_Held], parts: Sequence[OriginPart]) -> None:
        """Raises ``UnsupportedError`` for a tensor that the table does not know, unless its state proves it copied."""
        for key in sorted({one.spot.key for one in held if not one.spot.sure}):
            boxes = {one.spot.boxes for one in held if one.spot.key == key}
            if not all(self.is_copied(key, own, held, parts) for own in boxes):
                raise UnsupportedError(
                    "whether tensor parallelism cuts this tensor, and along which axis, is not known",
                    file=self.origin.label,
                    param=key,
                    found="a name that is not Megatron's own, and ranks whose state does not prove it the same",
                    hint="write it from the training script and pass it with --layout, or choose megatron:legacy",
                )

    def is_copied(self, key: str, boxes: tuple[Box, ...], held: Sequence[_Held], parts: Sequence[OriginPart]) -> bool:
        """Whether all ranks hold the same, in every slot: moments are the same by chance only if they are constant."""
        items = [one.item for one in held if one.spot.key == key and one.spot.boxes == boxes]
        owners = [
            (part, local)
            for part in parts
            for local in part.local_params
            if tuple(box.box for box in local.boxes) == boxes and local.boxes[0].key == key
        ]
        if len(owners) < 2 or not all(_same(items[0], item) for item in items[1:]):
            return False
        found = [_compared(owners[0], other) for other in owners[1:]]
        return all(same and varied for same, varied in found)

    # --------------------------------------------------------------------------------------------------------- objects

    def values(self, spots: Mapping[str, Spot]) -> dict[str, StateValue]:
        """Groups of each data-parallel group, extra states, and the state of the random generators."""
        found: dict[str, StateValue] = {}
        for part in self.origin.parts:
            rank = self.rank_of(part)
            states = chained_values(rank.state.get("optimizer"))
            state = states[part.chained or 0] if len(states) > (part.chained or 0) else None
            if not isinstance(state, dict):
                raise CorruptError("the file holds no optimizer groups of a part", file=rank.archive.file)
            for field, value in state.items():
                found[f"{group_prefix(part)}.{field}/shard_0_1"] = self.value(rank, value)
        for rank in self.ranks:
            for seat, name, value in rank.extras():
                key = self.extra_key(rank, seat, name, spots)
                if key is not None and key not in found:
                    found[key] = self.value(rank, value)
        return found | dict(self.random())

    def random(self) -> Iterator[tuple[str, StateValue]]:
        sizes = [1 + max(getattr(rank.at, axis) for rank in self.ranks) for axis in ("pp", "tp")]
        for rank in self.ranks:
            if "rng_state" in rank.state and rank.at.ep == 0:
                front = zip((rank.at.pp, rank.at.tp), sizes, strict=True)
                yield object_key("rng_state", front), self.value(rank, rank.state["rng_state"])

    def extra_key(self, rank: _Rank, seat: Seat, name: str, spots: Mapping[str, Spot]) -> str | None:
        """Beside the weight of its module, where the layout file places that; else by the table."""
        weight = f"{name.removesuffix(EXTRA)}weight"
        spot = spots.get(rank.key(seat, weight))
        if spot is None or self.row(seat, weight) is None:
            return self.keys.extra(seat, name)
        if name == f"output_layer.{EXTRA}":
            return None
        shape = next(tuple(ref.shape) for s, n, ref in rank.tensors() if (s, n) == (seat, weight))
        axes = len(spot.shape) - len(shape)
        front = zip(spot.boxes[0].start[:axes], spot.shape[:axes], strict=True)
        return object_key(f"{spot.key.removesuffix('weight')}{EXTRA}", front)

    def value(self, rank: _Rank, value: Value) -> StateValue:
        return part_of(self.origin.store, rank.file, rank.archive, value)

    def common(self) -> StateValue:
        """The rest of the first rank's file, as Megatron keeps the common state of that rank only."""
        rank = self.ranks[0]
        kept = {
            k: v for k, v in rank.state.items() if not CHUNK.fullmatch(str(k)) and k not in ("rng_state", "optimizer")
        }
        read = self.value(rank, kept)
        ordered = {k: kept.get(k) for k in rank.state if k in kept or k == "optimizer"}
        return StateValue(ordered, read.storages)


# ------------------------------------------------------------------------------------------------------------- content


def _joined(held: Sequence[_Held], label: str) -> tuple[dict[str, OriginTensor], list[Twin]]:
    """The tensors of all ranks, each box once, and what other ranks hold of the same boxes."""
    pieces: dict[str, dict[Box, Item]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    twins: list[Twin] = []
    for one in held:
        kind = (one.dtype, one.spot.shape)
        if kinds.setdefault(one.spot.key, kind) != kind:
            raise UnsupportedError(
                "ranks hold tensors of one key that do not fit each other",
                file=label,
                param=one.spot.key,
                found=f"{kind[0]}{list(kind[1])}",
                expected=f"{kinds[one.spot.key][0]}{list(kinds[one.spot.key][1])}",
            )
        own = pieces.setdefault(one.spot.key, {})
        for box, item in _boxed(one):
            if own.setdefault(box, item) is not item:
                twins.append(Twin(one.spot.key, own[box], item))
    tensors = {}
    for key, boxes in pieces.items():
        dtype, shape = kinds[key]
        _check_tiled(key, shape, list(boxes), label)
        tensors[key] = OriginTensor(key, dtype, shape, tuple(boxes), tuple(boxes.values()))
    return tensors, twins


def _boxed(one: _Held) -> Iterator[tuple[Box, Item]]:
    """The bytes of each box of a rank's tensor."""
    at, itemsize = 0, tensor_itemsize(one.dtype)
    for box in one.spot.boxes:
        nbytes = box.size * itemsize
        yield box, one.item if nbytes == one.item.nbytes else SliceItem(one.item, at, nbytes)
        at += nbytes


def _check_tiled(key: str, shape: tuple[int, ...], boxes: Sequence[Box], label: str) -> None:
    """Raises ``CorruptError`` unless boxes hold every element of a tensor exactly once. Pure."""
    edges = [
        sorted({0, n, *(b.start[i] for b in boxes), *(b.start[i] + b.shape[i] for b in boxes)})
        for i, n in enumerate(shape)
    ]
    held = np.zeros([len(axis) - 1 for axis in edges], np.int32)
    for box in boxes:
        rows = zip(edges, box.start, box.shape, strict=True)
        held[tuple(slice(axis.index(low), axis.index(low + n)) for axis, low, n in rows)] += 1
    whole = all(axis[0] == 0 and axis[-1] == n for axis, n in zip(edges, shape, strict=True))
    if prod(shape) and not (whole and (held == 1).all()):
        raise CorruptError("the ranks' tensors do not make up the whole one", file=label, param=key)


def _same(a: Item, b: Item) -> bool:
    """Whether two items have the same bytes."""
    if a.nbytes != b.nbytes:
        return False
    for at in range(0, a.nbytes, _WINDOW):
        size = min(_WINDOW, a.nbytes - at)
        first, second = bytearray(size), bytearray(size)
        a.read(at, [memoryview(first)])
        b.read(at, [memoryview(second)])
        if first != second:
            return False
    return True


def _compared(one: tuple[OriginPart, LocalParam], other: tuple[OriginPart, LocalParam]) -> tuple[bool, bool]:
    """Whether two parts hold the same state of a param, and whether it varies in slots other than the first."""
    varied = True
    for slot in range(len(one[0].catalog.state.slots)):
        differs = False
        for low in range(0, one[1].numel, _WINDOW):
            read = partial(_read, slot=slot, low=low, high=min(low + _WINDOW, one[1].numel))
            a, b = read(one), read(other)
            if (a != b).any():
                return False, False
            rows = a.reshape(-1, one[0].catalog.state.slots[slot].itemsize)
            differs = differs or bool((rows != rows[0]).any())
        varied = varied and (differs or slot == 0)
    return True, varied


def _read(owner: tuple[OriginPart, LocalParam], slot: int, low: int, high: int) -> np.ndarray:
    part, local = owner
    piece = Piece(local.param, local.start, (local.numel,), Box((0,), (local.numel,)))
    return read_piece(part.catalog, part.source, slot, piece, low, high)

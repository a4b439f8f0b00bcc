"""Megatron-LM's own ``.pt`` checkpoints: a folder for each model-parallel rank, ``mp_rank_<tp>[_<pp>][_<ep>]``.

``model_optim_rng.pt`` holds the rank's model as an ordered state dict (by its local names, layers numbered from 0 in
each pipeline stage), groups, args and the rest; ``distrib_optim.pt`` the optimizer's state as data-parallel rank 0
gathered it: one tensor a buffer and slot (``zero_gather``), or, before February 2024, one a bucket.

The order of params in a buffer is known: that of the state dict, reversed; and where the weights are still views of
the buffer that they lay in, as torch saves them, their places in it show order and members outright.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path

import numpy as np

from ...core.boxes import Box
from ...core.casting import same_after_cast
from ...core.dtypes import itemsize
from ...core.errors import CorruptError, MissingError, UnsupportedError
from ...core.layout import BufferKey
from ...encodings.inert_pickle import Dtype, TensorRef, Value
from ...encodings.torch_archive import Archive, read_archive
from ...model.catalog import Catalog, Extents, TablePlacement
from ...model.state import MAIN_PARAM, LossScale, ParamSpec, PartState, SlotSpec
from ...storage.local import LocalStore
from .common import Args, chained_values, common_of
from .entries import Chunks, ChunkSource, Entries, Place, StoredTensor
from .gathered_layout import FoundLayout, PlacedParam, buckets_by_rule
from .groups import GroupSet, archive_numbers, assign_groups, read_groups, read_loss_scale
from .model import Bucket, Buffer, Evidence, KeyBox, LocalParam, MegatronCheckpoint, MegatronPart, PartLayout
from .zero_gather import Item, Walk, walk_in_order

__all__ = ["open_legacy"]

FORMAT = "megatron:legacy"
_MODEL_FILE = "model_optim_rng.pt"
_OPTIMIZER_FILE = "distrib_optim.pt"
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_LAYER = re.compile(r"^((?:.*?\.)?layers\.)(\d+)(\..*)$")
_EXPERT = re.compile(r"(?:^|\.)experts\.")
_CHUNK = re.compile(r"model(\d+)?")
_SLOTS = {"param": MAIN_PARAM, "fp32_param": MAIN_PARAM}
_SLOT_ORDER = (MAIN_PARAM, "exp_avg", "exp_avg_sq")
_FLOATS = ("float32", "bfloat16", "float16")
_QUICK = 1024
"""Elements at each end of a param that are looked at to place it."""
_WINDOW = 1 << 20


def open_legacy(path: Path) -> MegatronCheckpoint:
    """Reads the ranks' pickles, and of tensors the ends of each param.

    Keys of ``entries.tensors`` are the rank's folder and the name in its state dict. Raises ``MissingError``,
    ``CorruptError``, and ``UnsupportedError`` where places or names cannot be known.
    """
    store = LocalStore(path)
    ranks = _ranks(store)
    table = _Table()
    read = [_RankReader(store, table, rank).read() for rank in ranks]
    entries = _entries(path, store, ranks, table)
    parts, notices = _Parts(entries, read, _layer_offsets(read, ranks[0].args, path)).all()
    steps = {part.catalog.state.step for part in parts}
    if len(steps) > 1:
        notices.append(f"parts are at different steps: {', '.join(map(str, sorted(steps)))}")
    return MegatronCheckpoint(
        entries,
        FORMAT,
        "torch",
        max(steps),
        common_of(entries.common).iteration,
        {part.name: part for part in parts},
        tuple(weight.key for rank in read for weight in rank.weights),
        tuple(dict.fromkeys(notices)),
    )


# ---------------------------------------------------------------------------------------------------- ranks and folders


@dataclass(frozen=True, eq=False)
class _Rank:
    """One model-parallel rank's folder, with what its files hold. ``optimizer``: None where there is no file of it."""

    folder: str
    tp: int
    pp: int
    ep: int
    model: Archive
    optimizer: Archive | None

    @property
    def state(self) -> Mapping[str, Value]:
        value: Mapping[str, Value] = self.model.value
        return value

    @cached_property
    def args(self) -> Args:
        return common_of(self.state).args

    def file(self, name: str) -> str:
        return f"{self.folder}/{name}"


def _ranks(store: LocalStore) -> list[_Rank]:
    """All ranks by (pp, ep, tp): together they must be a whole grid."""
    listed = store.keys()
    names = sorted({key.split("/")[0] for key in listed if "/" in key})
    folders = [name for name in names if _RANK.fullmatch(name)]
    if not folders:
        raise MissingError("there is no folder mp_rank_* here", file=store.root)
    opened = [(name, _open_model(store, name)) for name in folders]
    args = common_of(opened[0][1].value).args
    ranks = []
    for name, archive in opened:
        tp, pp, ep = _coordinates(store, name, args)
        ranks.append(_Rank(name, tp, pp, ep, archive, _open_optimizer(store, name)))
    ranks.sort(key=lambda rank: (rank.pp, rank.ep, rank.tp))
    _check_grid(store, ranks, args)
    return ranks


def _open_model(store: LocalStore, folder: str) -> Archive:
    archive = read_archive(store, f"{folder}/{_MODEL_FILE}")
    if not isinstance(archive.value, dict):
        raise CorruptError("the file holds no dict", file=archive.file, found=type(archive.value).__name__)
    return archive


def _open_optimizer(store: LocalStore, folder: str) -> Archive | None:
    name = f"{folder}/{_OPTIMIZER_FILE}"
    return read_archive(store, name) if (store.root / name).exists() else None


def _coordinates(store: LocalStore, folder: str, args: Args) -> tuple[int, int, int]:
    """Tensor, pipeline and expert rank of a folder. One number behind the first may be either of the latter."""
    found = _RANK.fullmatch(folder)
    assert found is not None
    tp, second, third = int(found[1]), found[2], found[3]
    if second is None:
        return tp, 0, 0
    if third is not None:
        return tp, int(second), int(third)
    if (args.pipeline_parallel or 1) > 1:
        return tp, int(second), 0
    if (args.expert_parallel or 1) > 1:
        return tp, 0, int(second)
    raise UnsupportedError(
        "the folder's second number may be a pipeline or an expert rank, and the args do not say which",
        file=store.label(folder),
    )


def _check_grid(store: LocalStore, ranks: Sequence[_Rank], args: Args) -> None:
    """Every rank of the grid must be there: that of the args, or else the smallest that holds those found."""
    sizes = [
        max(stated or 1, 1 + max(getattr(rank, axis) for rank in ranks))
        for axis, stated in (("tp", args.tensor_parallel), ("pp", args.pipeline_parallel), ("ep", args.expert_parallel))
    ]
    have = {(rank.tp, rank.pp, rank.ep) for rank in ranks}
    # Ranks of one model without experts may be saved once for all expert ranks; then ep is 0 everywhere.
    if all(rank.ep == 0 for rank in ranks) and not any(_has_experts(rank) for rank in ranks):
        sizes[2] = 1
    for tp, pp, ep in np.ndindex(*sizes):
        if (tp, pp, ep) not in have:
            raise MissingError(
                f"the folder of tensor rank {tp}, pipeline rank {pp}, expert rank {ep} is missing",
                file=store.root,
                found=f"{len(ranks)} folders mp_rank_*",
                expected=prod(sizes),
                hint="restore it from a copy",
            )


def _has_experts(rank: _Rank) -> bool:
    return any(_EXPERT.search(name) for _, chunk in _model_chunks(rank) for name in _flat_names(chunk))


def _flat_names(chunk: Value) -> Iterator[str]:
    yield from (name for name, _ in _flattened(chunk))


def _model_chunks(rank: _Rank) -> list[tuple[int, Value]]:
    """The virtual pipeline chunks of a rank's model, in order."""
    found = [(int(m[1] or 0), value) for key, value in rank.state.items() if (m := _CHUNK.fullmatch(str(key)))]
    if not found:
        raise CorruptError("the file holds no model", file=rank.model.file)
    return sorted(found, key=lambda pair: pair[0])


def _flattened(value: Value, prefix: str = "") -> Iterator[tuple[str, TensorRef]]:
    """Tensors of a state dict in its order; older models nest dicts."""
    for key, item in value.items() if isinstance(value, dict) else ():
        if isinstance(item, TensorRef):
            yield f"{prefix}{key}", item
        elif isinstance(item, dict):
            yield from _flattened(item, f"{prefix}{key}.")


# ------------------------------------------------------------------------------------------------- tensors of the ranks


@dataclass
class _Table:
    """All chunks, numbered through, and the tensors made of them."""

    places: list[Place] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)

    def add(self, key: str, archive: Archive, file: str, tensor: TensorRef) -> int:
        """One tensor as one chunk. Raises ``CorruptError``, ``UnsupportedError``."""
        place = archive.locate(tensor)
        if not place.contiguous:
            raise UnsupportedError("a tensor is not stored row by row", file=archive.file, param=key)
        chunk = len(self.places)
        self.places.append((file, place.offset))
        self.nbytes.append(place.nbytes)
        shape = tuple(tensor.shape)
        sizes = np.array([shape], np.int64).reshape(1, len(shape))
        index = np.array([chunk], np.int64)
        self.tensors[key] = StoredTensor(key, tensor.dtype, shape, np.zeros_like(sizes), sizes, index)
        return chunk


@dataclass(frozen=True, slots=True)
class _Weight:
    """A tensor of a rank's model. ``name``: in the state dict; ``chunk``: blob; ``storage`` and ``offset``: the view
    that it is.
    """

    key: str
    name: str
    virtual: int
    shape: tuple[int, ...]
    dtype: str
    chunk: int
    storage: str
    storage_numel: int
    offset: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def expert(self) -> bool:
        return bool(_EXPERT.search(self.name))


@dataclass(frozen=True, slots=True)
class _World:
    """The gathered state of one buffer: for each slot its tensors' chunks (one, or one a bucket), with ``bounds`` of
    the buckets where they are apart. ``total``: elements.
    """

    index: int
    param_dtype: str | None
    grad_dtype: str
    slots: Mapping[str, tuple[int, ...]]
    total: int
    bounds: tuple[int, ...] | None


@dataclass(frozen=True, eq=False)
class _Read:
    """A rank's weights, and the buffers of each of its optimizers (None: another rank holds that one's)."""

    rank: _Rank
    weights: tuple[_Weight, ...]
    optimizers: tuple[tuple[_World, ...] | None, ...]


@dataclass(frozen=True)
class _RankReader:
    store: LocalStore
    table: _Table
    rank: _Rank

    def read(self) -> _Read:
        weights = tuple(self.weights())
        return _Read(self.rank, weights, self.optimizers())

    def weights(self) -> Iterator[_Weight]:
        file, archive = self.rank.file(_MODEL_FILE), self.rank.model
        several = len(_model_chunks(self.rank)) > 1
        for virtual, chunk in _model_chunks(self.rank):
            for name, tensor in _flattened(chunk):
                key = f"{self.rank.folder}/{f'model{virtual}/' if several else ''}{name}"
                at = self.table.add(key, archive, file, tensor)
                held = tensor.storage
                shape = tuple(tensor.shape)
                numel = held.numel if held.dtype is not None else held.numel // itemsize(tensor.dtype)
                yield _Weight(key, name, virtual, shape, tensor.dtype, at, held.key, numel, tensor.offset)

    def optimizers(self) -> tuple[tuple[_World, ...] | None, ...]:
        archive = self.rank.optimizer
        if archive is None:
            return ()
        return tuple(
            None if value is None else tuple(self.buffers(archive, value, i))
            for i, value in enumerate(chained_values(_unchain(archive.value)))
        )

    def buffers(self, archive: Archive, value: Value, optimizer: int) -> Iterator[_World]:
        if not isinstance(value, dict):
            raise CorruptError("an optimizer's state is no dict", file=archive.file, found=type(value).__name__)
        for index in sorted(key for key in value if type(key) is int):
            by_dtype = value[index]
            if not isinstance(by_dtype, dict) or len(by_dtype) != 1:
                raise UnsupportedError("a buffer's state is not that of one pair of dtypes", file=archive.file)
            ((dtypes, slots),) = by_dtype.items()
            yield self.world(archive, f"optimizer.distributed.{optimizer}.gbuf_idx_{index}", index, dtypes, slots)

    def world(self, archive: Archive, key: str, index: int, dtypes: Value, slots: Value) -> _World:
        if not isinstance(slots, dict):
            raise CorruptError("a buffer's state is no dict", file=archive.file, found=type(slots).__name__)
        param_dtype, grad_dtype = _dtype_pair(dtypes, archive.file)
        chunks: dict[str, tuple[int, ...]] = {}
        sizes: set[tuple[int, ...]] = set()
        for name, held in slots.items():
            tensors = list(held) if isinstance(held, (list, tuple)) else [held]
            if not tensors or not all(isinstance(t, TensorRef) for t in tensors):
                continue
            slot = _SLOTS.get(str(name), str(name))
            chunks[slot] = tuple(self.add(archive, f"{key}.{name}", i, tensor) for i, tensor in enumerate(tensors))
            sizes.add(tuple(tensor.numel for tensor in tensors))
        if len(sizes) != 1 or MAIN_PARAM not in chunks:
            raise CorruptError("slots of a buffer differ in size, or main params are missing", file=archive.file)
        (numels,) = sizes
        bounds = (0, *accumulate(numels)) if isinstance(slots.get("param"), (list, tuple)) else None
        stated = slots.get("numel_unpadded")
        if type(stated) is int and bounds is None and stated != numels[0]:
            raise CorruptError("a buffer has another size than it states", file=archive.file, found=numels[0])
        return _World(index, param_dtype, grad_dtype, chunks, sum(numels), bounds)

    def add(self, archive: Archive, key: str, bucket: int, tensor: TensorRef) -> int:
        if tensor.dtype != "float32":
            raise UnsupportedError("optimizer state is not float32", file=archive.file, param=key, found=tensor.dtype)
        name = f"{self.rank.folder}/{key}{f'.bucket_idx_{bucket}' if bucket else ''}"
        return self.table.add(name, archive, self.rank.file(_OPTIMIZER_FILE), tensor)


def _unchain(value: Value) -> Value:
    """Several optimizers lie in a list; one's buffers in a dict by number, which is no dict of optimizers."""
    return value if isinstance(value, (list, tuple)) else [value]


def _dtype_pair(dtypes: Value, file: str) -> tuple[str | None, str]:
    """Param and grad dtype; before February 2024 only the latter stood there."""
    if isinstance(dtypes, Dtype):
        return None, dtypes.name
    if isinstance(dtypes, tuple) and len(dtypes) == 2 and all(isinstance(d, Dtype) for d in dtypes):
        return dtypes[0].name, dtypes[1].name
    raise CorruptError("a buffer's key is no pair of dtypes", file=file, found=repr(dtypes)[:80])


def _entries(path: Path, store: LocalStore, ranks: Sequence[_Rank], table: _Table) -> Entries:
    listed = store.keys()
    files = {key: store.size(key) for key in listed}
    objects = {name: size for name, size in files.items() if name.endswith(f"/{_MODEL_FILE}")}

    def load(key: str) -> Archive:
        if key not in objects:
            raise CorruptError("the checkpoint lacks an entry", file=path, param=key)
        return read_archive(store, key)

    places = tuple(table.places)
    nbytes = np.array(table.nbytes, np.int64).reshape(-1)
    chunks = Chunks(nbytes, np.full(len(places), -1, np.int64), places.__getitem__)
    common = {k: v for k, v in ranks[0].state.items() if not _CHUNK.fullmatch(str(k))}
    tensors = table.tensors
    return Entries(
        path, "torch", store, tensors, objects, load, chunks, common, files, place_object=lambda key: (key, 0)
    )


# ----------------------------------------------------------------------------------------------------- names of layers


def _layer_offsets(read: Sequence[_Read], args: Args, path: Path) -> Mapping[tuple[int, int, str], int]:
    """First layer's global number by (pipeline rank, virtual chunk, prefix of its name).

    Stages follow each other in order of virtual chunk, then of pipeline rank; each numbers its layers from 0.
    """
    counts: dict[str, dict[tuple[int, int], int]] = {}
    stages: set[tuple[int, int]] = set()
    for one in read:
        for weight in one.weights:
            stages.add((weight.virtual, one.rank.pp))
            found = _LAYER.fullmatch(weight.name)
            if found is not None:
                stage = counts.setdefault(found[1], {})
                at = (weight.virtual, one.rank.pp)
                stage[at] = max(stage.get(at, 0), int(found[2]) + 1)
    offsets: dict[tuple[int, int, str], int] = {}
    for prefix, stage in counts.items():
        total = 0
        for virtual, pp in sorted(stages):
            offsets[pp, virtual, prefix] = total
            total += stage.get((virtual, pp), 0)
        spread = len(stage) > 1
        if spread and prefix.endswith("decoder.layers.") and args.num_layers not in (None, total):
            raise UnsupportedError(
                f"the stages' layers under {prefix.rstrip('.')} cannot be numbered",
                file=path,
                found=f"{total} layers in all stages",
                expected=f"{args.num_layers}, as the args state",
            )
    return offsets


def _global_name(name: str, pp: int, virtual: int, offsets: Mapping[tuple[int, int, str], int]) -> str:
    found = _LAYER.fullmatch(name)
    if found is None:
        return name
    return f"{found[1]}{int(found[2]) + offsets[pp, virtual, found[1]]}{found[3]}"


# --------------------------------------------------------------------------------------------------------------- parts


@dataclass(frozen=True, slots=True)
class _Placed:
    """A buffer whose params are placed: weights in place order, with their starts in the gathered tensors."""

    world: _World
    weights: tuple[_Weight, ...]
    starts: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    ambiguous: tuple[str, ...]
    worlds: tuple[int | None, ...] = ()


@dataclass(frozen=True)
class _Parts:
    entries: Entries
    read: Sequence[_Read]
    offsets: Mapping[tuple[int, int, str], int]

    def all(self) -> tuple[list[MegatronPart], list[str]]:
        count = max((len(one.optimizers) for one in self.read), default=0)
        if not count:
            raise MissingError(
                f"no rank's folder has a {_OPTIMIZER_FILE}",
                file=self.entries.path,
                hint="the checkpoint holds no state of a distributed optimizer",
            )
        groups = [
            (optimizer, group, one)
            for optimizer in range(count)
            for group, one in enumerate(self.holders(optimizer, count))
        ]
        made = [self.made(o, g, one, count, len(groups) == 1) for o, g, one in groups]
        return [part for part, _ in made], [line for _, lines in made for line in lines]

    def holders(self, optimizer: int, count: int) -> list[_Read]:
        """Ranks that hold an optimizer's state, by (pp, ep, tp): their order is the data-parallel groups'."""
        for one in self.read:
            if one.optimizers and len(one.optimizers) != count:
                raise CorruptError(
                    "ranks have different numbers of optimizers",
                    file=self.entries.store.label(one.rank.file(_OPTIMIZER_FILE)),
                    found=len(one.optimizers),
                    expected=count,
                )
        holding = [
            one for one in self.read if len(one.optimizers) > optimizer and one.optimizers[optimizer] is not None
        ]
        self.check_holders(optimizer, count, holding)
        return holding

    def check_holders(self, optimizer: int, count: int, holding: Sequence[_Read]) -> None:
        """State of dense params is held once by each (tp, pp); each of experts by each rank, where it has any."""
        held = [(one.rank.tp, one.rank.pp) for one in holding]
        for one in self.read:
            if self.is_expert(optimizer, one, count):
                tensor = one.rank.args.integer("expert_tensor_parallel_size")
                each = tensor in (None, one.rank.args.tensor_parallel)
                missing = each and one not in holding and any(weight.expert for weight in one.weights)
            else:
                missing = (one.rank.tp, one.rank.pp) not in held
                if held.count((one.rank.tp, one.rank.pp)) > 1 and one in holding and one.rank.ep == 0:
                    raise CorruptError("two ranks hold the state of the same params", file=self.entries.path)
            if missing:
                raise MissingError(
                    "the optimizer's state of a rank is missing",
                    file=self.entries.store.label(one.rank.file(_OPTIMIZER_FILE)),
                    hint="restore it from a copy",
                )

    def is_expert(self, optimizer: int, one: _Read, count: int) -> bool | None:
        """Whether an optimizer is that of the experts, as its groups say; None where one has all params."""
        if count == 1:
            return None if any(weight.expert for weight in one.weights) else False
        try:
            groups = self.groups(optimizer, one).groups
        except (CorruptError, IndexError):
            groups = ()
        said = {bool(group.get("is_expert_parallel", False)) for group in groups}
        if len(said) == 1:
            return said.pop()
        if count == 2 and any(weight.expert for weight in one.weights):
            return optimizer == 1
        raise UnsupportedError(
            "the file does not say which params each of its optimizers holds",
            file=self.entries.store.label(one.rank.file(_MODEL_FILE)),
            found=f"{count} optimizers",
        )

    def groups(self, optimizer: int, one: _Read) -> GroupSet:
        value = chained_values(one.rank.state.get("optimizer"))[optimizer]
        return read_groups(value, archive_numbers(self.entries.store, one.rank.model))

    def loss_scale(self, optimizer: int, one: _Read) -> LossScale | None:
        value = chained_values(one.rank.state.get("optimizer"))[optimizer]
        scaler = value.get("grad_scaler") if isinstance(value, dict) else None
        return read_loss_scale(scaler, archive_numbers(self.entries.store, one.rank.model))

    def made(self, optimizer: int, group: int, one: _Read, count: int, only: bool) -> tuple[MegatronPart, list[str]]:
        chained = optimizer if count > 1 else None
        name = "" if only else f"{'' if chained is None else f'chained_{chained}.'}dp_group_idx_{group}"
        placed = _place_all(self.entries, one, self.members(optimizer, one, count), one.optimizers[optimizer] or ())
        experts = self.is_expert(optimizer, one, count)
        builder = _Builder(self.entries, one, placed, experts is True, self.offsets)
        return builder.build(name, chained, group, self.groups(optimizer, one), self.loss_scale(optimizer, one))

    def members(self, optimizer: int, one: _Read, count: int) -> list[_Weight]:
        experts = self.is_expert(optimizer, one, count)
        weights = _distinct(one.weights)
        return [w for w in weights if w.dtype in _FLOATS and (experts is None or w.expert == experts)]


def _distinct(weights: Sequence[_Weight]) -> list[_Weight]:
    """Without second names of the same tensor, as ``named_parameters`` gives them."""
    seen: set[tuple[str, int, tuple[int, ...]]] = set()
    found = []
    for weight in weights:
        view = (weight.storage, weight.offset, weight.shape)
        if view not in seen or not weight.numel:
            seen.add(view)
            found.append(weight)
    return found


# ------------------------------------------------------------------------------------------------------- placing params


def _place_all(
    entries: Entries, one: _Read, members: Sequence[_Weight], worlds: Sequence[_World]
) -> tuple[_Placed, ...]:
    """The params of every buffer: buffers of one model chunk follow each other, those of the next come after."""
    found: list[_Placed] = []
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
            file=entries.store.label(one.rank.file(_OPTIMIZER_FILE)),
            found=todo[0].param_dtype,
        )
    return tuple(found)


@dataclass(frozen=True)
class _Placer:
    """Places the params of one buffer."""

    entries: Entries
    one: _Read
    world: _World
    weights: Sequence[_Weight]

    @property
    def source(self) -> ChunkSource:
        return ChunkSource(self.entries.store, self.entries.chunks)

    def place(self) -> _Placed:
        for order, items in self.orders():
            for align in (64, 1) if self.world.bounds is not None else (64,):
                walk = self.walk(order, items, align)
                if walk is not None:
                    return self.placed(order, items, walk)
        raise UnsupportedError(
            "no order of buckets makes the main params the model's weights: where each param lies cannot be known",
            file=self.entries.store.label(self.one.rank.file(_OPTIMIZER_FILE)),
            param=f"buffer {self.world.index}",
            found=f"{len(self.weights)} weights for {self.world.total} elements",
        )

    def orders(self) -> Iterator[tuple[list[_Weight], list[Item]]]:
        """Place orders that are possible, likeliest first: by the views' places, then by the state dict, reversed."""
        views = self.by_view()
        if views:
            yield views, [Item(w.numel, world=w.offset) for w in views]
        order = list(reversed(self.weights))
        yield order, [Item(w.numel) for w in order]
        yield order, [Item(w.numel, optional=True) for w in order]

    def by_view(self) -> list[_Weight]:
        """Weights that are views of one storage, by their place in it, where those places can be a buffer's."""
        storages: dict[str, list[_Weight]] = {}
        for weight in self.weights:
            storages.setdefault(weight.storage, []).append(weight)
        best = max(storages.values(), key=lambda views: sum(w.numel for w in views), default=[])
        best = sorted(best, key=lambda weight: weight.offset)
        disjoint = all(a.offset + a.numel <= b.offset for a, b in pairwise(best))
        aligned = all(weight.offset % 64 == 0 for weight in best)
        return best if len(best) > 1 and disjoint and aligned and best[0].offset == 0 else []

    def walk(self, order: Sequence[_Weight], items: Sequence[Item], align: int) -> Walk | None:
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

    def same(self, weight: _Weight, start: int, ends: int | None) -> bool:
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
        for chunk, at, begin, count in _runs(self.world, slot, start, size):
            self.source.read_run(chunk, at * 4, [view[begin * 4 : (begin + count) * 4]])
        return out

    def placed(self, order: Sequence[_Weight], items: Sequence[Item], walk: Walk) -> _Placed:
        rows = [i for i, start in enumerate(walk.starts) if start is not None]
        weights = tuple(order[i] for i in rows)
        starts = tuple(start for start in walk.starts if start is not None)
        ambiguous = tuple(
            order[i].name for i, others in enumerate(walk.others) if self.differ(order[i], walk, i, others)
        )
        fresh = [walk.fresh[i] for i in rows]
        worlds = [items[i].world for i in rows]
        buckets = _buckets(weights, starts, fresh, worlds)
        return _Placed(self.world, weights, starts, buckets, ambiguous, tuple(worlds))

    def differ(self, weight: _Weight, walk: Walk, index: int, others: frozenset[int | None]) -> bool:
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


def _runs(world: _World, slot: str, start: int, size: int) -> Iterator[tuple[int, int, int, int]]:
    """(chunk, element of it, element of the asked range, count) of a range of the gathered state."""
    bounds = world.bounds or (0, world.total)
    for chunk, (low, high) in zip(world.slots[slot], pairwise(bounds), strict=True):
        begin, end = max(start, low), min(start + size, high)
        if end > begin:
            yield chunk, begin - low, begin - start, end - begin


def _buckets(
    weights: Sequence[_Weight],
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


def _tail(weights: Sequence[_Weight], worlds: Sequence[int | None], index: int) -> bool:
    """Whether the padded buffer shows a bucket's tail before a param."""
    before, at = worlds[index - 1], worlds[index]
    if before is None or at is None:
        return False
    end = before + weights[index - 1].numel
    return at > end + -end % 64


# ------------------------------------------------------------------------------------------------------ building a part


def _whole(weight: _Weight) -> KeyBox:
    """A rank's weight as a box of itself: the files do not say where it lies in the tensor of all ranks."""
    return KeyBox(weight.key, Box(tuple(0 for _ in weight.shape), weight.shape))


@dataclass(frozen=True)
class _Builder:
    entries: Entries
    one: _Read
    placed: tuple[_Placed, ...]
    expert: bool
    offsets: Mapping[tuple[int, int, str], int]

    def build(
        self, name: str, chained: int | None, group: int, groups: GroupSet, loss_scale: LossScale | None
    ) -> tuple[MegatronPart, list[str]]:
        order = self.registration_order()
        index = {weight.key: i for i, weight in enumerate(order)}
        names = self.names(order)
        params = [self.spec(weight, names[i]) for i, weight in enumerate(order)]
        chosen, notice = assign_groups(params, groups.groups)
        params = [replace(param, group=g) for param, g in zip(params, chosen, strict=True)]
        slots = self.slots()
        step = common_of(self.one.rank.state).iteration or 0 if groups.step is None else groups.step
        state = PartState(
            tuple(params), tuple(SlotSpec(s, "float32") for s in slots), step, groups.groups, loss_scale=loss_scale
        )
        catalog = Catalog(FORMAT, "torch", name, state, None, self.placement(index, slots))
        locals_ = tuple(
            LocalParam(p.name, i, 0, p.numel, p.dtype, p.grad_dtype, p.expert, p.shared_embedding, (_whole(weight),))
            for i, (p, weight) in enumerate(zip(params, order, strict=True))
        )
        known = {weight.name: names[i] for i, weight in enumerate(order)}
        ambiguous = tuple(known[n] for placed in self.placed for n in placed.ambiguous)
        evidence = Evidence("order", sum(p.numel for p in params), ambiguous=ambiguous)
        layout = self.layout(index)
        part = MegatronPart(name, catalog, locals_, layout, evidence, chained, group, self.one.rank.pp)
        return part, [f"{name}: {line}" if name else line for line in (*groups.notices, notice) if line]

    def registration_order(self) -> list[_Weight]:
        """The state dict's, where all buffers agree with it; else that of the buffers, reversed."""
        by_buffer = [list(reversed(placed.weights)) for placed in self.placed]
        place = {weight.key: i for i, weight in enumerate(self.one.weights)}
        if all(place[a.key] < place[b.key] for weights in by_buffer for a, b in pairwise(weights)):
            return sorted((w for weights in by_buffer for w in weights), key=lambda weight: place[weight.key])
        return [weight for weights in by_buffer for weight in weights]

    def names(self, order: Sequence[_Weight]) -> list[str]:
        named = [_global_name(w.name, self.one.rank.pp, w.virtual, self.offsets) for w in order]
        if len(set(named)) == len(named):
            return named
        return [f"model{w.virtual}.{name}" for w, name in zip(order, named, strict=True)]

    def spec(self, weight: _Weight, name: str) -> ParamSpec:
        grad = next(p.world.grad_dtype for p in self.placed if weight in p.weights)
        return ParamSpec(
            name, weight.shape, weight.dtype, grad, expert=self.expert, shared_embedding=self.shared(weight)
        )

    def shared(self, weight: _Weight) -> bool:
        """Whether pipeline stages share the param: as the args state, or as its bucket shows, in which it is alone."""
        args = self.one.rank.args
        if not weight.name.endswith(("word_embeddings.weight", "output_layer.weight", "embedding.weight")):
            return False
        if args.untied_embeddings is not None:
            return not args.untied_embeddings and (args.pipeline_parallel or 1) > 1
        for placed in self.placed:
            at = next((i for i, w in enumerate(placed.weights) if w is weight), None)
            if at is not None:
                alone = any(b.first == at and b.last == at + 1 for b in placed.buckets)
                return alone and len(placed.buckets) > 1
        return False

    def slots(self) -> list[str]:
        names = {slot for placed in self.placed for slot in placed.world.slots}
        if any(set(placed.world.slots) != names for placed in self.placed):
            raise CorruptError(
                "buffers have different slots", file=self.entries.store.label(self.one.rank.file(_OPTIMIZER_FILE))
            )
        return [s for s in _SLOT_ORDER if s in names] + sorted(names - set(_SLOT_ORDER))

    def placement(self, index: Mapping[str, int], slots: Sequence[str]) -> TablePlacement:
        rows: list[tuple[int, int, int, int, int, int, int]] = []
        for placed in self.placed:
            for weight, start in zip(placed.weights, placed.starts, strict=True):
                for slot, name in enumerate(slots):
                    for chunk, at, begin, count in _runs(placed.world, name, start, weight.numel):
                        rows.append((index[weight.key], slot, begin, count, chunk, at * 4, count * 4))
        columns = np.array(rows, np.int64).reshape(-1, 7).T
        table = Extents(*(np.ascontiguousarray(column) for column in columns))
        chunks = self.entries.chunks
        keys = tuple(chunks.place(i)[0] for i in range(len(chunks)))
        return TablePlacement(keys, tuple(chunks.nbytes.tolist()), table, len(slots))

    def layout(self, index: Mapping[str, int]) -> PartLayout:
        found = [self.by_rule(placed) for placed in self.placed]
        buffers = []
        for placed, rule in zip(self.placed, found, strict=True):
            buckets = placed.buckets if rule is None else rule.buckets
            begins = [placed.starts[bucket.first] for bucket in buckets for _ in range(bucket.first, bucket.last)]
            inside = tuple(start - begin for start, begin in zip(placed.starts, begins, strict=True))
            members = tuple(index[weight.key] for weight in placed.weights)
            dtype = placed.world.param_dtype or placed.weights[0].dtype
            buffers.append(Buffer(placed.world.index, dtype, placed.world.grad_dtype, members, inside, buckets))
        rules = [rule for rule in found if rule is not None]
        dp_sizes = {rule.dp_size for rule in rules}
        dp_size = dp_sizes.pop() if len(rules) == len(found) and len(dp_sizes) == 1 else None
        acting = rules[0] if rules and rules[0] is found[0] else None
        return PartLayout(
            tuple(buffers),
            dp_size,
            acting.bucket_size if acting else self.threshold(self.placed[0]),
            acting is not None and acting.stated,
        )

    def by_rule(self, placed: _Placed) -> FoundLayout | None:
        key = BufferKey(placed.weights[0].dtype, placed.world.grad_dtype, self.expert)
        params = [
            PlacedParam(weight.key, weight.numel, key, self.shared(weight), start, world)
            for weight, start, world in zip(placed.weights, placed.starts, placed.worlds, strict=True)
        ]
        smallest = self.threshold(placed)
        overlaps = self.one.rank.pp == 0 and placed.weights[0].virtual == 0
        return buckets_by_rule(
            params,
            placed.world.total,
            self.one.rank.args,
            [] if smallest is None else [smallest],
            overlaps=overlaps,
        )

    def threshold(self, placed: _Placed) -> int | None:
        """A bucket size that closes each bucket which the places show: None where they show one only."""
        closed = [b.numel_unpadded for b in placed.buckets[:-1] if not self.shared(placed.weights[b.first])]
        return min(closed, default=None)

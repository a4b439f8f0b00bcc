"""The files of a legacy checkpoint: its ranks, the tensors of their models, and the gathered state of their buffers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path

import numpy as np

from ...core.dtypes import itemsize
from ...core.errors import CorruptError, MissingError, UnsupportedError
from ...encodings.inert_pickle import Dtype, TensorRef, Value
from ...encodings.torch_archive import Archive, read_archive
from ...model.state import MAIN_PARAM
from ...storage.local import LocalStore
from .common import Args, chained_values, common_of
from .entries import Chunks, Entries, Place, StoredTensor

__all__ = [
    "CHUNK",
    "EXPERT",
    "MODEL_FILE",
    "OPTIMIZER_FILE",
    "Rank",
    "RankReader",
    "RankTensors",
    "Table",
    "Weight",
    "World",
    "coordinates",
    "legacy_entries",
    "open_ranks",
    "world_runs",
]

MODEL_FILE = "model_optim_rng.pt"
OPTIMIZER_FILE = "distrib_optim.pt"
EXPERT = re.compile(r"(?:^|\.)experts\.")
CHUNK = re.compile(r"model(\d+)?")
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_SLOTS = {"param": MAIN_PARAM, "fp32_param": MAIN_PARAM}


# ---------------------------------------------------------------------------------------------------- ranks and folders


@dataclass(frozen=True, eq=False)
class Rank:
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


def open_ranks(store: LocalStore) -> list[Rank]:
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
        tp, pp, ep = coordinates(name, args, store.label(name))
        ranks.append(Rank(name, tp, pp, ep, archive, _open_optimizer(store, name)))
    ranks.sort(key=lambda rank: (rank.pp, rank.ep, rank.tp))
    _check_grid(store, ranks, args)
    return ranks


def _open_model(store: LocalStore, folder: str) -> Archive:
    archive = read_archive(store, f"{folder}/{MODEL_FILE}")
    if not isinstance(archive.value, dict):
        raise CorruptError("the file holds no dict", file=archive.file, found=type(archive.value).__name__)
    return archive


def _open_optimizer(store: LocalStore, folder: str) -> Archive | None:
    name = f"{folder}/{OPTIMIZER_FILE}"
    return read_archive(store, name) if (store.root / name).exists() else None


def coordinates(folder: str, args: Args, label: str) -> tuple[int, int, int]:
    """Tensor, pipeline and expert rank of a folder. One number behind the first may be either of the latter."""
    found = _RANK.fullmatch(folder)
    if found is None:
        raise CorruptError("this is no folder of a rank", file=label)
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
        file=label,
    )


def _check_grid(store: LocalStore, ranks: Sequence[Rank], args: Args) -> None:
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


def _has_experts(rank: Rank) -> bool:
    return any(EXPERT.search(name) for _, chunk in _model_chunks(rank) for name in _flat_names(chunk))


def _flat_names(chunk: Value) -> Iterator[str]:
    yield from (name for name, _ in _flattened(chunk))


def _model_chunks(rank: Rank) -> list[tuple[int, Value]]:
    """The virtual pipeline chunks of a rank's model, in order."""
    found = [(int(m[1] or 0), value) for key, value in rank.state.items() if (m := CHUNK.fullmatch(str(key)))]
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
class Table:
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
class Weight:
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
        return bool(EXPERT.search(self.name))

    @property
    def embedding(self) -> bool:
        """Whether it may be an embedding that pipeline stages share."""
        return self.name.endswith(("word_embeddings.weight", "output_layer.weight", "embedding.weight"))


@dataclass(frozen=True, slots=True)
class World:
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
class RankTensors:
    """A rank's weights, and the buffers of each of its optimizers (None: another rank holds that one's)."""

    rank: Rank
    weights: tuple[Weight, ...]
    optimizers: tuple[tuple[World, ...] | None, ...]


@dataclass(frozen=True)
class RankReader:
    store: LocalStore
    table: Table
    rank: Rank

    def read(self) -> RankTensors:
        weights = tuple(self.weights())
        return RankTensors(self.rank, weights, self.optimizers())

    def weights(self) -> Iterator[Weight]:
        file, archive = self.rank.file(MODEL_FILE), self.rank.model
        several = len(_model_chunks(self.rank)) > 1
        for virtual, chunk in _model_chunks(self.rank):
            for name, tensor in _flattened(chunk):
                key = f"{self.rank.folder}/{f'model{virtual}/' if several else ''}{name}"
                at = self.table.add(key, archive, file, tensor)
                held = tensor.storage
                shape = tuple(tensor.shape)
                numel = held.numel if held.dtype is not None else held.numel // itemsize(tensor.dtype)
                yield Weight(key, name, virtual, shape, tensor.dtype, at, held.key, numel, tensor.offset)

    def optimizers(self) -> tuple[tuple[World, ...] | None, ...]:
        archive = self.rank.optimizer
        if archive is None:
            return ()
        return tuple(
            None if value is None else tuple(self.buffers(archive, value, i))
            for i, value in enumerate(chained_values(_unchain(archive.value)))
        )

    def buffers(self, archive: Archive, value: Value, optimizer: int) -> Iterator[World]:
        if not isinstance(value, dict):
            raise CorruptError("an optimizer's state is no dict", file=archive.file, found=type(value).__name__)
        for index in sorted(key for key in value if type(key) is int):
            by_dtype = value[index]
            if not isinstance(by_dtype, dict) or len(by_dtype) != 1:
                raise UnsupportedError("a buffer's state is not that of one pair of dtypes", file=archive.file)
            ((dtypes, slots),) = by_dtype.items()
            yield self.world(archive, f"optimizer.distributed.{optimizer}.gbuf_idx_{index}", index, dtypes, slots)

    def world(self, archive: Archive, key: str, index: int, dtypes: Value, slots: Value) -> World:
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
        return World(index, param_dtype, grad_dtype, chunks, sum(numels), bounds)

    def add(self, archive: Archive, key: str, bucket: int, tensor: TensorRef) -> int:
        if tensor.dtype != "float32":
            raise UnsupportedError("optimizer state is not float32", file=archive.file, param=key, found=tensor.dtype)
        name = f"{self.rank.folder}/{key}{f'.bucket_idx_{bucket}' if bucket else ''}"
        return self.table.add(name, archive, self.rank.file(OPTIMIZER_FILE), tensor)


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


def legacy_entries(path: Path, store: LocalStore, ranks: Sequence[Rank], table: Table) -> Entries:
    listed = store.keys()
    files = {key: store.size(key) for key in listed}
    objects = {name: size for name, size in files.items() if name.endswith(f"/{MODEL_FILE}")}

    def load(key: str) -> Archive:
        if key not in objects:
            raise CorruptError("the checkpoint lacks an entry", file=path, param=key)
        return read_archive(store, key)

    places = tuple(table.places)
    nbytes = np.array(table.nbytes, np.int64).reshape(-1)
    chunks = Chunks(nbytes, np.full(len(places), -1, np.int64), places.__getitem__)
    common = {k: v for k, v in ranks[0].state.items() if not CHUNK.fullmatch(str(k))}
    tensors = table.tensors
    return Entries(
        path, "torch", store, tensors, objects, load, chunks, common, files, place_object=lambda key: (key, 0)
    )


def world_runs(world: World, slot: str, start: int, size: int) -> Iterator[tuple[int, int, int, int]]:
    """(chunk, element of it, element of the asked range, count) of a range of the gathered state."""
    bounds = world.bounds or (0, world.total)
    for chunk, (low, high) in zip(world.slots[slot], pairwise(bounds), strict=True):
        begin, end = max(start, low), min(start + size, high)
        if end > begin:
            yield chunk, begin - low, begin - start, end - begin

"""Formats in which state lies under the names of the model's tensors: ``fully_reshardable`` and
``fully_sharded_model_space``.

A key ``optimizer.state.<slot>.<key of the model>`` holds one slot of one tensor of the model, over all ranks. It is
stored in one of two shapes:

* that of the model's tensor, in boxes (``fully_reshardable``, and zarr arrays);
* *by fragments*: ``[fragments along each axis..., elements of one]``. Tensor-parallel ranks, layers and experts cut a
  tensor into a grid of equal fragments; each is flattened, and data-parallel ranks hold runs of it. Megatron-Core to
  0.15 wrote tensors with more than one axis so, and from 0.11 on all. The tensor's own shape stands in the metadata
  (``nd_reformulated_orig_global_shape``) or is that of the model's weight.

Nothing here reads a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

import numpy as np

from ...core.boxes import Box
from ...core.errors import CorruptError, UnsupportedError
from ...encodings.dcp_metadata import TensorEntry
from ...model.catalog import Catalog
from ...model.state import MAIN_PARAM, Group, LossScale, ParamSpec, PartState, SlotSpec
from .boxes import BoxPiece, BoxPlacement
from .entries import Entries, IntTable, StoredTensor
from .model import Evidence, KeyBox, LocalParam, MegatronPart
from .stacks import layer_name, stack_of, stacked_keys

__all__ = ["Assign", "ModelSpace", "SpaceOptions", "is_state_key", "model_keys", "read_model_space", "split_key"]

_STATE = re.compile(r"(?:chained_\d+\.)*optimizer\.state\.([^.]+)\.(.+)", re.DOTALL)
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)*optimizer\.")
_MAIN_SLOTS = ("param", "fp32_param")
_SLOT_ORDER = (MAIN_PARAM, "exp_avg", "exp_avg_sq")
_EXPERT = re.compile(r"(?:^|\.)experts\.")

Assign = Callable[[Sequence[ParamSpec]], Sequence[int]]
"""Gives each param its group."""


@dataclass(frozen=True, slots=True)
class SpaceOptions:
    """What the common state tells of the params.

    ``experts_apart``: whether experts have an optimizer of their own; None where no file tells, then they have.
    ``num_layers``: as the arguments state it. ``grads_in_float32``: of params whose dtype is another.
    """

    groups: tuple[Group, ...] = ({},)
    step: int = 0
    loss_scale: LossScale | None = None
    experts_apart: bool | None = None
    num_layers: int | None = None
    grads_in_float32: bool = True
    assign: Assign = field(default=lambda params: [0] * len(params))


@dataclass(frozen=True, slots=True)
class ModelSpace:
    """``part`` holds all params that have state; ``model_keys`` are the other tensors, the model's own."""

    part: MegatronPart
    model_keys: tuple[str, ...]
    notices: tuple[str, ...] = ()


def split_key(key: str) -> tuple[str, str] | None:
    """Slot and key of the model of a key that holds state, by our slots' names; None for another key. Pure."""
    found = _STATE.fullmatch(key)
    if found is None:
        return None
    return (MAIN_PARAM if found[1] in _MAIN_SLOTS else found[1]), found[2]


def is_state_key(key: str) -> bool:
    return split_key(key) is not None


def model_keys(entries: Entries) -> tuple[str, ...]:
    """Keys of tensors that are no optimizer's, in the order of the file. Pure."""
    return tuple(key for key in entries.tensors if not _OPTIMIZER.match(key))


def read_model_space(entries: Entries, format: str, options: SpaceOptions | None = None) -> ModelSpace:
    """The one part of a checkpoint in model space, by global names and shapes.

    Raises ``CorruptError`` where chunks do not hold each element of a tensor once, or do not fit the model's shapes;
    ``UnsupportedError`` where a tensor's own shape is not known, or slots have several dtypes.
    """
    options = options or SpaceOptions()
    stored = _by_slot(entries)
    slots = _slots(stored)
    reader = _Reader(entries, options, slots)
    for key in sorted({key for table in stored.values() for key in table}, key=_natural):
        reader.add(key, [stored[slot.name].get(key) for slot in slots])
    return _assemble(reader, format)


def _by_slot(entries: Entries) -> dict[str, dict[str, StoredTensor]]:
    """Stored tensors by slot and key of the model. Two that say the same of a param are refused."""
    table: dict[str, dict[str, StoredTensor]] = {}
    for key, tensor in entries.tensors.items():
        named = split_key(key)
        if named is None:
            continue
        slot, of = named
        twin = table.setdefault(slot, {}).setdefault(of, tensor)
        if twin is not tensor:
            raise CorruptError(
                "two entries hold one slot of a param", file=entries.path, param=of, found=f"{twin.key} and {key}"
            )
    if MAIN_PARAM not in table:
        raise CorruptError(
            "the checkpoint has no main params", file=entries.path, expected="keys optimizer.state.param.*"
        )
    return table


def _slots(stored: Mapping[str, Mapping[str, StoredTensor]]) -> tuple[SlotSpec, ...]:
    names = [name for name in _SLOT_ORDER if name in stored] + sorted(stored.keys() - set(_SLOT_ORDER))
    return tuple(SlotSpec(name, _one_dtype(name, stored[name])) for name in names)


def _one_dtype(slot: str, tensors: Mapping[str, StoredTensor]) -> str:
    first = next(iter(tensors.values()))
    for key, tensor in tensors.items():
        if tensor.dtype != first.dtype:
            raise UnsupportedError(
                f"slot {slot} has several dtypes", param=key, found=tensor.dtype, expected=first.dtype
            )
    return first.dtype


# ----------------------------------------------------------------------------------------------------------- one tensor


@dataclass(frozen=True, slots=True)
class _Run:
    """Elements [start, start + size) of the flattened ``box`` of a tensor lie in ``chunk`` from byte ``at`` on."""

    box: Box
    start: int
    size: int
    chunk: int
    at: int


def _runs(tensor: StoredTensor, shape: tuple[int, ...], key: str) -> Iterator[_Run]:
    """Where the elements of a tensor of ``shape`` lie, in coordinates of that shape. Pure. Raises ``CorruptError``."""
    if tensor.shape == shape:
        for start, size, chunk in _rows(tensor):
            yield _Run(Box(start, size), 0, prod(size), chunk, 0)
        return
    local = _fragment_shape(tensor.shape, shape, key)
    for start, size, chunk in _rows(tensor):
        for row, index in enumerate(np.ndindex(*size[:-1])):
            corner = tuple((low + i) * n for low, i, n in zip(start, index, local, strict=False))
            yield _Run(Box(corner, local), start[-1], size[-1], chunk, row * size[-1] * tensor.itemsize)


def _rows(tensor: StoredTensor) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    rows = zip(tensor.offsets.tolist(), tensor.sizes.tolist(), tensor.chunks.tolist(), strict=True)
    for start, size, chunk in rows:
        if all(size):
            yield tuple(start), tuple(size), chunk


def _fragment_shape(stored: tuple[int, ...], shape: tuple[int, ...], key: str) -> tuple[int, ...]:
    """The shape of one fragment of a tensor that is stored by fragments."""
    cuts = stored[:-1]
    local = tuple(n // max(c, 1) for n, c in zip(shape, cuts, strict=False))
    whole = len(cuts) == len(shape) and all(c * n == m for c, n, m in zip(cuts, local, shape, strict=True))
    if not whole or prod(local) != stored[-1]:
        raise CorruptError(
            "the stored shape is neither the tensor's nor one of its fragments",
            param=key,
            found=list(stored),
            expected=f"{list(shape)}, or a number of fragments for each axis and the elements of one",
        )
    return local


def _check_coverage(tensor: StoredTensor, key: str, file: object) -> None:
    """Each element of a stored tensor must lie in one chunk. Raises ``CorruptError`` with what does not."""
    problem = _run_problem(tensor) if _by_runs(tensor) else _box_problem(tensor)
    if problem is not None:
        raise CorruptError(
            f"the chunks of {tensor.key} do not hold each element once",
            file=file,
            param=key,
            found=problem,
            hint="the checkpoint is not whole; restore it from a copy",
        )


def _by_runs(tensor: StoredTensor) -> bool:
    """Whether chunks are runs of rows of the last axis."""
    return bool((tensor.sizes[:, :-1] == 1).all()) and len(tensor.shape) > 0


def _run_problem(tensor: StoredTensor) -> str | None:
    """Of chunks that are runs of rows: the first gap or overlap, as elements of the stored tensor."""
    starts = _flat(tensor.shape, tensor.offsets)
    keep = np.flatnonzero(tensor.sizes[:, -1] > 0)
    order = keep[np.argsort(starts[keep], kind="stable")]
    begins, ends = starts[order], (starts + tensor.sizes[:, -1])[order]
    edges = [(0, 0), *zip(begins.tolist(), ends.tolist(), strict=True), (prod(tensor.shape), prod(tensor.shape))]
    for (_, end), (begin, _) in pairwise(edges):
        if end < begin:
            return f"elements [{end}, {begin}) in no chunk"
        if end > begin:
            return f"elements [{begin}, {end}) in two chunks"
    return None


def _flat(shape: tuple[int, ...], offsets: IntTable) -> IntTable:
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    flat: IntTable = offsets @ np.array(strides, np.int64)
    return flat


def _box_problem(tensor: StoredTensor) -> str | None:
    none = np.zeros(len(tensor.chunks), np.int64)
    entry = TensorEntry(tensor.key, tensor.dtype, tensor.shape, tensor.offsets, tensor.sizes, none, none, none)
    return entry.coverage_problem()


# ---------------------------------------------------------------------------------------------------------- all params


class _Reader:
    """Collects params, local params and pieces, one key of the model after the other."""

    def __init__(self, entries: Entries, options: SpaceOptions, slots: Sequence[SlotSpec]) -> None:
        self.entries, self.options, self.slots = entries, options, slots
        self.model = {key: entries.tensors[key] for key in model_keys(entries)}
        self.params: list[ParamSpec] = []
        self.locals: list[LocalParam] = []
        self.pieces: list[BoxPiece] = []
        self.absent: set[tuple[int, int]] = set()
        self.without_weight: list[str] = []
        self.stacked = self._stacked()

    def _stacked(self) -> frozenset[str]:
        """Stacked keys, of the model and of state whose weights are not stored."""
        known = dict(self.model)
        for key, tensor in self.entries.tensors.items():
            named = split_key(key)
            if named is not None and named[1] not in known and self.entries.original_shape(key) is None:
                known[named[1]] = tensor
        renamed = {k: StoredTensor(k, t.dtype, t.shape, t.offsets, t.sizes, t.chunks) for k, t in known.items()}
        return stacked_keys(renamed, self.options.num_layers)

    def add(self, key: str, stored: Sequence[StoredTensor | None]) -> None:
        """``stored``: the tensor of each slot."""
        shape = self._shape(key, [tensor for tensor in stored if tensor is not None])
        first = len(self.params)
        layers = shape[0] if key in self.stacked else None
        self._add_params(key, shape, layers)
        for slot, tensor in enumerate(stored):
            if tensor is None:
                self.absent.update((param, slot) for param in range(first, len(self.params)))
                continue
            _check_coverage(tensor, key, self.entries.path)
            for run in _runs(tensor, shape, key):
                self.pieces += _pieces(run, slot, first, tensor.itemsize, stacked=layers is not None)

    def _shape(self, key: str, stored: Sequence[StoredTensor]) -> tuple[int, ...]:
        """The shape of the model's tensor: as the metadata states it, else that of the weight, else as stored."""
        stated = {shape for tensor in stored if (shape := self.entries.original_shape(tensor.key)) is not None}
        weight = self.model.get(key)
        known = stated | ({weight.shape} if weight is not None else set())
        if len(known) > 1:
            raise CorruptError(
                "the metadata states two shapes of a param",
                file=self.entries.path,
                param=key,
                found=" and ".join(str(list(shape)) for shape in sorted(known)),
            )
        if known:
            return next(iter(known))
        return self._shape_as_stored(key, stored)

    def _shape_as_stored(self, key: str, stored: Sequence[StoredTensor]) -> tuple[int, ...]:
        """Without a weight: the main param's key tells by its name whether it may be stored by fragments."""
        shapes = {tensor.shape for tensor in stored}
        if len(shapes) > 1 or any(".fp32_param." in tensor.key for tensor in stored):
            raise UnsupportedError(
                "a param's own shape is not known: the checkpoint holds no weight of this name",
                file=self.entries.path,
                param=key,
                found=f"stored as {' and '.join(str(list(shape)) for shape in sorted(shapes))}",
            )
        return shapes.pop()

    def _add_params(self, key: str, shape: tuple[int, ...], layers: int | None) -> None:
        weight = self.model.get(key)
        if weight is None:
            self.without_weight.append(key)
        dtype = weight.dtype if weight is not None else "float32"
        grad = "float32" if self.options.grads_in_float32 or dtype == "float32" else dtype
        expert = bool(_EXPERT.search(key)) and self.options.experts_apart is not False
        for layer in range(layers if layers is not None else 1):
            name, box = key, Box((0,) * len(shape), shape)
            if layers is not None:
                name, box = layer_name(key, layer), Box((layer, *(0 for _ in shape[1:])), (1, *shape[1:]))
            spec = ParamSpec(name, shape if layers is None else shape[1:], dtype, grad, 0, expert)
            boxes = (KeyBox(key, box),) if weight is not None else ()
            self.locals.append(LocalParam(name, len(self.params), 0, spec.numel, dtype, grad, expert, False, boxes))
            self.params.append(spec)


def _pieces(run: _Run, slot: int, first: int, itemsize: int, *, stacked: bool) -> Iterator[BoxPiece]:
    """A run of a stacked tensor, by layers."""
    if not stacked:
        yield BoxPiece(first, slot, run.box, run.start, run.size, run.chunk, run.at)
        return
    inner = Box(run.box.start[1:], run.box.shape[1:])
    for i in range(run.box.shape[0]):
        low = max(run.start - i * inner.size, 0)
        high = min(run.start + run.size - i * inner.size, inner.size)
        if low < high:
            at = run.at + (i * inner.size + low - run.start) * itemsize
            yield BoxPiece(first + run.box.start[0] + i, slot, inner, low, high - low, run.chunk, at)


_FIRST = {"embedding": 0, "encoder": 1, "decoder": 2, "mtp": 4, "output_layer": 5}
_BEHIND_LAYERS = {"final_layernorm": 1, "final_norm": 1}


def _natural(key: str) -> tuple[object, ...]:
    """Order of keys: modules as Megatron's models register them, numbers by value. No file states the order."""
    parts = key.split(".")
    head = [(_FIRST.get(part, 3), _BEHIND_LAYERS.get(part, 0)) for part in [*parts[:2], ""][:2]]
    return (head, [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts])


def _assemble(reader: _Reader, format: str) -> ModelSpace:
    options, entries = reader.options, reader.entries
    order = _layer_by_layer(reader.params)
    place = {old: new for new, old in enumerate(order)}
    params = [reader.params[i] for i in order]
    params = [_in_group(p, group) for p, group in zip(params, options.assign(params), strict=True)]
    state = PartState(
        tuple(params),
        tuple(reader.slots),
        options.step,
        options.groups,
        absent=frozenset((place[param], slot) for param, slot in reader.absent),
        loss_scale=options.loss_scale,
    )
    pieces = tuple(BoxPiece(place[p.param], p.slot, p.box, p.start, p.size, p.chunk, p.at) for p in reader.pieces)
    itemsizes = tuple(slot.itemsize for slot in reader.slots)
    placement = BoxPlacement(tuple(p.shape for p in params), itemsizes, pieces, entries.chunks)
    locals_ = tuple(_moved(reader.locals[old], place) for old in order)
    catalog = Catalog(format, entries.container, "", state, None, placement)
    evidence = Evidence("names", sum(param.numel for param in params))
    part = MegatronPart("", catalog, locals_, None, evidence)
    return ModelSpace(part, model_keys(entries), _notices(reader))


def _layer_by_layer(params: Sequence[ParamSpec]) -> list[int]:
    """Params of one layer next to each other: stacked keys came one after the other."""
    return sorted(range(len(params)), key=lambda i: _natural(params[i].name))


def _in_group(param: ParamSpec, group: int) -> ParamSpec:
    return ParamSpec(
        param.name, param.shape, param.dtype, param.grad_dtype, group, param.expert, param.shared_embedding
    )


def _moved(local: LocalParam, place: Mapping[int, int]) -> LocalParam:
    new = place[local.param]
    return LocalParam(
        local.name,
        new,
        0,
        local.numel,
        local.dtype,
        local.grad_dtype,
        local.expert,
        local.shared_embedding,
        local.boxes,
    )


def _notices(reader: _Reader) -> tuple[str, ...]:
    notices = []
    if reader.without_weight:
        keys = reader.without_weight
        more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
        notices.append(f"{keys[0]}{more}: the checkpoint holds no weight of this name, so its state cannot be proved")
    doubtful = [k for k in reader.model if stack_of(k) is not None and k not in reader.stacked]
    if doubtful:
        notices.append(f"{doubtful[0]}: its first axis is not known to be one of layers; the key is kept as it is")
    return tuple(notices)

"""The model's own tensors of a Megatron checkpoint, as a part whose params are those tensors."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from ..core.boxes import Box
from ..encodings.inert_pickle import Record
from ..foreign.megatron.boxes import BoxPiece, BoxPlacement
from ..foreign.megatron.entries import StoredTensor
from ..foreign.megatron.model import MegatronCheckpoint
from ..foreign.megatron.stacks import layer_name, stacked_keys
from ..model.catalog import Catalog
from ..model.state import ParamSpec, PartState, SlotSpec

__all__ = ["WEIGHT", "weights_catalog"]

WEIGHT = "weight"
"""Slot of a model tensor; each has one, of its own dtype."""


def weights_catalog(checkpoint: MegatronCheckpoint, *, split: bool = False) -> Catalog:
    """All tensors of the model by their keys, in the order of the file; with ``split`` those that are stacked over
    layers by layer, under the names that params have, and those of the only rank without its folder. Reads no data.
    """
    tensors = {key: checkpoint.entries.tensors[key] for key in checkpoint.model_keys}
    folders = {key.partition("/")[0] for key in tensors} if checkpoint.by_rank else set()
    if split and len(folders) == 1:
        tensors = {key.partition("/")[2] or key: tensor for key, tensor in tensors.items()}
    apart = split and not checkpoint.by_rank  # whose ranks name layers by number
    stacked = stacked_keys(tensors, _num_layers(checkpoint)) if apart else frozenset()
    dtypes = tuple(dict.fromkeys(tensor.dtype for tensor in tensors.values()))
    slots = tuple(SlotSpec(WEIGHT, dtype) for dtype in dtypes)
    params: list[ParamSpec] = []
    slot_of: list[int] = []
    pieces: list[BoxPiece] = []
    for key, tensor in tensors.items():
        first, slot = len(params), dtypes.index(tensor.dtype)
        if key in stacked:
            params += [_spec(layer_name(key, i), tensor.shape[1:], tensor) for i in range(tensor.shape[0])]
            pieces += _layers(tensor, first, slot)
        else:
            params.append(_spec(key, tensor.shape, tensor))
            pieces += _chunks(tensor, first, slot)
        slot_of += [slot] * (len(params) - first)
    absent = frozenset((i, k) for i, own in enumerate(slot_of) for k in range(len(slots)) if k != own)
    state = PartState(tuple(params), slots, absent=absent)
    sizes = tuple(next(t.itemsize for t in tensors.values() if t.dtype == dtype) for dtype in dtypes)
    placement = BoxPlacement(tuple(p.shape for p in params), sizes, tuple(pieces), checkpoint.entries.chunks)
    return Catalog(checkpoint.format, checkpoint.container, "", state, None, placement)


def _spec(name: str, shape: tuple[int, ...], tensor: StoredTensor) -> ParamSpec:
    return ParamSpec(name, shape, tensor.dtype, tensor.dtype)


def _rows(tensor: StoredTensor) -> Iterator[tuple[list[int], list[int], int]]:
    return zip(tensor.offsets.tolist(), tensor.sizes.tolist(), tensor.chunks.tolist(), strict=True)


def _chunks(tensor: StoredTensor, param: int, slot: int) -> Iterator[BoxPiece]:
    for start, shape, chunk in _rows(tensor):
        yield BoxPiece(param, slot, Box(tuple(start), tuple(shape)), 0, prod(shape), chunk)


def _layers(tensor: StoredTensor, first: int, slot: int) -> Iterator[BoxPiece]:
    """Each chunk by the layers that it holds."""
    for start, shape, chunk in _rows(tensor):
        inner = prod(shape[1:])
        box = Box(tuple(start[1:]), tuple(shape[1:]))
        for i in range(shape[0]):
            yield BoxPiece(first + start[0] + i, slot, box, 0, inner, chunk, i * inner * tensor.itemsize)


def _num_layers(checkpoint: MegatronCheckpoint) -> int | None:
    args = checkpoint.entries.common.get("args")
    value = args.get("num_layers") if isinstance(args, Record) else None
    return value if type(value) is int else None

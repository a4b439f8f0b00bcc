"""``zero1ckpt.write``: a checkpoint from whole tensors in memory, for any dp size, without processes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.errors import UnsupportedError, UsageError
from ..core.layout import LayoutRules, layout_params
from ..model.catalog import Catalog, Extents, TablePlacement
from ..model.manifest import FormatOptions
from ..model.state import MAIN_PARAM, ParamSpec, PartState, Scalar, SlotSpec
from ..model.values import is_text
from ..registry import DEFAULT_FORMAT, find_format
from ..resharding.copying import PartCopy
from ..resharding.plan import correspond
from ..storage.memory import MemoryBlobs
from ..storage.staging import Staging, staged
from .checkpoint import Checkpoint
from .checkpoint import open as open_checkpoint
from .commit import (
    check_overwrite,
    check_space,
    encode_manifest_of,
    group_values,
    prepare_extra,
    window_bytes,
    workers_or_default,
    write_extra,
    write_part,
)
from .stored import part_prefix
from .tensors import dtype_name, stored_dtype, tensor_bytes

if TYPE_CHECKING:
    import torch

__all__ = ["build_state", "parse_bucket_size", "write"]

State = Mapping[str, Mapping[str, "torch.Tensor"]]


def write(
    path: str | os.PathLike[str],
    state: State,
    *,
    dp_size: int,
    bucket_size: int | str | None = None,
    format: str = DEFAULT_FORMAT,
    container: str | None = None,
    groups: Sequence[Mapping[str, Any]] | None = None,
    step: int = 0,
    extra: Any = None,
    params: Mapping[str, Mapping[str, Any]] | None = None,
    pad_for_high_nccl_busbw: bool = False,
    options: FormatOptions | None = None,
    overwrite: bool = False,
    workers: int | None = None,
) -> Checkpoint:
    """Writes the checkpoint that ``dp_size`` ranks would save of this state.

    ``state``: name -> {slot: tensor}, params in registration order. A slot has the param's shape, or no dimensions
    whatever the param's shape (a per-param ``step``); the param's shape is that of its ``fp32_param``, else of its
    first slot. ``bucket_size``: elements, or None or "none" for one bucket a buffer. ``groups``: hyper-parameters, each
    with ``params``, a list of names; a name in no group is an error unless there is only one group. ``params``: name ->
    {dtype, grad_dtype, expert, shared_embedding}; dtypes default to that of ``fp32_param``.

    Raises ``UsageError`` for state that is not well-formed, ``UnsupportedError`` for what the format cannot hold,
    ``OutputError`` where it cannot be written.
    """
    plugin = find_format(format, container)
    choices = plugin.normalize(options or FormatOptions())
    rules = make_rules(dp_size, parse_bucket_size(bucket_size), pad_for_high_nccl_busbw)
    part_state, group_tensors = build_state(state, groups=groups, step=step, params=params)
    json, extra_tensors = prepare_extra(extra)
    src, source = _memory_catalog(part_state, state)
    dst = plugin.plan(part_state, layout_params(part_state.params, rules), "", part_prefix(""), choices)
    target = Path(path).resolve()
    check_overwrite(target, overwrite)
    check_space(target, sum(dst.placement.payload_nbytes(b) for b in range(dst.placement.blob_count)))
    threads = workers_or_default(workers)
    with staged(Staging(target, {"command": "write"}, overwrite=overwrite)) as staging:
        part = PartCopy(src, source, dst, plugin, correspond(part_state, part_state))
        made, files = write_part(part, staging, workers=threads, window_bytes=window_bytes(None, threads), prove=False)
        files += write_extra(staging, [*group_tensors, *extra_tensors])
        manifest = encode_manifest_of(plugin, [made], files, extra=json, options=choices)
        staging.publish("manifest.json", manifest)
    return open_checkpoint(target)


def parse_bucket_size(bucket_size: int | str | None) -> int | None:
    """Elements of a bucket, None for one bucket a buffer. Raises ``UsageError``."""
    if bucket_size is None or bucket_size == "none":
        return None
    if not is_integer(bucket_size) or int(bucket_size) < 1:
        raise UsageError("bucket size", found=bucket_size, expected='a number of elements from 1 on, or "none"')
    return int(bucket_size)


def make_rules(dp_size: int, bucket_size: int | None, pad_for_high_nccl_busbw: bool = False) -> LayoutRules:
    """Raises ``UsageError`` for sizes out of range."""
    if not is_integer(dp_size) or not 1 <= dp_size <= 99_999:
        raise UsageError("dp size", found=dp_size, expected="a number of ranks from 1 to 99999")
    return LayoutRules(dp_size, bucket_size, pad_for_high_nccl_busbw=pad_for_high_nccl_busbw)


def is_integer(value: object) -> bool:
    """Whether a value is an integer; a bool is not meant as one."""
    return isinstance(value, int) and not isinstance(value, bool)


def build_state(
    state: State,
    *,
    groups: Sequence[Mapping[str, Any]] | None,
    step: int,
    params: Mapping[str, Mapping[str, Any]] | None,
) -> tuple[PartState, list[Any]]:
    """A part's state as values, and the tensors of its groups. Slots are put in canonical order. Pure."""
    if not is_integer(step) or step < 0:
        raise UsageError("step", found=step, expected="an integer that is not negative")
    _check_tensors(state)
    names = list(state)
    for name in params or {}:
        if name not in state:
            raise UsageError("params= names a param that has no state", param=name)
    hyper, group_of = _groups(groups, names)
    scalar_slots = _scalar_slots(state)
    specs = tuple(
        _spec(name, state[name], (params or {}).get(name, {}), group_of[name], scalar_slots) for name in names
    )
    whole = _whole_slots(state, scalar_slots)
    slots = canonical_slots(_slot_dtypes(state, scalar_slots), whole)
    shapes = {
        (i, k): tuple(state[name][slot.name].shape)
        for i, name in enumerate(names)
        for k, slot in enumerate(slots)
        if slot.whole and slot.name in state[name]
    }
    absent = frozenset(
        (i, k) for i, name in enumerate(names) for k, slot in enumerate(slots) if slot.name not in state[name]
    )
    scalars = tuple(
        {s: Scalar(dtype_name(t.dtype), t.item()) for s, t in state[name].items() if s in scalar_slots}
        for name in names
    )
    encoded, tensors = group_values(hyper, "")
    own = scalars if scalar_slots else ()
    return PartState(specs, slots, step, encoded, own, absent, shapes=shapes), tensors


def _check_tensors(state: State) -> None:
    import torch

    for name, slots in state.items():
        _check_name("the name of a param", name)
        for slot, tensor in slots.items():
            _check_name(f"{name}: the name of a slot", slot)
            if not isinstance(tensor, torch.Tensor):
                raise UsageError(
                    f"slot {slot} is no tensor", param=name, found=type(tensor).__name__, expected="torch.Tensor"
                )
            stored_dtype(tensor, f"{name}: {slot}")


def _check_name(what: str, name: object) -> None:
    if not isinstance(name, str) or not is_text(name):
        raise UsageError(f"{what} is no text", found=ascii(name), expected="a str that UTF-8 can hold")


def canonical_slots(dtypes: Mapping[str, str], whole: Set[str] = frozenset()) -> tuple[SlotSpec, ...]:
    """Slots in the order that files have them: the main param, other elementwise ones by name, whole ones. Pure."""
    names = sorted(dtypes, key=lambda name: (name in whole, name != MAIN_PARAM, name))
    return tuple(SlotSpec(name, dtypes[name], name in whole) for name in names)


def _whole_slots(state: State, scalars: Set[str]) -> set[str]:
    """Slots with a shape of their own for every param (of more than one element).

    Raises ``UnsupportedError`` for one that is whole for some params only, or that is transposed or flattened.
    """
    whole: dict[str, str] = {}
    elementwise: dict[str, str] = {}
    for name, slots in state.items():
        shape = _shape(slots)
        for slot, tensor in slots.items():
            own = tuple(tensor.shape)
            if slot in scalars or own == shape:
                if slot not in scalars and prod(shape) > 1:
                    elementwise.setdefault(slot, name)
                continue
            if slot == MAIN_PARAM or slot in elementwise or prod(own) == prod(shape) > 1:
                raise _wrong_shape(name, slot, own, shape)
            whole.setdefault(slot, name)
    for slot in whole.keys() & elementwise.keys():
        name = whole[slot]
        raise _wrong_shape(name, slot, tuple(state[name][slot].shape), _shape(state[name]))
    return set(whole)


def _wrong_shape(name: str, slot: str, own: tuple[int, ...], shape: tuple[int, ...]) -> UnsupportedError:
    return UnsupportedError(
        f"slot {slot} has not the param's shape",
        param=name,
        found=list(own),
        expected=list(shape),
        hint="a slot has the param's shape, no dimensions, or for all params a shape of its own",
    )


def _groups(
    groups: Sequence[Mapping[str, Any]] | None, names: list[str]
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    given = [dict(group) for group in (groups or [{}])]
    members = [group.pop("params", None) for group in given]
    if len(given) == 1 and members[0] is None:
        return given, dict.fromkeys(names, 0)
    known = set(names)
    group_of: dict[str, int] = {}
    for index, member in enumerate(members):
        for name in member or []:
            if not isinstance(name, str) or name not in known:
                raise UsageError(f"group {index} names a param that has no state", param=str(name))
            if name in group_of:
                raise UsageError("the param is in two groups", param=name, found=f"{group_of[name]} and {index}")
            group_of[name] = index
    left = [name for name in names if name not in group_of]
    if left:
        raise UsageError("the param is in no group", param=left[0], hint="list it in one group's params")
    return given, group_of


def _scalar_slots(state: State) -> set[str]:
    """Slots without dimensions: for every param, and for one at least that has dimensions (or named ``step``)."""
    flat: dict[str, bool] = {}
    beside: set[str] = set()
    for slots in state.values():
        shape = _shape(slots)
        for slot, tensor in slots.items():
            flat[slot] = flat.get(slot, True) and tensor.ndim == 0
            if tensor.ndim == 0 and (shape != () or slot == "step"):
                beside.add(slot)
    return {slot for slot, is_flat in flat.items() if is_flat and slot in beside and slot != MAIN_PARAM}


def _shape(slots: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
    if MAIN_PARAM in slots:
        return tuple(slots[MAIN_PARAM].shape)
    return next((tuple(t.shape) for t in slots.values() if t.ndim), ())


def _spec(
    name: str, slots: Mapping[str, torch.Tensor], stated: Mapping[str, Any], group: int, scalars: set[str]
) -> ParamSpec:
    shape = _shape(slots)
    unknown = set(stated) - {"dtype", "grad_dtype", "expert", "shared_embedding"}
    if unknown:
        raise UsageError("params= has an unknown key", param=name, found=sorted(unknown)[0])
    own = dtype_name(slots[MAIN_PARAM].dtype) if MAIN_PARAM in slots else "float32"
    dtype = str(stated.get("dtype", own)).removeprefix("torch.")
    grad_dtype = str(stated.get("grad_dtype", own)).removeprefix("torch.")
    for value in (dtype, grad_dtype):
        SlotSpec(name, value).itemsize  # noqa: B018  raises for a dtype that nothing can hold
    return ParamSpec(
        name,
        shape,
        dtype,
        grad_dtype,
        group,
        bool(stated.get("expert", False)),
        bool(stated.get("shared_embedding", False)),
    )


def _slot_dtypes(state: State, scalars: set[str]) -> dict[str, str]:
    found: dict[str, tuple[str, str]] = {}
    for name, slots in state.items():
        for slot, tensor in slots.items():
            dtype = dtype_name(tensor.dtype)
            first, known = found.setdefault(slot, (name, dtype))
            if known != dtype:
                raise UnsupportedError(
                    f"slot {slot} has not one dtype", param=name, found=dtype, expected=f"{known}, as for {first}"
                )
    return {slot: dtype for slot, (_, dtype) in found.items() if slot not in scalars}


def _memory_catalog(state: PartState, tensors: State) -> tuple[Catalog, MemoryBlobs]:
    """The state as a checkpoint whose blobs are the tensors."""
    rows = []
    views: list[list[memoryview]] = []
    for i, spec in enumerate(state.params):
        for k, slot in enumerate(state.slots):
            if (i, k) not in state.absent:
                view = tensor_bytes(tensors[spec.name][slot.name])
                rows.append((i, k, 0, view.nbytes // slot.itemsize, len(views), 0, view.nbytes))
                views.append([view])
    columns = np.array(rows, np.int64).reshape(-1, 7).T
    keys = tuple(f"memory {i}" for i in range(len(views)))
    payloads = tuple(sum(v.nbytes for v in view) for view in views)
    placement = TablePlacement(keys, payloads, Extents(*columns), len(state.slots))
    return Catalog("memory", "memory", "", state, None, placement), MemoryBlobs(dict(enumerate(views)))

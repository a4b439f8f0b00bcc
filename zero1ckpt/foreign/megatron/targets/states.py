"""The optimizer's state without tensors of params: groups and loss scale, in the common state or in objects by group.

``fully_reshardable`` keeps it in the common state, once an optimizer; bucket formats keep it in objects, once a
data-parallel group. All other values of the common state are kept as they are.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from ....core.errors import CorruptError, UnsupportedError
from ....encodings.inert_pickle import Record, StorageRef, TensorRef, Value
from ....encodings.inert_pickle.writer import dump
from ....encodings.torch_archive import Archive, plan_archive, read_member, tensor_itemsize
from ....storage.local import LocalStore
from ..common import chained_values
from .origin import COMMON_ENTRY, Origin

__all__ = [
    "GroupObject",
    "StateValue",
    "common_bytes",
    "content_metadata",
    "group_objects",
    "is_layout_object",
    "merged_states",
    "states_in_common",
    "write_value",
]

_GROUP_OBJECT = re.compile(
    r"((?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+))\.([^.]+)/shard_[\d.]+_[\d.]+"
)
_LAYOUT_FIELDS = frozenset({"param_state", "per_bucket_numel", "per_bucket_numel_unpadded"})
_IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""What Megatron finds a group by, each also with ``pre_`` before it (NeMo)."""
_NOT_STATE = frozenset({"param_state", "param_state_sharding_type"})


@dataclass(frozen=True)
class StateValue:
    """A value with the bytes of the storages that its tensors lie in, by key. Keys are unique within one value."""

    value: Value
    storages: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class GroupObject:
    """An object of a data-parallel group: ``field`` is "optimizer", "grad_scaler" and so on."""

    key: str
    chained: int | None
    group: int
    field: str


def group_objects(origin: Origin) -> Iterator[GroupObject]:
    """All objects that belong to a data-parallel group's optimizer, in the order of their keys."""
    for key in sorted(origin.objects):
        found = _GROUP_OBJECT.fullmatch(key)
        if found:
            yield GroupObject(key, None if found[2] is None else int(found[2]), int(found[3]), found[4])


def is_layout_object(item: GroupObject) -> bool:
    """Whether an object states the layout itself, or holds the params' state."""
    return item.field in _LAYOUT_FIELDS


# ---------------------------------------------------------------------------------------------------- values, storages


def read_value(store: LocalStore, archive: Archive) -> StateValue:
    """An archive's value, without the list of one that torch_dist puts around an object, and its storages' bytes."""
    file = PurePath(archive.file).relative_to(store.root).as_posix()
    value = archive.value
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    storages = {}
    for ref in _storages(value):
        storages[ref.key] = read_member(store, file, archive.storage(ref))
    return StateValue(value, storages)


def _storages(value: Value) -> Iterator[StorageRef]:
    """Storages of all tensors in a value, each once, in the order in which they are met."""
    seen: set[str] = set()
    for tensor in _tensors(value):
        if tensor.storage.key not in seen:
            seen.add(tensor.storage.key)
            yield tensor.storage


def _tensors(value: Value) -> Iterator[TensorRef]:
    if isinstance(value, TensorRef):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(key)
            yield from _tensors(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Record):
        for item in (value.args, value.kwargs, value.state, value.pairs, value.entries):
            yield from _tensors(item)


def _renamed(value: Value, names: Mapping[str, str]) -> Value:
    """A value whose tensors lie in storages of other keys. Objects of classes are left as they are."""
    if isinstance(value, TensorRef):
        return replace(value, storage=replace(value.storage, key=names[value.storage.key]))
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _renamed(item, names)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_renamed(item, names) for item in value)
    return value


def write_value(made: StateValue) -> bytes:
    """The archive of a value, as ``torch.save`` makes it. Pure."""
    refs = list(_storages(made.value))
    sizes = []
    for ref in refs:
        nbytes = ref.numel * (1 if ref.dtype is None else tensor_itemsize(ref.dtype))
        if nbytes != len(made.storages[ref.key]):
            raise CorruptError("a tensor's storage has another size than it should", found=len(made.storages[ref.key]))
        sizes.append((ref.key, nbytes))
    plan = plan_archive(made.value, sizes)
    out = bytearray(plan.nbytes)
    crcs = []
    for hole in plan.holes:
        data = made.storages[hole.key]
        out[hole.offset : hole.offset + hole.nbytes] = data
        crcs.append(_crc32(data))
    for at, run in plan.runs(crcs):
        out[at : at + len(run)] = run
    return bytes(out)


def _crc32(data: bytes) -> int:
    import zlib

    return zlib.crc32(data)


# ------------------------------------------------------------------------------------------------- from one to another


def states_in_common(origin: Origin) -> dict[int | None, dict[str, StateValue]]:
    """State by optimizer (None for the only one) and field, where it lies in the common state."""
    archive = origin.common_archive()
    whole = read_value(origin.store, archive)
    optimizer = whole.value.get("optimizer") if isinstance(whole.value, dict) else None
    states = chained_values(optimizer)
    found: dict[int | None, dict[str, StateValue]] = {}
    for i, state in enumerate(states):
        if not isinstance(state, dict):
            raise CorruptError("the common state holds no optimizer", file=origin.label, found=type(state).__name__)
        fields = {field: item for field, item in state.items() if field not in _NOT_STATE}
        found[None if len(states) == 1 else i] = {
            field: StateValue(item, {ref.key: whole.storages[ref.key] for ref in _storages(item)})
            for field, item in fields.items()
        }
    return found


def merged_states(origin: Origin) -> dict[int | None, dict[str, StateValue]]:
    """The same, where it lies in objects by group: groups of params that any data-parallel group names, once.

    Raises ``UnsupportedError`` where two data-parallel groups say different things.
    """
    found: dict[int | None, dict[str, StateValue]] = {}
    for item in group_objects(origin):
        if is_layout_object(item):
            continue
        value = read_value(origin.store, origin.object_archive(item.key))
        fields = found.setdefault(item.chained, {})
        known = fields.get(item.field)
        if known is None:
            fields[item.field] = value
        elif item.field == "optimizer":
            fields[item.field] = _joined(known, value, item.key)
        elif not _same(known, value):
            raise _differ(item.key)
    if not found:
        raise CorruptError("the checkpoint holds no optimizer groups", file=origin.label)
    return found


def _differ(key: str) -> UnsupportedError:
    return UnsupportedError(
        "data-parallel groups state different optimizer state, and the target holds it once",
        param=key,
        hint="choose megatron:dp_reshardable",
    )


def _joined(known: StateValue, more: StateValue, key: str) -> StateValue:
    """Two lists of param groups as one; a group is known by what Megatron finds it by."""
    first, second = _groups(known, key), _groups(more, key)
    by_id = {_identity(group, key): group for group in first}
    added = []
    for group in second:
        mine = by_id.get(_identity(group, key))
        if mine is None:
            added.append(group)
        elif dump(mine) != dump(group):
            raise _differ(key)
    if not added:
        return known
    if more.storages or known.storages:
        raise _differ(key)
    value = dict(known.value)
    value["param_groups"] = [*first, *added]
    return StateValue(value, {})


def _groups(state: StateValue, key: str) -> Sequence[Mapping[str, Value]]:
    groups = state.value.get("param_groups") if isinstance(state.value, dict) else None
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise CorruptError("an optimizer's state has no param groups", param=key)
    return groups


def _identity(group: Mapping[str, Value], key: str) -> bytes:
    values = []
    for name in _IDENTITY:
        values.append(group.get(name, group.get(f"pre_{name}")))
    return dump(values)


def _same(a: StateValue, b: StateValue) -> bool:
    """Whether two values are the same, tensors by their bytes."""
    names_a = {ref.key: str(i) for i, ref in enumerate(_storages(a.value))}
    names_b = {ref.key: str(i) for i, ref in enumerate(_storages(b.value))}
    bytes_a = [a.storages[key] for key in names_a]
    bytes_b = [b.storages[key] for key in names_b]
    return bytes_a == bytes_b and dump(_renamed(a.value, names_a)) == dump(_renamed(b.value, names_b))


# ---------------------------------------------------------------------------------------------------- the common state


def content_metadata(stored: Value, layout: str) -> dict[str, Value]:
    """What the common state says of its layouts, for a target: the rest of it stays."""
    made = dict(stored) if isinstance(stored, dict) else {}
    made["distrib_optim_sharding_type"] = layout
    made.pop("distrib_optim_fully_reshardable_mem_efficient", None)
    if layout == "fully_reshardable":
        made["distrib_optim_fully_reshardable_mem_efficient"] = False
    made.setdefault("singleton_local_shards", False)
    made["chained_optim_avoid_prefix"] = True
    return made


def common_bytes(
    origin: Origin, layout: str, states: Mapping[int | None, Mapping[str, StateValue]], *, entry: bool
) -> bytes:
    """The archive of the common state for a target of another layout.

    ``states``: what it holds of each optimizer; ``entry``: as an entry (a list of one), not as ``common.pt``.
    """
    archive = origin.common_archive()
    old = origin.common()
    old_state = StateValue({key: item for key, item in old.items() if key != "optimizer"}, {})
    file = PurePath(archive.file).relative_to(origin.store.root).as_posix()
    storages = {r.key: read_member(origin.store, file, archive.storage(r)) for r in _storages(old_state.value)}
    optimizer: dict[Value, Value] = {}
    for chained, fields in states.items():
        values: dict[str, Value] = {}
        for field, state in fields.items():
            names = {}
            for ref in _storages(state.value):
                names[ref.key] = _unused(storages)
                storages[names[ref.key]] = state.storages[ref.key]
            values[field] = _renamed(state.value, names)
        values["param_state_sharding_type"] = layout
        if chained is None:
            optimizer = {**values}
        else:
            optimizer[chained] = values
    made = {}
    for key, item in old.items():
        made[key] = optimizer if key == "optimizer" else item
    made.setdefault("optimizer", optimizer)
    made["content_metadata"] = content_metadata(old.get("content_metadata"), layout)
    return write_value(StateValue([made] if entry else made, storages))


def _unused(storages: Mapping[str, bytes]) -> str:
    """A key that no storage has."""
    i = len(storages)
    while str(i) in storages:
        i += 1
    return str(i)


def rewrapped(origin: Origin, *, entry: bool) -> bytes:
    """The common state unchanged, as an entry or as ``common.pt``."""
    read = read_value(origin.store, origin.common_archive())
    return write_value(StateValue([read.value] if entry else read.value, read.storages))


def carried_objects(origin: Origin) -> Iterator[str]:
    """Keys of objects that are no state of the optimizer, nor the common state."""
    groups = {item.key for item in group_objects(origin)}
    return (key for key in sorted(origin.objects) if key not in groups and key != COMMON_ENTRY)

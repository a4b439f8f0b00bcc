"""The optimizer's state without tensors of params: groups and loss scale, in the common state or in objects by group.

``fully_reshardable`` keeps it in the common state, once an optimizer; bucket formats keep it in objects, once a
data-parallel group. All other values of the common state are kept as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ....core.errors import CorruptError, UnsupportedError
from ....encodings.inert_pickle import Value
from ....encodings.inert_pickle.writer import dump
from ..common import chained_values
from .origin import COMMON_ENTRY, Origin
from .values import StateValue, renamed, storages_of, write_value

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


# ------------------------------------------------------------------------------------------------- from one to another


def states_in_common(origin: Origin) -> dict[int | None, dict[str, StateValue]]:
    """State by optimizer (None for the only one) and field, where it lies in the common state."""
    whole = origin.common_value()
    optimizer = whole.value.get("optimizer") if isinstance(whole.value, dict) else None
    states = chained_values(optimizer)
    found: dict[int | None, dict[str, StateValue]] = {}
    for i, state in enumerate(states):
        if not isinstance(state, dict):
            raise CorruptError("the common state holds no optimizer", file=origin.label, found=type(state).__name__)
        fields = {field: item for field, item in state.items() if field not in _NOT_STATE}
        found[None if len(states) == 1 else i] = {
            field: StateValue(item, {ref.key: whole.storages[ref.key] for ref in storages_of(item)})
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
        value = origin.object_value(item.key)
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
    names_a = {ref.key: str(i) for i, ref in enumerate(storages_of(a.value))}
    names_b = {ref.key: str(i) for i, ref in enumerate(storages_of(b.value))}
    bytes_a = [a.storages[key] for key in names_a]
    bytes_b = [b.storages[key] for key in names_b]
    return bytes_a == bytes_b and dump(renamed(a.value, names_a)) == dump(renamed(b.value, names_b))


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
    whole = origin.common_value()
    old = dict(whole.value) if isinstance(whole.value, dict) else {}
    kept = {key: item for key, item in old.items() if key != "optimizer"}
    storages = {ref.key: whole.storages[ref.key] for ref in storages_of(kept)}
    optimizer: dict[Value, Value] = {}
    for chained, fields in states.items():
        values: dict[str, Value] = {}
        for field, state in fields.items():
            names = {}
            for ref in storages_of(state.value):
                names[ref.key] = _unused(storages)
                storages[names[ref.key]] = state.storages[ref.key]
            values[field] = renamed(state.value, names)
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
    read = origin.common_value()
    return write_value(StateValue([read.value] if entry else read.value, read.storages))


def carried_objects(origin: Origin) -> Iterator[str]:
    """Keys of objects that are no state of the optimizer, nor the common state."""
    groups = {item.key for item in group_objects(origin)}
    return (key for key in sorted(origin.objects) if key not in groups and key != COMMON_ENTRY)

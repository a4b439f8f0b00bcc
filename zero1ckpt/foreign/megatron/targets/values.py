"""Inert values with the bytes of the storages that their tensors lie in: read from archives, written as archives."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath

from ....core.errors import CorruptError
from ....encodings.inert_pickle import Record, StorageRef, TensorRef, Value
from ....encodings.torch_archive import Archive, plan_archive, read_member, tensor_itemsize
from ....storage.local import LocalStore

__all__ = ["StateValue", "part_of", "read_value", "renamed", "storages_of", "write_value"]


@dataclass(frozen=True)
class StateValue:
    """A value with the bytes of the storages that its tensors lie in, by key. Keys are unique within one value."""

    value: Value
    storages: Mapping[str, bytes]


def read_value(store: LocalStore, archive: Archive) -> StateValue:
    """An archive's value, without the list of one that torch_dist puts around an object, and its storages' bytes."""
    file = PurePath(archive.file).relative_to(store.root).as_posix()
    value = archive.value
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    return part_of(store, file, archive, value)


def part_of(store: LocalStore, file: str, archive: Archive, value: Value) -> StateValue:
    """A value inside an archive of ``file``, with the storages of its tensors. Raises ``CorruptError``."""
    storages = {ref.key: read_member(store, file, archive.storage(ref)) for ref in storages_of(value)}
    return StateValue(value, storages)


def storages_of(value: Value) -> Iterator[StorageRef]:
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


def renamed(value: Value, names: Mapping[str, str]) -> Value:
    """A value whose tensors lie in storages of other keys. Objects of classes are left as they are."""
    if isinstance(value, TensorRef):
        return replace(value, storage=replace(value.storage, key=names[value.storage.key]))
    if type(value) in (dict, OrderedDict):
        return type(value)((key, renamed(item, names)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(renamed(item, names) for item in value)
    return value


def write_value(made: StateValue) -> bytes:
    """The archive of a value, as ``torch.save`` makes it. Pure."""
    refs = list(storages_of(made.value))
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
        crcs.append(zlib.crc32(data))
    for at, run in plan.runs(crcs):
        out[at : at + len(run)] = run
    return bytes(out)

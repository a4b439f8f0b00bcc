"""A checkpoint opened for reading."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.errors import CorruptError, UsageError
from ..core.layout import Layout
from ..core.ranges import Range
from ..encodings.safetensors_file import Header
from ..encodings.tensor_file import check_tensor_file, read_tensor
from ..model.catalog import Catalog, Extents, TablePlacement
from ..model.state import PartState
from ..model.values import decode_value
from ..resharding.execute import Copier, Job, run_jobs
from ..resharding.plan import correspond, plan_blob
from ..resharding.prove import Prover
from ..storage.memory import MemoryBlobs
from .stored import EXTRA_FILE, MODEL_FILE, Stored, describe
from .tensors import from_bytes, new_tensor, tensor_bytes, torch_dtype

if TYPE_CHECKING:
    import torch

__all__ = ["Checkpoint", "open"]

_READ_WINDOW = 64 * 2**20


class Checkpoint:
    """One part of a committed checkpoint. Reading needs neither a process group nor the model's code.

    ``format``, ``container``, ``step``, ``layout`` (None where the format has no buckets, or they are foreign),
    ``groups`` (hyper-parameters and param names), ``slots`` (elementwise first, then scalar ones), ``digest`` (None for
    a foreign one), ``path``.
    """

    def __init__(self, stored: Stored, part: str, *, unproved: bool = False) -> None:
        self._stored = stored
        self._unproved = unproved
        self._catalog = stored.catalogs[part]
        self.part = part
        self.path = stored.path
        self.format = stored.manifest.format
        self.container = stored.manifest.container
        self.digest = stored.part(part).digest or None

    @property
    def step(self) -> int:
        return self.state.step

    @property
    def layout(self) -> Layout | None:
        return self._catalog.layout

    @property
    def state(self) -> PartState:
        """Params, slots, scalars and groups as values."""
        return self._catalog.state

    @cached_property
    def slots(self) -> tuple[str, ...]:
        scalars = sorted({name for own in self.state.scalars for name in own})
        return (*(slot.name for slot in self.state.slots), *scalars)

    @cached_property
    def groups(self) -> list[dict[str, Any]]:
        members: list[list[str]] = [[] for _ in self.state.groups]
        for param in self.state.params:
            members[param.group].append(param.name)
        return [
            {**decode_value(dict(group), get_tensor=self._extra_tensor), "params": names}
            for group, names in zip(self.state.groups, members, strict=True)
        ]

    @property
    def parts(self) -> Mapping[str, Checkpoint]:
        return {
            name: self if name == self.part else Checkpoint(self._stored, name, unproved=self._unproved)
            for name in self._stored.catalogs
        }

    @cached_property
    def extra(self) -> Any:
        """The extra state that was saved; ``{}`` if none."""
        value = decode_value(self._stored.manifest.extra, get_tensor=self._extra_tensor)
        return {} if value is None else value

    @cached_property
    def carried(self) -> tuple[str, ...]:
        """What a Megatron checkpoint holds besides the params' state, or a native one keeps of it: keys and files."""
        from .carrying import carried_names

        return carried_names(self._stored)

    def names(self) -> list[str]:
        """Params that have state, in registration order."""
        return [param.name for param in self.state.params]

    def digest_of(self, name: str, slot: str) -> str | None:
        """Digest of one (param, slot); None where it is absent or scalar, or the checkpoint is foreign."""
        entry = self._stored.part(self.part).params[self._param(name)]
        return entry.digests.get(slot) or None

    def read(self, name: str, slot: str, range: Range | None = None) -> torch.Tensor:
        """One slot of a param, in its shape, or with ``range`` the flat part; on the CPU, in the stored dtype.

        Reads only the bytes that are needed, and proves every checksummed piece that it reads whole.
        Raises ``UsageError`` for a name or range that does not exist, ``CorruptError`` for damaged data, and
        ``UnsupportedError`` for a param of a Megatron checkpoint whose place is not sure.
        """
        import torch

        param = self._param(name)
        if self._stored.megatron is not None and not self._unproved:
            from .megatron_source import check_readable

            check_readable(self._stored, self.part, name)
        scalar = self.state.scalars_of(param).get(slot)
        if scalar is not None:
            return torch.tensor(scalar.value, dtype=torch_dtype(scalar.dtype))
        index = self.state.slot_index.get(slot)
        if index is None or (param, index) in self.state.absent:
            has = [s for k, s in enumerate(self.state.slot_index) if (param, k) not in self.state.absent]
            raise UsageError(
                "the param has no such slot in this checkpoint",
                file=self.path,
                param=name,
                found=slot,
                expected=f"one of {', '.join([*has, *self.state.scalars_of(param)])}",
            )
        shape = self.state.shape_of(param, index)
        numel = prod(shape)
        asked = Range(0, numel) if range is None else Range(range.start, range.end)
        if asked.end > numel:
            raise UsageError("the range leaves the tensor", param=name, found=asked, expected=f"within 0 to {numel}")
        out = new_tensor(self.state.slots[index].dtype, (asked.size,))
        if asked.size:
            self._read_into(tensor_bytes(out), param, index, asked)
        return out.reshape(shape) if range is None else out

    def tensors(self) -> Iterator[tuple[str, str]]:
        """(param, slot) of everything elementwise that has a value."""
        for i, param in enumerate(self.state.params):
            for k, slot in enumerate(self.state.slots):
                if (i, k) not in self.state.absent:
                    yield param.name, slot.name

    def model_tensors(self) -> dict[str, torch.Tensor]:
        """Persistent buffers and frozen params that were saved with ``model=``, by name."""
        if not self._stored.manifest.model:
            return {}
        header = check_tensor_file(self._stored.store, self._stored.files[MODEL_FILE])
        return {
            entry.name: from_bytes(
                read_tensor(self._stored.store, MODEL_FILE, header, entry.name), entry.dtype, tuple(entry.shape)
            )
            for entry in self._stored.manifest.model
        }

    def _param(self, name: str) -> int:
        index = self.state.index.get(name)
        if index is None:
            raise UsageError("the checkpoint has no such param", file=self.path, param=name)
        return index

    def _read_into(self, data: memoryview, param: int, slot: int, asked: Range) -> None:
        source = self._stored.source(self.part)
        dst = _one_slice(self._catalog, param, slot, asked, data.nbytes)
        moves = plan_blob(self._catalog, dst, correspond(self.state, self.state), 0)
        sink = MemoryBlobs({0: [data]})
        ends = np.array([0, data.nbytes], np.int64)
        job = Job(0, data.nbytes, moves, ends, ends, sink, lambda job: None)
        copier = Copier(source, Prover(self._catalog, source), _READ_WINDOW, checksum=False)
        run_jobs(copier, iter([job]), 1)

    def _extra_tensor(self, key: str) -> Any:
        if key.startswith("dtype:"):
            return torch_dtype(key.removeprefix("dtype:"))
        found = self._extra_header.by_name.get(key)
        if found is None:
            raise CorruptError("extra state refers to a tensor that the file has not", file=EXTRA_FILE, param=key)
        data = read_tensor(self._stored.store, EXTRA_FILE, self._extra_header, key)
        return from_bytes(data, found.dtype, found.shape)

    @cached_property
    def _extra_header(self) -> Header:
        entry = self._stored.files.get(EXTRA_FILE)
        if entry is None:
            raise CorruptError("extra state refers to a tensor, and there is no file of them", file=self.path)
        return check_tensor_file(self._stored.store, entry)


def _one_slice(catalog: Catalog, param: int, slot: int, asked: Range, nbytes: int) -> Catalog:
    """A catalog of one blob that holds one slice of one tensor."""
    row = [param, slot, asked.start, asked.size, 0, 0, nbytes]
    table = Extents(*(np.array([value], np.int64) for value in row))
    placement = TablePlacement(("memory",), (nbytes,), table, len(catalog.state.slots))
    return Catalog("memory", "memory", catalog.part, catalog.state, None, placement)


def open(
    path: str | os.PathLike[str], *, layout: str | os.PathLike[str] | None = None, unproved: bool = False
) -> Checkpoint:
    """Opens a committed checkpoint, ours or Megatron's, or the one that a run folder points to. Reads no tensor data.

    ``layout``: a file that says how a Megatron checkpoint's params lie in its buffers. ``unproved``: params are read
    too of which it is not sure where they lie.
    Raises ``MissingError``, ``CorruptError`` or ``UnsupportedError``.
    """
    stored = describe(Path(path), layout=layout)
    return Checkpoint(stored, next(iter(stored.catalogs)), unproved=unproved)

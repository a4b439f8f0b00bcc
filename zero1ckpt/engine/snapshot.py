"""An optimizer's state as it was at one moment, copied while training goes on.

State changes in ``step()`` and in loads alone. So everything small is copied when the snapshot is made, and shards
afterwards, piece by piece, by whichever thread has time: the one that saves, or the one that wants to change them and
must not before the rest is copied (``protect``). On CUDA copies go to pinned memory on a stream of their own, and only
the stream of the step waits for them.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from ..core.errors import UsageError, Zero1CkptError
from ..model.state import MAIN_PARAM, Scalar, SlotSpec
from .control import ControlPlane

if TYPE_CHECKING:
    from .zero1 import Zero1Optimizer

__all__ = ["Snapshot", "SnapshotTaker"]

_PIECE = 4 * 2**20
"""Bytes that are copied at once: what a step waits for at most while another thread copies."""
_ALIGN = 64


class Snapshot:
    """Has what a checkpoint needs of a ``Zero1Optimizer``, under the same names; ``shard`` is of the copy.

    ``control``: of its own, since it is used while training goes on. ``memory``: pinned bytes of an earlier snapshot,
    to be used again.
    """

    def __init__(self, optimizer: Zero1Optimizer, memory: torch.Tensor | None = None) -> None:
        self.rank, self.dp_size = optimizer.rank, optimizer.dp_size
        self.instance, self.experts = optimizer.instance, optimizer.experts
        self.control: ControlPlane = optimizer.control
        self.layout, self.param_specs = optimizer.layout, optimizer.param_specs
        self.applied_steps = optimizer.applied_steps
        self.scaler = copy.deepcopy(optimizer.scaler)
        self._slots = optimizer.slot_specs()
        self._scalars = optimizer.local_scalars()
        self._absent = optimizer.local_absent()
        self._groups = copy.deepcopy(optimizer.group_values())
        shards, open_to_all = _shards(optimizer)
        self._memory, copies = _carve(list(shards.values()), memory)
        self._shards = dict(zip(shards, copies, strict=True))
        rows = [_Row(live, self._shards[key], key in open_to_all) for key, live in shards.items()]
        on_host = [row for row in rows if row.live.device.type == "cpu"]  # all of them, or those that are offloaded
        on_device = [row for row in rows if row.live.device.type != "cpu"]
        self._copies: list[_Copies] = [_DeviceCopies(on_device)] if on_device else []
        self._copies.append(_HostCopies(on_host, [fragment.main for fragment in optimizer.fragments]))

    @property
    def memory(self) -> torch.Tensor | None:
        """What may be given to a later snapshot: pinned memory takes long to make."""
        return self._memory if self._memory.is_pinned() else None

    def finish(self) -> None:
        """Copy what is left; returns when the copies may be read. Raises ``UsageError`` where state was written to
        by hand meanwhile, so that it is not known what was copied.
        """
        for copies in self._copies:
            copies.finish()

    def protect(self) -> None:
        """To be called before state is changed: as ``finish``, but on a device only its current stream waits."""
        for copies in self._copies:
            copies.protect()

    def release(self) -> None:
        """Drop the copies."""
        self._shards.clear()
        self._memory = torch.empty(0)

    def shard(self, slot: str, buffer: int, bucket: int) -> torch.Tensor:
        return self._shards[slot, buffer, bucket]

    def slot_specs(self) -> tuple[SlotSpec, ...]:
        return self._slots

    def local_scalars(self) -> dict[int, dict[str, Scalar]]:
        return self._scalars

    def local_absent(self) -> set[tuple[int, str]]:
        return self._absent

    def group_values(self) -> tuple[dict[str, Any], ...]:
        return self._groups


class SnapshotTaker:
    """Mixed into an optimizer: one snapshot is copied at a time, and before shards change."""

    _snapshot: Snapshot | None = None

    def take_snapshot(self: Any, memory: torch.Tensor | None = None) -> Snapshot:
        """The state as it is now, copied while training goes on. ``memory``: see ``Snapshot``."""
        self.before_change()
        made = Snapshot(self, memory)
        self._snapshot = made
        return made

    def before_change(self) -> None:
        """To be called before shards are written to: waits for what a snapshot has not copied yet."""
        if self._snapshot is not None:
            self._snapshot.protect()
            self._snapshot = None


_Key = tuple[str, int, int]


def _shards(optimizer: Zero1Optimizer) -> tuple[dict[_Key, torch.Tensor], set[_Key]]:
    """The live shards by (slot, buffer, bucket), and which of them are memory of the model's own params.

    Gathers in flight are not waited for: they do not change what this rank owns.
    """
    shards: dict[_Key, torch.Tensor] = {}
    open_to_all: set[_Key] = set()
    for number, buffer in enumerate(optimizer.layout.buffers):
        for bucket in range(buffer.bucket_count):
            for slot in optimizer.slot_specs():
                key = (slot.name, number, bucket)
                shards[key] = optimizer._store.shard(*key)
                if slot.name == MAIN_PARAM and not optimizer._store.apart(number):
                    open_to_all.add(key)
    return shards, open_to_all


def _carve(live: Sequence[torch.Tensor], memory: torch.Tensor | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One allocation, and a tensor in it like each of ``live``."""
    sizes = [-(-tensor.nbytes // _ALIGN) * _ALIGN for tensor in live]
    if memory is None or memory.numel() < sum(sizes):
        pinned = any(tensor.is_cuda for tensor in live)
        memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
    parts = torch.split(memory[: sum(sizes)], sizes)
    return memory, [part[: like.nbytes].view(like.dtype) for part, like in zip(parts, live, strict=True)]


class _Row(NamedTuple):
    """``at_once``: what the user may write to at any time is copied before the call of save returns."""

    live: torch.Tensor
    copy: torch.Tensor
    at_once: bool


class _Copies(Protocol):
    def finish(self) -> None: ...
    def protect(self) -> None: ...


class _HostCopies:
    """Memory to memory. ``mains``: other tensors over memory that is copied, by which it may be written to."""

    def __init__(self, rows: Sequence[_Row], mains: Sequence[torch.Tensor]) -> None:
        self._state = threading.Condition()
        self._busy = 0
        self._problem: UsageError | None = None
        for row in rows:
            for out, data in _pieces(row) if row.at_once else ():
                np.copyto(out, data)
        later = [row for row in rows if not row.at_once]
        memory = {row.live.untyped_storage().data_ptr() for row in later}
        watched = [row.live for row in later]
        watched += [main for main in mains if main.untyped_storage().data_ptr() in memory]
        self._watched = [(tensor, tensor._version) for tensor in watched]
        self._left = deque(piece for row in later for piece in _pieces(row))

    def finish(self) -> None:
        self.protect()
        if self._problem is not None:
            raise self._problem

    def protect(self) -> None:
        while self._copy_one():
            pass
        with self._state:
            self._state.wait_for(lambda: not self._busy and not self._left)

    def _copy_one(self) -> bool:
        with self._state:
            if not self._left:
                return False
            out, data = self._left.popleft()
            self._busy += 1
        try:
            np.copyto(out, data)
        finally:
            with self._state:
                self._busy -= 1
                if not self._busy and not self._left:
                    self._end()
        return True

    def _end(self) -> None:
        if any(tensor._version != version for tensor, version in self._watched):
            self._problem = UsageError(
                "the optimizer's state was written to while a save was copying it",
                hint="wait() for the save before optimizer.state is written to, or save without asynchronous=True",
            )
        self._watched = []
        self._state.notify_all()


def _pieces(row: _Row) -> Iterator[tuple[Any, Any]]:
    out, data = (tensor.detach().view(torch.uint8).numpy() for tensor in (row.copy, row.live))
    for low in range(0, len(data), _PIECE):
        yield out[low : low + _PIECE], data[low : low + _PIECE]


class _DeviceCopies:
    """Device to pinned memory; all are started here, behind what the current stream has been given.

    The current stream waits for those ``at_once``, so that what is written to them later comes later there too.
    """

    def __init__(self, rows: Sequence[_Row]) -> None:
        self._device = rows[0].live.device
        current = torch.cuda.current_stream(self._device)
        stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(current)
        self._start(stream, [row for row in rows if row.at_once])
        current.wait_stream(stream)
        self._start(stream, [row for row in rows if not row.at_once])
        self._event = stream.record_event()

    @staticmethod
    def _start(stream: Any, rows: Sequence[_Row]) -> None:
        with torch.cuda.stream(stream):
            for row in rows:
                row.copy.copy_(row.live.detach(), non_blocking=True)
                row.live.record_stream(stream)

    def finish(self) -> None:
        try:
            self._event.synchronize()
        except RuntimeError as error:
            raise Zero1CkptError(f"the copy from the device failed: {error}") from error

    def protect(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

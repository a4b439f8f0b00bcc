"""What an optimizer takes on this rank, by kind: counted from the tensors that there are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..core.memory import Memory
from ..model.state import MAIN_PARAM

if TYPE_CHECKING:
    from .zero1 import Zero1Optimizer

__all__ = ["MemoryReport", "measure_memory"]


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes of one rank. ``total`` is there between two steps, ``peak`` during the update.

    ``kinds``: as ``zero1ckpt plan`` counts them, padding included; before the first step some optimizers have no states
    yet. ``padding``: bytes of ``total`` that belong to no param. ``scalars``: state of single numbers, such as each
    param's step. ``extra_grads``: sums of earlier micro-batches (``reduce="tree"``), and room for gradients that came
    after their bucket was sent. ``scratch``: kept from step to step for gradients of other ranks, on gloo only.
    """

    rank: int
    kinds: Memory
    padding: int
    scalars: int
    extra_grads: int
    scratch: int

    @property
    def params(self) -> int:
        return self.kinds.params

    @property
    def grads(self) -> int:
        return self.kinds.grads

    @property
    def main_params(self) -> int:
        """0 where params are their own main params."""
        return self.kinds.main_params

    @property
    def states(self) -> int:
        return self.kinds.states

    @property
    def temporary_main_grads(self) -> int:
        """Gradients in the main params' dtype, of what this rank steps; they live in ``step()`` only."""
        return self.kinds.temporary_main_grads

    @property
    def total(self) -> int:
        return self.kinds.total + self.scalars + self.extra_grads + self.scratch

    @property
    def peak(self) -> int:
        return self.total + self.temporary_main_grads


def measure_memory(optimizer: Zero1Optimizer) -> MemoryReport:
    """Counts; sends nothing and waits for nothing."""
    main = optimizer._store.dtype(MAIN_PARAM)
    kinds, padding = Memory(), 0
    owned = [0] * len(optimizer.buffers)
    for fragment in optimizer.fragments:
        owned[fragment.buffer] += fragment.param.size
    for number, buffer in enumerate(optimizer.buffers):
        shard = int(buffer.layout.shard_offset[-1])
        apart = optimizer._store.apart(number)
        temporary = shard * main.itemsize if buffer.grads.dtype != main else 0
        states = {slot.name: slot.itemsize for slot in optimizer.slot_specs() if slot.name != MAIN_PARAM}
        kinds += Memory(
            buffer.params.nbytes,
            buffer.grads.nbytes,
            shard * main.itemsize if apart else 0,
            shard * sum(states.values()),
            temporary,
        )
        unused = buffer.layout.numel - int((buffer.layout.end - buffer.layout.start).sum())
        padding += unused * (buffer.params.itemsize + buffer.grads.itemsize)
        padding += (shard - owned[number]) * (sum(states.values()) + (main.itemsize if apart else 0))
    extra = (optimizer._tree.nbytes if optimizer._tree is not None else 0) + optimizer._reducer.spare_bytes
    scalars = _scalar_bytes(optimizer.inner.state.values())
    return MemoryReport(optimizer.rank, kinds, padding, scalars, extra, optimizer.comm.scratch_bytes)


def _scalar_bytes(states: Iterable[Any]) -> int:
    return sum(
        value.nbytes
        for state in states
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim() == 0
    )

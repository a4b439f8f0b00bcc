"""Gradients of micro-batches, added as a binary counter adds: ``reduce="tree"``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch.autograd.function import BackwardCFunction

from ..core.errors import UnsupportedError, UsageError
from .params import ParamTable, dtype_name

__all__ = ["TreeAccumulator", "check_tree_dtypes"]


class TreeAccumulator:
    """Keeps one sum for each complete block of 1, 2, 4 ... micro-batches of this step beside the grad buffers.

    ``grads``: the memory of each buffer, which autograd's gradients are added to. A micro-batch is one call of
    ``backward``. Before the first gradient of a further one arrives, what has been collected is set aside as one leaf.
    """

    def __init__(self, grads: Sequence[torch.Tensor]) -> None:
        self._grads = tuple(grads)
        self._levels: list[list[torch.Tensor]] = []
        self._count = 0
        self._task: int | None = None

    def arrive(self) -> None:
        """To be called before each gradient is added."""
        task = torch._C._current_graph_task_id()
        if task == self._task or task < 0:
            return
        _refuse_nested()
        if self._task is not None:
            self._set_aside()
        self._task = task

    def fold(self) -> None:
        """Add the sums that were set aside to what the grad buffers hold; once a step, before they are reduced."""
        for level, kept in enumerate(self._levels):
            if self._count >> level & 1:
                for part, grads in zip(kept, self._grads, strict=True):
                    torch.add(part, grads, out=grads)

    def reset(self) -> None:
        """A new step: nothing has arrived. Memory is kept."""
        self._count = 0
        self._task = None

    @property
    def nbytes(self) -> int:
        """Bytes of the sums, kept from step to step."""
        return sum(kept.nbytes for level in self._levels for kept in level)

    def _set_aside(self) -> None:
        level = 0
        while self._count >> level & 1:
            for kept, grads in zip(self._levels[level], self._grads, strict=True):
                torch.add(kept, grads, out=grads)
            level += 1
        if level == len(self._levels):
            self._levels.append([torch.empty_like(grads) for grads in self._grads])
        for kept, grads in zip(self._levels[level], self._grads, strict=True):
            kept.copy_(grads)
            grads.zero_()
        self._count += 1


def check_tree_dtypes(table: ParamTable) -> None:
    """Raises ``UsageError`` for a param whose gradients are rounded before they reach the tree."""
    for spec in table.specs:
        if spec.grad_dtype != dtype_name(table.main_dtype):
            raise UsageError(
                "reduce='tree' adds gradients in the dtype of the main params",
                param=spec.name,
                found=f"grad_dtype {spec.grad_dtype}",
                expected=dtype_name(table.main_dtype),
            )


def _refuse_nested() -> None:
    """A backward inside a backward looks like a further micro-batch."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is BackwardCFunction.apply.__code__:
            raise UnsupportedError(
                "reduce='tree' cannot tell micro-batches apart where backward runs inside a backward",
                hint="use checkpoint(..., use_reentrant=False)",
            )
        frame = frame.f_back  # type: ignore[assignment]

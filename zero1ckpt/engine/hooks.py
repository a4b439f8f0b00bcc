"""From ``param.grad`` to ``param.main_grad``, as autograd finishes each gradient."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..core.errors import UnsupportedError, UsageError
from .buffers import ParamGradBuffer
from .tree import TreeAccumulator

__all__ = ["GradCollector"]

_OWNERS: MutableMapping[torch.Tensor, ref[GradCollector]] = WeakTensorKeyDictionary()
"""Whose buffers a param is a view of: a later optimizer takes the param over, with its hook."""


class GradCollector:
    """Adds every gradient into the grad buffers and drops ``param.grad``.

    ``arrived[i]`` tells whether param ``i`` got a gradient since the last ``reset``. After ``close`` (the gradients
    were reduced) a further one raises ``UsageError``: it could not be added to a sum over ranks. A hook that adds
    nothing is called when a fused backward kernel has already (``param.grad_added_to_main_grad``).
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        names: Sequence[str],
        buffers: Sequence[ParamGradBuffer],
        tree: TreeAccumulator | None = None,
    ) -> None:
        self._tree = tree
        self._tensors, self._names, self._buffers = tuple(tensors), tuple(names), tuple(buffers)
        self._main: list[torch.Tensor] = [torch.empty(0)] * len(self._tensors)
        for buffer in buffers:
            for index, view in buffer.main_grads.items():
                self._main[index] = view
        self.arrived = [False] * len(self._tensors)
        self.closed = False
        self._versions = self._current_versions()
        self._handles: list[Any] = []
        self._lost: str | None = None
        for index, tensor in enumerate(self._tensors):
            self._take_over(index, tensor)

    def _take_over(self, index: int, tensor: torch.Tensor) -> None:
        former = _OWNERS.get(tensor)
        collector = None if former is None else former()
        if collector is not None:
            collector.release(self._names[index])
        _OWNERS[tensor] = ref(self)
        tensor.grad_added_to_main_grad = False  # type: ignore[attr-defined]  # Megatron's attribute
        register: Any = tensor.register_post_accumulate_grad_hook
        self._handles.append(register(self._hook(index)))

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def add(param: torch.Tensor) -> None:
            self.add(index, param)

        return add

    def release(self, name: str) -> None:
        """Stop listening: another optimizer took over param ``name``."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._lost = self._lost or name

    def check_owned(self) -> None:
        """Raise ``UsageError`` where another optimizer has taken params over."""
        if self._lost is not None:
            raise UsageError("param belongs to an optimizer that was made later", param=self._lost, hint="use that one")

    def add(self, index: int, param: torch.Tensor) -> None:
        """Move ``param.grad`` into its main grad."""
        if self.closed:
            raise UsageError(
                "got a gradient after the gradients were reduced",
                param=self._names[index],
                hint="call step() or zero_grad() before the next backward",
            )
        grad = param.grad
        if grad is None:
            return
        if grad.layout != torch.strided:
            raise UnsupportedError("sparse gradient", param=self._names[index], hint="use sparse=False")
        if self._tree is not None:
            self._tree.arrive()
        if not param.grad_added_to_main_grad:  # type: ignore[attr-defined]  # Megatron's attribute
            self._main[index].add_(grad.detach())
        param.grad = None
        self.arrived[index] = True

    @torch.no_grad()
    def sweep(self) -> None:
        """Before a reduction: take gradients that were set by hand, and forget those of params frozen since."""
        for index, param in enumerate(self._tensors):
            if not param.requires_grad:
                param.grad = None
                self._main[index].zero_()
                self.arrived[index] = False
            elif param.grad is not None:
                self.add(index, param)

    @torch.no_grad()
    def reset(self) -> None:
        """Start from zero: no gradient has arrived.

        Buffers that nobody wrote to since the last call are left alone: ``zero_grad()`` after ``step()`` costs nothing.
        """
        if self.closed or any(self.arrived) or self._versions != self._current_versions():
            for buffer in self._buffers:
                buffer.grads.zero_()
            self._versions = self._current_versions()
        for param in self._tensors:
            param.grad = None
            param.grad_added_to_main_grad = False  # type: ignore[attr-defined]  # Megatron's attribute
        self.arrived = [False] * len(self._tensors)
        self.closed = False
        if self._tree is not None:
            self._tree.reset()

    def _current_versions(self) -> list[int]:
        """Moves with every in-place write to a buffer or to a main grad, which are views of it."""
        return [buffer.grads._version for buffer in self._buffers]

    def close(self) -> None:
        self.closed = True

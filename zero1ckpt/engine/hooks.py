"""From ``param.grad`` to ``param.main_grad``, as autograd finishes each gradient."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any
from weakref import finalize, ref

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..core.errors import UnsupportedError, UsageError
from .buffers import ParamGradBuffer
from .overlap_grads import GradReducer
from .tree import TreeAccumulator

__all__ = ["GradCollector", "release_former"]

_OWNERS: MutableMapping[torch.Tensor, ref[GradCollector]] = WeakTensorKeyDictionary()
"""In whose buffers a param lies: a later optimizer takes the param over, with its hook."""


class GradCollector:
    """Adds every gradient into the grad buffers and drops ``param.grad``.

    ``arrived[i]`` tells whether param ``i`` got a gradient since the last ``reset``. After ``close`` (the gradients
    were reduced) a further one raises ``UsageError``: it could not be added to a sum over ranks. A hook that adds
    nothing is called when a fused backward kernel has already (``param.grad_added_to_main_grad``).

    ``synced``: this backward is the last before the step, and ``reducer`` is told what arrives. ``check_arrival`` may
    refuse a gradient. The params keep neither this nor the optimizer alive.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        names: Sequence[str],
        buffers: Sequence[ParamGradBuffer],
        reducer: GradReducer,
        tree: TreeAccumulator | None = None,
    ) -> None:
        self._tree, self._reducer = tree, reducer
        self.synced = True
        self.check_arrival: Callable[[int], None] = lambda index: None
        self.on_release: Callable[[], None] = lambda: None
        self._tensors, self._names, self._buffers = tuple(tensors), tuple(names), tuple(buffers)
        self._main: list[torch.Tensor] = [torch.empty(0)] * len(self._tensors)
        for buffer in buffers:
            for index, view in buffer.main_grads.items():
                self._main[index] = view
        self.arrived = [False] * len(self._tensors)
        self.closed = False
        self._versions = self._current_versions()
        self._handles: list[Any] = []
        self._lost: tuple[str, str | None] | None = None
        for index, tensor in enumerate(self._tensors):
            self._listen(index, tensor)
        marked = [(ref(tensor), main) for tensor, main in zip(self._tensors, self._main, strict=True)]
        self._detach = finalize(self, _detach, self._handles, marked)
        self._detach.atexit = False

    def _listen(self, index: int, tensor: torch.Tensor) -> None:
        _OWNERS[tensor] = ref(self)
        tensor.grad_added_to_main_grad = False  # type: ignore[attr-defined]  # Megatron's attribute
        register: Any = tensor.register_post_accumulate_grad_hook
        self._handles.append(register(_hook(ref(self), index)))

    def release(self, reason: str, name: str | None = None) -> None:
        """Stop listening, and leave nothing on the params. Later calls of ``check_owned`` raise for ``reason``."""
        if self._lost is None:
            self._lost = (reason, name)
            self.on_release()
            self._detach()

    def check_owned(self) -> None:
        """Raise ``UsageError`` after ``release``."""
        if self._lost is not None:
            raise UsageError(self._lost[0], param=self._lost[1], hint="use the optimizer that was made last")

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
        self.check_arrival(index)
        if grad.layout != torch.strided:
            raise UnsupportedError("sparse gradient", param=self._names[index], hint="use sparse=False")
        if self._tree is not None:
            self._tree.arrive()
        if not param.grad_added_to_main_grad:  # type: ignore[attr-defined]  # Megatron's attribute
            self._reducer.target(index).add_(grad.detach())
        elif self._reducer.is_launched(index):
            raise UsageError(
                "a fused kernel added to main_grad after its bucket was sent",
                param=self._names[index],
                hint="run all backwards but the last inside no_sync(), or switch overlap_grad_reduce off",
            )
        param.grad = None
        self.arrived[index] = True
        if self.synced:
            self._reducer.arrived(index)

    @torch.no_grad()
    def sweep(self) -> None:
        """Before a reduction: take gradients that were set by hand, and forget those of params frozen since."""
        for index, param in enumerate(self._tensors):
            if not param.requires_grad:
                param.grad = None
                self.arrived[index] = False
                if not self._reducer.is_launched(index):
                    self._main[index].zero_()
            elif param.grad is not None:
                self.add(index, param)

    @torch.no_grad()
    def reset(self) -> None:
        """Start from zero: no gradient has arrived. Sends what ``reducer`` has begun to the end, with all ranks.

        Buffers that nobody wrote to since the last call are left alone: ``zero_grad()`` after ``step()`` costs nothing.
        """
        self._reducer.drop()
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
        """Moves with every in-place write to a buffer or to a main grad."""
        return [tensor._version for tensor in [*(buffer.grads for buffer in self._buffers), *self._main]]

    def close(self) -> None:
        self.closed = True


def release_former(tensors: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """End what other optimizers have under way with these params; they lose all of theirs."""
    for tensor, name in zip(tensors, names, strict=True):
        former = _OWNERS.get(tensor)
        collector = None if former is None else former()
        if collector is not None:
            collector.release("param belongs to an optimizer that was made later", name)


def _hook(collector: ref[GradCollector], index: int) -> Callable[[torch.Tensor], None]:
    def add(param: torch.Tensor) -> None:
        alive = collector()
        if alive is not None:
            alive.add(index, param)

    return add


def _detach(handles: list[Any], marked: Sequence[tuple[ref[torch.Tensor], torch.Tensor]]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
    for tensor, main in marked:
        param = tensor()
        if param is not None and param.__dict__.get("main_grad") is main:
            del param.main_grad  # type: ignore[attr-defined]  # Megatron's attribute
            param.__dict__.pop("grad_added_to_main_grad", None)

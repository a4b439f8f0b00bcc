"""Params where the optimizer left them: what moved or wrote to one since the last step is found before the next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..core.errors import UsageError
from .param_places import ParamPlaces
from .params import dtype_name

__all__ = ["ParamWatch"]


class ParamWatch:
    """Knows where each param lies and how often it was written to.

    Writes through ``param.data`` cannot be seen: torch gives that tensor a version counter of its own.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], names: Sequence[str], places: ParamPlaces) -> None:
        self._tensors, self._names, self._places = tuple(tensors), tuple(names), places
        self._homes = [_home(tensor) for tensor in self._tensors]
        self._versions = [tensor._version for tensor in self._tensors]

    def count(self, indices: Iterable[int]) -> None:
        """The engine has written to these params: a graph that saved the old values raises, as in torch."""
        for index in indices:
            torch.autograd.graph.increment_version(self._tensors[index])
            self._versions[index] += 1

    def accept(self) -> None:
        """What was written until now is known."""
        self._versions = [tensor._version for tensor in self._tensors]

    def problem(self) -> UsageError | None:
        """The first param that left its buffer, or that something else wrote to."""
        return self.displaced() or self._written()

    def displaced(self) -> UsageError | None:
        """``model.half()``, ``param.data = ...`` move a param; ``load_state_dict(assign=True)`` and parametrizations
        put another one in its place.
        """
        for index, tensor in enumerate(self._tensors):
            if _home(tensor) != self._homes[index]:
                return self._error(index, tensor)
        lost = self._places.lost()
        return None if lost is None else self._error(*lost)

    def _error(self, index: int, found: torch.Tensor | None) -> UsageError:
        shape, dtype = self._homes[index][1:3]
        return UsageError(
            "param is no longer in the optimizer's buffer",
            param=self._names[index],
            found="nothing in its place"
            if found is None
            else f"another tensor: {_described(found.shape, found.dtype)}",
            expected=_described(shape, dtype),
            hint="convert, load or parametrize the model before the optimizer is built, or build a new one",
        )

    def _written(self) -> UsageError | None:
        for index, tensor in enumerate(self._tensors):
            if tensor._version != self._versions[index]:
                return UsageError(
                    "param was written to since the last step",
                    param=self._names[index],
                    hint="call optimizer.reload_model_params() after that, on all ranks",
                )
        return None


def _home(tensor: torch.Tensor) -> tuple[int, torch.Size, torch.dtype, tuple[int, ...]]:
    return (tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.stride())


def _described(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{dtype_name(dtype)} {tuple(shape)}"

"""Which module holds which param under which name, as the model stands now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import nn

__all__ = ["ParamPlaces", "Place"]


@dataclass(frozen=True, eq=False)
class Place:
    """A module that holds params itself: their indices by name. The module is not kept alive."""

    module: ref[nn.Module]
    params: Mapping[str, int]


class ParamPlaces:
    """All places of the trained params in ``model`` (None: nothing is known), tied ones more than once."""

    def __init__(self, model: nn.Module | None, tensors: Sequence[torch.Tensor]) -> None:
        self._model = None if model is None else ref(model)
        self._tensors = tuple(tensors)
        self._index = {id(tensor): index for index, tensor in enumerate(self._tensors)}
        self.places: tuple[Place, ...] = ()
        self.revision = 0
        """Moves when ``places`` is made anew."""
        self._scan()

    def _scan(self) -> None:
        model = self.model
        found = []
        for module in () if model is None else model.modules():
            params = {n: self._index[id(p)] for n, p in held_params(module).items() if id(p) in self._index}
            if params:
                found.append(Place(ref(module), params))
        self.places = tuple(found)

    @property
    def model(self) -> nn.Module | None:
        return None if self._model is None else self._model()

    def lost(self) -> tuple[int, Any] | None:
        """A param that is nowhere in the model any more, and what stands in its place (None: nothing).

        A param that has only moved within the model (a parametrization without ``right_inverse`` takes it over) is
        looked up again. A module that is no part of anything any more is of no interest.
        """
        moved = self._moved()
        if moved is None:
            return None
        model = self.model
        if model is not None:
            held = {id(param) for param in model.parameters()}
            for index, found in moved:
                if id(self._tensors[index]) not in held:
                    return index, found
            self._scan()
            self.revision += 1
        return None

    def _moved(self) -> list[tuple[int, Any]] | None:
        moved = []
        for place in self.places:
            module = place.module()
            if module is None:
                continue
            held = held_params(module)
            for name, index in place.params.items():
                if held.get(name) is not self._tensors[index]:
                    moved.append((index, held.get(name)))
        return moved or None


def held_params(module: nn.Module) -> Mapping[str, Any]:
    """The module's own params by name, None for those that are not set. Not all modules keep a dict of them."""
    held = module.__dict__.get("_parameters")
    return held if isinstance(held, dict) else {}

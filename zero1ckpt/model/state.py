"""What is stored, without where: params, slots, groups and step of one part.

A **slot** is one tensor of state a param. It is *elementwise* where it has the param's shape, and then lies in the
buckets; *scalar* where it has no dimensions whatever the param's shape (torch's per-param ``step``), and then stands in
the manifest; and *whole* where it has a shape of its own (factored or block-quantised state), and is then never cut. A
(param, slot) without a value is *absent*: lazily made state before the param's first update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..core.dtypes import itemsize
from ..core.layout import BufferKey
from ..core.ranges import IntColumn

__all__ = ["MAIN_PARAM", "Group", "LossScale", "ParamSpec", "PartState", "Scalar", "SlotSpec", "TensorKey"]

MAIN_PARAM = "fp32_param"
"""Slot of the main (master) weight."""


class TensorKey(NamedTuple):
    """Names one tensor of a part: the ``slot`` of a param."""

    param: str
    slot: str


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A named model parameter; ``dtype`` and ``grad_dtype`` are the model's, by torch's names."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    grad_dtype: str = "float32"
    group: int = 0
    expert: bool = False
    shared_embedding: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def buffer_key(self) -> BufferKey:
        return BufferKey(self.dtype, self.grad_dtype, self.expert)


@dataclass(frozen=True, slots=True)
class SlotSpec:
    """An elementwise or ``whole`` slot: one dtype for all params of the part."""

    name: str
    dtype: str
    whole: bool = False

    @property
    def itemsize(self) -> int:
        return itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class Scalar:
    """The value of a scalar slot. ``value`` is exact: a Python int, bool, or a float that the dtype can hold."""

    dtype: str
    value: int | float | bool


@dataclass(frozen=True, slots=True)
class LossScale:
    """State of a dynamic loss scale: the factor, finite steps since it last moved, and overflows left before it falls.

    It belongs to the whole part, whatever the dp size.
    """

    scale: float
    finite_steps: int
    hysteresis_left: int


Group = Mapping[str, Any]
"""Hyper-parameters of one optimizer param group, without its params. Values as in ``model.values``."""


@dataclass(frozen=True)
class PartState:
    """One optimizer's state: params in registration order, elementwise slots, scalars, groups and step.

    ``scalars[i]`` maps scalar slots of param ``i`` to values (missing keys: absent); ``absent`` holds the
    (param index, slot index) pairs of slots that have no value. ``loss_scale``: None without a dynamic one.
    ``shapes``: the shape of each present whole tensor.
    """

    params: tuple[ParamSpec, ...]
    slots: tuple[SlotSpec, ...]
    step: int = 0
    groups: tuple[Group, ...] = ({},)
    scalars: tuple[Mapping[str, Scalar], ...] = ()
    absent: frozenset[tuple[int, int]] = field(default_factory=frozenset)
    loss_scale: LossScale | None = None
    shapes: Mapping[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert not self.scalars or len(self.scalars) == len(self.params)

    @cached_property
    def index(self) -> dict[str, int]:
        """Param index in registration order, by name."""
        return {param.name: i for i, param in enumerate(self.params)}

    @cached_property
    def slot_index(self) -> dict[str, int]:
        return {slot.name: i for i, slot in enumerate(self.slots)}

    def scalars_of(self, param: int) -> Mapping[str, Scalar]:
        return self.scalars[param] if self.scalars else {}

    def shape_of(self, param: int, slot: int) -> tuple[int, ...]:
        return self.shapes[param, slot] if self.slots[slot].whole else self.params[param].shape

    def tensor_nbytes(self, param: int, slot: int) -> int:
        return prod(self.shape_of(param, slot)) * self.slots[slot].itemsize

    @cached_property
    def slot_bytes(self) -> IntColumn:
        """Bytes an element, by slot."""
        return np.array([slot.itemsize for slot in self.slots], np.int64)

    @cached_property
    def whole_mask(self) -> npt.NDArray[np.bool_]:
        """Which slots are whole."""
        return np.array([slot.whole for slot in self.slots], np.bool_)

    @cached_property
    def numels(self) -> npt.NDArray[np.int64]:
        """Elements of each (param, slot), shape [params, slots]; 0 for absent whole tensors."""
        sizes = np.array([param.numel for param in self.params], np.int64)
        table = np.repeat(sizes[:, None], len(self.slots), axis=1)
        table[:, self.whole_mask] = 0
        for (param, slot), shape in self.shapes.items():
            table[param, slot] = prod(shape)
        return table

    def has(self, param: IntColumn, slot: IntColumn) -> npt.NDArray[np.bool_]:
        """Which of (param, slot) have a value."""
        present: npt.NDArray[np.bool_] = self._present[param, slot]
        return present

    @cached_property
    def _present(self) -> npt.NDArray[np.bool_]:
        table = np.ones((len(self.params), len(self.slots)), np.bool_)
        for param, slot in self.absent:
            table[param, slot] = False
        return table

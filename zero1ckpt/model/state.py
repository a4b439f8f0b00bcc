"""What is stored, without where: params, slots, groups and step of one part.

A **slot** is one tensor of state a param. It is *elementwise* where it has the param's shape, and then lies in the
buckets; or *scalar* where it has no dimensions whatever the param's shape (torch's per-param ``step``), and then stands
in the manifest. A (param, slot) without a value is *absent*: lazily made state before the param's first update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from ..core.dtypes import itemsize
from ..core.layout import BufferKey

__all__ = ["MAIN_PARAM", "Group", "ParamSpec", "PartState", "Scalar", "SlotSpec", "TensorKey"]

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
    """An elementwise slot: one dtype for all params of the part."""

    name: str
    dtype: str

    @property
    def itemsize(self) -> int:
        return itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class Scalar:
    """The value of a scalar slot. ``value`` is exact: a Python int, bool, or a float that the dtype can hold."""

    dtype: str
    value: int | float | bool


Group = Mapping[str, Any]
"""Hyper-parameters of one optimizer param group, without its params. Values as in ``model.values``."""


@dataclass(frozen=True)
class PartState:
    """One optimizer's state: params in registration order, elementwise slots, scalars, groups and step.

    ``scalars[i]`` maps scalar slots of param ``i`` to values (missing keys: absent); ``absent`` holds the
    (param index, slot index) pairs of elementwise slots that have no value.
    """

    params: tuple[ParamSpec, ...]
    slots: tuple[SlotSpec, ...]
    step: int = 0
    groups: tuple[Group, ...] = ({},)
    scalars: tuple[Mapping[str, Scalar], ...] = ()
    absent: frozenset[tuple[int, int]] = field(default_factory=frozenset)

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

    def tensor_nbytes(self, param: int, slot: int) -> int:
        return self.params[param].numel * self.slots[slot].itemsize

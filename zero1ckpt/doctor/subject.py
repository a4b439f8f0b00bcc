"""What a doctor looks at: one part of a checkpoint, as plain values and a way to read its arrays.

A damage is looked for with nothing else, so that it is found in checkpoints of every kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..core.boxes import Box

__all__ = ["Array", "Damage", "Piece", "Sizes", "Subject", "SubjectParam", "Values", "ranges"]

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Damage:
    """Something found. ``grave``: a param's value is damaged, or state will load as something that it is not.

    ``range`` counts elements of the flattened param. ``mends``: what mending it would cost, in a few words.
    """

    kind: str
    message: str
    grave: bool
    part: str = ""
    param: str | None = None
    slot: str | None = None
    range: tuple[int, int] | None = None
    file: str | None = None
    mends: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a param that one rank wrote. ``order``: place in the file's listing; ``leading``: first of its key."""

    box: Box
    writer: int = -1
    order: int = 0
    leading: bool = False


@dataclass(frozen=True, slots=True)
class SubjectParam:
    """``dtype``: of the weight; ``pieces``: how the main param was written, one box where that is not known."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    expert: bool = False
    pieces: tuple[Piece, ...] = ()

    @property
    def numel(self) -> int:
        return prod(self.shape)


class Values(Protocol):
    """Reads arrays of one part, in the param's shape."""

    def slot(self, param: int, slot: str) -> Array | None:
        """A slot's values; None where it has none."""

    def weight(self, param: int) -> Array | None:
        """Bits of the model's weight (``casts.BITS``); None where it is not stored, or has no cast."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the job that saved, as the checkpoint states them; None where it does not."""

    tensor: int | None = None
    pipeline: int | None = None
    chunks: int | None = None
    expert: int | None = None


@dataclass(frozen=True)
class Subject:
    """One part. ``groups``: of the optimizer, with ``step`` where each states its own; ``steps``: all that are stated.

    ``dtypes``: of each slot. ``megatron``: whether buffers of Megatron-Core's distributed optimizer were saved.
    """

    part: str
    format: str
    params: tuple[SubjectParam, ...]
    dtypes: Mapping[str, str]
    values: Values
    step: int | None = None
    steps: tuple[int | float | None, ...] = ()
    sizes: Sizes = field(default_factory=Sizes)
    version: str | None = None

    @property
    def slots(self) -> Sequence[str]:
        return tuple(self.dtypes)


def ranges(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """The maximal ranges in which a flat mask is true. Pure."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.reshape(-1).astype(np.int8), [0]))))
    return [(int(low), int(high)) for low, high in zip(edges[::2], edges[1::2], strict=True)]

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

__all__ = [
    "Array",
    "Damage",
    "Piece",
    "Sizes",
    "Subject",
    "SubjectParam",
    "Values",
    "View",
    "bad_values",
    "ranges",
    "some_ranges",
]

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
    """A box of a param that one rank wrote. ``order``: place in the file's listing."""

    box: Box
    writer: int = -1
    order: int = 0


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


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """One param with its arrays: ``slots`` as float32 in the param's shape, ``weight`` as bits."""

    index: int
    param: SubjectParam
    slots: Mapping[str, Array]
    weight: Array | None = None


class Values(Protocol):
    """Reads arrays of one part, in the param's shape. What is returned is not written to."""

    def slot(self, param: int, slot: str) -> Array | None:
        """A slot's values as float32; None where it has none, or a dtype that is no float of at most 32 bits."""

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
    """One part. ``dtypes``: of each slot; ``steps``: the counts of updates that are stated, None for one that is
    missing; ``lrs``: learning rates of the groups.
    """

    part: str
    format: str
    params: tuple[SubjectParam, ...]
    dtypes: Mapping[str, str]
    values: Values
    step: int | None = None
    steps: tuple[int | float | None, ...] = ()
    lrs: tuple[float, ...] = ()
    sizes: Sizes = field(default_factory=Sizes)

    @property
    def slots(self) -> Sequence[str]:
        return tuple(self.dtypes)


def ranges(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """The maximal ranges in which a flat mask is true. Pure."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.reshape(-1).astype(np.int8), [0]))))
    return [(int(low), int(high)) for low, high in zip(edges[::2], edges[1::2], strict=True)]


def some_ranges(rows: Sequence[tuple[int, int]], most: int = 6) -> str:
    """Ranges as text, the first of many. Pure."""
    shown = ", ".join(f"[{low}, {high})" for low, high in rows[:most])
    return f"{shown} and {len(rows) - most} ranges more" if len(rows) > most else shown


def bad_values(subject: Subject, view: View, kind: str, slot: str, bad: Array, what: str) -> Damage:
    """The damage of values that no optimizer makes, where ``bad`` is true; what they were is in no file. Pure."""
    rows = ranges(bad)
    message = f"{view.param.name}: {slot}: {int(bad.sum())} of {bad.size} values are {what}: {some_ranges(rows)}"
    mends = "cannot be mended: restore an earlier checkpoint"
    return Damage(kind, message, True, subject.part, view.param.name, slot, rows[0], mends=mends)

"""Experts that repeat each other.

*How it arises.* A writer or converter that stores one expert's state under several numbers.
*What it looks like.* Two experts of a param are equal in all slots, moments that are not zero included: two experts
that saw different tokens never are. Equal main params alone are right after experts were copied from a dense layer.
*Whether it can be mended.* No: the other experts' state is in no file.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..core.digest import crc64
from .subject import Array, Damage, Subject, View

__all__ = ["KIND", "detect"]

KIND = "repeated_experts"


def detect(subject: Subject, view: View) -> Iterator[Damage]:
    if not view.param.expert or len(view.param.shape) < 3 or not view.slots:
        return
    moments = [values for slot, values in view.slots.items() if slot != "fp32_param"]
    first: dict[tuple[int, ...], int] = {}
    for expert in range(view.param.shape[0]):
        if not any(_varied(values[expert]) for values in moments):
            continue
        key = tuple(crc64(_bytes(values[expert]).data) for values in view.slots.values())
        twin = first.setdefault(key, expert)
        if twin != expert and _same(view, twin, expert):
            size = view.param.numel // view.param.shape[0]
            yield Damage(
                KIND,
                f"{view.param.name}: experts {twin} and {expert} have the same main params and the same moments",
                True,
                subject.part,
                view.param.name,
                None,
                (expert * size, (expert + 1) * size),
                mends="cannot be mended: restore an earlier checkpoint",
            )


def _same(view: View, a: int, b: int) -> bool:
    """Whether two experts have the same bytes in every slot: their digests alone do not prove it."""
    return all(np.array_equal(_bytes(values[a]), _bytes(values[b])) for values in view.slots.values())


def _bytes(values: Array) -> Array:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def _varied(values: Array) -> bool:
    """Whether values differ from each other: constant ones may be equal by chance."""
    return bool((values != values.flat[0]).any())

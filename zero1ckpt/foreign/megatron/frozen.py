"""Weights that no optimizer has, and params that look like them.

Order tells params of equal content apart only if all of them are in the buffers: what is trained in one layer is then
trained in all. A frozen weight that equals a trained one breaks that, and nothing says which of the two is frozen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from .model import KeyBox, LocalParam, MegatronPart
from .weights import Unit, Weights

__all__ = ["with_lookalikes"]

_ENDS = 64
_WINDOW = 2**21


def with_lookalikes(
    parts: Mapping[str, MegatronPart], units: Sequence[Unit], weights: Weights
) -> dict[str, MegatronPart]:
    """The parts, with those params ambiguous whose weights equal one that no part holds. Reads ends of tensors, and
    all of those that have equal ends.
    """
    held = {box for part in parts.values() for local in part.local_params for box in local.boxes}
    left: dict[tuple[str, int], list[Unit]] = {}
    for unit in units:
        if not any(box in held for box in unit.boxes):
            left.setdefault((unit.dtype, unit.numel), []).append(unit)
    if not left:
        return dict(parts)
    return {name: _flagged(part, left, weights) for name, part in parts.items()}


def _flagged(part: MegatronPart, left: Mapping[tuple[str, int], list[Unit]], weights: Weights) -> MegatronPart:
    params = part.catalog.state.params
    old = part.evidence.ambiguous
    more = [
        params[local.param].name
        for local in part.local_params
        if local.boxes and _has_twin(local, left.get((local.dtype, local.numel), ()), weights)
    ]
    ambiguous = tuple(dict.fromkeys([*old, *more]))
    return part if ambiguous == old else replace(part, evidence=replace(part.evidence, ambiguous=ambiguous))


def _has_twin(local: LocalParam, units: Iterable[Unit], weights: Weights) -> bool:
    return any(_equal(local.boxes, unit.boxes, local.numel, weights) for unit in units)


def _equal(a: Sequence[KeyBox], b: Sequence[KeyBox], numel: int, weights: Weights) -> bool:
    size = min(_ENDS, numel)
    for at in (0, numel - size):
        if weights.read(a, at, size) != weights.read(b, at, size):
            return False
    return all(
        weights.read(a, at, min(_WINDOW, numel - at)) == weights.read(b, at, min(_WINDOW, numel - at))
        for at in range(0, numel, _WINDOW)
    )

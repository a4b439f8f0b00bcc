"""Proves a map: the main params, cast to the model's dtype, must be the model's weights, element for element."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ...core.casting import same_after_cast
from ...core.ranges import IntColumn
from ...model.protocols import Progress
from ...model.state import MAIN_PARAM
from .entries import ChunkSource
from .model import Evidence, LocalParam, MegatronCheckpoint, MegatronPart
from .weights import Weights, read_rows

__all__ = ["prove", "unequal"]

_WINDOW = 2**21
"""Elements that are compared at a time."""
_CAST = ("float32", "float64", "float16", "bfloat16")


def prove(checkpoint: MegatronCheckpoint, progress: Progress | None = None) -> MegatronCheckpoint:
    """The checkpoint with evidence for every element; reads main params and weights once.

    Raises ``CorruptError`` and ``MissingError`` for what cannot be read.
    """
    weights = Weights(checkpoint.entries, checkpoint.model_keys)
    parts = {name: _prove_part(part, checkpoint, weights, progress) for name, part in checkpoint.parts.items()}
    return replace(checkpoint, parts=parts)


def _prove_part(
    part: MegatronPart, checkpoint: MegatronCheckpoint, weights: Weights, progress: Progress | None
) -> MegatronPart:
    if part.evidence.proved is not None:
        return part
    params = part.catalog.state.params
    bad: dict[str, None] = {}
    proved = 0
    for local in part.local_params:
        if part.evidence.by == "layout file" and not _has_weight(local, weights):
            continue  # the file is the evidence: there is nothing to compare with
        wrong = sum(unequal(part, local, checkpoint.source, weights, progress))
        proved += local.numel - wrong
        if wrong:
            bad[params[local.param].name] = None
    if bad and part.layout is None:  # state that was shifted equals weights that are all the same
        bad.update(dict.fromkeys(_uniform(part, weights)))
    old = part.evidence
    unproved = tuple(dict.fromkeys([*bad, *old.unknown]))
    evidence = Evidence(old.by, old.elements, proved, old.ambiguous, unproved, old.unknown)
    return replace(part, evidence=evidence)


def _uniform(part: MegatronPart, weights: Weights) -> Iterator[str]:
    """Params whose weights are all one value: their main params say nothing of where their state lies."""
    for local in part.local_params:
        if not _has_weight(local, weights) or _is_uniform(local, weights):
            yield part.catalog.state.params[local.param].name


def _is_uniform(local: LocalParam, weights: Weights) -> bool:
    item = weights.entries.tensors[local.boxes[0].key].itemsize
    first = bytes(weights.read(local.boxes, 0, 1))
    for at in range(0, local.numel, _WINDOW):
        size = min(_WINDOW, local.numel - at)
        values = np.frombuffer(weights.read(local.boxes, at, size), f"V{item}")
        if (values != np.frombuffer(first, f"V{item}")[0]).any():
            return False
    return True


def _has_weight(local: LocalParam, weights: Weights) -> bool:
    return bool(local.boxes) and all(held.key in weights.entries.tensors for held in local.boxes)


def unequal(
    part: MegatronPart,
    local: LocalParam,
    source: ChunkSource,
    weights: Weights,
    progress: Progress | None = None,
) -> Iterator[int]:
    """For each window of a local param, how many of its elements are not the weight's. All, where there is none."""
    state = part.catalog.state
    slot = state.slot_index.get(MAIN_PARAM)
    dtype = weights.entries.tensors[local.boxes[0].key].dtype if local.boxes else None
    if slot is None or dtype not in ("float32", "float16", "bfloat16") or state.slots[slot].dtype not in _CAST:
        yield local.numel
        return
    main = state.slots[slot].dtype
    for at in range(0, local.numel, _WINDOW):
        size = min(_WINDOW, local.numel - at)
        values = bytearray(size * state.slots[slot].itemsize)
        asked = [_column(n) for n in (local.param, slot, local.start + at, size)]
        _, rows = part.catalog.placement.locate(*asked)
        read_rows(source, rows, memoryview(values))
        stored = weights.read(local.boxes, at, size)
        same = same_after_cast(memoryview(values), main, memoryview(stored), dtype)
        if progress is not None:
            progress.advance(len(values) + len(stored))
        yield int(size - np.count_nonzero(same))


def _column(value: int) -> IntColumn:
    return np.array([value], np.int64)

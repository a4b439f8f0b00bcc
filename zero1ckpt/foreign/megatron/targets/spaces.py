"""``fully_reshardable`` as a target: state in the chunks of the model's own tensors. Pure.

Each chunk of a model's tensor lies in one box of a param. What several groups hold (params that tensor-parallel ranks
replicate, embeddings that the first and last stage share) is written once; the copies are compared before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ....core.boxes import Box
from ....core.errors import CorruptError, UnsupportedError
from .buckets import field_of
from .files import ChunkRow, Fill
from .items import Piece
from .origin import Origin, OriginPart, OriginTensor, locals_by_key, piece_of

__all__ = ["Copy", "SpacePlan", "plan_spaces"]


@dataclass(frozen=True, slots=True)
class Copy:
    """Two places that must hold the same values: piece ``first`` of part ``first_part``, and ``second``."""

    key: str
    first_part: int
    first: Piece
    second_part: int
    second: Piece


@dataclass(frozen=True)
class SpacePlan:
    """``rows[p]``: chunks that part ``p`` fills; ``shapes``: dtype and shape of each tensor by key."""

    rows: tuple[tuple[ChunkRow, ...], ...]
    shapes: dict[str, tuple[str, tuple[int, ...]]]
    copies: tuple[Copy, ...]


def plan_spaces(origin: Origin) -> SpacePlan:
    """Where each chunk of the target comes from.

    Raises ``UnsupportedError`` where params have no place in the model's tensors, ``CorruptError`` where a tensor's
    chunks are held in part only.
    """
    _check_known(origin.parts)
    homes = locals_by_key(origin.parts)
    rows: list[list[ChunkRow]] = [[] for _ in origin.parts]
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    copies: list[Copy] = []
    for key in sorted(homes):
        tensor = origin.tensors.get(key)
        if tensor is None:
            raise CorruptError("the checkpoint has no weights of a param that has state", file=origin.label, param=key)
        for box in sorted(_unique(tensor), key=lambda box: box.start):
            found = _holders(origin.parts, homes[key], box)
            if not found:
                raise CorruptError(
                    "no data-parallel group holds the state of a part of a weight",
                    file=origin.label,
                    param=key,
                    found=f"elements from {list(box.start)}, shape {list(box.shape)}",
                )
            (part, piece), *others = found
            rows[part] += _rows(origin.parts[part], tensor, box, piece)
            copies += [Copy(key, part, piece, other, its) for other, its in others]
        for spec in origin.parts[homes[key][0][0]].catalog.state.slots:
            shapes[_key(spec.name, key)] = (spec.dtype, tensor.shape)
    return SpacePlan(tuple(tuple(own) for own in rows), shapes, tuple(copies))


def _check_known(parts: Sequence[OriginPart]) -> None:
    first = parts[0].catalog.state.slots
    for part in parts:
        if part.catalog.state.slots != first:
            raise UnsupportedError(
                "parts keep different slots, and the target holds them under one name each",
                found=f"part {part.name!r}: {', '.join(s.name for s in part.catalog.state.slots)}",
                expected=", ".join(s.name for s in first),
            )
        for local in part.local_params:
            if sum(held.box.size for held in local.boxes) != local.numel:
                raise UnsupportedError(
                    "where a param lies in the model's tensors over all ranks is not known",
                    param=local.name,
                    hint="write it from the training script and pass it with --layout",
                )


def _unique(tensor: OriginTensor) -> list[Box]:
    return list(dict.fromkeys(box for box in tensor.boxes if box.size))


def _holders(
    parts: Sequence[OriginPart], homes: Sequence[tuple[int, int, int, Box]], box: Box
) -> list[tuple[int, Piece]]:
    """Parts that hold a box as a whole, and where."""
    return [
        (p, piece_of(parts[p].local_params[local], index, box)) for p, local, index, home in homes if _inside(box, home)
    ]


def _inside(box: Box, home: Box) -> bool:
    return len(box.start) == len(home.start) and all(
        low <= start and start + size <= low + whole
        for start, size, low, whole in zip(box.start, box.shape, home.start, home.shape, strict=True)
    )


def _rows(part: OriginPart, tensor: OriginTensor, box: Box, piece: Piece) -> Iterator[ChunkRow]:
    for slot, spec in enumerate(part.catalog.state.slots):
        fill = Fill(piece.param, slot, piece.begin, piece.shape, piece.box, 0)
        yield ChunkRow(_key(spec.name, tensor.key), box.start, box.shape, (fill,), spec.dtype)


def _key(slot: str, key: str) -> str:
    return f"optimizer.state.{field_of(slot)}.{key}"

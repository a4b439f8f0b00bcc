"""Parts in buckets from a source in model space, by a layout file of the run.

Each data-parallel group becomes a part whose params are pieces of the source's global ones. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ....core.boxes import Box
from ....core.errors import UnsupportedError
from ..layout_file import LayoutFile, LayoutGroup
from ..model import KeyBox, LocalParam
from .items import Piece
from .origin import Origin, OriginPart, locals_by_key, piece_of

__all__ = ["with_layout"]


def with_layout(origin: Origin, layout: LayoutFile) -> Origin:
    """The same source with its state in the groups of a layout file; of one that is in groups already, their stages.

    Raises ``UnsupportedError`` where the file does not fit the checkpoint's tensors, or leaves some of them out.
    """
    if any(part.layout is not None for part in origin.parts):
        return replace(origin, parts=tuple(_with_stage(part, layout) for part in origin.parts))
    homes = locals_by_key(origin.parts)
    groups = tuple(_group_part(origin, group, homes) for group in layout.groups)
    _check_all_held(origin, groups)
    return replace(origin, grouped=groups)


def _with_stage(part: OriginPart, layout: LayoutFile) -> OriginPart:
    """A part with its pipeline stage, where the checkpoint does not tell it."""
    group = layout.group(part.chained, part.group)
    if part.pipeline_rank is not None or group is None:
        return part
    return replace(part, pipeline_rank=group.pipeline_rank)


def _group_part(origin: Origin, group: LayoutGroup, homes: dict[str, list[tuple[int, int, int, Box]]]) -> OriginPart:
    locals_ = group.local_params
    pieces = tuple(_pieces(origin, local, homes) for local in locals_)
    whole = origin.parts[0]
    return OriginPart(
        group.label,
        whole.catalog,
        whole.source,
        locals_,
        group.layout,
        group.chained,
        group.group,
        group.pipeline_rank,
        pieces,
    )


def _pieces(origin: Origin, local: LocalParam, homes: dict[str, list[tuple[int, int, int, Box]]]) -> tuple[Piece, ...]:
    """Where a param of a rank lies in the source's global params, in the order of its elements."""
    if not local.boxes:
        raise UnsupportedError(
            "the layout file does not say which part of the model's tensors a param is", param=local.name
        )
    found: list[Piece] = []
    for held in local.boxes:
        _check_weight(origin, local, held)
        found += _split(origin.parts, held, homes.get(held.key, ()))
    if sum(piece.box.size for piece in found) != local.numel:
        raise UnsupportedError(
            "the checkpoint has no state for a param of the layout file, or only for some of it",
            file=origin.label,
            param=local.name,
            found=f"{sum(piece.box.size for piece in found)} elements",
            expected=local.numel,
            hint="use the layout file of the run that wrote the checkpoint",
        )
    return tuple(found)


def _check_weight(origin: Origin, local: LocalParam, held: KeyBox) -> None:
    tensor = origin.tensors.get(held.key)
    if tensor is None or tensor.dtype != local.dtype or len(tensor.shape) != len(held.box.shape):
        raise UnsupportedError(
            "the layout file does not fit the checkpoint's tensors",
            file=origin.label,
            param=local.name,
            found="no such tensor" if tensor is None else f"{tensor.dtype}{list(tensor.shape)}",
            expected=f"{held.key} of {local.dtype}, {len(held.box.shape)} dimensions",
            hint="use the layout file of the run that wrote the checkpoint",
        )


def _split(parts: Sequence[OriginPart], held: KeyBox, homes: Sequence[tuple[int, int, int, Box]]) -> list[Piece]:
    """A box of a tensor, by the params that hold it: one, or one a step along the first axis (layers)."""
    made = []
    for p, local, index, home in sorted(homes, key=lambda row: row[3].start):
        common = _common(held.box, home)
        if common is not None:
            if common.shape[1:] != held.box.shape[1:]:
                raise UnsupportedError("a param of a rank is spread over params of the checkpoint", param=held.key)
            made.append(piece_of(parts[p].local_params[local], index, common))
    return made


def _common(a: Box, b: Box) -> Box | None:
    start = tuple(max(x, y) for x, y in zip(a.start, b.start, strict=True))
    ends = [min(x + n, y + m) for x, n, y, m in zip(a.start, a.shape, b.start, b.shape, strict=True)]
    shape = tuple(end - low for low, end in zip(start, ends, strict=True))
    return Box(start, shape) if all(n > 0 for n in shape) else None


def _check_all_held(origin: Origin, groups: Sequence[OriginPart]) -> None:
    """Every element of the state must lie in some group, or the target would lose it."""
    held: dict[int, dict[Piece, int]] = {}
    for group in groups:
        for pieces in group.pieces:
            for piece in pieces:
                held.setdefault(piece.param, {})[piece] = piece.box.size
    state = origin.parts[0].catalog.state
    for param, spec in enumerate(state.params):
        got = sum(held.get(param, {}).values())
        if got < spec.numel:
            raise UnsupportedError(
                "the layout file leaves out state that the checkpoint has",
                file=origin.label,
                param=spec.name,
                found=f"{got} elements",
                expected=spec.numel,
                hint="use the layout file of the run that wrote the checkpoint",
            )

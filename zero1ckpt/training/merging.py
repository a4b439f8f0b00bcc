"""Rank 0's side of a save: from what the ranks tell to shared blobs and the manifest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..api.commit import encode_manifest_of, part_manifest, write_derived
from ..api.stored import part_prefix
from ..core.errors import LostRankError, UsageError, Zero1CkptError
from ..core.layout import Layout, LayoutRules, layout_params
from ..model.catalog import Catalog
from ..model.manifest import FileEntry, PartManifest, RankExtra
from ..model.state import PartState, Scalar
from ..resharding.copying import BlobReport, Share, seal_blobs
from ..storage.staging import Area

if TYPE_CHECKING:
    from .saving import SaveRequest

__all__ = ["Absent", "PartHeader", "RankReport", "Written", "make_shared_blobs", "merge_reports"]

Absent = dict[str, frozenset[tuple[int, int]]]
"""(param index, slot index) of tensors without a value, by part."""
Written = Sequence[BlobReport] | Mapping[int, Share]
"""What a rank wrote of a part: its own blobs, or its share of each shared one."""


class PartHeader(NamedTuple):
    """What a rank says of its part of one optimizer, besides the checksums. Only rank 0 of a part describes it."""

    rank: int
    dp_size: int
    step: int
    rules: LayoutRules
    state: PartState | None
    scalars: Mapping[int, Mapping[str, Scalar]]
    absent: frozenset[tuple[int, str]]


class RankReport(NamedTuple):
    """All that a rank tells rank 0. ``error``: what went wrong there; ``sent``: bytes of tensors that it has sent."""

    error: Zero1CkptError | None
    parts: Mapping[str, tuple[PartHeader, Written]]
    files: Sequence[FileEntry]
    extra_digest: int | None
    sent: int = 0


def make_shared_blobs(request: SaveRequest, area: Area, headers: Sequence[Mapping[str, PartHeader]]) -> Absent:
    """Tells which tensors are absent, and makes the blobs that ranks write together. Raises ``OutputError``."""
    absent: Absent = {}
    for name in dict.fromkeys(part for own in headers for part in own):
        planned = _plan(request, name, [own[name] for own in headers if name in own])
        absent[name] = planned.state.absent
        for blob in range(planned.placement.blob_count if request.format.shared_blobs else 0):
            request.format.create(area, planned, blob).close()
    return absent


def merge_reports(request: SaveRequest, area: Area, reports: Sequence[RankReport]) -> bytes:
    """The manifest from all ranks' reports, shared blobs completed; raises the first error that one of them holds.

    That another rank has failed is raised only where that one has not told its own error.
    """
    errors = [(rank, report.error) for rank, report in enumerate(reports) if report.error is not None]
    for rank, error in sorted(errors, key=lambda row: isinstance(row[1], LostRankError)):
        raise type(error)(f"rank {rank}: {error}" if rank else str(error))
    _check_extra(request, reports)
    names = list(dict.fromkeys(part for report in reports for part in report.parts))
    parts: list[PartManifest] = []
    files: list[FileEntry] = []
    for name in names:
        mine = [report.parts[name] for report in reports if name in report.parts]
        planned = _plan(request, name, [header for header, _ in mine])
        blobs = [blob for _, written in mine if not isinstance(written, Mapping) for blob in written]
        if request.format.shared_blobs:
            added = [written for _, written in mine if isinstance(written, Mapping)]
            blobs = seal_blobs(request.format, planned, area, added)
        parts.append(part_manifest(planned, blobs))
        files += [entry for blob in blobs for entry in blob.files] + write_derived(area, request.format, planned)
    files += [entry for report in reports for entry in report.files]
    return encode_manifest_of(
        request.format,
        parts,
        files,
        extra=request.extra,
        model=[entry for entry, _ in request.model],
        rank_extra=RankExtra(len(reports)) if request.has_rank_extra else None,
        options=request.options,
    )


def _check_extra(request: SaveRequest, reports: Sequence[RankReport]) -> None:
    for rank, report in enumerate(reports):
        if report.extra_digest not in (None, reports[0].extra_digest):
            raise UsageError(
                f"extra of rank {rank} differs from that of rank 0, and is stored once",
                hint="pass what belongs to a rank as rank_extra",
            )
    saved = sum(any(entry.path.startswith("rank_extra-") for entry in report.files) for report in reports)
    if saved not in (0, len(reports)):
        raise UsageError("rank_extra was not given by all ranks", found=f"{saved} ranks", expected=f"{len(reports)}")


def _plan(request: SaveRequest, name: str, told: Sequence[PartHeader]) -> Catalog:
    """One part as it will be stored. Checks that every rank of its group has told once, and that all agree."""
    headers = sorted(told, key=lambda header: header.rank)
    first = headers[0]
    if [header.rank for header in headers] != list(range(first.dp_size)):
        raise UsageError(
            f"part {name!r} was not saved by each rank of its group once",
            found=f"ranks {[header.rank for header in headers]}",
            expected=f"0 to {first.dp_size - 1}",
            hint="give every data-parallel group a part of its own",
        )
    for header in headers:
        if header.step != first.step:
            raise UsageError(
                f"part {name!r}: rank {header.rank} has applied another number of steps than rank 0",
                found=header.step,
                expected=first.step,
            )
    described = first.state
    assert described is not None
    slots = {slot.name: k for k, slot in enumerate(described.slots)}
    absent = frozenset((param, slots[slot]) for header in headers for param, slot in header.absent)
    state = replace(described, absent=absent, scalars=_merge_scalars(described, headers))
    layout = layout_params(state.params, first.rules)
    _check_absent(name, state, layout, headers)
    return request.format.plan(state, layout, name, part_prefix(name), request.options)


def _check_absent(name: str, state: PartState, layout: Layout, headers: Sequence[PartHeader]) -> None:
    """A slot is absent on all ranks that own a part of the param, or the values of the others would be lost."""
    told = Counter(key for header in headers for key in header.absent)
    params = np.array(sorted({param for param, _ in told}), np.int64)
    owners = np.zeros(layout.param_count, np.int64)
    for index, buffer in enumerate(layout.buffers):
        mine = params[layout.buffer_of[params] == index]
        places = layout.place_of[mine]
        row, _ = buffer.owners(places, np.zeros(len(mine), np.int64), buffer.end[places] - buffer.start[places])
        owners[mine] = np.bincount(row, minlength=len(mine))
    for (param, slot), ranks in told.items():
        if ranks != owners[param]:
            raise UsageError(
                f"part {name!r}: slot {slot} has a value on some of the ranks that own a part of the param only",
                param=state.params[param].name,
                found=f"none on {ranks} of {owners[param]} ranks",
                hint="all ranks must step the same params",
            )


def _merge_scalars(state: PartState, headers: Sequence[PartHeader]) -> tuple[Mapping[str, Scalar], ...]:
    """Scalars of all params; a param that several ranks own parts of must have the same on each."""
    merged: dict[int, tuple[int, Mapping[str, Scalar]]] = {}
    for header in headers:
        for param, own in header.scalars.items():
            rank, known = merged.setdefault(param, (header.rank, own))
            if repr(sorted(own.items())) != repr(sorted(known.items())):
                raise UsageError(
                    f"scalar state differs between rank {rank} and rank {header.rank}",
                    param=state.params[param].name,
                    found=dict(own),
                    expected=dict(known),
                )
    if not any(own for _, own in merged.values()):
        return ()
    return tuple(merged[i][1] if i in merged else {} for i in range(len(state.params)))

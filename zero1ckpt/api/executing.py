"""Executes a reshard plan: one process with threads, or several ranks that share a file system."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ..core.errors import LostRankError, OutputError, Zero1CkptError
from ..encodings.safetensors_file import PAGE
from ..encodings.tensor_file import copy_file
from ..model.catalog import Catalog
from ..model.manifest import MANIFEST_NAME, FileEntry, PartManifest, make_part
from ..model.protocols import Progress
from ..resharding.copying import BlobReport, copy_part
from ..storage.rendezvous import Ranks, Rendezvous
from ..storage.staging import Area, Staging, find_leftovers, partial_path, refuse_existing, remove_leftover, staged
from .carrying import carried_bytes, write_carried
from .checkpoint import Checkpoint
from .checkpoint import open as open_checkpoint
from .commit import check_overwrite, check_space, encode_manifest_of, part_manifest, write_derived
from .comparison import compare, read_changed
from .megatron_target import MegatronPlan, execute_megatron
from .stored import Stored, describe

if TYPE_CHECKING:
    from .resharding import ReshardPlan

__all__ = ["RANK_TIMEOUT", "execute"]

RANK_TIMEOUT = 120.0
"""Seconds without a sign of life after which a rank of the job counts as lost."""


class _Blob(msgspec.Struct):
    """A blob's report as it travels from rank to rank: its files, and (param, slot, checksum)."""

    files: list[FileEntry]
    values: list[tuple[int, int, int]]


class _Start(msgspec.Struct):
    """What rank 0 tells when the folder is there: ``area`` is its name in ``partial_path``."""

    job: dict[str, Any]
    area: str
    resumed: bool


def execute(
    plan: ReshardPlan | MegatronPlan,
    *,
    overwrite: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
    rank_timeout: float = RANK_TIMEOUT,
) -> Checkpoint:
    """Executes a plan: writes aside, proves, and publishes at the end. Errors as of ``reshard``.

    ``ranks``: this process and the others that run the same plan; each writes its share of the blobs, rank 0 commits.
    Raises ``LostRankError`` that names the ranks which were not heard from for ``rank_timeout`` seconds.
    """
    if isinstance(plan, MegatronPlan):
        made = execute_megatron(plan, overwrite=overwrite, resume=resume, progress=progress, ranks=ranks)
        return open_checkpoint(made)
    if resume and _already_done(plan, overwrite):
        for leftover in find_leftovers(plan.dst) if ranks is None or ranks.rank == 0 else ():
            if leftover.dst == plan.dst and leftover.owner is None:
                remove_leftover(leftover)
        return open_checkpoint(plan.dst)
    if ranks is None or ranks.size == 1:
        _lead(plan, None, overwrite=overwrite, resume=resume, progress=progress)
    else:
        with Rendezvous(plan.dst, ranks, timeout=rank_timeout) as meeting:
            if ranks.rank == 0:
                _lead(plan, meeting, overwrite=overwrite, resume=resume, progress=progress)
            else:
                _follow(plan, meeting)
    plan.stored.store.close()
    return open_checkpoint(plan.dst)


def _lead(
    plan: ReshardPlan, meeting: Rendezvous | None, *, overwrite: bool, resume: bool, progress: Progress | None
) -> None:
    check_overwrite(plan.dst, overwrite)
    refuse_existing(plan.dst, overwrite)
    plan = _proved(plan)
    if not resume:
        carried = 0 if plan.stored.megatron is None else carried_bytes(plan.stored.megatron)
        check_space(plan.dst, plan.payload_bytes + carried + PAGE * sum(c.placement.blob_count for c in plan.catalogs))
    with staged(Staging(plan.dst, plan.job, overwrite=overwrite, resume=resume)) as staging:
        if meeting is not None:
            meeting.post("start", msgspec.json.encode(_Start(plan.job, staging.root.name, staging.resumed)))
        shares = [_copy_share(plan, staging, Ranks(0, 1) if meeting is None else meeting.ranks, progress)]
        if meeting is not None:
            shares += [_decode(data) for data in meeting.collect("report")]
        staging.publish(MANIFEST_NAME, _manifest(plan, staging, shares))


def _proved(plan: ReshardPlan) -> ReshardPlan:
    """The plan once its source's map is proved, where it has one. Raises ``UnsupportedError`` where it is not."""
    if plan.stored.megatron is None:
        return plan
    from .megatron_source import check_proved, prove_map
    from .megatron_verification import prove_archives
    from .resharding import with_source

    if plan.verify:
        prove_archives(plan.stored, workers=plan.workers, window=plan.window_bytes)
    stored = prove_map(plan.stored)
    check_proved(stored, unproved=plan.unproved)
    return with_source(plan, stored)


def _follow(plan: ReshardPlan, meeting: Rendezvous) -> None:
    start = msgspec.json.decode(meeting.receive("start"), type=_Start)
    if start.job != plan.job:
        raise LostRankError(
            "rank 0 runs another command", found=start.job, expected=plan.job, hint="run the same on all ranks"
        )
    area = Area(partial_path(plan.dst) / start.area, resumed=start.resumed)
    try:
        share = _copy_share(plan, area, meeting.ranks, None)
    except OutputError as error:
        if meeting.alive:
            raise
        raise meeting.ended() from error  # a later job has taken the folder away
    meeting.post(f"report-{meeting.ranks.rank}", _encode(share))
    meeting.await_end()


def _copy_share(plan: ReshardPlan, area: Area, ranks: Ranks, progress: Progress | None) -> list[list[BlobReport]]:
    """Every ``size``-th blob of every part, from ``rank`` on."""
    return [
        copy_part(
            part,
            area,
            range(ranks.rank, part.dst.placement.blob_count, ranks.size),
            workers=plan.workers,
            window_bytes=plan.window_bytes,
            prove=plan.verify,
            progress=progress,
        )
        for part in plan.parts()
    ]


def _encode(share: list[list[BlobReport]]) -> bytes:
    rows = [[_Blob(list(r.files), [(p, s, crc) for (p, s), crc in r.values.items()]) for r in own] for own in share]
    return msgspec.json.encode(rows)


def _decode(data: bytes) -> list[list[BlobReport]]:
    rows = msgspec.json.decode(data, type=list[list[_Blob]])
    return [[BlobReport(row.files, {(p, s): crc for p, s, crc in row.values}) for row in own] for own in rows]


def _manifest(plan: ReshardPlan, staging: Staging, shares: Sequence[list[list[BlobReport]]]) -> bytes:
    parts: list[PartManifest] = []
    files: list[FileEntry] = []
    for index, part in enumerate(plan.parts()):
        reports = [report for share in shares for report in share[index]]
        parts.append(part_manifest(part.dst, reports))
        files += [entry for report in reports for entry in report.files]
        files += write_derived(staging, plan.format, part.dst)
    files += _copy_others(plan, staging)
    stored = plan.stored.manifest
    return encode_manifest_of(
        plan.format,
        parts,
        files,
        extra=stored.extra,
        model=stored.model,
        rank_extra=stored.rank_extra,
        options=plan.options,
    )


def _copy_others(plan: ReshardPlan, staging: Staging) -> Sequence[FileEntry]:
    if plan.stored.megatron is not None:
        return write_carried(plan.stored.megatron, staging, window_bytes=plan.window_bytes)
    others = plan.stored.other_files()
    for entry in others:
        path = staging.path(entry.path)
        copy_file(plan.stored.store, entry, path, window_bytes=plan.window_bytes, prove=plan.verify)
    return others


def _already_done(plan: ReshardPlan, overwrite: bool) -> bool:
    """Whether the destination is complete and what this plan would make.

    Raises ``OutputError`` where it is another checkpoint, and not to be overwritten.
    """
    if not plan.dst.exists():
        return False
    try:
        there = describe(plan.dst)
    except Zero1CkptError:
        return False
    same = _same_state(plan, there)
    if not same and not overwrite:
        raise OutputError(
            "exists and is not what this command makes", file=plan.dst, hint="choose another place or pass --overwrite"
        )
    return same


def _same_state(plan: ReshardPlan, there: Stored) -> bool:
    """Whether a complete checkpoint is what the plan would make. A source without digests is compared by its data."""
    mine, theirs = plan.stored.manifest, there.manifest
    if (theirs.format, theirs.container, theirs.options) != (plan.format.name, plan.container, plan.options):
        return False
    if (mine.extra, mine.model, mine.rank_extra) != (theirs.extra, theirs.model, theirs.rank_extra):
        return False
    wanted = [_part_of(catalog) for catalog in plan.catalogs]
    if plan.stored.megatron is None:
        return plan.stored.other_files() == there.other_files() and theirs.parts == wanted
    if [part.layout for part in theirs.parts] != [part.layout for part in wanted]:
        return False
    found = compare(plan.stored, there)
    read_changed(found, only_unknown=True, workers=plan.workers)
    return found.ok


def _part_of(catalog: Catalog) -> PartManifest:
    """A part's manifest as it will be: values keep their digests, where those are known."""
    rules = None if catalog.layout is None else catalog.layout.rules
    state = catalog.state
    known = {(i, k): catalog.digests.get((i, k), 0) for i in range(len(state.params)) for k in range(len(state.slots))}
    return make_part(catalog.part, state, rules, known)

"""``zero1ckpt.reshard``: the same state for another dp size, bucket size, format or container."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import OutputError, UnsupportedError, UsageError, Zero1CkptError
from ..core.layout import layout_params
from ..encodings.safetensors_file import PAGE
from ..encodings.tensor_file import copy_file
from ..model.catalog import Catalog
from ..model.manifest import FileEntry, PartManifest, make_part
from ..model.protocols import Format, Progress
from ..registry import find_container, find_format
from ..resharding.coalesce import runs
from ..resharding.files import PartCopy, copy_part
from ..resharding.plan import correspond, cut_moves, plan_blob, window_bounds
from ..storage.staging import Staging, find_leftovers, refuse_existing, remove_leftover, staged
from .checkpoint import Checkpoint
from .checkpoint import open as open_checkpoint
from .commit import (
    check_overwrite,
    check_space,
    encode_manifest_of,
    part_manifest,
    window_bytes,
    workers_or_default,
)
from .stored import Stored, describe, part_prefix
from .writing import make_rules, parse_bucket_size

__all__ = ["PlanTotals", "ReshardPlan", "plan_reshard", "reshard"]


@dataclass(frozen=True, slots=True)
class PlanTotals:
    """What a plan will do; bytes are payload bytes, ``peak_memory`` is data in flight over the interpreter."""

    reads: int
    writes: int
    bytes_read: int
    bytes_written: int
    files_written: int
    peak_memory: int


@dataclass(frozen=True)
class ReshardPlan:
    """What ``reshard`` will do. A value: nothing was written to make it."""

    stored: Stored
    dst: Path
    format: Format
    container: str
    catalogs: tuple[Catalog, ...]
    workers: int
    window_bytes: int
    verify: bool

    @property
    def payload_bytes(self) -> int:
        return sum(c.placement.payload_nbytes(b) for c in self.catalogs for b in range(c.placement.blob_count))

    @property
    def job(self) -> dict[str, Any]:
        """What is written, so that a resume goes on with the same job only."""
        rules = [c.layout.rules if c.layout else None for c in self.catalogs]
        return {
            "command": "reshard",
            "source": self.stored.manifest_digest,
            "format": self.format.name,
            "container": self.container,
            "layout": [repr(rule) for rule in rules],
        }

    def parts(self) -> Iterator[PartCopy]:
        for dst in self.catalogs:
            src = self.stored.catalogs[dst.part]
            yield PartCopy(src, self.stored.source(dst.part), dst, self.format, correspond(src.state, dst.state))

    def totals(self) -> PlanTotals:
        """Counts reads and writes of the whole plan; plans every blob, reads nothing."""
        reads = writes = read = written = files = 0
        empty = np.empty(0, np.int64)
        for dst in self.catalogs:
            src = self.stored.catalogs[dst.part]
            match = correspond(src.state, dst.state)
            for blob in range(dst.placement.blob_count):
                bounds = window_bounds(dst.placement.payload_nbytes(blob), self.window_bytes, empty)
                moves, first = cut_moves(plan_blob(src, dst, match, blob), bounds)
                for low, high in zip(first[:-1].tolist(), first[1:].tolist(), strict=True):
                    reads += sum(1 for _ in runs(moves.take(slice(low, high))))
                read += int(moves.nbytes.sum())
                written += dst.placement.payload_nbytes(blob)
                writes += len(bounds)
                files += 1
        return PlanTotals(reads, writes, read, written, files, self.workers * self.window_bytes)


def plan_reshard(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str] | None = None,
    *,
    to_dp: int,
    bucket_size: int | str | None = None,
    format: str | None = None,
    container: str | None = None,
    from_dp: int | None = None,
    workers: int | None = None,
    memory_limit: int | None = None,
    verify: bool = True,
) -> ReshardPlan:
    """Plans a reshard; reads the source's manifest only. Arguments and errors as of ``reshard``."""
    stored = describe(src)
    plugin = stored.format if format is None else find_format(format)
    kind = stored.manifest.container if format is None and container is None else find_container(plugin, container)
    target = _destination(stored.path, dst, to_dp)
    keep_size = bucket_size is None
    size = None if bucket_size is None else parse_bucket_size(bucket_size)
    make_rules(to_dp, size)
    _check_from_dp(stored, from_dp)
    scale = Fraction(to_dp, _dense_dp(stored))
    catalogs = []
    for part, catalog in stored.catalogs.items():
        assert catalog.layout is not None
        old = catalog.layout.rules
        new_dp = old.dp_size * scale
        if new_dp.denominator != 1:
            raise UnsupportedError(
                f"part {part!r} has dp size {old.dp_size}, which does not scale to a whole number of ranks",
                file=stored.path,
                found=new_dp,
                hint="choose a --to-dp that all parts scale to",
            )
        rules = replace(
            make_rules(int(new_dp), old.bucket_size if keep_size else size, old.pad_for_high_nccl_busbw),
            param_align=old.param_align,
            bucket_align=old.bucket_align,
        )
        planned = plugin.plan(catalog.state, layout_params(catalog.state.params, rules), part, part_prefix(part))
        catalogs.append(replace(planned, digests=catalog.digests))
    threads = workers_or_default(workers)
    window = window_bytes(memory_limit, threads)
    return ReshardPlan(stored, target, plugin, kind, tuple(catalogs), threads, window, verify)


def reshard(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str] | None = None,
    *,
    to_dp: int,
    bucket_size: int | str | None = None,
    format: str | None = None,
    container: str | None = None,
    from_dp: int | None = None,
    workers: int | None = None,
    memory_limit: int | None = None,
    verify: bool = True,
    overwrite: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
) -> Checkpoint:
    """Writes the state of ``src`` for ``to_dp`` ranks; what is not given stays as in ``src``.

    ``bucket_size``: elements, or "none" for one bucket a buffer. ``memory_limit``: bytes of data in flight.
    ``verify=False`` leaves out the proof of the source's checksums.

    Raises ``MissingError``, ``CorruptError`` or ``UnsupportedError`` for the source, ``UsageError`` where source and
    destination are the same, ``OutputError`` where the destination exists or cannot be written.
    """
    plan = plan_reshard(
        src,
        dst,
        to_dp=to_dp,
        bucket_size=bucket_size,
        format=format,
        container=container,
        from_dp=from_dp,
        workers=workers,
        memory_limit=memory_limit,
        verify=verify,
    )
    return execute(plan, overwrite=overwrite, resume=resume, progress=progress)


def execute(
    plan: ReshardPlan, *, overwrite: bool = False, resume: bool = False, progress: Progress | None = None
) -> Checkpoint:
    """Executes a plan: writes aside, proves, and publishes at the end. Errors as of ``reshard``."""
    if resume and _already_done(plan, overwrite):
        for leftover in find_leftovers(plan.dst):
            if leftover.dst == plan.dst and leftover.owner is None:
                remove_leftover(leftover)
        return open_checkpoint(plan.dst)
    check_overwrite(plan.dst, overwrite)
    refuse_existing(plan.dst, overwrite)
    if not resume:
        check_space(plan.dst, plan.payload_bytes + PAGE * sum(c.placement.blob_count for c in plan.catalogs))
    with staged(Staging(plan.dst, plan.job, overwrite=overwrite, resume=resume)) as staging:
        parts = []
        files = []
        for part in plan.parts():
            reports = copy_part(
                part,
                staging,
                range(part.dst.placement.blob_count),
                workers=plan.workers,
                window_bytes=plan.window_bytes,
                prove=plan.verify,
                progress=progress,
            )
            parts.append(part_manifest(part.dst, reports))
            files += [report.file for report in reports]
        files += _copy_others(plan, staging)
        manifest = plan.stored.manifest
        data = encode_manifest_of(
            plan.format.name,
            plan.container,
            parts,
            files,
            extra=manifest.extra,
            model=manifest.model,
            rank_extra=manifest.rank_extra,
        )
        staging.publish("manifest.json", data)
    plan.stored.store.close()
    return open_checkpoint(plan.dst)


def _copy_others(plan: ReshardPlan, staging: Staging) -> Sequence[FileEntry]:
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
    mine, theirs = plan.stored.manifest, there.manifest
    same = (
        (theirs.format, theirs.container) == (plan.format.name, plan.container)
        and (mine.extra, mine.model, mine.rank_extra) == (theirs.extra, theirs.model, theirs.rank_extra)
        and plan.stored.other_files() == there.other_files()
        and theirs.parts == [_part_of(catalog) for catalog in plan.catalogs]
    )
    if not same and not overwrite:
        raise OutputError(
            "exists and is not what this command makes", file=plan.dst, hint="choose another place or pass --overwrite"
        )
    return same


def _part_of(catalog: Catalog) -> PartManifest:
    """A part's manifest as it will be: values keep their digests."""
    rules = None if catalog.layout is None else catalog.layout.rules
    return make_part(catalog.part, catalog.state, rules, catalog.digests)


def _destination(src: Path, dst: str | os.PathLike[str] | None, to_dp: int) -> Path:
    source = src.resolve()
    target = source.parent / f"{source.name}-dp{to_dp}" if dst is None else Path(dst).resolve()
    if target == source or source in target.parents or target in source.parents:
        raise UsageError(
            "source and destination are the same folder or lie in each other",
            file=target,
            found=source,
            hint="choose a destination beside the source",
        )
    return target


def _dense_dp(stored: Stored) -> int:
    return max(c.layout.rules.dp_size for c in stored.catalogs.values() if c.layout is not None)


def _check_from_dp(stored: Stored, from_dp: int | None) -> None:
    actual = _dense_dp(stored)
    if from_dp is not None and from_dp != actual:
        raise UnsupportedError(
            "the checkpoint has another dp size than --from-dp says",
            file=stored.path,
            found=actual,
            expected=from_dp,
            hint=f"pass --from-dp {actual} or leave it out",
        )

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
from ..core.layout import LayoutRules, layout_params
from ..encodings.safetensors_file import PAGE
from ..encodings.tensor_file import copy_file
from ..model.catalog import Catalog
from ..model.manifest import FileEntry, FormatOptions, PartManifest, make_part
from ..model.protocols import Format, Progress
from ..registry import find_format
from ..resharding.coalesce import runs
from ..resharding.copying import PartCopy
from ..resharding.plan import correspond, cut_moves, plan_blob, window_bounds
from ..storage.staging import Staging, find_leftovers, refuse_existing, remove_leftover, staged
from .checkpoint import Checkpoint
from .checkpoint import open as open_checkpoint
from .commit import (
    check_overwrite,
    check_space,
    encode_manifest_of,
    window_bytes,
    workers_or_default,
    write_part,
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
    options: FormatOptions
    catalogs: tuple[Catalog, ...]
    workers: int
    window_bytes: int
    verify: bool

    @property
    def container(self) -> str:
        return self.format.container

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
            "container": self.format.container,
            "options": repr(self.options),
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
    to_dp: int | None = None,
    bucket_size: int | str | None = None,
    format: str | None = None,
    container: str | None = None,
    from_dp: int | None = None,
    options: FormatOptions | None = None,
    workers: int | None = None,
    memory_limit: int | None = None,
    verify: bool = True,
) -> ReshardPlan:
    """Plans a reshard; reads the source's manifest only. Arguments and errors as of ``reshard``."""
    stored = describe(src)
    plugin = _target_format(stored, format, container)
    target = _destination(stored.path, dst, to_dp, plugin)
    size = None if bucket_size is None else parse_bucket_size(bucket_size)
    make_rules(1 if to_dp is None else to_dp, size)
    _check_from_dp(stored, from_dp)
    if plugin.keeps_layout and to_dp is None and _dense_dp(stored) is None:
        raise UsageError(
            "the checkpoint has no dp size, and the target needs one", file=stored.path, hint="pass --to-dp"
        )
    same = plugin is stored.format
    chosen = plugin.normalize(options or (stored.manifest.options if same else FormatOptions()))
    catalogs = []
    for part, catalog in stored.catalogs.items():
        rules = _rules(stored, part, catalog, to_dp, size, keep_size=bucket_size is None)
        layout = layout_params(catalog.state.params, rules) if plugin.keeps_layout and rules is not None else None
        planned = plugin.plan(catalog.state, layout, part, part_prefix(part), chosen)
        catalogs.append(replace(planned, digests=catalog.digests))
    threads = workers_or_default(workers)
    window = window_bytes(memory_limit, threads)
    return ReshardPlan(stored, target, plugin, chosen, tuple(catalogs), threads, window, verify)


def _target_format(stored: Stored, format: str | None, container: str | None) -> Format:
    """The plug-in of the target: what is not given stays, but a new format comes in its first container."""
    if format is None or format == stored.format.name:
        return find_format(stored.format.name, container or stored.format.container)
    return find_format(format, container)


def _rules(
    stored: Stored, part: str, catalog: Catalog, to_dp: int | None, size: int | None, *, keep_size: bool
) -> LayoutRules | None:
    """The target's rules for one part: all parts' dp sizes scale alike. None where neither side has any."""
    if catalog.layout is None:
        return None if to_dp is None else make_rules(to_dp, size)
    old = catalog.layout.rules
    dense = _dense_dp(stored)
    assert dense is not None
    new_dp = old.dp_size * Fraction(dense if to_dp is None else to_dp, dense)
    if new_dp.denominator != 1:
        raise UnsupportedError(
            f"part {part!r} has dp size {old.dp_size}, which does not scale to a whole number of ranks",
            file=stored.path,
            found=new_dp,
            hint="choose a --to-dp that all parts scale to",
        )
    return replace(old, dp_size=int(new_dp), bucket_size=old.bucket_size if keep_size else size)


def reshard(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str] | None = None,
    *,
    to_dp: int | None = None,
    bucket_size: int | str | None = None,
    format: str | None = None,
    container: str | None = None,
    from_dp: int | None = None,
    options: FormatOptions | None = None,
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
        options=options,
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
            made, written = write_part(
                part,
                staging,
                workers=plan.workers,
                window_bytes=plan.window_bytes,
                prove=plan.verify,
                progress=progress,
            )
            parts.append(made)
            files += written
        files += _copy_others(plan, staging)
        manifest = plan.stored.manifest
        data = encode_manifest_of(
            plan.format,
            parts,
            files,
            extra=manifest.extra,
            model=manifest.model,
            rank_extra=manifest.rank_extra,
            options=plan.options,
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
        (theirs.format, theirs.container, theirs.options) == (plan.format.name, plan.container, plan.options)
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


def _destination(src: Path, dst: str | os.PathLike[str] | None, to_dp: int | None, format: Format) -> Path:
    source = src.resolve()
    suffix = format.name if to_dp is None else f"dp{to_dp}"
    target = source.parent / f"{source.name}-{suffix}" if dst is None else Path(dst).resolve()
    if target == source or source in target.parents or target in source.parents:
        raise UsageError(
            "source and destination are the same folder or lie in each other",
            file=target,
            found=source,
            hint="choose a destination beside the source",
        )
    return target


def _dense_dp(stored: Stored) -> int | None:
    """The largest part's dp size: that of the dense params. None where the format has none."""
    return max((c.layout.rules.dp_size for c in stored.catalogs.values() if c.layout is not None), default=None)


def _check_from_dp(stored: Stored, from_dp: int | None) -> None:
    actual = _dense_dp(stored)
    if from_dp is not None and from_dp != actual:
        raise UnsupportedError(
            "the checkpoint has another dp size than --from-dp says",
            file=stored.path,
            found="none" if actual is None else actual,
            expected=from_dp,
            hint="leave --from-dp out" if actual is None else f"pass --from-dp {actual} or leave it out",
        )

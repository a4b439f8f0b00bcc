"""``zero1ckpt.reshard``: the same state for another dp size, bucket size, format or container."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import UnsupportedError, UsageError
from ..core.layout import LayoutRules, layout_params
from ..model.catalog import Catalog
from ..model.manifest import FormatOptions
from ..model.protocols import Format, Progress
from ..model.state import PartState
from ..registry import find_format
from ..resharding.coalesce import runs
from ..resharding.copying import PartCopy
from ..resharding.plan import correspond, cut_moves, plan_blob, window_bounds
from ..storage.rendezvous import Ranks
from .checkpoint import Checkpoint
from .commit import window_bytes, workers_or_default
from .executing import execute
from .mapping import map_digest
from .megatron_target import PREFIX as MEGATRON
from .megatron_target import MegatronPlan, default_destination, plan_megatron
from .stored import Stored, describe, part_prefix
from .writing import make_rules, parse_bucket_size

__all__ = ["PlanTotals", "ReshardPlan", "execute", "plan_reshard", "reshard", "source_rules", "with_source"]


@dataclass(frozen=True, slots=True)
class PlanTotals:
    """What a plan will do; bytes are payload bytes, ``peak_memory`` is data in flight over the interpreter.
    ``sampled``: reads and writes are scaled up from some of the blobs.
    """

    reads: int
    writes: int
    bytes_read: int
    bytes_written: int
    files_written: int
    peak_memory: int
    sampled: bool = False


@dataclass(frozen=True)
class ReshardPlan:
    """What ``reshard`` will do. A value: nothing was written to make it.

    ``unproved``: a Megatron checkpoint is converted though its map from params to places is not proved.
    """

    stored: Stored
    dst: Path
    format: Format
    options: FormatOptions
    catalogs: tuple[Catalog, ...]
    workers: int
    window_bytes: int
    verify: bool
    unproved: bool = False

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
            **({} if self.stored.megatron is None else {"map": map_digest(self.stored)}),
        }

    def parts(self) -> Iterator[PartCopy]:
        for dst in self.catalogs:
            src = self.stored.catalogs[dst.part]
            yield PartCopy(src, self.stored.source(dst.part), dst, self.format, correspond(src.state, dst.state))

    def totals(self, sample: int = 64) -> PlanTotals:
        """Counts reads and writes of the whole plan; reads nothing. Of more than ``sample`` blobs a part, evenly spread
        ones are planned, and the counts of calls are scaled up; bytes are exact.
        """
        reads = writes = files = 0
        for dst in self.catalogs:
            count = dst.placement.blob_count
            picked = range(count) if count <= sample else np.linspace(0, count - 1, sample).astype(int).tolist()
            calls = [self._calls(dst, blob) for blob in picked]
            reads += round(sum(read for read, _ in calls) * count / len(calls))
            writes += round(sum(written for _, written in calls) * count / len(calls))
            files += count
        sampled = any(dst.placement.blob_count > sample for dst in self.catalogs)
        read = sum(_state_nbytes(catalog.state) for catalog in self.catalogs)
        return PlanTotals(reads, writes, read, self.payload_bytes, files, self.workers * self.window_bytes, sampled)

    def _calls(self, dst: Catalog, blob: int) -> tuple[int, int]:
        """Reads and writes of one blob."""
        src = self.stored.catalogs[dst.part]
        moves = plan_blob(src, dst, correspond(src.state, dst.state), blob)
        stops = self.format.stops(dst, blob)
        bounds = window_bounds(dst.placement.payload_nbytes(blob), self.window_bytes, stops)
        cut, first = cut_moves(moves, bounds)
        reads = sum(
            sum(1 for _ in runs(cut.take(slice(low, high)))) for low, high in pairwise(first.tolist()) if high > low
        )
        return reads, len(bounds)


def _state_nbytes(state: PartState) -> int:
    """Bytes of all tensors that have a value."""
    params, slots = range(len(state.params)), range(len(state.slots))
    return sum(state.tensor_nbytes(i, k) for i in params for k in slots if (i, k) not in state.absent)


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
    check_files: bool = True,
    layout: str | os.PathLike[str] | None = None,
    unproved: bool = False,
    flavour: str | None = None,
) -> ReshardPlan | MegatronPlan:
    """Plans a reshard; reads the source's manifest only. Arguments and errors as of ``reshard``.

    ``check_files=False``: without a look at whether the source's files are there.
    """
    stored = describe(src, check_files=check_files, layout=layout)
    if unproved and stored.megatron is None:
        raise UsageError("--unproved is for Megatron checkpoints, and this is none", file=stored.path)
    wanted = stored.manifest.format if format is None else format
    if wanted.startswith(MEGATRON):
        _check_from_dp(stored, from_dp)
        return plan_megatron(
            stored,
            check_destination(stored.path, dst or default_destination(stored.path, to_dp, wanted)),
            wanted,
            to_dp=to_dp,
            bucket_size=bucket_size,
            container=container,
            options=options,
            layout=layout,
            flavour=flavour,
            unproved=unproved,
            workers=workers,
            memory_limit=memory_limit,
            verify=verify,
        )
    plugin = _target_format(stored, format, container)
    if flavour is not None:
        raise UsageError("--flavour is for Megatron targets", found=flavour, hint="leave it out")
    target = _destination(stored.path, dst, to_dp, plugin)
    size = None if bucket_size is None else parse_bucket_size(bucket_size)
    make_rules(1 if to_dp is None else to_dp, size)
    _check_from_dp(stored, from_dp)
    if plugin.keeps_layout and to_dp is None and any(source_rules(stored, part) is None for part in stored.catalogs):
        raise UsageError(
            "the checkpoint has no dp size, and the target needs one", file=stored.path, hint="pass --to-dp"
        )
    same = plugin is stored.format
    chosen = plugin.normalize(options or (stored.manifest.options if same else FormatOptions()))
    rules = [
        _rules(stored, part, catalog, to_dp, size, keep_size=bucket_size is None)
        for part, catalog in stored.catalogs.items()
    ]
    catalogs = _catalogs(stored, rules, plugin, chosen)
    threads = workers_or_default(workers)
    window = window_bytes(memory_limit, threads)
    return ReshardPlan(stored, target, plugin, chosen, catalogs, threads, window, verify, unproved)


def _catalogs(
    stored: Stored, wanted: Sequence[LayoutRules | None], plugin: Format, options: FormatOptions
) -> tuple[Catalog, ...]:
    made = []
    for (part, catalog), rules in zip(stored.catalogs.items(), wanted, strict=True):
        layout = layout_params(catalog.state.params, rules) if plugin.keeps_layout and rules is not None else None
        planned = plugin.plan(catalog.state, layout, part, part_prefix(part), options)
        made.append(replace(planned, digests=catalog.digests))
    return tuple(made)


def with_source(plan: ReshardPlan, stored: Stored) -> ReshardPlan:
    """The same plan for a source of which more is known: its params may be in another order."""
    rules = {catalog.part: catalog.layout.rules if catalog.layout else None for catalog in plan.catalogs}
    catalogs = _catalogs(stored, [rules[part] for part in stored.catalogs], plan.format, plan.options)
    return replace(plan, stored=stored, catalogs=catalogs)


def _target_format(stored: Stored, format: str | None, container: str | None) -> Format:
    """The plug-in of the target: what is not given stays, but a new format comes in its first container."""
    if format is None or (format == stored.format.name and stored.megatron is None):
        return find_format(stored.format.name, container or stored.format.container)
    return find_format(format, container)


def source_rules(stored: Stored, part: str) -> LayoutRules | None:
    """The rules by which a part is laid out, those of a Megatron part as far as it tells them; None without any."""
    layout = stored.catalogs[part].layout
    if layout is not None:
        return layout.rules
    foreign = stored.megatron.parts[part].layout if stored.megatron is not None else None
    return None if foreign is None or foreign.dp_size is None else LayoutRules(foreign.dp_size, foreign.bucket_size)


def _rules(
    stored: Stored, part: str, catalog: Catalog, to_dp: int | None, size: int | None, *, keep_size: bool
) -> LayoutRules | None:
    """The target's rules for one part: all parts' dp sizes scale alike. None where neither side has any."""
    old = source_rules(stored, part)
    if old is None:
        return None if to_dp is None else make_rules(to_dp, size)
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
    ranks: Ranks | None = None,
    layout: str | os.PathLike[str] | None = None,
    unproved: bool = False,
    flavour: str | None = None,
) -> Checkpoint:
    """Writes the state of ``src`` for ``to_dp`` ranks; what is not given stays as in ``src``.

    ``bucket_size``: elements, or "none" for one bucket a buffer. ``memory_limit``: bytes of data in flight.
    ``verify=False`` leaves out the proof of the source's checksums. ``ranks``: this process and others that make the
    same call on a file system that they share; each writes its share, and there is one commit.

    Of a Megatron checkpoint all weights are read first, to prove where each param's state lies. ``layout``: a file that
    says so. ``unproved``: goes on where it is not proved. ``flavour``: how a Megatron target keeps its common state.

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
        layout=layout,
        unproved=unproved,
        flavour=flavour,
    )
    return execute(plan, overwrite=overwrite, resume=resume, progress=progress, ranks=ranks)


def _destination(src: Path, dst: str | os.PathLike[str] | None, to_dp: int | None, format: Format) -> Path:
    source = src.resolve()
    suffix = format.name if to_dp is None else f"dp{to_dp}"
    return check_destination(src, source.parent / f"{source.name}-{suffix}" if dst is None else dst)


def check_destination(src: Path, dst: str | os.PathLike[str]) -> Path:
    """The destination's whole path. Raises ``UsageError`` where it is the source, or one lies in the other."""
    source, target = src.resolve(), Path(dst).resolve()
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
    rules = [source_rules(stored, part) for part in stored.catalogs]
    return max((rule.dp_size for rule in rules if rule is not None), default=None)


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

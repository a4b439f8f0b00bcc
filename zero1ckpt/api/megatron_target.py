"""Megatron checkpoints as the target of ``reshard``: a save root that Megatron-LM loads as its own.

The folder is made aside and appears by one rename, its tracker file last. It holds nothing of ours: no manifest and no
checksums beside those of the archives.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.errors import CorruptError, OutputError, UnsupportedError, UsageError
from ..foreign.megatron.layout_file import LayoutFile, read_layout
from ..foreign.megatron.targets.buckets import BucketRules
from ..foreign.megatron.targets.by_layout import with_layout
from ..foreign.megatron.targets.files import FileFormat, TargetPart
from ..foreign.megatron.targets.items import read_piece
from ..foreign.megatron.targets.origin import Origin, OriginPart, Twin, from_carried, from_checkpoint
from ..foreign.megatron.targets.planning import TRACKER, Target, plan_target
from ..foreign.megatron.targets.spaces import Copy
from ..model.catalog import Catalog, digest_tensors
from ..model.manifest import FormatOptions
from ..model.protocols import Progress
from ..resharding.copying import BlobReport, PartCopy, copy_part
from ..resharding.plan import correspond
from ..storage.local import LocalStore, OutputFile
from ..storage.rendezvous import Ranks
from ..storage.staging import Area, Staging, refuse_existing, staged
from .carrying import read_carried
from .commit import check_space, window_bytes, workers_or_default
from .megatron_source import check_proved, prove_map
from .megatron_verification import prove_archives
from .stored import Stored
from .writing import make_rules, parse_bucket_size

if TYPE_CHECKING:
    from .resharding import PlanTotals

__all__ = ["PREFIX", "MegatronPlan", "default_destination", "execute_megatron", "plan_megatron"]

PREFIX = "megatron:"
"""Formats of this kind begin with it."""


@dataclass(frozen=True)
class MegatronPlan:
    """What a reshard into a Megatron checkpoint will do. A value: nothing was written to make it."""

    stored: Stored
    dst: Path
    target: Target
    rules: BucketRules
    flavour: str | None
    layout_file: LayoutFile | None
    unproved: bool
    workers: int
    window_bytes: int
    verify: bool

    @property
    def format(self) -> FileFormat:
        return self.target.format

    @property
    def container(self) -> str:
        return self.target.format.container

    @property
    def payload_bytes(self) -> int:
        return sum(self.target.payload_bytes.values())

    @property
    def files(self) -> dict[str, int]:
        """All files of the target with their bytes, by path relative to ``dst``."""
        small = {path: len(data) for path, data in self.target.small.items()}
        return {**self.target.payload_bytes, **small, TRACKER: len(self.target.tracker)}

    def totals(self) -> PlanTotals:
        """What will be read and written; nothing is read to know. Calls are counted as one a window or a small file."""
        from .resharding import PlanTotals

        payload = self.target.payload_bytes
        writes = sum(-(-nbytes // self.window_bytes) for nbytes in payload.values()) + len(self.target.small) + 1
        read = sum(_extent_bytes(part.dst) for part in self.target.parts)
        files = len(self.files)
        return PlanTotals(writes, writes, read, self.payload_bytes, files, self.workers * self.window_bytes, True)

    def part_rows(self) -> list[dict[str, Any]]:
        """How each part of the source is laid out before and after."""
        return [self._part_row(part) for part in self._parts()]

    @property
    def job(self) -> dict[str, Any]:
        """What is written, so that a resume goes on with the same job only."""
        return {
            "command": "reshard",
            "source": self.stored.manifest_digest,
            "format": self.format.name,
            "flavour": self.flavour,
            "layout": repr(self.rules),
        }

    def parts(self) -> Iterator[PartCopy]:
        for part in self.target.parts:
            yield _part_copy(self.target, part)

    def _parts(self) -> tuple[OriginPart, ...]:
        return self.target.origin.groups if self.target.buckets else self.target.origin.parts

    def _part_row(self, part: OriginPart) -> dict[str, Any]:
        made = self.target.buckets.get(part.name)
        old = part.layout
        copies = [own.dst.placement for own in self.target.parts if own.dst.part == part.name]
        sizes = [placement.payload_nbytes(blob) for placement in copies for blob in range(placement.blob_count)]
        return {
            "part": part.name,
            "from_dp": None if old is None else old.dp_size,
            "to_dp": None if made is None else made.dp_size,
            "from_bucket_size": None if old is None else old.bucket_size,
            "bucket_size": None if made is None else made.bucket_size,
            "buffers": 0 if made is None else len(made.buffers),
            "buckets": 0 if made is None else sum(buffer.bucket_count for buffer in made.buffers),
            "numel": None if made is None else sum(buffer.numel for buffer in made.buffers),
            "files": len(sizes),
            "bytes": sum(sizes),
        }


def _extent_bytes(catalog: Catalog) -> int:
    """Bytes of a catalog's files that are copied into them."""
    placement = catalog.placement
    return sum(int(placement.extents(blob).nbytes.sum()) for blob in range(placement.blob_count))


def _part_copy(target: Target, part: TargetPart) -> PartCopy:
    return PartCopy(part.src, part.source, part.dst, target.format, correspond(part.src.state, part.dst.state))


def default_destination(source: Path, to_dp: int | None, format: str) -> Path:
    """Beside the save root that an iteration's folder lies in, or beside the folder itself."""
    root = source.parent if (source.parent / TRACKER).is_file() else source
    suffix = format.removeprefix(PREFIX) if to_dp is None else f"dp{to_dp}"
    return root.parent / f"{root.name}-{suffix}"


def plan_megatron(
    stored: Stored,
    dst: Path,
    format: str,
    *,
    to_dp: int | None = None,
    bucket_size: int | str | None = None,
    container: str | None = None,
    options: FormatOptions | None = None,
    layout: str | os.PathLike[str] | None = None,
    flavour: str | None = None,
    unproved: bool = False,
    workers: int | None = None,
    memory_limit: int | None = None,
    verify: bool = True,
) -> MegatronPlan:
    """Plans a reshard into ``format`` ("megatron:..."); reads no tensor.

    ``stored``: a described Megatron checkpoint, or a native one that was made from one. ``to_dp``: ranks of an
    optimizer instance that share the dense params. ``bucket_size``: elements, "none", or None to keep the source's; it
    acts on the first pipeline stage and model chunk.

    Raises ``UnsupportedError`` for what cannot be, ``UsageError``, ``CorruptError``.
    """
    size = None if bucket_size is None else parse_bucket_size(bucket_size)
    make_rules(1 if to_dp is None else to_dp, size)
    (options or FormatOptions()).only(format)
    layout_file = None if layout is None else read_layout(Path(layout))
    origin = _origin(stored, layout_file, unproved)
    rules = BucketRules(to_dp, size, bucket_size is None, _dense_dp(origin))
    target = plan_target(origin, format.removeprefix(PREFIX), rules, flavour, layout_file)
    if container not in (None, target.format.container):
        raise UnsupportedError(f"{format} comes in one container", found=container, expected=target.format.container)
    threads = workers_or_default(workers)
    window = window_bytes(memory_limit, threads)
    return MegatronPlan(stored, dst, target, rules, flavour, layout_file, unproved, threads, window, verify)


def _origin(stored: Stored, layout: LayoutFile | None, unproved: bool) -> Origin:
    """What the target is made from. Raises ``UnsupportedError`` for a checkpoint that holds too little."""
    origin = from_checkpoint(stored.megatron) if stored.megatron is not None else _native_origin(stored, unproved)
    return origin if layout is None else with_layout(origin, layout)


def _native_origin(stored: Stored, unproved: bool) -> Origin:
    carried = read_carried(stored)
    if carried is None:
        raise UnsupportedError(
            "a Megatron checkpoint holds model weights, RNG states and arguments, and this checkpoint has none of them",
            file=stored.path,
            hint="only a checkpoint that was made from a Megatron one can become one again",
        )
    doubtful = [name for part in carried.parts for name in (*part.evidence.ambiguous, *part.evidence.unproved)]
    if doubtful and not unproved:
        raise UnsupportedError(
            "where the state of this param lay was not proved when the checkpoint was made",
            file=stored.path,
            param=doubtful[0],
            hint="take it as it is with --unproved",
        )
    sizes = {path: entry.bytes for path, entry in stored.files.items()}
    assert isinstance(stored.store, LocalStore)
    origin = from_carried(carried, stored.store, sizes, stored.catalogs, stored.source)
    return replace(origin, parts=tuple(_current_layout(part) for part in origin.parts))


def _current_layout(part: Any) -> Any:
    """A part with the dp and bucket size that the native checkpoint now has."""
    rules = None if part.catalog.layout is None else part.catalog.layout.rules
    if rules is None or part.layout is None:
        return part
    return replace(part, layout=replace(part.layout, dp_size=rules.dp_size, bucket_size=rules.bucket_size))


def _dense_dp(origin: Origin) -> int | None:
    """The dp size of the dense params, where it is known."""
    sizes = [
        (any(local.expert for local in part.local_params), part.layout.dp_size)
        for part in origin.groups
        if part.layout is not None and part.layout.dp_size is not None
    ]
    dense = [size for expert, size in sizes if not expert]
    return max(dense or [size for _, size in sizes], default=None)


# ----------------------------------------------------------------------------------------------------------- executing


def execute_megatron(
    plan: MegatronPlan,
    *,
    overwrite: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
) -> Path:
    """Proves the source's map, writes aside, and publishes at the end; returns the save root.

    Raises ``UnsupportedError`` where the map is not proved, ``CorruptError`` for the source, ``OutputError``.
    """
    if ranks is not None and ranks.size > 1:
        raise UsageError("one process writes a Megatron checkpoint", found=f"{ranks.size} ranks", hint="run it alone")
    if resume and plan.dst.exists() and _is_complete(plan):
        return plan.dst
    _check_overwrite(plan.dst, overwrite)
    refuse_existing(plan.dst, overwrite)
    plan = _proved(plan, progress)
    for copy in plan.target.copies:
        _check_copy(plan, copy)
    for twin in plan.target.origin.twins:
        _check_twin(plan, twin)
    check_space(plan.dst, plan.target.total_bytes)
    with staged(Staging(plan.dst, plan.job, overwrite=overwrite)) as staging:
        for part in plan.parts():
            _copy(plan, part, staging, progress)
        for path, data in plan.target.small.items():
            _write(staging, path, data)
        staging.publish(TRACKER, plan.target.tracker)
    plan.stored.store.close()
    return plan.dst


def _proved(plan: MegatronPlan, progress: Progress | None) -> MegatronPlan:
    """The plan once the source's map is proved; the proof may settle the order of params, so it is planned anew."""
    if plan.stored.megatron is None:
        return plan
    if plan.verify:  # a flipped bit would get a checksum of its own in the target
        prove_archives(plan.stored, workers=plan.workers, window=plan.window_bytes)
    stored = prove_map(plan.stored, progress)
    check_proved(stored, unproved=plan.unproved)
    origin = _origin(stored, plan.layout_file, plan.unproved)
    target = plan_target(origin, plan.target.layout, plan.rules, plan.flavour, plan.layout_file)
    return replace(plan, stored=stored, target=target)


def _copy(plan: MegatronPlan, part: PartCopy, area: Area, progress: Progress | None) -> None:
    blobs = range(part.dst.placement.blob_count)
    reports = copy_part(
        part,
        area,
        blobs,
        workers=plan.workers,
        window_bytes=plan.window_bytes,
        prove=plan.verify,
        progress=progress,
    )
    if part.src.digests:
        _check_digests(part, reports)


def _check_digests(part: PartCopy, reports: list[BlobReport]) -> None:
    """Of params that were written once and whole, the values must have the digests that the source states."""
    values: dict[tuple[int, int], int] = {}
    for report in reports:
        for key, crc in report.values.items():
            values[key] = values.get(key, 0) ^ crc
    written = _written(part)
    state = part.dst.state
    whole = {key: crc for key, crc in values.items() if written.get(key) == state.tensor_nbytes(*key)}
    known = {key: digest for key, digest in part.src.digests.items() if key in whole}
    found = digest_tensors(replace(state, absent=_all_but(state, whole)), whole)
    for (param, slot), stated in known.items():
        if found[param, slot] != stated:
            raise CorruptError(
                f"the values of {state.slots[slot].name} do not have the digest that the source states",
                param=state.params[param].name,
                hint="run `zero1ckpt verify --deep` on the source",
            )


def _written(part: PartCopy) -> dict[tuple[int, int], int]:
    """Bytes of each (param, slot) in the target."""
    total: dict[tuple[int, int], int] = {}
    for blob in range(part.dst.placement.blob_count):
        held = part.dst.placement.extents(blob)
        for param, slot, nbytes in zip(held.param.tolist(), held.slot.tolist(), held.nbytes.tolist(), strict=True):
            total[param, slot] = total.get((param, slot), 0) + nbytes
    return total


def _all_but(state: Any, kept: Mapping[tuple[int, int], int]) -> frozenset[tuple[int, int]]:
    every = ((i, k) for i in range(len(state.params)) for k in range(len(state.slots)))
    return frozenset(key for key in every if key not in kept)


def _write(area: Area, path: str, data: bytes) -> None:
    file = OutputFile(area.path(path), len(data))
    file.write(0, memoryview(data))
    file.sync_and_close()


def _check_copy(plan: MegatronPlan, copy: Copy) -> None:
    """Raises ``UnsupportedError`` where two groups hold different values of what the target holds once."""
    first, second = (plan.target.origin.parts[p] for p in (copy.first_part, copy.second_part))
    for slot, spec in enumerate(first.catalog.state.slots):
        step = max(plan.window_bytes // spec.itemsize, 1)
        for low in range(0, copy.first.box.size, step):
            high = min(low + step, copy.first.box.size)
            a = read_piece(first.catalog, first.source, slot, copy.first, low, high)
            b = read_piece(second.catalog, second.source, slot, copy.second, low, high)
            differ = np.flatnonzero(a != b)
            if len(differ) and not plan.unproved:
                raise UnsupportedError(
                    f"parts {first.name!r} and {second.name!r} hold different values of one param's {spec.name}, and "
                    "the target holds it once",
                    param=copy.key,
                    found=f"a difference at element {low + int(differ[0]) // spec.itemsize}",
                    hint="choose megatron:dp_reshardable, or take those of the first part, as Megatron does, with "
                    "--unproved",
                )


def _check_twin(plan: MegatronPlan, twin: Twin) -> None:
    """Raises ``UnsupportedError`` where two ranks hold different weights of what the target holds once."""
    for low in range(0, twin.first.nbytes, plan.window_bytes):
        size = min(plan.window_bytes, twin.first.nbytes - low)
        a, b = bytearray(size), bytearray(size)
        twin.first.read(low, [memoryview(a)])
        twin.second.read(low, [memoryview(b)])
        if a != b and not plan.unproved:
            raise UnsupportedError(
                f"{twin.first.label()} and {twin.second.label()} hold different weights of one tensor, and the target "
                "holds it once",
                param=twin.key,
                hint="choose megatron:legacy, or take those of the first rank, as Megatron does, with --unproved",
            )


# ------------------------------------------------------------------------------------------------- an existing folder


def _is_complete(plan: MegatronPlan) -> bool:
    """Whether the folder is what this plan makes: all files, in their sizes, and those made here to the byte."""
    store = LocalStore(plan.dst)
    try:
        found = {key: store.size(key) for key in sorted(store.keys())}
        if found != plan.files:
            return False
        made = {**plan.target.small, TRACKER: plan.target.tracker}
        return all(store.read(path) == data for path, data in made.items())
    finally:
        store.close()


def _check_overwrite(dst: Path, overwrite: bool) -> None:
    """Refuses to replace a folder that holds anything but one save of Megatron's: nothing else is deleted."""
    if not overwrite or not dst.is_dir() or not any(dst.iterdir()):
        return
    strange = [str(path.relative_to(dst)) for path in _files(dst) if not _is_megatrons(path.relative_to(dst))]
    folders = {path.relative_to(dst).parts[0] for path in _files(dst) if len(path.relative_to(dst).parts) > 1}
    if strange or len(folders) > 1 or not (dst / TRACKER).is_file():
        raise OutputError(
            "exists and is not one save of Megatron's, so it is not overwritten",
            file=dst,
            found=min(strange) if strange else f"{len(folders)} iterations",
            hint="choose another place",
        )


def _files(dst: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(dst):
        yield from (Path(folder) / name for name in names)


def _is_megatrons(path: Path) -> bool:
    if path == Path(TRACKER):
        return True
    inside = path.parts[1:]
    if not path.parts[0].startswith("iter_"):
        return False
    if len(inside) == 2:
        return inside[0].startswith("mp_rank_") and inside[1] in ("model_optim_rng.pt", "distrib_optim.pt")
    return len(inside) == 1 and (
        inside[0].endswith(".distcp") or inside[0] in (".metadata", "metadata.json", "common.pt")
    )

"""Saving from the ranks of a run: each writes what it owns, rank 0 publishes. No tensor byte is sent.

Messages of a save: rank 0 tells that the folder is there, every rank reports the checksums of its fragments (the one
barrier), rank 0 tells how it ended.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch.distributed as dist
from torch import nn

from ..api.commit import (
    check_overwrite,
    check_space,
    encode_manifest_of,
    group_values,
    part_manifest,
    prepare_extra,
    window_bytes,
    write_extra,
)
from ..api.stored import MODEL_FILE, part_prefix, rank_extra_file
from ..api.writing import canonical_slots
from ..core.digest import crc64, format_digest, tensor_digest
from ..core.errors import UsageError, Zero1CkptError
from ..core.layout import LayoutRules, layout_params
from ..encodings.tensor_file import TensorData, write_tensor_file
from ..engine.control import ControlPlane
from ..engine.shard_blobs import ShardBlobs
from ..model.catalog import Catalog
from ..model.manifest import FileEntry, ModelTensor, PartManifest, RankExtra
from ..model.protocols import Format
from ..model.state import PartState, Scalar, SlotSpec
from ..model.values import Json
from ..registry import DEFAULT_FORMAT, find_container, find_format
from ..resharding.files import BlobReport, PartCopy, copy_part
from ..storage.staging import Area, Staging, staged
from .model_tensors import collect_model_tensors
from .together import as_report, together

if TYPE_CHECKING:
    from ..engine.zero1 import Zero1Optimizer as Engine

__all__ = ["SaveHandle", "check_whole", "save"]

VALUE_KEY = "zero1ckpt.value"
"""Metadata key under which a rank-bound file holds its value, as JSON."""


class SaveHandle:
    """A save that has ended. ``path`` is the checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def wait(self) -> Path:
        return self.path

    def done(self) -> bool:
        return True


class _Header(NamedTuple):
    """What a rank says of its part of one optimizer, besides the checksums. Only rank 0 of a part describes it."""

    rank: int
    dp_size: int
    step: int
    rules: LayoutRules
    state: PartState | None
    scalars: Mapping[int, Mapping[str, Scalar]]
    absent: frozenset[tuple[int, str]]


class _Report(NamedTuple):
    """All that a rank tells rank 0. ``error`` is the line of what went wrong there."""

    error: Zero1CkptError | None
    parts: Mapping[str, tuple[_Header, BlobReport]]
    files: Sequence[FileEntry]
    extra_digest: int | None


@dataclass(frozen=True)
class _Request:
    """The arguments of a save, checked and encoded."""

    path: Path
    format: Format
    container: str
    optimizers: Mapping[str, Engine]
    extra: Json
    extra_tensors: Sequence[TensorData]
    rank_value: Json
    rank_tensors: Sequence[TensorData]
    has_rank_extra: bool
    model: Sequence[tuple[ModelTensor, TensorData]]
    overwrite: bool


def save(
    path: str | os.PathLike[str],
    optimizers: Mapping[str, Engine],
    *,
    format: str = DEFAULT_FORMAT,
    container: str | None = None,
    extra: Any = None,
    rank_extra: Any = None,
    model: nn.Module | None = None,
    overwrite: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> SaveHandle:
    """Saves several optimizers as the parts of one checkpoint. To be called by all ranks of ``process_group``.

    ``optimizers``: part name -> optimizer; a rank gives those it takes part in. ``process_group``: the ranks that save
    together, by default the optimizers' own group. ``extra``: state that is the same on all ranks, taken from rank 0.
    ``rank_extra``: state of this rank (RNG), given by all ranks or none. ``model``: stores its persistent buffers and
    frozen params too, as they are on rank 0.

    Raises, on every rank alike, ``UsageError`` for arguments, ``OutputError`` where nothing can be written.
    """
    if not optimizers:
        raise UsageError("no optimizers to save", expected="a mapping of part names to optimizers")
    group = process_group if process_group is not None else next(iter(optimizers.values())).process_group
    control = ControlPlane(group) if process_group is not None else next(iter(optimizers.values())).control
    first = control.rank == 0

    def read() -> _Request:
        for optimizer in optimizers.values():
            check_whole(optimizer)
        return _request(path, optimizers, format, container, extra, rank_extra, model, overwrite, first=first)

    return SaveHandle(_save(together(control, "arguments of save", read), control))


def check_whole(optimizer: Engine) -> None:
    """Raises ``Zero1CkptError`` where a load has failed half-way: such a state must neither be saved nor trained."""
    if getattr(optimizer, "half_loaded", False):
        raise Zero1CkptError(
            "the last load failed half-way, and the optimizer's state is neither the old nor the new",
            hint="load a sound checkpoint first",
        )


def _request(
    path: str | os.PathLike[str],
    optimizers: Mapping[str, Engine],
    format: str,
    container: str | None,
    extra: Any,
    rank_extra: Any,
    model: nn.Module | None,
    overwrite: bool,
    *,
    first: bool,
) -> _Request:
    plugin = find_format(format)
    kind = find_container(plugin, container)
    if rank_extra is not None and isinstance(extra, Mapping) and "rank_extra" in extra:
        raise UsageError("extra has a key rank_extra, under which load returns what is passed as rank_extra=")
    json, tensors = prepare_extra(extra)
    rank_json, rank_tensors = prepare_extra(rank_extra, "rank_extra")
    stored = collect_model_tensors(model, optimizers.values()) if model is not None else []
    rows = [(_model_entry(kind, data), data) for kind, data in stored] if first else []
    return _Request(
        Path(path).resolve(),
        plugin,
        kind,
        dict(optimizers),
        json,
        tensors,
        rank_json,
        rank_tensors,
        rank_extra is not None,
        rows,
        overwrite,
    )


def _model_entry(kind: str, data: TensorData) -> ModelTensor:
    name, dtype, shape, view = data
    digest = tensor_digest(name, kind, dtype, shape, crc64(view), view.nbytes)
    return ModelTensor(name, kind, dtype, list(shape), format_digest(digest))


def _save(request: _Request, control: ControlPlane) -> Path:
    if control.rank:
        root = _agreed(control, None, "the folder of a save")
        report, raised = _write(request, Area(Path(root)), control)
        control.gather(report, "the reports of a save")
        try:
            _agreed(control, None, "the end of a save")
        except Zero1CkptError:
            if raised is not None:
                raise raised from None
            raise
        return request.path
    staging = _open_staging(request, control)
    with staged(staging):
        report, raised = _write(request, staging, control)
        reports = control.gather(report, "the reports of a save")  # where this raises, there is no one to tell
        assert reports is not None
        try:
            if raised is not None:
                raise raised
            staging.publish("manifest.json", _manifest(request, reports))
        except BaseException as error:
            _tell(control, error, "the end of a save")
            raise
    _tell(control, None, "the end of a save")
    return request.path


def _open_staging(request: _Request, control: ControlPlane) -> Staging:
    """Rank 0 makes the folder, or all ranks raise."""
    try:
        check_overwrite(request.path, request.overwrite)
        check_space(request.path, sum(_payload_bytes(o) for o in request.optimizers.values()))
        staging = Staging(request.path, {"command": "save"}, overwrite=request.overwrite)
    except BaseException as error:
        _tell(control, error, "the folder of a save")
        raise
    control.broadcast((None, str(staging.root)), "the folder of a save")
    return staging


def _payload_bytes(optimizer: Engine) -> int:
    return sum(slot.itemsize for slot in optimizer.slot_specs()) * optimizer.layout.numel


def _tell(control: ControlPlane, error: BaseException | None, what: str) -> None:
    """Rank 0 says how it went; whatever is not an error of ours still ends the others."""
    told = None if error is None else as_report(error)
    control.broadcast((None if told is None else (type(told), str(told)), None), what)


def _agreed(control: ControlPlane, value: Any, what: str) -> Any:
    """What rank 0 told; raises its error."""
    error, told = control.broadcast(value, what)
    if error is not None:
        kind, line = error
        raise kind(line)
    return told


def _write(request: _Request, area: Area, control: ControlPlane) -> tuple[_Report, BaseException | None]:
    """This rank's files; an error becomes part of the report, so that no rank waits for another in vain.

    Whatever it is: a rank that left here, interrupted or out of memory, would keep the others waiting.
    """
    parts: dict[str, tuple[_Header, BlobReport]] = {}
    files: list[FileEntry] = []
    try:
        for part, optimizer in request.optimizers.items():
            parts[part] = _write_part(request, area, part, optimizer)
        if request.has_rank_extra:
            files.append(_write_rank_extra(request, area, control))
        if control.rank == 0:
            tensors = [data for o in request.optimizers.values() for data in group_values(o.group_values(), "")[1]]
            files += write_extra(area, [*tensors, *request.extra_tensors])
            if request.model:
                files.append(write_tensor_file(area.path(MODEL_FILE), MODEL_FILE, [data for _, data in request.model]))
        return _Report(None, parts, files, _extra_digest(request)), None
    except BaseException as error:
        return _Report(as_report(error), {}, [], None), error


def _write_part(request: _Request, area: Area, part: str, optimizer: Engine) -> tuple[_Header, BlobReport]:
    catalog, source = live_catalog(optimizer, request.format, part)
    copy = PartCopy(catalog, source, catalog, request.format, None)
    reports = copy_part(copy, area, [optimizer.rank], workers=1, window_bytes=window_bytes(None, 1), prove=False)
    header = _Header(
        optimizer.rank,
        optimizer.dp_size,
        optimizer.applied_steps,
        optimizer.layout.rules,
        None if optimizer.rank else catalog.state,
        optimizer.local_scalars(),
        frozenset(optimizer.local_absent()),
    )
    return header, reports[0]


def live_catalog(optimizer: Engine, format: Format, part: str) -> tuple[Catalog, ShardBlobs]:
    """The live optimizer as a checkpoint in ``format``'s image: this rank's blob is its tensors.

    Scalars are left out, and of absent tensors only those that this rank owns a part of are known.
    """
    slots = canonical_slots({slot.name: slot.dtype for slot in optimizer.slot_specs()})
    index = {slot.name: k for k, slot in enumerate(slots)}
    absent = frozenset((param, index[slot]) for param, slot in optimizer.local_absent())
    groups, _ = group_values(optimizer.group_values(), "")
    scale = optimizer.scaler.state()
    state = PartState(optimizer.param_specs, slots, optimizer.applied_steps, groups, (), absent, scale)
    catalog = format.plan(state, optimizer.layout, part, part_prefix(part))
    return catalog, live_blobs(optimizer, slots)


def live_blobs(optimizer: Engine, slots: Sequence[SlotSpec]) -> ShardBlobs:
    """This rank's shards in the order of ``bucket_shards`` payloads."""
    tensors = [
        optimizer.shard(slot.name, b, k)
        for b, buffer in enumerate(optimizer.layout.buffers)
        for k in range(buffer.bucket_count)
        for slot in slots
    ]
    return ShardBlobs(optimizer.rank, tensors)


def _write_rank_extra(request: _Request, area: Area, control: ControlPlane) -> FileEntry:
    key = rank_extra_file(control.rank, control.size)
    value = msgspec.json.encode(request.rank_value).decode()
    return write_tensor_file(area.path(key), key, request.rank_tensors, {VALUE_KEY: value})


def _extra_digest(request: _Request) -> int | None:
    if request.extra is None:
        return None
    rows = [(name, dtype, shape, crc64(view)) for name, dtype, shape, view in request.extra_tensors]
    return crc64(repr((request.extra, rows)).encode())


# ----------------------------------------------------------------------------------------------------- rank 0's side


def _manifest(request: _Request, reports: Sequence[_Report]) -> bytes:
    """The manifest from all ranks' reports; raises the first error that one of them holds."""
    for rank, report in enumerate(reports):
        if report.error is not None:
            raise type(report.error)(f"rank {rank}: {report.error}" if rank else str(report.error))
    _check_extra(request, reports)
    names = list(dict.fromkeys(part for report in reports for part in report.parts))
    parts, files = [], []
    for name in names:
        mine = [report.parts[name] for report in reports if name in report.parts]
        parts.append(_merge(request.format, name, mine))
        files += [blob.file for _, blob in mine]
    files += [entry for report in reports for entry in report.files]
    return encode_manifest_of(
        request.format.name,
        request.container,
        parts,
        files,
        extra=request.extra,
        model=[entry for entry, _ in request.model],
        rank_extra=RankExtra(len(reports)) if request.has_rank_extra else None,
    )


def _check_extra(request: _Request, reports: Sequence[_Report]) -> None:
    for rank, report in enumerate(reports):
        if report.extra_digest not in (None, reports[0].extra_digest):
            raise UsageError(
                f"extra of rank {rank} differs from that of rank 0, and is stored once",
                hint="pass what belongs to a rank as rank_extra",
            )
    saved = sum(any(entry.path.startswith("rank_extra-") for entry in report.files) for report in reports)
    if saved not in (0, len(reports)):
        raise UsageError("rank_extra was not given by all ranks", found=f"{saved} ranks", expected=f"{len(reports)}")


def _merge(format: Format, name: str, ranks: Sequence[tuple[_Header, BlobReport]]) -> PartManifest:
    """One part's manifest. Checks that every rank of its group has reported once, and that all agree."""
    headers = sorted((header for header, _ in ranks), key=lambda header: header.rank)
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
    planned = format.plan(state, layout_params(state.params, first.rules), name, part_prefix(name))
    return part_manifest(planned, [report for _, report in ranks])


def _merge_scalars(state: PartState, headers: Sequence[_Header]) -> tuple[Mapping[str, Scalar], ...]:
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

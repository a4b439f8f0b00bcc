"""Saving from the ranks of a run: each writes what it owns, rank 0 publishes. No tensor byte is sent, but for formats
whose blobs hold what several ranks own and have one writer.

Messages of a save: rank 0 tells that the folder is there, every rank reports the checksums of its fragments (the one
barrier), rank 0 tells how it ended. Where files hold what several ranks own, each first tells what it has.

An asynchronous save is the same with snapshots in the optimizers' place, in a thread: see ``async_save``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch.distributed as dist
from torch import nn

from ..api.commit import (
    check_overwrite,
    check_space,
    group_values,
    prepare_extra,
    window_bytes,
    write_extra,
)
from ..api.stored import MODEL_FILE, VALUE_KEY, part_prefix, rank_extra_file
from ..api.writing import canonical_slots
from ..core.digest import crc64, format_digest, tensor_digest
from ..core.errors import LostRankError, UsageError, Zero1CkptError
from ..encodings.tensor_file import TensorData, write_tensor_file
from ..engine.control import ControlPlane
from ..engine.shard_blobs import ShardBlobs
from ..engine.snapshot import Snapshot
from ..formats.bucket_shards import BucketShards
from ..model.manifest import MANIFEST_NAME, FileEntry, FormatOptions, ModelTensor
from ..model.protocols import Format
from ..model.state import PartState, SlotSpec
from ..model.values import Json, is_text
from ..registry import DEFAULT_FORMAT, find_format
from ..resharding.copying import PartCopy, copy_part, push_part
from ..resharding.gathering import gather_part
from ..resharding.plan import correspond
from ..storage.staging import Area, Staging, refuse_existing, staged
from .async_save import Flight, SaveHandle, lane_of, settle
from .merging import Absent, PartHeader, RankReport, Written, make_shared_blobs, merge_reports
from .model_tensors import collect_model_tensors
from .parts import Peers, Saved, peers_of, stored_parts
from .retention import after_commit, check_retention
from .together import as_report, together

if TYPE_CHECKING:
    from ..engine.zero1 import Zero1Optimizer as Engine

__all__ = ["IMAGE", "SaveRequest", "check_whole", "live_blobs", "save", "threads_of"]

IMAGE = BucketShards()
"""A live optimizer's shards lie as a rank's payload of this format does, whatever it is saved as."""


@dataclass(frozen=True)
class SaveRequest:
    """The arguments of a save, checked and encoded."""

    path: Path
    format: Format
    options: FormatOptions
    optimizers: Mapping[str, Saved]
    extra: Json
    extra_tensors: Sequence[TensorData]
    rank_value: Json
    rank_tensors: Sequence[TensorData]
    has_rank_extra: bool
    model: Sequence[tuple[ModelTensor, TensorData]]
    overwrite: bool
    keep: int | None
    latest: bool


def save(
    path: str | os.PathLike[str],
    optimizers: Mapping[str, Engine],
    *,
    format: str = DEFAULT_FORMAT,
    container: str | None = None,
    extra: Any = None,
    rank_extra: Any = None,
    model: nn.Module | None = None,
    options: FormatOptions | None = None,
    overwrite: bool = False,
    asynchronous: bool = False,
    keep: int | None = None,
    latest: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> SaveHandle:
    """Saves several optimizers as the parts of one checkpoint. To be called by all ranks of ``process_group``.

    ``optimizers``: part name -> optimizer; a rank gives those it takes part in. ``process_group``: the ranks that save
    together, by default the optimizers' own group. ``extra``: state that is the same on all ranks, taken from rank 0.
    ``rank_extra``: state of this rank (RNG), given by all ranks or none. ``model``: stores its persistent buffers and
    frozen params too, as they are on rank 0.

    ``asynchronous``: returns when all but the shards has been copied; these are copied while training goes on (the next
    ``step()`` or load waits for what is left), and written in a thread. What is saved is the state of the moment of the
    call. A save, asynchronous or not, first waits until an earlier one over the same process group has ended, and
    raises its error, unless ``wait()`` of its handle has. Shards of float32 params, which lie in the model's own
    memory, are copied in the call.

    ``latest``: once it is committed, the file ``latest`` beside the checkpoint names it. ``keep``: then, of the
    checkpoints beside it that hold the same params, all but the ``keep`` that were committed last are removed, never
    the one that ``latest`` names.

    Raises, on every rank alike, ``UsageError`` for arguments, ``OutputError`` where nothing can be written.
    """
    if not optimizers:
        raise UsageError("no optimizers to save", expected="a mapping of part names to optimizers")
    group = process_group if process_group is not None else next(iter(optimizers.values())).process_group
    control = ControlPlane(group) if process_group is not None else next(iter(optimizers.values())).control
    groups = {id(g): g for g in [group, *(o.process_group for o in optimizers.values())]}
    lanes = [lane_of(g) for g in groups.values()]

    given = options or FormatOptions()

    def read() -> SaveRequest:
        settle(lanes)
        target = _target(path)
        _check_part_names(optimizers)
        for optimizer in optimizers.values():
            check_whole(optimizer)
        check_retention(target, keep, latest)
        first = control.rank == 0
        request = _request(
            target, optimizers, format, container, given, extra, rank_extra, model, overwrite, first=first
        )
        request = replace(request, keep=keep, latest=latest)
        return _detached(request, optimizers, first=first) if asynchronous else request

    told = [format, container, given, overwrite, asynchronous, keep, latest]
    names = ("format", "container", "options", "overwrite", "asynchronous", "keep", "latest")
    same = {"path": _path_texts(path), **{name: (repr(value),) for name, value in zip(names, told, strict=True)}}
    request = together(control, "arguments of save", read, same)
    if asynchronous:
        return _launch(request, optimizers, group, control)
    return SaveHandle(request.path, _save(request, control))


def _detached(request: SaveRequest, optimizers: Mapping[str, Engine], *, first: bool) -> SaveRequest:
    """The same, sharing no memory with what training writes to. Raises ``OutputError`` for a place that is taken."""
    if first:
        check_overwrite(request.path, request.overwrite)
        refuse_existing(request.path, request.overwrite)
    return replace(
        request,
        optimizers={p: o.take_snapshot(lane_of(o.process_group).memory.get(p)) for p, o in optimizers.items()},
        extra_tensors=[_copied(data) for data in request.extra_tensors],
        rank_tensors=[_copied(data) for data in request.rank_tensors],
        model=[(entry, _copied(data)) for entry, data in request.model],
    )


def _copied(data: TensorData) -> TensorData:
    name, dtype, shape, view = data
    return name, dtype, shape, memoryview(bytearray(view))


def _launch(
    request: SaveRequest, optimizers: Mapping[str, Engine], group: dist.ProcessGroup | None, control: ControlPlane
) -> SaveHandle:
    """Starts the thread; groups of ranks for its messages are made in the same order on all of them."""
    plane = lane_of(group).plane(group, control)
    snapshots: list[Snapshot] = []
    lanes = [lane_of(group)]
    for part in sorted(optimizers):
        snapshot, source = request.optimizers[part], optimizers[part]
        assert isinstance(snapshot, Snapshot)
        lane = lane_of(source.process_group)
        snapshot.control = lane.plane(source.process_group, source.control)
        if snapshot.memory is not None:
            lane.memory[part] = snapshot.memory
        snapshots.append(snapshot)
        lanes.append(lane)
    flight = Flight(request.path, lambda: _save(request, plane), snapshots)
    for lane in lanes:
        lane.flight = flight
    flight.start()
    return SaveHandle(request.path, flight=flight)


def check_whole(optimizer: Engine) -> None:
    """Raises ``Zero1CkptError`` where a load has failed half-way: such a state must neither be saved nor trained."""
    if getattr(optimizer, "half_loaded", False):
        raise Zero1CkptError(
            "the last load failed half-way, and the optimizer's state is neither the old nor the new",
            hint="load a sound checkpoint first",
        )


def _target(path: object) -> Path:
    """The folder that ``path`` means. Raises ``UsageError`` for what is no path."""
    try:
        name: Any = os.fspath(path)  # type: ignore[call-overload]
    except TypeError:
        raise UsageError("the path of a save", found=repr(path)[:100], expected="text or a path") from None
    if not isinstance(name, str) or "\0" in name or not is_text(name):
        raise UsageError("the path of a save", found=repr(name)[:100], expected="Unicode text without a NUL")
    return Path(name).resolve()


def _path_texts(path: object) -> tuple[str, ...]:
    """The path as it was given, and as it resolves: on other hosts links may lead elsewhere."""
    try:
        return str(path), str(_target(path))
    except UsageError:
        return (repr(path),)


def _check_part_names(optimizers: Mapping[Any, Engine]) -> None:
    for name in optimizers:
        if not isinstance(name, str) or not is_text(name):
            raise UsageError("the name of a part", found=repr(name)[:100], expected="Unicode text")


def _request(
    path: Path,
    optimizers: Mapping[str, Engine],
    format: str,
    container: str | None,
    options: FormatOptions,
    extra: Any,
    rank_extra: Any,
    model: nn.Module | None,
    overwrite: bool,
    *,
    first: bool,
) -> SaveRequest:
    plugin = find_format(format, container)
    if rank_extra is not None and isinstance(extra, Mapping) and "rank_extra" in extra:
        raise UsageError("extra has a key rank_extra, under which load returns what is passed as rank_extra=")
    json, tensors = prepare_extra(extra)
    rank_json, rank_tensors = prepare_extra(rank_extra, "rank_extra")
    stored = collect_model_tensors(model, optimizers.values()) if model is not None else []
    rows = [(_model_entry(kind, data), data) for kind, data in stored] if first else []
    return SaveRequest(
        path,
        plugin,
        plugin.normalize(options),
        dict(optimizers),
        json,
        tensors,
        rank_json,
        rank_tensors,
        rank_extra is not None,
        rows,
        overwrite,
        keep=None,
        latest=False,
    )


def _model_entry(kind: str, data: TensorData) -> ModelTensor:
    name, dtype, shape, view = data
    digest = tensor_digest(name, kind, dtype, shape, crc64(view), view.nbytes)
    return ModelTensor(name, kind, dtype, list(shape), format_digest(digest))


def _save(request: SaveRequest, control: ControlPlane) -> int:
    """Saves; the bytes of tensors that all ranks have sent."""
    request = replace(request, optimizers=stored_parts(request.optimizers))
    headers = _exchange_headers(request, control)
    if control.rank:
        root, absent = _agreed(control, None, "the folder of a save")
        report, raised = _write(request, Area(Path(root)), control, absent)
        control.gather(report, "the reports of a save")
        try:
            sent: int = _agreed(control, None, "the end of a save")
            return sent
        except Zero1CkptError:
            if raised is not None and not isinstance(raised, LostRankError):  # rank 0 tells whose error that was
                raise raised from None
            raise
    staging, absent = _open_staging(request, control, headers)
    with staged(staging):
        report, raised = _write(request, staging, control, absent)
        reports = control.gather(report, "the reports of a save")  # where this raises, there is no one to tell
        assert reports is not None
        try:
            if raised is not None and not isinstance(raised, LostRankError):
                raise raised
            staging.publish(MANIFEST_NAME, merge_reports(request, staging, reports))
            after_commit(request)
        except BaseException as error:
            _tell(control, error, "the end of a save")
            raise
    sent = sum(told.sent for told in reports)
    control.broadcast((None, sent), "the end of a save")
    return sent


def _exchange_headers(request: SaveRequest, control: ControlPlane) -> list[dict[str, PartHeader]] | None:
    """Where blobs hold what several ranks own, all parts must be known before these can be made."""
    if request.format.keeps_layout:
        return None

    def mine() -> dict[str, PartHeader]:
        return {part: part_header(optimizer, part) for part, optimizer in request.optimizers.items()}

    what = "the headers of a save"
    return control.gather(together(control, what, mine), what)


def _open_staging(
    request: SaveRequest, control: ControlPlane, headers: list[dict[str, PartHeader]] | None
) -> tuple[Staging, Absent]:
    """Rank 0 makes the folder, and blobs that ranks share; or all ranks raise."""
    staging = None
    try:
        check_overwrite(request.path, request.overwrite)
        check_space(request.path, sum(_payload_bytes(o) for o in request.optimizers.values()))
        staging = Staging(request.path, {"command": "save"}, overwrite=request.overwrite)
        absent = make_shared_blobs(request, staging, headers or [])
    except BaseException as error:
        if staging is not None:
            staging.abandon()
        _tell(control, error, "the folder of a save")
        raise
    try:
        control.broadcast((None, (str(staging.root), absent)), "the folder of a save")
    except BaseException:  # a rank is gone, and nobody would let go of the lock
        staging.abandon()
        raise
    return staging, absent


def _payload_bytes(optimizer: Saved) -> int:
    return sum(slot.itemsize for slot in optimizer.slot_specs()) * optimizer.layout.numel


def _tell(control: ControlPlane, error: BaseException, what: str) -> None:
    """Rank 0 says what went wrong; whatever is not an error of ours still ends the others."""
    told = as_report(error)
    control.broadcast(((type(told), str(told)), None), what)


def _agreed(control: ControlPlane, value: Any, what: str) -> Any:
    """What rank 0 told; raises its error."""
    error, told = control.broadcast(value, what)
    if error is not None:
        kind, line = error
        raise kind(line)
    return told


def _write(
    request: SaveRequest, area: Area, control: ControlPlane, absent: Absent
) -> tuple[RankReport, BaseException | None]:
    """This rank's files; an error becomes part of the report, so that no rank waits for another in vain.

    Whatever it is: a rank that left here, interrupted or out of memory, would keep the others waiting.
    """
    files: list[FileEntry] = []
    try:
        written = _write_parts(request, area, absent)
        parts = {part: (part_header(o, part), written[part][0]) for part, o in request.optimizers.items()}
        if request.has_rank_extra:
            files.append(_write_rank_extra(request, area, control))
        if control.rank == 0:
            tensors = [data for p, o in request.optimizers.items() for data in group_values(o.group_values(), p)[1]]
            files += write_extra(area, [*tensors, *request.extra_tensors])
            if request.model:
                files.append(write_tensor_file(area.path(MODEL_FILE), MODEL_FILE, [data for _, data in request.model]))
        sent = sum(sent for _, sent in written.values())
        return RankReport(None, parts, files, _extra_digest(request), sent), None
    except BaseException as error:
        return RankReport(as_report(error), {}, [], None), error


def _write_parts(request: SaveRequest, area: Area, absent: Absent) -> dict[str, tuple[Written, int]]:
    """All parts of this rank, in one order on all ranks that have several in common.

    Where ranks send each other what they hold, one that has failed goes on to its next part: others wait for it there.
    """
    written: dict[str, tuple[Written, int]] = {}
    failure: BaseException | None = None
    for part in sorted(request.optimizers):
        try:
            written[part] = _write_part(request, area, part, request.optimizers[part], absent.get(part))
        except BaseException as error:
            failure = failure or error
            if request.format.keeps_layout or request.format.shared_blobs:
                break
    if failure is not None:
        raise failure
    return written


def _write_part(
    request: SaveRequest, area: Area, part: str, optimizer: Saved, absent: frozenset[tuple[int, int]] | None
) -> tuple[Written, int]:
    """What this rank has written of a part, and the bytes that it has sent."""
    state = live_state(optimizer, part, absent)
    image = IMAGE.plan(state, optimizer.layout, part, "", FormatOptions())
    planned = request.format.plan(state, optimizer.layout, part, part_prefix(part), request.options)
    same = type(planned.placement) is type(image.placement)
    match = None if same else correspond(state, state)
    copy = PartCopy(image, live_blobs(optimizer, state.slots), planned, request.format, match)
    threads = threads_of(optimizer)
    window = window_bytes(None, threads)
    if request.format.shared_blobs:
        shares = push_part(copy, area, optimizer.rank, window_bytes=window)
        return shares, sum(share.sent for share in shares.values())
    if not request.format.keeps_layout:
        peers = Peers(optimizer.control, optimizer.rank, peers_of(optimizer))
        return gather_part(copy, area, peers), peers.sent
    return copy_part(copy, area, [optimizer.rank], workers=threads, window_bytes=window, prove=False), 0


def threads_of(optimizer: Saved) -> int:
    """Threads that copy for one rank: a fair share of the cores that the ranks of this host have, at most 4.

    One in the background: training has the cores, and a pool cannot be started while the interpreter ends.
    """
    if isinstance(optimizer, Snapshot):
        return 1
    here = min(int(os.environ.get("LOCAL_WORLD_SIZE", optimizer.dp_size)), optimizer.dp_size)
    return max(1, min(len(os.sched_getaffinity(0)) // max(here, 1), 4))


def live_state(optimizer: Saved, part: str, absent: frozenset[tuple[int, int]] | None = None) -> PartState:
    """What this rank knows of the optimizer: all but scalars, and absence only of what it owns a part of.

    ``absent``: (param, slot) of all ranks, where they have told each other.
    """
    slots = canonical_slots({slot.name: slot.dtype for slot in optimizer.slot_specs()})
    if absent is None:
        index = {slot.name: k for k, slot in enumerate(slots)}
        absent = frozenset((param, index[slot]) for param, slot in optimizer.local_absent())
    groups, _ = group_values(optimizer.group_values(), part)
    scale = optimizer.scaler.state()
    return PartState(optimizer.param_specs, slots, optimizer.applied_steps, groups, (), absent, scale)


def part_header(optimizer: Saved, part: str) -> PartHeader:
    return PartHeader(
        optimizer.rank,
        optimizer.dp_size,
        optimizer.applied_steps,
        optimizer.layout.rules,
        None if optimizer.rank else live_state(optimizer, part),
        optimizer.local_scalars(),
        frozenset(optimizer.local_absent()),
    )


def live_blobs(optimizer: Saved, slots: Sequence[SlotSpec]) -> ShardBlobs:
    """This rank's shards in the order of ``bucket_shards`` payloads."""
    tensors = [
        optimizer.shard(slot.name, b, k)
        for b, buffer in enumerate(optimizer.layout.buffers)
        for k in range(buffer.bucket_count)
        for slot in slots
    ]
    return ShardBlobs(optimizer.rank, tensors)


def _write_rank_extra(request: SaveRequest, area: Area, control: ControlPlane) -> FileEntry:
    key = rank_extra_file(control.rank, control.size)
    value = msgspec.json.encode(request.rank_value).decode()
    return write_tensor_file(area.path(key), key, request.rank_tensors, {VALUE_KEY: value})


def _extra_digest(request: SaveRequest) -> int | None:
    if request.extra is None:
        return None
    rows = [(name, dtype, shape, crc64(view)) for name, dtype, shape, view in request.extra_tensors]
    return crc64(repr((request.extra, rows)).encode())

"""Loading into a live optimizer, from a checkpoint of any dp size, bucket size and format.

Everything that can be refused is refused before the first byte of state is overwritten.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import msgspec
import numpy as np
import torch
from torch import nn

from ..api.checkpoint import Checkpoint
from ..api.stored import VALUE_KEY, Stored, describe, rank_extra_file
from ..api.tensors import from_bytes, torch_dtype
from ..api.verification import verify as verify_checkpoint
from ..api.writing import canonical_slots
from ..core.digest import crc64
from ..core.errors import CorruptError, MissingError, UnsupportedError, UsageError, Zero1CkptError
from ..encodings.tensor_file import check_tensor_file, read_tensor
from ..model.catalog import Catalog
from ..model.manifest import FormatOptions
from ..model.state import MAIN_PARAM, PartState, Scalar, SlotSpec
from ..model.values import decode_value
from ..resharding.execute import Copier, Job, run_jobs
from ..resharding.plan import correspond, plan_blob
from ..resharding.prove import Prover
from .model_tensors import check_model_tensors, restore_model_tensors
from .parts import LoadView, check_expert_parts, load_views
from .saving import IMAGE, live_blobs, threads_of
from .together import on_first_rank, together

if TYPE_CHECKING:
    from ..engine.zero1 import Zero1Optimizer as Engine

__all__ = ["LoadOptions", "LoadPlan", "execute_load", "prepare_load", "prepare_parts"]

_WINDOW = 16 * 2**20

Loaded = Union["Engine", LoadView]
"""What a part is loaded into."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Choices of a load; see ``Zero1Optimizer.load``. Raises ``UsageError`` for a value that is no choice."""

    part: str = ""
    groups: str = "file"
    missing: str = "error"
    unexpected: str = "error"
    rank_state: str = "error"
    verify: bool = False

    def __post_init__(self) -> None:
        choices = {
            "groups": ("file", "run"),
            "missing": ("error", "init"),
            "unexpected": ("error", "drop"),
            "rank_state": ("error", "keep", "reseed", "drop"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise UsageError(name, found=getattr(self, name), expected=f"one of {', '.join(allowed)}")


@dataclass(frozen=True)
class LoadPlan:
    """What a load will do: nothing of the optimizer was changed to make it."""

    stored: Stored
    src: Catalog
    dst: Catalog
    absent: frozenset[tuple[int, str]]
    scalars: tuple[Mapping[str, Scalar], ...]
    groups: Sequence[Mapping[str, Any]] | None
    model_tensors: dict[str, torch.Tensor]
    extra: dict[str, Any]


def prepare_load(
    optimizer: Loaded, path: str | os.PathLike[str], options: LoadOptions, model: nn.Module | None
) -> LoadPlan:
    """Plans the load of one part into ``optimizer`` and makes room for it, on all ranks or on none.

    No state has been overwritten where this raises; afterwards the state is neither the old nor the new until
    ``execute_load`` has returned.
    """
    if options.verify:
        on_first_rank(optimizer.control, "verification of the checkpoint", lambda: _verify(Path(path)))
    on_first_rank(optimizer.control, "the proof of the checkpoint's map", lambda: _prove(Path(path)))
    return together(
        optimizer.control, "the checkpoint to load", lambda: _prepare(optimizer, Path(path), options, model)
    )


def prepare_parts(
    optimizer: Engine, path: str | os.PathLike[str], options: LoadOptions, model: nn.Module | None
) -> list[tuple[Loaded, LoadPlan]]:
    """``prepare_load`` of all parts that an optimizer is stored as, on all ranks or on none."""
    made: list[tuple[Loaded, LoadPlan]] = []

    def check() -> None:
        names, steps = list(made[0][1].stored.catalogs), [plan.src.state.step for _, plan in made]
        check_expert_parts(optimizer, options.part, names, steps, drop=options.unexpected == "drop", file=path)

    try:
        for name, view in load_views(optimizer, options.part):
            made.append((view, prepare_load(view, path, replace(options, part=name), model)))
        together(optimizer.control, "the parts to load", check)
    except BaseException:
        for _, plan in made:
            plan.stored.store.close()
        raise
    return made


def _prepare(optimizer: Loaded, path: Path, options: LoadOptions, model: nn.Module | None) -> LoadPlan:
    stored = describe(path)
    try:
        return _plan(optimizer, stored, options, model)
    except BaseException:
        stored.store.close()
        raise


def _prove(path: Path) -> None:
    """Of a Megatron checkpoint: that each param's state lies where it was found. Reads its main params and weights."""
    stored = describe(path)
    try:
        if stored.megatron is not None:
            from ..api.megatron_source import check_proved, prove_map

            check_proved(prove_map(stored))
    finally:
        stored.store.close()


def _plan(optimizer: Loaded, stored: Stored, options: LoadOptions, model: nn.Module | None) -> LoadPlan:
    src = _part(stored, options.part)
    _check_names(src.state, optimizer, options, stored)
    _check_loss_scale(src.state, optimizer, options, stored)
    slots = _wanted_slots(src.state, optimizer, options, stored)
    dst = _live(optimizer, src, slots)
    state = dst.state
    correspond(src.state, state)
    absent = frozenset((param, state.slots[slot].name) for param, slot in state.absent)
    scalars = tuple(_scalars(src.state, spec.name) for spec in state.params)
    _check_state(optimizer, slots, scalars, stored)
    groups = None if options.groups == "run" else _match_groups(stored, src, optimizer)
    checkpoint = Checkpoint(stored, options.part)
    tensors = checkpoint.model_tensors()
    if tensors:
        _check_model(tensors, model, options, stored)
    extra = dict(checkpoint.extra) if isinstance(checkpoint.extra, dict) else {"extra": checkpoint.extra}
    extra.update(_rank_extra(stored, src.state.step, optimizer, options))
    return LoadPlan(stored, src, dst, absent, scalars, groups, tensors, extra)


def execute_load(optimizer: Loaded, plan: LoadPlan, model: nn.Module | None) -> None:
    """Reads this rank's bytes into the shards, then everything that hangs on them."""

    def fill() -> None:
        optimizer.begin_load(plan.dst.state.slots, plan.absent, plan.scalars)
        _copy(optimizer, plan)

    try:
        together(optimizer.control, "the data of the checkpoint", fill)
    finally:
        plan.stored.store.close()
    if model is not None and plan.model_tensors:
        restore_model_tensors(model, plan.model_tensors)
        _take_unfrozen(optimizer, plan)
    optimizer.finish_load(plan.src.state.step, plan.groups, plan.src.state.loss_scale)


def _copy(optimizer: Loaded, plan: LoadPlan) -> None:
    rank = optimizer.rank
    blobs = live_blobs(optimizer, plan.dst.state.slots)
    source = plan.stored.source(plan.src.part)
    moves = plan_blob(plan.src, plan.dst, correspond(plan.src.state, plan.dst.state), rank)
    payload = plan.dst.placement.payload_nbytes(rank)
    ends = np.array([0, payload], np.int64)
    job = Job(rank, payload, moves, ends, blobs.segments(rank), blobs, lambda job: None, pad=False)
    copier = Copier(source, Prover(plan.src, source), _WINDOW, checksum=False)
    run_jobs(copier, iter([job]), threads_of(optimizer))


@torch.no_grad()
def _take_unfrozen(optimizer: Loaded, plan: LoadPlan) -> None:
    """Main params of params that were frozen in the file and are trained here: the value that the file has."""
    for fragment in optimizer.fragments:
        value = plan.model_tensors.get(fragment.spec.name)
        if value is not None and fragment.spec.name not in plan.src.state.index:
            part = fragment.param
            fragment.main.copy_(value.flatten()[part.start : part.end])


def _part(stored: Stored, part: str) -> Catalog:
    catalog = stored.catalogs.get(part)
    if catalog is None:
        names = ", ".join(repr(name) for name in stored.catalogs)
        raise UsageError("the checkpoint has no such part", file=stored.path, found=part, expected=f"one of {names}")
    return catalog


def _check_names(src: PartState, optimizer: Loaded, options: LoadOptions, stored: Stored) -> None:
    """Names every param that only one side has."""
    mine = [spec.name for spec in optimizer.param_specs]
    missing = [name for name in mine if name not in src.index]
    unexpected = sorted(set(src.index) - set(mine))
    if missing and options.missing == "error":
        raise UsageError(
            f"params of the optimizer are missing in the checkpoint: {', '.join(missing)}",
            file=stored.path,
            hint='pass missing="init" to start them fresh',
        )
    if unexpected and options.unexpected == "error":
        raise UsageError(
            f"the checkpoint has params that the optimizer has not: {', '.join(unexpected)}",
            file=stored.path,
            hint='pass unexpected="drop" to leave them out',
        )


def _check_loss_scale(src: PartState, optimizer: Loaded, options: LoadOptions, stored: Stored) -> None:
    """A run without a dynamic loss scale has no place for the file's; one without a record starts afresh."""
    if src.loss_scale is not None and optimizer.scaler.state() is None and options.unexpected == "error":
        raise UsageError(
            "the checkpoint holds a dynamic loss scale that the optimizer has not",
            file=stored.path,
            found=f"loss scale {src.loss_scale.scale:g}",
            hint='construct it with loss_scale="dynamic", or pass unexpected="drop"',
        )


def _wanted_slots(src: PartState, optimizer: Loaded, options: LoadOptions, stored: Stored) -> tuple[SlotSpec, ...]:
    """The slots to load: those of the file that the optimizer keeps."""
    known = {slot.name: slot.dtype for slot in optimizer.expected_slots()}
    unexpected = [slot.name for slot in src.slots if slot.name not in known]
    if unexpected and options.unexpected == "error":
        raise UsageError(
            f"the checkpoint has slots that the optimizer has not: {', '.join(unexpected)}",
            file=stored.path,
            hint='use the optimizer that wrote them, or pass unexpected="drop"',
        )
    missing = [name for name in known if name not in src.slot_index]
    lossy = [name for name in missing if src.step > 0 or name == MAIN_PARAM]
    if lossy and options.missing == "error":
        raise UsageError(
            f"slots of the optimizer are missing in the checkpoint: {', '.join(lossy)}",
            file=stored.path,
            hint='pass missing="init" to start them fresh',
        )
    return canonical_slots({slot.name: slot.dtype for slot in src.slots if slot.name in known})


def _check_state(
    optimizer: Loaded, slots: Sequence[SlotSpec], scalars: Sequence[Mapping[str, Scalar]], stored: Stored
) -> None:
    try:
        optimizer.check_load(slots, scalars)
    except Zero1CkptError as error:
        raise error.at(stored.path) from error


def _live(optimizer: Loaded, src: Catalog, slots: tuple[SlotSpec, ...]) -> Catalog:
    """The optimizer as the catalog that is loaded into. What the file has no value for is absent: not written to."""
    state = src.state
    absent = set()
    for i, spec in enumerate(optimizer.param_specs):
        there = state.index.get(spec.name)
        for k, slot in enumerate(slots):
            if there is None or (there, state.slot_index[slot.name]) in state.absent:
                absent.add((i, k))
    live = PartState(optimizer.param_specs, slots, state.step, ({},), (), frozenset(absent))
    return IMAGE.plan(live, optimizer.layout, src.part, "", FormatOptions())


def _scalars(src: PartState, name: str) -> Mapping[str, Scalar]:
    index = src.index.get(name)
    return {} if index is None else src.scalars_of(index)


def _match_groups(stored: Stored, src: Catalog, optimizer: Loaded) -> list[dict[str, Any]]:
    """The file's hyper-parameters for each group of the run, matched by the params that both sides have."""
    file_groups = Checkpoint(stored, src.part).groups
    specs = optimizer.param_specs
    names = {spec.name for spec in specs}
    file_of = {p.name: p.group for p in src.state.params}
    matched: list[dict[str, Any]] = []
    for index, group in enumerate(optimizer.param_groups):
        members = {spec.name for spec in specs if spec.group == index and spec.name in file_of}
        homes = sorted({file_of[name] for name in members})
        if len(homes) > 1:
            raise _group_error(stored, index, members, file_groups[homes[0]]["params"], names)
        if not homes:
            matched.append({k: v for k, v in group.items() if k not in ("params", "param_names")})
            continue
        theirs = {name for name in file_groups[homes[0]]["params"] if name in names}
        if theirs != members:
            raise _group_error(stored, index, members, file_groups[homes[0]]["params"], names)
        matched.append({k: v for k, v in file_groups[homes[0]].items() if k != "params"})
    return matched


def _group_error(
    stored: Stored, index: int, mine: set[str], theirs: Sequence[str], known: set[str]
) -> UnsupportedError:
    other = {name for name in theirs if name in known}
    name = sorted(mine ^ other)[0]
    where = "in the run, not in the checkpoint" if name in mine else "in the checkpoint, not in the run"
    return UnsupportedError(
        f"group {index} has other params than its group in the checkpoint: this one is in it {where}",
        file=stored.path,
        param=name,
        hint='group the params as in the checkpoint, or pass groups="run"',
    )


def _check_model(
    tensors: Mapping[str, torch.Tensor], model: nn.Module | None, options: LoadOptions, stored: Stored
) -> None:
    if model is None and options.unexpected == "error":
        raise UsageError(
            f"the checkpoint holds {len(tensors)} buffers and frozen params, and the optimizer does not know the model",
            file=stored.path,
            hint='construct it with model=, or pass unexpected="drop"',
        )
    if model is not None:
        check_model_tensors(model, tensors, strict=options.unexpected == "error")


def _rank_extra(stored: Stored, step: int, optimizer: Loaded, options: LoadOptions) -> dict[str, Any]:
    """Rank-bound state under ``rank_extra``: this rank's own at the same number of ranks, else as was chosen."""
    record = stored.manifest.rank_extra
    if record is None or options.rank_state == "drop":
        return {}
    if record.ranks == optimizer.control.size and options.rank_state in ("error", "keep"):
        return {"rank_extra": _read_rank_extra(stored, optimizer.control.rank, record.ranks)}
    if options.rank_state == "error":
        raise UnsupportedError(
            f"the checkpoint holds state bound to each of {record.ranks} ranks (RNG), and this run has"
            f" {optimizer.control.size}",
            file=stored.path,
            hint='choose rank_state="keep" (all of it, by saving rank), "reseed" (a seed for this rank) or "drop"',
        )
    if options.rank_state == "keep":
        return {"rank_extra": {r: _read_rank_extra(stored, r, record.ranks) for r in range(record.ranks)}}
    seed = crc64(f"{stored.manifest.digest} {step} {optimizer.control.rank}".encode())
    return {"rank_extra": {"seed": seed >> 1}}


def _read_rank_extra(stored: Stored, rank: int, ranks: int) -> Any:
    key = rank_extra_file(rank, ranks)
    entry = stored.files.get(key)
    if entry is None:
        raise MissingError("the manifest lists no rank-bound state of this rank", file=stored.path, expected=key)
    header = check_tensor_file(stored.store, entry)
    tensors = header.by_name

    def get_tensor(name: str) -> torch.Tensor | torch.dtype:
        if name.startswith("dtype:"):
            return torch_dtype(name.removeprefix("dtype:"))
        if name not in tensors:
            raise CorruptError("rank-bound state refers to a tensor that is not there", file=key, param=name)
        found = tensors[name]
        return from_bytes(read_tensor(stored.store, key, header, name), found.dtype, found.shape)

    try:
        value = msgspec.json.decode(header.metadata[VALUE_KEY])
    except (KeyError, msgspec.DecodeError) as error:
        raise CorruptError(f"rank-bound state cannot be parsed: {error}", file=key) from error
    return decode_value(value, get_tensor=get_tensor)


def _verify(path: Path) -> None:
    """The folder as ``load`` finds it: a run folder's pointer is followed."""
    result = verify_checkpoint(path, deep=True)
    if not result:
        first = result.findings[0]
        raise CorruptError(f"verify=True found {len(result.findings)}: {first.message}", file=path)

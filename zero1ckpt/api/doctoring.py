"""``zero1ckpt doctor``: looks for known damage in a checkpoint of any kind, and writes a mended copy."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from ..core.errors import CorruptError, MissingError, UnsupportedError, UsageError, Zero1CkptError
from ..doctor import shifted_state
from ..doctor.casts import BITS
from ..doctor.examine import examine, examine_together
from ..doctor.subject import Array, Damage, Piece, Sizes, Subject, SubjectParam
from ..encodings.dcp_metadata import parse_metadata
from ..foreign.megatron.boxes import BoxPlacement
from ..foreign.megatron.common import chained_values, read_common
from ..foreign.megatron.model import Doubt, MegatronCheckpoint, MegatronPart
from ..foreign.megatron.weights import Weights
from ..model.catalog import Catalog
from ..model.protocols import Progress, Source
from ..model.state import MAIN_PARAM
from .diagnosis import Diagnosis, Mending
from .megatron_verification import not_whole
from .mending import write_mended
from .stored import Stored, describe, resolve
from .verification import Finding

__all__ = ["MENDABLE", "Diagnosis", "Mending", "diagnose", "mend"]

MENDABLE = frozenset({shifted_state.KIND})
"""Kinds of findings that a mended copy no longer has."""

_FLOATS = ("float32", "float16", "bfloat16")
_CACHE_BYTES = 2**30
_GAP_BYTES = 2**20


def diagnose(path: str | os.PathLike[str], *, progress: Progress | None = None) -> Diagnosis:
    """Looks for every known damage. Reads all state; holds one param at a time, of shifted state one rank's buffers.

    Raises ``MissingError``, ``CorruptError`` or ``UnsupportedError`` where the checkpoint cannot be described at all.
    """
    result = Diagnosis()
    try:
        stored = describe(path, check_files=False)
    except (CorruptError, MissingError) as error:
        if not _has_metadata(path):
            raise
        result.findings.append(Finding("entry", str(error), param=error.param, file=error.file))
        return result
    result.stored = stored
    result.add(list(_entries_damage(stored)))
    for name in stored.catalogs:
        _examine_part(stored, name, result, progress)
    result.add(examine_together(list(result.subjects.values())))
    result.add(list(_repeated_checkpoint(stored)))
    if stored.megatron is not None:
        result.notices += [Finding("reading", line) for line in stored.megatron.notices if not isinstance(line, Doubt)]
        result.findings += not_whole(stored)
        result.add(list(_padding(stored.megatron)))
    return result


def _has_metadata(path: str | os.PathLike[str]) -> bool:
    """Whether what lists the entries can be read: then what is missing or altered is damage found."""
    try:
        folder = resolve(Path(path))
        parse_metadata((folder / ".metadata").read_bytes(), file=folder / ".metadata")
    except (OSError, Zero1CkptError):
        return False
    return True


def _examine_part(stored: Stored, name: str, result: Diagnosis, progress: Progress | None) -> None:
    subject = _subject(stored, name)
    result.subjects[name] = subject
    catalog = stored.catalogs[name]

    def seen(param: int) -> None:
        if progress is not None:
            progress.advance(sum(catalog.state.tensor_nbytes(param, k) for k in range(len(catalog.state.slots))))

    try:
        found = examine(subject, seen)
    except (CorruptError, MissingError) as error:
        result.findings.append(Finding("entry", str(error), name, error.param, file=error.file))
        return
    result.examinations[name] = found
    result.add(found.damages)
    if found.shift is not None:
        result.mendable.append(name)


# ------------------------------------------------------------------------------------------------------------- subjects


def _subject(stored: Stored, name: str) -> Subject:
    catalog = stored.catalogs[name]
    state = catalog.state
    part = stored.megatron.parts[name] if stored.megatron is not None else None
    pieces = _pieces(stored.megatron, part) if stored.megatron is not None and part is not None else {}
    params = tuple(
        SubjectParam(spec.name, spec.shape, spec.dtype, spec.expert, tuple(pieces.get(i, ())))
        for i, spec in enumerate(state.params)
    )
    dtypes = {slot.name: slot.dtype for slot in state.slots if not slot.whole}
    lrs = tuple(float(group["lr"]) for group in state.groups if isinstance(group.get("lr"), int | float))
    values = PartValues(catalog, stored.source(name), _weights(stored.megatron, part))
    steps = _steps(stored.megatron, part) if stored.megatron is not None and part is not None else (state.step,)
    sizes = _sizes(stored.megatron) if stored.megatron is not None else Sizes()
    return Subject(name, stored.manifest.format, params, dtypes, values, state.step, steps, lrs, sizes)


def _sizes(checkpoint: MegatronCheckpoint) -> Sizes:
    args = read_common(checkpoint.entries).args
    return Sizes(args.tensor_parallel, args.pipeline_parallel, args.virtual_pipeline, args.expert_parallel)


def _pieces(checkpoint: MegatronCheckpoint, part: MegatronPart) -> dict[int, list[Piece]]:
    """How each main param was written, where chunks are boxes of it."""
    placement = part.catalog.placement
    if not isinstance(placement, BoxPlacement):
        return {}
    main = part.catalog.state.slot_index[MAIN_PARAM]
    writer = checkpoint.entries.chunks.writer
    pieces: dict[int, list[Piece]] = {}
    for piece in placement.pieces:
        if piece.slot == main and piece.start == 0 and piece.size == piece.box.size:
            row = Piece(piece.box, int(writer[piece.chunk]), piece.chunk)
            pieces.setdefault(piece.param, []).append(row)
    return pieces


def _steps(checkpoint: MegatronCheckpoint, part: MegatronPart) -> tuple[int | float | None, ...]:
    """The counts of updates that the groups state, one for all that state the same; none where groups are not found."""
    from ..foreign.megatron.groups import read_groups

    optimizers = chained_values(checkpoint.entries.common.get("optimizer"))
    found: list[int | float | None] = []
    for value in optimizers:
        if isinstance(value, dict) and "optimizer" in value:
            found += read_groups(value).steps
    return tuple(dict.fromkeys(found)) or (part.catalog.state.step,)


Weight = Callable[[int], Array | None]


def _weights(checkpoint: MegatronCheckpoint | None, part: MegatronPart | None) -> Weight:
    if checkpoint is None or part is None:
        return lambda param: None
    weights = Weights(checkpoint.entries, checkpoint.model_keys)
    locals_of: dict[int, list[int]] = {}
    for i, local in enumerate(part.local_params):
        locals_of.setdefault(local.param, []).append(i)

    def read(param: int) -> Array | None:
        spec = part.catalog.state.params[param]
        kind = BITS.get(spec.dtype)
        own = sorted((part.local_params[i] for i in locals_of.get(param, ())), key=lambda local: local.start)
        known = sum(local.numel for local in own) == spec.numel and all(local.boxes for local in own)
        if kind is None or not own or not known or spec.name in part.evidence.unproved or spec.numel == 0:
            return None
        keys = checkpoint.entries.tensors
        if any(keys[held.key].dtype != spec.dtype for local in own for held in local.boxes):
            return None
        data = b"".join(bytes(weights.read(local.boxes, 0, local.numel)) for local in own)
        return np.frombuffer(data, kind).reshape(spec.shape)

    return read


class PartValues:
    """Arrays of one part (``doctor.subject.Values``). Keeps the last ones, up to a gigabyte."""

    def __init__(self, catalog: Catalog, source: Source, weight: Weight) -> None:
        self.catalog, self.source, self._weight = catalog, source, weight
        self._kept: OrderedDict[tuple[int, str], Array | None] = OrderedDict()
        self._bytes = 0

    def slot(self, param: int, slot: str) -> Array | None:
        return self._keep((param, slot), lambda: self._read(param, slot))

    def weight(self, param: int) -> Array | None:
        return self._keep((param, ""), lambda: self._weight(param))

    def _keep(self, key: tuple[int, str], read: Callable[[], Array | None]) -> Array | None:
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        made = read()
        self._kept[key] = made
        self._bytes += 0 if made is None else made.nbytes
        while self._bytes > _CACHE_BYTES and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= 0 if dropped is None else dropped.nbytes
        return made

    def _read(self, param: int, slot: str) -> Array | None:
        state = self.catalog.state
        index = state.slot_index[slot]
        dtype = state.slots[index].dtype
        if (param, index) in state.absent or dtype not in _FLOATS:
            return None
        raw = read_tensor(self.catalog, self.source, param, index)
        shape = state.params[param].shape
        if dtype == "float32":
            return raw.view(np.float32).reshape(shape)
        if dtype == "float16":
            return raw.view(np.float16).astype(np.float32).reshape(shape)
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)


def read_tensor(catalog: Catalog, source: Source, param: int, slot: int) -> Array:
    """The bytes of one tensor. Raises ``CorruptError`` where the file does not hold all of it."""
    state = catalog.state
    item = state.slots[slot].itemsize
    numel = state.params[param].numel
    data = bytearray(numel * item)
    view = memoryview(data)
    asked = [np.array([value], np.int64) for value in (param, slot, 0, numel)]
    _, found = catalog.placement.locate(*asked)
    if int(found.size.sum()) != numel:
        raise CorruptError(
            "the file does not hold each element once",
            param=state.params[param].name,
            found=f"{int(found.size.sum())} elements of {state.slots[slot].name}",
            expected=numel,
        )
    for _, _, start, size, blob, at, _ in found.rows():
        source.read_run(blob, at, [view[start * item : (start + size) * item]])
    return np.frombuffer(data, np.uint8)


# ----------------------------------------------------------------------------------------- damage beside params' values


def _entries_damage(stored: Stored) -> Iterator[Damage]:
    """Entries that the metadata promises: each must be where it says, and be what it says."""
    if stored.megatron is None:
        yield from _file_damage(stored)
        return
    entries = stored.megatron.entries
    for key, tensor in entries.tensors.items():
        for chunk in tensor.chunks.tolist():
            try:
                file, at = entries.chunks.place(chunk)
                if at + int(entries.chunks.nbytes[chunk]) > entries.files.get(file, 0):
                    raise CorruptError("the file ends before the entry does", file=entries.store.label(file), param=key)
            except (CorruptError, MissingError) as error:
                yield Damage("entry", str(error), True, param=key, file=error.file)
                break
    for key in entries.objects:
        try:
            entries.load_archive(key)
        except (CorruptError, MissingError) as error:
            yield Damage("entry", str(error), True, param=key, file=error.file)
        except UnsupportedError as error:
            yield Damage("entry", str(error), False, param=key, file=error.file)


def _file_damage(stored: Stored) -> Iterator[Damage]:
    try:
        stored.check_files()
    except (CorruptError, MissingError) as error:
        yield Damage("file", str(error), True, file=error.file)


def _padding(checkpoint: MegatronCheckpoint) -> Iterator[Damage]:
    """Bytes of buckets that belong to no param: Megatron writes whatever the memory held."""
    entries = checkpoint.entries
    held = set()
    for part in checkpoint.parts.values():
        held |= _held(part)
    dirty: dict[str, int] = {}
    for key, tensor in entries.tensors.items():
        if ".bucket_idx_" not in key:
            continue
        count = sum(
            _garbage(checkpoint, chunk)
            for chunk in tensor.chunks.tolist()
            if chunk not in held and int(entries.chunks.nbytes[chunk]) <= _GAP_BYTES
        )
        if count:
            dirty[key] = count
    if dirty:
        total, first = sum(dirty.values()), next(iter(dirty))
        message = f"{total} bytes of padding between params are not zero, in {len(dirty)} buckets: {first}"
        yield Damage("padding", f"{message}; they belong to no param and are never loaded", False)


def _held(part: MegatronPart) -> set[int]:
    state = part.catalog.state
    found = set()
    for slot in range(len(state.slots)):
        params = np.arange(len(state.params), dtype=np.int64)
        sizes = np.array([param.numel for param in state.params], np.int64)
        _, rows = part.catalog.placement.locate(params, np.full_like(params, slot), np.zeros_like(params), sizes)
        found |= set(rows.blob.tolist())
    return found


def _garbage(checkpoint: MegatronCheckpoint, chunk: int) -> int:
    data = bytearray(int(checkpoint.entries.chunks.nbytes[chunk]))
    checkpoint.source.read_run(chunk, 0, [memoryview(data)])
    return int(np.count_nonzero(np.frombuffer(data, np.uint8)))


def _repeated_checkpoint(stored: Stored) -> Iterator[Damage]:
    """The checkpoint before this one in the same run, where it holds the same state."""
    before = _neighbour(stored)
    if before is None:
        return
    try:
        other = describe(before, check_files=False)
        same = _same_state(stored, other)
    except (Zero1CkptError, OSError):
        return
    if same:
        steps = [max(catalog.state.step for catalog in one.catalogs.values()) for one in (other, stored)]
        yield Damage(
            "repeated_checkpoint",
            f"{stored.path.name} holds the same state as {before.name}, at steps {steps[0]} and {steps[1]}",
            steps[0] != steps[1],
        )


def _neighbour(stored: Stored) -> Path | None:
    try:
        names = sorted(child for child in stored.path.resolve().parent.iterdir() if child.is_dir())
    except OSError:
        return None
    here = stored.path.resolve()
    stem = here.name.rstrip("0123456789")
    alike = [child for child in names if child.name.rstrip("0123456789") == stem and child.name != stem]
    numbers = sorted((int(child.name[len(stem) :]), child) for child in alike)
    earlier = [child for number, child in numbers if here in [c for _, c in numbers] and child != here]
    before = [child for child in earlier if int(child.name[len(stem) :]) < int(here.name[len(stem) :] or -1)]
    return before[-1] if before else None


def _same_state(a: Stored, b: Stored) -> bool:
    """Whether two checkpoints hold the same values; stops at the first that differs."""
    if a.catalogs.keys() != b.catalogs.keys():
        return False
    if a.digest is not None and b.digest is not None:
        return a.digest == b.digest
    for name, mine in a.catalogs.items():
        theirs = b.catalogs[name]
        if mine.state.params != theirs.state.params or mine.state.slots != theirs.state.slots:
            return False
        for param in range(len(mine.state.params)):
            for slot in range(len(mine.state.slots)):
                one = read_tensor(mine, a.source(name), param, slot)
                if not np.array_equal(one, read_tensor(theirs, b.source(name), param, slot)):
                    return False
    return True


# -------------------------------------------------------------------------------------------------------------- mending


def mend(
    diagnosis: Diagnosis, path: str | os.PathLike[str], dst: str | os.PathLike[str], *, zero_lost_moments: bool = False
) -> Mending | None:
    """Writes a copy of ``path`` with what can be mended mended, whole or not at all; None where there is nothing.

    Raises ``UnsupportedError`` where moments are lost and ``zero_lost_moments`` is not asked for, or where the damage
    cannot be mended; ``OutputError`` where DST exists or cannot be written.
    """
    _refuse_same(Path(path), Path(dst))
    if diagnosis.ok:
        return None
    if not diagnosis.mendable or diagnosis.stored is None:
        kinds = ", ".join(sorted({finding.kind for finding in diagnosis.findings}))
        raise UnsupportedError(
            "nothing that was found can be mended", file=path, found=kinds, hint="restore an earlier checkpoint"
        )
    undecided = [name for name, found in diagnosis.examinations.items() if found.shift and found.shift.undecided]
    if undecided:
        raise UnsupportedError(
            "the damage cannot be mended: not all layouts that the state may have had could be tried",
            file=path,
            found=f"part {undecided[0]!r}" if undecided[0] else None,
            hint="restore an earlier checkpoint",
        )
    lost = sum(found.shift.lost_count for found in diagnosis.examinations.values() if found.shift is not None)
    if lost and not zero_lost_moments:
        raise UnsupportedError(
            f"{lost} elements of each moment are lost: they are in no file",
            file=path,
            hint="pass --zero-lost-moments to write zeros for them, as a new optimizer has",
        )
    return write_mended(diagnosis, Path(path), Path(dst))


def _refuse_same(path: Path, dst: Path) -> None:
    here, there = path.resolve(), dst.resolve()
    if here == there or here in there.parents:
        raise UsageError(
            "the mended copy must lie beside the checkpoint, not in it", file=dst, hint="name another folder"
        )

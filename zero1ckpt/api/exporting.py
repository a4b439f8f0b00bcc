"""``zero1ckpt.export``: model weights from the main params, as safetensors files that other tools read.

Also the streaming that it shares with ``diff``: tensors of a checkpoint by flat ranges, in windows, by several threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ..core.casting import cast_bits
from ..core.dtypes import itemsize, to_safetensors
from ..core.errors import CorruptError, OutputError, UnsupportedError, UsageError
from ..core.ranges import IntColumn
from ..encodings.payload_file import PayloadSource
from ..encodings.safetensors_file import tensor_cuts
from ..encodings.tensor_file import check_tensor_file
from ..model.catalog import Catalog, Extents, TablePlacement, digest_tensors, fold_pieces
from ..model.protocols import Progress, Source
from ..model.state import MAIN_PARAM, ParamSpec, PartState, SlotSpec
from ..resharding.execute import Copier, Job
from ..resharding.plan import Moves
from ..resharding.prove import Prover
from ..storage.local import OutputFile
from ..storage.memory import MemoryBlobs
from ..storage.staging import Staging
from .commit import check_space, window_bytes, workers_or_default
from .megatron_weights import weights_catalog
from .stored import MODEL_FILE, Stored, describe
from .verification import in_parallel

__all__ = ["Export", "TensorReader", "export", "file_catalog", "flat_windows"]

DEFAULT_SHARD_BYTES = 5_000_000_000
_BATCH = 2048
"""Windows that are located at once."""


# ---------------------------------------------------------------------------------------------------------- streaming


class TensorReader:
    """Reads flat ranges of a part's tensors, from any thread. A tensor that is read whole, once, is proved."""

    def __init__(self, catalog: Catalog, source: Source) -> None:
        self.catalog = catalog
        self._copier = Copier(source, Prover(catalog, source), 2**62, checksum=False)

    def locate(self, param: IntColumn, slot: IntColumn, start: IntColumn, size: IntColumn) -> list[Moves]:
        """Where each range lies. Raises ``CorruptError`` for one that is not there as a whole."""
        row, found = self.catalog.placement.locate(param, slot, start, size)
        covered = np.zeros(len(size), np.int64)
        np.add.at(covered, row, found.size)
        for at in np.flatnonzero(covered != size)[:1].tolist():
            raise CorruptError(
                f"slot {self.catalog.state.slots[int(slot[at])].name} is not covered by the checkpoint's files",
                param=self.catalog.state.params[int(param[at])].name,
                found=f"{covered[at]} elements",
                expected=f"elements {start[at]} to {start[at] + size[at]}",
            )
        at = (found.start - start[row]) * self.catalog.state.slot_bytes[slot[row]]
        moves = Moves(found.blob, found.at, at, found.nbytes)
        bounds = np.searchsorted(row, np.arange(len(size) + 1)).tolist()
        return [moves.take(slice(low, high)) for low, high in pairwise(bounds)]

    def read(self, moves: Moves, out: memoryview) -> None:
        """Fills ``out`` with one located range. Raises ``CorruptError`` for damaged data."""
        ends = np.array([0, out.nbytes], np.int64)
        job = Job(0, out.nbytes, moves, ends, ends, MemoryBlobs({0: [out]}), lambda job: None)
        for window in self._copier.windows(job):
            self._copier.run(window)


def flat_windows(numels: Sequence[int], limit: int) -> Iterator[tuple[IntColumn, IntColumn, IntColumn]]:
    """Cuts tensors into ranges of at most ``limit`` elements: columns of tensor, start and size, in batches. Pure."""
    counts = np.array([-(-numel // limit) for numel in numels], np.int64)
    tensor = np.repeat(np.arange(len(numels)), counts)
    start = (np.arange(len(tensor)) - np.repeat(np.cumsum(counts) - counts, counts)) * limit
    size = np.minimum(np.array(numels, np.int64)[tensor] - start, limit)
    for low in range(0, len(tensor), _BATCH):
        rows = slice(low, low + _BATCH)
        yield tensor[rows], start[rows], size[rows]


def file_catalog(stored: Stored, key: str, kinds: Mapping[str, str], kind: str) -> tuple[Catalog, Source] | None:
    """A file of whole tensors beside the state, as a part whose params are those tensors; None where there is none.

    The slot of a tensor is its kind, by name in ``kinds``, else ``kind``. Digests come from the header's checksums.
    """
    entry = stored.files.get(key)
    if entry is None:
        return None
    header = check_tensor_file(stored.store, entry)
    pairs = [(kinds.get(tensor.name, kind), tensor.dtype) for tensor in header.tensors]
    slots = tuple(SlotSpec(*pair) for pair in dict.fromkeys(pairs))
    slot_of = [slots.index(SlotSpec(*pair)) for pair in pairs]
    params = tuple(ParamSpec(tensor.name, tensor.shape, tensor.dtype) for tensor in header.tensors)
    absent = frozenset((i, k) for i, own in enumerate(slot_of) for k in range(len(slots)) if k != own)
    state = PartState(params, slots, absent=absent)
    rows = [
        (i, slot_of[i], 0, params[i].numel, 0, tensor.begin, tensor.end - tensor.begin)
        for i, tensor in enumerate(header.tensors)
    ]
    table = Extents(*np.array(rows, np.int64).reshape(-1, 7).T)
    placement = TablePlacement((key,), (header.payload_nbytes,), table, len(slots))
    cuts = tensor_cuts(header.tensors, header.piece_bytes)
    digests = digest_tensors(state, fold_pieces(state, placement.extents(0), cuts, header.pieces))
    catalog = Catalog("tensors", "safetensors", key, state, None, placement, digests)
    return catalog, PayloadSource(stored.store, catalog, stored.files, lambda blob: header, lambda blob: cuts)


_CAST = ("float64", "float32", "float16", "bfloat16")


# --------------------------------------------------------------------------------------------------------------- export


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of the output. ``kind``: param, frozen or buffer; ``stored`` its dtype in the checkpoint."""

    name: str
    shape: tuple[int, ...]
    stored: str
    dtype: str
    kind: str
    source: int
    param: int
    slot: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class Shard:
    """One file: its name, the bytes before the payload, and its tensors with the payload byte of each."""

    name: str
    header: bytes
    weights: tuple[Weight, ...]
    at: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(weight.nbytes for weight in self.weights)


@dataclass(frozen=True)
class Export:
    """What is exported. A value: nothing was written to make it. ``notices`` say what is missing or changed."""

    stored: Stored
    sources: tuple[tuple[Catalog, Source], ...]
    shards: tuple[Shard, ...]
    tied: Mapping[str, str]
    dtype: str | None
    notices: list[str] = field(default_factory=list)

    @property
    def weights(self) -> list[Weight]:
        return [weight for shard in self.shards for weight in shard.weights]

    @property
    def payload_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)


def export(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    shard_size: int = DEFAULT_SHARD_BYTES,
    part: str | None = None,
    tied: Mapping[str, str] | None = None,
    workers: int | None = None,
    memory_limit: int | None = None,
    progress: Progress | None = None,
) -> Export:
    """Writes the model's weights to the new folder ``out``: ``model.safetensors``, or shards of it, and an index.

    ``dtype``: of all floating-point tensors; by default each param has the dtype of the model's param, and frozen
    params and buffers keep theirs. ``part``: only this part's params. ``tied``: other names of stored params, which are
    recorded and not stored again.

    Raises ``UnsupportedError`` for a param without a main param or a dtype that is not cast, ``OutputError`` where
    ``out`` exists or cannot be written.
    """
    plan = plan_export(path, dtype=dtype, shard_size=shard_size, part=part, tied=tied)
    write_export(plan, out, workers=workers, memory_limit=memory_limit, progress=progress)
    return plan


def plan_export(
    path: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    shard_size: int = DEFAULT_SHARD_BYTES,
    part: str | None = None,
    tied: Mapping[str, str] | None = None,
) -> Export:
    """Plans an export; reads no data. Arguments and errors as of ``export``."""
    if dtype is not None and dtype not in _CAST:
        raise UsageError("dtype of an export", found=dtype, expected=f"one of {', '.join(_CAST)}")
    if shard_size < 1:
        raise UsageError("shard size", found=shard_size, expected="at least 1 byte")
    stored = describe(path)
    if part is not None and part not in stored.catalogs:
        known = ", ".join(map(repr, stored.catalogs))
        raise UsageError("the checkpoint has no such part", file=stored.path, found=part, expected=f"one of {known}")
    sources = [(c, stored.source(name)) for name, c in stored.catalogs.items() if part in (None, name)]
    if stored.megatron is not None:
        own = weights_catalog(stored.megatron, split=True)
        if own.state.params:
            return _of_weights(stored, own, dtype, shard_size, part, tied or {})
        from .megatron_source import check_known

        check_known(stored)
    weights = [w for i, (catalog, _) in enumerate(sources) for w in _trained(stored, i, catalog, dtype)]
    model = file_catalog(stored, MODEL_FILE, {entry.name: entry.kind for entry in stored.manifest.model}, "buffer")
    if model is not None:
        weights += _others(len(sources), model[0], dtype)
        sources.append(model)
    _check_names(stored, weights)
    aliases = _aliases(stored, weights, tied or {})
    made = Export(stored, tuple(sources), tuple(_shards(weights, shard_size, aliases)), aliases, dtype)
    made.notices.extend(_missing(stored, sources, aliases, has_model=model is not None))
    return made


def _of_weights(
    stored: Stored, own: Catalog, dtype: str | None, shard_size: int, part: str | None, tied: Mapping[str, str]
) -> Export:
    """The tensors of the model that a Megatron checkpoint holds beside the state: they are the model."""
    assert stored.megatron is not None
    if part is not None:
        raise UsageError(
            "the model's weights are of all parts", file=stored.path, found=f"--part {part}", hint="leave --part out"
        )
    weights = list(_others(0, own, dtype))
    _check_names(stored, weights)
    aliases = _aliases(stored, weights, tied)
    sources = ((own, stored.megatron.source),)
    made = Export(stored, sources, tuple(_shards(weights, shard_size, aliases)), aliases, dtype)
    for name, part_of in stored.megatron.parts.items():
        if part_of.evidence.unknown:
            where = f" of part {name}" if name else ""
            count = len(part_of.evidence.unknown)
            made.notices.append(f"{count} params{where} have state and no weight that is known: weights may be missing")
    return made


def _trained(stored: Stored, source: int, catalog: Catalog, dtype: str | None) -> Iterator[Weight]:
    state = catalog.state
    slot = state.slot_index.get(MAIN_PARAM)
    for i, spec in enumerate(state.params):
        if slot is None or (i, slot) in state.absent:
            raise UnsupportedError(
                f"the checkpoint has no {MAIN_PARAM} of it, and nothing is made up",
                file=stored.path,
                param=spec.name,
                hint="export a checkpoint that has all main params",
            )
        main, to = state.slots[slot].dtype, dtype or spec.dtype
        if main != to and not {main, to} <= set(_CAST):
            raise UnsupportedError(
                f"{main} is not cast to {to}", file=stored.path, param=spec.name, hint="choose a --dtype"
            )
        yield Weight(spec.name, spec.shape, main, to, "param", source, i, slot)


def _others(source: int, catalog: Catalog, dtype: str | None) -> Iterator[Weight]:
    """Frozen params and buffers; what is no floating-point number keeps its dtype."""
    for i, spec in enumerate(catalog.state.params):
        slot = next(k for k in range(len(catalog.state.slots)) if (i, k) not in catalog.state.absent)
        to = dtype if dtype is not None and spec.dtype in _CAST else spec.dtype
        yield Weight(spec.name, spec.shape, spec.dtype, to, catalog.state.slots[slot].name, source, i, slot)


def _check_names(stored: Stored, weights: Sequence[Weight]) -> None:
    seen: set[str] = set()
    for weight in weights:
        if weight.name in seen:
            raise UnsupportedError(
                "several parts have a param of this name", file=stored.path, param=weight.name, hint="choose one --part"
            )
        if weight.name == "__metadata__":
            raise UnsupportedError("safetensors has no tensor of this name", file=stored.path, param=weight.name)
        seen.add(weight.name)


def _aliases(stored: Stored, weights: Sequence[Weight], tied: Mapping[str, str]) -> dict[str, str]:
    names = {weight.name for weight in weights}
    for alias, name in tied.items():
        if name not in names or alias in names:
            what = "the checkpoint has no such param" if name not in names else "the name is that of a stored param"
            raise UsageError(f"tied: {what}", file=stored.path, param=name if name not in names else alias)
    return dict(sorted(tied.items()))


def _missing(
    stored: Stored, sources: Sequence[tuple[Catalog, Source]], aliases: Mapping[str, str], *, has_model: bool
) -> Iterator[str]:
    if not has_model:
        yield "the checkpoint holds no frozen params or buffers: it was saved without model=, or the model has none"
    for catalog, _ in sources:
        for spec in catalog.state.params:
            if spec.shared_embedding and spec.name not in aliases.values():
                yield f"{spec.name} is a shared embedding; the checkpoint does not know its other name (see tied)"


def _shards(weights: Sequence[Weight], shard_size: int, aliases: Mapping[str, str]) -> Iterator[Shard]:
    """Files in the order of the weights; inside a file wide elements come first, so that all are aligned."""
    groups: list[list[Weight]] = [[]]
    used = 0
    for weight in weights:
        if groups[-1] and used + weight.nbytes > shard_size:
            groups.append([])
            used = 0
        groups[-1].append(weight)
        used += weight.nbytes
    for i, group in enumerate(groups):
        name = "model.safetensors" if len(groups) == 1 else f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors"
        ordered = sorted(group, key=lambda weight: -itemsize(weight.dtype))
        ends = np.cumsum([weight.nbytes for weight in ordered], dtype=np.int64)
        at = tuple(int(end) - weight.nbytes for end, weight in zip(ends, ordered, strict=True))
        yield Shard(name, _header(ordered, at, aliases), tuple(ordered), at)


def _header(weights: Sequence[Weight], at: Sequence[int], aliases: Mapping[str, str]) -> bytes:
    """Metadata as ``safetensors.torch.save_model`` has it: the other names of tied weights."""
    names = {weight.name for weight in weights}
    meta = {"format": "pt"} | {alias: name for alias, name in aliases.items() if name in names}
    table: dict[str, Any] = {"__metadata__": meta}
    for weight, begin in zip(weights, at, strict=True):
        table[weight.name] = {
            "dtype": to_safetensors(weight.dtype),
            "shape": list(weight.shape),
            "data_offsets": [begin, begin + weight.nbytes],
        }
    text = msgspec.json.encode(table)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_export(
    plan: Export,
    out: str | os.PathLike[str],
    *,
    workers: int | None = None,
    memory_limit: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Writes a plan aside and publishes it as a whole; adds to its notices. Errors as of ``export``."""
    dst = Path(out).resolve()
    source = plan.stored.path.resolve()
    if dst == source or source in dst.parents or dst in source.parents:
        raise UsageError("OUT lies in the checkpoint, or the checkpoint in it", file=dst, hint="choose another place")
    if os.path.lexists(dst) and not (dst.is_dir() and not any(dst.iterdir())):
        raise OutputError("exists", file=dst, hint="choose another place")
    threads = workers_or_default(workers)
    share = window_bytes(memory_limit, threads)
    check_space(dst, sum(shard.nbytes for shard in plan.shards))
    staging = Staging(dst, {"command": "export"})
    try:
        writer = _Writer(plan, share, threads, progress)
        for shard in plan.shards:
            writer.write(shard, staging.path(shard.name))
        plan.notices.extend(writer.overflows())
        staging.publish("model.safetensors.index.json", _index(plan))
    except BaseException:
        staging.abandon()
        raise
    finally:
        plan.stored.store.close()


def _index(plan: Export) -> bytes:
    files = {weight.name: shard.name for shard in plan.shards for weight in shard.weights}
    meta: dict[str, Any] = {"total_size": plan.payload_bytes}
    if plan.tied:
        meta["tied"] = dict(plan.tied)
    index = {"metadata": meta, "weight_map": dict(sorted(files.items()))}
    return msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n"


class _Writer:
    """Writes files one after the other, their windows in parallel. ``share``: bytes of each thread."""

    def __init__(self, plan: Export, share: int, workers: int, progress: Progress | None) -> None:
        self._readers = [TensorReader(catalog, source) for catalog, source in plan.sources]
        self._share, self._workers, self._progress = share, workers, progress
        self._local = threading.local()
        self._lock = threading.Lock()
        self._overflows: dict[tuple[str, str], int] = {}

    def write(self, shard: Shard, path: Path) -> None:
        file = OutputFile(path, shard.nbytes)
        try:
            file.write(0, memoryview(shard.header))
            in_parallel(self._jobs(shard), lambda job: self._copy(shard, file, *job), self._workers)
            file.sync_and_close()
        finally:
            file.close()

    def _jobs(self, shard: Shard) -> Iterator[tuple[int, int, int, Moves]]:
        """(weight, start, size, where it lies) of each window."""
        for source, reader in enumerate(self._readers):
            mine = [i for i, weight in enumerate(shard.weights) if weight.source == source]
            where = np.array([(i, shard.weights[i].param, shard.weights[i].slot) for i in mine], np.int64)
            for tensor, start, size in flat_windows([shard.weights[i].numel for i in mine], max(self._share // 24, 1)):
                index, param, slot = where[tensor].T
                found = reader.locate(param, slot, start, size)
                yield from zip(index.tolist(), start.tolist(), size.tolist(), found, strict=True)

    def _copy(self, shard: Shard, file: OutputFile, index: int, start: int, size: int, moves: Moves) -> None:
        weight = shard.weights[index]
        data = self._buffer("data", size * itemsize(weight.stored))
        self._readers[weight.source].read(moves, data)
        made = data
        if weight.stored != weight.dtype:
            made = self._buffer("made", size * itemsize(weight.dtype))
            overflows = cast_bits(data, weight.stored, weight.dtype, made)
            with self._lock:
                key = (weight.name, weight.dtype)
                self._overflows[key] = self._overflows.get(key, 0) + overflows
        file.write(len(shard.header) + shard.at[index] + start * itemsize(weight.dtype), made)
        if self._progress is not None:
            self._progress.advance(made.nbytes)

    def _buffer(self, name: str, nbytes: int) -> memoryview:
        """This thread's buffer of a name, grown to what it needs."""
        held: memoryview | None = getattr(self._local, name, None)
        if held is None or held.nbytes < nbytes:
            held = memoryview(np.empty(nbytes, np.uint8).data)
            setattr(self._local, name, held)
        return held[:nbytes]

    def overflows(self) -> list[str]:
        return [
            f"{name}: {count} finite values are too large for {dtype} and became infinite"
            for (name, dtype), count in sorted(self._overflows.items())
            if count
        ]

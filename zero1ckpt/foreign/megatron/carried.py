"""What a native checkpoint keeps of the Megatron checkpoint that it was made from, so that the way back loses nothing.

``carried/megatron.json`` (``Carried``) says how the source was laid out and what else it held; ``carried/entries.bin``
holds the bytes of its objects (each a whole ``torch.save`` archive) and of those chunks of model tensors that are not
simply their main param cast to the weight's dtype; files that lay beside them (``common.pt``, ``metadata.json``) are
kept as they were under ``carried/files/``. All of it follows from the source's content alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from ...core.boxes import Box
from ...core.errors import CorruptError, UnsupportedError
from ...core.ranges import IntColumn
from ...model.catalog import Placement, TablePlacement
from .boxes import BoxPlacement, box_runs
from .entries import Place
from .model import Bucket, Buffer, Evidence, KeyBox, LocalParam, MegatronCheckpoint, MegatronPart, PartLayout

__all__ = [
    "CARRIED_DATA",
    "CARRIED_FILES",
    "CARRIED_JSON",
    "Carried",
    "CarriedBox",
    "CarriedBucket",
    "CarriedBuffer",
    "CarriedEvidence",
    "CarriedLocal",
    "CarriedObject",
    "CarriedPart",
    "CarriedTensor",
    "Piece",
    "decode",
    "encode",
    "evidence_of",
    "from_checkpoint",
    "rebuilt_runs",
]

CARRIED_JSON = "carried/megatron.json"
CARRIED_DATA = "carried/entries.bin"
CARRIED_FILES = "carried/files/"
"""Files of the source lie below this by their path in it."""
SCHEMA = "zero1ckpt.carried.megatron/1"


class _Entry(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Base of the records: immutable, and an unknown field is an error rather than lost."""


class CarriedKeyBox(_Entry, frozen=True):
    """A box of a model tensor, as ``model.KeyBox``."""

    key: str
    start: tuple[int, ...]
    shape: tuple[int, ...]


class CarriedLocal(_Entry, frozen=True):
    """As ``model.LocalParam``; ``param`` is the index in the part's params, which the manifest lists in order."""

    name: str
    param: int
    start: int
    numel: int
    dtype: str
    grad_dtype: str
    expert: bool = False
    shared_embedding: bool = False
    boxes: tuple[CarriedKeyBox, ...] = ()


class CarriedBucket(_Entry, frozen=True):
    numel_unpadded: int
    numel: int | None
    first: int
    last: int


class CarriedBuffer(_Entry, frozen=True):
    """As ``model.Buffer``."""

    index: int
    param_dtype: str
    grad_dtype: str
    params: tuple[int, ...]
    starts: tuple[int, ...]
    buckets: tuple[CarriedBucket, ...]


class CarriedEvidence(_Entry, frozen=True):
    """As ``model.Evidence``: how far the source's map was proved when this checkpoint was made."""

    by: str
    elements: int
    proved: int | None = None
    ambiguous: tuple[str, ...] = ()
    unproved: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


class CarriedPart(_Entry, frozen=True):
    """As ``model.MegatronPart`` and its ``PartLayout``. ``buffers`` is None where the source was in model space."""

    name: str
    locals: tuple[CarriedLocal, ...]
    evidence: CarriedEvidence
    buffers: tuple[CarriedBuffer, ...] | None = None
    dp_size: int | None = None
    bucket_size: int | None = None
    stated: bool = False
    chained: int | None = None
    group: int = -1
    pipeline_rank: int | None = None
    pad_for_high_nccl_busbw: bool = False

    @property
    def local_params(self) -> tuple[LocalParam, ...]:
        return tuple(_local(row) for row in self.locals)

    @property
    def layout(self) -> PartLayout | None:
        if self.buffers is None:
            return None
        buffers = tuple(map(_buffer, self.buffers))
        return PartLayout(buffers, self.dp_size, self.bucket_size, self.stated, self.pad_for_high_nccl_busbw)


class CarriedBox(_Entry, frozen=True):
    """One chunk of a model tensor. Either its elements lie at byte ``at`` of ``carried/entries.bin``, or they are the
    main param cast to the tensor's dtype: then it lies inside box ``box`` of local param ``local`` of part ``part``
    (see ``rebuilt_runs``). A chunk without elements has ``at`` 0.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    at: int | None = None
    part: str = ""
    local: int = -1
    box: int = 0

    @property
    def rebuilt(self) -> bool:
        return self.at is None


class CarriedTensor(_Entry, frozen=True):
    """One tensor of the model, or another that is no state of a param."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[CarriedBox, ...]


class CarriedObject(_Entry, frozen=True):
    """An object's archive, as it lay in the source: bytes [at, at + nbytes) of ``carried/entries.bin``."""

    key: str
    at: int
    nbytes: int


class Carried(_Entry, frozen=True):
    """The content of ``carried/megatron.json``.

    ``common_in``: "file" (``common.pt``, to Megatron-Core 0.18) or "entry" (an object, from 0.19 on). ``files``: paths
    of the source's files that are kept below ``carried/files/``.
    """

    schema: str
    format: str
    container: str
    common_in: str
    step: int
    iteration: int | None
    parts: tuple[CarriedPart, ...]
    tensors: tuple[CarriedTensor, ...]
    objects: tuple[CarriedObject, ...]
    files: tuple[str, ...]
    notices: tuple[str, ...] = ()

    def part(self, name: str) -> CarriedPart:
        """Raises ``CorruptError`` for a part that it does not describe."""
        for part in self.parts:
            if part.name == name:
                return part
        raise CorruptError("it does not describe a part of the checkpoint", file=CARRIED_JSON, found=name)


def encode(carried: Carried) -> bytes:
    """The bytes of ``carried/megatron.json``. Pure."""
    return msgspec.json.format(msgspec.json.encode(carried), indent=1) + b"\n"


def decode(data: bytes, file: object = CARRIED_JSON) -> Carried:
    """Inverse of ``encode``. Raises ``CorruptError``, and ``UnsupportedError`` for another version."""
    try:
        schema = msgspec.json.decode(data, type=_OnlySchema).schema
        if schema != SCHEMA:
            raise UnsupportedError("another version", file=file, found=schema, expected=SCHEMA)
        return msgspec.json.decode(data, type=Carried)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"it cannot be parsed: {error}", file=file) from error


class _OnlySchema(msgspec.Struct):
    schema: str


# ---------------------------------------------------------------------------------------------------- from a checkpoint


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes to copy to byte ``at`` of ``carried/entries.bin``: of chunk ``chunk``, or where ``place`` says."""

    key: str
    at: int
    nbytes: int
    chunk: int = -1
    place: Place | None = None


def from_checkpoint(checkpoint: MegatronCheckpoint) -> tuple[Carried, list[Piece]]:
    """What is kept of a checkpoint whose map is proved (``proving.prove``), and what to copy into ``entries.bin``.

    Model tensors of params that are not proved are copied. Of the legacy container whole files are kept, less the
    optimizer's state, and no tensors or objects. Reads no tensor.
    """
    collector = _Collector(checkpoint)
    apart = checkpoint.container != "torch"  # whose entries lie in files that are kept whole
    objects = tuple(collector.object(key) for key in sorted(_other_objects(checkpoint)) if apart)
    tensors = tuple(collector.tensor(key) for key in sorted(_other_tensors(checkpoint)) if apart)
    carried = Carried(
        SCHEMA,
        checkpoint.format,
        checkpoint.container,
        checkpoint.entries.common_in,
        checkpoint.step,
        checkpoint.iteration,
        tuple(_carried_part(part) for part in checkpoint.parts.values()),
        tensors,
        objects,
        tuple(sorted(_other_files(checkpoint))),
        checkpoint.notices,
    )
    return carried, collector.pieces


class _Collector:
    """Gives each object and chunk its place in ``entries.bin``, end to end."""

    def __init__(self, checkpoint: MegatronCheckpoint) -> None:
        self.checkpoint = checkpoint
        self.pieces: list[Piece] = []
        self.end = 0
        self._homes = _homes(checkpoint.parts)

    def object(self, key: str) -> CarriedObject:
        entries = self.checkpoint.entries
        nbytes = entries.objects[key]
        return CarriedObject(key, self._add(key, nbytes, place=entries.object_place(key)), nbytes)

    def tensor(self, key: str) -> CarriedTensor:
        tensor = self.checkpoint.entries.tensors[key]
        boxes = []
        rows = zip(tensor.offsets.tolist(), tensor.sizes.tolist(), tensor.chunks.tolist(), strict=True)
        for start, shape, chunk in sorted(rows):
            box = Box(tuple(start), tuple(shape))
            home = self._home(key, tensor.dtype, box)
            if home is None:
                nbytes = int(self.checkpoint.entries.chunks.nbytes[chunk])
                boxes.append(CarriedBox(box.start, box.shape, self._add(key, nbytes, chunk=chunk) if box.size else 0))
            else:
                boxes.append(CarriedBox(box.start, box.shape, None, *home))
        return CarriedTensor(key, tensor.dtype, tensor.shape, tuple(boxes))

    def _add(self, key: str, nbytes: int, *, chunk: int = -1, place: Place | None = None) -> int:
        at = self.end
        self.pieces.append(Piece(key, at, nbytes, chunk, place))
        self.end += nbytes
        return at

    def _home(self, key: str, dtype: str, box: Box) -> tuple[str, int, int] | None:
        """The proved param that a chunk lies in as a whole: part, local param and its box; None where there is none."""
        for part, local, index, home, stored in self._homes.get(key, ()):
            if stored == dtype and box.size and _inside(box, home):
                return part, local, index
        return None


def _homes(parts: Mapping[str, MegatronPart]) -> dict[str, list[tuple[str, int, int, Box, str]]]:
    """For each key of the model the boxes that proved params hold: part, local param, box of it, the box, its dtype."""
    homes: dict[str, list[tuple[str, int, int, Box, str]]] = {}
    for name, part in parts.items():
        if part.evidence.proved is None:
            continue
        unproved = set(part.evidence.unproved)
        params = part.catalog.state.params
        for i, local in enumerate(part.local_params):
            if params[local.param].name in unproved or local.name in unproved:
                continue
            for k, held in enumerate(local.boxes):
                homes.setdefault(held.key, []).append((name, i, k, held.box, local.dtype))
    return homes


def _inside(box: Box, home: Box) -> bool:
    return len(box.start) == len(home.start) and all(
        low <= start and start + size <= low + whole
        for start, size, low, whole in zip(box.start, box.shape, home.start, home.shape, strict=True)
    )


_STATE_OBJECT = re.compile(r"\.param_state/shard_[\d.]+_[\d.]+$")
"""Objects that hold all state of a data-parallel group (dp_zero_gather_scatter): it is in the slots."""
_STATE_FILES = re.compile(r"(^|/)(distrib_optim\.pt|__\d+_\d+\.distcp|\.metadata|[^/]*\.sync/.*)$")


def _other_objects(checkpoint: MegatronCheckpoint) -> Iterator[str]:
    return (key for key in checkpoint.entries.objects if not _STATE_OBJECT.search(key))


def _other_tensors(checkpoint: MegatronCheckpoint) -> Iterator[str]:
    """Tensors of the model, and those in which no part holds state."""
    entries = checkpoint.entries
    state = np.zeros(len(entries.chunks.nbytes), np.bool_)
    for part in checkpoint.parts.values():
        state[_chunks_of(part.catalog.placement)] = True
    model = set(checkpoint.model_keys)
    for key, tensor in entries.tensors.items():
        if key in model or not state[tensor.chunks].any():
            yield key


def _chunks_of(placement: Placement) -> IntColumn:
    """The chunks in which a part's state lies."""
    if isinstance(placement, TablePlacement):
        return np.unique(placement.table.blob)
    assert isinstance(placement, BoxPlacement)
    return np.unique(np.array([piece.chunk for piece in placement.pieces], np.int64))


def _other_files(checkpoint: MegatronCheckpoint) -> Iterator[str]:
    """Files that are kept whole: not those whose content is kept by key."""
    entries = checkpoint.entries
    held = {entries.object_place(key)[0] for key in entries.objects} if checkpoint.container == "zarr" else set()
    arrays = tuple(f"{key}/" for key in entries.tensors) if checkpoint.container == "zarr" else ()
    for path in entries.files:
        if path not in held and not _STATE_FILES.search(path) and not (arrays and path.startswith(arrays)):
            yield path


def _carried_part(part: MegatronPart) -> CarriedPart:
    layout, proof = part.layout, part.evidence
    return CarriedPart(
        part.name,
        tuple(_carried_local(local) for local in part.local_params),
        CarriedEvidence(
            proof.by,
            proof.elements,
            proof.proved,
            tuple(proof.ambiguous),
            tuple(proof.unproved),
            tuple(proof.unknown),
        ),
        None if layout is None else tuple(map(_carried_buffer, layout.buffers)),
        layout.dp_size if layout else None,
        layout.bucket_size if layout else None,
        layout.stated if layout else False,
        part.chained,
        part.group,
        part.pipeline_rank,
        layout.pad_for_high_nccl_busbw if layout else False,
    )


def _carried_local(local: LocalParam) -> CarriedLocal:
    boxes = tuple(CarriedKeyBox(held.key, held.box.start, held.box.shape) for held in local.boxes)
    return CarriedLocal(
        local.name,
        local.param,
        local.start,
        local.numel,
        local.dtype,
        local.grad_dtype,
        local.expert,
        local.shared_embedding,
        boxes,
    )


def _local(row: CarriedLocal) -> LocalParam:
    boxes = tuple(KeyBox(held.key, Box(held.start, held.shape)) for held in row.boxes)
    return LocalParam(
        row.name,
        row.param,
        row.start,
        row.numel,
        row.dtype,
        row.grad_dtype,
        row.expert,
        row.shared_embedding,
        boxes,
    )


def _carried_buffer(buffer: Buffer) -> CarriedBuffer:
    buckets = tuple(CarriedBucket(b.numel_unpadded, b.numel, b.first, b.last) for b in buffer.buckets)
    return CarriedBuffer(
        buffer.index, buffer.param_dtype, buffer.grad_dtype, tuple(buffer.params), tuple(buffer.starts), buckets
    )


def _buffer(row: CarriedBuffer) -> Buffer:
    buckets = tuple(Bucket(b.numel_unpadded, b.numel, b.first, b.last) for b in row.buckets)
    return Buffer(row.index, row.param_dtype, row.grad_dtype, row.params, row.starts, buckets)


def evidence_of(part: CarriedPart) -> Evidence:
    """The evidence of a carried part, as the model has it."""
    proof = part.evidence
    return Evidence(proof.by, proof.elements, proof.proved, proof.ambiguous, proof.unproved, proof.unknown)


# ------------------------------------------------------------------------------------------------------- the way back


def rebuilt_runs(
    local: LocalParam, index: int, start: Sequence[int], shape: Sequence[int]
) -> tuple[IntColumn, IntColumn, int]:
    """Where the elements of a chunk lie in its main param: the chunk is in box ``index`` of ``local``. Pure.

    The flattened chunk is runs of one size, in order: first element of each in the chunk, first element of each in the
    flattened param (``part.catalog.state.params[local.param]``), and that size.
    """
    home = local.boxes[index].box
    begin = local.start + sum(held.box.size for held in local.boxes[:index])
    inside = Box(tuple(a - b for a, b in zip(start, home.start, strict=True)), tuple(shape))
    first, run = box_runs(home.shape, inside)
    return np.arange(len(first), dtype=np.int64) * run, begin + first, run

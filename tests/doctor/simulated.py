"""Megatron-LM #5077 as a function: from true state, the state that such a save would have stored.

Buffers are laid out by ``core.layout``, which equals Megatron-Core's. Everything a real job does is done on arrays:
tensor-parallel cuts, pipeline stages with a copy of tied embeddings, fused halves, experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from zero1ckpt.core.boxes import Box
from zero1ckpt.core.layout import BufferKey, LayoutRules, layout_buffer
from zero1ckpt.doctor.casts import cast
from zero1ckpt.doctor.subject import Array, Piece, Sizes, Subject, SubjectParam

SLOTS = ("fp32_param", "exp_avg", "exp_avg_sq")
_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"


@dataclass(frozen=True)
class Model:
    """A GPT in registration order: name, global shape, the axis that tensor parallelism cuts, and into how many halves.

    ``young``: norms are 1 and biases 0 in the weights' dtype.
    """

    layers: int = 2
    hidden: int = 24
    ffn: int = 32
    vocab: int = 132
    tied: bool = True
    gated: bool = False
    experts: int = 0

    def rows(self) -> Iterator[tuple[str, tuple[int, ...], int | None, int]]:
        h, f = self.hidden, self.ffn
        yield _EMBEDDING, (self.vocab, h), 0, 1
        yield "embedding.position_embeddings.weight", (16, h), None, 1
        for i in range(self.layers):
            p = f"decoder.layers.{i}."
            yield p + "self_attention.linear_qkv.layer_norm_weight", (h,), None, 1
            yield p + "self_attention.linear_qkv.layer_norm_bias", (h,), None, 1
            yield p + "self_attention.linear_proj.weight", (h, h), 1, 1
            yield p + "self_attention.linear_proj.bias", (h,), None, 1
            yield p + "self_attention.linear_qkv.weight", (3 * h, h), 0, 1
            yield p + "self_attention.linear_qkv.bias", (3 * h,), 0, 1
            yield p + "mlp.linear_fc1.layer_norm_weight", (h,), None, 1
            yield p + "mlp.linear_fc1.layer_norm_bias", (h,), None, 1
            if self.experts:
                yield p + "mlp.router.weight", (self.experts, h), None, 1
                yield p + "mlp.experts.experts.linear_fc1.weight", (self.experts, f, h), None, 1
                yield p + "mlp.experts.experts.linear_fc2.weight", (self.experts, h, f), None, 1
                continue
            yield p + "mlp.linear_fc1.weight", ((2 if self.gated else 1) * f, h), 0, 2 if self.gated else 1
            yield p + "mlp.linear_fc2.weight", (h, f), 1, 1
            yield p + "mlp.linear_fc2.bias", (h,), None, 1
        yield "decoder.final_layernorm.weight", (h,), None, 1
        yield "decoder.final_layernorm.bias", (h,), None, 1
        if not self.tied:
            yield _OUTPUT, (self.vocab, h), 0, 1


@dataclass(frozen=True)
class Job:
    """``bucket_size`` acts on the first stage alone, as in Megatron-Core."""

    dp: int = 2
    tp: int = 1
    pp: int = 1
    ep: int = 1
    bucket_size: int | None = None
    high_busbw: bool = False
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class _Local:
    """A rank's param (``core.layout.LayoutParam``)."""

    name: str
    param: int
    boxes: tuple[Box, ...]
    stored: bool
    shared_embedding: bool

    @property
    def numel(self) -> int:
        return sum(box.size for box in self.boxes)

    @property
    def buffer_key(self) -> BufferKey:
        return BufferKey("bfloat16", "float32")

    def gather(self, values: Array) -> Array:
        return np.concatenate([values[box.slices].reshape(-1) for box in self.boxes])

    def scatter(self, flat: Array, into: Array) -> None:
        at = 0
        for box in self.boxes:
            into[box.slices] = flat[at : at + box.size].reshape(box.shape)
            at += box.size


@dataclass
class MemoryValues:
    slots: dict[tuple[int, str], Array]
    weights: dict[int, Array]

    def slot(self, param: int, slot: str) -> Array | None:
        return self.slots.get((param, slot))

    def weight(self, param: int) -> Array | None:
        return self.weights.get(param)


@dataclass
class Simulated:
    """``lost``: elements of each param that no stored window shows, by the rule itself."""

    subject: Subject
    truth: dict[tuple[int, str], Array]
    lost: dict[int, Array] = field(default_factory=dict)
    shifted: bool = False


def boxes_of(shape: Sequence[int], axis: int | None, halves: int, tp: int, rank: int) -> tuple[Box, ...]:
    if axis is None:
        return (Box((0,) * len(shape), tuple(shape)),)
    size = shape[axis] // (tp * halves)
    made = []
    for half in range(halves):
        start, span = [0] * len(shape), list(shape)
        start[axis], span[axis] = (half * tp + rank) * size, size
        made.append(Box(tuple(start), tuple(span)))
    return tuple(made)


def simulate(
    model: Model, job: Job, rng: np.random.Generator, *, young: bool = False, fixed: bool = False
) -> Simulated:
    """What a job would have saved. ``fixed``: by a version in which the fault is corrected."""
    rows = list(model.rows())
    truth = {
        (i, slot): _values(name, shape, slot, rng, young) for i, (name, shape, *_) in enumerate(rows) for slot in SLOTS
    }
    stored = {key: np.zeros_like(values) for key, values in truth.items()}
    pieces: dict[int, list[Piece]] = {i: [] for i in range(len(rows))}
    made = Simulated(Subject("", "megatron:fully_reshardable", (), {}, MemoryValues({}, {})), truth)
    seen: set[str] = set()
    for stage in range(job.pp):
        for rank in range(job.tp):
            held = _held(model, job, rows, stage, rank)
            _save(held, job, stage, truth, stored, made, fixed)
            _list(held, job, stage, rank, pieces, rows, seen)
        for rank in range(job.ep if job.ep > 1 else 0):
            held = [
                local
                for i, (name, *_) in enumerate(rows)
                if name.endswith(_FIRST_OF_EXPERT) and _stage(name, model.layers, job.pp) == stage
                for local in _experts(model, job, i, rank)
            ]
            _save(held, job, stage, truth, stored, made, fixed)
            _list(held, job, stage, rank, pieces, rows, seen)
    params = tuple(
        SubjectParam(name, shape, job.dtype, job.ep > 1 and "experts." in name, tuple(pieces[i]))
        for i, (name, shape, *_) in enumerate(rows)
    )
    weights = {i: cast(truth[i, "fp32_param"].reshape(-1), job.dtype).reshape(row[1]) for i, row in enumerate(rows)}
    dtypes = dict.fromkeys(SLOTS, "float32")
    made.subject = Subject(
        "", "megatron:fully_reshardable", params, dtypes, MemoryValues(stored, weights), 3, (3,), (), Sizes()
    )
    return made


def _values(name: str, shape: Sequence[int], slot: str, rng: np.random.Generator, young: bool) -> Array:
    values = rng.standard_normal(shape).astype(np.float32)
    if slot == "exp_avg_sq":
        return np.square(values)
    if slot == "fp32_param" and young and "norm" in name:
        return (values * np.float32(1e-5) + np.float32("weight" in name)).astype(np.float32)
    return values * np.float32(0.1)


_FIRST_OF_EXPERT = "experts.linear_fc1.weight"


def _experts(model: Model, job: Job, first: int, rank: int) -> Iterator[_Local]:
    """A rank's experts of one layer, one after the other; params ``first`` and ``first + 1`` hold them all."""
    each = model.experts // job.ep
    shapes = ((model.ffn, model.hidden), (model.hidden, model.ffn))
    for expert in range(rank * each, (rank + 1) * each):
        for k, shape in enumerate(shapes):
            box = Box((expert, 0, 0), (1, *shape))
            yield _Local(f"{first + k}.{expert}", first + k, (box,), True, False)


def _held(
    model: Model, job: Job, rows: Sequence[tuple[str, tuple[int, ...], int | None, int]], stage: int, rank: int
) -> list[_Local]:
    tied = model.tied and job.pp > 1
    held = []
    for i, (name, shape, axis, halves) in enumerate(rows):
        if ".experts." in name:
            if job.ep == 1 and name.endswith(_FIRST_OF_EXPERT) and _stage(name, model.layers, job.pp) == stage:
                held += _experts(model, job, i, 0)
        elif _stage(name, model.layers, job.pp) == stage:
            stored = axis is not None or rank == 0
            shared = tied and name == _EMBEDDING
            held.append(_Local(name, i, boxes_of(shape, axis, halves, job.tp, rank), stored, shared))
    if tied and stage == job.pp - 1:
        name, shape, axis, halves = rows[0]
        held.append(_Local(_OUTPUT, 0, boxes_of(shape, axis, halves, job.tp, rank), False, True))
    return held


def _stage(name: str, layers: int, pp: int) -> int:
    if name.startswith("decoder.layers."):
        return int(name.split(".")[2]) * pp // layers
    return 0 if name.startswith("embedding") else pp - 1


def _save(
    held: Sequence[_Local],
    job: Job,
    stage: int,
    truth: dict[tuple[int, str], Array],
    stored: dict[tuple[int, str], Array],
    made: Simulated,
    fixed: bool,
) -> None:
    rules = LayoutRules(job.dp, job.bucket_size if stage == 0 else None, pad_for_high_nccl_busbw=job.high_busbw)
    layout = layout_buffer(BufferKey("bfloat16", "float32"), held, range(len(held)), rules)
    bucket = layout.bucket_of
    compact_of_bucket = np.concatenate(([0], np.cumsum(layout.bucket_numel_unpadded)))[:-1]
    compact = layout.start - layout.bucket_offset[bucket] + compact_of_bucket[bucket]
    owner = np.full(layout.numel_unpadded, -1, np.int64)
    for place, index in enumerate(layout.param.tolist()):
        owner[compact[place] : compact[place] + held[index].numel] = place
    for slot in SLOTS:
        world = np.zeros(layout.numel_unpadded, np.float32)
        for place, index in enumerate(layout.param.tolist()):
            world[compact[place] : compact[place] + held[index].numel] = held[index].gather(
                truth[held[index].param, slot]
            )
        padded = np.concatenate((world, np.zeros(layout.numel, np.float32)))
        for place, index in enumerate(layout.param.tolist()):
            at = int((compact if fixed else layout.start)[place])
            if held[index].stored:
                held[index].scatter(padded[at : at + held[index].numel], stored[held[index].param, slot])
    shown = np.zeros(layout.numel_unpadded + layout.numel, np.bool_)
    for place, index in enumerate(layout.param.tolist()):
        at = int((compact if fixed else layout.start)[place])
        if held[index].stored:
            shown[at : at + held[index].numel] = True
            made.shifted |= not fixed and at != int(compact[place])
    for place, index in enumerate(layout.param.tolist()):
        local = held[index]
        if local.stored:
            shape = truth[local.param, SLOTS[0]].shape
            mask = made.lost.setdefault(local.param, np.zeros(shape, np.bool_))
            local.scatter(~shown[compact[place] : compact[place] + local.numel], mask)


def _list(
    held: Sequence[_Local],
    job: Job,
    stage: int,
    rank: int,
    pieces: dict[int, list[Piece]],
    rows: Sequence[tuple[str, tuple[int, ...], int | None, int]],
    seen: set[str],
) -> None:
    """The listing of the file: ranks one after the other, each in the order of its buffer, params spread over them."""
    for dp in range(job.dp):
        writer = (stage * job.dp + dp) * job.tp + rank
        for place, local in enumerate(reversed(held)):
            if local.stored and place % job.dp == dp:
                key = ".".join(part for part in rows[local.param][0].split(".") if not part.isdecimal())
                order = (len(seen) if key not in seen else 0) + 1000 * writer + place
                for box in local.boxes:
                    pieces[local.param].append(Piece(box, writer, order))
                seen.add(key)

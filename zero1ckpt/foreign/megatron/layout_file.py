"""A file in which a training run writes down how its params lie in Megatron's buffers.

It is needed where a checkpoint does not say so: a map that the content cannot decide, or a target in buckets from a
source in model space. Three lines in the training script, after the optimizer is made, write it::

    from zero1ckpt.foreign.megatron.layout_file import describe_optimizer, write_layout
    rows = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(rows, describe_optimizer(optimizer, model))
    write_layout("layout.json", rows) if torch.distributed.get_rank() == 0 else None

``model`` is Megatron's list of model chunks (or one), ``optimizer`` what ``get_megatron_optimizer`` returned. Nothing
of torch or Megatron is imported here: their objects are asked for attributes only.

The file is JSON (``LayoutFile``): a group for each data-parallel group of each optimizer, its buffers in order, and for
each param its place, its name and the boxes of the model's tensors that it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from ...core.boxes import Box
from ...core.errors import CorruptError, MissingError, UnsupportedError
from ...core.layout import HIGH_BUSBW_ALIGN, LayoutRules
from ...storage.local import replace_file
from .model import Bucket, Buffer, KeyBox, LocalParam, PartLayout

__all__ = [
    "SCHEMA",
    "LayoutBox",
    "LayoutBucket",
    "LayoutBuffer",
    "LayoutFile",
    "LayoutGroup",
    "LayoutParam",
    "describe_optimizer",
    "read_layout",
    "write_layout",
]

SCHEMA = "zero1ckpt.megatron_layout/1"
_MAX_BYTES = 1 << 30


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the records: immutable, and an unknown field is an error rather than lost."""


class LayoutBox(_Row, frozen=True):
    """A box of the tensor ``key`` of the model, of global shape ``shape``. Flattened, it is a run of the param."""

    key: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def box(self) -> KeyBox:
        return KeyBox(self.key, Box(self.start, self.size))


class LayoutParam(_Row, frozen=True):
    """A param at elements [start, end) of its buffer. ``name``: as the model names it, without wrappers' prefixes."""

    name: str
    start: int
    end: int
    shape: tuple[int, ...]
    shared_embedding: bool = False
    boxes: tuple[LayoutBox, ...] = ()

    @property
    def numel(self) -> int:
        return self.end - self.start


class LayoutBucket(_Row, frozen=True):
    """Elements [offset, offset + numel) of a buffer, of which ``numel_unpadded`` end with the last param."""

    offset: int
    numel: int
    numel_unpadded: int


class LayoutBuffer(_Row, frozen=True):
    """``params`` in place order. dtypes by torch's names."""

    param_dtype: str
    grad_dtype: str
    expert: bool
    buckets: tuple[LayoutBucket, ...]
    params: tuple[LayoutParam, ...]


class LayoutGroup(_Row, frozen=True):
    """One data-parallel group. ``group``: Megatron's ``data_parallel_group_idx``; ``chained``: which optimizer, None
    where there is one; ``dp_size``: ranks of the optimizer instance.
    """

    group: int
    chained: int | None
    dp_size: int
    pipeline_rank: int
    buffers: tuple[LayoutBuffer, ...]

    @property
    def label(self) -> str:
        return f"{'' if self.chained is None else f'chained_{self.chained}.'}dp_group_idx_{self.group}"

    @property
    def local_params(self) -> tuple[LocalParam, ...]:
        """Params in registration order, buffer after buffer; ``param`` and ``start`` are not known here (-1, 0)."""
        return tuple(
            LocalParam(
                row.name,
                -1,
                0,
                row.numel,
                buffer.param_dtype,
                buffer.grad_dtype,
                buffer.expert,
                row.shared_embedding,
                tuple(held.box for held in row.boxes),
            )
            for buffer in self.buffers
            for row in reversed(buffer.params)
        )

    @property
    def layout(self) -> PartLayout:
        """The same places as ``model.PartLayout``: params are indices of ``local_params``."""
        made, before = [], 0
        for index, buffer in enumerate(self.buffers):
            count = len(buffer.params)
            made.append(_buffer(index, buffer, tuple(before + count - 1 - place for place in range(count))))
            before += count
        return PartLayout(tuple(made), self.dp_size, self.bucket_size, True, self.pad_for_high_nccl_busbw)

    @property
    def pad_for_high_nccl_busbw(self) -> bool:
        """Whether padded sizes are multiples of 65536 where the dp size alone asks for less."""
        buckets = [bucket for buffer in self.buffers for bucket in buffer.buckets]
        plain = LayoutRules(self.dp_size).bucket_end_align
        more = any(bucket.numel != -(-bucket.numel_unpadded // plain) * plain for bucket in buckets)
        return more and not any(bucket.numel % HIGH_BUSBW_ALIGN for bucket in buckets)

    @property
    def bucket_size(self) -> int | None:
        """A threshold that gives these buckets: the smallest of those that were closed by it; None without any."""
        sizes = []
        for buffer in self.buffers:
            for (bucket, rows), (_, after) in pairwise(_by_bucket(buffer)):
                if not any(row.shared_embedding for row in (*rows, *after)):
                    sizes.append(max(row.end for row in rows) - bucket.offset)
        return min(sizes, default=None)


class LayoutFile(_Row, frozen=True):
    """The whole file."""

    schema: str
    groups: tuple[LayoutGroup, ...]

    def group(self, chained: int | None, group: int) -> LayoutGroup | None:
        """The row of one data-parallel group."""
        return next((row for row in self.groups if (row.chained, row.group) == (chained, group)), None)


def _buffer(index: int, buffer: LayoutBuffer, params: tuple[int, ...]) -> Buffer:
    buckets, starts, first = [], [], 0
    for bucket, rows in _by_bucket(buffer):
        buckets.append(Bucket(bucket.numel_unpadded, bucket.numel, first, first + len(rows)))
        starts += [row.start - bucket.offset for row in rows]
        first += len(rows)
    return Buffer(index, buffer.param_dtype, buffer.grad_dtype, params, tuple(starts), tuple(buckets))


def _by_bucket(buffer: LayoutBuffer) -> Iterator[tuple[LayoutBucket, list[LayoutParam]]]:
    for bucket in buffer.buckets:
        end = bucket.offset + bucket.numel
        yield bucket, [row for row in buffer.params if bucket.offset <= row.start < end]


# -------------------------------------------------------------------------------------------------------------- reading


def read_layout(path: Path) -> LayoutFile:
    """A layout file, checked. Raises ``MissingError``, ``CorruptError``, ``UnsupportedError``."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise CorruptError("the layout file is larger than one can be", file=path, found=path.stat().st_size)
        data = path.read_bytes()
    except OSError as error:
        raise MissingError(f"the layout file cannot be read: {error.strerror}", file=path) from error
    try:
        schema = msgspec.json.decode(data, type=_OnlySchema).schema
        if schema != SCHEMA:
            raise UnsupportedError("another kind of layout file", file=path, found=schema, expected=SCHEMA)
        found = msgspec.json.decode(data, type=LayoutFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"the layout file cannot be parsed: {error}", file=path) from error
    for group in found.groups:
        _check_group(group, path)
    labels = [group.label for group in found.groups]
    if len(set(labels)) != len(labels):
        raise CorruptError("the layout file has a data-parallel group twice", file=path)
    return found


class _OnlySchema(msgspec.Struct):
    schema: str


def _check_group(group: LayoutGroup, path: Path) -> None:
    if group.dp_size < 1 or group.group < 0 or group.pipeline_rank < 0 or (group.chained or 0) < 0:
        raise CorruptError("a data-parallel group has an impossible number", file=path, found=group.label)
    names = [row.name for buffer in group.buffers for row in buffer.params]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise CorruptError("a param lies in two places", file=path, param=twice)
    for buffer in group.buffers:
        _check_buffer(buffer, group, path)


def _check_buffer(buffer: LayoutBuffer, group: LayoutGroup, path: Path) -> None:
    """Buckets tile the buffer, params lie in them in order, and boxes make up params."""
    at = 0
    for bucket in buffer.buckets:
        if bucket.offset != at or not 0 <= bucket.numel_unpadded <= bucket.numel or bucket.numel % group.dp_size:
            raise CorruptError(f"buckets of {group.label} do not follow each other", file=path, found=bucket.offset)
        at += bucket.numel
    for before, row in pairwise(buffer.params):
        if row.start < before.end:
            raise CorruptError("params overlap in their buffer, or are not in its order", file=path, param=row.name)
    held = sum(len(rows) for _, rows in _by_bucket(buffer))
    for bucket, rows in _by_bucket(buffer):
        for row in rows:
            _check_param(row, bucket, path)
    if held != len(buffer.params):
        raise CorruptError(f"a param of {group.label} lies in no bucket", file=path)


def _check_param(row: LayoutParam, bucket: LayoutBucket, path: Path) -> None:
    sound = row.numel == prod(row.shape) and row.end - bucket.offset <= bucket.numel_unpadded
    for held in row.boxes:
        inside = len(held.shape) == len(held.start) == len(held.size) and all(
            min(low, n) >= 0 and low + n <= whole
            for low, n, whole in zip(held.start, held.size, held.shape, strict=True)
        )
        sound = sound and inside
    if not sound or (row.boxes and sum(prod(held.size) for held in row.boxes) != row.numel):
        raise CorruptError("a param's shape, boxes and place do not fit each other", file=path, param=row.name)


# -------------------------------------------------------------------------------------------- from the training script


def describe_optimizer(optimizer: Any, model: Any) -> list[dict[str, Any]]:
    """This rank's groups of a Megatron distributed optimizer, as plain values. Raises ``UnsupportedError``."""
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    names = {id(param): _plain(name) for chunk in chunks for name, param in chunk.named_parameters()}
    boxes = {}
    for chunk in chunks:
        boxes.update(_boxes_of(_bare(chunk)))
    chained = getattr(optimizer, "chained_optimizers", None) or [optimizer]
    return [
        _describe_one(own, None if len(chained) == 1 else index, names, boxes, _pipeline_rank(chunks))
        for index, own in enumerate(chained)
        if getattr(own, "buffers", None)
    ]


def write_layout(path: str | Path, rows: Iterable[Sequence[Mapping[str, Any]] | None]) -> None:
    """Writes what all ranks described, each group once, in place of a file of that name. Raises ``OutputError``,
    ``CorruptError``.
    """
    groups: dict[tuple[int, int], LayoutGroup] = {}
    for row in rows:
        for item in row or ():
            group = msgspec.convert(item, LayoutGroup)
            twin = groups.setdefault((-1 if group.chained is None else group.chained, group.group), group)
            if twin != group:
                raise CorruptError("two ranks describe one data-parallel group differently", found=group.label)
    made = LayoutFile(SCHEMA, tuple(groups[key] for key in sorted(groups)))
    data = msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n"
    replace_file(Path(path), data)


_WRAPPERS = ("module.", "_orig_mod.")


def _plain(name: str) -> str:
    """A name without the prefixes that wrappers add."""
    while name.startswith(_WRAPPERS):
        name = name.split(".", 1)[1]
    return name


def _bare(chunk: Any) -> Any:
    """The model inside its wrappers (data-parallel, mixed precision)."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _pipeline_rank(chunks: Sequence[Any]) -> int:
    """This rank's pipeline stage, from the process groups of the data-parallel wrapper or of Megatron."""
    import sys

    state = sys.modules.get("megatron.core.parallel_state")
    return int(state.get_pipeline_model_parallel_rank()) if state is not None else 0


def _boxes_of(model: Any) -> dict[int, list[dict[str, Any]]]:
    """Boxes of each param in the model's own tensors, by the param's id; of params without, none."""
    found: dict[int, list[dict[str, Any]]] = {}
    if not hasattr(model, "sharded_state_dict"):
        return found
    for item in _leaves(model.sharded_state_dict()):
        if not hasattr(item, "key") or getattr(item, "data", None) is None:
            continue
        tensors = list(_leaves(item.build())) if hasattr(item, "build_fn") else [item]
        if all(hasattr(tensor, "global_offset") and hasattr(tensor, "global_shape") for tensor in tensors):
            found[id(item.data)] = [_box_row(tensor) for tensor in tensors if hasattr(tensor, "local_shape")]
    return found


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _box_row(tensor: Any) -> dict[str, Any]:
    prepended = int(getattr(tensor, "prepend_axis_num", 0) or 0)
    size = [1] * prepended + [int(n) for n in tensor.local_shape]
    return {
        "key": tensor.key,
        "shape": [int(n) for n in tensor.global_shape],
        "start": [int(n) for n in tensor.global_offset],
        "size": size,
    }


def _describe_one(
    own: Any,
    chained: int | None,
    names: Mapping[int, str],
    boxes: Mapping[int, list[dict[str, Any]]],
    pipeline_rank: int,
) -> dict[str, Any]:
    return {
        "group": int(own.data_parallel_group_idx),
        "chained": chained,
        "dp_size": int(own.data_parallel_group.size()),
        "pipeline_rank": pipeline_rank,
        "buffers": [_describe_buffer(buffer, names, boxes) for buffer in own.buffers],
    }


def _describe_buffer(
    buffer: Any, names: Mapping[int, str], boxes: Mapping[int, list[dict[str, Any]]]
) -> dict[str, Any]:
    params = []
    placed = sorted(buffer.param_index_map.items(), key=lambda row: int(row[1][0]))
    for param, (start, end, _) in placed:
        params.append(
            {
                "name": names[id(param)],
                "start": int(start),
                "end": int(end),
                "shape": [int(n) for n in param.shape],
                "shared_embedding": bool(getattr(param, "shared_embedding", False)),
                "boxes": boxes.get(id(param), []),
            }
        )
    buckets = [
        {"offset": int(b.offset), "numel": int(b.grad_data.numel()), "numel_unpadded": int(b.numel_unpadded)}
        for b in buffer.buckets
    ]
    return {
        "param_dtype": str(buffer.param_dtype).removeprefix("torch."),
        "grad_dtype": str(buffer.grad_dtype).removeprefix("torch."),
        "expert": any(not getattr(param, "allreduce", True) for param, _ in placed),
        "buckets": buckets,
        "params": params,
    }

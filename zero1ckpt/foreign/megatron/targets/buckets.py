"""``dp_reshardable`` as a target: params in buckets, cut at the shards of a data-parallel size. Pure.

One chunk a (rank, fragment of a param), one a gap, in the coordinates of the unpadded bucket; gaps are zeros. What lies
where follows ``core.layout``, which is Megatron's own rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ....core.errors import UnsupportedError
from ....core.layout import BufferKey, BufferLayout, LayoutRules, layout_buffer
from ....encodings.inert_pickle import Dtype, Value
from ....model.state import MAIN_PARAM
from ..model import Buffer, PartLayout
from .files import ChunkRow, Fill
from .origin import OriginPart

__all__ = [
    "BucketRules",
    "PartBuckets",
    "dtype_text",
    "field_of",
    "group_prefix",
    "laid_out",
    "part_buckets",
    "rank_chunks",
]


@dataclass(frozen=True, slots=True)
class BucketRules:
    """What was asked for. ``to_dp``: of the dense params, None to keep it; ``bucket_size``: elements, None for one
    bucket a buffer; ``keep_size``: take the source's instead. ``dense_dp``: the source's.
    """

    to_dp: int | None
    bucket_size: int | None
    keep_size: bool
    dense_dp: int | None


@dataclass(frozen=True)
class PartBuckets:
    """One group's buffers as the target has them, with the group's own dp size."""

    part: OriginPart
    dp_size: int
    buffers: tuple[BufferLayout, ...]

    @property
    def bucket_size(self) -> int | None:
        """The threshold by which buckets were closed; None for one bucket a buffer."""
        return next((b.rules.bucket_size for b in self.buffers if b.rules.bucket_size is not None), None)

    @property
    def per_bucket(self) -> tuple[Value, Value]:
        """Values of ``per_bucket_numel`` and ``per_bucket_numel_unpadded``."""
        padded, unpadded = [], []
        for buffer in self.buffers:
            key = (Dtype(buffer.key.param_dtype), Dtype(buffer.key.grad_dtype))
            padded.append({key: buffer.bucket_numel.tolist()})
            unpadded.append({key: buffer.bucket_numel_unpadded.tolist()})
        return padded, unpadded


def part_buckets(part: OriginPart, rules: BucketRules) -> PartBuckets:
    """Lays a group's params out anew, in the order in which they lie. Raises ``UnsupportedError``."""
    layout = part.layout
    if layout is None:
        raise UnsupportedError(
            "the order of the params in their buffers is not known, and a target in buckets needs it",
            found=f"part {part.name!r} in model space" if part.name else "state in model space",
            hint="write it from the training script and pass it with --layout, or choose megatron:fully_reshardable",
        )
    dp_size = _dp_size(part, layout, rules)
    return PartBuckets(part, dp_size, laid_out(part, layout, rules, dp_size))


def laid_out(part: OriginPart, layout: PartLayout, rules: BucketRules, dp_size: int) -> tuple[BufferLayout, ...]:
    """A group's buffers by the rule. Raises ``UnsupportedError``."""
    made = []
    for buffer, first in zip(layout.buffers, first_chunk_mask(part, layout, rules), strict=True):
        size = _bucket_size(part, layout, rules, first)
        own = LayoutRules(dp_size, size, pad_for_high_nccl_busbw=layout.pad_for_high_nccl_busbw)
        key = BufferKey(buffer.param_dtype, buffer.grad_dtype, _is_expert(part, buffer))
        members = tuple(reversed(buffer.params))
        made.append(layout_buffer(key, part.local_params, members, own))
    return tuple(made)


def _is_expert(part: OriginPart, buffer: Buffer) -> bool:
    return any(part.local_params[i].expert for i in buffer.params)


def _dp_size(part: OriginPart, layout: PartLayout, rules: BucketRules) -> int:
    """The group's dp size in the target: all groups' scale as the dense one does."""
    if rules.to_dp is None or rules.dense_dp is None or layout.dp_size is None:
        found = rules.to_dp if layout.dp_size is None or rules.dense_dp is None else layout.dp_size
        if found is None or (part.chained is not None and layout.dp_size is None):
            raise UnsupportedError(
                "the dp size is not known",
                found=f"part {part.name!r}",
                hint="pass --to-dp" if part.chained is None else "the checkpoint does not tell that of its experts",
            )
        return found
    scaled = layout.dp_size * Fraction(rules.to_dp, rules.dense_dp)
    if scaled.denominator != 1:
        raise UnsupportedError(
            f"part {part.name!r} has dp size {layout.dp_size}, which does not scale to a whole number of ranks",
            found=scaled,
            hint="choose a --to-dp that all parts scale to",
        )
    return int(scaled)


def _bucket_size(part: OriginPart, layout: PartLayout, rules: BucketRules, first_chunk: bool) -> int | None:
    """The threshold that acts on a buffer: on the first pipeline stage and model chunk only, as in Megatron."""
    size = layout.bucket_size if rules.keep_size else rules.bucket_size
    if size is None or not first_chunk:
        return None
    if part.pipeline_rank is None:
        raise UnsupportedError(
            "the pipeline stage of a data-parallel group is not known, and buckets are only cut on the first",
            found=f"part {part.name!r}",
            hint="pass --bucket-size none if the run does not overlap its reduction",
        )
    return size if part.pipeline_rank == 0 else None


def first_chunk_mask(part: OriginPart, layout: PartLayout, rules: BucketRules) -> list[bool]:
    """Which buffers are of the first model chunk: a chunk has one of a kind, and kinds repeat with each chunk.

    Raises ``UnsupportedError`` where they do not repeat evenly and it matters.
    """
    kinds = [(buffer.param_dtype, buffer.grad_dtype) for buffer in layout.buffers]
    first = len(dict.fromkeys(kinds))
    even = len(kinds) % max(first, 1) == 0 and kinds == kinds[:first] * (len(kinds) // max(first, 1))
    wanted = layout.bucket_size if rules.keep_size else rules.bucket_size
    if not even and wanted is not None and part.pipeline_rank in (0, None):
        raise UnsupportedError(
            "which buffers are of the first model chunk is not known, and buckets are only cut there",
            found=f"part {part.name!r} with buffers of {kinds}",
            hint="pass --bucket-size none if the run does not overlap its reduction",
        )
    return [even and i < first for i in range(len(kinds))]


def group_prefix(part: OriginPart) -> str:
    """What the keys of a group's state begin with."""
    if part.group < 0:
        raise UnsupportedError("the number of a data-parallel group is not known", found=f"part {part.name!r}")
    chained = "" if part.chained is None else f"chained_{part.chained}."
    return f"{chained}optimizer.distributed.dp_group_idx_{part.group}"


def dtype_text(key: BufferKey) -> str:
    """How a buffer's dtypes stand in a key: Python's text of a tuple of torch dtypes."""
    return f"(torch.{key.param_dtype}, torch.{key.grad_dtype})"


def field_of(slot: str) -> str:
    return "param" if slot == MAIN_PARAM else slot


def bucket_key(part: OriginPart, gbuf: int, key: BufferKey, bucket: int, slot: str) -> str:
    kind = dtype_text(key)
    return f"{group_prefix(part)}.gbuf_idx_{gbuf}.dtype_{kind}.bucket_idx_{bucket}.{field_of(slot)}"


def rank_chunks(made: PartBuckets, rank: int) -> Iterator[ChunkRow]:
    """The chunks that one rank writes: its fragments of each bucket, the gaps between them, for every slot.

    Raises ``UnsupportedError`` where it owns nothing but padding of a bucket.
    """
    for gbuf, buffer in enumerate(made.buffers):
        fragments = buffer.fragments(rank)
        base = buffer.bucket_offset[fragments.bucket]
        rows = zip(
            fragments.bucket.tolist(),
            fragments.param.tolist(),
            (fragments.world - base).tolist(),
            fragments.param_start.tolist(),
            fragments.size.tolist(),
            strict=True,
        )
        own: list[list[tuple[int, int, int, int]]] = [[] for _ in range(buffer.bucket_count)]
        for bucket, *row in rows:
            own[bucket].append((row[0], row[1], row[2], row[3]))
        for bucket, held in enumerate(own):
            yield from _bucket_chunks(made, rank, gbuf, bucket, held)


def _bucket_chunks(
    made: PartBuckets, rank: int, gbuf: int, bucket: int, held: Sequence[tuple[int, int, int, int]]
) -> Iterator[ChunkRow]:
    """``held``: (local param, start in the bucket, start in the local param, size), ascending."""
    buffer = made.buffers[gbuf]
    shard, unpadded = int(buffer.shard_numel[bucket]), int(buffer.bucket_numel_unpadded[bucket])
    if not held:
        raise UnsupportedError(
            f"rank {rank} of {made.dp_size} would own only padding of bucket {bucket}, where Megatron stops",
            found=f"{unpadded} elements in shards of {shard}",
            hint="choose another --to-dp or --bucket-size, or megatron:fully_reshardable",
        )
    state = made.part.catalog.state
    cursor = rank * shard
    pieces: list[tuple[int, int, tuple[int, int] | None]] = []
    for local, start, inside, size in sorted(held, key=lambda row: row[1]):
        if start > cursor:
            pieces.append((cursor, start - cursor, None))
        pieces.append((start, size, (local, inside)))
        cursor = start + size
    end = min((rank + 1) * shard, unpadded)
    if cursor < end:
        pieces.append((cursor, end - cursor, None))
    for slot, spec in enumerate(state.slots):
        key = bucket_key(made.part, gbuf, buffer.key, bucket, spec.name)
        for start, size, content in pieces:
            fills = () if content is None else _fills(made.part, *content, slot, size)
            yield ChunkRow(key, (start,), (size,), fills, spec.dtype)


def _fills(part: OriginPart, local: int, inside: int, slot: int, size: int) -> tuple[Fill, ...]:
    """What elements [inside, inside + size) of a local param are filled with."""
    held = part.local_params[local]
    if not part.pieces:
        return (Fill.run(held.param, slot, held.start + inside, size, 0),)
    item = part.catalog.state.slots[slot].itemsize
    made, before = [], 0
    for piece in part.pieces[local]:
        low, high = max(inside - before, 0), min(inside + size - before, piece.box.size)
        if low < high:
            at = (before + low - inside) * item
            made.append(Fill(piece.param, slot, piece.begin, piece.shape, piece.box, at, low, high))
        before += piece.box.size
    return tuple(made)

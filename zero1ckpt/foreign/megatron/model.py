"""A Megatron checkpoint as values: parts, the params in their buffers, the evidence for where they lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...core.boxes import Box
from ...core.layout import BufferKey
from ...model.catalog import Catalog
from .entries import ChunkSource, Entries

__all__ = [
    "Bucket",
    "Buffer",
    "Doubt",
    "Evidence",
    "KeyBox",
    "LocalParam",
    "MegatronCheckpoint",
    "MegatronPart",
    "PartLayout",
]


class Doubt(str):
    """A notice that stops a conversion: what would be written may not be what the run had."""

    __slots__ = ()


def said_of(part: str, line: str) -> str:
    """A notice, or a doubt, with the part that it is about."""
    return type(line)(f"{part}: {line}") if part else line


@dataclass(frozen=True, slots=True)
class KeyBox:
    """A box of the tensor ``key`` of the model: one chunk of it. Flattened, it is one run of a rank's param."""

    key: str
    box: Box


@dataclass(frozen=True, slots=True)
class LocalParam:
    """A param as the buffers of one model-parallel rank hold it: elements [start, start + numel) of param ``param``.

    Several make up a param where an axis of it stands for modules: each expert is a param of its own in the buffers.
    ``boxes``: its pieces in model space, in flattened order (a fused gate has two); empty where they are not known.
    ``name`` is unique in the part.
    """

    name: str
    param: int
    start: int
    numel: int
    dtype: str
    grad_dtype: str
    expert: bool = False
    shared_embedding: bool = False
    boxes: tuple[KeyBox, ...] = ()

    @property
    def buffer_key(self) -> BufferKey:
        return BufferKey(self.dtype, self.grad_dtype, self.expert)


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket in place order. ``numel`` is the padded size, None where no file states it; ``first:last`` are places
    in the buffer's ``params``.
    """

    numel_unpadded: int
    numel: int | None
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Buffer:
    """One param and grad buffer. ``params``: indices of local params in place order; ``starts``: the first element of
    each in its bucket.
    """

    index: int
    param_dtype: str
    grad_dtype: str
    params: tuple[int, ...]
    starts: tuple[int, ...]
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True, slots=True)
class PartLayout:
    """The buffers of one data-parallel group. ``dp_size``: of the optimizer instance, None where no file tells.

    ``bucket_size``: the threshold that gives these buckets, None for one bucket a buffer. ``stated``: whether the
    checkpoint says so itself (its args), rather than the buckets' sizes.
    """

    buffers: tuple[Buffer, ...]
    dp_size: int | None
    bucket_size: int | None = None
    stated: bool = False
    pad_for_high_nccl_busbw: bool = False


@dataclass(frozen=True, slots=True)
class Evidence:
    """How far a part's map from params to places is proved. Element counts of the main params.

    ``proved``: elements whose cast equals the model's weight. ``ambiguous``: params that another admissible map places
    elsewhere; ``unproved``: params whose cast differs from the weight, or that have no weight to compare with;
    ``unknown``: stretches of buckets that are no known param, by the name of their place.
    ``by``: what the map follows from: "names" in model space, "order" stated by the file, "content", "content and
    order", "sizes and order" where no tensor was read, "layout file".
    """

    by: str
    elements: int
    proved: int | None = None
    ambiguous: tuple[str, ...] = ()
    unproved: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True)
class MegatronPart:
    """One data-parallel group of one optimizer, or all of a model-space checkpoint.

    ``catalog``: params, slots, groups, step, and where the elements lie (blobs are chunks). ``layout``: None in model
    space. ``local_params``: in registration order; in model space one a param. ``chained``: which optimizer of several.
    ``group``: index of the data-parallel group (``dp_group_idx``), -1 in model space.
    """

    name: str
    catalog: Catalog
    local_params: tuple[LocalParam, ...] = ()
    layout: PartLayout | None = None
    evidence: Evidence = field(default_factory=lambda: Evidence("names", 0))
    chained: int | None = None
    group: int = -1
    pipeline_rank: int | None = None


@dataclass(frozen=True)
class MegatronCheckpoint:
    """A described checkpoint. ``format``: "megatron:dp_reshardable" and so on; ``container``: "torch_dist", "zarr" or
    "torch". ``model_keys``: keys of ``entries.tensors`` that are the model's own. ``notices``: what a reader should
    know, a line each.
    """

    entries: Entries
    format: str
    container: str
    step: int
    iteration: int | None
    parts: Mapping[str, MegatronPart]
    model_keys: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()

    @property
    def by_rank(self) -> bool:
        """Whether each model-parallel rank's tensors stand under its own names, as in the legacy files."""
        return self.container == "torch"

    @property
    def source(self) -> ChunkSource:
        return ChunkSource(self.entries.store, self.entries.chunks)

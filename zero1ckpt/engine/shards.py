"""This rank's state: one contiguous 1-D tensor for each (slot, buffer, bucket), and the fragments that view it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import nn

from ..core.layout import Layout
from ..core.ranges import Range
from ..model.state import MAIN_PARAM, ParamSpec, SlotSpec
from .buffers import ParamGradBuffer
from .collectives import Communicator
from .params import dtype_name

__all__ = ["OwnedFragment", "ShardStore", "owned_fragments"]


@dataclass(frozen=True, eq=False)
class OwnedFragment:
    """The part of one param that this rank owns. ``local`` lies in the shard of (buffer, bucket), ``param`` in the
    flattened param. ``main`` is what the inner optimizer trains: a flat view of the main-param shard.
    """

    index: int
    spec: ParamSpec
    buffer: int
    bucket: int
    local: Range
    param: Range
    main: nn.Parameter = field(repr=False)


class ShardStore:
    """Shards by slot. The slots of one buffer lie in one allocation, bucket after bucket; padding is zero.

    ``fp32_param`` of a buffer whose params have the main dtype is this rank's slices of the param buffer itself.
    ``offload``: all of it lies in host memory, ``fp32_param`` too; pinned where the params are on a device.
    """

    def __init__(
        self,
        layout: Layout,
        buffers: Sequence[ParamGradBuffer],
        comm: Communicator,
        main_dtype: torch.dtype,
        *,
        offload: bool = False,
    ) -> None:
        self._layout = layout
        device = buffers[0].params.device
        self._device = torch.device("cpu") if offload else device
        self._pinned = offload and device.type == "cuda"
        self._apart = [offload or buffer.params.dtype != main_dtype for buffer in buffers]
        self._shards: dict[str, list[list[torch.Tensor]]] = {}
        self._dtypes: dict[str, torch.dtype] = {MAIN_PARAM: main_dtype}
        self._shards[MAIN_PARAM] = [
            self._main_shards(number, buffer, comm.of(number), main_dtype) for number, buffer in enumerate(buffers)
        ]

    def _main_shards(
        self, number: int, buffer: ParamGradBuffer, comm: Communicator, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        if self._apart[number]:
            return self._allocate(number, dtype)
        return [comm.own(buffer.bucket_of_params(b)) for b in range(buffer.layout.bucket_count)]

    def _allocate(self, buffer: int, dtype: torch.dtype) -> list[torch.Tensor]:
        offset = self._layout.buffers[buffer].shard_offset.tolist()
        memory = torch.zeros(offset[-1], dtype=dtype, device=self._device, pin_memory=self._pinned)
        return [memory[low:high] for low, high in pairwise(offset)]

    def ensure(self, slot: str, dtype: torch.dtype) -> None:
        """Allocate ``slot`` in every bucket, all zero, where it does not exist."""
        if slot not in self._shards:
            self._dtypes[slot] = dtype
            self._shards[slot] = [self._allocate(i, dtype) for i in range(len(self._layout.buffers))]

    def apart(self, buffer: int) -> bool:
        """Whether main params have memory of their own."""
        return self._apart[buffer]

    def __contains__(self, slot: str) -> bool:
        return slot in self._shards

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        """In order of allocation, ``fp32_param`` first."""
        return tuple(SlotSpec(slot, dtype_name(dtype)) for slot, dtype in self._dtypes.items())

    def shard(self, slot: str, buffer: int, bucket: int) -> torch.Tensor:
        """The contiguous 1-D shard, no copy. Raises ``KeyError`` for a slot that does not exist."""
        return self._shards[slot][buffer][bucket]

    def view(self, slot: str, fragment: OwnedFragment) -> torch.Tensor:
        """The fragment's part of its shard: flat, no copy."""
        local = fragment.local
        return self._shards[slot][fragment.buffer][fragment.bucket][local.start : local.end]

    def dtype(self, slot: str) -> torch.dtype:
        return self._dtypes[slot]


def owned_fragments(
    layout: Layout, specs: Sequence[ParamSpec], store: ShardStore, ranks: Sequence[int]
) -> tuple[OwnedFragment, ...]:
    """All of this rank, by buffer, bucket and place; ``ranks[b]`` is its number in the group of buffer ``b``.

    No param has more than one: buckets hold whole params.
    """
    found = []
    for number, buffer in enumerate(layout.buffers):
        for part in buffer.fragments(ranks[number]):
            shard = store.shard(MAIN_PARAM, number, part.bucket)
            main = nn.Parameter(shard[part.gbuf_local.start : part.gbuf_local.end])
            found.append(
                OwnedFragment(
                    part.param_index, specs[part.param_index], number, part.bucket, part.gbuf_local, part.param, main
                )
            )
    return tuple(found)

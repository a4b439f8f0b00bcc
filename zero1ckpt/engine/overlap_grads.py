"""Reduction of gradients, bucket by bucket: all of it in ``step()``, or each bucket as its last gradient arrives.

Buckets are launched strictly in one order on every rank, whatever order gradients arrive in: messages carry no bucket
number, so ranks that launched in another order would add up each other's buckets without an error.

A launched bucket is being sent: nothing may write to it. A gradient that still comes for one of its params (a second
backward outside ``no_sync()``; a hook that fires again, as under reentrant activation checkpointing with a param used
in two segments) is added to an extra tensor of the bucket's size. In ``step()`` the ranks agree which buckets have one
anywhere; those are reduced a second time, and the two means are added. The sum is right, rounded once more than under
``no_sync()``, and the bucket travels twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..core.errors import UsageError
from .bucket_order import BucketRef
from .buffers import ParamGradBuffer
from .collectives import Communicator, Pending
from .overlap_params import launch_all
from .side_stream import SideStream

__all__ = ["GradReducer"]


class GradReducer:
    """One reduction of all grad buffers at a time. ``order``: every bucket, in the order of launches.

    On a communicator that is given all windows of a bucket at once (``ahead``), the received parts of all buckets in
    flight are alive: (dp - 1) / dp of the gradients on gloo, nothing on NCCL.
    """

    def __init__(
        self,
        order: Sequence[BucketRef],
        buffers: Sequence[ParamGradBuffer],
        tensors: Sequence[torch.Tensor],
        names: Sequence[str],
        comm: Communicator,
        main_dtype: torch.dtype,
        *,
        overlap: bool,
    ) -> None:
        self.order, self.overlap = tuple(order), overlap
        self._buffers, self._tensors, self._names = tuple(buffers), tuple(tensors), tuple(names)
        self._comm, self._main_dtype = comm, main_dtype
        self._side = SideStream(buffers[0].grads.device)
        self._position = [0] * len(self._tensors)
        for position, ref in enumerate(self.order):
            for index in ref.params:
                self._position[index] = position
        self._spare: dict[int, torch.Tensor] = {}
        self._begin_round()

    def _begin_round(self) -> None:
        self.launched = 0
        """Buckets of ``order`` that are under way."""
        self._open = False
        self._pending: list[Pending | None] = []
        self._shards: list[torch.Tensor] = []
        self._extra: dict[int, torch.Tensor] = {}
        self._sent_versions: dict[int, int] = {}
        self._seen: list[bool] = []
        self._missing: list[int] = []

    # ----------------------------------------------------------------------------------------------- during a backward

    def target(self, index: int) -> torch.Tensor:
        """What a gradient of param ``index`` is to be added to: its main grad, or the bucket's extra tensor."""
        position = self._position[index]
        ref = self.order[position]
        buffer = self._buffers[ref.buffer]
        if position >= self.launched:
            return buffer.main_grads[index]
        if position not in self._extra:
            self._extra[position] = self._zeros(position)
        extra = self._extra[position]
        low = int(buffer.layout.start[buffer.layout.place_of[index]] - buffer.layout.bucket_offset[ref.bucket])
        main = buffer.main_grads[index]
        return extra[low : low + main.numel()].view(main.shape)

    def is_launched(self, index: int) -> bool:
        return self._position[index] < self.launched

    def arrived(self, index: int) -> None:
        """Param ``index`` has its gradient of the last micro-batch; launches what has become complete."""
        self._side.note_writer()
        if not self.overlap:
            return
        if not self._open:
            self._open_round()
        if self._seen[index]:
            return
        self._seen[index] = True
        self._missing[self._position[index]] -= 1
        ready = self.launched
        while ready < len(self.order) and self._missing[ready] <= 0:
            ready += 1
        self._launch(ready)

    def _open_round(self) -> None:
        """With the first gradient of the last micro-batch. A param that is frozen by now is not waited for; one that
        was thawed since the last step is: its bucket must not leave without it (churn test).
        """
        self._open = True
        self._seen = [not tensor.requires_grad for tensor in self._tensors]
        self._missing = [sum(not self._seen[index] for index in ref.params) for ref in self.order]

    def _launch(self, end: int) -> None:
        """Launch all buckets before ``end`` that are not under way, as one where the backend can."""
        if end <= self.launched:
            return
        launch_all()
        launches = []
        for position in range(self.launched, end):
            bucket, number = self._bucket(position), self.order[position].buffer
            own = self._comm.of(number).own(bucket)
            same = own.dtype == self._main_dtype
            shard = own if same else torch.empty_like(own, dtype=self._main_dtype)
            launches.append((number, bucket, shard))
            self._shards.append(shard)
            main_grads = self._buffers[number].main_grads
            for index in self.order[position].params:
                self._sent_versions[index] = main_grads[index]._version
        self.launched = end
        tensors = [tensor for _, bucket, shard in launches for tensor in (bucket, shard)]
        self._pending += self._side.begin(lambda: self._comm.begin_buckets(launches, ahead=self.overlap), tensors)

    # --------------------------------------------------------------------------------------------------- in the step

    def extra_flags(self) -> list[bool]:
        """By position: has this rank a second contribution?"""
        return [position in self._extra for position in range(len(self.order))] if self.overlap else []

    def problem(self) -> UsageError | None:
        """A param whose main grad something else wrote to while its bucket was being sent."""
        for index, version in self._sent_versions.items():
            if self._buffers[self.order[self._position[index]].buffer].main_grads[index]._version != version:
                return UsageError(
                    "main_grad was written to after its bucket was sent",
                    param=self._names[index],
                    hint="run all backwards but the last inside no_sync(), or switch overlap_grad_reduce off",
                )
        return None

    def finish(self) -> None:
        """Launch what is left, and wait for all: each shard holds its mean over ranks."""
        self._open = False
        if self.overlap:
            self._launch(len(self.order))
        for position in range(len(self.order)):
            self._launch(min(position + 2, len(self.order)))
            pending = self._pending[position]
            if pending is not None:
                pending.wait()
                self._pending[position] = None
        self._side.forget_writers()

    def finish_extras(self, flags: Sequence[bool]) -> None:
        """Reduce the second contributions; ``flags``: ``extra_flags`` of any rank."""
        for position, anywhere in enumerate(flags):
            if not anywhere:
                continue
            extra = self._extra[position] if position in self._extra else self._zeros(position)
            self._extra[position] = extra
            added = torch.empty_like(self._shards[position])
            self._comm.of(self.order[position].buffer).reduce_scatter(extra, added)
            self._shards[position].add_(added)

    def main_grads(self) -> list[list[torch.Tensor]]:
        """The means, by buffer and bucket; empty before ``finish``."""
        if self._open or len(self._shards) < len(self.order):
            return []
        made: list[list[torch.Tensor]] = [[torch.empty(0)] * b.layout.bucket_count for b in self._buffers]
        for ref, shard in zip(self.order, self._shards, strict=True):
            made[ref.buffer][ref.bucket] = shard
        return made

    def drop(self) -> None:
        """Gradients are spent or thrown away. What is under way is brought to its end first, on all ranks: a rank that
        had launched fewer buckets would take the rest of this round for the next one.
        """
        if self._open:
            self.finish()
        for position, extra in self._extra.items():
            self._spare[position] = extra
        self._begin_round()

    # --------------------------------------------------------------------------------------------------------- helpers

    @property
    def spare_bytes(self) -> int:
        """Bytes for gradients that come after their bucket was sent, in use or kept."""
        return sum(extra.nbytes for held in (self._spare, self._extra) for extra in held.values())

    def _bucket(self, position: int) -> torch.Tensor:
        ref = self.order[position]
        return self._buffers[ref.buffer].bucket_of_grads(ref.bucket)

    def _zeros(self, position: int) -> torch.Tensor:
        """A zero tensor like the bucket, kept from step to step once it was needed."""
        spare = self._spare.pop(position, None)
        return torch.zeros_like(self._bucket(position)) if spare is None else spare.zero_()

"""The update of the main params: where the params are, or on the host (``offload=True``).

Offloaded, main params, inner state and the inner step live in host memory; the device keeps params and gradients. Once
gradients are reduced, unscaled and clipped, all buckets' shards start towards pinned memory on a stream of their own;
bucket by bucket the host waits for one, steps it, and sends the new values back on the same stream, so that while one
bucket is computed others travel both ways. Inner optimizers of other classes than torch's known ones might count steps
in their groups: they step once, when all gradients are there. The host's arithmetic is that of the CPU: a run on CPU
params gives the same bits with and without. The step of the host waits for the device, by necessity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from ..model.state import MAIN_PARAM
from .buffers import ParamGradBuffer
from .collectives import Communicator
from .inner_state import keeps_state_by_param
from .shards import OwnedFragment, ShardStore

__all__ = ["HostLink", "MainUpdate"]

Grads = Sequence[Sequence[torch.Tensor]]
"""This rank's shards of the main gradients, by buffer and bucket."""


class HostLink:
    """Copies between a device and pinned memory, in order, behind the work that is queued when they are asked for.

    On the CPU both sides are one, and nothing is copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._arriving: dict[tuple[int, int], tuple[torch.Tensor, Any]] = {}
        self._pinned: dict[tuple[int, int], torch.Tensor] = {}

    def fetch(self, grads: Grads) -> None:
        """Start to bring all gradients to the host."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for number, shards in enumerate(grads):
            for bucket, shard in enumerate(shards):
                self._arriving[number, bucket] = self._fetch((number, bucket), shard)

    def _fetch(self, key: tuple[int, int], shard: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if self._stream is None:
            return shard, None
        if key not in self._pinned:
            self._pinned[key] = torch.empty(shard.shape, dtype=shard.dtype, pin_memory=True)
        with torch.cuda.stream(self._stream):
            self._pinned[key].copy_(shard, non_blocking=True)
            shard.record_stream(self._stream)
            return self._pinned[key], self._stream.record_event()

    def get(self, number: int, bucket: int) -> torch.Tensor:
        """The shard in host memory; waits for it alone."""
        shard, event = self._arriving.pop((number, bucket))
        if event is not None:
            event.synchronize()
        return shard

    def send(self, main: torch.Tensor, own: torch.Tensor) -> None:
        """Start to copy ``main`` into ``own``, on the device, cast there. ``join`` comes before ``own`` is used."""
        if self._stream is None:
            own.copy_(main)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            own.copy_(main.to(self._device, non_blocking=True))

    def settle(self) -> None:
        """Return when no copy is in flight: host memory may be written to."""
        if self._stream is not None:
            self._stream.synchronize()

    def join(self) -> None:
        """What the device does from now on comes after all copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


class MainUpdate:
    """Steps ``inner`` and brings new main params into the model's. ``link``: None where nothing is offloaded."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        fragments: Sequence[OwnedFragment],
        store: ShardStore,
        buffers: Sequence[ParamGradBuffer],
        comm: Communicator,
        link: HostLink | None,
    ) -> None:
        self._inner, self._fragments, self._store, self._link = inner, tuple(fragments), store, link
        self._buffers, self._comm = tuple(buffers), comm
        self._by_bucket = link is not None and keeps_state_by_param(inner)
        self._sent: set[tuple[int, int]] = set()

    def step(self, grads: Grads, left_out: AbstractSet[int]) -> None:
        """With the gradients of all params but those of ``left_out`` (indices)."""
        if self._link is None:
            self._set(self._fragments, left_out, lambda number, bucket: grads[number][bucket])
            self._inner.step()
            return
        self._link.fetch(grads)
        if not self._by_bucket:
            here = {(n, b): self._link.get(n, b) for n, shards in enumerate(grads) for b in range(len(shards))}
            self._set(self._fragments, left_out, lambda number, bucket: here[number, bucket])
            self._inner.step()
            return
        for number, shards in enumerate(grads):
            for bucket in range(len(shards)):
                self._step_bucket(number, bucket, left_out)

    def _step_bucket(self, number: int, bucket: int, left_out: AbstractSet[int]) -> None:
        assert self._link is not None
        shard = self._link.get(number, bucket)
        mine = [f for f in self._fragments if (f.buffer, f.bucket) == (number, bucket)]
        self._set(mine, left_out, lambda number, bucket: shard)
        self._inner.step()
        for fragment in mine:
            fragment.main.grad = None
        self._link.send(self._store.shard(MAIN_PARAM, number, bucket), self._own(number, bucket))
        self._sent.add((number, bucket))

    def _set(
        self,
        fragments: Sequence[OwnedFragment],
        left_out: AbstractSet[int],
        grads: Callable[[int, int], torch.Tensor],
    ) -> None:
        for fragment in fragments:
            local = fragment.local
            shard = None if fragment.index in left_out else grads(fragment.buffer, fragment.bucket)
            fragment.main.grad = None if shard is None else shard[local.start : local.end]

    def settle(self) -> None:
        """To be called before anything but ``step`` writes to shards."""
        if self._link is not None:
            self._link.settle()

    def _own(self, number: int, bucket: int) -> torch.Tensor:
        """This rank's slice of a bucket of params."""
        return self._comm.of(number).own(self._buffers[number].bucket_of_params(bucket))

    def cast(self, number: int, bucket: int) -> None:
        """The new values of a bucket into this rank's slice of it, where they are not yet."""
        if (number, bucket) in self._sent:
            self._sent.remove((number, bucket))
        elif self._store.apart(number):
            main, own = self._store.shard(MAIN_PARAM, number, bucket), self._own(number, bucket)
            if self._link is None:
                own.copy_(main)
            else:
                self._link.send(main, own)
        if self._link is not None:
            self._link.join()

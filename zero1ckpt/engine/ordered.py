"""Point-to-point messages in flight, and the sums in rank order that are made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .reductions import fixed_sum
from .waiting import Arrivals

if TYPE_CHECKING:
    from .collectives import PointToPointCommunicator

__all__ = ["OrderedReduction", "Works"]

WINDOW = 4 * 1024 * 1024
"""Elements that one rank receives at a time in a point-to-point reduction: two windows of scratch are alive."""


class Works:
    """Posted sends and receives."""

    def __init__(self, works: list[Any], arrivals: Arrivals, what: str) -> None:
        self._works, self._arrivals, self._what = works, arrivals, what
        self._number = arrivals.next()

    def wait(self) -> None:
        for work in self._works:
            self._arrivals.wait(work, self._number, self._what)


class OrderedReduction:
    """A reduce-scatter in flight, window by window: the next window travels while this one is summed.

    ``ahead`` posts all windows at once, since nothing can be posted later without the order of messages depending on
    when a rank comes to wait: then all that is received is alive until the sum.
    """

    def __init__(self, comm: PointToPointCommunicator, bucket: torch.Tensor, out: torch.Tensor, ahead: bool) -> None:
        self._comm, self._bucket, self._out = comm, bucket, out
        self._number = comm.arrivals.next()
        widest = max(comm.slice_of(bucket, k).numel() for k in range(comm.size))
        step = max(1, WINDOW // (comm.size - 1))
        self._windows = [(at, min(at + step, widest)) for at in range(0, widest, step)]
        self._width = min(step, widest)
        self._own = comm.own(bucket).numel()
        self._depth = len(self._windows) if ahead else min(2, len(self._windows))
        self._scratch = comm.take_scratch(self._depth * (comm.size - 1) * self._width, bucket)
        self._works: dict[int, list[Any]] = {}
        for at in range(self._depth if ahead else 1):
            self._post(at)

    def wait(self) -> None:
        for at in range(len(self._windows)):
            if at + 1 < len(self._windows) and at + 1 not in self._works:
                self._post(at + 1)
            for work in self._works.pop(at):
                self._comm.arrivals.wait(work, self._number, "reduce-scatter")
            self._sum(at)
        self._comm.give_scratch(self._scratch)

    def _received(self, at: int) -> dict[int, torch.Tensor]:
        """Where each peer's part of window ``at`` arrives, by rank."""
        low, high = self._windows[at]
        base = (at % self._depth) * (self._comm.size - 1)
        places = {}
        for nth, (k, _) in enumerate(self._comm.peers):
            start = (base + nth) * self._width
            places[k] = self._scratch[start : start + max(0, min(high, self._own) - low)]
        return places

    def _post(self, at: int) -> None:
        low, high = self._windows[at]
        sent = {k: self._comm.slice_of(self._bucket, k)[low:high] for k, _ in self._comm.peers}
        self._works[at] = self._comm.exchange(sent, self._received(at))

    def _sum(self, at: int) -> None:
        low, high = self._windows[at]
        parts = self._received(at)
        parts[self._comm.rank] = self._comm.own(self._bucket)[low:high]
        out = self._out[low:high]
        fixed_sum(self._comm.reduction, [parts[k] for k in range(self._comm.size)], self._comm.rank, out)
        self._comm.to_mean(out)

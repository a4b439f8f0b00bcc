"""A rank's shards as a blob of the copy loop: the live optimizer is one more checkpoint, whose bytes are tensors."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ..core.ranges import IntColumn

__all__ = ["ShardBlobs"]


class ShardBlobs:
    """Source and sink over the tensors of one rank, which lie end to end in its payload.

    ``tensors``: 1-D, contiguous, in payload order. On the CPU their memory is read and written in place; on a device
    bytes are copied in the caller's windows.
    """

    def __init__(self, blob: int, tensors: Sequence[torch.Tensor]) -> None:
        self.blob = blob
        self._bytes = [tensor.detach().view(torch.uint8) for tensor in tensors if tensor.numel()]
        self._ends = np.cumsum([part.numel() for part in self._bytes], dtype=np.int64)
        self._starts = (self._ends - [part.numel() for part in self._bytes]).tolist() if self._bytes else []

    def label(self, blob: int) -> str:
        return f"the optimizer's rank {blob}"

    def pieces(self, blob: int) -> tuple[IntColumn, Sequence[int]] | None:
        return None

    def segments(self, blob: int) -> IntColumn:
        return self._ends

    def view(self, blob: int, at: int, nbytes: int) -> memoryview | None:
        index = bisect_right(self._ends, at)
        part, inside = self._bytes[index], at - self._starts[index]
        if part.device.type != "cpu" or inside + nbytes > part.numel():
            return None
        return part.numpy().data[inside : inside + nbytes]

    def read_run(self, blob: int, at: int, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            host = torch.frombuffer(buffer, dtype=torch.uint8)
            for part, inside, done, size in self._spans(at, buffer.nbytes):
                host[done : done + size].copy_(part[inside : inside + size])
            at += buffer.nbytes

    def write(self, blob: int, at: int, data: memoryview) -> None:
        host = torch.frombuffer(data, dtype=torch.uint8)
        for part, inside, done, size in self._spans(at, data.nbytes):
            part[inside : inside + size].copy_(host[done : done + size])

    def _spans(self, at: int, nbytes: int) -> Iterator[tuple[torch.Tensor, int, int, int]]:
        """(tensor, start in it, start in the run, size) of each tensor that a run of bytes touches."""
        done = 0
        while done < nbytes:
            index = bisect_right(self._ends, at + done)
            inside = at + done - self._starts[index]
            size = min(nbytes - done, self._bytes[index].numel() - inside)
            yield self._bytes[index], inside, done, size
            done += size

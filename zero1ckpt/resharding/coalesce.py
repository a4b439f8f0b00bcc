"""Reads the moves of a window with few calls: neighbours in one blob are read by one vectored call."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..model.protocols import Source
from .plan import Moves

__all__ = ["OVER_READ", "read_moves"]

OVER_READ = 0.04
"""Share of a run that may be bytes between two moves, read into a scratch buffer and thrown away."""
_GAP_MAX = 4096


def read_moves(source: Source, moves: Moves, data: memoryview, at: int) -> None:
    """Fills ``data``, the window that begins at destination byte ``at``, from the source."""
    scratch = memoryview(bytearray(_GAP_MAX))
    for first, last in runs(moves):
        buffers: list[memoryview] = []
        position = int(moves.src_at[first])
        start = position
        for src, dst, nbytes in zip(
            moves.src_at[first:last].tolist(),
            moves.dst_at[first:last].tolist(),
            moves.nbytes[first:last].tolist(),
            strict=True,
        ):
            if src > position:
                buffers.append(scratch[: src - position])
            buffers.append(data[dst - at : dst - at + nbytes])
            position = src + nbytes
        source.read_run(int(moves.src_blob[first]), start, buffers)


def runs(moves: Moves) -> Iterator[tuple[int, int]]:
    """Rows ``[first, last)`` that one read covers: one blob, ascending, gaps small absolutely and relatively."""
    count = len(moves)
    if not count:
        return
    gap = moves.src_at[1:] - (moves.src_at[:-1] + moves.nbytes[:-1])
    near = (moves.src_blob[1:] == moves.src_blob[:-1]) & (gap >= 0) & (gap <= _GAP_MAX)
    breaks = np.concatenate((np.flatnonzero(~near) + 1, [count])).tolist()
    first = 0
    for last in breaks:
        yield from _bounded(moves, first, last)
        first = last


def _bounded(moves: Moves, first: int, last: int) -> Iterator[tuple[int, int]]:
    start, useful, wasted = first, int(moves.nbytes[first]), 0
    sizes = moves.nbytes[first:last].tolist()
    begins = moves.src_at[first:last].tolist()
    for i in range(1, last - first):
        gap = begins[i] - begins[i - 1] - sizes[i - 1]
        if wasted + gap > OVER_READ * (useful + sizes[i]):
            yield start, first + i
            start, useful, wasted = first + i, 0, -gap
        useful += sizes[i]
        wasted += gap
    yield start, last

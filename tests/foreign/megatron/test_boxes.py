"""Boxes of a param and their runs, against numpy's own indexing."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zero1ckpt.core.boxes import Box
from zero1ckpt.foreign.megatron.boxes import BoxPiece, BoxPlacement, box_runs
from zero1ckpt.foreign.megatron.entries import Chunks


@st.composite
def shapes_and_cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[int]]]:
    """A shape of 1 to 4 axes, and where each axis is cut."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    return shape, [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]


def boxes_of(shape: tuple[int, ...], cuts: list[list[int]]) -> list[Box]:
    boxes = []
    for index in np.ndindex(*(len(c) - 1 for c in cuts)):
        low = tuple(cuts[d][i] for d, i in enumerate(index))
        boxes.append(Box(low, tuple(cuts[d][i + 1] - cuts[d][i] for d, i in enumerate(index))))
    return boxes


@given(shapes_and_cuts())
def test_runs_are_the_flat_indices_of_the_box(case: tuple[tuple[int, ...], list[list[int]]]) -> None:
    shape, cuts = case
    flat = np.arange(prod(shape)).reshape(shape)
    for box in boxes_of(shape, cuts):
        starts, run = box_runs(shape, box)
        assert (starts[:, None] + np.arange(run)).reshape(-1).tolist() == flat[box.slices].reshape(-1).tolist()


@given(shapes_and_cuts(), st.data())
def test_every_asked_element_is_found_once_at_its_place(
    case: tuple[tuple[int, ...], list[list[int]]], data: st.DataObject
) -> None:
    """Two slots of 4 and 2 bytes; each box is cut in two fragments that lie in chunks of their own."""
    shape, cuts = case
    pieces: list[BoxPiece] = []
    held: list[tuple[int, int]] = []  # of each chunk: slot and the flat indices
    content: list[list[int]] = []
    flat = np.arange(prod(shape)).reshape(shape)
    for slot in (0, 1):
        for box in boxes_of(shape, cuts):
            values = flat[box.slices].reshape(-1).tolist()
            cut = data.draw(st.integers(0, len(values)))
            for low, high in ((0, cut), (cut, len(values))):
                if high > low:
                    pieces.append(BoxPiece(0, slot, box, low, high - low, len(content)))
                    held.append((slot, high - low))
                    content.append(values[low:high])
    items = (4, 2)
    nbytes = np.array([count * items[slot] for slot, count in held], np.int64)
    chunks = Chunks(nbytes, np.full(len(nbytes), -1), lambda chunk: (str(chunk), 0))
    placement = BoxPlacement((shape,), items, tuple(pieces), chunks)
    size = prod(shape)
    asked = data.draw(
        st.lists(st.tuples(st.integers(0, 1), st.integers(0, size - 1), st.integers(1, size)), max_size=4)
    )
    slot = np.array([a[0] for a in asked], np.int64)
    start = np.array([a[1] for a in asked], np.int64)
    count = np.minimum(np.array([a[2] for a in asked], np.int64), size - start)
    row, found = placement.locate(np.zeros_like(slot), slot, start, count)
    assert (np.diff(row) >= 0).all()
    for i in range(len(asked)):
        got = []
        for _, s, begin, n, blob, at, length in found.take(np.flatnonzero(row == i)).rows():
            assert s == slot[i] and length == n * items[s] and at % items[s] == 0
            values = content[blob][at // items[s] :][:n]
            assert values == list(range(begin, begin + n))
            got += values
        assert got == list(range(int(start[i]), int(start[i] + count[i])))
    for blob, values in enumerate(content):
        extents = placement.extents(blob)
        assert [e for _, _, s, n, *_ in extents.rows() for e in range(s, s + n)] == values

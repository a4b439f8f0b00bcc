"""Boxes and flat ranges against numpy."""

from math import prod

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zero1ckpt.core.boxes import Box, RunGrid, block_shape, range_boxes
from zero1ckpt.core.ranges import Range

shapes = st.lists(st.integers(1, 6), max_size=5).map(tuple)


@st.composite
def ranges(draw):
    shape = draw(shapes)
    low, high = sorted((draw(st.integers(0, prod(shape))), draw(st.integers(0, prod(shape)))))
    return shape, Range(low, high)


@given(ranges())
@example(((), Range(0, 1)))
@example(((), Range(0, 0)))
@example(((3, 4), Range(4, 8)))
def test_boxes_of_a_range_are_that_range(made):
    shape, flat = made
    array = np.arange(prod(shape)).reshape(shape)
    boxes = list(range_boxes(shape, flat))
    found = [array[box.slices].ravel() for box in boxes]
    assert np.concatenate([np.empty(0, np.int64), *found]).tolist() == list(range(flat.start, flat.end))
    assert all(box.size == len(values) > 0 for box, values in zip(boxes, found, strict=True))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


def test_few_boxes():
    assert list(range_boxes((4, 5), Range(0, 20))) == [Box((0, 0), (4, 5))]
    assert list(range_boxes((4, 5), Range(3, 12))) == [Box((0, 3), (1, 2)), Box((1, 0), (1, 5)), Box((2, 0), (1, 2))]
    assert list(range_boxes((4, 5), Range(6, 9))) == [Box((1, 1), (1, 3))]


@given(st.lists(st.integers(0, 6), max_size=5).map(tuple), st.integers(1, 200))
@example((3, 2), 5)
def test_block_shape_is_the_largest_run(shape, most):
    block = block_shape(shape, most)
    size = prod(block)
    assert len(block) == len(shape) and (size <= most or size == 1)
    if 0 in shape:
        return
    grid = RunGrid(shape, block)
    step = max(n for n in (prod(shape[axis:]) for axis in range(len(shape) + 1)) if n <= most)
    assert 2 * size + step > min(most, prod(shape)), "no less than half of what is allowed, in whole steps"
    sizes = [grid.range(i).size for i in range(grid.count)]
    assert max(sizes) == min(grid.run, grid.row)
    assert grid.run * grid.per_row - grid.row < grid.per_row * grid.inner, "blocks are as equal as they can be"


@given(st.integers(1, 3000), st.data())
def test_an_axis_is_cut_evenly_where_it_can_be(length, data):
    most = data.draw(st.integers(1, length))
    even = [step for step in range(most, (most - 1) // 2, -1) if length % step == 0]
    assert block_shape((length,), most) == (even[0] if even else -(-length // -(-length // most)),)


def test_blocks_of_a_huge_axis_need_no_memory():
    assert block_shape((2**40,), 2**39 + 1) == (2**39,)


@given(st.data(), shapes, st.integers(1, 60), st.integers(1, 9))
def test_grids_of_chunks_and_of_shards(data, shape, most, chunks):
    """Blocks are runs in order, are where numpy has them, and each shard is a run of chunks."""
    chunk = block_shape(shape, most)
    blocks = [-(-n // c) for n, c in zip(shape, chunk, strict=True)]
    shard = tuple(c * b for c, b in zip(chunk, block_shape(blocks, chunks), strict=True))
    array = np.arange(prod(shape)).reshape(shape)
    for grid in (RunGrid(shape, chunk), RunGrid(shape, shard)):
        position = 0
        for i in range(grid.count):
            held = grid.range(i)
            place = tuple(slice(k * n, (k + 1) * n) for k, n in zip(grid.index(i), grid.block, strict=True))
            assert array[place].ravel().tolist() == list(range(held.start, held.end))
            assert held.start == position and held.size > 0
            position = held.end
        assert position == prod(shape)
        element = data.draw(st.integers(0, position - 1))
        assert element in grid.range(grid.find(element))
        row, run, per_row = grid.columns.tolist()
        assert grid.find(element) == element // row * per_row + element % row // run
    small, large = RunGrid(shape, chunk), RunGrid(shape, shard)
    ends = {small.range(i).end for i in range(small.count)}
    assert all(large.range(i).end in ends for i in range(large.count))


def test_blocks_that_are_no_runs_are_refused():
    with pytest.raises(ValueError, match="no runs"):
        RunGrid((4, 4), (2, 2))
    with pytest.raises(ValueError, match="no runs"):
        RunGrid((4, 0), (2, 1))
    assert RunGrid((), ()).count == 1 and RunGrid((), ()).index(0) == ()
    assert RunGrid((1, 1), (1, 1)).range(0) == Range(0, 1)

"""Params in gathered buffers: every layout is found again, whatever its buckets."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero1ckpt.core.errors import UnsupportedError
from zero1ckpt.core.layout import BufferKey, LayoutRules, layout_buffer
from zero1ckpt.foreign.megatron.zero_gather import Item, walk_in_order

KEY = BufferKey("bfloat16", "float32")


@dataclass(frozen=True)
class P:
    name: str
    numel: int
    shared_embedding: bool = False
    buffer_key: BufferKey = KEY


@st.composite
def buffers(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], int]:
    """Sizes in place order, their starts in the gathered buffer and in the padded one, and the total."""
    sizes = draw(st.lists(st.integers(1, 300), min_size=1, max_size=12))
    shared = draw(st.none() | st.integers(0, len(sizes) - 1))
    rules = LayoutRules(draw(st.sampled_from([1, 2, 3, 8])), draw(st.none() | st.integers(1, 600)))
    params = [P(str(i), n, shared == i) for i, n in enumerate(sizes)]
    layout = layout_buffer(KEY, params, list(range(len(params)))[::-1], rules)
    before = layout.bucket_numel_unpadded.cumsum() - layout.bucket_numel_unpadded
    starts = layout.start - layout.bucket_offset[layout.bucket_of] + before[layout.bucket_of]
    return sizes, starts.tolist(), layout.start.tolist(), layout.numel_unpadded


@given(buffers(), st.booleans())
def test_the_true_places_are_found(made: tuple[list[int], list[int], list[int], int], views: bool) -> None:
    sizes, starts, worlds, total = made
    items = [Item(n, world=w if views else None) for n, w in zip(sizes, worlds, strict=True)]
    found = walk_in_order(items, total, lambda i, at: starts[i] == at)
    assert found is not None
    assert list(found.starts) == starts
    assert not any(found.others)


@given(buffers(), st.booleans())
def test_without_content_the_true_places_are_among_those_found(
    made: tuple[list[int], list[int], list[int], int], views: bool
) -> None:
    sizes, starts, worlds, total = made
    items = [Item(n, world=w if views else None) for n, w in zip(sizes, worlds, strict=True)]
    found = walk_in_order(items, total, lambda i, at: True)
    assert found is not None
    for own, chosen, others in zip(starts, found.starts, found.others, strict=True):
        assert own == chosen or own in others


@given(buffers(), st.data())
def test_tensors_that_are_no_params_are_left_out(
    made: tuple[list[int], list[int], list[int], int], data: st.DataObject
) -> None:
    sizes, starts, _, total = made
    at = data.draw(st.integers(0, len(sizes)))
    items = [Item(n, optional=True) for n in sizes]
    items.insert(at, Item(7, optional=True))
    places: list[int | None] = [*starts[:at], None, *starts[at:]]
    found = walk_in_order(items, total, lambda i, start: places[i] == start)
    assert found is not None
    assert list(found.starts) == places


def test_no_map_is_none() -> None:
    assert walk_in_order([Item(10), Item(10)], 74, lambda i, at: False) is None
    assert walk_in_order([Item(10), Item(10)], 75, lambda i, at: True) is None


def test_two_maps_that_agree_are_both_told() -> None:
    # The second begins in the same bucket, or the third begins one: both make 138 elements.
    items = [Item(10), Item(64), Item(10)]
    found = walk_in_order(items, 138, lambda i, at: True)
    assert found is not None
    assert found.starts == (0, 64, 128)
    items = [Item(10), Item(10), Item(10)]
    found = walk_in_order(items, 84, lambda i, at: True)
    assert found is not None
    assert {found.starts[1], *found.others[1]} == {10, 64}


@pytest.mark.parametrize("tail", [0, 40])
@pytest.mark.parametrize("align", [1, 64])
def test_stated_buckets(tail: int, align: int) -> None:
    second = 10 if align == 1 else 64
    bounds = (0, second + 10 + tail, second + 40 + 2 * tail)
    starts = [0, second, second + 10 + tail]
    items = [Item(10), Item(10), Item(30)]
    found = walk_in_order(items, bounds[-1], lambda i, at: starts[i] == at, bounds=bounds, align=align)
    assert found is not None
    assert list(found.starts) == starts


def test_too_many_maps_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero1ckpt.foreign.megatron.zero_gather._MAX_STATES", 3)
    with pytest.raises(UnsupportedError, match="too many ways"):
        walk_in_order([Item(10)] * 9, 9 * 64, lambda i, at: True)

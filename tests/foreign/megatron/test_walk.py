"""Cuts of a bucket: the true one is always among those found, whatever looks alike."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from zero1ckpt.foreign.megatron.walk import MOST_TILINGS, tilings


def round_up(n: int) -> int:
    return -(-n // 64) * 64


@st.composite
def buckets(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int, list[int], list[int]]:
    """Params of a bucket (start, elements), its unpadded size, all sizes of the model, edges of chunks."""
    sizes = draw(st.lists(st.integers(1, 300), min_size=1, max_size=6, unique=True))
    chosen = draw(st.lists(st.sampled_from(sizes), min_size=1, max_size=10))
    params, at = [], 0
    for numel in chosen:
        at = round_up(at)
        params.append((at, numel))
        at += numel
    ranks = draw(st.integers(1, 4))
    shard = -(-at // (ranks * 128)) * 128
    edges = {0, at, *(s for s, _ in params), *(s + n for s, n in params)}
    edges |= {shard * r for r in range(1, ranks) if shard * r < at}
    return params, at, sorted(sizes), sorted(edges) if draw(st.booleans()) else [0, at]


@settings(max_examples=300)
@given(buckets())
def test_with_content_the_true_cut_is_found(made: tuple[list[tuple[int, int]], int, list[int], list[int]]) -> None:
    params, unpadded, sizes, edges = made
    held = set(params)
    found = tilings(
        unpadded, edges, sizes, lambda start, numel: (1,) if (start, numel) in held else (), lambda start, numel: (0,)
    )
    assert [[(s.start, s.numel) for s in one] for one in found] == [params]


@settings(max_examples=300)
@given(buckets())
def test_where_all_looks_alike_the_true_cut_is_among_those_found(
    made: tuple[list[tuple[int, int]], int, list[int], list[int]],
) -> None:
    params, unpadded, sizes, edges = made
    found = tilings(unpadded, edges, sizes, lambda start, numel: (1,), lambda start, numel: (0,))
    cuts = [[(s.start, s.numel) for s in one] for one in found]
    assert params in cuts or len(cuts) == MOST_TILINGS

"""The laws of Range and RangeMap, against a dict from position to position."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero1ckpt.core.ranges import Link, Range, RangeMap

SPAN = 40


@st.composite
def spans(draw):
    start = draw(st.integers(0, SPAN))
    return Range(start, draw(st.integers(start, SPAN)))


@st.composite
def maps(draw):
    """One-to-one maps: runs and gaps laid one after the other, targets in any order."""

    def column(sizes):
        at, starts = 0, []
        for size in sizes:
            at += draw(st.integers(0, 3))
            starts.append(at)
            at += size
        return starts

    sizes = draw(st.lists(st.integers(0, 5), max_size=7))
    src = column(sizes)
    order = draw(st.permutations(range(len(sizes))))
    dst = dict(zip(order, column([sizes[i] for i in order]), strict=True))
    rows = draw(st.permutations(range(len(sizes))))
    return RangeMap(Link(Range(src[i], src[i] + sizes[i]), dst[i]) for i in rows)


def model(mapping):
    return {link.src.start + k: link.dst + k for link in mapping for k in range(link.src.size)}


# -------------------------------------------------------------------------------------------------------------- Range


@pytest.mark.parametrize("bounds", [(-1, 2), (3, 2), (-2, -1)])
def test_range_refuses_bounds_that_are_no_interval(bounds):
    with pytest.raises(ValueError, match="expected 0 <= start <= end"):
        Range(*bounds)


@pytest.mark.parametrize("bounds", [(0.0, 2), ("0", 2), (0, None), (0, 2.5)])
def test_range_refuses_bounds_that_are_no_integers(bounds):
    with pytest.raises(TypeError):
        Range(*bounds)


@given(spans(), spans(), st.integers(0, 9))
def test_range_operations_equal_sets(a, b, by):
    elements = set(range(a.start, a.end))
    assert set(range(*vars_of(a.intersect(b)))) == elements & set(range(b.start, b.end))
    assert a.start <= a.intersect(b).start <= a.intersect(b).end <= a.end
    assert a.size == len(a) == len(elements)
    assert bool(a) == bool(elements)
    assert {x for x in range(SPAN + 1) if x in a} == elements
    assert a.normalize(by) == Range(by, by + a.size)
    assert a.normalize() == Range(0, a.size)
    assert set(range(*vars_of(a.shift(by)))) == {x + by for x in elements}


def vars_of(span):
    return span.start, span.end


def test_range_is_a_hashable_ordered_value():
    assert len({Range(1, 2), Range(1, 2), Range(0, 2)}) == 2
    assert sorted([Range(1, 2), Range(0, 5)])[0] == Range(0, 5)
    with pytest.raises(AttributeError):
        Range(1, 2).start = 0


# ----------------------------------------------------------------------------------------------------------- RangeMap


@given(maps())
def test_inverse_of_inverse_is_the_map(m):
    assert m.inverse().inverse() == m
    assert model(m.inverse()) == {y: x for x, y in model(m).items()}


@given(maps())
def test_then_inverse_is_the_identity_on_the_domain(m):
    assert model(m.then(m.inverse())) == {x: x for x in model(m)}


@given(maps(), maps())
def test_then_is_composition(a, b):
    after = model(b)
    assert model(a.then(b)) == {x: after[y] for x, y in model(a).items() if y in after}


@given(maps(), maps(), maps())
def test_then_is_associative(a, b, c):
    assert a.then(b).then(c) == a.then(b.then(c))


@given(maps(), spans())
def test_restrict_maps_exactly_the_domain(m, domain):
    assert model(m.restrict(domain)) == {x: y for x, y in model(m).items() if x in domain}


@given(maps(), spans())
def test_gaps_and_domain_tile(m, domain):
    gaps = m.gaps(domain)
    missing = [x for gap in gaps for x in range(gap.start, gap.end)]
    assert missing == [x for x in range(domain.start, domain.end) if x not in model(m)]
    assert all(gaps) and all(a.end < b.start for a, b in pairwise(gaps)), "gaps are maximal"


@given(maps(), maps())
def test_maps_are_equal_when_they_map_alike(a, b):
    assert (a == b) == (model(a) == model(b))
    one_by_one = RangeMap(Link(Range(x, x + 1), y) for x, y in model(a).items())
    assert one_by_one == a and hash(one_by_one) == hash(a) and len(one_by_one) == len(a)
    assert a.size == len(model(a))


@given(st.lists(st.tuples(spans(), st.integers(0, SPAN)), max_size=5))
def test_overlaps_are_refused(rows):
    sources = [x for span, _ in rows for x in range(span.start, span.end)]
    targets = [dst + k for span, dst in rows for k in range(span.size)]
    if len(set(sources)) == len(sources) and len(set(targets)) == len(targets):
        assert model(RangeMap(Link(s, d) for s, d in rows)) == dict(zip(sources, targets, strict=True))
    else:
        with pytest.raises(ValueError, match="overlaps"):
            RangeMap(Link(s, d) for s, d in rows)


def test_identity_and_empty():
    assert model(RangeMap.identity(Range(3, 6))) == {3: 3, 4: 4, 5: 5}
    empty = RangeMap()
    assert len(empty) == 0 and empty == empty.inverse() == empty.then(empty) == empty.restrict(Range(0, 9))
    assert empty.gaps(Range(2, 5)) == (Range(2, 5),)
    with pytest.raises(ValueError, match="negative"):
        RangeMap.from_columns([0], [-1], [1])


def test_links_carry_their_target():
    assert Link(Range(2, 5), 7).target == Range(7, 10)
    assert RangeMap([Link(Range(2, 5), 7)]).links == (Link(Range(2, 5), 7),)

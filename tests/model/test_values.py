"""Extra state and hyper-parameters: what goes in comes out, or is refused by its place."""

import json
import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from enum import IntEnum

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zero1ckpt.core.errors import CorruptError, UsageError
from zero1ckpt.model.values import decode_value, encode_value, same_value

# Text that UTF-8 has; what it has not (lone surrogates) is refused, see below.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
HASHABLE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    TEXT,
    st.sampled_from(("$", "$tuple", "$map", "$int", "a.b", "a[0]", "")),
    st.binary(max_size=5),
    st.complex_numbers(),
)
KEYS = st.recursive(HASHABLE, lambda inner: st.lists(inner, max_size=2).map(tuple), max_leaves=3)
VALUES = st.recursive(
    HASHABLE,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(TEXT, inner, max_size=3),
    ),
    max_leaves=12,
)


def alike(a, b):
    """Equal in value and type, order of keys included; a NaN is alike any NaN, and zeros differ by sign."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, complex):
        return alike(a.real, b.real) and alike(a.imag, b.imag)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(alike(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    return a == b


def through_json(value):
    return msgspec.json.decode(msgspec.json.encode(value))


@settings(max_examples=200)
@given(VALUES)
@example({1: {"milestones": {30: 1, 60: 2}}, (1, "x"): b"\0\xff", "f": (math.nan, math.inf, -math.inf, -0.0)})
@example({"$tuple": [1]})
@example([{"$map": []}, {"$": 1}, 2**200, -(2**63), 2**63, 5e-324])
def test_round_trip(value):
    encoded = encode_value(value, "extra")
    assert alike(decode_value(through_json(encoded)), value)
    json.dumps(encoded, allow_nan=False)  # plain JSON for any reader
    assert same_value(through_json(encoded), encoded)


@settings(max_examples=150)
@given(VALUES, VALUES)
def test_encoded_values_are_the_same_exactly_when_the_values_are(a, b):
    same = alike(a, b) or (isinstance(a, dict) and isinstance(b, dict) and alike_unordered(a, b))
    if same:
        assert same_value(encode_value(a, ""), encode_value(b, "")) or isinstance(a, (dict, list, tuple))
    if same_value(encode_value(a, ""), encode_value(b, "")):
        assert repr(sorted_repr(a)) == repr(sorted_repr(b))


def alike_unordered(a, b):
    return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)


def sorted_repr(value):
    if isinstance(value, dict):
        return sorted((repr(sorted_repr(k)), repr(sorted_repr(v))) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(sorted_repr, value)]
    return value


def test_kinds_of_dict_become_dict():
    for value in (Counter("aab"), OrderedDict(b=1, a=2), defaultdict(list, {3: [1]})):
        assert alike(decode_value(through_json(encode_value(value, "x"))), dict(value))


def test_numpy_floats_are_floats_and_dtypes_stay_dtypes():
    assert alike(decode_value(encode_value(np.float64(0.1), "x")), 0.1)
    encoded = through_json(encode_value({"d": torch.bfloat16}, "x"))
    assert decode_value(encoded) == {"d": "bfloat16"}
    assert decode_value(encoded, get_tensor=lambda key: key) == {"d": "dtype:bfloat16"}


def test_tensors_are_put_aside_by_their_place():
    put = {}

    def put_tensor(tensor, place):
        put[place] = tensor
        return place

    value = {"a": [torch.ones(2), {"b": torch.zeros(1)}], 3: torch.ones(1)}
    encoded = through_json(encode_value(value, "extra", put_tensor=put_tensor))
    assert list(put) == ["extra['a'][0]", "extra['a'][1].b", "extra[3]"]
    back = decode_value(encoded, get_tensor=put.__getitem__)
    assert back["a"][0] is value["a"][0] and back[3] is value[3]


class Colour(IntEnum):
    RED = 1


Point = namedtuple("Point", "x y")
LOOP: list = []
LOOP.append(LOOP)
DEEP: list = []
for _ in range(5000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({1, 2}, "set"),
        (deque([1]), "deque"),
        (object(), "object"),
        (Colour.RED, "Colour"),
        (Point(1, 2), "Point"),
        (np.int64(3), "int64"),
        (np.ones(2), "ndarray"),
        (range(3), "range"),
        (lambda: 0, "function"),
        (torch.ones(1), "Tensor"),
        ("\ud800", "str"),
        ({"\udfff": 1}, "str"),
        (LOOP, "list"),
        (DEEP, "list"),
        (10**5000, "int"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isascii() else "",
)
def test_refusals_name_the_place_and_the_type(value, kind):
    with pytest.raises(UsageError, match=kind) as caught:
        encode_value({"scheduler": [0, value]}, "extra")
    line = str(caught.value)
    assert "extra.scheduler[1]" in line and caught.value.exit_code == 2
    line.encode()
    assert len(line) < 2000


def test_a_tensor_as_a_key_is_refused():
    with pytest.raises(UsageError, match="extra key"):
        encode_value({torch.ones(1): 1}, "extra", put_tensor=lambda tensor, place: place)


@pytest.mark.parametrize(
    "stored",
    [
        {"$new": 1},
        {"$tuple": 3},
        {"$map": [[1]]},
        {"$map": [[[1], 2]]},
        {"$int": "x"},
        {"$int": None},
        {"$float": "one"},
        {"$complex": [1]},
        {"$bytes": "0g"},
        {"$bytes": 3},
        {"$tensor": 3},
        {"$dtype": None},
    ],
)
def test_stored_values_that_are_none_are_refused(stored):
    with pytest.raises(CorruptError, match="tag"):
        decode_value({"a": [stored]}, get_tensor=lambda key: key.upper())

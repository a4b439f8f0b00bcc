"""Checksums of pieces combine to the checksum of the whole, whatever the cut and the order."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero1ckpt.core.digest import (
    crc64,
    crc64_zeros,
    format_digest,
    merge_digests,
    parse_digest,
    shift,
    tensor_digest,
)


def bitwise(data):
    """The checksum by its definition: reflected polynomial 0x9a6c9329ac4bc9b5, all ones in and out."""
    crc = 2**64 - 1
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x9A6C9329AC4BC9B5 if crc & 1 else 0)
    return crc ^ (2**64 - 1)


def test_check_value_of_the_catalogue():
    assert crc64(b"123456789") == 0xAE8B14860A799888


@given(st.binary(max_size=200))
def test_equals_the_definition(data):
    assert crc64(data) == bitwise(data)


@given(st.binary(max_size=300), st.data())
def test_pieces_combine_in_any_order(data, draw):
    cuts = sorted({0, len(data), *draw.draw(st.lists(st.integers(0, len(data)), max_size=6))})
    pieces = list(pairwise(cuts))
    whole = 0
    for low, high in draw.draw(st.permutations(pieces)):
        whole ^= shift(crc64(data[low:high]), len(data) - high)
    assert whole == crc64(data)


@given(st.binary(max_size=60), st.integers(0, 2**45), st.integers(0, 2**45))
def test_shift_adds_up(data, one, two):
    assert shift(shift(crc64(data), one), two) == shift(crc64(data), one + two)
    assert shift(crc64(data), 0) == crc64(data)


@given(st.integers(0, 5000))
def test_zeros(count):
    assert crc64_zeros(count) == crc64(bytes(count))


@given(st.integers(0, 2**45), st.integers(0, 2**45))
def test_zeros_of_any_size_combine(a, b):
    assert crc64_zeros(a + b) == shift(crc64_zeros(a), b) ^ crc64_zeros(b)


@given(st.binary(min_size=1, max_size=200), st.data())
def test_one_changed_byte_changes_the_checksum(data, draw):
    at = draw.draw(st.integers(0, len(data) - 1))
    other = bytearray(data)
    other[at] ^= draw.draw(st.integers(1, 255))
    assert crc64(data) != crc64(bytes(other))


@given(st.integers(0, 2**64 - 1))
def test_text_of_a_digest(crc):
    assert parse_digest(format_digest(crc)) == crc
    assert len(format_digest(crc)) == 16


@pytest.mark.parametrize("text", ["", "0" * 15, "0" * 17, "A" * 16, "0" * 15 + " ", "-" + "0" * 15, "0x" + "0" * 14])
def test_no_other_text_is_a_digest(text):
    with pytest.raises(ValueError, match="not a digest"):
        parse_digest(text)


def test_digest_depends_on_name_slot_dtype_shape_and_values():
    base = ("w", "exp_avg", "float32", (2, 3), crc64(bytes(24)), 24)
    others = [
        ("v", *base[1:]),
        ("w", "exp_avg_sq", *base[2:]),
        ("w", "exp_avg", "int32", *base[3:]),
        ("w", "exp_avg", "float32", (3, 2), *base[4:]),  # transposed: as many elements, another tensor
        (*base[:4], crc64(bytes(23) + b"\1"), 24),
    ]
    assert len({tensor_digest(*args) for args in [base, *others]}) == 1 + len(others)


def test_merged_digest_is_independent_of_order_and_not_of_rows():
    rows = [("a", "x", "0" * 16), ("b", "x", "1" * 16)]
    assert merge_digests(rows) == merge_digests(reversed(rows))
    assert merge_digests(rows) != merge_digests([("a", "x", "1" * 16), ("b", "x", "0" * 16)])
    assert merge_digests(rows) != merge_digests(rows[:1])
    assert merge_digests([("a", "b", "c")]) != merge_digests([("a,b", "", "c")])

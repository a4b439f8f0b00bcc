"""Streams that the writer makes: read back by us, by pickle and by torch, the same bytes for the same value."""

import argparse
import collections
import io
import pickle
import pickletools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero1ckpt.core.errors import UsageError
from zero1ckpt.encodings.inert_pickle import Dtype, EnumValue, GlobalRef, Record, load
from zero1ckpt.encodings.inert_pickle.writer import dump

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = sorted((ROOT / "tests/data/pickles").iterdir())

KEYS = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=5) | st.binary(max_size=5)
LEAVES = KEYS | st.integers() | st.floats() | st.complex_numbers() | st.binary(max_size=300).map(bytearray)
LEAVES |= st.datetimes() | st.dates() | st.times() | st.timedeltas()
LEAVES |= st.sampled_from([2**2000, -(2**2040), 255, 256, 65535, 65536, 2**31, -(2**31), range(3, 9, 2), slice(1, 2)])
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(KEYS | st.tuples(KEYS, KEYS), inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4).map(collections.OrderedDict)
        | st.sets(KEYS, max_size=4)
        | st.frozensets(KEYS, max_size=4)
        | st.lists(KEYS, max_size=4).map(collections.Counter)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_what_is_written_reads_back_as_it_was(value):
    stream = dump(value)
    assert repr(load(stream)) == repr(pickle.loads(stream))
    assert dump(load(stream)) == stream
    assert {op.proto for op, _, _ in pickletools.genops(stream)} <= {0, 1, 2}
    pickletools.dis(stream, out=io.StringIO())  # checks stack and memo


@given(VALUES)
def test_bytes_do_not_depend_on_which_objects_are_one(value):
    copy = pickle.loads(pickle.dumps(value))
    assert dump([value, value]) == dump([value, copy])


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.name)
def test_real_streams_are_written_again(path):
    value = load(path.read_bytes())
    stream = dump(value)
    assert dump(load(stream)) == stream
    assert outline(load(stream)) == outline(value)


def outline(value):
    if isinstance(value, Record):
        parts = (value.args, value.kwargs, value.state, value.pairs, value.entries)
        return (str(value.type), value.how, *map(outline, parts))
    if isinstance(value, dict):
        return [(outline(key), outline(item)) for key, item in value.items()]
    if type(value) in (list, tuple):
        return type(value)(map(outline, value))
    return value


def test_numbers_of_the_memo_beyond_a_byte():
    value = [f"text {i}" for i in range(70_000)] * 2
    assert load(dump(value)) == value == pickle.loads(dump(value))


def test_numpy_values_are_written_for_any_numpy():
    values = [np.float32(1.5), np.int64(3), np.bool_(True), *load(pickle.dumps([np.arange(6).reshape(2, 3)], 2))]
    made = pickle.loads(dump(values))
    assert made[:3] == values[:3] and [type(v) for v in made[:3]] == [type(v) for v in values[:3]]
    assert np.array_equal(made[3], np.arange(6).reshape(2, 3))


def test_records_become_their_objects():
    stream = dump(load(pickle.dumps(argparse.Namespace(a=1, dtype=[None]))))
    assert pickle.loads(stream) == argparse.Namespace(a=1, dtype=[None])
    kind = GlobalRef("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING")
    enum, dtype, layout = pickle.loads(dump([EnumValue(kind, 0), Dtype("bfloat16"), GlobalRef("torch", "strided")]))
    import torch

    assert (enum.value, dtype, layout) == (0, torch.bfloat16, torch.strided)


def test_bytes_are_the_same_in_another_process_with_another_hash_seed():
    code = (
        "import sys; from zero1ckpt.encodings.inert_pickle.writer import dump\n"
        "sys.stdout.write(dump({'s': {'a', 'b', 'c', 1, None}, 't': frozenset('xyz')}).hex())"
    )
    made = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, check=True, cwd=ROOT, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(made) == 1


@pytest.mark.parametrize("value", [object(), {"a": [print]}, Path, "\ud800", memoryview(b"")])
def test_what_cannot_be_written_is_named(value):
    with pytest.raises(UsageError, match="cannot be pickled"):
        dump(value)


def test_too_deep_a_value():
    value = []
    for _ in range(300):
        value = [value]
    with pytest.raises(UsageError, match="too deeply"):
        dump(value)

"""``zero1ckpt.diff``: finds exactly what was changed, across layouts, and reads no more than it must."""

import copy
import struct
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zero1ckpt
from tests.strategies import finite, flip, small_state
from zero1ckpt.api.comparison import measure, value_diffs
from zero1ckpt.api.stored import describe
from zero1ckpt.core.errors import CorruptError, MissingError
from zero1ckpt.encodings.safetensors_file import read_header

FORMATS = ("bucket_shards", "fully_sharded_model_space", "fully_reshardable")
NAME = "layers.0.weight"


def changed(found):
    return {(row.param, row.slot): row for row in found.tensors if row.status != "equal"}


@pytest.fixture
def state():
    return small_state()


@pytest.mark.parametrize("there", FORMATS)
@pytest.mark.parametrize("here", FORMATS)
def test_the_same_state_in_any_layout_is_equal_and_not_read(work, state, here, there):
    zero1ckpt.write(work / "a", state, dp_size=4, bucket_size=100, format=here)
    zero1ckpt.write(work / "b", state, dp_size=3, bucket_size="none", format=there)
    found = zero1ckpt.diff(work / "a", work / "b")
    assert found and found.ok and not found.findings and found.bytes_read == 0
    assert {row.status for row in found.tensors} == {"equal"}
    assert len(found.tensors) == 3 * len(state)


@pytest.mark.parametrize("there", FORMATS)
@pytest.mark.parametrize("limit", [None, 2**16])
def test_what_was_changed_is_measured(work, state, there, limit):
    zero1ckpt.write(work / "a", state, dp_size=4, bucket_size=100)
    other = copy.deepcopy(state)
    values = torch.arange(960, dtype=torch.float32).reshape(40, 24)
    state[NAME]["exp_avg"] = values
    other[NAME]["exp_avg"] = values.clone()
    other[NAME]["exp_avg"][3, 5] += 0.25
    other[NAME]["exp_avg"][39, 23] = -1.0
    other[NAME]["exp_avg"][0, 7] = float("nan")
    zero1ckpt.write(work / "a", state, dp_size=4, bucket_size=100, overwrite=True)
    zero1ckpt.write(work / "b", other, dp_size=5, bucket_size=333, format=there)
    found = zero1ckpt.diff(work / "a", work / "b", memory_limit=limit, workers=1)
    (row,) = changed(found).values()
    assert (row.param, row.slot, row.status, row.numel) == (NAME, "exp_avg", "changed", 960)
    assert (row.measure.changed, row.measure.nan, row.measure.max_abs) == (3, 1, 960.0)
    assert row.index(row.measure.first) == (0, 7) and row.measure.last == 959
    assert found.bytes_read == 2 * 960 * 4
    (finding,) = found.findings
    assert (finding.kind, finding.range) == ("different_values", (7, 960))
    assert "3 of 960" in finding.message and "1 with a NaN" in finding.message


def ulp(a, b, kind):
    """Counts representable numbers by stepping through them."""
    a, b = sorted((kind(a), kind(b)))
    steps = 0
    while a < b:
        a, steps = np.nextafter(a, kind(np.inf)), steps + 1
    return steps


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize(("x", "steps"), [(1.0, 3), (-1.0, 2), (0.0, 5), (1.9999, 9)])
def test_ulp_counts_numbers_between(kind, x, steps):
    start = end = kind(x)
    for _ in range(steps):
        end = np.nextafter(end, kind(-np.inf))
    dtype = np.dtype(kind).name
    found = measure(memoryview(start.tobytes()), memoryview(end.tobytes()), dtype)
    assert found.max_ulp == steps == ulp(start, end, kind)


def bits(dtype, *values):
    code = {2: "H", 4: "I", 8: "Q", 1: "B"}[{"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}.get(dtype, 1)]
    return memoryview(struct.pack(f"<{len(values)}{code}", *values))


@pytest.mark.parametrize(
    ("dtype", "a", "b", "ulps", "apart"),
    [
        ("bfloat16", 0x3F80, 0x3F81, 1, 2.0**-7),
        ("bfloat16", 0x0001, 0x8001, 2, 2 * 2.0**-133),
        ("bfloat16", 0x7F7F, 0x7F80, 1, float("inf")),  # largest and infinity
        ("float16", 0x3C00, 0xBC00, 2 * 0x3C00, 2.0),
        ("float32", 0x00000000, 0x80000000, 0, 0.0),  # the zeros
        ("float64", 0x7FF0000000000000, 0xFFF0000000000000, 2 * 0x7FF0000000000000, float("inf")),
        ("float8_e4m3fn", 0x38, 0x39, 1, 0.125),
        ("float8_e5m2", 0x3C, 0x3D, 1, 0.25),
        ("uint8", 3, 250, None, 247),
        ("int8", 0x80, 0x7F, None, 255),
        ("bool", 0, 1, None, 1),
    ],
)
def test_distances(dtype, a, b, ulps, apart):
    found = measure(bits(dtype, 7, a), bits(dtype, 7, b), dtype, 100)
    assert (found.changed, found.first, found.nan) == (1, 101, 0)
    assert (found.max_ulp, found.max_abs) == (ulps, apart)


def test_a_nan_is_the_same_nan_only():
    quiet, other = 0x7FC00000, 0x7FC00001
    assert measure(bits("float32", quiet), bits("float32", quiet), "float32").changed == 0
    found = measure(bits("float32", quiet, quiet), bits("float32", other, 0x3F800000), "float32")
    assert (found.changed, found.nan, found.max_abs, found.max_ulp) == (2, 2, 0, None)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float16"])
def test_every_number_is_read_as_torch_reads_it(dtype):
    width = torch.int8 if "8_" in dtype else torch.int16
    every = torch.arange(torch.iinfo(width).min, torch.iinfo(width).max + 1).to(width)
    values = every.view(getattr(torch, dtype)).double()
    data = memoryview(every.numpy()).cast("B")
    for at in range(0, len(every), 1 if len(every) < 300 else 997):
        zero = memoryview(bytearray(every.element_size()))
        found = measure(data[at * every.element_size() : (at + 1) * every.element_size()], zero, dtype)
        if found.changed and not found.nan:
            assert found.max_abs == abs(values[at].item())
        assert bool(found.nan) == bool(values[at].isnan())


def test_missing_and_added(work, state):
    zero1ckpt.write(work / "a", state, dp_size=2)
    other = {name: dict(slots) for name, slots in state.items() if name != "layers.1.weight"}
    del other["layers.0.weight"]["exp_avg"]
    other["new"] = {"fp32_param": torch.zeros(3)}
    zero1ckpt.write(work / "b", other, dp_size=2)
    found = zero1ckpt.diff(work / "a", work / "b")
    assert {key: row.status for key, row in changed(found).items()} == {
        ("layers.0.weight", "exp_avg"): "missing",
        ("layers.1.weight", "fp32_param"): "missing",
        ("layers.1.weight", "exp_avg"): "missing",
        ("layers.1.weight", "exp_avg_sq"): "missing",
        ("new", "fp32_param"): "added",
    }
    assert {f.kind for f in found.findings} == {"missing_tensor", "added_tensor"} and found.bytes_read == 0


def test_shapes_and_dtypes(work):
    zero1ckpt.write(work / "a", {"w": {"fp32_param": torch.ones(6, 4), "m": torch.ones(6, 4)}}, dp_size=2)
    other = {"w": {"fp32_param": torch.ones(4, 6), "m": torch.ones(4, 6).bfloat16()}}
    zero1ckpt.write(work / "b", other, dp_size=2)
    found = zero1ckpt.diff(work / "a", work / "b")
    assert {f.kind for f in found.findings} == {"different_param", "different_shape"}
    assert "bfloat16[4, 6]" in found.findings[-1].message


def kinds(work, one, other, **common):
    state = {"w": {"fp32_param": torch.ones(6), "step": torch.tensor(3.0)}, "b": {"fp32_param": torch.ones(2)}}
    for name, own in (("a", one), ("b", other)):
        keywords = {"dp_size": 2, **common, **own}
        zero1ckpt.write(work / name, keywords.pop("state", state), **keywords)
    found = zero1ckpt.diff(work / "a", work / "b")
    return {finding.kind: finding.message for finding in found.findings}


def test_step_scalars_and_order(work):
    state = {"b": {"fp32_param": torch.ones(2)}, "w": {"fp32_param": torch.ones(6), "step": torch.tensor(4.0)}}
    found = kinds(work, {"step": 3}, {"step": 4, "state": state})
    assert found.keys() == {"different_step", "different_order", "different_scalar"}
    assert found["different_step"] == "step is 3 in one and 4 in the other"
    assert "w: step is 3.0 (float32) in one and 4.0 (float32)" in found["different_scalar"]


def test_hyper_parameters_of_groups_that_are_matched_by_membership(work):
    one = [{"lr": 0.1, "betas": (0.9, 0.95), "params": ["w"]}, {"lr": 0.2, "params": ["b"]}]
    other = [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["w"]}, {"lr": 0.2, "params": ["b"]}]
    assert kinds(work, {"groups": one}, {"groups": other}) == {
        "different_groups": "(w): groups[0].betas[1] is 0.95 in one and 0.99 in the other"
    }


def test_groups_in_another_order_and_with_other_members(work):
    one = [{"lr": 0.1, "params": ["w"]}, {"lr": 0.2, "params": ["b"]}]
    assert kinds(work, {"groups": one}, {"groups": one[::-1]}).keys() == {"different_order"}
    (work / "c").mkdir()
    other = [{"lr": 0.1, "params": ["w", "b"]}]
    found = kinds(work / "c", {"groups": one}, {"groups": other})
    assert found.keys() == {"missing_group", "different_membership"}
    assert "group 1 (b) is only in the first" in found["missing_group"]


def test_tensors_of_groups_and_of_extra_state(work):
    one = {"groups": [{"lr": torch.tensor(0.1)}], "extra": {"t": torch.arange(5), 3: [1, (2, None)], "same": "x"}}
    other = {"groups": [{"lr": torch.tensor(0.2)}], "extra": {"t": torch.arange(1, 6), 3: [1, (2, 7)], "same": "x"}}
    zero1ckpt.write(work / "a", {"w": {"fp32_param": torch.ones(6)}}, dp_size=1, **one)
    zero1ckpt.write(work / "b", {"w": {"fp32_param": torch.ones(6)}}, dp_size=1, **other)
    found = zero1ckpt.diff(work / "a", work / "b")
    assert sorted(row.param for row in changed(found).values()) == ["extra['t']", "groups[0].lr"]
    (value,) = [value for _, _, value in found.values]
    assert (value.key, value.a, value.b) == ("extra[3][1][1]", "None", "7")


@settings(max_examples=30)
@given(st.data())
def test_values_are_compared_by_type(data):
    leaf = st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False, width=16) | st.text(max_size=2)
    value = st.recursive(leaf, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner))
    a, b = data.draw(value), data.draw(value)
    assert not list(value_diffs(a, a, "x"))
    assert bool(list(value_diffs(a, b, "x"))) == (repr(sorted_keys(a)) != repr(sorted_keys(b)))
    assert len(list(value_diffs(a, b, "x"))) == len(list(value_diffs(b, a, "x")))


def sorted_keys(value):
    if isinstance(value, dict):
        return {key: sorted_keys(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [sorted_keys(item) for item in value]
    return 0.0 if type(value) is float and value == 0 else value


@settings(max_examples=20)
@given(seed=st.integers(0, 99), element=st.integers(0, 959), bit=st.integers(0, 31), dp=st.sampled_from((1, 3, 8)))
def test_any_single_bit_is_found_at_its_place(tmp_path_factory, seed, element, bit, dp):
    work = tmp_path_factory.mktemp("diff")
    state = {"w": {"fp32_param": finite("float32", (40, 24), seed)}, "x": {"fp32_param": torch.ones(77)}}
    zero1ckpt.write(work / "a", state, dp_size=dp, bucket_size=100)
    state["w"]["fp32_param"].view(torch.int32).view(-1)[element] ^= -(2**31) if bit == 31 else 1 << bit
    zero1ckpt.write(work / "b", state, dp_size=2, format="fully_reshardable")
    (row,) = changed(zero1ckpt.diff(work / "a", work / "b")).values()
    assert (row.param, row.measure.changed, row.measure.first) == ("w", 1, element)


def flip_bit_of_data(path, name, slot):
    """Flips a bit of the first element of a tensor."""
    stored = describe(path)
    (catalog,) = stored.catalogs.values()
    param, index = catalog.state.index[name], catalog.state.slot_index[slot]
    _, found = catalog.placement.locate(*(np.array([n]) for n in (param, index, 0, 1)))
    key = catalog.placement.blob_key(int(found.blob[0]))
    flip(path / key, read_header(stored.store, key).payload + int(found.at[0]))


def test_damage_on_either_side_is_refused(work, state):
    zero1ckpt.write(work / "a", state, dp_size=2, bucket_size=100)
    other = copy.deepcopy(state)
    other[NAME]["exp_avg"] += 1
    zero1ckpt.write(work / "b", other, dp_size=3)
    for path in (work / "b", work / "a"):
        flip_bit_of_data(path, NAME, "exp_avg")
        with pytest.raises(CorruptError, match="exp_avg"):
            zero1ckpt.diff(work / "a", work / "b")
    with pytest.raises(MissingError):
        zero1ckpt.diff(work / "a", work / "nowhere")


def test_memory_is_bounded(work):
    numel = 3_000_000
    zero1ckpt.write(work / "a", {"w": {"fp32_param": torch.zeros(numel)}}, dp_size=4)
    zero1ckpt.write(work / "b", {"w": {"fp32_param": torch.ones(numel)}}, dp_size=3, format="fully_reshardable")
    tracemalloc.start()
    found = zero1ckpt.diff(work / "a", work / "b", memory_limit=2**20, workers=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.tensors[0].measure.changed == numel and found.tensors[0].measure.max_ulp == 0x3F800000
    assert peak < 2 * 2**20  # the limit, and what it takes to describe two checkpoints

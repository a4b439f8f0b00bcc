"""What ``write`` takes, refuses and leaves out."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zero1ckpt
from tests.strategies import check_state, finite, same_bits, small_state, states, tree
from zero1ckpt import Range
from zero1ckpt.core.dtypes import DTYPE_NAMES
from zero1ckpt.storage.local import LocalStore

W = torch.ones(2, 3)


def refused(work, code, state, *names, match=None, **keywords):
    with pytest.raises(zero1ckpt.Zero1CkptError, match=match) as caught:
        zero1ckpt.write(work / "a", state, **{"dp_size": 2} | keywords)
    line = str(caught.value)
    assert caught.value.exit_code == code, line
    assert all(name in line for name in names) and "\n" not in line, line
    line.encode()
    assert tree(work) == {}


# ------------------------------------------------------------------------------------------------------------ accepted


@settings(max_examples=60)
@given(states(), st.integers(1, 9), st.data())
def test_reads_back_whole_and_in_part(work, made, dp, data):
    state, keywords = made
    checkpoint = zero1ckpt.write(work / "a", state, dp_size=dp, bucket_size=100, overwrite=True, **keywords)
    check_state(checkpoint, state)
    for name, slots in state.items():
        for slot, tensor in slots.items():
            if slot == "step" or not tensor.numel():
                continue
            start = data.draw(st.integers(0, tensor.numel()))
            end = data.draw(st.integers(start, tensor.numel()))
            part = checkpoint.read(name, slot, Range(start, end))
            assert same_bits(part, tensor.reshape(-1)[start:end])
    groups = checkpoint.groups
    if keywords["groups"]:
        assert groups == keywords["groups"]
    else:
        assert groups == [{"params": list(state)}]
    assert checkpoint.step == keywords["step"]
    wanted = keywords["extra"] or {}
    assert checkpoint.extra.keys() == wanted.keys()


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_every_dtype(work, dtype):
    seed = finite("uint8", (24,), 3)
    size = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    values = (seed % 2).bool() if dtype == "bool" else seed[: 24 // size * size].view(getattr(torch, dtype))
    state = {"w": {"fp32_param": torch.ones(values.numel()), "x": values}}
    made = zero1ckpt.write(work / "a", state, dp_size=5)
    check_state(made, state)
    check_state(zero1ckpt.reshard(work / "a", work / "b", to_dp=3), state)


def test_views_of_memory_are_stored_by_value(work):
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "transposed": {"fp32_param": base.T},
        "strided": {"fp32_param": base[:, ::2]},
        "expanded": {"fp32_param": base[:1].expand(3, 6)},
        "wants_grad": {"fp32_param": base.clone().requires_grad_()},
        "param": {"fp32_param": torch.nn.Parameter(base.clone())},
    }
    made = zero1ckpt.write(work / "a", state, dp_size=3, bucket_size=1)
    for name, slots in state.items():
        assert same_bits(made.read(name, "fp32_param"), slots["fp32_param"].detach().contiguous())


@pytest.mark.parametrize(
    "scalar",
    [
        torch.tensor(3),
        torch.tensor(2.5),
        torch.tensor(-0.0),
        torch.tensor(float("inf")),
        torch.tensor(1e16),
        torch.tensor(2**62),
        torch.tensor(True),
        torch.tensor(1.1, dtype=torch.float64),
        torch.tensor(0.1, dtype=torch.bfloat16),
    ],
)
def test_scalars_come_back_exactly(work, scalar):
    state = {
        "a": {"fp32_param": W, "step": scalar},
        "b": {"fp32_param": W},
        "c": {"fp32_param": W[0, 0], "step": scalar},
    }
    made = zero1ckpt.write(work / "a", state, dp_size=2)
    for checkpoint in (made, zero1ckpt.reshard(work / "a", work / "b", to_dp=3)):
        assert same_bits(checkpoint.read("a", "step"), scalar) and same_bits(checkpoint.read("c", "step"), scalar)
        assert "step" in checkpoint.slots
        with pytest.raises(zero1ckpt.Zero1CkptError, match="no such slot"):
            checkpoint.read("b", "step")


def test_absent_slots_stay_absent(work):
    """A param that never had a gradient has no moments: they are not made up."""
    state = {"a": {"fp32_param": W, "exp_avg": W}, "b": {"fp32_param": W}}
    zero1ckpt.write(work / "a", state, dp_size=2)
    made = zero1ckpt.reshard(work / "a", work / "b", to_dp=3)
    assert list(made.tensors()) == [("a", "fp32_param"), ("a", "exp_avg"), ("b", "fp32_param")]
    with pytest.raises(
        zero1ckpt.Zero1CkptError, match=r"b: the param has no such slot .*found exp_avg, expected one of fp"
    ):
        made.read("b", "exp_avg")
    assert made.digest_of("b", "exp_avg") is None


@pytest.mark.parametrize("slots", [("momentum_buffer",), ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), ("exp_avg",), ()])
def test_optimizers_with_other_numbers_of_slots(work, slots):
    kinds = {"fp32_param": "float32"} | dict.fromkeys(slots, "float32")
    state = small_state(2, slots=kinds)
    made = zero1ckpt.write(work / "a", state, dp_size=3)
    assert made.slots == ("fp32_param", *sorted(slots))
    check_state(zero1ckpt.reshard(work / "a", work / "b", to_dp=5), state)


def test_slots_of_a_shape_of_their_own(work):
    """Factored moments: rows and columns of their own, whole on every way."""
    state = {
        f"w{i}": {
            "fp32_param": finite("float32", (n, 7), i),
            "row": finite("float32", (n, 1), 50 + i),
            "col": finite("float32", (1, 7), 90 + i),
        }
        for i, n in enumerate((5, 64, 131))
    }
    made = zero1ckpt.write(work / "a", state, dp_size=3, bucket_size=100)
    check_state(made, state)
    check_state(zero1ckpt.reshard(work / "a", work / "b", to_dp=5, bucket_size=1), state)
    zero1ckpt.reshard(work / "b", work / "c", to_dp=3, bucket_size=100)
    assert tree(work / "a") == tree(work / "c")
    assert zero1ckpt.verify(work / "b", deep=True, against=work / "a")


def test_one_large_param_and_two_hundred_tiny_ones(work):
    state = {"big": {"fp32_param": finite("float32", (50_001,), 1)}}
    state |= {f"tiny{i}": {"fp32_param": finite("float32", (i % 5,), i)} for i in range(200)}
    a = zero1ckpt.write(work / "a", state, dp_size=4, bucket_size=5000)
    check_state(a, state)
    check_state(zero1ckpt.reshard(work / "a", work / "b", to_dp=7), state)


def test_no_params_and_only_empty_ones(work):
    for i, state in enumerate([{}, {"w": {"fp32_param": torch.ones(0)}}, {"w": {}}]):
        path = work / str(i)
        zero1ckpt.write(path, state, dp_size=3)
        made = zero1ckpt.reshard(path, work / f"{i}b", to_dp=2)
        assert made.names() == list(state) and zero1ckpt.verify(made.path, deep=True, against=path)


def test_names_of_any_text(work):
    names = ["", "a b", "ä/ö", "..", "a\nb", "\0", "__metadata__", "$x", '"', "x" * 300, "\U0001f600"]
    state = {name: {"fp32_param": torch.full((3,), float(i)), f"s{name}": W[0]} for i, name in enumerate(names)}
    check_state(zero1ckpt.write(work / "a", state, dp_size=2), state)
    check_state(zero1ckpt.reshard(work / "a", work / "b", to_dp=3), state)
    assert sorted(p.name for p in (work / "b").iterdir()) == [
        "manifest.json",
        *(f"rank-0000{i}-of-00003.safetensors" for i in range(3)),
    ]


def test_extra_tensors_of_clashing_places_stay_apart(work):
    extra = {
        "a.b#2": torch.tensor(0.0),
        "a.b": torch.tensor(1.0),
        "a": {"b": torch.tensor(2.0), "b#2": torch.tensor(3.0), "b#3": torch.tensor(4.0), "": torch.ones(0)},
    }
    back = zero1ckpt.write(work / "a", {"w": {"fp32_param": W}}, dp_size=2, extra=extra).extra
    values = [back["a.b#2"], back["a.b"], *(back["a"][key] for key in ("b", "b#2", "b#3"))]
    assert [float(v) for v in values] == [0, 1, 2, 3, 4] and back["a"][""].numel() == 0
    assert zero1ckpt.verify(work / "a", deep=True)


def test_groups_with_tensors(work):
    groups = [{"lr": torch.tensor(0.1), "params": ["b"]}, {"lr": 0.2, "params": ["a"]}]
    state = {"a": {"fp32_param": W}, "b": {"fp32_param": W}}
    zero1ckpt.write(work / "a", state, dp_size=2, groups=groups, extra={"lr": torch.tensor(7.0)})
    made = zero1ckpt.reshard(work / "a", work / "b", to_dp=3)
    assert float(made.groups[0]["lr"]) == pytest.approx(0.1) and made.groups[1] == {"lr": 0.2, "params": ["a"]}
    assert float(made.extra["lr"]) == 7
    assert zero1ckpt.verify(work / "b", deep=True, against=work / "a")


def test_missing_parents_are_made_and_str_paths_are_taken(work, monkeypatch):
    monkeypatch.chdir(work)
    made = zero1ckpt.write("x/y/z", {"w": {"fp32_param": W}}, dp_size=2)
    assert made.path == work / "x" / "y" / "z"


def test_workers_leave_no_trace(work):
    state = small_state(1)
    for workers in (1, 2, 7):
        zero1ckpt.write(work / str(workers), state, dp_size=5, bucket_size=100, workers=workers)
    assert tree(work / "1") == tree(work / "2") == tree(work / "7")


# ------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize("dp", [0, -1, 100_000, True, 2.0, "2", None])
def test_dp_size(work, dp):
    refused(work, 2, {"w": {"fp32_param": W}}, match="dp size", dp_size=dp)


@pytest.mark.parametrize("bucket", [0, -1, True, 1.5, "many"])
def test_bucket_size(work, bucket):
    refused(work, 2, {"w": {"fp32_param": W}}, match="bucket size", bucket_size=bucket)


@pytest.mark.parametrize("step", [-1, 1.0, None, True, "3"])
def test_step(work, step):
    refused(work, 2, {"w": {"fp32_param": W}}, match="step", step=step)


@pytest.mark.parametrize("workers", [0, -1])
def test_workers(work, workers):
    refused(work, 2, {"w": {"fp32_param": W}}, match="workers", workers=workers)


def test_another_shape(work):
    refused(work, 5, {"w": {"fp32_param": W, "exp_avg": W.T}}, "w", "exp_avg", "[3, 2]", "[2, 3]")
    refused(work, 5, {"w": {"fp32_param": W, "exp_avg": torch.ones(6)}}, "w", "exp_avg")


def test_another_dtype(work):
    state = {"a": {"fp32_param": W, "exp_avg": W}, "b": {"fp32_param": W, "exp_avg": W.double()}}
    refused(work, 5, state, "b", "exp_avg", "float64", "float32, as for a")


@pytest.mark.parametrize("slot", ["fp32_param", "exp_avg", "step"])
def test_dtype_that_nothing_holds(work, slot):
    tensor = torch.ones((), dtype=torch.complex64) if slot == "step" else W.to(torch.complex64)
    refused(work, 5, {"w": {"fp32_param": W} | {slot: tensor}}, "w", "complex64")


@pytest.mark.parametrize("value", [np.ones(3), [1.0], 3, None])
def test_what_is_no_tensor(work, value):
    refused(work, 2, {"w": {"fp32_param": value}}, "w", "fp32_param", type(value).__name__)
    refused(work, 2, {"w": {"fp32_param": W, "step": value}}, "w", "step")


def test_names_that_are_no_text(work):
    refused(work, 2, {3: {"fp32_param": W}}, "3")
    refused(work, 2, {"w": {3: W}}, "3")
    refused(work, 2, {"w\ud800": {"fp32_param": W}}, "ud800")
    refused(work, 2, {"w": {"s\ud800": W}}, "ud800")


def test_groups(work):
    state = {"a": {"fp32_param": W}, "b": {"fp32_param": W}}
    refused(work, 2, state, "c", match="no state", groups=[{"params": ["a", "b", "c"]}])
    refused(work, 2, state, "a", match="two groups", groups=[{"params": ["a", "b"]}, {"params": ["a"]}])
    refused(work, 2, state, "b", match="in no group", groups=[{"params": ["a"]}, {}])
    refused(work, 2, state, match="no state", groups=[{"params": [W]}])
    refused(
        work,
        2,
        state,
        "groups[1].f",
        match="cannot be stored",
        groups=[{"params": ["a"]}, {"params": ["b"], "f": object()}],
    )


def test_params(work):
    state = {"a": {"fp32_param": W}}
    refused(work, 2, state, "b", match="no state", params={"b": {}})
    refused(work, 2, state, "a", "colour", params={"a": {"colour": 1}})
    refused(work, 5, state, "a", "float3", params={"a": {"dtype": "float3"}})
    refused(work, 5, state, "a", "float3", params={"a": {"grad_dtype": "float3"}})
    made = zero1ckpt.write(work / "x", state, dp_size=1, params={"a": {"dtype": torch.bfloat16}})
    assert made.state.params[0].dtype == "bfloat16"


def test_extra(work):
    refused(work, 2, {"w": {"fp32_param": W}}, "extra.a[0]", match="cannot be stored", extra={"a": [{1}]})
    refused(
        work, 5, {"w": {"fp32_param": W}}, "extra.t", "complex64", extra={"t": torch.ones(1, dtype=torch.complex64)}
    )


def test_format(work):
    refused(work, 5, {"w": {"fp32_param": W}}, match="unknown format", format="bucketshards")
    refused(work, 5, {"w": {"fp32_param": W}}, match="container", container="zarr")


# ------------------------------------------------------------------------------------------------------------- reading


class Counted:
    """Counts what is read of each file."""

    def __init__(self, monkeypatch):
        self.bytes = 0
        real = LocalStore.readv_into

        def counting(store, key, offset, buffers):
            self.bytes += sum(b.nbytes for b in buffers)
            return real(store, key, offset, buffers)

        monkeypatch.setattr(LocalStore, "readv_into", counting)


def test_a_range_reads_only_its_bytes(work, monkeypatch):
    state = {"w": {"fp32_param": finite("float32", (100_000,), 1), "exp_avg": finite("float32", (100_000,), 2)}}
    zero1ckpt.write(work / "a", state, dp_size=4)
    counted = Counted(monkeypatch)
    checkpoint = zero1ckpt.open(work / "a")
    checkpoint.read("w", "exp_avg", Range(0, 0))
    opened = counted.bytes
    assert opened < 4096, "opening reads the manifest only"
    assert same_bits(checkpoint.read("w", "exp_avg", Range(10, 20)), state["w"]["exp_avg"][10:20])
    headers = 4096
    assert counted.bytes - opened == 40 + headers
    before = counted.bytes
    checkpoint.read("w", "fp32_param", Range(25_014, 25_034))  # across two ranks
    assert counted.bytes - before == 80 + 2 * headers
    before = counted.bytes
    checkpoint.read("w", "fp32_param")
    assert counted.bytes - before == 400_000 + 4 * headers


def test_wrong_names_and_ranges(work):
    zero1ckpt.write(work / "a", {"w": {"fp32_param": W}}, dp_size=2)
    checkpoint = zero1ckpt.open(work / "a")
    for call, words in (
        (lambda: checkpoint.read("v", "fp32_param"), ("v", "no such param")),
        (lambda: checkpoint.read("w", "exp_avg"), ("w", "exp_avg", "fp32_param")),
        (lambda: checkpoint.read("w", "fp32_param", Range(0, 7)), ("w", "leaves the", "6")),
    ):
        with pytest.raises(zero1ckpt.Zero1CkptError) as caught:
            call()
        assert caught.value.exit_code == 2 and all(word in str(caught.value) for word in words)


def test_attributes(work):
    state = small_state(1)
    made = zero1ckpt.write(work / "a", state, dp_size=3, bucket_size=100, step=5)
    assert (made.format, made.container, made.step) == ("bucket_shards", "safetensors", 5)
    assert made.layout.rules.dp_size == 3 and made.layout.rules.bucket_size == 100
    assert made.parts == {"": made} and made.extra == {}
    assert made.names() == list(state) and made.model_tensors() == {}
    assert made.slots == ("fp32_param", "exp_avg", "exp_avg_sq")
    assert len(made.digest) == 16

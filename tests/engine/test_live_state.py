"""The state as storage sees it: shards, scalars and groups go out, come back elsewhere, and training goes on."""

import pytest
import torch

from tests.engine.harness import run_ranks
from tests.engine.models import SHAPES, Bag, bits_equal, dump, full_slots, grads_of, mean_in_rank_order
from zero1ckpt.core.errors import UnsupportedError, UsageError
from zero1ckpt.engine.zero1 import Zero1Optimizer
from zero1ckpt.model.state import Scalar, SlotSpec

INNER = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "foreach": False}),
    "dampening": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1, "foreach": False}),
    "momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "foreach": False}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.5, "foreach": False}),
}


def build(name, dtype, bucket_size):
    model = Bag(dtype)
    cls, options = INNER[name]
    return model, Zero1Optimizer(model, cls, bucket_size=bucket_size, unused="skip", **options)


def advance(model, optimizer, steps, sums, rank):
    """Every rank gets the same gradients, so the mean over ranks is exact at dp sizes that are powers of two."""
    for step in steps:
        model(grads_of(SHAPES, step, 0), SHAPES if sums is None else sums).backward()
        optimizer.step()


def save(rank, name, dtype, bucket_size, steps):
    model, optimizer = build(name, dtype, bucket_size)
    advance(model, optimizer, range(steps), [n for n in SHAPES if n != "c"], rank)
    return {
        "shards": dump(optimizer),
        "layout": optimizer.layout,
        "specs": optimizer.param_specs,
        "slots": optimizer.slot_specs(),
        "scalars": optimizer.local_scalars(),
        "absent": optimizer.local_absent(),
        "groups": optimizer.group_values(),
        "step": optimizer.applied_steps,
        "params": {n: p.detach().clone() for n, p in model.named_parameters()},
    }


def saves(rank, bucket_size, steps):
    return {
        (name, dtype): save(rank, name, dtype, bucket_size, steps)
        for name in INNER
        for dtype in (torch.float32, torch.bfloat16)
    }


def merge(parts):
    """What a checkpoint holds: whole tensors by param, scalars by index, the union of what is absent."""
    first = parts[0]
    scalars = [{} for _ in first["specs"]]
    for part in parts:
        for index, values in part["scalars"].items():
            assert scalars[index] in ({}, values)
            scalars[index] = values
    shards = [part["shards"] for part in parts]
    whole = {s.name: full_slots(shards, first["layout"], first["specs"], s.name) for s in first["slots"]}
    absent = set().union(*(part["absent"] for part in parts))
    return {**first, "whole": whole, "scalars": scalars, "absent": absent, "shards": None}


def fill(optimizer, state):
    optimizer.begin_load(state["slots"], state["absent"], state["scalars"])
    for number, buffer in enumerate(optimizer.layout.buffers):
        for part in buffer.fragments(optimizer.rank):
            for slot, whole in state["whole"].items():
                shard = optimizer.shard(slot, number, part.bucket)
                low, high = part.gbuf_local.start, part.gbuf_local.end
                shard[low:high] = whole[part.name][part.param.start : part.param.end]
    optimizer.finish_load(state["step"], state["groups"])


def resume(rank, states, bucket_size, steps):
    results = {}
    for (name, dtype), state in states.items():
        model, optimizer = build(name, dtype, bucket_size)
        advance(model, optimizer, range(90, 92), None, rank)  # leaves traces that a load must wipe out
        optimizer.param_groups[0]["lr"] = 7.0
        kept = [(id(g), [id(p) for p in g["params"]]) for g in optimizer.param_groups]
        views = {f.index: f.main.data_ptr() for f in optimizer.fragments}
        fill(optimizer, state)
        assert kept == [(id(g), [id(p) for p in g["params"]]) for g in optimizer.param_groups]
        assert views == {f.index: f.main.data_ptr() for f in optimizer.fragments}
        assert optimizer.group_values() == state["groups"]
        for param, before in state["params"].items():
            assert bits_equal(model.get_parameter(param), before), param
        back = merge_own(optimizer)
        for slot, values in back.items():
            for param, (start, flat) in values.items():
                assert bits_equal(flat, state["whole"][slot][param][start : start + flat.numel()]), (name, slot, param)
        assert {i: state["scalars"][i] for i in optimizer.local_scalars()} == optimizer.local_scalars()
        check_scalar_types(optimizer)
        advance(model, optimizer, steps, None, rank)
        results[name, dtype] = {n: p.detach().clone() for n, p in model.named_parameters()}, optimizer.applied_steps
    return results


def merge_own(optimizer):
    found = {}
    for spec in optimizer.slot_specs():
        found[spec.name] = {
            f.spec.name: (f.param.start, optimizer.shard(spec.name, f.buffer, f.bucket)[f.local.start : f.local.end])
            for f in optimizer.fragments
        }
    return found


def check_scalar_types(optimizer):
    for f in optimizer.fragments:
        step = optimizer.inner.state[f.main].get("step") if f.main in optimizer.inner.state else None
        if step is not None:
            assert step.dtype == torch.float32 and step.device.type == "cpu" and step.dim() == 0


def straight(rank, bucket_size, first, more):
    results = {}
    for name in INNER:
        for dtype in (torch.float32, torch.bfloat16):
            model, optimizer = build(name, dtype, bucket_size)
            advance(model, optimizer, range(first), [n for n in SHAPES if n != "c"], rank)
            advance(model, optimizer, more, None, rank)
            results[name, dtype] = {n: p.detach().clone() for n, p in model.named_parameters()}, optimizer.applied_steps
    return results


@pytest.mark.dist
def test_resume_elsewhere_is_the_uninterrupted_run():
    parts = run_ranks(2, saves, 64, 5)
    states = {key: merge([part[key] for part in parts]) for key in parts[0]}
    c = list(SHAPES).index("c")
    assert (c, "momentum_buffer") in states["dampening", torch.float32]["absent"]
    assert states["adamw", torch.float32]["absent"] == set()
    assert states["adamw", torch.float32]["scalars"][c] == {"step": Scalar("float32", 0.0)}
    expected = run_ranks(2, straight, 64, 5, range(5, 10))[0]
    for size, bucket in ((2, 64), (4, 1), (1, "none")):
        for result in run_ranks(size, resume, states, bucket, range(5, 10)):
            for key, (params, step) in expected.items():
                assert result[key][1] == step == 10
                for name, param in params.items():
                    assert bits_equal(result[key][0][name], param), (size, key, name)


@pytest.mark.dist
@pytest.mark.parametrize("damage", ["bf16", "step", "swap"])
def test_a_damaged_state_does_not_pass(damage):
    parts = run_ranks(1, saves, "none", 5)
    state = merge([part["adamw", torch.float32] for part in parts])
    expected = run_ranks(1, straight, "none", 5, range(5, 10))[0]["adamw", torch.float32][0]
    if damage == "bf16":
        moments = state["whole"]["exp_avg"]
        state["whole"]["exp_avg"] = {name: value.bfloat16().float() for name, value in moments.items()}
    elif damage == "step":
        state["scalars"] = [{k: Scalar(v.dtype, v.value + 1) for k, v in s.items()} for s in state["scalars"]]
    else:
        state["whole"]["exp_avg"], state["whole"]["exp_avg_sq"] = (
            state["whole"]["exp_avg_sq"],
            state["whole"]["exp_avg"],
        )
    model, optimizer = build("adamw", torch.float32, "none")
    fill(optimizer, state)
    advance(model, optimizer, range(5, 10), None, 0)
    assert not all(bits_equal(model.get_parameter(name), param) for name, param in expected.items())


def test_padding_is_zero_and_shards_are_not_copies():
    model, optimizer = build("momentum", torch.float32, 64)
    advance(model, optimizer, range(2), None, 0)
    for spec in optimizer.slot_specs():
        for number, buffer in enumerate(optimizer.layout.buffers):
            for bucket in range(buffer.bucket_count):
                shard = optimizer.shard(spec.name, number, bucket)
                assert shard.is_contiguous() and shard.numel() == int(buffer.shard_numel[bucket])
                assert shard.data_ptr() == optimizer.shard(spec.name, number, bucket).data_ptr()
                owned = torch.zeros_like(shard, dtype=torch.bool)
                for f in optimizer.fragments:
                    if (f.buffer, f.bucket) == (number, bucket):
                        owned[f.local.start : f.local.end] = True
                assert not shard[~owned].view(torch.int32).any(), spec
    with pytest.raises(KeyError):
        optimizer.shard("exp_avg", 0, 0)


def test_state_starts_without_a_step():
    _, adamw = build("adamw", torch.bfloat16, 64)
    assert adamw.slot_specs() == (
        SlotSpec("fp32_param", "float32"),
        SlotSpec("exp_avg", "float32"),
        SlotSpec("exp_avg_sq", "float32"),
    )
    assert adamw.applied_steps == 0 and adamw.local_absent() == set()
    assert all(values == {"step": Scalar("float32", 0.0)} for values in adamw.local_scalars().values())
    _, lazy = build("dampening", torch.float32, 64)
    assert lazy.slot_specs() == (SlotSpec("fp32_param", "float32"),) and lazy.local_absent() == set()
    _, adagrad = build("adagrad", torch.float32, 64)
    assert [s.name for s in adagrad.slot_specs()] == ["fp32_param", "sum"]
    assert all(float(state["sum"][0]) == 0.5 for state in adagrad.state.values() if state["sum"].numel())


def test_slots_that_only_one_group_has():
    model = Bag()
    groups = [{"params": [model.a], "momentum": 0.9}, {"params": [model.long]}]
    optimizer = Zero1Optimizer(groups, torch.optim.SGD, model=model, lr=0.1, bucket_size=64)
    assert [s.name for s in optimizer.slot_specs()] == ["fp32_param", "momentum_buffer"]
    assert [s.name for s in optimizer.param_specs] == ["a", "long"]
    advance(model, optimizer, range(2), None, 0)
    assert optimizer.local_absent() == {(1, "momentum_buffer")}
    optimizer.param_groups[1]["momentum"] = 0.5  # its state is made now
    advance(model, optimizer, range(2), None, 0)
    assert optimizer.local_absent() == set()


def test_what_the_inner_optimizer_does_not_know_is_refused():
    _, optimizer = build("adamw", torch.float32, 64)
    main = SlotSpec("fp32_param", "float32")
    none = [{} for _ in optimizer.param_specs]
    before = dump(optimizer)
    with pytest.raises(UnsupportedError, match="momentum_buffer"):
        optimizer.begin_load([main, SlotSpec("momentum_buffer", "float32")], set(), none)
    with pytest.raises(UnsupportedError, match="cast"):
        optimizer.begin_load([main, SlotSpec("exp_avg", "bfloat16")], set(), none)
    strange = [{"mu_product": Scalar("float32", 1.0)} for _ in optimizer.param_specs]
    with pytest.raises(UnsupportedError, match="mu_product"):
        optimizer.begin_load([main], set(), strange)
    after = dump(optimizer)
    assert all(
        bits_equal(a, b)
        for s in before
        for x, y in zip(before[s], after[s], strict=True)
        for a, b in zip(x, y, strict=True)
    )
    with pytest.raises(UsageError, match="groups"):
        optimizer.begin_load([main], set(), none)
        optimizer.finish_load(1, [{}, {}])


def test_a_source_without_step_scalars_gives_the_step_of_the_run():
    _, optimizer = build("adamw", torch.float32, 64)
    slots = [SlotSpec(n, "float32") for n in ("fp32_param", "exp_avg", "exp_avg_sq")]
    optimizer.begin_load(slots, {(0, "exp_avg"), (0, "exp_avg_sq")}, [{} for _ in optimizer.param_specs])
    optimizer.finish_load(41, None)
    steps = {index: values["step"].value for index, values in optimizer.local_scalars().items()}
    assert steps.pop(0) == 0.0 and set(steps.values()) == {41.0}
    assert optimizer.applied_steps == 41


def bound(rank, size):
    model = Bag()
    optimizer = Zero1Optimizer(model, torch.optim.SGD, lr=1.0, bucket_size=64)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    model(grads_of(SHAPES, 3, rank)).backward()
    optimizer.prepare_grads()
    own = {}
    for f in optimizer.fragments:
        shard = optimizer._main_grads[f.buffer][f.bucket][f.local.start : f.local.end]
        own[f.spec.name] = (f.param.start, shard.clone())
    assert start
    return own


@pytest.mark.dist
@pytest.mark.parametrize("size", [2, 5])
def test_reduced_gradient_is_within_its_bound(size):
    grads = [grads_of(SHAPES, 3, r) for r in range(size)]
    exact = {n: sum(g[n].double() for g in grads).flatten() / size for n in SHAPES}
    limit = {n: size * 2.0**-23 * sum(g[n].double().abs() for g in grads).flatten() for n in SHAPES}
    ordered = mean_in_rank_order(grads)
    seen = 0
    for own in run_ranks(size, bound, size):
        for name, (start, part) in own.items():
            at = slice(start, start + part.numel())
            seen += part.numel()
            assert bool(((part.double() - exact[name][at]).abs() <= limit[name][at]).all()), name
            assert bits_equal(part, ordered[name].flatten()[at])
    assert seen == sum(v.numel() for v in exact.values())

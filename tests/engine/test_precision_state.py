"""State of a mixed-precision run: loss scale and narrow moments go through save, reshard and load unchanged."""

import json

import pytest
import torch
from torch import nn

import zero1ckpt
from tests.engine.harness import run_ranks
from tests.engine.models import SHAPES, Bag, bits_equal, dump, full_slots, grads_of, mean_in_rank_order
from zero1ckpt import AdamW, DynamicScale, Zero1Optimizer
from zero1ckpt.core.errors import UnsupportedError, UsageError
from zero1ckpt.model.state import LossScale

RULE = DynamicScale(initial=256.0, growth_interval=3, hysteresis=2)
NARROW = {"lr": 1e-2, "exp_avg_dtype": torch.bfloat16, "betas": (0.9, 0.99)}


# ------------------------------------------------------------------------------------------------- our AdamW, by itself


def pairs(shape=(37, 5), steps=6):
    params = [nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1))) for _ in range(2)]
    for step in range(steps):
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(10 + step)) * 10.0 ** (step - 3)
        for param in params:
            param.grad = grad.clone()
        yield params


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.0}, {"betas": (0.8, 0.95), "eps": 1e-5, "lr": 0.3}])
def test_every_bit_of_torch_with_moments_of_the_params_dtype(options):
    ours = theirs = None
    for a, b in pairs():
        ours = ours or AdamW([a], **options)
        theirs = theirs or torch.optim.AdamW([b], foreach=False, **options)
        ours.step()
        theirs.step()
        assert bits_equal(a, b)
        for slot in ("step", "exp_avg", "exp_avg_sq"):
            assert bits_equal(ours.state[a][slot], theirs.state[b][slot])


def test_narrow_moments_are_rounded_only_when_they_are_stored(monkeypatch):
    monkeypatch.setattr("zero1ckpt.engine.adamw.CHUNK", 16)
    ours, m, v = None, torch.zeros(37, 5), torch.zeros(37, 5)
    for step, (a, b) in enumerate(pairs(), 1):
        ours = ours or AdamW([a], exp_avg_sq_dtype=torch.float16, **NARROW)
        ours.step()
        grad = b.grad
        with torch.no_grad():
            b.mul_(1 - 1e-2 * 1e-2)
            m = m.lerp(grad, 1 - 0.9)
            v = v.mul(0.99).addcmul_(grad, grad, value=1 - 0.99)
            b.addcdiv_(m, (v.sqrt() / (1 - 0.99**step) ** 0.5).add_(1e-8), value=-1e-2 / (1 - 0.9**step))
        m, v = m.bfloat16().float(), v.half().float()
        assert bits_equal(a, b)
        assert bits_equal(ours.state[a]["exp_avg"], m.bfloat16()) and bits_equal(ours.state[a]["exp_avg_sq"], v.half())


def test_state_dicts_keep_the_dtype_of_narrow_moments():
    for a, _ in pairs(steps=2):
        ours = AdamW([a], **NARROW)
        ours.step()
    other = AdamW([nn.Parameter(a.detach().clone())], **NARROW)
    other.load_state_dict(ours.state_dict())
    (loaded,) = other.state.values()
    for slot, value in ours.state[a].items():
        assert bits_equal(loaded[slot], value) and loaded[slot].data_ptr() != value.data_ptr()
    wide = AdamW([nn.Parameter(a.detach().clone())])
    state = ours.state_dict()
    wide.load_state_dict({**state, "state": {}})
    wide.param_groups[0]["exp_avg_dtype"] = None
    state["param_groups"][0]["exp_avg_dtype"] = None
    with pytest.raises(UnsupportedError, match="exp_avg would be cast"):
        wide.load_state_dict(state)


@pytest.mark.parametrize("options", [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"exp_avg_dtype": torch.int8}])
def test_what_our_adamw_refuses(options):
    with pytest.raises(UsageError, match="AdamW"):
        AdamW([nn.Parameter(torch.ones(2))], **options)


# ----------------------------------------------------------------------------------------------------- through storage


def build(**options):
    model = Bag(torch.float16)
    return model, Zero1Optimizer(model, AdamW, **{"bucket_size": 64, "loss_scale": RULE, **NARROW, **options})


def advance(model, optimizer, steps):
    for step in steps:
        optimizer.scale(model(grads_of(SHAPES, step, 0))).backward()
        if step in (1, 2, 5) and optimizer.rank == 0:
            model.a.main_grad.fill_(float("nan"))
        optimizer.step()


def record(model, optimizer):
    return {
        "scale": optimizer.scaler.state(),
        "step": optimizer.applied_steps,
        "shards": dump(optimizer),
        "layout": optimizer.layout,
        "specs": optimizer.param_specs,
        "params": {n: p.detach().clone() for n, p in model.named_parameters()},
    }


def saves(rank, folder):
    model, optimizer = build()
    optimizer.save(f"{folder}/start")
    advance(model, optimizer, range(4))
    optimizer.save(f"{folder}/ckpt")
    before = record(model, optimizer)
    advance(model, optimizer, range(4, 8))
    plain_model, plain = Bag(), None
    plain = Zero1Optimizer(plain_model, torch.optim.AdamW, bucket_size=64)
    plain.save(f"{folder}/plain")
    return before, record(model, optimizer)


def resumes(rank, path, more):
    model, optimizer = build(bucket_size=1000)
    advance(model, optimizer, (0, 1))  # leaves traces that the load wipes out
    optimizer.load(path)
    found = record(model, optimizer)
    advance(model, optimizer, range(4, more))
    return found, record(model, optimizer)


def refuses(rank, path):
    for options in ({"loss_scale": None}, {"loss_scale": 4.0}):
        _, optimizer = build(**options)
        with pytest.raises(UsageError, match=r"dynamic loss scale.*loss_scale=\"dynamic\""):
            optimizer.load(path)
        optimizer.load(path, unexpected="drop")
    _, wide = build(exp_avg_dtype=None)
    with pytest.raises(UnsupportedError, match=r"exp_avg.* cast"):
        wide.load(path)


def whole(ranks, slot):
    return full_slots([r["shards"] for r in ranks], ranks[0]["layout"], ranks[0]["specs"], slot)


def same_state(a, b):
    for slot in ("fp32_param", "exp_avg", "exp_avg_sq"):
        mine, theirs = whole(a, slot), whole(b, slot)
        assert all(bits_equal(mine[name], theirs[name]) for name in mine), slot
    for rank in (*a, *b):
        assert rank["scale"] == a[0]["scale"] and rank["step"] == a[0]["step"]
        assert all(bits_equal(rank["params"][n], a[0]["params"][n]) for n in SHAPES)


@pytest.mark.dist
def test_loss_scale_and_narrow_moments_at_other_dp_sizes(work):
    ranks = run_ranks(4, saves, str(work))
    saved, later = [r[0] for r in ranks], [r[1] for r in ranks]
    assert saved[0]["scale"] == LossScale(128.0, 1, 0) and saved[0]["step"] == 2
    assert {str(s["exp_avg"][0][0].dtype) for s in (r["shards"] for r in saved)} == {"torch.bfloat16"}
    zero1ckpt.reshard(work / "ckpt", work / "two", to_dp=2, bucket_size=100)
    zero1ckpt.reshard(work / "two", work / "back", to_dp=4, bucket_size=64)
    for file in (work / "ckpt").iterdir():
        assert file.read_bytes() == (work / "back" / file.name).read_bytes(), file.name
    assert zero1ckpt.verify(work / "two", against=work / "ckpt")
    assert not zero1ckpt.verify(work / "ckpt", against=work / "start")
    for size, path in ((4, "ckpt"), (2, "ckpt"), (1, "two")):
        resumed = run_ranks(size, resumes, str(work / path), 8)
        same_state([r[0] for r in resumed], saved)  # every rank has the same gradients: means of 1, 2 and 4 are exact
        same_state([r[1] for r in resumed], later)
    run_ranks(1, refuses, str(work / "ckpt"))
    part = json.loads((work / "two" / "manifest.json").read_text())["parts"][0]
    assert part["loss_scale"] == {"scale": 128.0, "finite_steps": 1, "hysteresis_left": 0}
    assert "loss_scale" not in (work / "plain" / "manifest.json").read_text()
    assert zero1ckpt.open(work / "ckpt").read("long", "exp_avg").dtype == torch.bfloat16


def narrow_is_sharded_alike(rank):
    model, main = Bag(), {n: p.detach().clone() for n, p in Bag().named_parameters()}
    ours = Zero1Optimizer(model, AdamW, bucket_size=64, **NARROW)
    theirs = AdamW(list(main.values()), **NARROW)
    for step in range(4):
        model(grads_of(SHAPES, step, rank)).backward()
        ours.step()
        for name, grad in mean_in_rank_order([grads_of(SHAPES, step, r) for r in range(3)]).items():
            main[name].grad = grad
        theirs.step()
        assert all(bits_equal(p, main[n]) for n, p in model.named_parameters())
    assert all(state["exp_avg"].dtype == torch.bfloat16 for state in ours.state.values())
    assert [s.dtype for s in ours.slot_specs()] == ["float32", "bfloat16", "float32"]


@pytest.mark.dist
def test_narrow_moments_under_zero1():
    run_ranks(3, narrow_is_sharded_alike)

"""Groups, schedulers, accumulation, unused and frozen params, clipping, dtypes: what a training loop does."""

import copy

import pytest
import torch
from torch import nn

from tests.engine.harness import run_ranks
from tests.engine.models import SHAPES, Bag, bits_equal, grads_of, mean_in_rank_order
from zero1ckpt.engine.zero1 import Zero1Optimizer

RANKS = 3
ADAMW = {"lr": 1e-2, "foreach": False}


def feed(params, step, names=None, micros=1):
    """Put the mean over ranks of the sum over micro-batches into ``.grad``, as the engine computes it."""
    sums = []
    for rank in range(RANKS):
        total = {k: torch.zeros(s) for k, s in SHAPES.items()}
        for micro in range(micros):
            for name, grad in grads_of(SHAPES, step, rank, micro).items():
                total[name] += grad
        sums.append(total)
    mean = mean_in_rank_order(sums)
    for name, param in params.items():
        if names is None or name in names:
            param.grad = mean[name].to(param.dtype)


def expect_equal(model, reference):
    for name, param in reference.named_parameters():
        assert bits_equal(model.get_parameter(name), param), name


def groups_of(model):
    weights = [p for n, p in model.named_parameters() if n not in ("b", "one")]
    return [{"params": weights, "weight_decay": 0.1}, {"params": [model.b, model.one], "weight_decay": 0.0, "lr": 3e-3}]


def groups_and_scheduler(rank):
    model, plain = Bag(), Bag()
    ours = Zero1Optimizer(groups_of(model), torch.optim.AdamW, model=model, bucket_size=64, **ADAMW)
    theirs = torch.optim.AdamW(groups_of(plain), **ADAMW)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)) for o in (ours, theirs)]
    identity = [id(group) for group in ours.param_groups]
    for step in range(6):
        model(grads_of(SHAPES, step, rank)).backward()
        ours.step()
        feed(dict(plain.named_parameters()), step)
        theirs.step()
        for scheduler in schedulers:
            scheduler.step()
        expect_equal(model, plain)
    assert [id(group) for group in ours.param_groups] == identity
    assert ours.param_groups[0]["params"][0] is model.a
    assert [g["lr"] for g in ours.group_values()] == [g["lr"] for g in theirs.param_groups]
    assert "params" not in ours.group_values()[0]
    assert ours.applied_steps == 6


def accumulation(rank):
    model, plain = Bag(), Bag()
    ours = Zero1Optimizer(model, torch.optim.AdamW, bucket_size=64, **ADAMW)
    theirs = torch.optim.AdamW(plain.parameters(), **ADAMW)
    for step in range(4):
        with ours.no_sync():
            for micro in range(3):
                model(grads_of(SHAPES, step, rank, micro)).backward()
        model(grads_of(SHAPES, step, rank, 3)).backward()
        assert model.a.grad is None
        if step % 2:  # the engine does not need it
            ours.step()
        else:
            ours.step()
            ours.zero_grad()
        feed(dict(plain.named_parameters()), step, micros=4)
        theirs.step()
        expect_equal(model, plain)
    assert not model.a.main_grad.any()


def unused(rank):
    used = {0: ("a", "b"), 1: ("a", "long"), 2: ("a", "one")}[rank]
    anywhere = ("a", "b", "long", "one")
    for mode in ("zero", "skip"):
        model, plain = Bag(), Bag()
        ours = Zero1Optimizer(model, torch.optim.AdamW, bucket_size=64, unused=mode, **ADAMW)
        theirs = torch.optim.AdamW(plain.parameters(), **ADAMW)
        for step in range(3):
            model(grads_of(SHAPES, step, rank), SHAPES if step == 0 else used).backward()
            ours.step()
            everything = [grads_of(SHAPES, step, r) for r in range(RANKS)]
            if step:
                for r, names in enumerate([("a", "b"), ("a", "long"), ("a", "one")]):
                    everything[r] = {k: g if k in names else torch.zeros_like(g) for k, g in everything[r].items()}
            mean = mean_in_rank_order(everything)
            for name, param in plain.named_parameters():
                missing = step and name not in anywhere
                param.grad = None if missing and mode == "skip" else mean[name]
            theirs.step()
            expect_equal(model, plain)
            expected = tuple(n for n in SHAPES if n not in anywhere) if step else ()
            assert set(ours.last.unused) == set(expected), (mode, ours.last)


def frozen_and_tied(rank):
    class Tied(Bag):
        def __init__(self):
            super().__init__()
            self.again = self.a
            self.c.requires_grad_(False)

    model, plain = Tied(), Tied()
    ours = Zero1Optimizer(model, torch.optim.AdamW, bucket_size=64, **ADAMW)
    names = [s.name for s in ours.param_specs]
    assert names == [n for n in SHAPES if n != "c"] and model.again is model.a
    theirs = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], **ADAMW)
    before = model.c.clone()
    for step in range(3):
        if step == 2:  # frozen on the way: skipped, whatever it has accumulated
            model(grads_of(SHAPES, step, rank)).backward()
            model.long.requires_grad_(False)
            plain.long.requires_grad_(False)
        else:
            model(grads_of(SHAPES, step, rank)).backward()
        ours.step()
        feed({n: p for n, p in plain.named_parameters() if p.requires_grad}, step)
        if step == 2:
            plain.long.grad = None
        theirs.step()
        expect_equal(model, plain)
    assert bits_equal(model.c, before)


def norm_and_clip(rank):
    for dtype in (torch.float32, torch.bfloat16):
        model = Bag(dtype)
        ours = Zero1Optimizer(model, torch.optim.SGD, bucket_size=64, max_grad_norm=0.5, lr=1.0)
        mean = mean_in_rank_order([rounded(grads_of(SHAPES, 0, r), dtype) for r in range(RANKS)])
        whole = torch.cat([g.flatten().double() for g in mean.values()]).norm()
        model(grads_of(SHAPES, 0, rank)).backward()
        assert ours.get_grad_norm() == pytest.approx(float(whole), rel=1e-12)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        ours.step()
        assert ours.last.grad_norm == pytest.approx(float(whole), rel=1e-12)
        factor = (0.5 / (whole + 1e-6)).clamp(max=1).float()
        for name, param in model.named_parameters():
            expected = (before[name].float() - mean[name] * factor).to(dtype)
            assert bits_equal(param, expected), name
        assert not ours.last.skipped and not ours.last.found_inf
        model(grads_of(SHAPES, 1, rank)).backward()
        assert float(ours.clip_grad_norm_(1e-3)) > 1e-3
        assert ours.get_grad_norm() == pytest.approx(1e-3, rel=1e-3)
        with pytest.raises(Exception, match=r"after the gradients were reduced"):
            model(grads_of(SHAPES, 1, rank)).backward()
        ours.zero_grad()
        ours.step()
        assert ours.last.grad_norm == 0.0


def rounded(grads, dtype):
    return {name: grad.to(dtype).float() for name, grad in grads.items()}


def bf16(rank):
    for grad_dtype in (None, torch.bfloat16):
        model = Bag(torch.bfloat16)
        main = {n: p.detach().float() for n, p in model.named_parameters()}
        theirs = torch.optim.AdamW(list(main.values()), **ADAMW)
        ours = Zero1Optimizer(model, torch.optim.AdamW, bucket_size=1000, grad_dtype=grad_dtype, **ADAMW)
        assert {(s.dtype, s.grad_dtype) for s in ours.param_specs} == {
            ("bfloat16", "float32" if grad_dtype is None else "bfloat16")
        }
        assert model.a.main_grad.dtype == (grad_dtype or torch.float32)
        for step in range(5):
            model(grads_of(SHAPES, step, rank)).backward()
            ours.step()
            mean = mean_in_rank_order([rounded(grads_of(SHAPES, step, r), torch.bfloat16) for r in range(RANKS)])
            for name, param in main.items():
                param.grad = mean[name]
            theirs.step()
            for name, param in model.named_parameters():
                assert bits_equal(param, main[name].bfloat16()), (name, step)


def mixed(rank):
    model = Bag(torch.bfloat16)
    model.b.data = model.b.data.float()
    ours = Zero1Optimizer(model, torch.optim.AdamW, **ADAMW)
    assert [b.key.param_dtype for b in ours.layout.buffers] == ["bfloat16", "float32"]
    before = model.b.detach().clone()
    model(grads_of(SHAPES, 0, rank)).backward()
    ours.step()
    assert not torch.equal(before, model.b)
    shard = ours.shard("fp32_param", 1, 0)
    assert shard.untyped_storage().data_ptr() == model.b.untyped_storage().data_ptr()
    assert ours.shard("fp32_param", 0, 0).untyped_storage().data_ptr() != model.a.untyped_storage().data_ptr()


class Lion(torch.optim.Optimizer):
    """Has one state of the param's shape, made in its first step, and replaces it in every step."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p not in self.state:
                    self.state[p] = {"exp_avg": torch.zeros_like(p) + 0.25, "count": 0}
                state = self.state[p]
                p.sub_(torch.sign(state["exp_avg"] * 0.9 + p.grad * 0.1), alpha=group["lr"])
                state["exp_avg"] = state["exp_avg"] * 0.99 + p.grad * 0.01
                state["count"] += 1


def custom(rank):
    model, plain = Bag(), Bag()
    ours = Zero1Optimizer(model, Lion, bucket_size=64, lr=1e-2)
    theirs = Lion(plain.parameters(), lr=1e-2)
    assert [s.name for s in ours.slot_specs()] == ["fp32_param"]
    for step in range(4):
        model(grads_of(SHAPES, step, rank)).backward()
        ours.step()
        feed(dict(plain.named_parameters()), step)
        theirs.step()
        expect_equal(model, plain)
        assert [s.name for s in ours.slot_specs()] == ["fp32_param", "exp_avg"]
        for param, state in ours.state.items():
            index = next(i for i, p in enumerate(ours._table.tensors) if p is param)
            fragment = next(f for f in ours.fragments if f.index == index)
            view = ours.shard("exp_avg", fragment.buffer, fragment.bucket)
            assert state["exp_avg"].untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
            assert set(state) == {"fp32_param", "exp_avg", "count"}
    assert ours.param_groups[0]["calls"] == 4
    assert all(v["count"].value == 4 and v["count"].dtype == "int64" for v in ours.local_scalars().values())
    assert ours.local_absent() == set()


def versions_hooks_and_copies(rank):
    model = Bag()
    ours = Zero1Optimizer(model, torch.optim.AdamW, **ADAMW)
    calls = []
    ours.register_step_post_hook(lambda *_: calls.append(1))
    twin = copy.deepcopy(model)
    assert not hasattr(twin.a, "main_grad") and twin.a.untyped_storage().nbytes() == twin.a.numel() * 4

    def closure():
        loss = model(grads_of(SHAPES, 0, rank))
        loss.backward()
        return loss

    stale = (model.a * model.a).sum()
    assert ours.step(closure) is not None
    assert calls == [1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()
    ours.zero_grad()
    later = Zero1Optimizer(model, torch.optim.AdamW, **ADAMW)
    model(grads_of(SHAPES, 0, rank)).backward()
    assert model.a.main_grad.any()
    later.step()
    with pytest.raises(Exception, match="made later"):
        ours.step()


def starts_equal(rank):
    model = Bag(seed=rank)
    Zero1Optimizer(model, torch.optim.AdamW, **ADAMW)
    expect_equal(model, Bag(seed=0))


def grads_by_hand(rank):
    model, plain = Bag(), Bag()
    ours = Zero1Optimizer(model, torch.optim.AdamW, **ADAMW)
    theirs = torch.optim.AdamW(plain.parameters(), **ADAMW)
    for name, grad in grads_of(SHAPES, 0, rank).items():
        model.get_parameter(name).grad = grad
    ours.step()
    feed(dict(plain.named_parameters()), 0)
    theirs.step()
    expect_equal(model, plain)


def added_by_kernel(rank):
    model = Bag()
    ours = Zero1Optimizer(model, torch.optim.SGD, lr=1.0)
    before = model.a.detach().clone()

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            ctx.weight = weight
            return weight.sum()

        @staticmethod
        def backward(ctx, grad):
            ctx.weight.main_grad.add_(2.0)
            ctx.weight.grad_added_to_main_grad = True
            return torch.full_like(ctx.weight, 77.0)

    for _ in range(2):
        Fused.apply(model.a).backward()
    ours.step()
    torch.testing.assert_close(model.a.detach(), before - 4.0)


def overlap_keywords(rank):
    results = []
    for on in (False, True):
        model = Bag()
        ours = Zero1Optimizer(
            model, torch.optim.AdamW, bucket_size=64, overlap_grad_reduce=on, overlap_param_gather=on, **ADAMW
        )
        for step in range(2):
            model(grads_of(SHAPES, step, rank)).backward()
            ours.step()
        results.append(model)
    expect_equal(*results)


def main_grads_by_hand(rank):
    model = Bag()
    ours = Zero1Optimizer(model, torch.optim.SGD, lr=1.0)
    before = model.a.detach().clone()
    model.a.main_grad.fill_(5.0)
    ours.zero_grad()
    assert not model.a.main_grad.any()
    model.a.main_grad.fill_(1.0)
    ours.step()
    torch.testing.assert_close(model.a.detach(), before - 1.0)


def reload(rank):
    model = Bag(torch.bfloat16)
    ours = Zero1Optimizer(model, torch.optim.SGD, lr=0.0)
    with torch.no_grad():
        model.long.fill_(3.0)
    ours.reload_model_params()
    ours.step()
    assert bool((model.long == 3.0).all())


CASES = [
    overlap_keywords,
    main_grads_by_hand,
    reload,
    groups_and_scheduler,
    accumulation,
    unused,
    frozen_and_tied,
    norm_and_clip,
    bf16,
    mixed,
    custom,
    versions_hooks_and_copies,
    starts_equal,
    grads_by_hand,
    added_by_kernel,
]


def every_case(rank):
    for case in CASES:
        try:
            case(rank)
        except BaseException as error:
            raise AssertionError(f"{case.__name__}: {type(error).__name__}: {error}") from error


@pytest.mark.dist
def test_training_on_three_ranks():
    run_ranks(RANKS, every_case)


def fused_worker(rank):
    model = Bag()
    ours = Zero1Optimizer(model, torch.optim.AdamW, lr=1e-2, fused=True, bucket_size=64)
    model(grads_of(SHAPES, 0, rank)).backward()
    ours.step()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.mark.dist
def test_fused_is_within_two_ulp_a_step():
    plain = Bag()
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    feed(dict(plain.named_parameters()), 0)
    theirs.step()
    for params in run_ranks(RANKS, fused_worker):
        for name, param in plain.named_parameters():
            distance = (params[name].view(torch.int32).long() - param.detach().view(torch.int32).long()).abs()
            assert not distance.numel() or int(distance.max()) <= 2, name


def test_one_process_without_a_group():
    model, plain = nn.Linear(3, 2), nn.Linear(3, 2)
    plain.load_state_dict(model.state_dict())
    ours = Zero1Optimizer(model.named_parameters(), torch.optim.AdamW, **ADAMW)
    theirs = torch.optim.AdamW(plain.parameters(), **ADAMW)
    assert (ours.rank, ours.dp_size, ours.process_group) == (0, 1, None)
    for _ in range(3):
        for net, optimizer in ((model, ours), (plain, theirs)):
            net(torch.ones(4, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    expect_equal(model, plain)

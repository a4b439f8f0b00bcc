"""Loss scales and mixed dtypes: against an oracle that scales, skips and steps on one process."""

import warnings

import pytest
import torch
from torch import nn

from tests.engine.harness import run_ranks
from tests.engine.models import SHAPES, Bag, bits_equal, grads_of, mean_in_rank_order
from zero1ckpt.core.errors import UnsupportedError, UsageError
from zero1ckpt.engine.grad_scaler import DynamicScale, DynamicScaler, make_scaler
from zero1ckpt.engine.zero1 import Zero1Optimizer
from zero1ckpt.model.state import LossScale

RANKS = 3
ADAMW = {"lr": 1e-2, "foreach": False}
RULE = DynamicScale(initial=256.0, growth_interval=2, hysteresis=2, minimum=64.0)


# ---------------------------------------------------------------------------------------------------- the scale alone


def test_dynamic_scale_moves_as_that_of_torch():
    theirs = torch.tensor(65536.0), torch.tensor(0, dtype=torch.int32)
    ours = DynamicScaler(DynamicScale(growth_interval=3, minimum=2.0**-100))
    assert make_scaler("dynamic").rule == DynamicScale()
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        found = bool(torch.rand((), generator=generator) < 0.3)
        torch._amp_update_scale_(*theirs, torch.tensor(float(found)), 2.0, 0.5, 3)
        ours.update(found)
        assert ours.scale == float(theirs[0]) and ours.state().finite_steps == int(theirs[1])


def test_hysteresis_and_minimum():
    scaler = DynamicScaler(RULE)
    scales = []
    for found in (True, True, True, True, False, True, False, False, True, True):
        scaler.update(found)
        scales.append(scaler.scale)
    assert scales == [256, 128, 64, 64, 64, 64, 64, 128, 128, 64]
    again = DynamicScaler(RULE)
    again.load(scaler.state())
    assert again.state() == scaler.state() == LossScale(64.0, 0, 0)
    scaler.load(None)
    assert scaler.state() == LossScale(256.0, 0, 2)


def test_a_scale_stays_finite():
    scaler = DynamicScaler(DynamicScale(initial=2.0**127, growth_interval=1))
    scaler.update(False)
    assert scaler.scale == 2.0**127


@pytest.mark.parametrize(
    "wanted",
    ["static", 0, -1.0, True, float("inf"), float("nan")],
)
def test_what_is_no_scale(wanted):
    with pytest.raises(UsageError, match="loss_scale"):
        make_scaler(wanted)


@pytest.mark.parametrize(
    "options",
    [{"initial": 0.5}, {"growth_interval": 0}, {"growth_factor": 0.5}, {"backoff_factor": 1.0}, {"hysteresis": 0}],
)
def test_what_is_no_rule(options):
    with pytest.raises(UsageError, match=next(iter(options))):
        DynamicScale(**options)


# ------------------------------------------------------------------------------------------------------- with a model


class Oracle:
    """AdamW over float32 main params on one process, fed the means of what ``RANKS`` ranks computed in ``dtype``."""

    def __init__(self, dtype):
        self.dtype = dtype
        self.main = {n: p.detach().float() for n, p in Bag(dtype).named_parameters()}
        self.inner = torch.optim.AdamW(list(self.main.values()), **ADAMW)

    def grads(self, step, scale, bad_rank=None):
        ranks = []
        for rank in range(RANKS):
            grads = {n: (g * scale).to(self.dtype).float() for n, g in grads_of(SHAPES, step, rank).items()}
            if rank == bad_rank:
                grads["b"][0] = float("inf")
            ranks.append(grads)
        return {n: g / scale for n, g in mean_in_rank_order(ranks).items()}

    def step(self, grads):
        for name, param in self.main.items():
            param.grad = grads[name]
        self.inner.step()

    def expect(self, model):
        for name, param in model.named_parameters():
            assert bits_equal(param, self.main[name].to(self.dtype)), name


def backward(model, optimizer, step, rank, bad_rank=None):
    optimizer.scale(model(grads_of(SHAPES, step, rank))).backward()
    if rank == bad_rank:
        with torch.no_grad():
            model.b.main_grad[0] = float("inf")


def constant(rank):
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        model, oracle = Bag(dtype), Oracle(dtype)
        optimizer = Zero1Optimizer(model, torch.optim.AdamW, bucket_size=64, loss_scale=64.0, **ADAMW)
        assert optimizer.get_loss_scale() == 64.0 and optimizer.scaler.state() is None
        for step in range(4):
            backward(model, optimizer, step, rank)
            optimizer.step()
            oracle.step(oracle.grads(step, 64.0))
            oracle.expect(model)
        backward(model, optimizer, 4, rank, bad_rank=2)
        optimizer.step()
        assert optimizer.last.skipped and optimizer.last.found_inf and optimizer.skipped_steps == 1
        oracle.expect(model)
        assert optimizer.get_loss_scale() == 64.0 and optimizer.applied_steps == 4


def dynamic(rank):
    """Rank 1 alone overflows in some steps: all ranks leave them out, and the scale moves alike on all."""
    bad = {1, 2, 6}
    model, oracle, rule = Bag(torch.float16), Oracle(torch.float16), DynamicScaler(RULE)
    optimizer = Zero1Optimizer(
        model, torch.optim.AdamW, bucket_size=64, loss_scale=RULE, max_grad_norm=1e6, overlap_grad_reduce=True, **ADAMW
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
    theirs = torch.optim.lr_scheduler.LambdaLR(oracle.inner, lambda n: 1 / (1 + n))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(10):
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
            bad_rank = 1 if step in bad else None
            scale = rule.scale
            assert optimizer.get_loss_scale() == scale
            with optimizer.no_sync():
                backward(model, optimizer, step, rank, bad_rank)
            optimizer.step()
            rule.update(step in bad)
            assert (optimizer.last.skipped, optimizer.last.found_inf) == (step in bad, step in bad)
            if step in bad:
                assert optimizer.last.grad_norm is None
                assert all(bits_equal(before[n], p) for n, p in model.named_parameters())
            else:
                oracle.step(oracle.grads(step, scale))
                theirs.step()
            if not optimizer.last.skipped:
                scheduler.step()
            oracle.expect(model)
    own = [w for w in caught if "left out" in str(w.message)]
    assert len(own) == (rank == 0) and all(w.filename == __file__ for w in own), [w.filename for w in own]
    assert optimizer.skipped_steps == len(bad) and optimizer.applied_steps == 10 - len(bad)
    assert all(s["step"].value == 7.0 for s in optimizer.local_scalars().values())
    assert optimizer.param_groups[0]["lr"] == oracle.inner.param_groups[0]["lr"]


def norms(rank):
    """Norm, clipping and zeros are those of the unscaled gradient, and do not depend on when they are asked for."""
    for scale in (None, 128.0):
        model, oracle = Bag(torch.float16), Oracle(torch.float16)
        optimizer = Zero1Optimizer(model, torch.optim.SGD, bucket_size=64, loss_scale=scale, max_grad_norm=0.5, lr=1.0)
        names = [n for n in SHAPES if n != "c"]
        optimizer.scale(model(grads_of(SHAPES, 0, rank), names)).backward()
        mean = {n: g for n, g in oracle.grads(0, scale or 1.0).items() if n != "c"}
        whole = torch.cat([g.flatten().double() for g in mean.values()])
        assert optimizer.count_zeros() == 11 * 13 + int((whole == 0).sum())
        assert optimizer.get_grad_norm() == pytest.approx(float(whole.norm()), rel=1e-12)
        assert optimizer.count_zeros() == 11 * 13 + int((whole == 0).sum())
        optimizer.step()
        assert optimizer.last.grad_norm == pytest.approx(float(whole.norm()), rel=1e-12)
        factor = (0.5 / (whole.norm() + 1e-6)).clamp(max=1).float()
        for name, grad in mean.items():
            expected = (oracle.main[name] - grad * factor).half()
            assert bits_equal(model.get_parameter(name), expected), name
    backward(model, optimizer, 0, rank, bad_rank=0)
    assert optimizer.get_grad_norm() == float("inf")
    optimizer.step()
    assert optimizer.last.skipped
    optimizer.step()  # the bad gradient is gone
    assert not optimizer.last.skipped and optimizer.last.grad_norm == 0.0


class Block(nn.Module):
    """bfloat16 linears with a float32 norm between them, as mixed models are."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(6, 11), nn.LayerNorm(11), nn.Linear(11, 5)
        self.up, self.down = self.up.bfloat16(), self.down.bfloat16()

    def forward(self, x):
        return self.down(self.norm(self.up(x.bfloat16()).float()).bfloat16()).float()


def data(step, rank, micro):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step * 100 + rank * 10 + micro))


def mixed(rank):
    """Buffers of their own, main_grad in float32, equal to main params that are updated on one process."""
    model, plain = Block(), Block()
    ours = Zero1Optimizer(model, torch.optim.AdamW, bucket_size=64, **ADAMW)
    assert [(b.key.param_dtype, b.key.grad_dtype) for b in ours.layout.buffers] == [
        ("bfloat16", "float32"),
        ("float32", "float32"),
    ]
    assert all(p.main_grad.dtype == torch.float32 for p in model.parameters())
    main = {n: p.detach().clone().float() for n, p in plain.named_parameters()}
    theirs = torch.optim.AdamW(list(main.values()), **ADAMW)
    for step in range(5):
        for micro in range(2):
            (model(data(step, rank, micro)).square().mean() / 2).backward()
        ours.step()
        sums = []
        for r in range(RANKS):
            total = {n: torch.zeros_like(p) for n, p in main.items()}
            for micro in range(2):
                plain.zero_grad()
                (plain(data(step, r, micro)).square().mean() / 2).backward()
                for name, param in plain.named_parameters():
                    total[name] += param.grad
            sums.append(total)
        mean = mean_in_rank_order(sums)
        for name, param in main.items():
            param.grad = mean[name]
        theirs.step()
        with torch.no_grad():
            for name, param in plain.named_parameters():
                param.copy_(main[name])
        for name, param in plain.named_parameters():
            assert bits_equal(model.get_parameter(name), param), (name, step)


CASES = [constant, dynamic, norms, mixed]


def every_case(rank):
    for case in CASES:
        try:
            case(rank)
        except BaseException as error:
            raise AssertionError(f"{case.__name__}: {type(error).__name__}: {error}") from error


@pytest.mark.dist
def test_precision_on_three_ranks():
    run_ranks(RANKS, every_case)


# ------------------------------------------------------------------------------------------------------------ refusals


def test_torch_amp_is_refused_with_the_way_out():
    model = nn.Linear(3, 2)
    optimizer = Zero1Optimizer(model, torch.optim.AdamW, **ADAMW)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    with pytest.raises(UnsupportedError, match=r"GradScaler.*loss_scale=.*optimizer\.scale\(loss\)"):
        scaler.step(optimizer)
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.scale(model(torch.ones(1, 3)).sum()).backward()
    off.step(optimizer)
    assert optimizer.applied_steps == 1


def test_without_a_scale_nothing_is_looked_for():
    model = nn.Linear(3, 2)
    optimizer = Zero1Optimizer(model, torch.optim.SGD, lr=1.0)
    loss = model(torch.ones(1, 3)).sum()
    assert optimizer.scale(loss) is loss
    (loss * float("inf")).backward()
    optimizer.step()
    assert not optimizer.last.found_inf and optimizer.applied_steps == 1 and bool(model.weight.isinf().all())

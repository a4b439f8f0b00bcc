"""Gradients reduced during the backward pass: when buckets are sent, and that the sums are what they are without."""

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.engine.harness import run_ranks
from tests.engine.models import SHAPES, Bag, bits_equal, grads_of
from tests.engine.overlap_nets import ADAMW, Net, assert_same, loss_of, params_of
from zero1ckpt.core.errors import UsageError
from zero1ckpt.engine.collectives import NativeCommunicator
from zero1ckpt.engine.zero1 import Zero1Optimizer


def build(model, overlap=True, **options):
    given = {"bucket_size": 64, "overlap_grad_reduce": overlap, **ADAMW, **options}
    return Zero1Optimizer(model, given.pop("inner", torch.optim.AdamW), **given)


def bucket_count(optimizer):
    return sum(buffer.bucket_count for buffer in optimizer.layout.buffers)


# ---------------------------------------------------------------------------------------------------------- when


def launches(rank):
    model = Net()
    optimizer = build(model)
    total, traffic = bucket_count(optimizer), optimizer.communicator.traffic
    assert total > 5
    for step in range(3):
        traffic.reset()
        with optimizer.no_sync():
            loss_of(model, step, rank, 0).backward()
        assert traffic.messages == 0
        loss_of(model, step, rank, 1).backward()
        assert traffic.messages >= (total - 1) * (optimizer.dp_size - 1)
        optimizer.step()
        assert optimizer.last.unused == ()
        padded = optimizer.layout.numel
        assert traffic.elements_sent == 2 * (optimizer.dp_size - 1) * padded // optimizer.dp_size
        assert traffic.messages == 2 * (optimizer.dp_size - 1) * total


def order_of_launches(rank):
    """Grads arrive in another order on each rank; buckets go out in one."""
    model = Bag()
    optimizer = build(model, bucket_size=1)
    seen = []
    original = optimizer.comm.begin_reduce_scatters

    def spy(pairs, **options):
        seen.extend(bucket.storage_offset() for bucket, _ in pairs)
        return original(pairs, **options)

    optimizer.comm.begin_reduce_scatters = spy
    names = random.Random(rank).sample(list(SHAPES), len(SHAPES))
    grads = grads_of(SHAPES, 0, rank)
    for name in names:
        (model.get_parameter(name) * grads[name]).sum().backward()
    optimizer.step()
    assert seen == sorted(seen) and len(seen) == bucket_count(optimizer)
    twin = Bag()
    plain = build(twin, False, bucket_size=1)
    twin(grads).backward()
    plain.step()
    assert_same(params_of(model), params_of(twin))


def a_late_buffer_holds_nothing_back(rank):
    """float32 norms among bfloat16 layers: two buffers, whose buckets are merged by when they are complete."""
    model = Net(torch.bfloat16)
    model.norm.float()
    model.norm.register_forward_pre_hook(lambda m, args: (args[0].float(),))
    model.norm.register_forward_hook(lambda m, args, out: out.bfloat16())
    optimizer = build(model)
    firsts = [min(ref.params) for ref in optimizer._reducer.order]
    assert firsts == sorted(firsts, reverse=True)
    assert [ref.buffer for ref in optimizer._reducer.order] != sorted(ref.buffer for ref in optimizer._reducer.order)
    for step in range(2):
        loss_of(model, step, rank).backward()
        assert optimizer._reducer.launched == bucket_count(optimizer)
        optimizer.step()


# ------------------------------------------------------------------------------------------------- the same sums


def equal_to_off(rank):
    for dtype, micros, unused in itertools.product((torch.float32, torch.bfloat16), (1, 4), ("zero", "skip")):
        models = [Net(dtype), Net(dtype)]
        optimizers = [
            build(m, on, unused=unused, max_grad_norm=1.0) for m, on in zip(models, (False, True), strict=True)
        ]
        for step in range(4):
            for model, optimizer in zip(models, optimizers, strict=True):
                if step == 2:
                    model.layers[1].requires_grad_(False)
                for micro in range(micros):
                    with optimizer.no_sync() if micro < micros - 1 else torch.enable_grad():
                        branch = (step + rank) % 3 == 0 and micro == 0
                        loss_of(model, step, rank, micro, branch=branch, order=[0, 1, 2]).backward()
                optimizer.step()
            what = (dtype, micros, unused, step)
            assert_same(params_of(models[0]), params_of(models[1]), what)
            assert optimizers[0].last.unused == optimizers[1].last.unused, what
            assert "layers.3.weight" in optimizers[1].last.unused
            assert optimizers[0].last.grad_norm == optimizers[1].last.grad_norm, what
        optimizers[1].verify_replicas()


def loss_scales(rank):
    """float16: one rank's overflow makes all leave the step out, whatever was in flight."""
    models = [Net(torch.float16), Net(torch.float16)]
    for on, model in zip((False, True), models, strict=True):
        optimizer = build(model, on, loss_scale="dynamic", overlap_param_gather=on)
        skipped = []
        for step in range(4):
            loss = optimizer.scale(loss_of(model, step, rank)) / 2**10
            (loss * (float("inf") if step == 1 and rank == 1 else 1.0)).backward()
            optimizer.step()
            skipped.append(optimizer.last.skipped)
        assert skipped == [False, True, False, False]
    assert_same(params_of(models[0]), params_of(models[1]))


def frozen_after_its_bucket_was_sent(rank):
    models = [Net(), Net()]
    for on, model in zip((False, True), models, strict=True):
        optimizer = build(model, on, max_grad_norm=0.1)
        for step in range(3):
            loss_of(model, step, rank).backward()
            if step == 1:
                model.branch.requires_grad_(False)
            optimizer.step()
    assert_same(params_of(models[0]), params_of(models[1]))


# -------------------------------------------------------------------------------- more gradients than were waited for


def two_backwards(rank):
    """Without no_sync(): what comes second is reduced on its own, also where one rank has none."""
    models = [Bag(), Bag()]
    for on, model in zip((False, True), models, strict=True):
        optimizer = build(model, on, inner=torch.optim.SGD, lr=1.0, foreach=False)
        for _ in range(3):
            for micro in range(3):
                names = SHAPES if micro < 2 else ("a", "long") if rank == 1 else ("one",)
                model(grads_of(SHAPES, 0, rank, micro), names).backward()
            optimizer.step()
        assert len(optimizer._reducer._spare) == (bucket_count(optimizer) if on else 0)
    for name, param in models[0].named_parameters():
        torch.testing.assert_close(models[1].get_parameter(name), param, rtol=1e-5, atol=1e-5)
    everyone = params_of(models[1])
    before = params_of(Bag())
    assert not any(bits_equal(everyone[n], before[n]) for n in SHAPES if everyone[n].numel())


class TwoSegments(nn.Module):
    """One linear in two checkpointed segments: under reentrant checkpointing its hook fires twice in a backward."""

    def __init__(self, reentrant):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first = nn.Linear(4, 4)
            self.shared = nn.Linear(4, 4)
        self.reentrant = reentrant

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(lambda y: torch.tanh(self.shared(y)), x, use_reentrant=self.reentrant)
        return x


def checkpointed(rank):
    for reentrant in (False, True):
        results = []
        for on in (False, True):
            model = TwoSegments(reentrant)
            optimizer = build(model, on, bucket_size=1, overlap_param_gather=on, inner=torch.optim.SGD, lr=0.1)
            for step in range(3):
                x = torch.arange(4.0).add(rank + step).mul(0.1).requires_grad_()
                model(x).square().sum().backward()
                assert bool(optimizer._reducer._extra) == (on and reentrant)
                optimizer.step()
            results.append(params_of(model))
        for name in results[0]:
            torch.testing.assert_close(results[0][name], results[1][name], rtol=1e-6, atol=1e-7)


def by_hand(rank):
    """Gradients set by hand, before and after buckets were sent; main grads written by hand."""
    models = [Bag(), Bag()]
    for on, model in zip((False, True), models, strict=True):
        optimizer = build(model, on, inner=torch.optim.SGD, lr=1.0, foreach=False)
        model.long.main_grad.fill_(float(rank))
        for name, grad in grads_of(SHAPES, 0, rank).items():
            if name != "long":
                model.get_parameter(name).grad = grad
        optimizer.step()
        model(grads_of(SHAPES, 1, rank)).backward()
        model.c.grad = torch.ones_like(model.c)
        optimizer.step()
    for name, param in models[0].named_parameters():
        torch.testing.assert_close(models[1].get_parameter(name), param, rtol=1e-5, atol=1e-5)


def written_in_flight(rank):
    model = Bag()
    optimizer = build(model, inner=torch.optim.SGD, lr=1.0)
    model(grads_of(SHAPES, 0, rank)).backward()
    if rank == 0:
        model.long.main_grad.add_(1.0)
    for _ in range(2):
        with pytest.raises(UsageError, match=r"long: main_grad.*no_sync" if rank == 0 else "another rank"):
            optimizer.step()
    optimizer.zero_grad()
    model(grads_of(SHAPES, 0, rank)).backward()
    model.long.grad_added_to_main_grad = True
    with pytest.raises(UsageError, match="long: a fused kernel"):
        model(grads_of(SHAPES, 0, rank), ("long",)).backward()
    model.long.grad = None
    optimizer.step()


def thrown_away(rank):
    """zero_grad() with buckets in flight, another number of them on each rank, leaves nothing behind."""
    models = [Net(), Net()]
    for on, model in zip((False, True), models, strict=True):
        optimizer = build(model, on)
        loss_of(model, 5, rank, branch=rank == 0).backward()
        optimizer.zero_grad()
        assert not any(p.main_grad.any() for p in model.parameters() if p.requires_grad)
        loss_of(model, 0, rank).backward()
        optimizer.step()
    assert_same(params_of(models[0]), params_of(models[1]))


def steady_memory(rank):
    """After the first steps nothing is allocated anew: scratch of one step is that of the next."""
    model = Net()
    optimizer = build(model)
    seen = []
    for step in range(5):
        loss_of(model, step, rank).backward()
        optimizer.step()
        idle = [t for tensors in optimizer.comm._idle.values() for t in tensors]
        seen.append(sorted((t.data_ptr(), t.numel()) for t in idle))
    assert seen[0] == seen[-1] and seen[0]


def coalesced(rank):
    """The backend's own collectives, here gloo's: several buckets are one launch."""
    comm = NativeCommunicator(dist.group.WORLD)
    size = comm.size
    everyone = [[torch.full((n * size,), float(r + n)) for n in (4, 0, 7)] for r in range(size)]
    for dtype in (torch.float32, torch.float64):
        pairs = [(b.clone(), torch.empty(b.numel() // size, dtype=dtype)) for b in everyone[rank]]
        comm.traffic.reset()
        for pending in comm.begin_reduce_scatters(pairs, ahead=True):
            pending.wait()
        assert comm.traffic.messages == 1 and comm.traffic.elements_sent == 11 * (size - 1)
        for at, (_, out) in enumerate(pairs):
            torch.testing.assert_close(out, comm.own(sum(e[at] for e in everyone) / size).to(dtype))


CASES = [
    coalesced,
    launches,
    order_of_launches,
    a_late_buffer_holds_nothing_back,
    equal_to_off,
    loss_scales,
    frozen_after_its_bucket_was_sent,
    two_backwards,
    checkpointed,
    by_hand,
    written_in_flight,
    thrown_away,
    steady_memory,
]


def every_case(rank):
    for case in CASES:
        try:
            case(rank)
        except BaseException as error:
            raise AssertionError(f"{case.__name__}: {type(error).__name__}: {error}") from error


@pytest.mark.dist
def test_on_three_ranks():
    run_ranks(3, every_case)


@pytest.mark.dist
@pytest.mark.parametrize("size", [1, 2])
def test_equal_to_off(size):
    run_ranks(size, equal_to_off)

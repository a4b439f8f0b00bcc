"""``offload=True``: the same bits, with main params and inner state in memory of their own."""

import pytest
import torch

import zero1ckpt
from tests.engine.harness import run_ranks
from tests.engine.models import SHAPES, Bag, bits_equal, dump, grads_of
from zero1ckpt.engine.offload import HostLink

ADAMW = {"lr": 1e-2, "weight_decay": 0.1}
CASES = [
    (torch.optim.AdamW, ADAMW, {}),
    (torch.optim.AdamW, {**ADAMW, "amsgrad": True}, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, {"unused": "skip", "max_grad_norm": 0.5}),
    (torch.optim.ASGD, {"lr": 0.1}, {}),
    (torch.optim.Rprop, {"lr": 0.1}, {"num_distributed_optimizer_instances": 2}),
    (torch.optim.AdamW, ADAMW, {"loss_scale": "dynamic", "reduce": "bf16"}),
]


def build(dtype, case, offload, size):
    cls, inner, options = case
    instances = options.get("num_distributed_optimizer_instances", 1)
    options = {**options, "num_distributed_optimizer_instances": instances if size % instances == 0 else 1}
    model = Bag(dtype)
    return model, zero1ckpt.Zero1Optimizer(model, cls, bucket_size=64, offload=offload, **inner, **options)


def step(rank, model, optimizer, number):
    names = [name for name in SHAPES if name != "c"] if number == 1 else None
    optimizer.scale(model(grads_of(SHAPES, number, rank), names)).backward()
    optimizer.step()


def equal_state(model, optimizer, other_model, other):
    optimizer.wait_for_params()
    other.wait_for_params()
    for (name, a), b in zip(model.named_parameters(), other_model.parameters(), strict=True):
        assert bits_equal(a.detach(), b.detach()), name
    ours, theirs = dump(optimizer), dump(other)
    assert ours.keys() == theirs.keys()
    for slot in ours:
        for buffers, others in zip(ours[slot], theirs[slot], strict=True):
            assert all(bits_equal(a, b) for a, b in zip(buffers, others, strict=True)), slot


def train(rank, size, folder):
    for dtype in (torch.float32, torch.bfloat16):
        for at, case in enumerate(CASES):
            plain, offloaded = build(dtype, case, False, size), build(dtype, case, True, size)
            for number in range(3):
                step(rank, *plain, number)
                step(rank, *offloaded, number)
                equal_state(*plain, *offloaded)
                if number == 1:
                    offloaded[0].a.requires_grad_(False)
                    plain[0].a.requires_grad_(False)
            offloaded[1].verify_replicas()
            saved(rank, size, f"{folder}/{at}-{dtype}", dtype, case, plain, offloaded)


def saved(rank, size, folder, dtype, case, plain, offloaded):
    """One goes on from what the other has saved, an asynchronous save among them."""
    plain[1].save(f"{folder}-plain")
    handle = offloaded[1].save(f"{folder}-offload", asynchronous=True)
    step(rank, *plain, 3)
    step(rank, *offloaded, 3)
    handle.wait()
    assert zero1ckpt.open(f"{folder}-plain").digest == zero1ckpt.open(f"{folder}-offload").digest
    for offload in (False, True):
        fresh = build(dtype, case, offload, size)
        fresh[1].load(f"{folder}-{'plain' if offload else 'offload'}")
        fresh[0].a.requires_grad_(False)
        step(rank, *fresh, 3)
        equal_state(*fresh, *plain)
        equal_state(*fresh, *offloaded)


def test_bits_are_those_without(tmp_path):
    run_ranks(2, train, 2, str(tmp_path))


def test_main_params_have_memory_of_their_own():
    """Float32 params too: what is written to one of the two is not seen in the other before it is told."""
    model, optimizer = build(torch.float32, CASES[0], True, 1)
    main = optimizer.state[model.a]["fp32_param"]
    assert main.untyped_storage().data_ptr() != model.a.untyped_storage().data_ptr()
    assert bits_equal(main, model.a.detach().flatten())
    with torch.no_grad():
        model.a.add_(1)
    optimizer.reload_model_params()
    assert bits_equal(main, model.a.detach().flatten())
    assert optimizer.memory().kinds.main_params == 4 * sum(b.numel for b in optimizer.layout.buffers)


def test_link_gives_each_shard_once():
    link = HostLink(torch.device("cpu"))
    shards = [[torch.ones(3)], [torch.zeros(2), torch.ones(1)]]
    link.fetch(shards)
    assert link.get(1, 1) is shards[1][1]
    with pytest.raises(KeyError):
        link.get(1, 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_device(dtype):
    """The host's step on the device's gradients is that of a run on the host."""
    here, there = Bag(dtype), Bag(dtype).cuda()
    host = zero1ckpt.Zero1Optimizer(here, torch.optim.AdamW, bucket_size=64, **ADAMW)
    device = zero1ckpt.Zero1Optimizer(there, torch.optim.AdamW, bucket_size=64, offload=True, **ADAMW)
    for number in range(3):
        grads = grads_of(SHAPES, number, 0)
        here(grads).backward()
        sum((p.float() * grads[n].cuda()).sum() for n, p in there.named_parameters()).backward()
        host.step()
        device.step()
        for (name, a), b in zip(here.named_parameters(), there.parameters(), strict=True):
            assert bits_equal(a.detach(), b.detach().cpu()), name
    shard = device.shard("exp_avg", 0, 0)
    assert shard.is_pinned() and bits_equal(shard, host.shard("exp_avg", 0, 0))

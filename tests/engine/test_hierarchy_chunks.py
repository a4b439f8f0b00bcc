"""Several model chunks in one optimizer, and several optimizers in one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.engine.harness import run_ranks
from tests.engine.models import SHAPES, Bag, bits_equal, grads_of, mean_in_rank_order
from zero1ckpt.core.errors import UsageError
from zero1ckpt.engine.zero1 import Zero1Optimizer

ADAMW = {"lr": 1e-2, "foreach": False}


def names(optimizer):
    return [spec.name for spec in optimizer.param_specs]


def test_names_of_chunks():
    """Bare where they differ; else with the chunk's number, all of them. A tied param has one name."""
    apart = [nn.ModuleDict({"a": nn.Linear(1, 1)}), nn.ModuleDict({"b": nn.Linear(1, 1)})]
    assert names(Zero1Optimizer(apart, torch.optim.SGD, lr=1.0)) == ["a.weight", "a.bias", "b.weight", "b.bias"]
    alike = [nn.Linear(1, 1), nn.Linear(1, 1, bias=False)]
    clash = ["model0.weight", "model0.bias", "model1.weight"]
    assert names(Zero1Optimizer(alike, torch.optim.SGD, lr=1.0)) == clash
    alike[1].weight = alike[0].weight
    assert names(Zero1Optimizer(alike, torch.optim.SGD, lr=1.0)) == ["weight", "bias"]
    assert names(Zero1Optimizer([nn.Linear(1, 1)], torch.optim.SGD, lr=1.0)) == ["weight", "bias"]


def test_groups_over_chunks():
    """``model=`` takes chunks too: it gives names and order."""
    chunks = [nn.Linear(2, 2), nn.Linear(2, 2)]
    groups = [{"params": [c.bias for c in chunks], "lr": 0.5}, {"params": [c.weight for c in chunks]}]
    optimizer = Zero1Optimizer(groups, torch.optim.SGD, model=chunks, lr=1.0)
    assert names(optimizer) == ["model0.weight", "model0.bias", "model1.weight", "model1.bias"]
    assert [spec.group for spec in optimizer.param_specs] == [1, 0, 1, 0]


def interleaved(rank, size, overlap):
    """Chunks run by turns, as under an interleaved schedule, in another order than that of the list."""
    chunks, plain = [Bag(seed=1), Bag(seed=2)], [Bag(seed=1), Bag(seed=2)]
    optimizer = Zero1Optimizer(
        chunks,
        torch.optim.AdamW,
        bucket_size=64,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        **ADAMW,
    )
    theirs = torch.optim.AdamW([p for chunk in plain for p in chunk.parameters()], **ADAMW)
    for step in range(3):
        for micro in range(2):
            for at in (1, 0):
                loss = chunks[at](grads_of(SHAPES, step, rank, 2 * micro + at))
                if micro == 0:
                    with optimizer.no_sync():
                        loss.backward()
                else:
                    loss.backward()
        optimizer.step()
        for at, chunk in enumerate(plain):
            sums = []
            for r in range(size):
                first, second = grads_of(SHAPES, step, r, at), grads_of(SHAPES, step, r, 2 + at)
                sums.append({name: first[name] + second[name] for name in SHAPES})
            mean = mean_in_rank_order(sums)
            for name, param in chunk.named_parameters():
                param.grad = mean[name]
        theirs.step()
        optimizer.wait_for_params()
        for chunk, other in zip(chunks, plain, strict=True):
            for name, param in other.named_parameters():
                assert bits_equal(chunk.get_parameter(name).detach(), param.detach()), (step, name)
    optimizer.verify_replicas()


def two_optimizers(rank, size):
    """A generator and a discriminator with params of the same names, over groups of their own, steps by turns."""
    group = dist.new_group(list(range(size)))
    models, plain = [Bag(seed=1), Bag(seed=2)], [Bag(seed=1), Bag(seed=2)]
    groups = (None, group)
    options = {"bucket_size": 64, "overlap_grad_reduce": True, "overlap_param_gather": True, **ADAMW}
    ours = [
        Zero1Optimizer(model, torch.optim.AdamW, name=name, process_group=group, **options)
        for model, name, group in zip(models, ("gen", "dis"), groups, strict=True)
    ]
    theirs = [torch.optim.AdamW(model.parameters(), **ADAMW) for model in plain]
    for step in range(4):
        turn = (0, 1) if step % 2 else (1, 0)
        for at in turn:
            models[at](grads_of(SHAPES, step, rank, at)).backward()
        for at in turn:
            ours[at].step()
            mean = mean_in_rank_order([grads_of(SHAPES, step, r, at) for r in range(size)])
            for name, param in plain[at].named_parameters():
                param.grad = mean[name]
            theirs[at].step()
    for model, other, optimizer in zip(models, plain, ours, strict=True):
        optimizer.wait_for_params()
        for name, param in other.named_parameters():
            assert bits_equal(model.get_parameter(name).detach(), param.detach()), name


def other_names(rank):
    with pytest.raises(UsageError, match="optimizers differ between rank 0 and rank 1"):
        Zero1Optimizer(Bag(), torch.optim.SGD, lr=1.0, name=("gen", "dis")[rank % 2])


def both(rank, size):
    interleaved(rank, size, False)
    interleaved(rank, size, True)
    two_optimizers(rank, size)
    other_names(rank)


def test_chunks_and_optimizers_train_as_one_process_does():
    run_ranks(2, both, 2)

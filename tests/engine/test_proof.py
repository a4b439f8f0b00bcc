"""A hundred steps with everything that training has, against torch.optim.AdamW on one process."""

import pytest
import torch

from tests.engine.harness import run_ranks
from tests.engine.models import SHAPES, Bag, bits_equal, grads_of
from zero1ckpt.engine.zero1 import Zero1Optimizer

STEPS = 100
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "foreach": False}
FROZEN = "one"


def model_of():
    model = Bag()
    model.get_parameter(FROZEN).requires_grad_(False)
    model.tied = model.long  # a second name of the same param
    return model


def groups_of(model):
    """Matrices decay, the rest does not."""
    params = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]


def rate(step):
    return 1e-2 * (1 - step / (2 * STEPS))


def train(rank, size, micro, clip, overlap):
    model = model_of()
    optimizer = Zero1Optimizer(
        groups_of(model),
        torch.optim.AdamW,
        model=model,
        bucket_size=64,
        max_grad_norm=clip,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        **ADAMW,
    )
    norms = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        with optimizer.no_sync():
            for index in range(micro - 1):
                model(grads_of(SHAPES, step, rank, index)).backward()
        model(grads_of(SHAPES, step, rank, micro - 1)).backward()
        optimizer.step()
        norms.append(optimizer.last.grad_norm)
    optimizer.wait_for_params()
    optimizer.verify_replicas()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, norms


def everything(rank, size):
    return {
        (micro, clip, overlap): train(rank, size, micro, clip, overlap)
        for micro in (1, 4)
        for clip in (None, 1.0)
        for overlap in (False, True)
    }


def reference(size, micro, clip):
    """AdamW fed the mean of the ranks' sums; the norm is taken in float64, and the coefficient as torch does."""
    model = model_of()
    optimizer = torch.optim.AdamW(groups_of(model), **ADAMW)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    norms = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        for name, param in trained:
            param.grad = _mean(name, step, size, micro)
        norm = torch.stack([p.grad.double().square().sum() for _, p in trained]).sum().sqrt()
        norms.append(norm.item())
        if clip is not None and norm > clip:
            for _, param in trained:
                param.grad.mul_((clip / (norm + 1e-6)).float())
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, norms


def _mean(name, step, size, micro):
    """Micro-batches are added up on each rank, then ranks in order, then divided."""
    total = None
    for rank in range(size):
        own = grads_of(SHAPES, step, rank, 0)[name].clone()
        for index in range(1, micro):
            own += grads_of(SHAPES, step, rank, index)[name]
        total = own if total is None else total + own
    return total / size


@pytest.mark.dist
@pytest.mark.parametrize("size", [2, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4, 5))])
def test_a_hundred_steps_equal_adamw(size):
    ranks = run_ranks(size, everything, size, timeout=300.0)
    for micro in (1, 4):
        for clip in (None, 1.0):
            wanted, norms = reference(size, micro, clip)
            for found in (r[micro, clip, overlap] for r in ranks for overlap in (False, True)):
                params, seen = found
                for name, value in params.items():
                    if clip is None:
                        assert bits_equal(value, wanted[name]), (micro, name)
                    else:  # the coefficient's last bit hangs on the order of a float64 sum
                        assert torch.allclose(value, wanted[name], rtol=1e-5, atol=1e-6), (micro, name)
                if clip is not None:
                    assert seen == pytest.approx(norms, rel=1e-12)
    first = ranks[0]
    for micro in (1, 4):  # with clipping too, overlap changes no bit, and no rank differs from another
        for rank in ranks:
            for overlap in (False, True):
                for name, value in first[micro, 1.0, False][0].items():
                    assert bits_equal(rank[micro, 1.0, overlap][0][name], value)

"""Norms, zeros and overflows over all parts of a model: each gradient element counts once, wherever it lies."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.engine.harness import run_ranks
from tests.engine.models import bits_equal
from zero1ckpt.core.errors import UsageError
from zero1ckpt.engine.zero1 import Zero1Optimizer

WIDTH = 6
SHAPES = {"cut": (WIDTH, 5), "whole": (7,), "copy": (4, 3)}


def grads(step, dp):
    generator = torch.Generator().manual_seed(100 * step + dp)
    made = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    made["cut"][0] = 0.0
    made["whole"][2] = 0.0
    return made


def piece(name, tensor, tp, tp_size):
    return tensor.chunk(tp_size)[tp] if name == "cut" else tensor


class Piece(nn.Module):
    """What one tensor-parallel rank holds: rows of ``cut``, all of ``whole``, and a ``copy`` of another param."""

    def __init__(self, tp, tp_size, dtype=torch.float32):
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(piece(name, torch.ones(shape, dtype=dtype), tp, tp_size)))
        self.cut.tensor_model_parallel = True
        self.tp, self.tp_size = tp, tp_size

    def forward(self, full):
        rows = [(p.float() * piece(n, full[n], self.tp, self.tp_size)).sum() for n, p in self.named_parameters()]
        return torch.stack(rows).sum()


def groups_of(rank):
    """4 ranks: dp 2 x tp 2, tensor-parallel ranks adjacent. All ranks make all groups."""
    data = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    tensor = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return rank // 2, rank % 2, data[rank % 2], tensor[rank // 2]


def mean(step):
    a, b = grads(step, 0), grads(step, 1)
    return {name: (a[name] + b[name]) / 2 for name in SHAPES}


def norm_of(tensors):
    return float(torch.cat([t.double().flatten() for t in tensors]).norm())


def tensor_parallel(rank):
    dp, tp, data, tensor = groups_of(rank)
    model = Piece(tp, 2)
    model.copy.shared = True
    optimizer = Zero1Optimizer(
        model, torch.optim.SGD, lr=1.0, bucket_size=16, process_group=data, tensor_parallel_group=tensor
    )
    for step in range(3):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        model(grads(step, dp)).backward()
        expected = mean(step)
        counted = [expected["cut"], expected["whole"]]
        norm = norm_of(counted)
        assert optimizer.get_grad_norm() == pytest.approx(norm, rel=1e-12)
        assert optimizer.count_zeros() == sum(int((t == 0).sum()) for t in counted) == 6
        assert float(optimizer.clip_grad_norm_(0.5)) == pytest.approx(norm, rel=1e-12)
        optimizer.step()
        factor = min(1.0, 0.5 / (norm + 1e-6))
        for name, param in model.named_parameters():
            want = before[name] - piece(name, expected[name], tp, 2) * torch.tensor(factor)
            torch.testing.assert_close(param.detach(), want, rtol=1e-6, atol=1e-7)
    return norm


def pipeline(rank):
    """Stages of a pipeline hold different params: nothing is a duplicate."""
    data = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    stages = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = nn.Linear(3, 2, bias=False)
    model.weight.data.fill_(rank % 2 + 1.0)
    optimizer = Zero1Optimizer(
        model,
        torch.optim.SGD,
        lr=1.0,
        process_group=data[rank % 2],
        model_parallel_group=stages[rank // 2],
        max_grad_norm=1.0,
    )
    (model.weight * (10.0 * (rank % 2) + 1.0 + rank // 2)).sum().backward()
    optimizer.step()
    norm = (6 * 1.5**2 + 6 * 11.5**2) ** 0.5
    assert optimizer.last.grad_norm == pytest.approx(norm, rel=1e-12)
    moved = (11.5 if rank % 2 else 1.5) / (norm + 1e-6)
    torch.testing.assert_close(model.weight.detach(), torch.full((2, 3), rank % 2 + 1.0 - moved))


def overflow(rank):
    """An infinity in one tensor-parallel piece on one data-parallel rank: all leave the step out together."""
    dp, tp, data, tensor = groups_of(rank)
    model = Piece(tp, 2)
    optimizer = Zero1Optimizer(
        model, torch.optim.SGD, lr=1.0, loss_scale="dynamic", process_group=data, tensor_parallel_group=tensor
    )
    before = model.cut.detach().clone()
    given = grads(0, dp)
    if (dp, tp) == (1, 1):
        given["cut"][-1, -1] = float("inf")
    optimizer.scale(model(given)).backward()
    optimizer.step()
    assert (optimizer.last.found_inf, optimizer.last.skipped) == (True, True)
    assert (optimizer.get_loss_scale(), optimizer.applied_steps) == (32768.0, 0)
    assert bits_equal(model.cut.detach(), before)
    optimizer.scale(model(grads(1, dp))).backward()
    optimizer.step()
    assert not optimizer.last.found_inf


def refused(rank):
    _, tp, data, tensor = groups_of(rank)
    model = Piece(tp, 2)
    with pytest.raises(UsageError, match=r"cut: .*tensor_parallel_group"):
        Zero1Optimizer(model, torch.optim.SGD, lr=1.0, process_group=data, model_parallel_group=tensor)
    with pytest.raises(UsageError, match="not a part of model_parallel_group"):
        Zero1Optimizer(
            model,
            torch.optim.SGD,
            lr=1.0,
            process_group=data,
            model_parallel_group=data,
            tensor_parallel_group=tensor,
        )


def all_of_it(rank):
    norm = tensor_parallel(rank)
    pipeline(rank)
    overflow(rank)
    refused(rank)
    return norm


@pytest.mark.filterwarnings("ignore:gradients were not finite")
def test_over_the_parts_of_a_model():
    norms = run_ranks(4, all_of_it)
    assert len(set(norms)) == 1


def test_over_one_process():
    """Without groups every param counts, but for those that are marked as another's copy."""
    model = Piece(0, 1)
    model.whole.shared = True
    optimizer = Zero1Optimizer(model, torch.optim.SGD, lr=1.0)
    model(grads(0, 0)).backward()
    expected = [grads(0, 0)[name] for name in ("cut", "copy")]
    assert optimizer.get_grad_norm() == pytest.approx(norm_of(expected), rel=1e-12)
    assert optimizer.count_zeros() == 5

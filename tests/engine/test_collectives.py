"""Ordered sums, windows, groups and what is sent."""

import pytest
import torch
import torch.distributed as dist

from tests.engine.harness import run_ranks
from tests.engine.models import SHAPES, Bag, bits_equal, grads_of
from zero1ckpt.engine import ordered
from zero1ckpt.engine.collectives import LocalCommunicator, NativeCommunicator, make_communicator
from zero1ckpt.engine.grad_norm import global_norm
from zero1ckpt.engine.reductions import ordered_sum
from zero1ckpt.engine.zero1 import Zero1Optimizer


@pytest.mark.parametrize("size", [2, 3, 5])
def test_ordered_sum_for_every_owner(size):
    parts = [torch.tensor([1e8, 1.0, -3.0]) * (-1) ** k + k for k in range(size)]
    expected = parts[0].clone()
    for part in parts[1:]:
        expected += part
    for own in range(size):
        copies = [part.clone() for part in parts]
        ordered_sum(copies, own, copies[own])
        assert bits_equal(copies[own], expected)
    narrow = [part.bfloat16() for part in parts]
    out = torch.empty(3)
    ordered_sum(narrow, 0, out)
    wide = narrow[0].float()
    for part in narrow[1:]:
        wide += part.float()
    assert bits_equal(out, wide)


def buckets(rank, size, numel, dtype):
    return [torch.randn(numel, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(size)]


def both_ways(rank, size):
    comm = make_communicator(dist.group.WORLD, torch.device("cpu"))
    shard = 40
    for window in (1, 7 * (size - 1), 1 << 22):
        ordered.WINDOW = window
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            all_ranks = buckets(rank, size, shard * size, dtype)
            bucket = all_ranks[rank].clone()
            out = comm.own(bucket) if dtype != torch.bfloat16 else torch.empty(shard)
            comm.reduce_scatter(bucket, out)
            expected = all_ranks[0].to(out.dtype)
            for other in all_ranks[1:]:
                expected = expected + other.to(out.dtype)
            assert bits_equal(out, comm.own(expected) / size)
            comm.own(bucket).copy_(comm.own(all_ranks[rank]))
            comm.all_gather(bucket)
            assert all(bits_equal(comm.slice_of(bucket, r), comm.slice_of(all_ranks[r], r)) for r in range(size))
    comm.traffic.reset()
    big = torch.ones(shard * size)
    comm.reduce_scatter(big, comm.own(big))
    comm.all_gather(big)
    assert comm.traffic.elements_sent == 2 * (size - 1) * shard
    empty = torch.empty(0)
    comm.reduce_scatter(empty, comm.own(empty))
    comm.all_gather(empty)
    norm = global_norm([torch.full((3,), float(rank + 1))], [comm], torch.device("cpu"))
    assert float(norm) == pytest.approx((3 * sum((r + 1) ** 2 for r in range(size))) ** 0.5)


def wire(rank, size):
    model = Bag()
    optimizer = Zero1Optimizer(model, torch.optim.AdamW, bucket_size=64)
    for step in range(2):
        optimizer.communicator.traffic.reset()
        model(grads_of(SHAPES, step, rank)).backward()
        optimizer.step()
        sent = optimizer.communicator.traffic
        assert sent.elements_sent == 2 * (size - 1) * optimizer.layout.numel // size
        assert sent.messages == 2 * (size - 1) * sum(b.bucket_count for b in optimizer.layout.buffers)


def subgroups(rank, size):
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = Bag()
    optimizer = Zero1Optimizer(model, torch.optim.SGD, lr=1.0, process_group=groups[rank % 2])
    assert (optimizer.rank, optimizer.dp_size) == (rank // 2, 2)
    before = model.long.detach().clone()
    model(grads_of(SHAPES, 0, rank)).backward()
    optimizer.step()
    mean = (grads_of(SHAPES, 0, rank % 2)["long"] + grads_of(SHAPES, 0, rank % 2 + 2)["long"]) / 2
    assert bits_equal(model.long, before - mean)


def four_ranks(rank):
    both_ways(rank, 4)
    wire(rank, 4)
    subgroups(rank, 4)


def native(rank, size):
    """The collectives of the backend, here gloo's: the same means but for the order of the sum."""
    comm = NativeCommunicator(dist.group.WORLD)
    all_ranks = buckets(rank, size, 40 * size, torch.float32)
    bucket, out = all_ranks[rank].clone(), torch.empty(40)
    comm.reduce_scatter(bucket, out)
    torch.testing.assert_close(out, comm.own(sum(all_ranks)) / size)
    comm.all_gather(bucket)
    assert all(bits_equal(comm.slice_of(bucket, r), comm.slice_of(all_ranks[r], r)) for r in range(size))
    small = [b.bfloat16() for b in all_ranks]
    comm.reduce_scatter(small[rank], out)
    torch.testing.assert_close(out, comm.own(sum(small)).float() / size, rtol=0.02, atol=0.02)
    assert comm.traffic.messages == 3
    assert comm.gather_rows(torch.tensor([float(rank)])).tolist() == [[float(r)] for r in range(size)]


def three_ranks(rank):
    both_ways(rank, 3)
    native(rank, 3)


@pytest.mark.dist
def test_four_ranks():
    run_ranks(4, four_ranks)


@pytest.mark.dist
def test_three_ranks():
    run_ranks(3, three_ranks)


def test_one_rank_sends_nothing():
    comm = make_communicator(None, torch.device("cpu"))
    assert isinstance(comm, LocalCommunicator)
    bucket, out = torch.arange(4.0), torch.empty(4)
    comm.reduce_scatter(bucket, out)
    comm.all_gather(bucket)
    comm.broadcast(bucket)
    assert torch.equal(bucket, out) and comm.traffic.messages == 0

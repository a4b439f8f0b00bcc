"""A rank that does not come is named by those that wait for it."""

import time

import pytest
import torch
import torch.distributed as dist

from tests.engine.harness import run_ranks
from tests.engine.models import SHAPES, Bag, grads_of
from zero1ckpt.core.errors import Zero1CkptError
from zero1ckpt.engine import waiting
from zero1ckpt.engine.zero1 import Zero1Optimizer


def missing_from_a_step(rank):
    waiting.GRACE = waiting.timedelta(seconds=1.5)
    model = Bag()
    optimizer = Zero1Optimizer(model, torch.optim.AdamW, timeout=2.0, lr=1e-2)
    model(grads_of(SHAPES, 0, rank)).backward()
    optimizer.step()
    if rank == 1:
        time.sleep(6)
        return None
    model(grads_of(SHAPES, 1, rank)).backward()
    started = time.monotonic()
    with pytest.raises(Zero1CkptError) as caught:
        optimizer.step()
    return str(caught.value), time.monotonic() - started


def missing_from_a_collective(rank):
    waiting.GRACE = waiting.timedelta(seconds=1.5)
    model = Bag()
    optimizer = Zero1Optimizer(model, torch.optim.AdamW, timeout=2.0, lr=1e-2)
    comm = optimizer.communicator
    bucket = torch.ones(6 * comm.size)
    if rank == 2:
        time.sleep(6)
        return None
    with pytest.raises(Zero1CkptError) as caught:
        comm.reduce_scatter(bucket, comm.own(bucket))
    return str(caught.value), 0.0


@pytest.mark.dist
@pytest.mark.parametrize(("case", "missing"), [(missing_from_a_step, 1), (missing_from_a_collective, 2)])
def test_missing_ranks_are_named(case, missing):
    for rank, found in enumerate(run_ranks(3, case)):
        if rank == missing:
            continue
        message, seconds = found
        others = [r for r in range(3) if r != missing]
        assert f"rank {missing}" in message and not any(f"rank {r}" in message for r in others), message
        assert "did not finish within 2 s" in message and "\n" not in message and seconds < 20, message


def counted(rank):
    arrivals = waiting.Arrivals.of_group(dist.group.WORLD, None)
    waiting.GRACE = waiting.timedelta(seconds=1)
    for _ in range(3 + 2 * (rank == 0)):
        number = arrivals.next()
    if rank == 2:
        time.sleep(3)
        return ""
    return str(arrivals.explain(number, "all-gather", RuntimeError("closed\nby peer")))


@pytest.mark.dist
def test_ranks_that_are_behind_are_named_with_their_place():
    first, second, _ = run_ranks(3, counted)
    assert "all-gather 5" in first and "rank 1 (at 3), rank 2 missing: closed" in first
    assert "rank 2 missing" in second and "rank 0" not in second

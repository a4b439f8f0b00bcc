"""Both overlaps under 500 steps of everything at once, and saving with gathers in flight."""

import random

import pytest
import torch

from tests.engine.harness import run_ranks
from tests.engine.models import bits_equal
from tests.engine.overlap_nets import ADAMW, Net, assert_same, batch, loss_of, params_of
from zero1ckpt.engine.zero1 import Zero1Optimizer as Engine
from zero1ckpt.training import Zero1Optimizer


def churn(rank, steps, align=True):
    """Replicas are bit-equal after every step, and equal to those trained without overlap.

    Unused branches differ by rank; modules run in another order each step, twice, or not at all; micro-batches,
    evaluation, discarded gradients and frozen layers come at random.
    """
    models = [Net(torch.bfloat16), Net(torch.bfloat16)]
    on = Engine(
        models[0], torch.optim.AdamW, bucket_size=64, overlap_grad_reduce=True, overlap_param_gather=True, **ADAMW
    )
    on._params.gatherer._align = align
    off = Engine(models[1], torch.optim.AdamW, bucket_size=64, **ADAMW)
    together, alone = random.Random(1), random.Random(100 + rank)
    for step in range(steps):
        micros, discard = together.choice((1, 1, 2, 3)), together.random() < 0.05
        freeze = together.random() < 0.1
        plans = [(alone.random() < 0.5, alone.choices(range(4), k=alone.randrange(1, 6))) for _ in range(micros)]
        for model, optimizer in zip(models, (on, off), strict=True):
            model.layers[2].requires_grad_(not freeze)
            for micro, (branch, order) in enumerate(plans):
                with optimizer.no_sync() if micro < micros - 1 else torch.enable_grad():
                    loss_of(model, step, rank, micro, branch=branch, order=order).backward()
            if discard:
                optimizer.zero_grad()
            else:
                optimizer.step()
            if step % 7 == rank:
                with torch.no_grad():
                    assert model(batch(step, rank), order=plans[0][1]).isfinite().all()
        assert set(on.last.unused) == set(off.last.unused), step
        if step % 5:
            assert_same(params_of(models[0]), params_of(models[1]), step)
        on.verify_replicas()


@pytest.mark.dist
@pytest.mark.parametrize("align", [True, False])
def test_churn(align):
    run_ranks(3, churn, 20, align)


@pytest.mark.dist
@pytest.mark.slow
def test_churn_of_500_steps():
    run_ranks(3, churn, 500, timeout=400)


def save_in_flight(rank, folder):
    """A save that starts right after step() holds the values of that step, and so does the model that is loaded."""
    model = Net(torch.bfloat16)
    options = {"bucket_size": 64, "overlap_grad_reduce": True, "overlap_param_gather": True, **ADAMW}
    optimizer = Zero1Optimizer(model, torch.optim.AdamW, **options)
    for step in range(3):
        loss_of(model, step, rank).backward()
        optimizer.step()
    assert optimizer._params.gatherer.in_flight
    optimizer.save(folder, model=model).wait()
    expected = params_of(model)
    twin = Net(torch.bfloat16, seed=5)
    again = Zero1Optimizer(twin, torch.optim.AdamW, **{**options, "bucket_size": 1000})
    loss_of(twin, 0, rank).backward()
    again.step()
    again.load(folder)
    assert_same(params_of(twin), expected)
    for step in range(3, 6):
        for m, o in ((model, optimizer), (twin, again)):
            loss_of(m, step, rank).backward()
            o.step()
    for name, value in params_of(model).items():
        assert bits_equal(value, twin.get_parameter(name)), name


@pytest.mark.dist
def test_save_and_load_with_gathers_in_flight(work):
    run_ranks(2, save_in_flight, str(work / "checkpoint"))

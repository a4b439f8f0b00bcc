"""``optimizer.memory()`` equals the bytes of distinct memory, and what ``zero1ckpt plan`` computes without running."""

import gc

import pytest
import torch

import zero1ckpt
from tests.engine.harness import run_ranks
from tests.training.scenario import Net, make, train
from zero1ckpt.core.memory import Recipe, Stage, buffer_sizes, sharded_memory


def bytes_alive(before=()):
    """Bytes of memory that tensors of this process lie in, each counted once; and where they begin."""
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    spans = {(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in tensors if t.device.type == "cpu"}
    total, reached = 0, 0
    for low, size in sorted(span for span in spans if span not in before):
        total += max(low + size - max(low, reached), 0)
        reached = max(reached, low + size)
    return total, spans


def measured(rank, dp, dtype, grad_dtype, options):
    gc.collect()
    _, before = bytes_alive()
    model = Net(dtype)
    frozen = model.frozen.nbytes
    model, optimizer = make(dtype=dtype, model=model, bucket_size=500, grad_dtype=grad_dtype, **options)
    samples = sum(v.nbytes for g in optimizer._slots._template.groups for v in g.scalars.values())  # of the probe
    peak = []
    real = optimizer.inner.step

    def step():
        gc.collect()
        peak.append(bytes_alive(before)[0] - frozen - samples)
        real()

    train(model, optimizer, 2, 0, rank, dp)
    optimizer.inner.step = step
    model(torch.arange(6)).float().square().mean().backward()
    optimizer.step()
    optimizer.wait_for_params()
    torch.distributed.barrier()  # no rank ends while others still send
    gc.collect()
    report = optimizer.memory()
    states = tuple(slot.dtype for slot in optimizer.slot_specs()[1:])
    plan = sharded_memory(Stage.ZERO_1, buffer_sizes(optimizer.layout), Recipe("float32", states))
    return {
        "rank": report.rank,
        "total": report.total,
        "peak": report.peak,
        "alive": bytes_alive(before)[0] - frozen - samples,
        "in step": peak[0],
        "kinds": report.kinds,
        "plan": plan,
        "padding": report.padding,
    }


CASES = {
    "fp32": (torch.float32, None, {}),
    "bf16, fp32 grads": (torch.bfloat16, None, {}),
    "bf16, bf16 grads": (torch.bfloat16, torch.bfloat16, {}),
    "overlap": (torch.bfloat16, None, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    "sgd": (torch.float32, None, {"cls": torch.optim.SGD, "momentum": 0.9}),
}


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES)
def test_distinct_memory(case):
    reports = run_ranks(2, measured, 2, *CASES[case])
    assert [report["rank"] for report in reports] == [0, 1]
    for report in reports:
        assert report["total"] == report["alive"]
        assert report["peak"] == report["in step"]
        assert report["kinds"] == report["plan"]
    numel = sum(p.numel() for p in Net().parameters() if p.requires_grad)
    wasted = sum(report["padding"] for report in reports)
    kinds = [report["kinds"] for report in reports]
    a, g = (CASES[case][0].itemsize, (CASES[case][1] or torch.float32).itemsize)
    states = 4 if case == "sgd" else 8
    held = numel * (2 * (a + g) + states + (4 if a == 2 else 0))
    assert sum(kind.total for kind in kinds) == held + wasted


def test_one_rank_without_padding():
    """Every element of a float32 run of AdamW takes 16 bytes: param, gradient and two moments."""
    model = torch.nn.Linear(16, 16, bias=False)
    optimizer = zero1ckpt.Zero1Optimizer(model, torch.optim.AdamW, foreach=False, bucket_size="none")
    report = optimizer.memory()
    assert (report.params, report.grads, report.main_params, report.states) == (1024, 1024, 0, 2048)
    assert (report.padding, report.scalars, report.temporary_main_grads, report.extra_grads) == (0, 4, 0, 0)
    assert report.total == report.peak == 4096 + 4


def test_sums_of_micro_batches():
    model = torch.nn.Linear(16, 16, bias=False)
    optimizer = zero1ckpt.Zero1Optimizer(model, torch.optim.AdamW, foreach=False, reduce="tree")
    for _ in range(4):
        model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    assert optimizer.memory().extra_grads == 2 * 1024

"""Every choice of ``reduce`` against its formula, and what it sends."""

import pytest
import torch
import torch.distributed as dist

from tests.engine.harness import run_ranks
from tests.engine.models import SHAPES, Bag, bits_equal, grads_of
from zero1ckpt.core.errors import UnsupportedError, UsageError
from zero1ckpt.engine.collectives import AllToAllCommunicator, NativeCommunicator, make_communicator
from zero1ckpt.engine.reductions import REDUCTIONS, tree_sum
from zero1ckpt.engine.zero1 import Zero1Optimizer

SHARD = 40


def in_order(parts):
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total


def in_pairs(parts):
    """Complete blocks of 2, 4, 8 ... as balanced trees, and the rest from the right."""
    blocks = []
    while parts:
        size = 1 << (len(parts).bit_length() - 1)
        blocks.append(balanced(parts[:size]))
        parts = parts[size:]
    total = blocks.pop()
    while blocks:
        total = blocks.pop() + total
    return total


def balanced(parts):
    half = len(parts) // 2
    return parts[0] if not half else balanced(parts[:half]) + balanced(parts[half:])


def formula(reduce, grads, size):
    """The mean of one element row a rank, in float32."""
    wide = [g.float() for g in grads]
    if reduce == "prescaled":
        return in_order([(g * (1 / size)).float() for g in grads])
    if reduce == "bf16":
        return in_order([g.bfloat16().float() for g in wide]) / size
    return (in_pairs(wide) if reduce == "tree" else in_order(wide)) / size


@pytest.mark.parametrize("size", range(1, 10))
def test_tree_sum(size):
    parts = [torch.randn(33, generator=torch.Generator().manual_seed(k)) * 10.0 ** (k % 5) for k in range(size)]
    expected = in_pairs(parts)
    out = torch.empty(33)
    tree_sum([part.clone() for part in parts], out)
    assert bits_equal(out, expected)
    for own in range(size):
        copies = [part.clone() for part in parts]
        tree_sum(copies, copies[own])
        assert bits_equal(copies[own], expected)
    assert size < 4 or not bits_equal(expected, in_order(parts))


def communicators(rank, size):
    cpu = torch.device("cpu")
    yield from ((name, make_communicator(dist.group.WORLD, cpu, name)) for name in REDUCTIONS)
    for name in ("ordered", "bf16", "tree"):
        yield name, AllToAllCommunicator(dist.group.WORLD, REDUCTIONS[name])


def collectives(rank, size):
    for name, comm in communicators(rank, size):
        for dtype in (torch.float32, torch.bfloat16):
            if name == "tree" and dtype != torch.float32:
                continue
            grads = [
                (torch.randn(SHARD * size, generator=torch.Generator().manual_seed(r)) * 100.0).to(dtype)
                for r in range(size)
            ]
            bucket = grads[rank].clone()
            out = comm.own(bucket) if dtype == torch.float32 else torch.empty(SHARD)
            comm.traffic.reset()
            comm.reduce_scatter(bucket, out)
            assert bits_equal(out, comm.own(formula(name, grads, size))), (name, type(comm).__name__, dtype)
            wire = 2 if name == "bf16" or dtype == torch.bfloat16 else 4
            assert comm.traffic.bytes_sent == (size - 1) * SHARD * wire, (name, type(comm).__name__)
    native = NativeCommunicator(dist.group.WORLD, REDUCTIONS["prescaled"])
    grads = [torch.randn(SHARD * size, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    out = torch.empty(SHARD)
    native.reduce_scatter(grads[rank].clone(), out)
    torch.testing.assert_close(out, native.own(sum(grads)) / size)


def used(step, number):
    """A param without a gradient counts as a zero, in its place."""
    return SHAPES if step or number % 2 else [name for name in SHAPES if name != "c"]


def train(rank, size, reduce, micros=1, **options):
    """Global micro-batch m = rank * micros + j; its loss is divided by the number of micro-batches a rank."""
    model = Bag(options.pop("dtype", torch.float32))
    optimizer = Zero1Optimizer(
        model, torch.optim.AdamW, bucket_size=64, reduce=reduce, lr=1e-2, foreach=False, **options
    )
    for step in range(3):
        for j in range(micros):
            number = rank * micros + j
            weights, names = grads_of(SHAPES, step, 0, micro=number), used(step, number)
            with optimizer.no_sync():
                (model(weights, names) / micros).backward()
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def oracle(size, reduce, dtype=torch.float32):
    model = Bag(dtype)
    main = {n: p.detach().float() for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(list(main.values()), lr=1e-2, foreach=False)
    for step in range(3):
        grads = [grads_of(SHAPES, step, 0, micro=m) for m in range(size)]
        for name, param in main.items():
            rows = [g[name].to(dtype).float() * (name in used(step, m)) for m, g in enumerate(grads)]
            param.grad = formula(reduce, rows, size)
        optimizer.step()
    return {name: param.to(dtype) for name, param in main.items()}


def choices(rank, size):
    collectives(rank, size)
    results = {(name, torch.float32): train(rank, size, name) for name in REDUCTIONS}
    for name in ("mean", "prescaled", "bf16"):
        results[name, torch.bfloat16] = train(rank, size, name, dtype=torch.bfloat16)
    return results


@pytest.mark.dist
@pytest.mark.parametrize("size", [3, 4])
def test_each_choice_against_its_formula(size):
    ranks = run_ranks(size, choices, size)
    for name, dtype in ranks[0]:
        expected = oracle(size, name, dtype)
        for other in ranks:
            for param, value in other[name, dtype].items():
                assert bits_equal(value, expected[param]), (name, dtype, param)
    assert size < 4 or any(
        not bits_equal(ranks[0]["tree", torch.float32][n], ranks[0]["mean", torch.float32][n]) for n in SHAPES
    )


def split(rank, size, micros):
    return train(rank, size, "tree", micros), train(rank, size, "mean", micros)


@pytest.mark.dist
def test_tree_is_the_same_for_every_split_of_the_micro_batches():
    splits = {(size, 4 // size): run_ranks(size, split, size, 4 // size) for size in (4, 2, 1)}
    expected_tree, expected_mean = splits[4, 1][0]
    for key, ranks in splits.items():
        for tree, mean in ranks:
            assert all(bits_equal(tree[name], expected_tree[name]) for name in SHAPES), key
            assert key != (2, 2) or any(not bits_equal(mean[name], expected_mean[name]) for name in SHAPES)


def test_tree_refuses_what_it_cannot_promise():
    model = Bag()
    with pytest.raises(UnsupportedError, match="overlap_grad_reduce"):
        Zero1Optimizer(model, torch.optim.AdamW, reduce="tree", overlap_grad_reduce=True)
    with pytest.raises(UsageError, match=r"a: .*tree.*bfloat16"):
        Zero1Optimizer(model, torch.optim.AdamW, reduce="tree", grad_dtype=torch.bfloat16)
    linear = torch.nn.Linear(3, 3)
    optimizer = Zero1Optimizer(linear, torch.optim.AdamW, reduce="tree")
    nested = torch.utils.checkpoint.checkpoint(linear, torch.ones(2, 3, requires_grad=True), use_reentrant=True)
    with pytest.raises(UnsupportedError, match="use_reentrant=False"):
        nested.sum().backward()
    torch.utils.checkpoint.checkpoint(linear, torch.ones(2, 3), use_reentrant=False).sum().backward()
    optimizer.step()

"""Expert params: buffers and data-parallel groups of their own, and the training of one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.engine.harness import run_ranks
from tests.engine.models import bits_equal, mean_in_rank_order
from zero1ckpt.core.errors import UnsupportedError, UsageError, VerificationError
from zero1ckpt.engine.zero1 import Zero1Optimizer

RANKS = 4
DENSE = {"emb": (7, 5), "norm": (9,), "head": (3, 4)}
EXPERT = {"up": (5, 6), "down": (6, 5), "gate": ()}
ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "foreach": False}


class Layer(nn.Module):
    """Dense params, and one expert number ``expert``: experts have the same names and other values."""

    def __init__(self, expert, dtype=torch.float32):
        super().__init__()
        for offset, shapes in ((0, DENSE), (1000 + expert, EXPERT)):
            for at, (name, shape) in enumerate(shapes.items()):
                generator = torch.Generator().manual_seed(offset + at)
                setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
        for name in EXPERT:
            self.get_parameter(name).allreduce = False

    def forward(self, weights):
        return torch.stack([(p.float() * weights[n]).sum() for n, p in self.named_parameters() if n in weights]).sum()


def grads(step, rank, expert):
    """Of the loss of ``rank`` on its own: dense params, and one expert."""
    made = {}
    for offset, shapes in ((0, DENSE), (1 + expert, EXPERT)):
        generator = torch.Generator().manual_seed(1 + 1009 * step + 101 * rank + 13 * offset)
        made.update({name: torch.randn(shape, generator=generator) for name, shape in shapes.items()})
    return made


def given(step, rank, parallel):
    """What the backward pass of ``rank`` finds: experts get gradients from all ranks that send them tokens."""
    first, expert = rank - rank % parallel, rank % parallel
    sums = grads(step, first, expert)
    for other in range(first + 1, first + parallel):
        for name, grad in grads(step, other, expert).items():
            sums[name] = sums[name] + grad
    own = grads(step, rank, expert)
    return {name: own[name] if name in DENSE else sums[name] for name in sums}


def expert_groups(parallel):
    """Expert-parallel ranks are adjacent: rank r holds expert r % parallel. All ranks make all groups."""
    made = [dist.new_group(list(range(e, RANKS, parallel))) for e in range(parallel)]
    return made[dist.get_rank() % parallel]


def means(step, parallel, expert):
    """As the engine sums: dense over all ranks, experts over those that hold them; both divided by the ranks."""
    holders = range(expert, RANKS, parallel)
    dense = mean_in_rank_order([grads(step, r, 0) for r in range(RANKS)])
    sums = mean_in_rank_order([given(step, r, parallel) for r in holders])
    scale = len(holders) / RANKS
    return {name: dense[name] if name in DENSE else sums[name] * scale for name in dense}


def norm_of(step, parallel):
    rows = [means(step, parallel, e) for e in range(parallel)]
    parts = [rows[0][name] for name in DENSE] + [row[name] for row in rows for name in EXPERT]
    return float(torch.cat([p.double().flatten() for p in parts]).norm())


def train(rank, parallel, overlap, dtype=torch.float32, **options):
    expert = rank % parallel
    model, plain = Layer(expert, dtype), Layer(expert)
    if rank % parallel and dtype == torch.float32:
        with torch.no_grad():
            model.emb.mul_(3)  # the first rank's dense values win, and each expert keeps its own
    optimizer = Zero1Optimizer(
        model,
        torch.optim.AdamW,
        bucket_size=32,
        expert_group=expert_groups(parallel),
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        **ADAMW,
        **options,
    )
    size = RANKS // parallel
    assert [b.rules.dp_size for b in optimizer.layout.buffers] == [RANKS, size]
    assert [b.key.expert for b in optimizer.layout.buffers] == [False, True]
    assert {s.name for s in optimizer.param_specs if s.expert} == set(EXPERT)
    assert [optimizer.rank_in(0), optimizer.rank_in(1)] == [rank, rank // parallel]
    theirs = torch.optim.AdamW(plain.parameters(), **ADAMW)
    for step in range(3):
        optimizer.scale(model(given(step, rank, parallel))).backward()
        if not overlap:
            assert optimizer.get_grad_norm() == pytest.approx(norm_of(step, parallel), rel=1e-6)
        optimizer.step()
        mean = means(step, parallel, expert)
        for name, param in plain.named_parameters():
            param.grad = mean[name]
        theirs.step()
    optimizer.verify_replicas()
    for name, param in plain.named_parameters():
        ours = model.get_parameter(name).detach()
        if options.get("reduce") == "tree":
            torch.testing.assert_close(ours, param.detach(), rtol=1e-4, atol=1e-6)
        elif dtype == torch.float32:
            assert bits_equal(ours, param.detach()), (name, parallel)
    return model, optimizer


def unused(rank):
    """An expert that no token has come to is left out where ``unused="skip"``, and only that one."""
    model = Layer(rank % 2)
    optimizer = Zero1Optimizer(
        model, torch.optim.AdamW, expert_group=expert_groups(2), unused="skip", bucket_size=32, **ADAMW
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    weights = given(0, rank, 2)
    if rank % 2:
        weights = {name: weights[name] for name in DENSE}
    model(weights).backward()
    optimizer.step()
    moved = {name for name, p in model.named_parameters() if not bits_equal(p.detach(), before[name])}
    assert moved == (set(DENSE) if rank % 2 else set(DENSE) | set(EXPERT))
    assert optimizer.last.unused == (tuple(EXPERT) if rank % 2 else ())


def overflow(rank):
    """Found in the expert of one rank: all leave the step out."""
    model = Layer(rank % 2)
    optimizer = Zero1Optimizer(model, torch.optim.SGD, lr=1.0, expert_group=expert_groups(2), loss_scale=8.0)
    weights = given(0, rank, 2)
    if rank == 1:
        weights["gate"] = torch.tensor(float("nan"))
    optimizer.scale(model(weights)).backward()
    optimizer.step()
    assert optimizer.last.skipped


def twice(rank):
    """A second gradient after the bucket was sent, in an expert."""
    model = Layer(rank % 2)
    optimizer = Zero1Optimizer(
        model, torch.optim.SGD, lr=1.0, expert_group=expert_groups(2), overlap_grad_reduce=True, bucket_size=8
    )
    before = model.up.detach().clone()
    for _ in range(2):
        model(given(0, rank, 2)).backward()
    optimizer.step()
    torch.testing.assert_close(model.up.detach(), before - 2 * means(0, 2, rank % 2)["up"])


def replicas(rank):
    model, optimizer = train(rank, 2, False)
    if rank == 3:
        with torch.no_grad():
            model.down.add_(1)
    with pytest.raises(VerificationError, match="down"):
        optimizer.verify_replicas()


def refused(rank):
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    lopsided = dist.new_group([0, 1, 2]), dist.new_group([0, 3])
    with pytest.raises(UsageError, match="not a part of process_group"):
        Zero1Optimizer(Layer(0), torch.optim.SGD, lr=1.0, process_group=pair, expert_group=dist.group.WORLD)
    with pytest.raises(UsageError, match="is not in expert_group"):
        Zero1Optimizer(Layer(0), torch.optim.SGD, lr=1.0, expert_group=lopsided[1])
    with pytest.raises(UnsupportedError, match="several optimizer instances"):
        Zero1Optimizer(Layer(0), torch.optim.SGD, lr=1.0, expert_group=pair, num_distributed_optimizer_instances=2)
    crossed = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([2, 3])]
    with pytest.raises(UsageError, match="do not tile"):
        Zero1Optimizer(Layer(0), torch.optim.SGD, lr=1.0, expert_group=crossed[(0, 1, 2, 2)[rank]])


def everything(rank):
    for parallel in (1, 2, 4):
        train(rank, parallel, False)
        train(rank, parallel, True)
    train(rank, 2, True, torch.bfloat16, reduce="bf16", grad_dtype="bfloat16", max_grad_norm=1.0)
    train(rank, 2, False, reduce="tree")


def the_rest(rank):
    unused(rank)
    overflow(rank)
    twice(rank)
    replicas(rank)
    refused(rank)


def test_training_is_that_of_one_process():
    run_ranks(RANKS, everything)


@pytest.mark.filterwarnings("ignore:gradients were not finite")
def test_unused_overflow_replicas_and_refusals():
    run_ranks(RANKS, the_rest)

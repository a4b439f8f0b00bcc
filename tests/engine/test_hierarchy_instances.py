"""Several instances of the sharded optimizer: the same bits as one instance, whatever the split."""

import pytest
import torch
import torch.distributed as dist

from tests.engine.harness import run_ranks
from tests.engine.models import SHAPES, Bag, bits_equal, grads_of, mean_in_rank_order
from zero1ckpt.core.errors import UsageError
from zero1ckpt.engine.collectives import NativeCommunicator
from zero1ckpt.engine.instances import NativeInstances, make_instances
from zero1ckpt.engine.zero1 import Zero1Optimizer

ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "foreach": False}


def build(instances, **options):
    model = Bag(options.pop("dtype", torch.float32))
    options = {"bucket_size": 64, **ADAMW, **options}
    optimizer = Zero1Optimizer(model, torch.optim.AdamW, num_distributed_optimizer_instances=instances, **options)
    return model, optimizer


def train(rank, model, optimizer, steps=3, micros=2):
    for step in range(steps):
        for micro in range(micros - 1):
            with optimizer.no_sync():
                optimizer.scale(model(grads_of(SHAPES, step, rank, micro))).backward()
        optimizer.scale(model(grads_of(SHAPES, step, rank, micros - 1))).backward()
        optimizer.step()
        optimizer.verify_replicas()


def shards_of(optimizer):
    """This rank's part of every slot: name -> slot -> (start, flat part)."""
    return {
        (f.spec.name, spec.name): (
            f.param.start,
            optimizer.shard(spec.name, f.buffer, f.bucket)[f.local.start : f.local.end],
        )
        for f in optimizer.fragments
        for spec in optimizer.slot_specs()
    }


def same(rank, instances, options):
    (one, first), (many, second) = build(1, **dict(options)), build(instances, **dict(options))
    train(rank, one, first)
    train(rank, many, second)
    for (name, a), b in zip(one.named_parameters(), many.parameters(), strict=True):
        assert bits_equal(a.detach(), b.detach()), (name, instances, options)
    size = dist.get_world_size() // instances
    assert (second.rank, second.instance, second.dp_size) == (rank % size, rank // size, size)
    assert second.layout.rules.dp_size == size
    return shards_of(first), shards_of(second)


CASES = [
    {},
    {"overlap_grad_reduce": True, "overlap_param_gather": True},
    {"dtype": torch.bfloat16, "reduce": "bf16", "loss_scale": 1024.0},
    {"dtype": torch.bfloat16, "grad_dtype": "bfloat16", "reduce": "prescaled", "overlap_grad_reduce": True},
    {"reduce": "tree"},
    {"dtype": torch.float16, "loss_scale": "dynamic"},
]


def all_cases(rank, instances):
    return [same(rank, instances, case) for case in CASES]


@pytest.mark.parametrize(("size", "instances"), [(4, 2), (4, 4), (3, 3)])
def test_bits_are_those_of_one_instance(size, instances):
    """3 ranks of 3 instances: a shard of 128 elements is cut into uneven pieces."""
    results = run_ranks(size, all_cases, instances)
    for case in range(len(CASES)):
        whole = {}
        for rank in range(size):
            for key, (start, part) in results[rank][case][0].items():
                whole.setdefault(key, {})[start] = part
        whole = {key: torch.cat([parts[at] for at in sorted(parts)]) for key, parts in whole.items()}
        for rank in range(size):
            for key, (start, part) in results[rank][case][1].items():
                assert bits_equal(part, whole[key][start : start + part.numel()]), (key, CASES[case])


def plain(rank):
    """Against torch on the mean that is summed in the rank order of the whole group."""
    model, optimizer = build(2)
    theirs = Bag()
    reference = torch.optim.AdamW(theirs.parameters(), **ADAMW)
    for step in range(3):
        model(grads_of(SHAPES, step, rank)).backward()
        norm = optimizer.get_grad_norm()
        optimizer.step()
        mean = mean_in_rank_order([grads_of(SHAPES, step, r) for r in range(4)])
        for name, param in theirs.named_parameters():
            param.grad = mean[name]
        reference.step()
        full = torch.cat([g.double().flatten() for g in mean.values()]).norm()
        assert norm == pytest.approx(float(full), rel=1e-12)
        for name, param in theirs.named_parameters():
            assert bits_equal(model.get_parameter(name).detach(), param.detach()), name


def overflow(rank):
    model, optimizer = build(2, loss_scale=2.0)
    grads = grads_of(SHAPES, 0, rank)
    if rank == 3:
        grads["b"][0] = float("inf")
    optimizer.scale(model(grads)).backward()
    optimizer.step()
    assert optimizer.last.skipped and optimizer.applied_steps == 0


def wire(rank):
    model, optimizer = build(2)
    optimizer.communicator.traffic.reset()
    model(grads_of(SHAPES, 0, rank)).backward()
    optimizer.step()
    numel, ranks, instances = optimizer.layout.numel, 4, 2
    reduced = (ranks - 1) * numel // ranks + (instances - 1) * numel // ranks
    gathered = (optimizer.dp_size - 1) * numel // optimizer.dp_size
    assert optimizer.communicator.traffic.elements_sent == reduced + gathered


def native(rank):
    """Megatron's way, with gloo's collectives: the same means but for the order of the sum."""
    made = make_instances(dist.group.WORLD, 2, torch.device("cpu"))
    across = made._across.group
    inside = NativeCommunicator(made._inside.group)
    comm = NativeInstances(inside, NativeCommunicator(dist.group.WORLD), across)
    generators = [torch.Generator().manual_seed(r) for r in range(4)]
    buckets = [torch.randn(80, generator=g) for g in generators]
    mean = sum(buckets) / 4
    out = torch.empty(40)
    comm.reduce_scatter(buckets[rank].clone(), out)
    torch.testing.assert_close(out, comm.own(mean))
    pairs = [(buckets[rank].clone(), torch.empty(40)) for _ in range(2)]
    for work in comm.begin_reduce_scatters(pairs):
        work.wait()
    for _, got in pairs:
        torch.testing.assert_close(got, comm.own(mean))
    comm.reduce_scatter(torch.empty(0), torch.empty(0))


def refused(rank):
    for wrong in (3, 0, 8, True, 2.0):
        with pytest.raises(UsageError, match="num_distributed_optimizer_instances"):
            build(wrong)


def the_rest(rank):
    plain(rank)
    wire(rank)
    native(rank)
    refused(rank)
    overflow(rank)


@pytest.mark.filterwarnings("ignore:gradients were not finite")
def test_sums_norm_wire_and_refusals():
    run_ranks(4, the_rest)


def test_one_process_is_one_instance():
    with pytest.raises(UsageError, match="divides 1 ranks"):
        build(2)

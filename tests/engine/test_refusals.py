"""What cannot be trained is refused at construction, in one line, on every rank."""

import copy
import pickle

import pytest
import torch
from torch import nn

from tests.engine.harness import run_ranks
from tests.engine.models import Bag
from zero1ckpt.core.errors import UnsupportedError, UsageError, Zero1CkptError
from zero1ckpt.engine.naming import strip_wrappers
from zero1ckpt.engine.zero1 import Zero1Optimizer


def make(params, cls=torch.optim.AdamW, **options):
    return Zero1Optimizer(params, cls, **options)


def weight(*shape, dtype=torch.float32, device="cpu"):
    return nn.Parameter(torch.ones(shape, dtype=dtype, device=device))


@pytest.mark.parametrize(
    ("params", "error", "words"),
    [
        ([], UsageError, "no params"),
        ([weight(2).requires_grad_(False)], UsageError, "requires_grad"),
        ({weight(2)}, UsageError, "no order"),
        (weight(2), UsageError, "no order"),
        ([{"lr": 1.0}], UsageError, "malformed"),
        ([("w", weight(2)), ("w", weight(3))], UsageError, "w: two params"),
        ([weight(2, dtype=torch.complex64)], UnsupportedError, "complex64"),
        ([("w", weight(2)), ("m", weight(2, device="meta"))], UnsupportedError, "m: .*meta"),
        ([weight(2), weight(2, dtype=torch.float64)], UnsupportedError, "float64"),
        ([nn.LazyLinear(3).weight], UsageError, "no shape"),
        ([nn.Linear(1, 1), weight(2)], UsageError, "a model among params"),
    ],
)
def test_params(params, error, words):
    with pytest.raises(error, match=words) as caught:
        make(params)
    assert "\n" not in str(caught.value)


def test_a_param_in_two_groups():
    w = weight(2)
    with pytest.raises(UsageError, match="groups 0 and 1"):
        make([{"params": [("w", w)]}, {"params": [w]}])


def test_a_param_that_the_model_does_not_have():
    with pytest.raises(UsageError, match="not in the model"):
        make([weight(2)], model=nn.Linear(1, 1))


def test_expert_params():
    w = weight(2)
    w.allreduce = False
    with pytest.raises(UnsupportedError, match=r"e: .*expert_group"):
        make([("e", w)])


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"loss_scale": "static"}, UsageError, "loss_scale"),
        ({"loss_scale": 0.0}, UsageError, "loss_scale"),
        ({"num_distributed_optimizer_instances": 2}, UsageError, "num_distributed_optimizer_instances"),
        ({"reduce": "ring"}, UsageError, "reduce"),
        ({"reduce": "tree", "grad_dtype": "bfloat16"}, UsageError, "p: .*tree"),
        ({"timeout": 0}, UsageError, "timeout"),
        ({"expert_group": object()}, UsageError, "expert_group"),
        ({"elementwise": False}, UnsupportedError, "elementwise"),
        ({"bucket_size": 0}, UsageError, "bucket_size"),
        ({"bucket_size": "all"}, UsageError, "bucket_size"),
        ({"unused": "drop"}, UsageError, "unused"),
        ({"grad_dtype": "int8"}, UsageError, "grad_dtype"),
        ({"max_grad_norm": -1.0}, UsageError, "max_grad_norm"),
        ({"lr": -1.0}, UsageError, "AdamW"),
        ({"learning_rate": 1.0}, UsageError, "learning_rate"),
    ],
)
def test_options(options, error, words):
    with pytest.raises(error, match=words):
        make([("p", weight(2))], **options)


def test_afterwards():
    optimizer = make([weight(2)])
    with pytest.raises(UnsupportedError, match="add_param_group"):
        optimizer.add_param_group({"params": [weight(2)]})
    with pytest.raises(UnsupportedError, match="save"):
        optimizer.state_dict()
    embedding = nn.Embedding(4, 2, sparse=True)
    with pytest.raises(UnsupportedError, match=r"weight: .*Embedding\(sparse=True\)"):
        make(embedding)
    kept = make([("weight", embedding.weight)])  # only a model says it before
    with pytest.raises(UnsupportedError, match="weight: sparse"):
        embedding(torch.tensor([1])).sum().backward()
    kept.close()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies(duplicate):
    """A copy would share the hooks and buffers of the model's params, or have none."""
    optimizer = make([weight(2)])
    with pytest.raises(UnsupportedError, match="copied or pickled"):
        duplicate(optimizer)


def test_names():
    assert strip_wrappers(["module._orig_mod.a.b", "module.a._checkpoint_wrapped_module.c"]) == ["a.b", "a.c"]
    assert strip_wrappers(["module.module.w", "module.enc.module.w"]) == ["w", "enc.module.w"]
    assert strip_wrappers(["module.w", "w"]) == ["module.w", "w"]


def test_buffers_follow_the_registration_of_the_model_or_the_order_of_groups():
    model = Bag()
    groups = [{"params": [model.c, model.a]}, {"params": [model.b]}]
    by_model = make(groups, model=model)
    assert [(s.name, s.group) for s in by_model.param_specs] == [("a", 0), ("b", 1), ("c", 0)]
    assert by_model.param_groups[0]["params"] == [model.c, model.a]
    by_groups = make([{"params": [("c", model.c), ("a", model.a)]}, {"params": [("b", model.b)]}])
    assert [s.name for s in by_groups.param_specs] == ["c", "a", "b"]
    assert by_groups.layout.rules.bucket_size is None
    assert make(model, overlap_grad_reduce=True).layout.rules.bucket_size == 40_000_000
    assert make(model, overlap_grad_reduce=True, bucket_size="none").layout.rules.bucket_size is None


def message(rank, build):
    try:
        build(rank)
    except Zero1CkptError as error:
        return type(error).__name__, str(error)
    return None


def other_shape(rank):
    make([("a", weight(3)), ("b", weight(2 + (rank == 1)))])


def one_rank_fails(rank):
    make([("a", weight(2, dtype=torch.complex64 if rank == 2 else torch.float32))])


def other_options(rank):
    make([("a", weight(3))], bucket_size=10 + rank)


def missing_rank(rank):
    from datetime import timedelta

    import torch.distributed as dist

    from zero1ckpt.engine.control import ControlPlane

    control = ControlPlane(dist.group.WORLD, timedelta(seconds=2))
    assert control.all_gather(rank) == [0, 1, 2]
    assert control.broadcast("x" if rank == 0 else None) == "x"
    assert control.gather(rank) == ([0, 1, 2] if rank == 0 else None)
    if rank != 1:
        control.barrier("a save")


def disagreements(rank):
    found = [message(rank, build) for build in (other_shape, one_rank_fails, other_options, missing_rank)]
    if rank == 1:
        import time

        time.sleep(4)
    return found


@pytest.mark.dist
def test_ranks_that_disagree():
    ranks = run_ranks(3, disagreements)
    for shape, one, options, _ in ranks:
        assert shape[0] == "UsageError" and "b: " in shape[1] and "rank 1" in shape[1] and "(3,)" in shape[1]
        assert one[0] == "UnsupportedError" and "complex64" in one[1]
        assert options[0] == "UsageError" and "bucket_size=11" in options[1]
    assert "rank 2" in ranks[0][1][1]
    missing = ranks[0][3]
    assert "a save" in missing[1] and "1" in missing[1].split("found")[1]

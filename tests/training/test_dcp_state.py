"""``state_dict()`` through torch's own distributed checkpoints, at other numbers of ranks, and by itself."""

import copy
import warnings
from itertools import pairwise

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import zero1ckpt
from tests.engine.harness import run_ranks
from tests.training.scenario import make, same_weights, train, weights
from zero1ckpt.core.errors import UnsupportedError, UsageError, Zero1CkptError
from zero1ckpt.core.ranges import Range
from zero1ckpt.training.dcp_state import ShardedSlot


def quiet(work):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return work()


def dcp_save(state, path):
    quiet(lambda: dcp.save(state, checkpoint_id=path, no_dist=not torch.distributed.is_initialized()))


def dcp_load(state, path):
    quiet(lambda: dcp.load(state, checkpoint_id=path, no_dist=not torch.distributed.is_initialized()))


def first_half(rank, dp, work, dtype, options):
    """Two steps, a DCP save, and a checkpoint of ours of the same moment; then two more."""
    model, optimizer = make(dtype=dtype, bucket_size=300, **options)
    train(model, optimizer, 2, 0, rank, dp)
    optimizer.param_groups[0]["lr"] *= 0.5
    dcp_save({"model": model.state_dict(), "optimizer": optimizer}, work / "dcp")
    optimizer.save(work / "ours")
    return weights(model)


def resumed(rank, dp, work, dtype, options, steps):
    """From either checkpoint, on ``dp`` ranks with other buckets: the state, and that of two steps later."""
    results = []
    for kind in ("dcp", "ours"):
        model, optimizer = make(dtype=dtype, bucket_size=700, **options)
        if steps:
            train(model, optimizer, steps, 7, rank, dp)
        if kind == "dcp":
            dcp_load({"optimizer": optimizer}, work / "dcp")
        else:
            optimizer.load(work / "ours")
        optimizer.save(work / f"{kind}-{dp}-{steps}")
        results.append((weights(model), optimizer.applied_steps, [g["lr"] for g in optimizer.param_groups]))
        train(model, optimizer, 2, 2, rank, dp)
        optimizer.save(work / f"{kind}-{dp}-{steps}-later")
    (left, *facts), (right, *expected) = results
    same_weights(left, right)
    assert facts == expected == [2, [0.005, 0.01]]
    return left


CASES = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {"overlap_param_gather": True}),
    "momentum": (torch.float32, {"cls": torch.optim.SGD, "momentum": 0.9}),
    "state of the first step": (torch.float32, {"cls": torch.optim.ASGD, "foreach": False}),
}


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES)
def test_other_numbers_of_ranks(work, case):
    """The same, to the byte of what is saved next, as by our own checkpoint; so too after two more steps."""
    dtype, options = CASES[case]
    saved = run_ranks(2, first_half, 2, work, dtype, options)[0]
    for dp, steps in ((3, 0), (1, 0), (2, 1)):
        for found in run_ranks(dp, resumed, dp, work, dtype, options, steps):
            same_weights(found, saved)
        for end in (f"{dp}-{steps}", f"{dp}-{steps}-later"):
            assert zero1ckpt.open(work / f"dcp-{end}").digest == zero1ckpt.open(work / f"ours-{end}").digest
            assert not zero1ckpt.verify(work / f"dcp-{end}", against=work / f"ours-{end}").findings
    assert zero1ckpt.open(work / "dcp-3-0").digest == zero1ckpt.open(work / "ours").digest


def with_experts(rank, work):
    """Each rank has an expert of its own under one name."""
    group = torch.distributed.new_group([rank], use_local_synchronization=True)
    found = []
    for turn in range(2):
        torch.manual_seed(10 * turn + rank)  # the experts of the ranks begin with other values
        model = torch.nn.ModuleDict({"dense": torch.nn.Linear(5, 7), "expert": torch.nn.Linear(7, 3)})
        for param in model["expert"].parameters():
            param.allreduce = False
        optimizer = zero1ckpt.Zero1Optimizer(model, torch.optim.AdamW, expert_group=group, foreach=False)
        if turn:
            dcp_load({"optimizer": optimizer}, work / "dcp")
        else:
            model["expert"](model["dense"](torch.full((2, 5), rank + 1.0))).sum().backward()
            optimizer.step()
            dcp_save({"optimizer": optimizer}, work / "dcp")
        found.append(weights(model))
    same_weights(*found)
    return found[0]["expert.weight"]


@pytest.mark.dist
def test_experts_of_one_name(work):
    one, two = run_ranks(2, with_experts, work)
    assert not torch.equal(one, two)


def test_every_range_as_boxes():
    """The boxes of ranges that cut a tensor put together are the tensor."""
    whole = torch.arange(2 * 3 * 5)
    for shape in ((30,), (2, 15), (2, 3, 5), (1, 30, 1)):
        for cuts in ([0, 30], [0, 1, 30], [0, 7, 11, 29, 30], list(range(31))):
            out = torch.full(shape, -1)
            for low, high in pairwise(cuts):
                shard = ShardedSlot("k", whole[low:high], shape, Range(low, high))
                for box in shard.boxes:
                    out[box.slices] = shard.part(box.start)
            assert torch.equal(out.flatten(), whole)


def test_state_dicts_without_dcp(work):
    """A copy of a ``state_dict()`` goes back to the same rank; the dict itself is a view."""
    model, optimizer = make(dtype=torch.bfloat16, bucket_size=300)
    train(model, optimizer, 2)
    optimizer.save(work / "now")
    state = copy.deepcopy(optimizer.state_dict())
    torch.save(state, work / "file")
    train(model, optimizer, 1, 2)
    for given in (state, torch.load(work / "file", weights_only=False)):
        other, fresh = make(dtype=torch.bfloat16, bucket_size=300)
        fresh.load_state_dict(given)
        fresh.save(work / "again", overwrite=True)
        assert zero1ckpt.open(work / "again").digest == zero1ckpt.open(work / "now").digest
        train(other, fresh, 1, 2)
        same_weights(weights(other), weights(model))


def test_refusals(work):
    _, optimizer = make(bucket_size=300)
    state = optimizer.state_dict()
    with pytest.raises(UsageError, match="no state_dict"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    with pytest.raises(UnsupportedError, match="other params"):
        optimizer.load_state_dict({**state, "params": state["params"][:-1]})
    with pytest.raises(UnsupportedError, match="param groups"):
        optimizer.load_state_dict({**state, "param_groups": state["param_groups"][:-1]})
    shard = state["state"]["mid.weight"]["exp_avg"]
    half = ShardedSlot(shard.key, shard.local[:100], shard.global_shape, Range(0, 100))
    slots = {**state["state"]["mid.weight"], "exp_avg": half}
    with pytest.raises(UnsupportedError, match=r"mid\.weight"):
        optimizer.load_state_dict({**state, "state": {**state["state"], "mid.weight": slots}})


def test_a_read_that_breaks_off(work):
    """What was read into shards is neither the old state nor the new: no step until a load succeeds."""
    model, optimizer = make(bucket_size=300)
    train(model, optimizer, 1)
    dcp_save({"optimizer": optimizer}, work / "dcp")
    optimizer.save(work / "ours")
    _, other = make(cls=torch.optim.AdamW, amsgrad=True, bucket_size=300)
    with pytest.raises(CheckpointException, match="Missing key"):
        dcp_load({"optimizer": other}, work / "dcp")
    other.step()  # nothing was read
    for file in (work / "dcp").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(CheckpointException):
        dcp_load({"optimizer": optimizer}, work / "dcp")
    with pytest.raises(Zero1CkptError, match="half-way"):
        optimizer.step()
    optimizer.load(work / "ours")
    train(model, optimizer, 1, 1)


def test_the_view_of_megatron():
    _, optimizer = make(bucket_size=300)
    view = optimizer.sharded_state_dict()
    shard = view["param_state"]["optimizer.state.exp_avg.mid.weight"]
    assert (shard.global_shape, shard.flattened_range, shard.dtype) == ((33, 17), Range(0, 561), torch.float32)
    assert shard.local.data_ptr() == optimizer.state_dict()["state"]["mid.weight"]["exp_avg"].local.data_ptr()
    assert view["optimizer"]["step"] == 0

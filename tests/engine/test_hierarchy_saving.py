"""Saving and loading with several optimizer instances, and with expert groups."""

from itertools import chain

import pytest
import torch
import torch.distributed as dist

import zero1ckpt
from tests.engine.harness import run_ranks
from tests.engine.models import SHAPES, Bag, bits_equal, dump, grads_of
from tests.engine.test_experts import ADAMW, EXPERT, Layer, expert_groups, given
from zero1ckpt.core.errors import UsageError

KINDS = [
    {"format": "bucket_shards"},
    {"format": "fully_reshardable"},
    {"format": "fully_reshardable", "container": "zarr"},
    {"format": "fully_sharded_model_space"},
]


def bag(rank, instances, steps, seed=0):
    model = Bag(torch.bfloat16, seed=seed)
    optimizer = zero1ckpt.Zero1Optimizer(
        model, torch.optim.AdamW, bucket_size=64, num_distributed_optimizer_instances=instances, **ADAMW
    )
    for step in range(steps):
        model(grads_of(SHAPES, step, rank)).backward()
        optimizer.step()
    return model, optimizer


def same_state(model, optimizer, other_model, other):
    for a, b in zip(model.parameters(), other_model.parameters(), strict=True):
        assert bits_equal(a.detach(), b.detach())
    assert optimizer.applied_steps == other.applied_steps


def instances(rank, folder):
    model, optimizer = bag(rank, 2, 3)
    _, one = bag(rank, 1, 3)
    one.save(f"{folder}/one")
    for at, kind in enumerate(KINDS):
        optimizer.save(f"{folder}/{at}", rank_extra={"rank": rank}, extra={"at": at}, **kind)
    optimizer.save(f"{folder}/async", asynchronous=True).wait()
    digests = {zero1ckpt.open(f"{folder}/{name}").digest for name in ("one", "async", *range(len(KINDS)))}
    assert len(digests) == 1
    assert zero1ckpt.open(f"{folder}/0").layout.rules.dp_size == 2
    for at in range(len(KINDS)):
        for k in (1, 2, 4):
            fresh_model, fresh = bag(rank, k, 0, seed=9)
            extra = fresh.load(f"{folder}/{at}")
            assert extra == {"at": at, "rank_extra": {"rank": rank}}
            same_state(model, optimizer, fresh_model, fresh)
            fresh.verify_replicas()
            if k == 2:
                ours, theirs = dump(optimizer), dump(fresh)
                assert all(bits_equal(a, b) for s in ours for a, b in zip(ours[s][0], theirs[s][0], strict=True))
    model(grads_of(SHAPES, 3, rank)).backward()
    fresh_model(grads_of(SHAPES, 3, rank)).backward()
    optimizer.step()
    fresh.step()
    same_state(model, optimizer, fresh_model, fresh)


def moe(rank, parallel, steps, group=None, seed=0):
    model = Layer(rank % parallel + seed)
    groups = [
        {"params": [p for n, p in model.named_parameters() if n not in EXPERT], "lr": 3e-3},
        {"params": [p for n, p in model.named_parameters() if n in EXPERT]},
    ]
    optimizer = zero1ckpt.Zero1Optimizer(
        groups,
        torch.optim.AdamW,
        model=model,
        bucket_size=32,
        process_group=group,
        expert_group=expert_groups(parallel) if group is None else None,
        **ADAMW,
    )
    for step in range(steps):
        model(given(step, rank, parallel)).backward()
        optimizer.step()
    return model, optimizer


def experts(rank, folder):
    model, optimizer = moe(rank, 2, 2)
    for at, kind in enumerate(KINDS):
        optimizer.save(f"{folder}/{at}", **kind)
    optimizer.save(f"{folder}/async", asynchronous=True).wait()
    for name in ("async", *range(len(KINDS))):
        stored = zero1ckpt.open(f"{folder}/{name}")
        assert sorted(stored.parts) == ["", "experts0", "experts1"]
        assert set(stored.parts["experts1"].names()) == set(EXPERT)
        mine = stored.parts[f"experts{rank % 2}"].read("up", "fp32_param")
        assert bits_equal(mine, model.up.detach())
        fresh_model, fresh = moe(rank, 2, 0, seed=50)
        fresh.param_groups[0]["lr"] = fresh.param_groups[1]["lr"] = 7.0
        fresh.load(f"{folder}/{name}")
        assert [g["lr"] for g in fresh.param_groups] == [3e-3, ADAMW["lr"]]
        same_state(model, optimizer, fresh_model, fresh)
        fresh.verify_replicas()
        ours, theirs = dump(optimizer), dump(fresh)
        for slot in ours:
            for a, b in zip(chain(*ours[slot]), chain(*theirs[slot]), strict=True):
                assert bits_equal(a, b), slot
    assert zero1ckpt.verify(f"{folder}/0", deep=True)
    for m, o in ((model, optimizer), (fresh_model, fresh)):
        m(given(2, rank, 2)).backward()
        o.step()
    same_state(model, optimizer, fresh_model, fresh)
    fewer_model, fewer = moe(rank, 4, 0)
    before = fewer_model.up.detach().clone()
    with pytest.raises(UsageError, match="experts"):
        fewer.load(f"{folder}/0")
    assert bits_equal(fewer_model.up.detach(), before)
    wider = moe(rank, 1, 0)[1]
    with pytest.raises(UsageError, match=r"number of expert groups.*2.*1"):
        wider.load(f"{folder}/0")


def halved(rank, folder):
    """As many expert groups over fewer ranks: dense state and each group's are cut anew."""
    groups = [dist.new_group([0]), dist.new_group([1])]
    model = Layer(rank + 20)
    optimizer = zero1ckpt.Zero1Optimizer(model, torch.optim.AdamW, expert_group=groups[rank], **ADAMW)
    optimizer.load(f"{folder}/0", groups="run")
    stored = zero1ckpt.open(f"{folder}/0")
    for name, param in model.named_parameters():
        part = f"experts{rank}" if name in EXPERT else ""
        assert bits_equal(param.detach(), stored.parts[part].read(name, "fp32_param"))
        number = [spec.name for spec in optimizer.param_specs].index(name)
        fragment = next((f for f in optimizer.fragments if f.index == number), None)
        if fragment is not None:
            got = optimizer.state[param]["exp_avg"]
            want = stored.parts[part].read(name, "exp_avg").flatten()
            assert bits_equal(got, want[fragment.param.start : fragment.param.end])


def test_instances(tmp_path):
    run_ranks(4, instances, str(tmp_path))


def test_expert_groups(tmp_path):
    run_ranks(4, experts, str(tmp_path))
    run_ranks(2, halved, str(tmp_path))

"""Views under Megatron-Core's names: the order that its own optimizer has, and memory that is not held twice.

``group_order.json`` is what Megatron-Core reports for the layouts in formats/layout/cases: the group of each param, and
for each rank the params (by registration index) in its 16-bit and in its float32 groups.
"""

import itertools
import json
from pathlib import Path

import pytest
import torch

from tests.engine.harness import run_ranks
from tests.engine.models import SHAPES, Bag, grads_of
from zero1ckpt.core.layout import LayoutRules, layout_params
from zero1ckpt.engine.buffers import make_buffers
from zero1ckpt.engine.collectives import LocalCommunicator
from zero1ckpt.engine.shards import ShardStore, owned_fragments
from zero1ckpt.engine.views import MegatronViews
from zero1ckpt.engine.zero1 import Zero1Optimizer
from zero1ckpt.model.state import ParamSpec

CASES = Path(__file__).resolve().parents[2] / "formats" / "layout" / "cases"
ORDERS = json.loads(Path(__file__).with_name("group_order.json").read_text())


class Views(MegatronViews):
    """One rank of any dp size, without the others."""

    def __init__(self, optimizer, groups, rank):
        self.rank, self.param_groups = rank, [{}] * (max(groups) + 1)
        self.specs = [
            ParamSpec(
                p["name"],
                (p["numel"],),
                p["dtype"],
                p["grad_dtype"],
                group,
                p.get("expert", False),
                p.get("shared_embedding", False),
            )
            for p, group in zip(optimizer["params"], groups, strict=True)
        ]
        self.tensors = [torch.nn.Parameter(torch.zeros(s.numel, dtype=getattr(torch, s.dtype))) for s in self.specs]
        self.layout = layout_params(self.specs, LayoutRules(optimizer["dp_size"], optimizer["bucket_size"]))
        comm = LocalCommunicator()
        comm.rank, comm.size = rank, optimizer["dp_size"]
        buffers = make_buffers(self.layout, self.tensors, torch.device("cpu"))
        store = ShardStore(self.layout, buffers, comm, torch.float32)
        self.fragments = owned_fragments(self.layout, self.specs, store, [rank] * len(buffers))

    @property
    def model_params(self):
        return self.tensors

    def indices(self, rows):
        place = {id(tensor): i for i, tensor in enumerate(self.tensors)}
        return [[place[id(tensor)] for tensor in row] for row in rows]


@pytest.mark.parametrize("case", sorted(ORDERS))
def test_order_of_the_groups_is_that_of_megatron(case):
    optimizers = {o["name"]: o for o in json.loads((CASES / f"{case}.json").read_text())["optimizers"]}
    for name, expected in ORDERS[case].items():
        for rank, (sixteen, others) in expected["ranks"].items():
            views = Views(optimizers[name], expected["group"], int(rank))
            found = [views.indices(rows) for rows in (views.model_float16_groups, views.model_fp32_groups)]
            groups = max(len(sixteen), len(found[0]))
            pad = [[] for _ in range(groups)]
            assert [(rows + pad)[:groups] for rows in found] == [(rows + pad)[:groups] for rows in (sixteen, others)]
            shards = (views.shard_float16_groups, views.shard_fp32_from_float16_groups)
            for model, narrow, main in zip(views.model_float16_groups, *shards, strict=True):
                assert [t.dtype for t in main] == [torch.float32] * len(model)
                assert [t.numel() for t in main] == [t.numel() for t in narrow]
                assert [t.dtype for t in narrow] == [t.dtype for t in model]


def live(rank):
    model = Bag(torch.bfloat16)
    model.b.data = model.b.data.float()
    groups = [{"params": [model.long, model.b]}, {"params": [model.a, model.c], "weight_decay": 0.0}]
    optimizer = Zero1Optimizer(groups, torch.optim.AdamW, model=model, bucket_size=64, lr=1e-2)
    names = {id(p): n for n, p in model.named_parameters()}
    for param, (start, end, bucket) in optimizer.param_index_map.items():
        assert end - start == param.numel() and optimizer.param_index_map[names[id(param)]] == (start, end, bucket)
    assert set(map(id, optimizer.param_index_map)) == {id(p) for p in (model.long, model.b, model.a, model.c)}
    seen = {}
    for buffer in optimizer.gbuf_ranges:
        ((dtypes, maps),) = buffer.items()
        for bucket, ranges in enumerate(maps):
            for param, views in ranges["param_map"].items():
                assert dtypes == (param.dtype, torch.float32) and views == optimizer.get_model_param_range_map(param)
                assert views["gbuf_world"].start == optimizer.param_index_map[param][0] + views["param"].start
                assert {view.size for view in views.values()} == {views["param"].size}
                assert optimizer.model_param_gbuf_map[param][2] == bucket
                seen[names[id(param)]] = views["param"]
    lists = {
        name: getattr(optimizer, name)
        for name in (
            "model_float16_groups",
            "model_fp32_groups",
            "shard_float16_groups",
            "shard_fp32_groups",
            "shard_fp32_from_float16_groups",
        )
    }
    assert all(len(rows) == 2 for rows in lists.values())
    model(grads_of(SHAPES, 0, rank), ("long", "b", "a", "c")).backward()
    optimizer.step()
    for params, narrow, main in zip(*(lists[n] for n in list(lists)[::2]), strict=True):
        for param, part, wide in zip(params, narrow, main, strict=True):
            low, high = seen[names[id(param)]].start, seen[names[id(param)]].end
            assert torch.equal(part, param.detach().view(-1)[low:high]) and torch.equal(part, wide.bfloat16())
            assert part.data_ptr() == param.data_ptr() + 2 * low
            assert wide.data_ptr() == optimizer.state[param]["fp32_param"].data_ptr()
    for params, wide in zip(lists["model_fp32_groups"], lists["shard_fp32_groups"], strict=True):
        for param, part in zip(params, wide, strict=True):
            assert part.data_ptr() == param.data_ptr() + 4 * seen[names[id(param)]].start
    return {name: (r.start, r.end) for name, r in seen.items()}


@pytest.mark.dist
def test_views_of_a_live_optimizer():
    ranks = run_ranks(2, live)
    for name in ("long", "b", "a", "c"):
        pieces = sorted(rank[name] for rank in ranks if name in rank)
        numel = torch.Size(SHAPES[name]).numel()
        assert pieces[0][0] == 0 and pieces[-1][1] == numel
        assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))

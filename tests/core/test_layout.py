"""The layout rule: what Megatron-Core itself laid out, and a naive element-by-element reading of the rule."""

import json
import tracemalloc
from math import lcm
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.strategies import KEYS, Param, params, rules
from zero1ckpt.core import layout as layout_module
from zero1ckpt.core.layout import BufferKey, LayoutRules, default_bucket_size, layout_params
from zero1ckpt.core.ranges import Range

ROOT = Path(__file__).resolve().parents[2]
CASES = sorted((ROOT / "formats/layout/cases").glob("*.json"))
CORPUS = ROOT.parent / "shared/corpus/megatron"
VIEWS = ("gbuf_world", "gbuf_world_in_bucket", "gbuf_local", "param")


# --------------------------------------------------------------------------------------------- what Megatron laid out


def pairs(view):
    return [view.start, view.end]


def lay_out_case(optimizer):
    made = [
        Param(
            p["name"],
            p["numel"],
            BufferKey(p["dtype"], p["grad_dtype"], p.get("expert", False)),
            p.get("shared_embedding", False),
        )
        for p in optimizer["params"]
    ]
    return layout_params(made, LayoutRules(optimizer["dp_size"], optimizer["bucket_size"]))


def test_there_are_cases():
    assert len(CASES) >= 20


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_reproduces_megatron(path):
    optimizers = json.loads(path.read_text())["optimizers"]
    assert optimizers
    for optimizer in optimizers:
        layout = lay_out_case(optimizer)
        assert len(layout.buffers) == len(optimizer["buffers"])
        for buffer, wanted in zip(layout.buffers, optimizer["buffers"], strict=True):
            assert f"(torch.{buffer.key.param_dtype}, torch.{buffer.key.grad_dtype})" == wanted["dtype"]
            assert (buffer.numel, buffer.numel_unpadded) == (wanted["numel"], wanted["numel_unpadded"])
            buckets = [
                [b.offset, b.numel, b.numel_unpadded, list(buffer.names[b.first : b.last])] for b in buffer.buckets
            ]
            assert buckets == wanted["buckets"]
            places = {name: list(place) for name, place in buffer.param_index_map.items()}
            assert places == wanted["param_index_map"] and list(places) == list(wanted["param_index_map"])
        assert len(optimizer["ranks"]) == optimizer["dp_size"]
        for rank, views in enumerate(optimizer["ranks"]):
            assert views_of(layout, rank) == views


def views_of(layout, rank):
    found = []
    for buffer in layout.buffers:
        rows = [{} for _ in range(buffer.bucket_count)]
        for f in buffer.fragments(rank):
            rows[f.bucket][f.name] = [pairs(getattr(f, view)) for view in VIEWS]
        found.append(rows)
    return found


def test_cases_hold_what_the_rules_turn_on():
    """A case file that lost its subject would pass: each subject is there."""
    cases = {path.stem: json.loads(path.read_text())["optimizers"] for path in CASES}
    everything = [o for optimizers in cases.values() for o in optimizers]
    assert {o["dp_size"] for o in everything} >= {1, 2, 3, 4, 8}
    assert any(p.get("expert") for o in everything for p in o["params"])
    assert any(p.get("shared_embedding") for o in everything for p in o["params"])
    assert any(len(o["buffers"]) > 1 for o in everything)
    assert any(b[1] > b[2] for o in everything for buffer in o["buffers"] for b in buffer["buckets"][:-1])


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_cases_equal_the_real_files(path):
    """The compact cases say what the writer's own ``layout.json`` says."""
    original = CORPUS / path.stem / "layout.json"
    if not original.exists():
        pytest.skip(
            f"{CORPUS.name} corpus is not beside this checkout: only the copies in formats/layout/cases are read"
        )
    real = json.loads(original.read_text())
    for optimizer in json.loads(path.read_text())["optimizers"]:
        mp, index = optimizer["name"].split("/")
        wanted = real["model_parallel"][mp][int(index)]
        assert [{**b, "dp_size": optimizer["dp_size"]} for b in map(expand, optimizer["buffers"])] == [
            {key: b[key] for key in ("dtype", "numel", "numel_unpadded", "buckets", "param_index_map", "dp_size")}
            for b in wanted["buffers"]
        ]
        seen = set()
        for rank in real["ranks"]:
            if rank["mp"].split("_ep")[0] != mp.split("_ep")[0] or len(rank["optimizers"]) <= int(index):
                continue
            own = rank["optimizers"][int(index)]
            if own["dp_group_idx"] == wanted["dp_group_idx"]:
                seen.add(own["dp_rank"])
                assert [
                    [{n: [v[view] for view in VIEWS] for n, v in bucket.items()} for bucket in buffer["buckets"]]
                    for buffer in own["gbuf_ranges"]
                ] == optimizer["ranks"][own["dp_rank"]]
        assert seen == set(range(optimizer["dp_size"]))


def expand(buffer):
    names = ("offset", "numel", "numel_unpadded", "params")
    return {**buffer, "buckets": [dict(zip(names, row, strict=True)) for row in buffer["buckets"]]}


# -------------------------------------------------------------------------------------------------- the rule, naively


def up(value, multiple):
    return (value + multiple - 1) // multiple * multiple


def naive(made, rule):
    """Buffers as (key, buckets); a bucket as (offset, numel, unpadded, [(name, start, end)])."""
    end_align = lcm(rule.dp_size, 128, 65536 if rule.pad_for_high_nccl_busbw else 1)
    keys = list(dict.fromkeys(p.buffer_key for p in made))
    result = []
    for key in [k for k in keys if not k.expert] + [k for k in keys if k.expert]:
        buckets, current, start = [], [], 0
        for p in [p for p in reversed(made) if p.buffer_key == key]:
            at = up(current[-1][2] if current else start, 64)
            if p.shared_embedding and current:
                buckets.append((start, up(at, end_align) - start, at - start, current))
                start, current = up(at, end_align), []
                at = start
            current.append((p.name, at, at + p.numel))
            end = at + p.numel
            if p.shared_embedding or (rule.bucket_size is not None and end - start >= rule.bucket_size):
                buckets.append((start, up(end, end_align) - start, end - start, current))
                start, current = up(end, end_align), []
        if current:
            end = current[-1][2]
            buckets.append((start, up(end, end_align) - start, end - start, current))
        result.append((key, buckets))
    return result


@given(params(), rules())
@example((Param("a", 64), Param("b", 64), Param("c", 63), Param("d", 1)), LayoutRules(2, 64))  # exactly full
@example((Param("a", 5), Param("b", 128), Param("c", 0)), LayoutRules(3, 128))
def test_placement_equals_the_naive_rule(made, rule):
    layout = layout_params(made, rule)
    assert [
        (
            b.key,
            [
                (
                    k.offset,
                    k.numel,
                    k.numel_unpadded,
                    [(p.name, p.world.start, p.world.end) for p in list(b.placements)[k.first : k.last]],
                )
                for k in b.buckets
            ],
        )
        for b in layout.buffers
    ] == naive(made, rule)


@given(params(), rules())
def test_invariants(made, rule):
    layout = layout_params(made, rule)
    assert layout.param_count == len(made)
    assert sorted(i for b in layout.buffers for i in b.param.tolist()) == list(range(len(made)))
    for buffer in layout.buffers:
        assert (buffer.start % 64 == 0).all()
        assert (buffer.bucket_numel % rule.bucket_end_align == 0).all()
        assert rule.bucket_end_align % rule.dp_size == 0
        assert (buffer.bucket_numel_unpadded <= buffer.bucket_numel).all()
        ends = buffer.bucket_offset + buffer.bucket_numel
        assert buffer.bucket_offset.tolist() == [0, *ends[:-1].tolist()], "buckets tile the buffer"
        assert (np.diff(buffer.bucket_first) > 0).all(), "no bucket without a param"
        assert buffer.numel == buffer.bucket_numel.sum() and layout.numel % rule.dp_size == 0
        for bucket in buffer.buckets:
            inside = range(bucket.first, bucket.last)
            sizes = [int(buffer.end[i]) - bucket.offset for i in inside]
            shared = [made[buffer.param[i]].shared_embedding for i in inside]
            if any(shared):
                assert len(shared) == 1, "a shared embedding is alone in its bucket"
            if rule.bucket_size is not None:
                assert all(size < rule.bucket_size for size in sizes[:-1]), "closes as soon as it is full"
    for index, param in enumerate(made):
        buffer = layout.buffers[layout.buffer_of[index]]
        assert buffer.key == param.buffer_key and buffer.names[layout.place_of[index]] == param.name
        assert buffer.place_of[index] == layout.place_of[index] and buffer.name_of[index] == param.name


def owner_of_elements(buffer, dp):
    """(name, element of the param) -> (rank, bucket, place in buffer, place in shard), one element at a time."""
    owners = {}
    for bucket in buffer.buckets:
        shard = bucket.numel // dp
        for place in range(bucket.first, bucket.last):
            for element in range(int(buffer.end[place] - buffer.start[place])):
                world = int(buffer.start[place]) + element
                inside = world - bucket.offset
                owners[buffer.names[place], element] = (inside // shard, bucket.index, world, inside % shard)
    return owners


@settings(max_examples=40)
@given(params(8), rules())
@example((Param("a", 10),), LayoutRules(8, 10))  # ranks that own only padding (Megatron-LM#6191)
@example((Param("a", 130), Param("b", 70)), LayoutRules(2, 1))  # the unpadded end inside a rank's shard (#5898)
@example((Param("a", 0), Param("b", 1), Param("c", 0)), LayoutRules(3, 1))
@example((Param("a", 5, KEYS[0]), Param("b", 5, KEYS[1]), Param("c", 5, KEYS[0])), LayoutRules(96))
@example((Param("a", 0, KEYS[0], True), Param("b", 0, KEYS[0], True)), LayoutRules(5))
def test_every_element_is_owned_once_and_views_agree(made, rule):
    layout = layout_params(made, rule)
    for buffer in layout.buffers:
        expected = owner_of_elements(buffer, rule.dp_size)
        seen = {}
        for rank in range(rule.dp_size):
            fragments = buffer.fragments(rank)
            listed = list(fragments)
            assert len(listed) == len(fragments)
            assert [(f.bucket, f.gbuf_world.start) for f in listed] == sorted(
                (f.bucket, f.gbuf_world.start) for f in listed
            )
            for f in listed:
                assert f.size > 0
                assert {getattr(f, view).size for view in VIEWS} == {f.size}
                offset = int(buffer.bucket_offset[f.bucket])
                assert f.gbuf_world_in_bucket == f.gbuf_world.shift(-offset)
                shard = int(buffer.shard_numel[f.bucket])
                assert f.gbuf_local == f.gbuf_world_in_bucket.shift(-rank * shard)
                assert f.gbuf_local.end <= shard
                assert made[f.param_index].name == f.name
                for k in range(f.size):
                    key = (f.name, f.param.start + k)
                    assert key not in seen, "owned twice"
                    seen[key] = (rank, f.bucket, f.gbuf_world.start + k, f.gbuf_local.start + k)
        assert seen == expected


@given(params(8), rules())
def test_shards_tile_every_bucket(made, rule):
    for buffer in layout_params(made, rule).buffers:
        at = {bucket.index: bucket.offset for bucket in buffer.buckets}
        for rank in range(rule.dp_size):
            links = buffer.shard_map(rank)
            assert links.size == buffer.numel // rule.dp_size == int(buffer.shard_offset[-1])
            for index, size in enumerate(buffer.shard_numel.tolist()):
                if size:
                    got = links.restrict(Range(at[index], at[index] + size))
                    assert got.size == size and got.links[0].dst == int(buffer.shard_offset[index])
                at[index] += size
        assert at == {b.index: b.offset + b.numel for b in buffer.buckets}


@given(params(8), rules(), st.data())
def test_fragments_are_the_composition_of_two_maps(made, rule, data):
    rank = data.draw(st.integers(0, rule.dp_size - 1))
    for buffer in layout_params(made, rule).buffers:
        composed = buffer.param_map().then(buffer.shard_map(rank))
        before = np.cumsum(buffer.end - buffer.start) - (buffer.end - buffer.start)
        naively = {
            int(before[buffer.place_of[f.param_index]]) + f.param.start + k: int(buffer.shard_offset[f.bucket])
            + f.gbuf_local.start
            + k
            for f in buffer.fragments(rank)
            for k in range(f.size)
        }
        assert {k.src.start + i: k.dst + i for k in composed for i in range(k.src.size)} == naively


@given(params(8), rules(), st.data())
def test_owners_equals_the_fragments_of_all_ranks(made, rule, data):
    for buffer in layout_params(made, rule).buffers:
        rows = []
        for place in range(len(buffer.names)):
            size = int(buffer.end[place] - buffer.start[place])
            start = data.draw(st.integers(0, size))
            rows.append((place, start, data.draw(st.integers(start, size))))
            rows.append((place, 0, size))
        table = np.array(rows, np.int64).reshape(-1, 3)
        row, found = buffer.owners(table[:, 0], table[:, 1], table[:, 2])
        got = [(r, f, k) for r, f, k in zip(row.tolist(), found, found.rank.tolist(), strict=True)]
        every = [(f, rank) for rank in range(rule.dp_size) for f in buffer.fragments(rank)]
        for index, (place, start, end) in enumerate(rows):
            wanted = []
            for f, rank in every:
                low, high = max(start, f.param.start), min(end, f.param.end)
                if f.name == buffer.names[place] and low < high:
                    by = low - f.param.start
                    wanted.append((rank, f.bucket, f.gbuf_local.start + by, Range(low, high)))
            mine = [(rank, f.bucket, f.gbuf_local.start, f.param) for r, f, rank in got if r == index]
            assert mine == sorted(wanted, key=lambda w: w[3].start)
        assert all(f.size for _, f, _ in got)


# ------------------------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize(
    "values", [{"dp_size": 0}, {"dp_size": 2, "bucket_size": 0}, {"dp_size": 1, "param_align": 0}, {"dp_size": -1}]
)
def test_rules_out_of_range_are_refused(values):
    with pytest.raises(ValueError, match="expected at least 1"):
        LayoutRules(**values)


@pytest.mark.parametrize("rank", [-1, 2, 99])
def test_rank_out_of_range_is_refused(rank):
    (buffer,) = layout_params([Param("a", 5)], LayoutRules(2)).buffers
    with pytest.raises(ValueError, match="rank"):
        buffer.fragments(rank)


def test_two_params_of_one_name_are_refused():
    with pytest.raises(ValueError, match="a: two params"):
        layout_params([Param("a", 1), Param("a", 2)], LayoutRules(1))


def test_default_bucket_size_is_megatrons():
    assert [default_bucket_size(dp) for dp in (1, 40, 41, 64)] == [40_000_000, 40_000_000, 41_000_000, 64_000_000]


def test_buffers_come_dense_before_expert_then_by_first_param():
    made = [Param("e", 1, KEYS[3]), Param("f", 1, KEYS[1]), Param("b", 1, KEYS[0]), Param("g", 1, KEYS[1])]
    layout = layout_params(made, LayoutRules(2))
    assert [b.key for b in layout.buffers] == [KEYS[1], KEYS[0], KEYS[3]]
    assert layout.buffers[0].names == ("g", "f")


@pytest.mark.parametrize(
    ("count", "numel", "dp", "bucket"),
    [(2000, 1_000_000, 16_384, 1), (10_000, 12_345, 512, 40_000_000), (10_000, 12_345, 4096, None)],
)
def test_scale_costs_nothing_a_rank(count, numel, dp, bucket, monkeypatch):
    """2,000 buckets at DP 16,384, or 10,000 params: no loop over ranks, no object a rank, little memory."""
    made = [Param(f"layers.{i}.weight", numel + i % 7) for i in range(count)]
    made_fragments = []
    monkeypatch.setattr(layout_module, "Fragment", lambda *args: made_fragments.append(args))
    tracemalloc.start()
    layout = layout_params(made, LayoutRules(dp, bucket))
    (buffer,) = layout.buffers
    own = buffer.fragments(dp - 1)
    everything = np.arange(1)
    buffer.owners(everything, everything, everything + numel)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert buffer.bucket_count == (count if bucket == 1 else buffer.bucket_count)
    assert peak < 50 * 2**20
    assert not made_fragments, "columns until somebody iterates"
    assert len(own) <= count + buffer.bucket_count
    sizes = {name: len(value) for name, value in vars(buffer).items() if hasattr(value, "__len__")}
    assert max(sizes.values()) <= count + 1, sizes


def count_lines(call):
    """Lines of Python that a call executes: a measure of work that does not depend on the machine."""
    import sys

    lines = 0

    def tracer(frame, event, arg):
        nonlocal lines
        lines += event == "line"
        return tracer

    sys.settrace(tracer)
    try:
        call()
    finally:
        sys.settrace(None)
    return lines


def test_work_does_not_grow_with_dp():
    made = [Param(f"w{i}", 10_000 + i) for i in range(300)]
    work = []
    for dp in (2, 16_384):
        layout = layout_params(made, LayoutRules(dp, 100_000))
        work.append(count_lines(lambda layout=layout: layout.buffers[0].fragments(1)))
    assert work[1] <= work[0] * 1.5 + 50, work
    rule = LayoutRules(2, 1)
    assert count_lines(lambda: layout_params(made * 1, rule)) < 60 * len(made), "linear in params"

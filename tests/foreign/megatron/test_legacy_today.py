"""Legacy checkpoints become those of today: keys, boxes and bytes as Megatron's own, or a refusal that says why."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zero1ckpt
from tests.foreign.megatron.legacy_writer import Param, Style, write_rank
from zero1ckpt.foreign.megatron.common import Args, chained_values, common_of
from zero1ckpt.foreign.megatron.entries import Entries
from zero1ckpt.foreign.megatron.layout_file import SCHEMA
from zero1ckpt.foreign.megatron.legacy_keys import Keys, Seat, layer_offsets
from zero1ckpt.foreign.megatron.reading import describe

Corpus = Callable[..., Path]
TODAY = ("dp_reshardable", "fully_reshardable")
SLOTS = ("param", "exp_avg", "exp_avg_sq")
VOCAB, HIDDEN, FFN = 12, 8, 6
Tensors = dict[str, torch.Tensor]

# -------------------------------------------------------------------------------------------------- real checkpoints


def _content(entries: Entries, key: str) -> dict[tuple[Any, Any], bytes]:
    """Bytes of each chunk of a tensor, by its box."""
    tensor = entries.tensors[key]
    found = {}
    rows = zip(tensor.offsets.tolist(), tensor.sizes.tolist(), tensor.chunks.tolist(), strict=True)
    for start, size, chunk in rows:
        file, at = entries.chunks.place(chunk)
        data = bytearray(int(entries.chunks.nbytes[chunk]))
        entries.store.readv_into(file, at, [memoryview(data)])
        found[tuple(start), tuple(size)] = bytes(data)
    return found


def _object(entries: Entries, key: str) -> Any:
    """An object with its tensors, as torch reads it."""
    file, at = entries.object_place(key)
    data = bytearray(entries.objects[key])
    entries.store.readv_into(file, at, [memoryview(data)])
    return torch.load(io.BytesIO(data), weights_only=False)


def _plain(value: Any) -> Any:
    """A value whose parts can be compared."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _check_like(made: Path, megatrons: Path) -> None:
    """The same keys, shapes, boxes, weights, objects and common state; of buckets the elements that are params'."""
    ours, theirs = describe(made / "iter_0000003").entries, describe(megatrons).entries
    assert set(ours.tensors) == set(theirs.tensors)
    assert set(ours.objects) == set(theirs.objects)
    for key, tensor in theirs.tensors.items():
        assert (ours.tensors[key].dtype, ours.tensors[key].shape) == (tensor.dtype, tensor.shape), key
        mine, wanted = _content(ours, key), _content(theirs, key)
        assert set(mine) == set(wanted), key
        assert mine == wanted or ".gbuf_idx_" in key, key
    for key in theirs.objects:
        assert _plain(_object(ours, key)) == _plain(_object(theirs, key)), key
    assert set(ours.common) == set(theirs.common)
    for key, value in theirs.common.items():
        if key not in ("optimizer", "args"):
            assert ours.common[key] == value, key
    args, wanted_args = (dict(common_of(e.common).args.values) for e in (ours, theirs))
    differ = {key for key in wanted_args if repr(args.pop(key)) != repr(wanted_args[key])}
    assert not args and differ <= {"ckpt_format", "use_dist_ckpt", "save", "dist_ckpt_optim_fully_reshardable"}
    for mine, wanted in zip(*(chained_values(e.common["optimizer"]) for e in (ours, theirs)), strict=True):
        assert {**mine, "grad_scaler": None} == {**wanted, "grad_scaler": None}


@pytest.mark.parametrize(
    "case",
    [
        "mlm0161_gpt_tp2_dp2_b1",
        "v0161_gpt_tp2_dp2_b1",
        "v0161_gpt_pp2_dp2_b1",
        "v0161_gpt_moe_ep2_dp4_b1",
        "v0161_toy_dp2_b2500",
        "v0161_toy_fp16_dp2_b1",
        "v0161_toy_fp32first_dp2_b1",
        "v0161_toy_tied_shared_dp2_b1",
    ],
)
def test_dp_reshardable_is_as_megatron_saves_the_same_state(corpus: Corpus, tmp_path: Path, case: str) -> None:
    zero1ckpt.reshard(corpus(case, "legacy_torch"), tmp_path / "made", format="megatron:dp_reshardable")
    _check_like(tmp_path / "made", corpus(case, "dp_reshardable"))
    assert zero1ckpt.verify(tmp_path / "made", deep=True, against=corpus(case, "dp_reshardable")).ok


@pytest.mark.parametrize(
    "case",
    [
        "mlm0161_gpt_tp2_dp2_b1",
        "v0161_gpt_tp2_dp2_b1",
        "v0161_gpt_moe_ep2_dp4_b1",
        "v0161_toy_fp16_dp2_b1",
        "v0161_toy_fp32first_dp2_b1",
    ],
)
def test_fully_reshardable_is_as_megatron_saves_the_same_state(corpus: Corpus, tmp_path: Path, case: str) -> None:
    zero1ckpt.reshard(corpus(case, "legacy_torch"), tmp_path / "made", format="megatron:fully_reshardable")
    _check_like(tmp_path / "made", corpus(case, "fully_reshardable"))


@pytest.mark.parametrize("case", ["v0161_gpt_pp2_dp2_b1", "v0161_toy_dp2_b2500", "v0161_toy_tied_shared_dp2_b1"])
def test_where_megatrons_own_is_damaged_the_state_is_that_of_the_buckets(
    corpus: Corpus, tmp_path: Path, case: str
) -> None:
    for save in ("legacy_torch", "dp_reshardable"):
        zero1ckpt.reshard(corpus(case, save), tmp_path / save, format="megatron:fully_reshardable")
    _check_like(tmp_path / "legacy_torch", tmp_path / "dp_reshardable" / "iter_0000003")


@pytest.mark.parametrize("case", ["v090_toy_dp2_b2500", "v0161_toy_tinytail_dp2_b2500"])
def test_old_legacy_files_too(corpus: Corpus, tmp_path: Path, case: str) -> None:
    source = corpus(case, "legacy_torch")
    zero1ckpt.reshard(source, tmp_path / "made", format="megatron:fully_reshardable")
    assert zero1ckpt.verify(tmp_path / "made", against=source).ok


@pytest.mark.parametrize("target", TODAY)
def test_by_way_of_a_native_checkpoint_it_is_the_same(corpus: Corpus, tmp_path: Path, target: str) -> None:
    source = corpus("v0161_gpt_pp2_dp2_b1", "legacy_torch")
    zero1ckpt.reshard(source, tmp_path / "native", format="bucket_shards")
    zero1ckpt.reshard(tmp_path / "native", tmp_path / "back", format=f"megatron:{target}")
    zero1ckpt.reshard(source, tmp_path / "made", format=f"megatron:{target}")
    files = [
        {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for root in (tmp_path / "back", tmp_path / "made")
    ]
    assert files[0] == files[1]


# ------------------------------------------------------------------------------------------------------- made up ones


def _layer(number: int) -> dict[str, tuple[tuple[int, ...], int | None]]:
    """Shapes and cut axes of a layer over all tensor-parallel ranks, in registration order; a gate counts twice."""
    found: dict[str, tuple[tuple[int, ...], int | None]] = {
        "input_layernorm.weight": ((HIDDEN,), None),
        "self_attention.linear_proj.weight": ((HIDDEN, HIDDEN), 1),
        "self_attention.linear_proj.bias": ((HIDDEN,), None),
        "self_attention.linear_qkv.weight": ((3 * HIDDEN, HIDDEN), 0),
        "self_attention.linear_qkv.bias": ((3 * HIDDEN,), 0),
        "pre_mlp_layernorm.weight": ((HIDDEN,), None),
        "mlp.linear_fc1.weight": ((2 * FFN, HIDDEN), 0),
        "mlp.linear_fc1.bias": ((2 * FFN,), 0),
        "mlp.linear_fc2.weight": ((HIDDEN, FFN), 1),
    }
    return {f"decoder.layers.{number}.{name}": row for name, row in found.items()}


MODEL = {"embedding.word_embeddings.weight": ((VOCAB, HIDDEN), 0), **_layer(0), **_layer(1)}
MODEL |= {"decoder.final_layernorm.weight": ((HIDDEN,), None), "output_layer.weight": ((VOCAB, HIDDEN), 0)}


def _state(shapes: Mapping[str, Any], seed: int = 0) -> dict[str, Tensors]:
    torch.manual_seed(seed)
    return {
        name: dict(zip(SLOTS, (torch.randn(shape), torch.randn(shape), torch.rand(shape)), strict=True))
        for name, (shape, _) in shapes.items()
    }


def _cut(name: str, tensor: torch.Tensor, axis: int | None, rank: int, size: int) -> torch.Tensor:
    """One tensor-parallel rank's part: of a gate and its value it has a piece of each."""
    if axis is None:
        return tensor
    if "linear_fc1" in name:
        return torch.cat([half.chunk(size, axis)[rank] for half in tensor.chunk(2, axis)], axis).contiguous()
    return tensor.chunk(size, axis)[rank].contiguous()


def _stages(names: list[str], pp: int, chunks: int) -> list[tuple[int, int, dict[str, str]]]:
    """(pipeline rank, virtual chunk, its names by those of the whole model); one layer a stage and chunk at most."""
    stages = pp * chunks
    count = 1 + max((int(name.split(".")[2]) for name in names if ".layers." in name), default=0)
    found = []
    for stage in range(stages):
        mine = range(stage * count // stages, (stage + 1) * count // stages)
        own: dict[str, str] = {}
        for name in names:
            head, _, tail = name.partition(".layers.")
            if tail:
                number, _, rest = tail.partition(".")
                if int(number) in mine:
                    own[name] = f"{head}.layers.{int(number) - mine[0]}.{rest}"
            elif (stage == 0) if name.startswith("embedding") else (stage == stages - 1):
                own[name] = name
        found.append((stage % pp, stage // pp, own))
    return found


def _save(
    root: Path,
    shapes: Mapping[str, Any],
    state: Mapping[str, Tensors],
    tp: int = 1,
    pp: int = 1,
    chunks: int = 1,
    change: Callable[[int, str, str, torch.Tensor], torch.Tensor] | None = None,
    **args: Any,
) -> Path:
    """A legacy checkpoint of ``tp`` x ``pp`` ranks. ``change(rank, name, slot, tensor)``: what a rank has instead."""
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "data_parallel_size": 2}
    told = {**sizes, "untie_embeddings_and_output_weights": True, **args}
    told = {key: value for key, value in told.items() if value is not None}
    stages = _stages(list(shapes), pp, chunks)
    for rank in range(tp):
        for stage in range(pp):
            own: dict[str, Tensors] = {}
            models = []
            for _, virtual, names in (row for row in stages if row[0] == stage):
                params = []
                for name, local in names.items():
                    tensors = {s: _cut(name, t, shapes[name][1], rank, tp) for s, t in state[name].items()}
                    if change is not None:
                        tensors = {s: change(rank, name, s, t) for s, t in tensors.items()}
                    label = local if chunks == 1 else f"{virtual}:{local}"
                    own[label] = tensors
                    params.append(Param(label, tuple(tensors["param"].shape)))
                models.append(params)
            folder = root / "iter_0000003" / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else ""))
            write_rank(folder, models, own, told, Style())
            if chunks > 1:
                _without_labels(folder / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("3")
    return root


def _without_labels(path: Path) -> None:
    saved = torch.load(path, weights_only=False)
    for key in [key for key in saved if key.startswith("model")]:
        saved[key] = {name.partition(":")[2]: tensor for name, tensor in saved[key].items()}
    torch.save(saved, path)


RENAMED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def _today(name: str) -> str:
    for old, new in RENAMED.items():
        name = name.replace(old, new)
    return name


def _check_whole(made: Path, state: Mapping[str, Tensors]) -> None:
    """Every param has the values of the whole model, in its whole shape."""
    found = zero1ckpt.open(made)
    assert sorted(found.names()) == sorted(_today(name) for name in state)
    for name, tensors in state.items():
        for slot, own in zip(("fp32_param", *SLOTS[1:]), SLOTS, strict=True):
            assert torch.equal(found.read(_today(name), slot), tensors[own]), (name, slot)


@pytest.mark.parametrize(
    ("tp", "pp", "chunks", "layers"), [(1, 1, 1, 2), (2, 1, 1, 2), (3, 1, 1, 2), (2, 2, 1, 2), (1, 2, 2, 4)]
)
def test_a_model_with_gates_comes_together(tmp_path: Path, tp: int, pp: int, chunks: int, layers: int) -> None:
    hidden = 12 if tp == 3 else HIDDEN
    resized = {n: (tuple(hidden if d == HIDDEN else 3 * hidden if d == 3 * HIDDEN else d for d in s), a)
               for n, (s, a) in MODEL.items()}  # fmt: skip
    for number in range(2, layers):
        resized |= {n.replace("layers.1.", f"layers.{number}."): row for n, row in resized.items() if "layers.1." in n}
    state = _state(resized)
    for tensors in state.values():
        tensors["param"] = tensors["param"].bfloat16().float()
    source = _save(tmp_path / "run", resized, state, tp, pp, chunks, num_layers=layers, swiglu=True)
    zero1ckpt.reshard(source, tmp_path / "made", format="megatron:fully_reshardable")
    _check_whole(tmp_path / "made", state)
    entries = describe(tmp_path / "made" / "iter_0000003").entries
    for key in ("decoder.layers.mlp.linear_fc1.weight", "output_layer.weight"):
        (shape,) = {entries.tensors[key].shape, entries.tensors[f"optimizer.state.param.{key}"].shape}
        assert shape == ((layers, 2 * FFN, hidden) if "layers" in key else (VOCAB, hidden))
    assert _content(entries, "decoder.layers.mlp.linear_fc1.bias").keys() == {
        ((i, at), (1, FFN // tp)) for i in range(layers) for at in range(0, 2 * FFN, FFN // tp)
    }
    zero1ckpt.reshard(source, tmp_path / "buckets", format="megatron:dp_reshardable", to_dp=1)
    zero1ckpt.reshard(tmp_path / "buckets", tmp_path / "again", format="megatron:fully_reshardable")
    _check_whole(tmp_path / "again", state)


def test_layers_that_differ_have_keys_of_their_own(tmp_path: Path) -> None:
    """As the args say that they do."""
    shapes = {n: row for n, row in MODEL.items() if n != "decoder.layers.0.self_attention.linear_proj.bias"}
    state = _state(shapes)
    with pytest.raises(zero1ckpt.Zero1CkptError, match="differ from each other") as refused:
        zero1ckpt.reshard(_save(tmp_path / "a", shapes, state), tmp_path / "no", format="megatron:fully_reshardable")
    assert refused.value.exit_code == 5
    source = _save(tmp_path / "b", shapes, state, moe_layer_freq=[0, 1])
    zero1ckpt.reshard(source, tmp_path / "made", format="megatron:fully_reshardable")
    _check_whole(tmp_path / "made", state)
    entries = describe(tmp_path / "made" / "iter_0000003").entries
    assert entries.tensors["decoder.layers.1.mlp.linear_fc2.weight"].shape == (HIDDEN, FFN)


STRANGE = {f"decoder.layers.{i}.self_attention.strange": ((4, 3), None) for i in range(2)}


def test_a_strange_name_is_whole_where_the_state_proves_it(tmp_path: Path) -> None:
    shapes = MODEL | STRANGE
    state = _state(shapes)
    source = _save(tmp_path / "run", shapes, state, 2)
    zero1ckpt.reshard(source, tmp_path / "made", format="megatron:fully_reshardable")
    _check_whole(tmp_path / "made", state)


@pytest.mark.parametrize("how", ["other moments", "other weights", "moments that say nothing"])
def test_a_strange_name_is_refused_where_it_may_be_cut(tmp_path: Path, how: str) -> None:
    def change(rank: int, name: str, slot: str, tensor: torch.Tensor) -> torch.Tensor:
        if "strange" not in name:
            return tensor
        if how == "moments that say nothing":
            return tensor if slot == "param" else torch.zeros_like(tensor)
        return tensor + rank if (slot == "exp_avg") == (how == "other moments") else tensor

    shapes = MODEL | STRANGE
    source = _save(tmp_path / "run", shapes, _state(shapes), 2, change=change)
    for target in TODAY:
        with pytest.raises(zero1ckpt.Zero1CkptError, match="along which axis") as refused:
            zero1ckpt.reshard(source, tmp_path / "made", format=f"megatron:{target}")
        assert refused.value.exit_code == 5
        assert refused.value.param == "decoder.layers.self_attention.strange"
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("target", TODAY)
def test_copies_that_have_drifted_apart_are_refused(tmp_path: Path, target: str) -> None:
    def change(rank: int, name: str, slot: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + rank if name == "decoder.final_layernorm.weight" and slot == "param" else tensor

    state = _state(MODEL)
    source = _save(tmp_path / "run", MODEL, state, 2, change=change)
    with pytest.raises(zero1ckpt.Zero1CkptError, match="it once") as refused:
        zero1ckpt.reshard(source, tmp_path / "made", format=f"megatron:{target}")
    assert (refused.value.exit_code, refused.value.param) == (5, "decoder.final_layernorm.weight")
    zero1ckpt.reshard(source, tmp_path / "made", format=f"megatron:{target}", unproved=True)


@pytest.mark.parametrize("target", TODAY)
def test_stated_by_nothing_a_tied_output_layer_is_known_by_its_content(tmp_path: Path, target: str) -> None:
    embedding, output = "embedding.word_embeddings.weight", "output_layer.weight"
    for tied in (False, True):
        state = _state(MODEL)
        if tied:
            state[output] = state[embedding]
        root = tmp_path / str(tied)
        source = _save(root / "run", MODEL, state, 2, 2, untie_embeddings_and_output_weights=None)
        zero1ckpt.reshard(source, root / "made", format=f"megatron:{target}", to_dp=1)
        assert (output in describe(root / "made" / "iter_0000003").entries.tensors) is not tied


def test_a_param_of_two_names_is_kept_in_buckets_only(tmp_path: Path) -> None:
    source = _save(
        tmp_path / "run", {"a": ((8, 4), None), "b": ((8,), None)}, _state({"a": ((8, 4), 0), "b": ((8,), 0)})
    )
    file = source / "iter_0000003" / "mp_rank_00" / "model_optim_rng.pt"
    saved = torch.load(file, weights_only=False)
    saved["model"]["again"] = saved["model"]["a"]
    torch.save(saved, file)
    with pytest.raises(zero1ckpt.Zero1CkptError, match="two names") as refused:
        zero1ckpt.reshard(source, tmp_path / "made", format="megatron:fully_reshardable")
    assert (refused.value.exit_code, refused.value.param) == (5, "again")
    zero1ckpt.reshard(source, tmp_path / "made", format="megatron:dp_reshardable", to_dp=1)
    assert set(zero1ckpt.open(tmp_path / "made").names()) <= {"a", "b", "again"}


def _layout_file(path: Path, shapes: Mapping[str, Any], source: Path) -> Path:
    """As the run of two tensor-parallel ranks would have written it."""
    groups = []
    for part, rank in (("dp_group_idx_0", 0), ("dp_group_idx_1", 1)):
        made = describe(source / "iter_0000003").parts[part]
        assert made.layout is not None
        (buffer,) = made.layout.buffers
        (bucket,) = buffer.buckets
        rows = []
        for index, start in zip(buffer.params, buffer.starts, strict=True):
            local = made.local_params[index]
            whole, axis = shapes[local.name]
            shape = tuple(n // 2 if i == axis else n for i, n in enumerate(whole))
            offset = [rank * shape[i] if i == axis else 0 for i in range(len(shape))]
            box = {"key": f"its.{local.name}", "shape": whole, "start": offset, "size": shape}
            row = {"name": local.name, "start": start, "end": start + local.numel, "shape": shape, "boxes": [box]}
            rows.append(row)
        numel = -(-bucket.numel_unpadded // 128) * 128
        buckets = [{"offset": 0, "numel": numel, "numel_unpadded": bucket.numel_unpadded}]
        kind = {"param_dtype": "bfloat16", "grad_dtype": "float32", "expert": False}
        own = {"group": rank, "chained": None, "dp_size": 2, "pipeline_rank": 0}
        groups.append(own | {"buffers": [kind | {"buckets": buckets, "params": rows}]})
    path.write_text(json.dumps({"schema": SCHEMA, "groups": groups}))
    return path


@pytest.mark.parametrize("target", TODAY)
def test_a_layout_file_places_a_model_that_no_table_knows(tmp_path: Path, target: str) -> None:
    shapes = {"encoder.layers.0.w": ((8, 6), 0), "encoder.layers.1.w": ((8, 6), 1), "norm.weight": ((8,), None)}
    state = _state(shapes)
    source = _save(tmp_path / "run", shapes, state, 2)
    with pytest.raises(zero1ckpt.Zero1CkptError, match="is not known") as refused:
        zero1ckpt.reshard(source, tmp_path / "made", format=f"megatron:{target}")
    assert refused.value.exit_code == 5
    layout = _layout_file(tmp_path / "layout.json", shapes, source)
    zero1ckpt.reshard(source, tmp_path / "made", format=f"megatron:{target}", layout=layout)
    entries = describe(tmp_path / "made" / "iter_0000003").entries
    assert {key: entries.tensors[f"its.{key}"].shape for key in shapes} == {n: row[0] for n, row in shapes.items()}
    if target == "fully_reshardable":
        _check_whole(tmp_path / "made", {f"its.{name}": tensors for name, tensors in state.items()})


# ------------------------------------------------------------------------------------------------------------ the table


def _keys(names: Mapping[str, tuple[int, ...]], tp: int = 1, ep: int = 1, **args: Any) -> Keys:
    seats = [Seat(t, 0, e) for t in range(tp) for e in range(ep)]
    shapes = {(seat, name): shape for seat in seats for name, shape in names.items()}
    offsets = layer_offsets(((0, 0, name) for name in names), None, "here")
    told = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": 1, **args}
    return Keys("here", (tp, 1, ep), Args(told), offsets, shapes)


GPT = {f"decoder.layers.0.{n}": s for n, s in {
    "self_attention.linear_qkv.weight": (24, 8), "mlp.router.weight": (4, 8),
    "mlp.experts.local_experts.0.linear_fc1.weight": (6, 8), "mlp.experts.local_experts.0.linear_fc2.weight": (8, 6),
    "mlp.experts.local_experts.1.linear_fc1.weight": (6, 8), "mlp.experts.local_experts.1.linear_fc2.weight": (8, 6),
}.items()}  # fmt: skip


def test_experts_are_numbered_over_all_ranks() -> None:
    keys = _keys(GPT, tp=2, ep=2, num_experts=4)
    name = "decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight"
    spot = keys.spot(Seat(1, 0, 1), name)
    assert spot.key == "decoder.layers.mlp.experts.experts.linear_fc2.weight"
    assert spot.shape == (1, 4, 8, 12)
    assert [(box.start, box.shape) for box in spot.boxes] == [((0, 3, 0, 6), (1, 1, 8, 6))]
    extra = name.replace("weight", "_extra_state")
    wanted = "decoder.layers.mlp.experts.experts.linear_fc2._extra_state/shard_0.3_1.4"
    assert keys.extra(Seat(1, 0, 1), extra) == wanted
    assert keys.extra(Seat(0, 0, 0), "output_layer._extra_state") is None


@pytest.mark.parametrize(
    ("names", "args", "why"),
    [
        (GPT, {"num_experts": 8}, "experts that the args state"),
        (GPT, {"num_layers": 2}, "number of layers"),
        (GPT, {"tensor_model_parallel_size": 2}, "parallel sizes"),
        (GPT, {"heterogeneous_layers_config_path": "x.json"}, "configuration of their own"),
        (GPT | {"decoder.layers.0.mlp.experts.weight1": (8, 8)}, {}, "grouped GEMM"),
        (GPT | {"decoder.layers.0.cross_attention.linear_q.weight": (8, 8)}, {}, "GPT models have not"),
        (GPT | {"mtp.layers.0.enorm.weight": (8,)}, {}, "one key together"),
        (GPT | {"encoder.layers.0.norm.weight": (8,)}, {}, "one key together"),
        (GPT | {"decoder.layers.0.mlp.linear_fc1.weight": (9, 8)}, {}, "gate"),
        ({"decoder.layers.0.self_attention.linear_kv_up_proj.weight": (8, 8)}, {}, "kind whose keys"),
        ({"blocks.layers.0.weight": (8,)}, {}, "one key together"),
    ],
)
def test_what_the_table_does_not_know_is_refused(
    names: Mapping[str, tuple[int, ...]], args: dict[str, Any], why: str
) -> None:
    keys = _keys(names, **args)
    with pytest.raises(zero1ckpt.Zero1CkptError, match=why) as refused:
        for seat, name in keys.shapes:
            keys.spot(seat, name)
    assert refused.value.exit_code == 5


def test_dense_layers_beside_such_of_experts_have_keys_of_their_own() -> None:
    """As Megatron gives them wherever it mixes them; args that say that it does not are refused."""
    dense = {"self_attention.linear_qkv.weight": (24, 8), "mlp.linear_fc1.weight": (6, 8)}
    dense["mlp.linear_fc2.weight"] = (8, 6)
    names = GPT | {f"decoder.layers.1.{name}": shape for name, shape in dense.items()}
    keys = _keys(names)
    expert = keys.spot(Seat(0, 0, 0), "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight")
    assert (expert.key, expert.shape) == ("decoder.layers.0.mlp.experts.experts.linear_fc1.weight", (2, 6, 8))
    assert keys.spot(Seat(0, 0, 0), "decoder.layers.1.mlp.linear_fc2.weight").shape == (8, 6)
    with pytest.raises(zero1ckpt.Zero1CkptError, match="differ from each other"):
        _keys(names, moe_layer_freq=1).spot(Seat(0, 0, 0), "decoder.layers.1.mlp.linear_fc2.weight")


def test_norms_of_transformer_engine_keep_their_names() -> None:
    names = {f"decoder.layers.0.{n}": s for n, s in {
        "self_attention.linear_qkv.layer_norm_weight": (8,), "self_attention.linear_qkv.weight": (24, 8),
        "pre_mlp_layernorm.weight": (8,), "mlp.router.weight": (4, 8),
    }.items()}  # fmt: skip
    keys = _keys(names)
    found = {keys.spot(seat, name).key for seat, name in keys.shapes}
    assert "decoder.layers.pre_mlp_layernorm.weight" in found
    assert "decoder.layers.self_attention.linear_qkv.layer_norm_weight" in found

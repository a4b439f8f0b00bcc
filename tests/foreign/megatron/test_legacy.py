"""The ranks' own ``.pt`` files: real ones against their truth, and synthetic ones of what the corpus lacks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.foreign.megatron.legacy_writer import Param, Style, gpt_layer, random_state, write_rank
from zero1ckpt.core.casting import cast_bits
from zero1ckpt.core.errors import CorruptError, MissingError, UnsupportedError
from zero1ckpt.core.layout import LayoutRules
from zero1ckpt.foreign.megatron.entries import ChunkSource
from zero1ckpt.foreign.megatron.legacy import open_legacy
from zero1ckpt.foreign.megatron.model import MegatronCheckpoint, MegatronPart
from zero1ckpt.foreign.megatron.proving import prove

CASES = (
    "mlm0161_gpt_tp2_dp2_b1",
    "v0161_gpt_moe_ep2_dp4_b1",
    "v0161_gpt_pp2_dp2_b1",
    "v0161_gpt_tp2_dp2_b1",
    "v0161_toy_dp2_b2500",
    "v0161_toy_fp16_dp2_b1",
    "v0161_toy_fp32first_dp2_b1",
    "v0161_toy_tied_shared_dp2_b1",
    "v0161_toy_tinytail_dp2_b2500",
    "v090_toy_dp2_b2500",
)


def values(legacy: MegatronCheckpoint, part: MegatronPart, name: str, slot: str) -> np.ndarray:
    """A slot of a param, read through the catalog as a copy would."""
    state = part.catalog.state
    param = state.index[name]
    numel = state.params[param].numel
    column = [np.array([v], np.int64) for v in (param, state.slot_index[slot], 0, numel)]
    _, found = part.catalog.placement.locate(*column)
    source = ChunkSource(legacy.entries.store, legacy.entries.chunks)
    flat, held = np.zeros(numel, np.float32), np.zeros(numel, np.int64)
    for _, _, start, size, blob, at, nbytes in found.rows():
        data = bytearray(nbytes)
        source.read_run(blob, at, [memoryview(data)])
        flat[start : start + size] = np.frombuffer(data, np.float32)
        held[start : start + size] += 1
    assert (held == 1).all()
    return flat.reshape(state.params[param].shape)


def local_truth(folder: Path) -> dict[str, np.ndarray]:
    from safetensors import safe_open

    found = {}
    with safe_open(folder / "truth.safetensors", "pt") as file:
        for key in file.keys():  # noqa: SIM118  # it is no mapping
            if key.startswith("local/"):
                found[key.removeprefix("local/")] = file.get_tensor(key).float().numpy()
    return found


def truth_rank(legacy: MegatronCheckpoint, part: MegatronPart) -> str:
    """The model-parallel rank of a part, by the folder that its weights lie in."""
    folder = part.local_params[0].boxes[0].key.split("/")[0]
    numbers = [int(n) for n in folder.removeprefix("mp_rank_").split("_")] + [0]
    moe = any("experts" in key for key in legacy.model_keys)
    tp, second = numbers[0], numbers[1]
    return f"tp{tp}_pp{0 if moe else second}_ep{second if moe else 0}"


@pytest.mark.parametrize("case", CASES)
def test_every_element_equals_the_truth(corpus: Callable[..., Path], case: str) -> None:
    legacy = open_legacy(corpus(case, "legacy_torch"))
    truth = local_truth(corpus(case))
    layout = json.loads((corpus(case) / "layout.json").read_text())["model_parallel"]
    left = dict(truth)
    for part in legacy.parts.values():
        rank = truth_rank(legacy, part)
        assert part.evidence.ambiguous == ()
        names = [local.boxes[0].key.split("/")[-1] for local in part.local_params]
        for spec, own in zip(part.catalog.state.params, names, strict=True):
            for slot in ("fp32_param", "exp_avg", "exp_avg_sq"):
                field = slot.removeprefix("fp32_")
                expected = left.pop(f"{rank}/{own}/{field}")
                np.testing.assert_array_equal(values(legacy, part, spec.name, slot), expected, f"{rank} {own} {field}")
        check_layout(part, names, layout[rank][part.chained or 0])
    # What is left is the dense state that another expert rank holds once for both.
    assert all("ep1/" in key and "experts" not in key for key in left), list(left)[:3]
    assert legacy.notices == ()


def check_layout(part: MegatronPart, names: list[str], expected: dict[str, Any]) -> None:
    """The buckets and their padded sizes are those of the live optimizer."""
    assert part.layout is not None
    registered = [name for buffer in expected["buffers"] for name in buffer.get("params_order", [])]
    if len(expected["buffers"]) == 1 and registered:
        assert names == registered
    for mine, theirs in zip(part.layout.buffers, expected["buffers"], strict=True):
        assert [names[i] for i in mine.params] == [n for bucket in theirs["buckets"] for n in bucket["params"]]
        assert [b.numel_unpadded for b in mine.buckets] == [b["numel_unpadded"] for b in theirs["buckets"]]
        assert [b.numel for b in mine.buckets] == [b["numel"] for b in theirs["buckets"]]
        assert part.layout.dp_size == theirs["dp_size"]


@pytest.mark.parametrize("case", CASES)
def test_weights_belong_to_their_params(corpus: Callable[..., Path], case: str) -> None:
    legacy = open_legacy(corpus(case, "legacy_torch"))
    source = ChunkSource(legacy.entries.store, legacy.entries.chunks)
    for part in legacy.parts.values():
        for spec, local in zip(part.catalog.state.params, part.local_params, strict=True):
            key = local.boxes[0].key
            tensor = legacy.entries.tensors[key]
            assert (tensor.shape, tensor.dtype) == (spec.shape, spec.dtype)
            chunk = int(tensor.chunks[0])
            stored = bytearray(int(legacy.entries.chunks.nbytes[chunk]))
            source.read_run(chunk, 0, [memoryview(stored)])
            main = values(legacy, part, spec.name, "fp32_param").tobytes()
            made = bytearray(len(stored))
            cast_bits(memoryview(main), "float32", spec.dtype, memoryview(made))
            assert made == stored


def test_layers_have_global_numbers(corpus: Callable[..., Path]) -> None:
    legacy = open_legacy(corpus("v0161_gpt_pp2_dp2_b1", "legacy_torch"))
    assert sorted(legacy.parts) == ["dp_group_idx_0", "dp_group_idx_1"]
    second = legacy.parts["dp_group_idx_1"]
    names = [spec.name for spec in second.catalog.state.params]
    assert names[0] == "decoder.layers.1.input_layernorm.weight"
    assert not any(".layers.0." in name for name in names)
    shared = {
        s.name: p.pipeline_rank for p in legacy.parts.values() for s in p.catalog.state.params if s.shared_embedding
    }
    assert shared == {"embedding.word_embeddings.weight": 0, "output_layer.weight": 1}


def test_parts_of_several_optimizers(corpus: Callable[..., Path]) -> None:
    legacy = open_legacy(corpus("v0161_gpt_moe_ep2_dp4_b1", "legacy_torch"))
    assert sorted(legacy.parts) == [
        "chained_0.dp_group_idx_0",
        "chained_1.dp_group_idx_0",
        "chained_1.dp_group_idx_1",
    ]
    for name, part in legacy.parts.items():
        assert {spec.expert for spec in part.catalog.state.params} == {name.startswith("chained_1")}
    state = legacy.parts["chained_0.dp_group_idx_0"].catalog.state
    assert state.step == 3
    assert [group["wd_mult"] for group in state.groups] == [1.0, 0.0]


def test_loss_scale_and_order_of_a_fp16_run(corpus: Callable[..., Path]) -> None:
    legacy = open_legacy(corpus("v0161_toy_fp16_dp2_b1", "legacy_torch"))
    (part,) = legacy.parts.values()
    assert part.name == ""
    assert part.catalog.state.loss_scale is not None
    assert part.catalog.state.loss_scale.scale == 256.0
    assert part.evidence.by == "order"


# -------------------------------------------------------------------------------------------- what no real file shows

ARGS = {"num_layers": 2, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "data_parallel_size": 2}
MODEL = [
    Param("embedding.word_embeddings.weight", (11, 6)),
    *gpt_layer("decoder.layers.0"),
    *gpt_layer("decoder.layers.1"),
    Param("decoder.final_layernorm.weight", (6,)),
    Param("output_layer.weight", (11, 6)),
]


def check(legacy: MegatronCheckpoint, part: str, state: Any, names: dict[str, str] | None = None) -> None:
    """Every param of a part has its values, by proof and by what was written."""
    proved = prove(legacy).parts[part]
    assert proved.evidence.proved == proved.evidence.elements
    assert (proved.evidence.ambiguous, proved.evidence.unproved) == ((), ())
    for spec in proved.catalog.state.params:
        own = (names or {}).get(spec.name, spec.name)
        for slot in ("param", "exp_avg", "exp_avg_sq"):
            ours = "fp32_param" if slot == "param" else slot
            np.testing.assert_array_equal(values(legacy, proved, spec.name, ours), state[own][slot].numpy(), spec.name)


@pytest.mark.parametrize("young", [False, True])
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("bucket_size", [None, 1, 70, 200])
@pytest.mark.parametrize("dp", [1, 3])
def test_buckets_of_any_size(tmp_path: Path, bucket_size: int | None, dp: int, views: bool, young: bool) -> None:
    state = random_state(MODEL, young=young)
    write_rank(tmp_path / "mp_rank_00", [MODEL], state, ARGS, Style(LayoutRules(dp, bucket_size), views=views))
    legacy = open_legacy(tmp_path)
    check(legacy, "", state)
    assert [spec.name for spec in legacy.parts[""].catalog.state.params] == [param.name for param in MODEL]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("align", [64, 1])
@pytest.mark.parametrize("views", [False, True])
def test_state_a_bucket_of_before_2024(tmp_path: Path, padded: bool, align: int, views: bool) -> None:
    state = random_state(MODEL)
    rules = LayoutRules(2, 150, param_align=align, bucket_align=align)
    style = Style(rules, views=views, coalesced=False, padded=padded, dtype_pair=False)
    write_rank(tmp_path / "mp_rank_00", [MODEL], state, ARGS, style)
    check(open_legacy(tmp_path), "", state)


@pytest.mark.parametrize("views", [False, True])
def test_tensors_that_are_no_params(tmp_path: Path, views: bool) -> None:
    """Buffers and frozen params stand among the params in the state dict, and in no buffer of the optimizer."""
    model = [*MODEL]
    model.insert(5, Param("decoder.layers.0.mlp.router.expert_bias", (4,), "float32", buffer=True))
    model.insert(9, Param("decoder.layers.1.frozen.weight", (9, 5), buffer=True))
    model.insert(3, Param("decoder.layers.0.frozen.bias", (3,), buffer=True))
    state = random_state(model)
    write_rank(tmp_path / "mp_rank_00", [model], state, ARGS, Style(LayoutRules(2, 100), views=views))
    legacy = open_legacy(tmp_path)
    check(legacy, "", state)
    assert legacy.notices == (
        "3 tensors of the model have no optimizer state, the first is decoder.layers.0.frozen.bias",
    )
    assert [spec.name for spec in legacy.parts[""].catalog.state.params] == [param.name for param in MODEL]


def test_virtual_pipeline_chunks(tmp_path: Path) -> None:
    """Two stages of two chunks of one layer: layers 0 and 2 are the first stage's."""
    args = ARGS | {"num_layers": 4, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    for stage in range(2):
        head = [Param("embedding.word_embeddings.weight", (11, 6))] if stage == 0 else []
        tail = [Param("output_layer.weight", (11, 6))] if stage == 1 else []
        first = [*head, *gpt_layer("decoder.layers.0")]
        second = [*gpt_layer("decoder.layers.0"), *tail]
        write_chunks(tmp_path / f"mp_rank_00_{stage:03d}", [first, second], stage, args)
    legacy = open_legacy(tmp_path)
    for stage in range(2):
        part = prove(legacy).parts[f"dp_group_idx_{stage}"]
        assert part.evidence.proved == part.evidence.elements
        layers = {name.split(".")[2] for name in part.catalog.state.index if name.startswith("decoder.layers.")}
        assert layers == {str(stage), str(2 + stage)}
        assert part.layout is not None and len(part.layout.buffers) == 2
        for virtual in range(2):
            expected = random_state(gpt_layer("decoder.layers.0"), seed=100 * stage + virtual)
            for name, slots in expected.items():
                ours = name.replace("layers.0", f"layers.{2 * virtual + stage}")
                np.testing.assert_array_equal(values(legacy, part, ours, "exp_avg"), slots["exp_avg"].numpy())


def write_chunks(folder: Path, chunks: list[list[Param]], stage: int, args: dict[str, Any]) -> None:
    """Chunks whose params have the same names: written apart, and put together."""
    import torch

    saved: dict[str, Any] = {}
    gathered: dict[Any, Any] = {"buckets_coalesced": True}
    for virtual, params in enumerate(chunks):
        layer = random_state(gpt_layer("decoder.layers.0"), seed=100 * stage + virtual)
        state = random_state(params, seed=7) | layer
        part = folder.with_name(f"part_{stage}_{virtual}")
        write_rank(part, [params], state, args, Style(LayoutRules(2, 100 if virtual == stage == 0 else None)))
        one = torch.load(part / "model_optim_rng.pt", weights_only=False)
        saved = {**one, **saved, f"model{virtual}": one["model"]}
        gathered[virtual] = torch.load(part / "distrib_optim.pt", weights_only=False)[0]
        shutil.rmtree(part)
    del saved["model"]
    folder.mkdir()
    torch.save(saved, folder / "model_optim_rng.pt")
    torch.save(gathered, folder / "distrib_optim.pt")


def test_a_tied_tensor_counts_once(tmp_path: Path) -> None:
    import torch

    state = random_state(MODEL)
    write_rank(tmp_path / "mp_rank_00", [MODEL], state, ARGS, Style())
    file = tmp_path / "mp_rank_00" / "model_optim_rng.pt"
    saved = torch.load(file, weights_only=False)
    saved["model"]["another.name"] = saved["model"]["output_layer.weight"]
    torch.save(saved, file)
    legacy = open_legacy(tmp_path)
    check(legacy, "", state)
    assert "another.name" not in legacy.parts[""].catalog.state.index


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    write_rank(tmp_path / "mp_rank_00", [MODEL], random_state(MODEL), ARGS, Style(views=False))
    other = tmp_path / "other"
    write_rank(other / "mp_rank_00", [MODEL], random_state(MODEL, seed=1), ARGS, Style(views=False))
    shutil.copy(other / "mp_rank_00" / "model_optim_rng.pt", tmp_path / "mp_rank_00")
    shutil.rmtree(other)
    with pytest.raises(UnsupportedError, match="where each param lies cannot be known"):
        open_legacy(tmp_path)


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    args = ARGS | {"tensor_model_parallel_size": 2}
    write_rank(tmp_path / "mp_rank_00", [MODEL], random_state(MODEL), args, Style())
    with pytest.raises(MissingError, match="folder of tensor rank 1, pipeline rank 0, expert rank 0 is missing"):
        open_legacy(tmp_path)


def test_a_missing_optimizer_file_is_named(tmp_path: Path) -> None:
    args = ARGS | {"tensor_model_parallel_size": 2}
    for rank in range(2):
        write_rank(tmp_path / f"mp_rank_0{rank}", [MODEL], random_state(MODEL, seed=rank), args, Style())
    (tmp_path / "mp_rank_01" / "distrib_optim.pt").unlink()
    with pytest.raises(MissingError, match=r"mp_rank_01/distrib_optim\.pt"):
        open_legacy(tmp_path)
    (tmp_path / "mp_rank_00" / "distrib_optim.pt").unlink()
    with pytest.raises(MissingError, match=r"no rank's folder has a distrib_optim\.pt"):
        open_legacy(tmp_path)


def test_a_second_number_needs_the_args(tmp_path: Path) -> None:
    write_rank(tmp_path / "mp_rank_00_000", [MODEL], random_state(MODEL), {}, Style())
    with pytest.raises(UnsupportedError, match="may be a pipeline or an expert rank"):
        open_legacy(tmp_path)


@pytest.mark.parametrize("name", ["model_optim_rng.pt", "distrib_optim.pt"])
def test_a_truncated_file_is_damage(tmp_path: Path, name: str) -> None:
    write_rank(tmp_path / "mp_rank_00", [MODEL], random_state(MODEL), ARGS, Style())
    file = tmp_path / "mp_rank_00" / name
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CorruptError, match=name):
        open_legacy(tmp_path)


def test_stages_that_do_not_add_up_are_not_numbered(tmp_path: Path) -> None:
    args = ARGS | {"num_layers": 5, "pipeline_model_parallel_size": 2}
    for stage in range(2):
        layers = gpt_layer("decoder.layers.0")
        write_rank(tmp_path / f"mp_rank_00_{stage:03d}", [layers], random_state(layers, seed=stage), args, Style())
    with pytest.raises(UnsupportedError, match="found 2 layers in all stages, expected 5, as the args state"):
        open_legacy(tmp_path)


def test_a_buffer_of_another_size_than_it_states(tmp_path: Path) -> None:
    import torch

    write_rank(tmp_path / "mp_rank_00", [MODEL], random_state(MODEL), ARGS, Style())
    file = tmp_path / "mp_rank_00" / "distrib_optim.pt"
    saved = torch.load(file)
    (world,) = saved[0].values()
    world["numel_unpadded"] += 1
    torch.save(saved, file)
    with pytest.raises(CorruptError, match="another size than it states"):
        open_legacy(tmp_path)
    world["numel_unpadded"] -= 1
    world["exp_avg"] = world["exp_avg"][:-1].clone()
    torch.save(saved, file)
    with pytest.raises(CorruptError, match="differ in size"):
        open_legacy(tmp_path)


def test_a_shifted_bucket_is_not_taken_for_sound(tmp_path: Path) -> None:
    """Main params that lie elsewhere than the rule can put them are refused, not read from there."""
    import torch

    write_rank(tmp_path / "mp_rank_00", [MODEL], random_state(MODEL), ARGS, Style(LayoutRules(2, 100)))
    file = tmp_path / "mp_rank_00" / "distrib_optim.pt"
    saved = torch.load(file)
    (world,) = saved[0].values()
    for slot in ("param", "exp_avg", "exp_avg_sq"):
        world[slot] = torch.cat([world[slot][3:], world[slot][:3]])
    torch.save(saved, file)
    with pytest.raises(UnsupportedError, match="where each param lies cannot be known"):
        open_legacy(tmp_path)


def test_a_changed_weight_is_unproved_where_the_rule_places_it(tmp_path: Path) -> None:
    import torch

    args = ARGS | {"overlap_grad_reduce": True, "ddp_bucket_size": 100}
    state = random_state(MODEL)
    write_rank(tmp_path / "mp_rank_00", [MODEL], state, args, Style(LayoutRules(2, 100)))
    file = tmp_path / "mp_rank_00" / "model_optim_rng.pt"
    saved = torch.load(file, weights_only=False)
    saved["model"]["decoder.layers.1.linear_qkv.weight"][2, 3] += 1
    torch.save(saved, file)
    part = prove(open_legacy(tmp_path)).parts[""]
    assert part.evidence.unproved == ("decoder.layers.1.linear_qkv.weight",)
    assert part.evidence.proved == part.evidence.elements - 1


def test_flipped_bytes_are_damage(tmp_path: Path) -> None:
    write_rank(tmp_path / "mp_rank_00", [MODEL], random_state(MODEL), ARGS, Style(views=False))
    legacy = open_legacy(tmp_path)
    key = next(key for key in legacy.entries.tensors if key.endswith("gbuf_idx_0.param"))
    name, at = legacy.entries.chunks.place(int(legacy.entries.tensors[key].chunks[0]))
    data = bytearray((tmp_path / name).read_bytes())
    data[at + 3] ^= 0x55
    (tmp_path / name).write_bytes(bytes(data))
    with pytest.raises(CorruptError, match="does not match its checksum"):
        open_legacy(tmp_path)

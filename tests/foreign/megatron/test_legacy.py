"""The ranks' own ``.pt`` files: real ones against their truth, and synthetic ones of what the corpus lacks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zero1ckpt.core.casting import cast_bits
from zero1ckpt.foreign.megatron.entries import ChunkSource
from zero1ckpt.foreign.megatron.legacy import open_legacy
from zero1ckpt.foreign.megatron.model import MegatronCheckpoint, MegatronPart

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

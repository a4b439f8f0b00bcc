"""State under the names of the model's tensors: whole boxes, and fragments that data-parallel ranks hold runs of."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.foreign.conftest import CORPUS
from zero1ckpt.core.errors import CorruptError, UnsupportedError
from zero1ckpt.foreign.megatron.entries import Chunks, ChunkSource, Entries, StoredTensor
from zero1ckpt.foreign.megatron.model import MegatronPart
from zero1ckpt.foreign.megatron.model_space import SpaceOptions, model_keys, read_model_space, split_key
from zero1ckpt.foreign.megatron.reading import describe
from zero1ckpt.foreign.megatron.stacks import layer_name, stack_of
from zero1ckpt.foreign.megatron.torch_dist import open_torch_dist
from zero1ckpt.storage.local import LocalStore

FORMATS = ("fully_reshardable", "fully_reshardable_memeff", "fully_sharded_model_space")


def index() -> dict[str, Any]:
    path = CORPUS / "megatron" / "INDEX.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def saves(*, right: bool) -> list[tuple[str, str]]:
    found = [
        (case, save)
        for case, row in index().items()
        for save, told in row["formats"].items()
        if save in FORMATS and (told["stored_values_equal_truth"] is True) == right
    ]
    return found or [("no corpus", "none")]


def param_values(part: MegatronPart, source: ChunkSource, name: str, slot: str) -> np.ndarray:
    """A slot of a param, read through the catalog as a copy would."""
    state = part.catalog.state
    param, index = state.index[name], state.slot_index[slot]
    numel = state.params[param].numel
    column = [np.array([value], np.int64) for value in (param, index, 0, numel)]
    _, found = part.catalog.placement.locate(*column)
    flat = np.zeros(numel, np.float32)
    held = np.zeros(numel, np.int64)
    for _, _, start, size, blob, at, nbytes in found.rows():
        data = bytearray(nbytes)
        source.read_run(blob, at, [memoryview(data)])
        flat[start : start + size] = np.frombuffer(data, np.float32)
        held[start : start + size] += 1
    assert (held == 1).all()
    return flat.reshape(state.params[param].shape)


def part_of(folder: Path) -> tuple[MegatronPart, Entries]:
    entries = open_torch_dist(folder)
    return read_model_space(entries, "megatron:fully_reshardable").part, entries


def global_truth(folder: Path) -> dict[str, np.ndarray]:
    """Truth by name of ours and slot: layers split, global over TP, PP and EP."""
    from safetensors.numpy import load_file

    truth: dict[str, np.ndarray] = {}
    tensors = load_file(folder / "truth.safetensors")
    stacked = any(key.startswith("global/") for key in tensors)
    prefix = "global/" if stacked else "local/tp0_pp0_ep0/"
    for key, value in tensors.items():
        if not key.startswith(prefix):
            continue
        name, _, field = key.removeprefix(prefix).rpartition("/")
        if stack_of(name) is None:
            truth[f"{name}/{field}"] = value
            continue
        for layer, row in enumerate(value):
            truth[f"{layer_name(name, layer)}/{field}"] = row
    return truth


@pytest.mark.parametrize(("case", "save"), saves(right=True))
def test_every_element_equals_the_live_optimizers(corpus: Callable[..., Path], case: str, save: str) -> None:
    part, entries = part_of(corpus(case, save))
    source = ChunkSource(entries.store, entries.chunks)
    truth = global_truth(corpus(case))
    seen = set()
    for param in part.catalog.state.params:
        for slot, field in (("fp32_param", "param"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
            wanted = truth[f"{param.name}/{field}"]
            seen.add(f"{param.name}/{field}")
            values = param_values(part, source, param.name, slot)
            assert values.shape == wanted.shape
            assert values.tobytes() == wanted.astype(np.float32).tobytes(), (param.name, slot)
    assert not part.catalog.state.absent
    assert {key for key in truth if key not in seen} <= {
        f"output_layer.weight/{f}" for f in ("param", "exp_avg", "exp_avg_sq")
    }


@pytest.mark.parametrize(
    ("case", "save"),
    [row for row in saves(right=False) if not row[0].startswith("v0153")],  # torch unpickles Megatron's classes there
)
def test_what_the_writer_stored_wrong_comes_out_as_stored(corpus: Callable[..., Path], case: str, save: str) -> None:
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    folder = corpus(case, save)
    part, entries = part_of(folder)
    source = ChunkSource(entries.store, entries.chunks)
    wanted = {key: torch.empty(tensor.shape) for key, tensor in entries.tensors.items() if split_key(key) is not None}
    load(wanted, storage_reader=FileSystemReader(folder))
    for param, local in zip(part.catalog.state.params, part.local_params, strict=True):
        (piece,) = local.boxes
        for slot, field in (("fp32_param", "param"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
            stored = wanted[f"optimizer.state.{field}.{piece.key}"][piece.box.slices].numpy().reshape(param.shape)
            assert param_values(part, source, param.name, slot).tobytes() == stored.tobytes()


def test_stacked_keys_are_split_and_a_weight_gives_the_dtype(corpus: Callable[..., Path]) -> None:
    part, entries = part_of(corpus("v0161_gpt_moe_ep2_dp4_b1", "fully_reshardable"))
    params = {param.name: param for param in part.catalog.state.params}
    expert = params["decoder.layers.1.mlp.experts.experts.linear_fc1.weight"]
    assert (expert.shape, expert.dtype, expert.expert) == ((4, 16, 24), "bfloat16", True)
    assert not params["decoder.layers.0.mlp.router.weight"].expert
    assert not any(split_key(key) for key in model_keys(entries))
    names = list(params)
    assert names.index("embedding.word_embeddings.weight") < names.index("decoder.layers.0.mlp.router.weight")
    assert names.index("decoder.layers.1.mlp.router.weight") < names.index("decoder.final_layernorm.weight")
    assert names[-1] == "output_layer.weight"


# ----------------------------------------------------------------------------------------------------------- synthetic


class Bench:
    """Entries made by hand: chunks are arrays in one file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = bytearray()
        self.places: list[tuple[str, int]] = []
        self.nbytes: list[int] = []
        self.tensors: dict[str, StoredTensor] = {}
        self.original: dict[str, tuple[int, ...]] = {}

    def add(self, key: str, shape: Sequence[int], rows: Sequence[tuple[Sequence[int], np.ndarray]], dtype: str) -> None:
        chunks = []
        for _, values in rows:
            chunks.append(len(self.places))
            self.places.append(("data.bin", len(self.data)))
            self.nbytes.append(values.nbytes)
            self.data += values.tobytes()
        offsets = np.array([start for start, _ in rows], np.int64).reshape(len(rows), len(shape))
        sizes = np.array([values.shape for _, values in rows], np.int64).reshape(len(rows), len(shape))
        self.tensors[key] = StoredTensor(key, dtype, tuple(shape), offsets, sizes, np.array(chunks, np.int64))

    def entries(self) -> Entries:
        (self.folder / "data.bin").write_bytes(self.data)
        chunks = Chunks(np.array(self.nbytes, np.int64), np.full(len(self.places), -1), self.places.__getitem__)
        store = LocalStore(self.folder)

        def no_object(key: str) -> Any:
            raise KeyError(key)

        return Entries(
            self.folder,
            "torch_dist",
            store,
            self.tensors,
            {},
            no_object,
            chunks,
            {},
            {},
            original_shape=self.original.get,
        )


@given(
    layers=st.integers(1, 3),
    cuts=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    local=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    data=st.data(),
)
def test_fragments_of_any_grid_come_back_in_place(
    tmp_path_factory: pytest.TempPathFactory,
    layers: int,
    cuts: tuple[int, int],
    local: tuple[int, int],
    data: st.DataObject,
) -> None:
    shape = (layers, cuts[0] * local[0], cuts[1] * local[1])
    whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    numel = local[0] * local[1]
    rows = []
    for index in np.ndindex(layers, *cuts):
        layer, i, j = index
        flat = whole[layer, i * local[0] : (i + 1) * local[0], j * local[1] : (j + 1) * local[1]].reshape(-1)
        ends = sorted({0, numel, *data.draw(st.lists(st.integers(0, numel), max_size=3))})
        for low, high in pairwise(ends):
            rows.append(((*index, low), flat[low:high].reshape(1, 1, 1, -1)))
    bench = Bench(tmp_path_factory.mktemp("fragments"))
    key = "decoder.layers.mlp.weight"
    stored = (layers, *cuts, numel)
    bench.add(f"optimizer.state.fp32_param.{key}", stored, data.draw(st.permutations(rows)), "float32")
    bench.add(
        key, shape, [((layer, 0, 0), whole[layer : layer + 1].astype(np.float16)) for layer in range(layers)], "float16"
    )
    entries = bench.entries()
    part = read_model_space(entries, "megatron:fully_sharded_model_space").part
    source = ChunkSource(entries.store, entries.chunks)
    for layer in range(layers):
        values = param_values(part, source, f"decoder.layers.{layer}.mlp.weight", "fp32_param")
        assert (values == whole[layer]).all()
    entries.store.close()


def plain(bench: Bench, key: str, values: np.ndarray, dtype: str = "float32") -> None:
    bench.add(key, values.shape, [((0,) * values.ndim, values)], dtype)


def test_a_gap_and_an_overlap_are_named(tmp_path: Path) -> None:
    for rows, problem in (
        ([((0,), np.zeros(3, np.float32)), ((5,), np.zeros(3, np.float32))], r"elements \[3, 5\) in no chunk"),
        ([((0,), np.zeros(6, np.float32)), ((5,), np.zeros(3, np.float32))], r"elements \[5, 6\) in two chunks"),
    ):
        bench = Bench(tmp_path)
        bench.add("optimizer.state.param.w", (8,), rows, "float32")
        plain(bench, "w", np.zeros(8, np.float32))
        with pytest.raises(CorruptError, match=rf"w: .*{problem}"):
            read_model_space(bench.entries(), "megatron:fully_reshardable")


def test_a_shape_that_is_no_grid_of_fragments_is_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    plain(bench, "optimizer.state.fp32_param.w", np.zeros((2, 1, 6), np.float32))
    plain(bench, "w", np.zeros((3, 4), np.float32))
    with pytest.raises(CorruptError, match="nor one of its fragments"):
        read_model_space(bench.entries(), "megatron:fully_sharded_model_space")


def test_the_metadatas_shape_counts_where_there_is_no_weight(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    values = np.arange(12, dtype=np.float32)
    plain(bench, "optimizer.state.fp32_param.w", values.reshape(1, 1, 12))
    with pytest.raises(UnsupportedError, match="own shape is not known"):
        read_model_space(bench.entries(), "megatron:fully_sharded_model_space")
    bench.original["optimizer.state.fp32_param.w"] = (3, 4)
    space = read_model_space(bench.entries(), "megatron:fully_sharded_model_space")
    assert space.part.catalog.state.params[0].shape == (3, 4)
    assert "cannot be proved" in space.notices[0]


def test_chained_prefixes_are_no_part_of_a_name(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for key in (
        "chained_0.optimizer.state.fp32_param.w",
        "chained_1.optimizer.state.fp32_param.experts.v",
        "w",
        "experts.v",
    ):
        plain(bench, key, np.zeros((2, 2), np.float32))
    part = read_model_space(bench.entries(), "megatron:fully_sharded_model_space").part
    assert [(p.name, p.expert) for p in part.catalog.state.params] == [("experts.v", True), ("w", False)]
    options = SpaceOptions(experts_apart=False)
    together = read_model_space(bench.entries(), "megatron:fully_sharded_model_space", options).part
    assert not any(p.expert for p in together.catalog.state.params)


def test_one_slot_stored_twice_is_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for key in ("optimizer.state.param.w", "optimizer.state.fp32_param.w", "w"):
        plain(bench, key, np.zeros(2, np.float32))
    with pytest.raises(CorruptError, match="two entries hold one slot"):
        read_model_space(bench.entries(), "megatron:fully_reshardable")


@pytest.mark.parametrize(("num_layers", "names"), [(None, ["layers.w"]), (2, ["layers.0.w", "layers.1.w"])])
def test_one_chunk_is_stacked_only_by_the_arguments(tmp_path: Path, num_layers: int | None, names: list[str]) -> None:
    """A module of a user's own may be called ``layers`` too."""
    bench = Bench(tmp_path)
    values: Mapping[str, np.ndarray] = {key: np.arange(6, dtype=np.float32).reshape(2, 3) for key in ("layers.w",)}
    for key, value in values.items():
        plain(bench, key, value)
        plain(bench, f"optimizer.state.param.{key}", value)
    entries = bench.entries()
    part = read_model_space(entries, "megatron:fully_reshardable", SpaceOptions(num_layers=num_layers)).part
    assert [param.name for param in part.catalog.state.params] == names
    last = param_values(part, ChunkSource(entries.store, entries.chunks), names[-1], "fp32_param")
    assert last.reshape(-1)[-3:].tolist() == [3, 4, 5]


def test_keys() -> None:
    assert split_key("optimizer.state.exp_avg.decoder.layers.mlp.w") == ("exp_avg", "decoder.layers.mlp.w")
    assert split_key("optimizer.distributed.dp_group_idx_0.optimizer") is None
    assert stack_of("decoder.layers.mlp.w") == "decoder.layers"
    assert stack_of("decoder.layers.3.mlp.w") is None
    assert stack_of("decoder.layersnorm.w") is None
    assert stack_of("layers.w") == "layers"
    assert layer_name("decoder.layers.mlp.w", 7) == "decoder.layers.7.mlp.w"


def test_the_loss_scale_in_the_common_state_is_read(corpus: Callable[..., Path]) -> None:
    """fully_reshardable keeps the grad scaler in the common state, dp_reshardable in an entry of the group."""
    found = [
        describe(corpus("v0161_toy_fp16_dp2_b1", save)).parts[""].catalog.state.loss_scale
        for save in ("fully_reshardable", "dp_reshardable")
    ]
    assert found[0] is not None and found[0] == found[1] and found[0].finite_steps == 3

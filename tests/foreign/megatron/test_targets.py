"""Megatron checkpoints as targets: what they hold, that workers do not change them, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader

import zero1ckpt
from tests.foreign.megatron.tiny import NAMES, by_name, write_iteration, write_run
from zero1ckpt.core.boxes import Box
from zero1ckpt.core.layout import LayoutRules, layout_params
from zero1ckpt.encodings.inert_pickle import TensorRef
from zero1ckpt.encodings.torch_archive import read_archive
from zero1ckpt.foreign.megatron.layout_file import SCHEMA
from zero1ckpt.foreign.megatron.model import Bucket, Buffer, LocalParam, PartLayout
from zero1ckpt.foreign.megatron.reading import describe
from zero1ckpt.foreign.megatron.targets.buckets import BucketRules, part_buckets, rank_chunks
from zero1ckpt.foreign.megatron.targets.items import Piece, box_ranges
from zero1ckpt.foreign.megatron.targets.origin import OriginPart, from_checkpoint
from zero1ckpt.foreign.megatron.targets.states import StateValue, states_in_common, write_value
from zero1ckpt.model.catalog import Catalog, Extents, TablePlacement
from zero1ckpt.model.state import MAIN_PARAM, ParamSpec, PartState, SlotSpec
from zero1ckpt.storage.local import LocalStore

Corpus = Callable[..., Path]
SLOTS = (MAIN_PARAM, "exp_avg", "exp_avg_sq")
ORDER = tuple(NAMES)
"""Registration order of the tiny model's params."""
TRACKER = "latest_checkpointed_iteration.txt"


def _files(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def _shape(name: str) -> tuple[int, ...]:
    """Of a param on one of two tensor-parallel ranks: embedding and output are cut along their first axis."""
    return (12, 8) if name in ("embedding.weight", "output.weight") else NAMES[name]


def _box(name: str, rank: int) -> dict[str, Any]:
    """What a rank's param is in the model's tensors."""
    shape = _shape(name)
    head, _, tail = name.partition(".layers.")
    if not tail:
        return {"key": name, "shape": NAMES[name], "start": [12 * rank, 0], "size": shape}
    layer, _, rest = tail.partition(".")
    start = [int(layer), *(0 for _ in shape)]
    return {"key": f"{head}.layers.{rest}", "shape": (2, *shape), "start": start, "size": (1, *shape)}


def _layout_file(path: Path, dp_size: int = 2, bucket_size: int | None = None, leave_out: str = "") -> Path:
    """The layout of the tiny model as a run of two tensor-parallel ranks would write it."""
    params = [ParamSpec(name, _shape(name), "bfloat16") for name in ORDER if name != leave_out]
    buffer = layout_params(params, LayoutRules(dp_size, bucket_size)).buffers[0]
    buckets = [{"offset": b.offset, "numel": b.numel, "numel_unpadded": b.numel_unpadded} for b in buffer.buckets]
    groups = []
    for rank in range(2):
        rows = []
        for placed in buffer.placements:
            row = {"name": placed.name, "start": placed.world.start, "end": placed.world.end}
            rows.append(row | {"shape": _shape(placed.name), "boxes": [_box(placed.name, rank)]})
        kind = {"param_dtype": "bfloat16", "grad_dtype": "float32", "expert": False}
        own = {"group": rank, "chained": None, "dp_size": dp_size, "pipeline_rank": 0}
        groups.append(own | {"buffers": [kind | {"buckets": buckets, "params": rows}]})
    path.write_text(json.dumps({"schema": SCHEMA, "groups": groups}))
    return path


def _check_values(made: Path, values: dict[str, dict[str, torch.Tensor]]) -> None:
    found = zero1ckpt.open(made)
    assert sorted(found.names()) == sorted(NAMES)
    for name in NAMES:
        for slot in SLOTS:
            assert torch.equal(found.read(name, slot), by_name(values, name, slot)), (name, slot)


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[Path, dict[str, dict[str, torch.Tensor]]]:
    return tmp_path / "run", write_run(tmp_path / "run")


Tiny = tuple[Path, dict[str, dict[str, torch.Tensor]]]


# ------------------------------------------------------------------------------------------------------------ targets


def test_fully_reshardable_holds_the_same_values_and_weights(tiny: Tiny, tmp_path: Path) -> None:
    run, values = tiny
    zero1ckpt.reshard(run, tmp_path / "made", format="megatron:fully_reshardable")
    assert (tmp_path / "made" / TRACKER).read_bytes() == b"3"
    _check_values(tmp_path / "made", values)
    old, new = describe(run / "iter_0000003"), describe(tmp_path / "made" / "iter_0000003")
    assert set(old.model_keys) == set(new.model_keys)
    for key in old.model_keys:
        assert _weight(old, key) == _weight(new, key)
    folder = tmp_path / "made" / "iter_0000003"
    assert (folder / "common.pt").read_bytes() == (run / "iter_0000003" / "common.pt").read_bytes()


def _weight(checkpoint: object, key: str) -> dict[tuple[int, ...], bytes]:
    """Bytes of each chunk of a model tensor, by where it begins."""
    entries = checkpoint.entries  # type: ignore[attr-defined]
    found = {}
    for start, chunk in zip(entries.tensors[key].offsets.tolist(), entries.tensors[key].chunks.tolist(), strict=True):
        file, at = entries.chunks.place(chunk)
        data = bytearray(int(entries.chunks.nbytes[chunk]))
        entries.store.readv_into(file, at, [memoryview(data)])
        found[tuple(start)] = bytes(data)
    return found


def test_other_files_are_carried(tiny: Tiny, tmp_path: Path) -> None:
    run, _ = tiny
    folder = run / "iter_0000003"
    (folder / "loader").mkdir()
    (folder / "loader" / "state_0.pt").write_bytes(b"where the loader was")
    (folder / "integrity.json").write_text("{}")
    zero1ckpt.reshard(run, tmp_path / "made", format="megatron:fully_reshardable")
    made = tmp_path / "made" / "iter_0000003"
    assert (made / "loader" / "state_0.pt").read_bytes() == b"where the loader was"
    assert not (made / "integrity.json").exists()


def test_torch_reads_metadata_and_archives(tiny: Tiny, tmp_path: Path) -> None:
    run, values = tiny
    zero1ckpt.reshard(run, tmp_path / "made", format="megatron:fully_reshardable")
    folder = tmp_path / "made" / "iter_0000003"
    metadata = FileSystemReader(folder).read_metadata()
    for key, own in values.items():
        whole = torch.zeros(own["exp_avg"].shape)
        for index, place in metadata.storage_data.items():
            if index.fqn == f"optimizer.state.exp_avg.{key}":
                with (folder / place.relative_path).open("rb") as file:
                    file.seek(place.offset)
                    (tmp_path / "one.pt").write_bytes(file.read(place.length))
                part = torch.load(tmp_path / "one.pt", weights_only=True)
                whole[tuple(slice(o, o + n) for o, n in zip(index.offset, part.shape, strict=True))] = part
        assert torch.equal(whole, own["exp_avg"])


@pytest.mark.parametrize(("dp_size", "bucket_size"), [(1, None), (2, None), (3, None), (1, 150), (2, 150)])
def test_a_layout_file_puts_model_space_into_buckets(
    tiny: Tiny, tmp_path: Path, dp_size: int, bucket_size: int | None
) -> None:
    run, values = tiny
    layout = _layout_file(tmp_path / "layout.json")
    made = tmp_path / "made"
    size = "none" if bucket_size is None else bucket_size
    zero1ckpt.reshard(run, made, format="megatron:dp_reshardable", to_dp=dp_size, bucket_size=size, layout=layout)
    wanted = layout_params([ParamSpec(n, _shape(n), "bfloat16") for n in ORDER], LayoutRules(dp_size, bucket_size))
    entries = describe(made / "iter_0000003").entries
    for rank in range(2):
        key = f"optimizer.distributed.dp_group_idx_{rank}.per_bucket_numel/shard_0_1"
        (stated,) = entries.load_object(key)
        assert list(stated.values()) == [wanted.buffers[0].bucket_numel.tolist()]
    same = _layout_file(tmp_path / "new.json", dp_size, bucket_size)
    zero1ckpt.reshard(made, tmp_path / "whole", format="megatron:fully_reshardable", layout=same)
    _check_values(tmp_path / "whole", values)


def test_there_and_back_loses_nothing(tiny: Tiny, tmp_path: Path) -> None:
    """Model space -> buckets -> another dp and bucket size -> model space."""
    run, values = tiny
    layout = _layout_file(tmp_path / "layout.json")
    zero1ckpt.reshard(run, tmp_path / "a", format="megatron:dp_reshardable", layout=layout)
    zero1ckpt.reshard(tmp_path / "a", tmp_path / "b", to_dp=1, bucket_size=150, layout=layout)
    wider = _layout_file(tmp_path / "wider.json", 1, 150)
    zero1ckpt.reshard(tmp_path / "b", tmp_path / "c", format="megatron:fully_reshardable", layout=wider)
    _check_values(tmp_path / "c", values)
    old, new = describe(run / "iter_0000003"), describe(tmp_path / "c" / "iter_0000003")
    assert all(_weight(old, key) == _weight(new, key) for key in old.model_keys)
    states = [torch.load(path / "iter_0000003" / "common.pt", weights_only=True) for path in (run, tmp_path / "c")]
    for state in states:
        state.pop("content_metadata")  # says more than the tiny model's
    assert states[0] == states[1]


@pytest.mark.parametrize("target", ["megatron:fully_reshardable", "megatron:dp_reshardable"])
def test_bytes_do_not_depend_on_workers_and_memory(tiny: Tiny, tmp_path: Path, target: str) -> None:
    run, _ = tiny
    layout = _layout_file(tmp_path / "layout.json")
    made = []
    for workers, limit in [(1, 2**16), (3, 2**18), (2, None)]:
        dst = tmp_path / f"made-{workers}"
        zero1ckpt.reshard(run, dst, format=target, layout=layout, workers=workers, memory_limit=limit)
        made.append(_files(dst))
    assert made[0] == made[1] == made[2]


def test_native_and_back_is_byte_for_byte_the_direct_way(tiny: Tiny, tmp_path: Path) -> None:
    run, _ = tiny
    zero1ckpt.reshard(run, tmp_path / "direct", format="megatron:fully_reshardable")
    zero1ckpt.reshard(run, tmp_path / "native", format="bucket_shards", to_dp=2)
    zero1ckpt.reshard(tmp_path / "native", tmp_path / "native-3", to_dp=3)
    zero1ckpt.reshard(tmp_path / "native-3", tmp_path / "back", format="megatron:fully_reshardable")
    assert _files(tmp_path / "direct") == _files(tmp_path / "back")


def test_weights_that_are_no_casts_come_back(tmp_path: Path) -> None:
    """A weight that differs from its main param is carried, not made anew."""
    strange = {"output.weight": torch.full((24, 8), 0.1).bfloat16()}
    write_iteration(tmp_path / "run" / "iter_0000003", weights=strange)
    (tmp_path / "run" / TRACKER).write_text("3")
    zero1ckpt.reshard(tmp_path / "run", tmp_path / "native", format="bucket_shards", to_dp=2, unproved=True)
    with pytest.raises(zero1ckpt.Zero1CkptError, match="not proved when"):
        zero1ckpt.reshard(tmp_path / "native", tmp_path / "back", format="megatron:fully_reshardable")


@pytest.mark.parametrize(("flavour", "has_file"), [("common_pt", True), ("common_state", False)])
def test_flavours(tiny: Tiny, tmp_path: Path, flavour: str, has_file: bool) -> None:
    run, values = tiny
    zero1ckpt.reshard(run, tmp_path / "made", format="megatron:fully_reshardable", flavour=flavour)
    folder = tmp_path / "made" / "iter_0000003"
    assert (folder / "common.pt").exists() is has_file
    assert ("common_backend" in json.loads((folder / "metadata.json").read_text())) is has_file
    assert describe(folder).entries.common_in == ("file" if has_file else "entry")
    _check_values(tmp_path / "made", values)
    zero1ckpt.reshard(tmp_path / "made", tmp_path / "back", flavour="common_pt")
    back = torch.load(tmp_path / "back" / "iter_0000003" / "common.pt", weights_only=True)
    assert back == torch.load(run / "iter_0000003" / "common.pt", weights_only=True)


def test_overwrite_and_resume(tiny: Tiny, tmp_path: Path) -> None:
    run, values = tiny
    made = tmp_path / "made"
    zero1ckpt.reshard(run, made, format="megatron:fully_reshardable")
    before = _files(made)
    with pytest.raises(zero1ckpt.Zero1CkptError) as refused:
        zero1ckpt.reshard(run, made, format="megatron:fully_reshardable")
    assert refused.value.exit_code == 6
    zero1ckpt.reshard(run, made, format="megatron:fully_reshardable", resume=True)
    zero1ckpt.reshard(run, made, format="megatron:fully_reshardable", overwrite=True)
    assert _files(made) == before
    _check_values(made, values)
    (made / "notes.txt").write_text("mine")
    with pytest.raises(zero1ckpt.Zero1CkptError, match="not one save of Megatron's"):
        zero1ckpt.reshard(run, made, format="megatron:fully_reshardable", overwrite=True)
    assert (made / "notes.txt").exists()


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ({"format": "megatron:legacy"}, 5, "names and their order"),
        ({"format": "megatron:dp_reshardable", "to_dp": 2}, 5, "--layout"),
        ({"format": "megatron:dp_zero_gather_scatter"}, 5, "only read"),
        ({"format": "megatron:fully_sharded_model_space"}, 5, "only read"),
        ({"format": "megatron:fully_reshardable", "container": "zarr"}, 5, "one container"),
        ({"format": "megatron:fully_reshardable", "flavour": "new"}, 2, "flavour"),
        ({"format": "megatron:fully_reshardable", "to_dp": 0}, 2, "dp size"),
    ],
)
def test_refusals(tiny: Tiny, tmp_path: Path, options: dict[str, object], code: int, message: str) -> None:
    with pytest.raises(zero1ckpt.Zero1CkptError, match=message) as refused:
        zero1ckpt.reshard(tiny[0], tmp_path / "made", **options)
    assert refused.value.exit_code == code
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_native_checkpoint_of_its_own_cannot_become_one(tmp_path: Path) -> None:
    zero1ckpt.write(tmp_path / "native", {"w": {"fp32_param": torch.zeros(4)}}, dp_size=1, bucket_size=None)
    with pytest.raises(zero1ckpt.Zero1CkptError, match="model weights") as refused:
        zero1ckpt.reshard(tmp_path / "native", tmp_path / "made", format="megatron:fully_reshardable")
    assert refused.value.exit_code == 5


def test_a_rank_with_nothing_but_padding_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    layout = _layout_file(tmp_path / "layout.json")
    with pytest.raises(zero1ckpt.Zero1CkptError, match="only padding of bucket") as refused:
        zero1ckpt.reshard(tiny[0], tmp_path / "made", format="megatron:dp_reshardable", to_dp=64, layout=layout)
    assert refused.value.exit_code == 5


def test_a_layout_file_that_leaves_state_out_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    layout = _layout_file(tmp_path / "layout.json", leave_out="output.weight")
    with pytest.raises(zero1ckpt.Zero1CkptError, match="leaves out state") as refused:
        zero1ckpt.reshard(tiny[0], tmp_path / "made", format="megatron:dp_reshardable", layout=layout)
    assert refused.value.param == "output.weight"


# -------------------------------------------------------------------------------------------------- real checkpoints


@pytest.mark.parametrize(
    ("case", "save"),
    [
        ("v0161_toy_dp2_b2500", "dp_reshardable"),
        ("v0161_toy_dp3_b2500", "dp_reshardable"),
        ("v0161_toy_dp8_b2500", "dp_reshardable"),
        ("v0161_toy_inst2_dp4_b1", "dp_reshardable"),
        ("v0161_gpt_moe_ep2_dp4_b1", "dp_reshardable"),
        ("v0161_gpt_pp2_dp2_b1", "dp_reshardable"),
        ("v0161_toy_fp32first_dp2_b1", "dp_reshardable"),
        ("v0192_toy_dp2_b2500", "dp_reshardable"),
    ],
)
def test_the_same_layout_has_megatrons_own_chunks(corpus: Corpus, tmp_path: Path, case: str, save: str) -> None:
    """Without a change of sizes: the keys, the chunk edges, the objects and all elements of params are Megatron's."""
    source = corpus(case, save)
    zero1ckpt.reshard(source, tmp_path / "made", format="megatron:dp_reshardable")
    old, new = describe(source).entries, describe(tmp_path / "made" / "iter_0000003").entries
    assert set(old.tensors) == set(new.tensors)
    assert set(old.objects) == set(new.objects)
    for key, tensor in old.tensors.items():
        assert _boxes(tensor) == _boxes(new.tensors[key]), key
    for key in old.objects:
        if "per_bucket_numel" in key:
            assert old.load_object(key) == new.load_object(key), key
    assert zero1ckpt.verify(tmp_path / "made", deep=True, against=source).ok


def _boxes(tensor: object) -> list[tuple[list[int], list[int]]]:
    offsets, sizes = tensor.offsets.tolist(), tensor.sizes.tolist()  # type: ignore[attr-defined]
    return sorted(zip(offsets, sizes, strict=True))


def test_the_loss_scale_moves_between_objects_and_common_state(corpus: Corpus, tmp_path: Path) -> None:
    source = corpus("v0161_toy_fp16_dp2_b1", "dp_reshardable")
    zero1ckpt.reshard(source, tmp_path / "made", format="megatron:fully_reshardable")
    made, stored = (
        from_checkpoint(describe(folder))
        for folder in (tmp_path / "made" / "iter_0000003", corpus("v0161_toy_fp16_dp2_b1", "fully_reshardable"))
    )
    found, wanted = states_in_common(made)[None], states_in_common(stored)[None]
    assert found.keys() == wanted.keys() == {"optimizer", "grad_scaler"}
    assert found["optimizer"].value == wanted["optimizer"].value
    assert list(found["grad_scaler"].storages.values()) == list(wanted["grad_scaler"].storages.values())
    assert found["grad_scaler"].value["growth_tracker"] == wanted["grad_scaler"].value["growth_tracker"]
    assert made.common_value().value["content_metadata"] == stored.common_value().value["content_metadata"]


def test_copies_that_differ_are_refused(corpus: Corpus, tmp_path: Path) -> None:
    """Layer norms lie on both tensor-parallel ranks; the target holds them once."""
    source = tmp_path / "source"
    for name, data in _files(corpus("v0161_gpt_tp2_dp2_b1", "dp_reshardable")).items():
        (source / "iter_0000003").mkdir(parents=True, exist_ok=True)
        (source / "iter_0000003" / name).write_bytes(data)
    (source / TRACKER).write_text("3")
    checkpoint = describe(source / "iter_0000003")
    part = checkpoint.parts["dp_group_idx_1"]
    state = part.catalog.state
    param, slot = state.index["decoder.final_layernorm.weight"], state.slot_index["exp_avg"]
    one = np.array([1], np.int64)
    _, found = part.catalog.placement.locate(one * param, one * slot, one * 3, one)
    file, at = checkpoint.entries.chunks.place(int(found.blob[0]))
    with (source / "iter_0000003" / file).open("r+b") as open_file:
        open_file.seek(at + int(found.at[0]))
        open_file.write(b"\x01")
    with pytest.raises(zero1ckpt.Zero1CkptError, match="checksum of their archive") as refused:
        zero1ckpt.reshard(source, tmp_path / "made", format="megatron:fully_reshardable")
    assert refused.value.exit_code == 4
    with pytest.raises(zero1ckpt.Zero1CkptError, match="different values") as refused:
        zero1ckpt.reshard(source, tmp_path / "made", format="megatron:fully_reshardable", verify=False)
    assert refused.value.exit_code == 5
    zero1ckpt.reshard(source, tmp_path / "made", format="megatron:fully_reshardable", verify=False, unproved=True)


# ---------------------------------------------------------------------------------------------------------- the rules


def _part(sizes: list[int], shared: list[bool], layout_dp: int) -> OriginPart:
    params = tuple(ParamSpec(f"p{i}", (n,)) for i, n in enumerate(sizes))
    locals_ = tuple(
        LocalParam(f"p{i}", i, 0, n, "bfloat16", "float32", shared_embedding=own)
        for i, (n, own) in enumerate(zip(sizes, shared, strict=True))
    )
    order = tuple(reversed(range(len(sizes))))
    layout = PartLayout((Buffer(0, "bfloat16", "float32", order, (), (Bucket(0, 0, 0, 0),)),), layout_dp)
    state = PartState(params, (SlotSpec(MAIN_PARAM, "float32"),))
    placement = TablePlacement((), (), Extents.concatenate([]), 1)
    catalog = Catalog("", "", "", state, None, placement)
    return OriginPart("", catalog, None, locals_, layout, None, 0, 0)  # type: ignore[arg-type]


@given(
    st.lists(st.tuples(st.integers(1, 700), st.booleans()), min_size=1, max_size=12),
    st.integers(1, 5),
    st.one_of(st.none(), st.integers(1, 900)),
)
def test_chunks_tile_each_unpadded_bucket(rows: list[tuple[int, bool]], dp_size: int, bucket_size: int | None) -> None:
    part = _part([n for n, _ in rows], [own for _, own in rows], 1)
    made = part_buckets(part, BucketRules(dp_size, bucket_size, False, 1))
    chunks: dict[str, list[tuple[int, int]]] = {}
    seen: dict[int, list[tuple[int, int]]] = {}
    for rank in range(dp_size):
        try:
            own = list(rank_chunks(made, rank))
        except zero1ckpt.Zero1CkptError:
            return  # a rank with nothing but padding of a bucket
        for row in own:
            chunks.setdefault(row.key, []).append((row.offset[0], row.sizes[0]))
            for fill in row.fills:
                seen.setdefault(fill.param, []).append((fill.begin, fill.begin + fill.box.size))
    buffer = made.buffers[0]
    for bucket, unpadded in enumerate(buffer.bucket_numel_unpadded.tolist()):
        key = next(key for key in chunks if f".bucket_idx_{bucket}." in key)
        at = 0
        for start, size in sorted(chunks[key]):
            assert start == at
            assert size > 0
            at += size
        assert at == unpadded
    for param, spans in seen.items():
        at = 0
        for low, high in sorted(spans):
            assert low == at
            at = high
        assert at == rows[param][0]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_ranges_of_a_box(shape: list[int], data: st.DataObject) -> None:
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    size = tuple(data.draw(st.integers(1, n - low)) for n, low in zip(shape, start, strict=True))
    box = Box(start, size)
    low = data.draw(st.integers(0, box.size - 1))
    high = data.draw(st.integers(low + 1, box.size))
    array = np.arange(int(np.prod(shape))).reshape(shape)
    wanted = array[box.slices].reshape(-1)[low:high] + 7
    begins, sizes = box_ranges(7, shape, box, low, high)
    found = np.concatenate([np.arange(b, b + n) for b, n in zip(begins.tolist(), sizes.tolist(), strict=True)])
    assert np.array_equal(found, wanted)
    assert [list(column) for column in Piece(0, 7, tuple(shape), box).ranges(low, high)] == [list(begins), list(sizes)]


def test_values_with_tensors_are_written_as_torch_loads_them(tmp_path: Path) -> None:
    torch.save({"scale": torch.tensor([256.0]), "tracker": 3}, tmp_path / "a.pt")
    store = LocalStore(tmp_path)
    archive = read_archive(store, "a.pt")
    ref = archive.value["scale"]
    assert isinstance(ref, TensorRef)
    data = write_value(StateValue([archive.value], {ref.storage.key: torch.tensor([256.0]).numpy().tobytes()}))
    (tmp_path / "b.pt").write_bytes(data)
    assert torch.load(tmp_path / "b.pt", weights_only=True) == [{"scale": torch.tensor([256.0]), "tracker": 3}]

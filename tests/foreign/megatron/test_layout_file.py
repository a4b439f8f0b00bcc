"""The layout file, its padding, and what a native checkpoint keeps of a layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from zero1ckpt.api.megatron_layout import shown_layout
from zero1ckpt.core.errors import OutputError
from zero1ckpt.core.layout import LayoutRules, layout_params
from zero1ckpt.foreign.megatron import carried
from zero1ckpt.foreign.megatron.entries import Chunks
from zero1ckpt.foreign.megatron.layout_file import LayoutGroup, read_layout, write_layout
from zero1ckpt.foreign.megatron.model import LocalParam, MegatronPart
from zero1ckpt.foreign.megatron.targets.buckets import BucketRules, laid_out
from zero1ckpt.foreign.megatron.targets.origin import OriginPart
from zero1ckpt.model.catalog import Catalog, Extents, TablePlacement
from zero1ckpt.model.state import MAIN_PARAM, ParamSpec, PartState, SlotSpec


def _rows(group: int, high: bool, dp_size: int = 2) -> list[dict[str, object]]:
    params = [ParamSpec(name, (n,), "bfloat16") for name, n in (("a", 700), ("b", 60_000), ("c", 500))]
    buffer = layout_params(params, LayoutRules(dp_size, 1000, pad_for_high_nccl_busbw=high)).buffers[0]
    placed = [
        {"name": p.name, "start": p.world.start, "end": p.world.end, "shape": [p.world.size]} for p in buffer.placements
    ]
    buckets = [{"offset": b.offset, "numel": b.numel, "numel_unpadded": b.numel_unpadded} for b in buffer.buckets]
    kind = {"param_dtype": "bfloat16", "grad_dtype": "float32", "expert": False}
    own = {"group": group, "chained": None, "dp_size": dp_size, "pipeline_rank": 0}
    return [own | {"buffers": [kind | {"buckets": buckets, "params": placed}]}]


def _group(tmp_path: Path, high: bool) -> LayoutGroup:
    write_layout(tmp_path / "layout.json", [_rows(0, high)])
    (group,) = read_layout(tmp_path / "layout.json").groups
    return group


def _part(group: LayoutGroup) -> MegatronPart:
    locals_ = tuple(replace(local, param=i) for i, local in enumerate(group.local_params))
    params = tuple(ParamSpec(local.name, (local.numel,), "bfloat16") for local in locals_)
    state = PartState(params, (SlotSpec(MAIN_PARAM, "float32"),))
    catalog = Catalog("", "", "", state, None, TablePlacement((), (), Extents.concatenate([]), 1))
    return MegatronPart("", catalog, locals_, group.layout, group=0, pipeline_rank=0)


@pytest.mark.parametrize("high", [False, True])
def test_padding_for_high_bus_bandwidth_is_seen_kept_and_written(tmp_path: Path, high: bool) -> None:
    """From a layout file, over a native checkpoint, to a target in buckets of the same padded sizes."""
    group = _group(tmp_path, high)
    assert group.layout.pad_for_high_nccl_busbw is high
    part = _part(group)
    shown = shown_layout(part)
    assert shown is not None and shown.rules.pad_for_high_nccl_busbw is high
    kept = carried._carried_part(part)
    whole = carried.Carried(carried.SCHEMA, "", "", "file", 0, None, (kept,), (), (), ())
    back = carried.decode(carried.encode(whole)).part("")
    assert back.layout == part.layout
    origin = OriginPart("", part.catalog, None, back.local_params, back.layout, None, 0, 0)  # type: ignore[arg-type]
    assert back.layout is not None
    (made,) = laid_out(origin, back.layout, BucketRules(None, None, True, 2), 2)
    assert made.bucket_numel.tolist() == [bucket.numel for bucket in group.buffers[0].buckets]
    assert (made.bucket_numel % 65536 == 0).all() == high


def test_files_that_do_not_say_so_are_not_padded_for_it(tmp_path: Path) -> None:
    part = carried._carried_part(_part(_group(tmp_path, False)))
    whole = carried.Carried(carried.SCHEMA, "", "", "file", 0, None, (part,), (), (), ())
    assert b"busbw" not in carried.encode(whole)
    made = carried.decode(carried.encode(whole)).part("").layout
    assert made is not None and not made.pad_for_high_nccl_busbw


def test_a_layout_file_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "layout.json"
    write_layout(path, [_rows(0, False)])
    before = path.read_bytes()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OutputError, match="No space left"):
        write_layout(path, [_rows(0, True), None, _rows(1, True)])
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["layout.json"]


def test_more_chunks_are_found_in_their_files_and_old_ones_without_a_look() -> None:
    def never(chunk: int) -> tuple[str, int]:
        pytest.fail("a header was read")

    old = Chunks(np.array([4, 8]), np.array([0, 1]), never, file_of=lambda chunk: f"__{chunk}_0.distcp")
    grown, added = old.extended([("__5_0.distcp", 64)], [16])
    assert [grown.file(chunk) for chunk in range(3)] == ["__0_0.distcp", "__1_0.distcp", "__5_0.distcp"]
    assert added.tolist() == [2] and grown.place(2) == ("__5_0.distcp", 64) and grown.nbytes.tolist() == [4, 8, 16]
    unknown, _ = Chunks(np.array([4]), np.array([0]), lambda chunk: ("x.pt", 9)).extended([("y.pt", 0)], [2])
    assert [unknown.file(chunk) for chunk in range(2)] == ["x.pt", "y.pt"]


def test_a_local_param_is_kept_as_it_is() -> None:
    local = LocalParam("a", 1, 2, 3, "bfloat16", "float32", True, True)
    assert carried._local(carried._carried_local(local)) == local

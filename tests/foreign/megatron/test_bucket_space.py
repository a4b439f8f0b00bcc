"""Bucket formats against the truth: every element of every param, read through the map that was derived."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import zero1ckpt
from zero1ckpt.core.errors import UnsupportedError
from zero1ckpt.encodings.dcp_metadata import dump_metadata, parse_metadata
from zero1ckpt.foreign.megatron.model import Doubt, MegatronCheckpoint, MegatronPart
from zero1ckpt.foreign.megatron.proving import prove
from zero1ckpt.foreign.megatron.reading import describe
from zero1ckpt.foreign.megatron.weights import read_rows

from ..conftest import CORPUS, DATA
from .truth import layout_of, part_truth, ranks_by_part, stored_name

SAVES = sorted(
    (path.parent.parent.name, path.parent.name)
    for name in ("dp_reshardable*", "fully_sharded_bucket_space")
    for path in CORPUS.glob(f"megatron/*/{name}/iter_0000003")
)


def read(checkpoint: MegatronCheckpoint, part: str, name: str, slot: str) -> torch.Tensor:
    catalog = checkpoint.parts[part].catalog
    param, k = catalog.state.index[name], catalog.state.slot_index[slot]
    numel = catalog.state.params[param].numel
    out = bytearray(numel * 4)
    asked = [np.array([n], np.int64) for n in (param, k, 0, numel)]
    _, rows = catalog.placement.locate(*asked)
    read_rows(checkpoint.source, rows, memoryview(out))
    return torch.frombuffer(out, dtype=torch.float32)


@pytest.mark.skipif(CORPUS == DATA, reason="the corpus is not beside this checkout: few real checkpoints are read")
def test_all_of_the_corpus_is_read() -> None:
    assert len(SAVES) >= 15


def test_real_checkpoints_are_read() -> None:
    assert SAVES


@pytest.mark.parametrize(("case", "save"), SAVES)
def test_every_element_is_the_truth(case: str, save: str, corpus: Callable[..., Path]) -> None:
    checkpoint = prove(describe(corpus(case, save)))
    expected = ranks_by_part(corpus(case))
    assert set(checkpoint.parts) == set(expected)
    compared = 0
    for name, (rank, optimizer) in expected.items():
        part = checkpoint.parts[name]
        evidence = part.evidence
        assert evidence.proved == evidence.elements and not (evidence.ambiguous or evidence.unknown), evidence
        wanted = set()
        for param, slot, values in part_truth(corpus(case), rank, optimizer):
            assert torch.equal(read(checkpoint, name, param, slot), values), (name, param, slot)
            wanted.add(param)
            compared += len(values)
        assert wanted == {spec.name for spec in part.catalog.state.params}
    assert compared


@pytest.mark.parametrize(("case", "save"), SAVES)
def test_layout_and_order_are_the_runs_own(case: str, save: str, corpus: Callable[..., Path]) -> None:
    checkpoint = describe(corpus(case, save))
    for name, (rank, optimizer) in ranks_by_part(corpus(case)).items():
        part = checkpoint.parts[name]
        truth = layout_of(corpus(case))[rank][optimizer]["buffers"]
        assert part.layout is not None and len(part.layout.buffers) == len(truth)
        for buffer, wanted in zip(part.layout.buffers, truth, strict=True):
            assert part.layout.dp_size == wanted["dp_size"]
            assert [b.numel for b in buffer.buckets] == [b["numel"] for b in wanted["buckets"]]
            for bucket, held in zip(buffer.buckets, wanted["buckets"], strict=True):
                locals_ = [part.local_params[i] for i in buffer.params[bucket.first : bucket.last]]
                params = part.catalog.state.params
                names = [stored_name(corpus(case), rank, local)[0] for local in held["params"]]
                assert [params[local.param].name for local in locals_] == names
                starts = [wanted["param_index_map"][local][0] - held["offset"] for local in held["params"]]
                assert list(buffer.starts[bucket.first : bucket.last]) == starts


@pytest.mark.parametrize(("case", "save"), SAVES)
def test_without_content_no_tensor_is_read_and_no_name_is_wrong(
    case: str, save: str, corpus: Callable[..., Path]
) -> None:
    by_sizes, by_content = describe(corpus(case, save), content=False), describe(corpus(case, save))
    for name, part in by_sizes.parts.items():
        open_ = {*part.evidence.ambiguous, *part.evidence.unknown}
        known = names_by_place(by_content.parts[name])
        for place, param in names_by_place(part).items():
            assert param in open_ or known.get(place) == param


def names_by_place(part: MegatronPart) -> dict[tuple[int, int, int], str]:
    """(buffer, bucket, start) -> param."""
    assert part.layout is not None
    params = part.catalog.state.params
    return {
        (buffer.index, k, buffer.starts[i]): params[part.local_params[buffer.params[i]].param].name
        for buffer in part.layout.buffers
        for k, bucket in enumerate(buffer.buckets)
        for i in range(bucket.first, bucket.last)
    }


def without(path: Path, part: str, tmp_path: Path) -> Path:
    """A copy of an iteration whose metadata lacks the entries of one data-parallel group."""
    target = tmp_path / "iter_0000003"
    shutil.copytree(path, target)
    metadata = parse_metadata((path / ".metadata").read_bytes())
    left = {key: entry for key, entry in metadata.tensors.items() if f".{part}." not in key}
    objects = {key: entry for key, entry in metadata.objects.items() if f".{part}." not in key}
    (target / ".metadata").write_bytes(dump_metadata(replace(metadata, tensors=left, objects=objects)))
    return target


def test_a_group_that_is_missing_stops_a_conversion(corpus: Callable[..., Path], tmp_path: Path) -> None:
    """Half of the state was gone, and what was left passed for all of it."""
    path = without(corpus("v0161_gpt_tp2_dp2_b1", "dp_reshardable"), "dp_group_idx_1", tmp_path)
    checkpoint = describe(path)
    assert list(checkpoint.parts) == ["dp_group_idx_0"]
    assert [line for line in checkpoint.notices if isinstance(line, Doubt)] == [
        "the state of data-parallel group dp_group_idx_1 is missing"
    ]
    with pytest.raises(UnsupportedError, match="dp_group_idx_1 is missing"):
        zero1ckpt.reshard(path, tmp_path / "out", to_dp=2, format="bucket_shards")


def test_what_the_checkpoint_states_twice_is_not_guessed(corpus: Callable[..., Path]) -> None:
    """All groups of the corpus are there, and none of its checkpoints is in doubt."""
    for case, save in SAVES:
        assert not [line for line in describe(corpus(case, save)).notices if isinstance(line, Doubt)], case

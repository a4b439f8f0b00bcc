"""Files that are made to hang, crash or mislead a reader."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import zero1ckpt
from zero1ckpt.api.doctoring import diagnose
from zero1ckpt.core.errors import CorruptError, UnsupportedError
from zero1ckpt.encodings.dcp_metadata import dump_metadata, parse_metadata
from zero1ckpt.foreign.megatron.folders import whole

LAUGHS = b"\x80\x02)" + b"2\x86" * 80 + b"."
"""A tuple of two that are the same tuple of two, eighty times: its text would never end."""
NESTED = b"\x80\x02)" + b"\x85" * 1_000_000 + b"."


def copied(path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(path, tmp_path / "run" / "iter_0000003"))


@pytest.mark.parametrize("data", [LAUGHS, NESTED], ids=["laughs", "nested"])
def test_an_index_that_is_endless_or_deep_is_refused_at_once(
    data: bytes, corpus: Callable[..., Path], tmp_path: Path
) -> None:
    path = copied(corpus("v0161_toy_dp2_b2500", "dp_reshardable"), tmp_path)
    (path / ".metadata").write_bytes(data)
    with pytest.raises(CorruptError):
        zero1ckpt.open(path)


def kept(path: Path, keep: Callable[[str], bool]) -> None:
    metadata = parse_metadata((path / ".metadata").read_bytes())
    tensors = {key: entry for key, entry in metadata.tensors.items() if keep(key)}
    (path / ".metadata").write_bytes(dump_metadata(replace(metadata, tensors=tensors)))


def test_buckets_that_are_not_there(corpus: Callable[..., Path], tmp_path: Path) -> None:
    path = copied(corpus("v0161_toy_dp2_b2500", "dp_reshardable"), tmp_path)
    kept(path, lambda key: not key.startswith("optimizer."))
    with pytest.raises(UnsupportedError, match="optimizer"):
        zero1ckpt.open(path)


def test_without_weights_nothing_is_exported(corpus: Callable[..., Path], tmp_path: Path) -> None:
    """Raw stretches of buckets, with the garbage between params, went out as weights."""
    from zero1ckpt.api.exporting import plan_export

    path = copied(corpus("v0161_toy_dp2_b2500", "dp_reshardable"), tmp_path)
    kept(path, lambda key: key.startswith("optimizer."))
    with pytest.raises(UnsupportedError, match="no param of the model that is known"):
        plan_export(path)


def test_a_weight_that_is_missing_is_said(corpus: Callable[..., Path], tmp_path: Path) -> None:
    from zero1ckpt.api.exporting import plan_export

    path = copied(corpus("v0161_toy_dp2_b2500", "dp_reshardable"), tmp_path)
    kept(path, lambda key: key != "head.weight")
    assert any("weights may be missing" in line for line in plan_export(path).notices)


def test_an_empty_legacy_optimizer_is_refused(corpus: Callable[..., Path], tmp_path: Path) -> None:
    path = copied(corpus("v0161_toy_dp2_b2500", "legacy_torch"), tmp_path)
    for file in path.glob("mp_rank_*/distrib_optim.pt"):
        torch.save({}, file)
    with pytest.raises(CorruptError, match="no optimizer state"):
        zero1ckpt.open(path)


def test_a_save_without_its_index_is_not_whole(corpus: Callable[..., Path], tmp_path: Path) -> None:
    path = copied(corpus("v0161_toy_dp2_b2500", "dp_reshardable"), tmp_path)
    assert whole(path)
    (path / ".metadata").unlink()
    assert not whole(path)


@pytest.mark.parametrize("lost", ["optimizer.state.exp_avg.head.weight", "optimizer.state.param.head.weight"])
def test_a_slot_that_one_param_lacks_is_found(lost: str, tmp_path: Path, corpus: Callable[..., Path]) -> None:
    """Everything but a conversion passed over it. The copy of a damaged save serves as well: its keys are all there."""
    path = copied(corpus("v0161_toy_dp2_b2500", "fully_reshardable"), tmp_path)
    kept(path, lambda key: key != lost)
    found = zero1ckpt.verify(path)
    assert ("missing_state", "head.weight") in {(f.kind, f.param) for f in found.findings}
    assert ("missing_state", "head.weight") in {(f.kind, f.param) for f in diagnose(path).findings}


def test_unequal_steps_are_found(corpus: Callable[..., Path], tmp_path: Path) -> None:
    path = copied(corpus("v0161_toy_dp2_b2500", "dp_reshardable"), tmp_path)
    metadata = parse_metadata((path / ".metadata").read_bytes())
    left = {key: entry for key, entry in metadata.objects.items() if ".optimizer/" not in key}
    (path / ".metadata").write_bytes(dump_metadata(replace(metadata, objects=left)))
    assert "not_whole" in {f.kind for f in zero1ckpt.verify(path).findings}
    assert "not_whole" in {f.kind for f in diagnose(path).findings}


def test_parts_and_model_space_are_not_said_to_differ(corpus: Callable[..., Path], tmp_path: Path) -> None:
    """The same state in two cuts was called different; compared in one cut it is the same."""
    parts = corpus("v0161_gpt_tp2_dp2_b1", "dp_reshardable")
    zero1ckpt.reshard(parts, tmp_path / "whole", format="megatron:fully_reshardable")
    with pytest.raises(UnsupportedError, match="cannot be compared"):
        zero1ckpt.verify(tmp_path / "whole", against=parts)
    zero1ckpt.reshard(
        corpus("v0161_gpt_tp2_dp2_b1", "legacy_torch"), tmp_path / "old", format="megatron:dp_reshardable"
    )
    assert zero1ckpt.verify(tmp_path / "old", against=parts)

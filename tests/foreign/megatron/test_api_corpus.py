"""The verbs on real checkpoints, against the live optimizer's own values."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import zero1ckpt
from tests.foreign.conftest import CORPUS
from zero1ckpt.api.carrying import read_carried
from zero1ckpt.api.stored import Stored, describe
from zero1ckpt.cli.main import run
from zero1ckpt.core.errors import UnsupportedError
from zero1ckpt.foreign.megatron.carried import rebuilt_runs
from zero1ckpt.foreign.megatron.model import LocalParam
from zero1ckpt.model.catalog import Catalog

FIELDS = {"fp32_param": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
BY_KEY = ("dp_reshardable", "fully_reshardable", "fully_sharded", "dp_zero", "zarr")
"""Saves whose params go by keys of the model's tensors; the legacy ones go by names of each rank."""


def saves(*, right: bool) -> list[tuple[str, str]]:
    path = CORPUS / "megatron" / "INDEX.json"
    rows = json.loads(path.read_text()) if path.is_file() else {}
    found = [
        (case, save)
        for case, row in rows.items()
        for save, told in row["formats"].items()
        if told["stored_values_equal_truth"] is right and save.startswith(BY_KEY)
    ]
    return found or [("no corpus", "none")]


@cache
def truth_of(folder: Path) -> dict[str, torch.Tensor]:
    """Values by key of the model and field: those of the whole model, where there are such."""
    tensors = load_file(folder / "truth.safetensors")
    stacked = any(key.startswith("global/") for key in tensors)
    prefix = "global/" if stacked else "local/tp0_pp0_ep0/"
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def expected(truth: dict[str, torch.Tensor], local: LocalParam, slot: str) -> torch.Tensor:
    pieces = [truth[f"{held.key}/{FIELDS[slot]}"][held.box.slices].flatten() for held in local.boxes]
    return torch.cat(pieces)


def check_truth(stored: Stored, checkpoint: zero1ckpt.Checkpoint, truth: dict[str, torch.Tensor]) -> int:
    """Compares every element of every slot; how many."""
    assert stored.megatron is not None
    compared = 0
    for name, part in stored.megatron.parts.items():
        opened = checkpoint.parts[name]
        names = opened.names()
        covered = torch.zeros(len(names), dtype=torch.int64)
        for local in part.local_params:
            covered[local.param] += local.numel
            for slot in FIELDS:
                flat = opened.read(names[local.param], slot).flatten()[local.start : local.start + local.numel]
                assert torch.equal(flat, expected(truth, local, slot)), (name, local.name, slot)
                compared += local.numel
        sizes = [param.numel for param in opened.state.params]
        assert covered.tolist() == sizes
    return compared


@pytest.mark.parametrize(("case", "save"), saves(right=True))
def test_values_are_the_truth_here_and_in_our_formats(corpus, work, case, save):
    folder = corpus(case)
    stored, truth = describe(folder / save), truth_of(folder)
    assert check_truth(stored, zero1ckpt.open(folder / save), truth) > 0
    assert zero1ckpt.verify(folder / save, deep=True).findings == []
    made = zero1ckpt.reshard(
        folder / save, work / "a", to_dp=6, bucket_size=2000, format="bucket_shards", unproved=False
    )
    assert list(made.parts) == list(stored.catalogs)
    assert check_truth(stored, made, truth) > 0
    assert zero1ckpt.verify(work / "a", deep=True, against=folder / save).findings == []
    whole = zero1ckpt.reshard(work / "a", work / "b", format="fully_reshardable")
    assert check_truth(stored, whole, truth) > 0


@pytest.mark.parametrize(("case", "save"), saves(right=True))
def test_what_is_carried_makes_the_model_again(corpus, work, case, save):
    folder = corpus(case)
    stored = describe(folder / save)
    assert stored.megatron is not None
    made = zero1ckpt.reshard(folder / save, work / "a", to_dp=6, format="bucket_shards")
    carried = read_carried(describe(work / "a"))
    assert carried is not None
    file = work / "a" / "carried" / "entries.bin"
    data = file.read_bytes() if file.exists() else b""
    entries = stored.megatron.entries
    rebuilt = 0
    for tensor in carried.tensors:
        original = entries.tensors[tensor.key]
        chunks = {
            tuple(start): chunk
            for start, chunk in zip(original.offsets.tolist(), original.chunks.tolist(), strict=True)
        }
        assert len(chunks) == len(tensor.boxes)
        for box in tensor.boxes:
            chunk = chunks[box.start]
            wanted = bytearray(int(entries.chunks.nbytes[chunk]))
            stored.megatron.source.read_run(chunk, 0, [memoryview(wanted)])
            if box.at is not None:
                assert data[box.at : box.at + len(wanted)] == bytes(wanted)
                continue
            rebuilt += 1
            local = carried.part(box.part).local_params[box.local]
            part = made.parts[box.part]
            main = part.read(part.names()[local.param], "fp32_param").flatten()
            _, first, size = rebuilt_runs(local, box.box, box.start, box.shape)
            flat = torch.cat([main[at : at + size] for at in first.tolist()])
            cast = flat.to(getattr(torch, tensor.dtype)).view(torch.uint8).numpy().tobytes()
            assert cast == bytes(wanted), tensor.key
    assert rebuilt > 0
    assert {row.key for row in carried.objects} == {key for key in entries.objects if ".param_state/" not in key}


@pytest.mark.parametrize(("case", "save"), saves(right=False))
def test_damaged_ones_are_refused(corpus, work, case, save):
    folder = corpus(case)
    if save.startswith("zarr"):
        pytest.skip("this one was not compared, not found wrong")
    with pytest.raises(UnsupportedError, match=r"is not proved.*doctor"):
        zero1ckpt.reshard(folder / save, work / "a", to_dp=2, format="bucket_shards")
    assert not (work / "a").exists()
    assert not zero1ckpt.verify(folder / save, deep=True).ok


def show(capsys, *args: object) -> dict[str, object]:
    assert run([*map(str, args), "--json"]) == 0
    document: dict[str, object] = json.loads(capsys.readouterr().out)
    return document


def test_inspect_shows_parts_and_buckets(corpus, capsys):
    folder = corpus("v0161_gpt_moe_ep2_dp4_b1") / "dp_reshardable"
    whole = show(capsys, "inspect", folder)
    names = ["chained_0.dp_group_idx_0", "chained_1.dp_group_idx_0", "chained_1.dp_group_idx_1"]
    assert whole["format"] == "megatron:dp_reshardable" and whole["digest"] is None
    assert list(whole["parts"]) == names
    dense = whole["parts"][names[0]]
    assert dense["dp_size"] == 4 and dense["evidence"]["proved"] is None
    assert len(dense["ranks"]) == 4 and dense["buffers"][0]["buckets"][0]["params"]
    owned = sum(s["param"][1] - s["param"][0] for rank in dense["ranks"] for s in rank["shards"])
    assert owned == sum(param["numel"] for param in dense["params"])
    assert all(digest is None for param in dense["params"] for digest in param["digests"].values())
    one = show(capsys, "inspect", folder, "--group", "chained_1.dp_group_idx_1")
    assert list(one["parts"] or [""]) in ([""], [names[2]])
    assert run(["inspect", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "not proved yet" in text and "chained_1.dp_group_idx_1" in text


def test_inspect_reads_no_tensor_data(corpus, monkeypatch):
    from zero1ckpt.foreign.megatron.entries import ChunkSource

    folder = corpus("v0161_gpt_tp2_dp2_b1") / "fully_reshardable"

    def refuse(*args: object) -> None:
        raise AssertionError("tensor data was read")

    monkeypatch.setattr(ChunkSource, "read_run", refuse)
    assert run(["inspect", str(folder), "--quiet"]) == 0


@pytest.mark.parametrize("save", ["dp_reshardable", "fully_reshardable"])
def test_export_is_the_model(corpus, work, save):
    folder = corpus("v0161_gpt_tp2_dp2_b1")
    zero1ckpt.api.export(folder / save, work / "out")
    weights = load_file(work / "out" / "model.safetensors")
    assert weights and all("layers.0." in name for name in weights if ".layers." in name and "layers.1." not in name)
    for value in weights.values():
        assert value.dtype == torch.bfloat16
    truth = truth_of(folder)
    key = "decoder.layers.mlp.linear_fc1.weight"
    for layer in range(2):
        name = f"decoder.layers.{layer}.mlp.linear_fc1.weight"
        assert torch.equal(weights[name], truth[f"{key}/param"][layer].bfloat16())


def test_catalogs_of_two_formats_are_told_apart(corpus):
    folder = corpus("v0161_gpt_tp2_dp2_b1")
    found = zero1ckpt.diff(folder / "dp_reshardable", folder / "fully_reshardable")
    assert not found.ok
    (row,) = [f for f in found.others if f.kind == "other_parts"]
    assert "dp_group_idx_1" in row.message and "global shapes" in row.message


def test_every_part_is_converted_and_dp_sizes_scale_alike(corpus, work):
    folder = corpus("v0161_gpt_moe_ep2_dp4_b1") / "dp_reshardable"
    made = zero1ckpt.reshard(folder, work / "a", to_dp=8, format="bucket_shards")
    sizes = {name: part.layout.rules.dp_size for name, part in made.parts.items()}
    assert set(sizes.values()) == {8, 4}
    with pytest.raises(UnsupportedError, match="does not scale"):
        zero1ckpt.reshard(folder, work / "b", to_dp=3, format="bucket_shards")
    assert isinstance(describe(work / "a").catalogs["chained_1.dp_group_idx_0"], Catalog)

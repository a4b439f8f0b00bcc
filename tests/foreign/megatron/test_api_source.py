"""Every verb on a small Megatron checkpoint: open, verify, diff, log, export, reshard to native formats and back."""

from __future__ import annotations

import filecmp
import io
import os
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import zero1ckpt
from tests.foreign.megatron.tiny import NAMES, by_name, write_iteration, write_run
from zero1ckpt.api import export
from zero1ckpt.api.carrying import read_carried
from zero1ckpt.api.history import history
from zero1ckpt.api.stored import describe
from zero1ckpt.core.boxes import Box
from zero1ckpt.core.errors import CorruptError, MissingError, UnsupportedError, UsageError
from zero1ckpt.foreign.megatron import carried as carrying
from zero1ckpt.foreign.megatron.carried import rebuilt_runs
from zero1ckpt.foreign.megatron.model import KeyBox, LocalParam
from zero1ckpt.model.numeric import first_nonfinite

SLOTS = ("fp32_param", "exp_avg", "exp_avg_sq")


@pytest.fixture
def run(work: Path) -> Path:
    write_run(work / "run", (2, 3))
    return work / "run"


def assert_same(checkpoint: zero1ckpt.Checkpoint, values: dict[str, dict[str, torch.Tensor]]) -> None:
    for name, shape in NAMES.items():
        for slot in SLOTS:
            found = checkpoint.read(name, slot)
            assert tuple(found.shape) == shape
            assert torch.equal(found, by_name(values, name, slot)), (name, slot)


def same_tree(a: Path, b: Path) -> bool:
    files = [sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()) for root in (a, b)]
    return files[0] == files[1] and filecmp.cmpfiles(a, b, files[0], shallow=False)[0] == files[0]


def test_open(run):
    checkpoint = zero1ckpt.open(run)
    assert (checkpoint.format, checkpoint.container) == ("megatron:fully_reshardable", "torch_dist")
    assert checkpoint.path == run / "iter_0000003" and checkpoint.step == 3
    assert checkpoint.layout is None and checkpoint.digest is None
    assert set(checkpoint.slots) == set(SLOTS) and set(checkpoint.names()) == set(NAMES)
    assert list(checkpoint.parts) == [""] and checkpoint.parts[""] is checkpoint
    assert sorted(name for group in checkpoint.groups for name in group["params"]) == sorted(NAMES)
    assert checkpoint.extra["iteration"] == 3 and checkpoint.extra["opt_param_scheduler"]["num_steps"] == 12
    assert "rng_state/shard_0_1" in checkpoint.carried and "common.pt" in checkpoint.carried
    assert checkpoint.digest_of("output.weight", "exp_avg") is None
    assert_same(checkpoint, write_iteration(run.parent / "again", seed=3))


def test_a_range_reads_no_more_than_its_bytes(run, monkeypatch):
    checkpoint = zero1ckpt.open(run)
    store = describe(run).store
    asked = []
    plain = type(store).readv_into

    def counted(self, key, offset, buffers):
        asked.append(sum(len(b) for b in buffers))
        return plain(self, key, offset, buffers)

    checkpoint.read("output.weight", "exp_avg", zero1ckpt.Range(90, 100))  # headers are read once
    monkeypatch.setattr(type(store), "readv_into", counted)
    flat = checkpoint.read("output.weight", "exp_avg", zero1ckpt.Range(90, 100))
    values = write_iteration(run.parent / "again", seed=3)
    assert torch.equal(flat, values["output.weight"]["exp_avg"].flatten()[90:100])
    assert sum(asked) == 40


def test_what_is_asked_wrongly(run):
    checkpoint = zero1ckpt.open(run)
    with pytest.raises(UsageError, match="no such param"):
        checkpoint.read("nothing", "exp_avg")
    with pytest.raises(UsageError, match="no such slot"):
        checkpoint.read("output.weight", "step")


def test_the_tracker_decides(run):
    (run / "latest_checkpointed_iteration.txt").write_text("2\n")
    assert zero1ckpt.open(run).path.name == "iter_0000002"
    (run / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(MissingError, match=r"names no committed checkpoint.*iter_0000002, iter_0000003"):
        zero1ckpt.open(run)
    (run / "iter_0000003").rename(run / "release")
    (run / "latest_checkpointed_iteration.txt").write_text("release")
    assert zero1ckpt.open(run).path.name == "release"


def test_folders_that_are_none(work):
    (work / "empty").mkdir()
    with pytest.raises(MissingError, match="an empty folder"):
        zero1ckpt.open(work / "empty")
    (work / "dcp").mkdir()
    (work / "dcp" / ".metadata").write_bytes(b"x")
    with pytest.raises(MissingError, match=r"distributed\.checkpoint folder that is not Megatron's"):
        zero1ckpt.open(work / "dcp")


def test_to_native_and_back_and_forth(run, work):
    values = write_iteration(work / "again", seed=3)
    made = zero1ckpt.reshard(run, work / "a", to_dp=3, bucket_size=200, format="bucket_shards")
    assert_same(made, values)
    assert made.layout.rules.dp_size == 3 and made.layout.rules.bucket_size == 200
    assert made.carried == zero1ckpt.open(run).carried
    assert made.extra == zero1ckpt.open(run).extra
    assert zero1ckpt.verify(work / "a", deep=True).findings == []
    zero1ckpt.reshard(work / "a", work / "b", to_dp=2, bucket_size="none", format="fully_reshardable")
    assert_same(zero1ckpt.open(work / "b"), values)
    zero1ckpt.reshard(work / "b", work / "c", to_dp=3, bucket_size=200, format="bucket_shards")
    assert same_tree(work / "a", work / "c")
    zero1ckpt.reshard(run, work / "d", to_dp=3, bucket_size=200, format="bucket_shards", workers=1)
    assert same_tree(work / "a", work / "d")


def test_the_same_state_is_the_same_whatever_it_lies_in(run, work):
    zero1ckpt.reshard(run, work / "a", to_dp=2, format="bucket_shards")
    assert zero1ckpt.verify(run, against=work / "a").findings == []
    assert zero1ckpt.verify(work / "a", against=run).findings == []
    assert zero1ckpt.diff(run, run / "iter_0000003").ok
    found = zero1ckpt.diff(run / "iter_0000002", run)
    changed = {(row.kind, row.param) for row in found.tensors if row.status == "changed"}
    assert ("state", "output.weight") in changed and ("model", "output.weight") in changed
    assert not zero1ckpt.verify(run / "iter_0000002", against=work / "a").ok


def test_carried(run, work):
    zero1ckpt.reshard(run, work / "a", to_dp=2, format="bucket_shards")
    carried = read_carried(describe(work / "a"))
    assert carried is not None
    assert (carried.format, carried.container, carried.iteration) == ("megatron:fully_reshardable", "torch_dist", 3)
    assert {row.key for row in carried.tensors} == {"embedding.weight", "output.weight"} | {
        "decoder.layers.mlp.weight",
        "decoder.layers.norm.bias",
    }
    assert all(box.rebuilt for row in carried.tensors for box in row.boxes)
    data = (work / "a" / "carried" / "entries.bin").read_bytes()
    (row,) = carried.objects
    loaded = torch.load(io.BytesIO(data[row.at : row.at + row.nbytes]), weights_only=True)
    assert loaded == [{"random": [1, 2, 3]}]
    assert filecmp.cmp(work / "a" / "carried/files/common.pt", run / "iter_0000003/common.pt", shallow=False)
    assert carrying.decode(carrying.encode(carried)) == carried


def test_weights_are_rebuilt_from_main_params(run, work):
    zero1ckpt.reshard(run, work / "a", to_dp=2, format="bucket_shards")
    made = zero1ckpt.open(work / "a")
    carried = read_carried(describe(work / "a"))
    assert carried is not None
    values = write_iteration(work / "again", seed=3)
    for tensor in carried.tensors:
        for box in tensor.boxes:
            local = carried.part(box.part).local_params[box.local]
            inside, first, run_size = rebuilt_runs(local, box.box, box.start, box.shape)
            flat = made.read(made.names()[local.param], "fp32_param").flatten()
            chunk = torch.empty(int(torch.tensor(box.shape).prod()))
            for to, at in zip(inside.tolist(), first.tolist(), strict=True):
                chunk[to : to + run_size] = flat[at : at + run_size]
            where = tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))
            assert torch.equal(chunk.reshape(box.shape), values[tensor.key]["param"][where])


@given(st.data())
def test_runs_of_a_chunk_in_its_main_param(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    low = tuple(data.draw(st.integers(0, 3)) for _ in shape)
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    size = tuple(data.draw(st.integers(1, n - a)) for n, a in zip(shape, start, strict=True))
    before = data.draw(st.integers(0, 5))
    numel = int(torch.tensor(shape).prod())
    other = KeyBox("k", Box((0,), (before,)))
    home = KeyBox("k", Box(low, shape))
    local = LocalParam("p", 0, 2, before + numel, "bfloat16", "float32", boxes=(other, home))
    flat = torch.arange(2 + before + numel)
    whole = flat[2 + before :].reshape(shape)
    inside, first, run_size = rebuilt_runs(local, 1, tuple(a + b for a, b in zip(low, start, strict=True)), size)
    found = torch.cat([flat[at : at + run_size] for at in first.tolist()])
    assert inside.tolist() == [i * run_size for i in range(len(first))]
    assert torch.equal(found, whole[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))].flatten())


def test_a_map_that_the_weights_contradict_is_not_converted(work):
    wrong = torch.full((24, 8), 0.5).bfloat16()
    write_iteration(work / "iter_0000003", weights={"output.weight": wrong})
    with pytest.raises(UnsupportedError, match=r"output\.weight.*is not proved.*--unproved") as told:
        zero1ckpt.reshard(work / "iter_0000003", work / "a", to_dp=2, format="bucket_shards")
    assert told.value.exit_code == 5 and not (work / "a").exists()
    found = zero1ckpt.verify(work / "iter_0000003", deep=True).findings
    assert [(f.kind, f.param) for f in found] == [("not_the_weight", "output.weight")]
    zero1ckpt.reshard(work / "iter_0000003", work / "a", to_dp=2, format="bucket_shards", unproved=True)
    carried = read_carried(describe(work / "a"))
    assert carried is not None and carried.parts[0].evidence.unproved == ("output.weight",)
    (row,) = [row for row in carried.tensors if row.key == "output.weight"]
    data = (work / "a" / "carried" / "entries.bin").read_bytes()
    kept = b"".join(data[box.at : box.at + 12 * 8 * 2] for box in row.boxes if box.at is not None)
    assert kept == wrong.view(torch.uint8).numpy().tobytes()


def test_damage_is_found(run):
    folder = run / "iter_0000003"
    assert zero1ckpt.verify(folder).ok
    nbytes = (folder / "__0_0.distcp").stat().st_size
    os.truncate(folder / "__0_0.distcp", nbytes // 2)
    found = zero1ckpt.verify(folder).findings
    assert found and {finding.kind for finding in found} <= {"unreadable", "truncated_file"}
    assert all(finding.file == "__0_0.distcp" for finding in found)


def test_values_that_cannot_be(work):
    values = write_iteration(work / "iter_0000003")
    place = values["output.weight"]["exp_avg_sq"].numpy().tobytes()
    data = bytearray((work / "iter_0000003" / "__0_0.distcp").read_bytes())
    at = data.index(place[:384])
    data[at + 20 : at + 24] = b"\0\0\x80\xbf"  # -1.0 at element 5
    (work / "iter_0000003" / "__0_0.distcp").write_bytes(data)
    assert first_nonfinite(memoryview(place), "float32") is None
    found = zero1ckpt.verify(work / "iter_0000003", deep=True).findings
    assert [(f.kind, f.param, f.slot, f.range) for f in found] == [
        ("damaged_data", "optimizer.state.exp_avg_sq.output.weight", None, None),  # the archive's own checksum
        ("negative", "output.weight", "exp_avg_sq", (5, 6)),
    ]
    assert found[0].file == "__0_0.distcp"


def test_log(run, work):
    found = history(run)
    assert [(e.name, e.step, e.format, e.committed, e.digest, e.latest) for e in found.checkpoints] == [
        ("iter_0000002", 2, "megatron:fully_reshardable", True, None, False),
        ("iter_0000003", 3, "megatron:fully_reshardable", True, None, True),
    ]
    assert found.warnings == []
    (run / "iter_0000002" / "metadata.json").unlink()
    assert [e.committed for e in history(run).checkpoints] == [False, True]
    zero1ckpt.reshard(run, run / "native", to_dp=2, format="bucket_shards")
    assert [e.name for e in history(run).checkpoints] == ["iter_0000002", "native", "iter_0000003"]


def test_export_writes_the_weights_that_are_there(work):
    trained = torch.full((24, 8), 0.5).bfloat16()
    values = write_iteration(work / "iter_0000003", weights={"output.weight": trained})
    export(work / "iter_0000003", work / "out")
    weights = load_file(work / "out" / "model.safetensors")
    assert set(weights) == set(NAMES)
    assert torch.equal(weights["output.weight"], trained)
    name = "decoder.layers.1.mlp.weight"
    assert torch.equal(weights[name], by_name(values, name, "fp32_param").bfloat16())


def test_resume_of_a_complete_conversion(run, work):
    made: dict[str, Any] = {"to_dp": 2, "format": "bucket_shards"}
    zero1ckpt.reshard(run, work / "a", **made)
    assert zero1ckpt.reshard(run, work / "a", resume=True, **made).step == 3
    with pytest.raises(zero1ckpt.Zero1CkptError, match="not what this command makes"):
        zero1ckpt.reshard(run / "iter_0000002", work / "a", resume=True, **made)


def test_model_space_needs_a_dp_size_for_buckets(run, work):
    with pytest.raises(UsageError, match="no dp size"):
        zero1ckpt.reshard(run, work / "a", format="bucket_shards")
    zero1ckpt.reshard(run, work / "a", format="fully_reshardable", container="zarr")
    assert_same(zero1ckpt.open(work / "a"), write_iteration(work / "again", seed=3))


def test_unproved_and_layout_are_for_megatron(run, work):
    zero1ckpt.reshard(run, work / "a", to_dp=2, format="bucket_shards")
    with pytest.raises(UsageError, match="--unproved is for Megatron"):
        zero1ckpt.reshard(work / "a", work / "b", to_dp=3, unproved=True)
    with pytest.raises(UsageError, match="layout file is for Megatron"):
        zero1ckpt.reshard(work / "a", work / "b", to_dp=3, layout="x.json")


def test_damaged_carried_files_are_found(run, work):
    zero1ckpt.reshard(run, work / "a", to_dp=2, format="bucket_shards")
    for name in ("carried/entries.bin", "carried/files/common.pt"):
        data = bytearray((work / "a" / name).read_bytes())
        data[100] ^= 1
        (work / "a" / name).write_bytes(data)
    found = zero1ckpt.verify(work / "a", deep=True).findings
    assert {f.file for f in found} == {"carried/entries.bin", "carried/files/common.pt"}
    with pytest.raises(zero1ckpt.Zero1CkptError, match="does not match its digest"):
        zero1ckpt.reshard(work / "a", work / "b", to_dp=3)


def test_archives_without_checksums_are_not_damaged(work):
    write_iteration(work / "iter_0000003", crc32=False)
    found = zero1ckpt.verify(work / "iter_0000003", deep=True)
    assert found.findings == []


def test_damaged_data_is_not_converted(run, work):
    """The map's proof does not read moments: the archives' own checksums say that one was damaged."""
    values = write_iteration(work / "again", seed=3)
    place = values["output.weight"]["exp_avg"].numpy().tobytes()[:384]
    file = run / "iter_0000003" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[data.index(place) + 100] ^= 4
    file.write_bytes(data)
    with pytest.raises(CorruptError, match=r"__0_0\.distcp.*exp_avg\.output\.weight.*checksum.*--no-verify"):
        zero1ckpt.reshard(run, work / "a", to_dp=2, format="bucket_shards")
    assert not (work / "a").exists()
    zero1ckpt.reshard(run, work / "a", to_dp=2, format="bucket_shards", verify=False)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_no_damage_ends_in_anything_but_an_error_of_ours(seed):
    random = Random(seed)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as root:
        folder = Path(root) / "iter_0000003"
        write_iteration(folder)
        file = folder / random.choice((".metadata", "common.pt", "metadata.json", "__0_0.distcp"))
        data = bytearray(file.read_bytes())
        for _ in range(random.randint(1, 4)):
            data[random.randrange(len(data))] = random.randrange(256)
        file.write_bytes(data[: random.choice((len(data), random.randrange(len(data))))])
        for verb in (
            lambda: zero1ckpt.verify(folder, deep=True),
            lambda: zero1ckpt.reshard(folder, Path(root) / "a", to_dp=2, format="bucket_shards"),
            lambda: history(Path(root)),
        ):
            try:
                verb()
            except zero1ckpt.Zero1CkptError as error:
                assert "\n" not in str(error)

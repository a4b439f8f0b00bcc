"""The documents of ``--json``: their keys, and that what they say of the layout is so."""

import json
import shutil

import numpy as np
import pytest
from msgspec import structs

from zero1ckpt.api.stored import describe
from zero1ckpt.model.manifest import FileEntry, encode_manifest, whole_digest
from zero1ckpt.storage.staging import Staging, find_leftovers

from .conftest import SHAPES, flip, write_checkpoint

KEYS = {
    *("schema", "path", "format", "container", "step", "dp_size", "bucket_size", "digest", "total_bytes", "slots"),
    *("slot_dtypes", "groups", "params", "buffers", "ranks", "files", "parts"),
}
SHARD = {"name", "buffer", "bucket", "gbuf_world", "gbuf_world_in_bucket", "gbuf_local", "param"}


@pytest.fixture
def document(cli, ckpt):
    return cli("inspect", ckpt, "--json").document


def test_inspect_has_the_keys_of_the_contract(document, ckpt):
    assert set(document) == KEYS
    assert document["schema"] == "zero1ckpt.inspect/1"
    assert (document["step"], document["dp_size"], document["bucket_size"], document["parts"]) == (7, 4, 300, {})
    assert document["path"] == str(ckpt)
    assert document["slots"] == ["fp32_param", "exp_avg", "exp_avg_sq", "step"]
    assert document["slot_dtypes"] == dict.fromkeys(document["slots"], "float32")
    for param in document["params"]:
        assert set(param) == {"name", "shape", "dtype", "numel", "group", "digests"}
        assert set(param["digests"]) == {"fp32_param", "exp_avg", "exp_avg_sq"}
    for buffer in document["buffers"]:
        assert set(buffer) == {"param_dtype", "grad_dtype", "numel", "numel_unpadded", "buckets"}
        for bucket in buffer["buckets"]:
            assert set(bucket) == {"index", "offset", "numel", "numel_unpadded", "params"}
            assert all(set(param) == {"name", "range"} for param in bucket["params"])
    for rank in document["ranks"]:
        assert set(rank) == {"rank", "bytes", "shards"}
        assert all(set(shard) == SHARD for shard in rank["shards"])
    assert all(set(file) == {"path", "bytes"} for file in document["files"])


def test_inspect_names_every_param_and_group(document):
    assert [param["name"] for param in document["params"]] == list(SHAPES)
    assert [tuple(param["shape"]) for param in document["params"]] == list(SHAPES.values())
    assert {param["dtype"] for param in document["params"]} == {"bfloat16", "float32"}
    decay, rest = document["groups"]
    assert decay["betas"] == [0.9, 0.95] and decay["weight_decay"] == 0.1 and "wte.weight" in decay["params"]
    assert rest["eps"] == "inf" and "blocks.0.gate" in rest["params"]


def test_inspect_lists_every_file(document, ckpt):
    assert {file["path"]: file["bytes"] for file in document["files"]} == {
        path.name: path.stat().st_size for path in ckpt.iterdir()
    }
    assert document["total_bytes"] == sum(path.stat().st_size for path in ckpt.iterdir())
    for rank in document["ranks"]:
        assert rank["bytes"] == (ckpt / f"rank-{rank['rank']:05d}-of-00004.safetensors").stat().st_size


def test_every_element_has_one_owner_and_the_four_views_agree(document):
    owned = {name: np.zeros(int(np.prod(shape)), int) for name, shape in SHAPES.items()}
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1, 2, 3]
    for rank in document["ranks"]:
        for shard in rank["shards"]:
            bucket = document["buffers"][shard["buffer"]]["buckets"][shard["bucket"]]
            place = {param["name"]: param["range"] for param in bucket["params"]}[shard["name"]]
            start, end = shard["param"]
            owned[shard["name"]][start:end] += 1
            assert shard["gbuf_world"] == [place[0] + start, place[0] + end]
            assert shard["gbuf_world_in_bucket"] == [x - bucket["offset"] for x in shard["gbuf_world"]]
            shard_start = rank["rank"] * bucket["numel"] // 4
            assert shard["gbuf_local"] == [x - shard_start for x in shard["gbuf_world_in_bucket"]]
    assert all((count == 1).all() for count in owned.values())


def test_inspect_is_the_same_for_one_rank_and_for_all(cli, ckpt, document):
    for rank in range(4):
        alone = cli("inspect", ckpt, "--json", "--rank", rank).document
        assert alone["ranks"] == [document["ranks"][rank]]
        assert [file["path"] for file in alone["files"]] == [f"rank-{rank:05d}-of-00004.safetensors"]
        assert alone["total_bytes"] == document["total_bytes"]
        names = {shard["name"] for shard in document["ranks"][rank]["shards"]}
        assert {param["name"] for param in alone["params"]} == names


def test_more_ranks_than_are_made_one_by_one(cli, work):
    write_checkpoint(work / "wide", dp_size=37)
    document = cli("inspect", work / "wide", "--json").document
    assert len(document["ranks"]) == 37
    for rank in (0, 17, 36):
        assert cli("inspect", work / "wide", "--json", "--rank", rank).document["ranks"] == [document["ranks"][rank]]


def test_narrowed_to_a_param(cli, ckpt, document):
    narrowed = cli("inspect", ckpt, "--json", "--param", "wte.weight").document
    assert [param["name"] for param in narrowed["params"]] == ["wte.weight"]
    assert [group["params"] for group in narrowed["groups"]] == [["wte.weight"]]
    expected = [
        {**rank, "shards": shards}
        for rank in document["ranks"]
        if (shards := [shard for shard in rank["shards"] if shard["name"] == "wte.weight"])
    ]
    assert narrowed["ranks"] == expected
    assert len(narrowed["buffers"]) == len(document["buffers"])  # so that an index means the same


def test_narrowed_by_pattern_bucket_and_group(cli, ckpt, document):
    names = {param["name"] for param in cli("inspect", ckpt, "--json", "--param", "*.mlp.*").document["params"]}
    assert names == {"blocks.0.mlp.weight", "blocks.1.mlp.weight"}
    for group in (0, 1):
        found = cli("inspect", ckpt, "--json", "--group", group).document
        assert found["groups"] == [document["groups"][group]]
        assert {param["name"] for param in found["params"]} == set(document["groups"][group]["params"])
    found = cli("inspect", ckpt, "--json", "--bucket", "0.1").document
    assert found["buffers"][0]["buckets"] == [document["buffers"][0]["buckets"][1]]
    assert found["buffers"][1]["buckets"] == []


def test_one_bucket_a_buffer_is_null(cli, work):
    write_checkpoint(work / "one", bucket_size=None)
    assert cli("inspect", work / "one", "--json").document["bucket_size"] is None


def make_parts(work):
    """A checkpoint of two parts, put together from two of one part each."""
    files, parts = [], []
    (work / "both").mkdir()
    for name, dp in (("gen", 2), ("dis", 3)):
        write_checkpoint(work / name, dp_size=dp, extra=None, step=dp)
        stored = describe(work / name)
        part = stored.manifest.parts[0]
        parts.append(structs.replace(part, name=name))
        (work / "both" / f"part-{name}").mkdir()
        for entry in stored.manifest.files:
            files.append(FileEntry(f"part-{name}/{entry.path}", entry.bytes, entry.digest))
            shutil.copy(work / name / entry.path, work / "both" / f"part-{name}" / entry.path)
    manifest = structs.replace(stored.manifest, parts=parts, files=files, digest=whole_digest(parts))
    (work / "both" / "manifest.json").write_bytes(encode_manifest(manifest))
    return work / "both"


def test_parts_stand_under_their_names(cli, work):
    path = make_parts(work)
    document = cli("inspect", path, "--json").document
    assert set(document) == KEYS and list(document["parts"]) == ["gen", "dis"]
    assert document["params"] == document["ranks"] == document["buffers"] == document["groups"] == []
    assert document["step"] is document["dp_size"] is document["bucket_size"] is None
    for name, dp in (("gen", 2), ("dis", 3)):
        part = document["parts"][name]
        alone = cli("inspect", work / name, "--json").document
        assert set(part) == KEYS and part["dp_size"] == dp == part["step"]
        for key in ("params", "groups", "buffers", "ranks", "digest"):
            assert part[key] == alone[key], key
    text = cli("inspect", path).out
    assert "Part gen" in text and "Part dis" in text
    narrowed = cli("inspect", path, "--json", "--rank", "2").document
    assert list(narrowed["parts"]) == ["dis"]
    assert "gen" in cli("reshard", path, work / "out", "--to-dp", "6", "--dry-run").out


def test_reshard(cli, ckpt, work):
    args = ("reshard", ckpt, work / "out", "--from-dp", 4, "--to-dp", 2, "--bucket-size", "none", "--json")
    plan = cli(*args, "--dry-run").document
    assert not (work / "out").exists()
    document = cli(*args).document
    assert set(document) == {
        *("schema", "src", "dst", "format", "container", "from_dp", "to_dp", "from_bucket_size", "bucket_size"),
        *("digest", "bytes_read", "bytes_written", "reads", "writes", "files", "peak_memory", "verified", "dry_run"),
        "parts",
    }
    assert plan == {**document, "dry_run": True}
    assert document["schema"] == "zero1ckpt.reshard/1"
    assert (document["from_dp"], document["to_dp"]) == (4, 2)
    assert (document["from_bucket_size"], document["bucket_size"], document["files"]) == (300, None, 2)
    found = cli("inspect", work / "out", "--json").document
    assert (found["dp_size"], found["bucket_size"], found["digest"]) == (2, None, document["digest"])


def test_convert_keeps_the_dp_size(cli, ckpt, work):
    document = cli("convert", ckpt, work / "out", "--to", "bucket_shards", "--json").document
    assert document["schema"] == "zero1ckpt.convert/1" and document["to_dp"] == 4
    for path in ckpt.iterdir():
        assert (work / "out" / path.name).read_bytes() == path.read_bytes()


def test_verify(cli, ckpt, work):
    keys = {"schema", "path", "against", "deep", "ok", "findings", "notices"}
    document = cli("verify", ckpt, "--deep", "--json").document
    assert set(document) == keys and document["ok"] is True and document["findings"] == document["notices"] == []
    (ckpt / "notes.txt").write_text("mine")
    document = cli("verify", ckpt, "--json").document
    assert document["ok"] is True and [notice["file"] for notice in document["notices"]] == ["notes.txt"]
    flip(ckpt / "rank-00001-of-00004.safetensors", -1500)
    result = cli("verify", ckpt, "--deep", "--json")
    assert result.code == 1 and result.document["ok"] is False
    for finding in result.document["findings"]:
        assert set(finding) == {"kind", "part", "param", "slot", "range", "file", "message"}
    assert result.document["findings"][0]["file"] == "rank-00001-of-00004.safetensors"


def test_verify_against(cli, ckpt, work):
    assert cli("reshard", ckpt, work / "same", "--to-dp", "3", "--quiet").out == ""
    assert cli("verify", ckpt, "--against", work / "same", "--json").document["ok"] is True
    write_checkpoint(work / "other", seed=1)
    result = cli("verify", ckpt, "--against", work / "other", "--json")
    assert result.code == 1
    assert {finding["kind"] for finding in result.document["findings"]} == {"different_values"}


def test_clean(cli, ckpt, work):
    Staging(work / "dead", {"command": "write"}).leave()
    live = Staging(work / "live", {"command": "write"})
    wanted = {str(path) for leftover in find_leftovers(work) if leftover.dst.name == "dead" for path in leftover.paths}
    dry = cli("clean", work, "--dry-run", "--json").document
    assert set(dry) == {"schema", "path", "removed", "kept", "dry_run"}
    assert set(dry["removed"]) == wanted and dry["dry_run"] is True
    document = cli("clean", work, "--json").document
    assert set(document["removed"]) == wanted and len(document["kept"]) == 2
    assert document["schema"] == "zero1ckpt.clean/1"
    live.abandon()
    assert cli("clean", work, "--json").document["removed"] == []
    assert json.dumps(document)

"""Megatron checkpoints on the command line: what is shown, exit codes, and one line for each failure."""

import os

import pytest
import torch

from tests.foreign.megatron.tiny import write_iteration, write_run


@pytest.fixture
def run(work):
    write_run(work / "run", (2, 3))
    return work / "run"


def test_inspect(cli, run):
    result = cli("inspect", run)
    assert result.code == 0 and "megatron:fully_reshardable in torch_dist" in result.out
    assert "not proved yet" in result.out and "decoder.layers.1.mlp.weight" in result.out


def test_inspect_json(cli, run):
    found = cli("inspect", run, "--json").document
    assert found["digest"] is None and found["dp_size"] is None and found["iteration"] == 3
    assert found["evidence"] == {
        "by": "names",
        "elements": sum(param["numel"] for param in found["params"]),
        "proved": None,
        "ambiguous": [],
        "unproved": [],
        "unknown": [],
    }
    assert {path["path"] for path in found["files"]} == {"__0_0.distcp", ".metadata", "common.pt", "metadata.json"}
    one = cli("inspect", run, "--param", "*.norm.bias", "--json").document
    assert [param["name"] for param in one["params"]] == ["decoder.layers.0.norm.bias", "decoder.layers.1.norm.bias"]


def test_groups_by_number_or_part(cli, run):
    assert cli("inspect", run, "--group", "1").code == 0
    result = cli("inspect", run, "--group", "dp_group_idx_7")
    assert result.code == 2 and "dp_group_idx_7" in result.err and "number of a group" in result.err


def test_verify_and_log(cli, run):
    result = cli("verify", run, "--deep")
    assert result.code == 0 and "structure, sizes and all data hold" in result.out
    found = cli("log", run, "--json").document
    assert [(e["step"], e["committed"], e["digest"], e["latest"]) for e in found["checkpoints"]] == [
        (2, True, None, False),
        (3, True, None, True),
    ]


def test_convert_verify_diff(cli, run, work):
    result = cli("convert", run, work / "a", "--to", "bucket_shards", "--to-dp", "2")
    assert result.code == 0 and "by the model's weights" in result.out
    assert cli("verify", work / "a", "--against", run).code == 0
    assert cli("diff", run, work / "a").code == 0
    result = cli("diff", run / "iter_0000002", work / "a")
    assert result.code == 1 and "the two differ" in result.err
    document = cli(
        "reshard", run, work / "b", "--to-dp", "2", "--format", "bucket_shards", "--dry-run", "--json"
    ).document
    assert document["digest"] is None and document["dry_run"] and not (work / "b").exists()


def test_what_is_not_proved(cli, work):
    write_iteration(work / "iter_0000003", weights={"output.weight": torch.ones(24, 8).bfloat16()})
    arguments = ["convert", work / "iter_0000003", work / "a", "--to", "bucket_shards", "--to-dp", "2"]
    result = cli(*arguments)
    assert result.code == 5 and "output.weight" in result.err and "--unproved" in result.err
    assert result.err.count("\n") == 1 and not (work / "a").exists()
    result = cli("verify", work / "iter_0000003", "--deep")
    assert result.code == 1 and "not_the_weight" in result.err
    result = cli(*arguments, "--unproved")
    assert result.code == 0 and "--unproved" in result.out


def test_missing_and_damaged(cli, run):
    folder = run / "iter_0000003"
    metadata = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(metadata[: len(metadata) // 2])
    assert cli("inspect", run).code == 4
    (folder / ".metadata").write_bytes(metadata)
    os.rename(folder / "__0_0.distcp", folder / "gone")
    result = cli("inspect", run)
    assert result.code == 3 and "__0_0.distcp" in result.err
    os.rename(folder / "gone", folder / "__0_0.distcp")
    (folder / "common.pt").write_bytes(b"nothing")
    result = cli("inspect", run)
    assert result.code == 4 and "common.pt" in result.err
    os.unlink(folder / "common.pt")
    assert cli("inspect", run).code == 3


def test_pointers_that_name_nothing(cli, run, work):
    (run / "latest_checkpointed_iteration.txt").write_text("9")
    result = cli("inspect", run)
    assert result.code == 3 and "iter_0000003" in result.err and "9" in result.err
    os.unlink(run / "latest_checkpointed_iteration.txt")
    result = cli("inspect", run)
    assert result.code == 3 and "iter_0000003" in result.err


def test_options_that_do_not_apply(cli, run, work, ckpt):
    assert cli("convert", run, work / "a", "--to", "bucket_shards").code == 2
    assert cli("inspect", ckpt, "--layout", work / "x.json").code == 2
    result = cli("convert", run, work / "a", "--to", "bucket_shards", "--to-dp", "2", "--from-dp", "4")
    assert result.code == 5 and "another dp size" in result.err
    (work / "full").mkdir()
    (work / "full" / "x").write_text("x")
    assert cli("convert", run, work / "full", "--to", "bucket_shards", "--to-dp", "2").code == 6


def test_a_layout_file_that_is_not_there(cli, run, work):
    result = cli("inspect", run, "--layout", work / "x.json")
    assert result.code == 3 and "x.json" in result.err

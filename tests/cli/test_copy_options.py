"""What ``reshard`` and ``convert`` let one choose of a format, and what they keep of the source."""

import json
import os

import pytest

from .conftest import write_checkpoint


def manifest(path):
    return json.loads((path / "manifest.json").read_text())


def shards(path):
    return sorted(name for name in os.listdir(path) if name.startswith("optimizer-"))


def test_shard_size_is_chosen_and_kept(cli, ckpt, work):
    args = ("--to", "fully_reshardable", "--shard-size", "2KB")
    assert cli("convert", ckpt, work / "whole", *args).code == 0
    assert len(shards(work / "whole")) > 2 and manifest(work / "whole")["options"]["shard_bytes"] == 2000
    assert cli("convert", work / "whole", work / "again", "--to", "fully_reshardable").code == 0
    assert shards(work / "again") == shards(work / "whole")
    assert cli("convert", work / "whole", work / "one", "--to", "fully_reshardable", "--shard-size", "1GB").code == 0
    assert len(shards(work / "one")) == 1


@pytest.mark.parametrize("option", [("--shard-size", "1MB"), ("--chunk-size", "1MB"), ("--compression", "zstd")])
def test_an_option_that_does_not_apply_is_named(cli, ckpt, work, option):
    result = cli("reshard", ckpt, work / "out", "--to-dp", "2", *option)
    assert result.code == 2 and option[0] in result.err and "bucket_shards" in result.err
    assert not (work / "out").exists()


def test_convert_back_needs_a_dp_size(cli, ckpt, work):
    assert cli("convert", ckpt, work / "whole", "--to", "fully_reshardable", "--json").document["to_dp"] is None
    result = cli("convert", work / "whole", work / "back", "--to", "bucket_shards")
    assert result.code == 2 and "--to-dp" in result.err
    args = ("--to", "bucket_shards", "--to-dp", "4", "--bucket-size", "300")
    assert cli("convert", work / "whole", work / "back", *args).code == 0
    for path in ckpt.iterdir():
        assert (work / "back" / path.name).read_bytes() == path.read_bytes()


def test_the_hint_names_the_option(cli, ckpt, work):
    write_checkpoint(work / "out")
    result = cli("reshard", ckpt, work / "out", "--to-dp", "2")
    assert result.code == 6 and "pass --overwrite" in result.err


def test_no_compression_can_be_asked_for(cli, ckpt, work):
    to_zarr = ("--to", "fully_reshardable", "--container", "zarr")
    assert cli("convert", ckpt, work / "none", *to_zarr, "--compression", "none").code == 0
    assert cli("convert", ckpt, work / "zstd", *to_zarr, "--compression", "zstd").code == 0
    assert cli("convert", work / "zstd", work / "plain", *to_zarr, "--compression", "none").code == 0
    assert "compression" not in manifest(work / "plain").get("options", {})
    assert manifest(work / "plain")["files"] == manifest(work / "none")["files"]

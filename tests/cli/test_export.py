"""``zero1ckpt export``: its document, its text and its exit codes."""

import os

import pytest
from safetensors.torch import load_file

KEYS = {"schema", "path", "out", "dtype", "digest", "bytes", "files", "tensors", "tied", "notices"}


def test_the_document(cli, ckpt, work):
    args = ("--shard-size", "500B", "--tied", "lm_head.weight=wte.weight")
    document = cli("export", ckpt, work / "out", *args, "--json").document
    assert set(document) == KEYS and document["schema"] == "zero1ckpt.export/1" and document["dtype"] is None
    assert document["tied"] == {"lm_head.weight": "wte.weight"}
    assert len(document["files"]) > 2
    for file in document["files"]:
        assert os.path.getsize(work / "out" / file["path"]) == file["bytes"]
        assert len(load_file(work / "out" / file["path"])) == file["tensors"]
    assert document["bytes"] == sum(
        tensor.nbytes for file in document["files"] for tensor in load_file(work / "out" / file["path"]).values()
    )
    row = next(row for row in document["tensors"] if row["name"] == "wte.weight")
    assert set(row) == {"name", "shape", "dtype", "stored_dtype", "kind", "file"}
    assert (row["dtype"], row["stored_dtype"], row["kind"]) == ("bfloat16", "float32", "param")


def test_the_text(cli, ckpt, work):
    text = cli("export", ckpt, work / "out", "--dtype", "fp16").out
    assert (
        "8 params" in text and "float32 rounded to float16" in text and "note: the checkpoint holds no frozen" in text
    )
    assert cli("export", ckpt, work / "quiet", "--quiet").out == ""


@pytest.mark.parametrize(
    ("args", "code", "word"),
    [
        (("--dtype", "int8"), 2, "int8"),
        (("--part", "gen"), 2, "gen"),
        (("--tied", "x"), 2, "--tied"),
        (("--tied", "x=nowhere"), 2, "nowhere"),
        (("--shard-size", "0"), 2, "shard size"),
    ],
)
def test_refusals(cli, ckpt, work, args, code, word):
    result = cli("export", ckpt, work / "out", *args)
    assert result.code == code and word in result.err and not (work / "out").exists()


def test_an_existing_folder_is_refused_without_a_hint_that_does_not_help(cli, ckpt, work):
    assert cli("export", ckpt, work / "out").code == 0
    result = cli("export", ckpt, work / "out")
    assert result.code == 6 and "overwrite" not in result.err


def test_an_interrupt_leaves_nothing(cli, ckpt, work, monkeypatch):
    def interrupt(*args, **keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr("zero1ckpt.api.exporting.cast_bits", interrupt)
    assert cli("export", ckpt, work / "out").code == 130
    assert os.listdir(work) == ["step-7"]

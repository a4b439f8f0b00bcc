"""``zero1ckpt log``: its document and its text."""

from .conftest import write_checkpoint

KEYS = {
    *("path", "name", "step", "bytes", "format", "container", "dp_size", "committed", "digest", "latest", "note"),
}


def test_the_document(cli, work):
    for step in (7, 8):
        write_checkpoint(work / f"step-{step}", step=step)
    (work / "latest").write_text("step-8")
    document = cli("log", work, "--json").document
    assert set(document) == {"schema", "path", "pointer", "checkpoints", "warnings"}
    assert document["schema"] == "zero1ckpt.log/1" and document["path"] == str(work)
    first, last = document["checkpoints"]
    assert set(first) == set(last) == KEYS
    assert (first["name"], first["step"], first["latest"], last["latest"]) == ("step-7", 7, False, True)
    assert first["path"] == str(work / "step-7") and first["digest"] == last["digest"]
    assert len(document["warnings"]) == 1 and "identical state" in document["warnings"][0]


def test_the_text(cli, work):
    write_checkpoint(work / "step-7")
    text = cli("log", work).out
    assert "1 checkpoint" in text and "bucket_shards in safetensors" in text and "yes" in text
    assert cli("log", work, "--quiet").out == ""
    (work / "step-7" / "manifest.json").unlink()
    assert "not committed" in cli("log", work).out


def test_nothing(cli, work):
    assert cli("log", work).code == 3
    assert cli("log", work / "nowhere").code == 3

"""``zero1ckpt diff``: its document, its text and its exit codes."""

import json

import torch

import zero1ckpt

from .conftest import flip, make_state, write_checkpoint

KEYS = {"schema", "a", "b", "ok", "summary", "findings", "notices", "tensors", "values", "bytes_read"}
SIDE = {"path", "format", "container", "dp_size", "step", "digest"}
TENSOR = {
    *("kind", "part", "param", "slot", "status", "dtype", "shape", "changed", "share", "max_abs", "max_ulp", "nan"),
    *("first", "first_index", "first_values"),
}
FINDING = {"kind", "part", "param", "slot", "range", "file", "message"}


def test_equal(cli, ckpt, work):
    zero1ckpt.reshard(ckpt, work / "whole", format="fully_reshardable")
    document = cli("diff", ckpt, work / "whole", "--json").document
    assert set(document) == KEYS and set(document["a"]) == SIDE
    assert document["schema"] == "zero1ckpt.diff/1" and document["ok"] is True
    assert document["findings"] == document["notices"] == document["values"] == []
    assert document["summary"] == {"equal": 24, "changed": 0, "missing": 0, "added": 0}
    assert document["bytes_read"] == 0 and document["b"]["dp_size"] is None
    assert all(set(row) == TENSOR and row["share"] == 0 for row in document["tensors"])
    assert "24 equal" in cli("diff", ckpt, work / "whole").out
    assert cli("diff", ckpt, work / "whole", "--quiet").out == ""


def test_different(cli, ckpt, work):
    state = make_state()
    state["wte.weight"]["exp_avg"][3, 2] = float("inf")
    write_checkpoint(work / "other")  # the same
    zero1ckpt.write(work / "new", state, dp_size=3, step=8)
    result = cli("diff", ckpt, work / "new", "--json")
    document = result.document
    assert result.code == 1 and document["ok"] is False and "step is 7 in one and 8 in the other" in result.err
    assert all(set(finding) == FINDING for finding in document["findings"])
    (row,) = [row for row in document["tensors"] if row["status"] == "changed" and row["kind"] == "state"]
    assert (row["param"], row["slot"], row["changed"], row["share"]) == ("wte.weight", "exp_avg", 1, 1 / 320)
    assert (row["first"], row["first_index"], row["max_abs"]) == (26, [3, 2], "inf")
    assert row["first_values"][1] == "inf" and row["max_ulp"] > 0 and row["nan"] == 0
    assert {value["kind"] for value in document["values"]} == {"different_groups", "different_extra"}
    text = cli("diff", ckpt, work / "new").out
    assert "0.312 %" in text and "[3, 2]" in text and "1 changed" in text
    assert cli("diff", ckpt, work / "other").code == 0
    assert json.dumps(document)


def test_errors(cli, ckpt, work):
    assert cli("diff", ckpt, work / "nowhere").code == 3
    state = make_state()
    state["wte.weight"]["exp_avg"] += 1
    zero1ckpt.write(work / "new", state, dp_size=1, bucket_size="none")
    flip(work / "new" / "manifest.json", 40)
    assert cli("diff", ckpt, work / "new").code == 4


def test_options(cli, ckpt, work):
    state = {name: {slot: t + 1 for slot, t in slots.items()} for name, slots in make_state().items()}
    zero1ckpt.write(work / "new", state, dp_size=2)
    whole = cli("diff", ckpt, work / "new", "--json").document
    small = cli("diff", ckpt, work / "new", "--json", "--workers", 3, "--memory-limit", "192KiB").document
    assert small == whole
    assert cli("diff", ckpt, work / "new", "--memory-limit", "1KB").code == 2


def test_names_cannot_move_the_cursor(cli, work):
    for name, value in (("a", 1.0), ("b", 2.0)):
        zero1ckpt.write(work / name, {"w\x1b[2J": {"fp32_param": torch.full((3,), value)}}, dp_size=1)
    assert "\x1b" not in cli("diff", work / "a", work / "b").out

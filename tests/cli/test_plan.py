"""``zero1ckpt plan``: its document and its text."""

import json

import pytest

CHOICE = {
    *("name", "params", "grads", "main_params", "states", "temporary_main_grads", "optimizer", "total", "peak"),
    *("bytes_per_param", "wire_bytes", "messages", "fits"),
}


def test_the_document(cli):
    args = ("plan", "--params", "4.375B", "--dp", 8, "--param-dtype", "bf16", "--grad-dtype", "bf16")
    document = cli(*args, "--json", "--memory", "24GB").document
    assert set(document) == {
        *("schema", "params", "dp_size", "bucket_size", "buffers", "main_dtype", "state_dtypes", "padding"),
        *("choices", "memory", "suits", "dp_needed"),
    }
    assert document["schema"] == "zero1ckpt.plan/1" and document["params"] == 4_375_000_000
    assert [choice["name"] for choice in document["choices"]] == ["ddp", "zero-1", "zero-2", "zero-3"]
    assert all(set(choice) == CHOICE for choice in document["choices"])
    assert [choice["fits"] for choice in document["choices"]] == [False, False, True, True]
    assert document["suits"] == "zero-2" and document["padding"] is None
    text = cli(*args, "--memory", "24GB").out
    assert "70 GB" in text and "24.1 GB" in text and "16.4 GB" in text and "8.75 GB" in text
    assert "ZeRO-2 is the least that fits" in text
    assert "ZeRO-3 does from dp 13 on" in cli("plan", "--params", "7B", "--dp", 8, "--memory", "10GB").out
    assert cli(*args, "--quiet").out == ""


def test_a_checkpoint_and_its_inspection_give_the_same(cli, ckpt, work):
    (work / "model.json").write_text(cli("inspect", ckpt, "--json").out)
    found = cli("plan", ckpt, "--dp", 4, "--json").document
    assert found["padding"] > 0 and found["bucket_size"] == 300
    stated = cli("plan", "--model", work / "model.json", "--dp", 4, "--bucket-size", 300, "--json").document
    assert stated == found
    assert "elements in" in cli("plan", ckpt, "--dp", 2, "--bucket-size", "none").out


@pytest.mark.parametrize(
    ("args", "code", "word"),
    [
        ((), 2, "--params"),
        (("--params", "7B", "--model", "x"), 2, "2 models"),
        (("--params", "many"), 2, "many"),
        (("--params", "7B", "--bucket-size", "9"), 2, "--bucket-size"),
        (("--params", "7B", "--param-dtype", "bf17"), 5, "bf17"),
        (("nowhere",), 3, "nowhere"),
        (("--model", "nowhere.json"), 3, "nowhere.json"),
    ],
)
def test_refusals(cli, args, code, word):
    result = cli("plan", "--dp", 8, *args)
    assert result.code == code and word in result.err and result.out == ""


def test_a_checkpoint_states_its_dtypes(cli, ckpt, work):
    result = cli("plan", ckpt, "--dp", 8, "--grad-dtype", "bf16")
    assert result.code == 2 and "--grad-dtype" in result.err
    (work / "bad.json").write_text(json.dumps({"a": "b"}))
    assert cli("plan", "--model", work / "bad.json", "--dp", 8).code == 4

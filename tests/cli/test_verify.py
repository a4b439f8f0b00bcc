"""What ``verify`` finds in values and counts, with how much memory, and what it says of them."""

import tracemalloc

import pytest
import torch

import zero1ckpt
from tests.strategies import flip, small_state

from .conftest import make_state, write_checkpoint

FORMATS = ("bucket_shards", "fully_sharded_model_space", "fully_reshardable")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("limit", [None, 2**16])
def test_windows_change_nothing_of_the_answer(work, format, limit):
    zero1ckpt.write(work / "a", small_state(3), dp_size=3, bucket_size=500, format=format)
    assert zero1ckpt.verify(work / "a", deep=True, workers=1, memory_limit=limit).findings == []
    for name in sorted(path.name for path in (work / "a").iterdir() if path.suffix == ".safetensors"):
        for byte in range((work / "a" / name).stat().st_size - 1, 4096, -1409):
            flip(work / "a" / name, byte, 6)
            whole = zero1ckpt.verify(work / "a", deep=True)
            found = zero1ckpt.verify(work / "a", deep=True, workers=1, memory_limit=limit)
            assert found.findings == whole.findings and whole.findings[0].file == name
            assert found.findings[0].kind in ("damaged_data", "nonzero_padding")
            flip(work / "a" / name, byte, 6)


def test_elements_across_the_pieces_of_a_file(work):
    """A wide tensor that begins at an odd byte: the checksummed pieces of its file cut elements."""
    state = {
        "a": {"fp32_param": torch.ones(7), "flags": torch.ones(7, dtype=torch.int8)},
        "b": {"fp32_param": torch.ones(2_500_000), "flags": torch.ones(2_500_000, dtype=torch.int8)},
    }
    state["b"]["fp32_param"][2_097_000] = float("nan")
    zero1ckpt.write(work / "a", state, dp_size=2, format="fully_reshardable")
    for limit in (None, 2**16):
        (finding,) = zero1ckpt.verify(work / "a", deep=True, workers=1, memory_limit=limit).findings
        assert (finding.kind, finding.param, finding.range) == ("nonfinite", "b", (2_097_000, 2_097_001))


def test_memory_is_bounded(work):
    zero1ckpt.write(work / "a", {"w": {"fp32_param": torch.zeros(4_000_000)}}, dp_size=2)
    tracemalloc.start()
    answer = zero1ckpt.verify(work / "a", deep=True, workers=2, memory_limit=2**20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert answer.ok and answer.bytes_read >= 16_000_000
    assert peak < 2 * 2**20


@pytest.mark.parametrize("slot", ["exp_avg_sq", "square_avg", "sum", "exp_inf", "max_exp_avg_sq", "acc_delta"])
def test_second_moments_are_not_negative(cli, work, slot):
    values = torch.tensor([1.0, 0.0, -0.0, -1e-30])
    zero1ckpt.write(work / "a", {"w": {"fp32_param": torch.ones(4), slot: values}}, dp_size=1)
    result = cli("verify", work / "a", "--deep", "--json")
    (finding,) = result.document["findings"]
    assert result.code == 1 and (finding["kind"], finding["slot"], finding["range"]) == ("negative", slot, [3, 4])
    zero1ckpt.write(work / "b", {"w": {"fp32_param": torch.ones(4), "exp_avg": values}}, dp_size=1)
    assert cli("verify", work / "b", "--deep").code == 0


def test_counts_of_updates_that_disagree_are_notices(cli, work):
    state = make_state()
    state["wte.weight"]["step"] = torch.tensor(5.0)
    state["blocks.0.gate"]["step"] = torch.tensor(9.0)
    zero1ckpt.write(work / "a", state, dp_size=2, step=7, groups=[{"lr": 0.1, "step": 6}])
    document = cli("verify", work / "a", "--json").document
    assert document["ok"] is True and document["findings"] == []
    assert [notice["kind"] for notice in document["notices"]] == ["steps_differ", "step_beyond", "steps_differ"]
    text = "\n".join(notice["message"] for notice in document["notices"])
    assert "5 for wte.weight and 9 for blocks.0.gate" in text
    assert "blocks.0.gate: step is 9, and the whole part has made 7 updates" in text
    assert "groups state step 6, the part 7" in text
    assert "Notices" in cli("verify", work / "a").out
    write_checkpoint(work / "b")
    assert cli("verify", work / "b", "--json").document["notices"] == []


@pytest.mark.parametrize(("value", "word"), [(-1.0, "negative"), (float("nan"), "finite"), (float("inf"), "finite")])
def test_counts_that_cannot_be_are_findings(cli, work, value, word):
    state = make_state()
    state["wte.weight"]["step"] = torch.tensor(value)
    zero1ckpt.write(work / "a", state, dp_size=2, step=7)
    result = cli("verify", work / "a", "--json")
    (finding,) = result.document["findings"]
    assert result.code == 1 and word in finding["message"]
    assert (finding["kind"], finding["param"], finding["slot"]) == ("impossible_scalar", "wte.weight", "step")


def test_against_reads_no_data_and_names_what_differs(cli, ckpt, work):
    state = make_state()
    state["wte.weight"]["exp_avg"] += 1
    write_checkpoint(work / "same")
    assert cli("verify", ckpt, "--against", work / "same").code == 0
    zero1ckpt.write(work / "other", state, dp_size=1, step=8)
    answer = zero1ckpt.verify(ckpt, against=work / "other")
    kinds = {finding.kind for finding in answer.findings}
    assert {"different_values", "different_step", "different_param", "different_groups", "different_extra"} <= kinds
    (found,) = [f for f in answer.findings if f.kind == "different_values"]
    assert (found.param, found.slot, answer.bytes_read) == ("wte.weight", "exp_avg", 0)


def test_against_where_the_file_of_extra_tensors_is_damaged(cli, ckpt, work):
    write_checkpoint(work / "other", extra={"seen": torch.arange(6)})
    flip(ckpt / "extra.safetensors", 100)
    result = cli("verify", ckpt, "--against", work / "other", "--json")
    assert result.code == 1
    assert {"altered_file", "unreadable"} <= {finding["kind"] for finding in result.document["findings"]}


def test_options(cli, ckpt):
    assert cli("verify", ckpt, "--deep", "--workers", 2, "--memory-limit", "1MiB").code == 0
    result = cli("verify", ckpt, "--deep", "--workers", 2, "--memory-limit", "1KiB")
    assert result.code == 2 and "--memory-limit" in result.err

"""``history``: what a run folder holds, and what is worth a warning."""

import os
import shutil

import pytest
import torch

import zero1ckpt
from tests.strategies import flip
from zero1ckpt.api.history import history
from zero1ckpt.core.errors import MissingError
from zero1ckpt.storage.staging import Staging


def save(path, step, value=None, **keywords):
    state = {"w": {"fp32_param": torch.full((50,), float(step if value is None else value))}}
    return zero1ckpt.write(path, state, step=step, **({"dp_size": 2} | keywords))


@pytest.fixture
def run(work):
    for step in (100, 20, 3):
        save(work / f"step-{step}", step)
    return work


def test_in_the_order_of_steps(run):
    found = history(run)
    assert [entry.step for entry in found.checkpoints] == [3, 20, 100] and found.warnings == []
    for entry in found.checkpoints:
        there = zero1ckpt.open(entry.path)
        assert (entry.name, entry.digest, entry.dp_size) == (entry.path.name, there.digest, 2)
        assert (entry.format, entry.container, entry.committed) == ("bucket_shards", "safetensors", True)
        assert entry.bytes == sum(path.stat().st_size for path in entry.path.iterdir())
        assert not entry.latest and not entry.note


def test_identical_state_at_two_steps_is_warned_of(run):
    save(run / "step-110", 110, value=100)
    save(run / "step-120", 120, value=100, format="fully_reshardable")
    (warning,) = history(run).warnings
    assert "steps 100, 110, 120 hold identical state" in warning and "step-110" in warning
    assert history(run).checkpoints[-1].dp_size is None


def test_a_copy_of_one_step_is_no_cause(run):
    zero1ckpt.reshard(run / "step-20", to_dp=5)
    found = history(run)
    assert [entry.name for entry in found.checkpoints] == ["step-3", "step-20", "step-20-dp5", "step-100"]
    assert found.warnings == []


def test_what_is_not_committed_is_listed_as_such(run):
    (run / "step-20" / "manifest.json").unlink()
    shutil.copytree(run / "step-3", run / "step-4")
    flip(run / "step-4" / "manifest.json", 50)
    Staging(run / "dead", {"command": "write"}).leave()
    live = Staging(run / "live", {"command": "write"})
    (run / "logs").mkdir()
    (run / "logs" / "model.safetensors").write_text("not ours")
    found = {entry.name: entry for entry in history(run).checkpoints}
    assert list(found)[:2] == ["step-3", "step-100"]
    assert found.keys() == {"step-3", "step-100", "step-20", "step-4", "dead", "live"}
    assert [name for name, entry in found.items() if entry.committed] == ["step-3", "step-100"]
    assert "no manifest.json" in found["step-20"].note and "digest" in found["step-4"].note
    assert "clean" in found["dead"].note and f"process {os.getpid()}" in found["live"].note
    live.abandon()


def test_a_damaged_one_is_committed_and_said_to_be_damaged(run):
    name = "rank-00001-of-00002.safetensors"
    os.truncate(run / "step-20" / name, 100)
    (run / "step-3" / name).unlink()
    found = history(run)
    assert [entry.committed for entry in found.checkpoints] == [True] * 3
    assert found.warnings == [
        f"step-3 is damaged: {name} is missing",
        f"step-20 is damaged: {name} has 100 bytes, expected {(run / 'step-100' / name).stat().st_size}",
    ]


def test_the_pointer(run):
    (run / "latest").write_text("step-100\n")
    found = history(run)
    assert [entry.latest for entry in found.checkpoints] == [False, False, True]
    assert found.warnings == [] and found.pointer == "latest"
    (run / "latest").write_text("step-20")
    assert "step-100 is newer" in history(run).warnings[0]
    (run / "step-20" / "manifest.json").unlink()
    (warning,) = history(run).warnings
    assert "step-20, which is not committed" in warning and "newest committed one is step-100" in warning
    (run / "latest").write_text("gone")
    assert "names no checkpoint of this folder" in history(run).warnings[0]
    (run / "latest").write_bytes(b"\xff\xfe")
    assert "names no checkpoint of this folder" in history(run).warnings[0]
    (run / "latest").unlink()
    (run / "latest_checkpointed_iteration.txt").write_text("30")
    save(run / "iter_0000030", 30)
    assert [entry.name for entry in history(run).checkpoints if entry.latest] == ["iter_0000030"]


def test_a_checkpoint_is_listed_alone(run):
    (entry,) = history(run / "step-3").checkpoints
    assert (entry.name, entry.step, entry.committed) == ("step-3", 3, True)


def test_nothing_to_list(work):
    for path in (work / "nowhere", work):
        with pytest.raises(MissingError):
            history(path)
    (work / "file").write_text("")
    with pytest.raises(MissingError, match="this is a file"):
        history(work / "file")

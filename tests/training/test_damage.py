"""A load of a damaged checkpoint: nothing changed where that is found first, no step where it is found on the way."""

import shutil

import pytest
import torch

import zero1ckpt
from tests.engine.harness import run_ranks
from tests.training.scenario import make, same_weights, train, weights
from tests.training.test_optimizers import untouched
from zero1ckpt.core.errors import CorruptError, MissingError, Zero1CkptError


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def flip_data(path):
    """In the first element behind the header, which is no padding."""
    flip(path, 8 + int.from_bytes(path.read_bytes()[:8], "little"))


@pytest.fixture
def saved(work):
    model, optimizer = make()
    train(model, optimizer, 2)
    optimizer.save(work / "good", extra={"t": torch.arange(4)}, rank_extra={"r": torch.ones(3)}, model=model)
    shutil.copytree(work / "good", work / "bad")
    return work


FLAWS = {
    "manifest": (CorruptError, lambda d: flip(d / "manifest.json", 200)),
    "no manifest": (MissingError, lambda d: (d / "manifest.json").unlink()),
    "truncated": (CorruptError, lambda d: _cut(d / "rank-00000-of-00001.safetensors")),
    "missing file": (MissingError, lambda d: (d / "rank-00000-of-00001.safetensors").unlink()),
    "extra": (CorruptError, lambda d: flip(d / "extra.safetensors", -1)),
    "rank_extra": (CorruptError, lambda d: flip(d / "rank_extra-00000-of-00001.safetensors", -1)),
    "model": (CorruptError, lambda d: flip(d / "model.safetensors", -1)),
    "no folder": (MissingError, lambda d: shutil.rmtree(d)),
}


def _cut(path):
    path.write_bytes(path.read_bytes()[:-4])


@pytest.mark.parametrize("flaw", FLAWS)
def test_found_before_anything_is_changed(saved, flaw):
    error, spoil = FLAWS[flaw]
    spoil(saved / "bad")
    untouched(make, lambda o: o.load(saved / "bad"), error, ".")


def test_verify_finds_all_before_anything_is_changed(saved):
    flip(saved / "bad" / "rank-00000-of-00001.safetensors", -3)
    untouched(make, lambda o: o.load(saved / "bad", verify=True), CorruptError, "verify=True found 1")


def test_a_load_that_fails_half_way(saved):
    """The state is neither the old nor the new: no step, no save, alone or as a part, until a good load."""
    flip_data(saved / "bad" / "rank-00000-of-00001.safetensors")
    model, optimizer = make()
    with pytest.raises(CorruptError, match=r"rank-00000.*(elements|bytes)"):
        optimizer.load(saved / "bad")
    attempts = (
        lambda: train(model, optimizer, 1),
        lambda: optimizer.save(saved / "new"),
        lambda: zero1ckpt.save(saved / "new", {"a": optimizer}),
    )
    for attempt in attempts:
        with pytest.raises(Zero1CkptError, match=r"failed half-way.*load a sound checkpoint"):
            attempt()
    assert not (saved / "new").exists()
    with pytest.raises(MissingError):
        optimizer.load(saved / "nothing")
    with pytest.raises(Zero1CkptError, match="failed half-way"):
        train(model, optimizer, 1)
    optimizer.load(saved / "good")
    twin, twins = make()
    twins.load(saved / "good")
    train(model, optimizer, 3, 2)
    train(twin, twins, 3, 2)
    same_weights(weights(model), weights(twin))


def save_three(rank, dp, work):
    model, optimizer = make()
    train(model, optimizer, 2, 0, rank, dp)
    optimizer.save(f"{work}/good")


def load_damaged(rank, dp, work, bad, verify):
    model, optimizer = make()
    before = weights(model)
    told = []
    try:
        optimizer.load(f"{work}/{bad}", verify=verify)
    except Zero1CkptError as error:
        told.append((type(error).__name__, str(error)))
    try:
        train(model, optimizer, 1, 0, rank, dp)
    except Zero1CkptError as error:
        told.append((type(error).__name__, str(error)))
    optimizer.load(f"{work}/good")
    return told, before, weights(model)


@pytest.mark.dist
@pytest.mark.parametrize("where", ["data", "header"])
def test_damage_that_one_rank_sees_is_raised_by_all(work, where):
    run_ranks(3, save_three, 3, str(work))
    shutil.copytree(work / "good", work / "bad")
    file = work / "bad" / "rank-00001-of-00003.safetensors"
    flip_data(file) if where == "data" else flip(file, 40)
    ends = run_ranks(3, load_damaged, 3, str(work), "bad", False)
    for rank, (told, _, after) in enumerate(ends):
        assert [kind for kind, _ in told] == ["CorruptError", "Zero1CkptError"]
        assert "rank-00001-of-00003" in told[0][1] and ("rank 1: " in told[0][1]) == (rank != 1)
        same_weights(after, ends[0][2])
    for told, _, _ in run_ranks(2, load_damaged, 2, str(work), "bad", True):
        assert [kind for kind, _ in told] == ["CorruptError"]  # and the step that followed went well

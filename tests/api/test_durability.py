"""write -> flush the file -> rename -> flush the folder, for every file of a save and of a reshard."""

import os

import pytest
import torch

import zero1ckpt
from tests.faults import calls
from tests.strategies import small_state


def record(action):
    log = []

    def path_of(fd):
        return os.readlink(f"/proc/self/fd/{fd}")

    def before(name, args):
        if name in ("pwrite", "fsync"):
            log.append((name, path_of(args[0])))
        elif name in ("rename", "exchange"):
            log.append(("rename", str(args[0]), str(args[1])))

    with calls(before):
        action()
    return log


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("overwrite", [False, True])
def test_every_file_is_durable_before_it_is_named_and_all_before_the_whole_is(work, workers, overwrite):
    state = small_state(1)
    zero1ckpt.write(work / "src", state, dp_size=3, extra={"t": torch.ones(9)})
    if overwrite:
        zero1ckpt.write(work / "dst", state, dp_size=1)
    log = record(lambda: zero1ckpt.reshard(work / "src", work / "dst", to_dp=4, workers=workers, overwrite=overwrite))
    ((move, stage),) = [(i, e[1]) for i, e in enumerate(log) if e[0] == "rename" and e[2] == str(work / "dst")]
    assert os.path.dirname(stage) == str(work / ".dst.zero1ckpt-partial")
    names = {p.name for p in (work / "dst").iterdir()}
    assert names == {"manifest.json", "extra.safetensors", *(f"rank-0000{r}-of-00004.safetensors" for r in range(4))}
    for name in names:
        ((at, aside),) = [(i, e[1]) for i, e in enumerate(log) if e[0] == "rename" and e[2] == f"{stage}/{name}"]
        assert at < move
        own = [(i, e[0]) for i, e in enumerate(log) if e[1] == aside and e[0] != "rename"]
        writes = [i for i, what in own if what == "pwrite"]
        flushes = [i for i, what in own if what == "fsync"]
        assert len(flushes) == 1 and max(writes, default=-1) < flushes[0] < at, name
        if name == "manifest.json":
            last = at
    assert all(i <= last for i, e in enumerate(log) if e[0] == "rename" and e[2].startswith(stage)), (
        "the manifest is last"
    )
    assert any(last < i < move and e == ("fsync", stage) for i, e in enumerate(log))
    assert log[move + 1] == ("fsync", str(work))

"""Saves in the background that are killed, or whose process ends or forks; the pointer and old checkpoints."""

import os
import subprocess
import sys
import textwrap
import time
import warnings

import pytest

import zero1ckpt
from tests import faults
from tests.engine.harness import run_ranks
from tests.training.scenario import make, train
from tests.training.test_async_save import held
from zero1ckpt.api.stored import resolve
from zero1ckpt.core.errors import UsageError
from zero1ckpt.storage.staging import find_leftovers, remove_leftover
from zero1ckpt.training import retention, saving


def names(run):
    return {path.name for path in run.iterdir()}


def test_killed_at_every_call(work):
    """Two checkpoints are there and one is to be kept beside the new one: at every moment the pointer names a whole
    one, never an older one than before, and what is in its place is whole.
    """
    model, optimizer = make(bucket_size="none")
    run = work / "run"

    def start():
        for step in (1, 2):
            if not (run / f"step-{step}").exists():
                zero1ckpt.reshard(work / f"keep-{step}", run / f"step-{step}", to_dp=1)
            os.utime(run / f"step-{step}" / "manifest.json", (step, step))
        (run / "latest").write_text("step-2\n")

    for step in (1, 2):
        train(model, optimizer, 1, step)
        optimizer.save(work / f"keep-{step}")
    train(model, optimizer, 1, 3)
    seen = []
    for moment in range(1000):
        start()
        killed = faults.killed_at(
            moment, lambda: optimizer.save(run / "step-3", asynchronous=True, keep=2, latest=True).wait()
        )
        newest = zero1ckpt.open(run).step
        seen.append((newest, (run / "step-1").exists()))
        for name in names(run) - {"latest"}:
            if not name.startswith("."):
                assert not zero1ckpt.verify(run / name, deep=True).findings
        assert (run / "step-2").is_dir() and (newest == 2 or zero1ckpt.open(run / "step-3").step == 3)
        for leftover in find_leftovers(run) + find_leftovers(run / "latest"):
            remove_leftover(leftover)
        assert names(run) <= {"latest", "step-1", "step-2", "step-3"}
        if not killed:
            break
        if (run / "step-3").exists():
            zero1ckpt.open(run / "step-3")
            for file in (run / "step-3").iterdir():
                file.unlink()
            (run / "step-3").rmdir()
    assert seen[-1] == (3, False)
    assert seen == sorted(seen, key=lambda row: (row[0], not row[1]))  # the pointer first, then the removal


# ----------------------------------------------------------------------------------------------------------- exit, fork

SCRIPT = """
import sys
import torch
import zero1ckpt
from zero1ckpt.training import saving

def slow(*args, real=saving._write, **keywords):
    import time
    time.sleep(0.3)
    if {fails}:
        raise OSError("the disk is gone")
    return real(*args, **keywords)

saving._write = slow
model = torch.nn.Linear(3, 3)
optimizer = zero1ckpt.Zero1Optimizer(model, torch.optim.AdamW, foreach=False)
handle = optimizer.save(sys.argv[1], asynchronous=True)
assert not handle.done()
{end}
"""


def run_script(path, *, fails=False, end=""):
    text = textwrap.dedent(SCRIPT).format(fails=fails, end=end)
    return subprocess.run(
        [sys.executable, "-c", text, str(path)], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "raise RuntimeError('of training')"])
def test_the_process_ends_after_the_save(work, end):
    done = run_script(work / "a", end=end)
    assert done.returncode == (3 if "SystemExit" in end else 1 if end else 0), done.stderr
    assert not zero1ckpt.verify(work / "a", deep=True).findings


def test_an_error_that_nobody_waited_for_is_written_at_exit(work):
    done = run_script(work / "a", fails=True)
    assert done.stderr == f"zero1ckpt: the asynchronous save of {work / 'a'} failed: the disk is gone\n"
    assert not names(work)
    told = run_script(work / "a", fails=True, end="try:\n    handle.wait()\nexcept OSError:\n    pass")
    assert told.stderr == ""


def test_a_forked_process_has_no_part_in_it(work):
    """As a data loader's worker: it neither waits for the save nor writes it, and may save on its own."""
    _, optimizer = make(bucket_size=300)
    with held(saving, "_write"):
        handle = optimizer.save(work / "a", asynchronous=True)

        def child():
            with pytest.raises(UsageError, match="another process"):
                handle.wait()
            optimizer.save(work / "b")

        assert faults.in_child(child) == 0
        assert not handle.done()
    handle.wait()
    assert zero1ckpt.open(work / "a").digest == zero1ckpt.open(work / "b").digest


def leave(rank, dp, work):
    model, optimizer = make(bucket_size=300)
    for step in range(3):
        train(model, optimizer, 1, step, rank, dp)
        optimizer.save(work / f"step-{step}", asynchronous=True, keep=2, latest=True)
        if step == 1 and rank == 0:
            time.sleep(0.05)
    return [optimizer.save(work / "last", keep=2, latest=True).path.name, (work / "step-2").exists()]


@pytest.mark.dist
def test_ranks_keep_the_newest(work):
    assert run_ranks(2, leave, 2, work) == [["last", True]] * 2
    assert names(work) == {"last", "step-2", "latest"}
    assert resolve(work) == work / "last"


# ------------------------------------------------------------------------------------------------------------ retention


def save_steps(optimizer, run, *steps, **options):
    for at, step in enumerate(steps):
        optimizer.applied_steps = step
        optimizer.save(run / f"step-{step}", **options)
        os.utime(run / f"step-{step}" / "manifest.json", (1000 + at, 1000 + at))


def test_what_is_never_removed(work):
    """What a pointer names, other models' checkpoints, links, folders with other files or without a manifest."""
    _, optimizer = make(bucket_size=300)
    other = zero1ckpt.write(
        work / "other", {"w": {"fp32_param": next(iter(optimizer.state.values()))["fp32_param"]}}, dp_size=1
    )
    save_steps(optimizer, work, 1, 2, 3, 4, 5)
    (work / "latest").write_text("step-1\n")
    (work / "step-2" / "notes.txt").touch()
    (work / "half").mkdir()
    (work / "linked").symlink_to(work / "step-3", target_is_directory=True)
    optimizer.save(work / "step-6", keep=1)
    assert names(work) == {"latest", "step-1", "step-2", "half", "linked", "other", "step-6"}
    assert other.step == 0 and resolve(work) == work / "step-1"


def test_old_is_what_was_committed_earlier(work):
    """A run that goes on from an earlier step keeps its own checkpoints, not those that it has turned away from."""
    _, optimizer = make(bucket_size=300)
    save_steps(optimizer, work, 100, 200, 110)
    optimizer.applied_steps = 120
    optimizer.save(work / "step-120", keep=2)
    assert names(work) == {"step-110", "step-120"}


def test_a_removal_that_fails_is_a_warning(work, monkeypatch):
    _, optimizer = make(bucket_size=300)
    save_steps(optimizer, work, 1)

    def refuse(path):
        raise zero1ckpt.Zero1CkptError("not mine", file=path)

    monkeypatch.setattr(retention, "remove_whole", refuse)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        optimizer.save(work / "step-2", keep=1, latest=True)
    assert [str(w.message) for w in told if "step-1" in str(w.message)]
    assert names(work) == {"step-1", "step-2", "latest"}


def test_a_pointer_that_cannot_be_written(work):
    _, optimizer = make(bucket_size=300)
    (work / "latest").mkdir()
    (work / "latest" / "file").touch()
    with pytest.raises(zero1ckpt.Zero1CkptError, match="latest"):
        optimizer.save(work / "a", latest=True, asynchronous=True).wait()
    assert not zero1ckpt.verify(work / "a", deep=True).findings
    assert names(work) == {"a", "latest"}

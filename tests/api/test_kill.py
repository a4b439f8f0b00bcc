"""kill -9 at every system call, and at any time, of a write and of a reshard."""

import os
import random
import shutil
import signal
import time

import pytest
import torch

import zero1ckpt
from tests.faults import calls, in_child, killed_at
from tests.strategies import small_state, tree
from zero1ckpt.api import verify
from zero1ckpt.core.errors import MissingError
from zero1ckpt.storage import staging
from zero1ckpt.storage.staging import find_leftovers, remove_leftover

SHAPES = ((40, 3), (64,), (0,), (), (31,))
NEW = small_state(1, SHAPES)
OLD = small_state(2, SHAPES)


def write(path, state=NEW, dp=3, **keywords):
    return zero1ckpt.write(
        path,
        state,
        dp_size=dp,
        bucket_size=64,
        workers=1,
        extra={"t": state["layers.1.weight"]["fp32_param"]},
        **keywords,
    )


def reshard(work, dst="dst", **keywords):
    return zero1ckpt.reshard(work / "src", work / dst, to_dp=2, bucket_size="none", **{"workers": 1} | keywords)


def every_moment(prepare, action, check):
    """Kills ``action`` before its first, second, ... call until it gets through; returns how often it was killed."""
    moment = 0
    while True:
        prepare()
        if not killed_at(moment, action):
            return moment
        check(moment)
        moment += 1


def only(work, *names):
    return sorted(path.name for path in work.iterdir()) == sorted(names)


def test_write(work):
    write(work / "whole")
    whole = tree(work / "whole")
    absent = complete = 0

    def check(moment):
        nonlocal absent, complete
        dst = work / "dst"
        left = find_leftovers(dst)
        assert all(leftover.owner is None for leftover in left)
        if dst.exists():
            complete += 1
            assert tree(dst) == whole and verify(dst, deep=True)
        else:
            absent += 1
            with pytest.raises(MissingError):
                zero1ckpt.open(dst)
        for leftover in left:
            remove_leftover(leftover)
        assert only(work, "whole", *(["dst"] if dst.exists() else [])), "all that is left is recognised"

    def prepare():

        shutil.rmtree(work / "dst", ignore_errors=True)

    killed = every_moment(prepare, lambda: write(work / "dst"), check)
    assert killed > 40 and absent > 30 and complete >= 1
    assert tree(work / "dst") == whole and only(work, "whole", "dst")


def test_write_again_after_a_kill_needs_no_cleaning(work):
    write(work / "whole")
    for moment in range(0, 60, 7):
        killed_at(moment, lambda: write(work / "dst", overwrite=True))
        write(work / "dst", overwrite=True)
        assert tree(work / "dst") == tree(work / "whole") and only(work, "whole", "dst")


@pytest.mark.parametrize("workers", [1, 3])
def test_reshard_and_resume(work, workers):
    write(work / "src")
    reshard(work, "whole")
    whole = tree(work / "whole")
    seen = set()

    def check(moment):
        dst = work / "dst"
        seen.add(dst.exists())
        if dst.exists():
            assert tree(dst) == whole
        made = reshard(work, resume=True, workers=workers)
        assert tree(dst) == whole and made.digest
        assert only(work, "src", "whole", "dst"), "no journal, lock or staging remains"
        assert not find_leftovers(dst)

    def prepare():

        shutil.rmtree(work / "dst", ignore_errors=True)

    killed = every_moment(prepare, lambda: reshard(work, workers=workers), check)
    assert killed > 40 and seen == {True, False}
    assert verify(work / "dst", deep=True, against=work / "src")


def test_resume_does_not_write_finished_files_again(work):
    write(work / "src", dp=2)
    zero1ckpt.reshard(work / "src", work / "whole", to_dp=12, workers=1)
    job = lambda **keywords: zero1ckpt.reshard(work / "src", work / "dst", to_dp=12, workers=1, **keywords)  # noqa: E731
    renames = 0

    def before(name, args):
        nonlocal renames
        renames += name == "rename"
        if renames == 9:
            os.kill(os.getpid(), signal.SIGKILL)

    def work_until_ninth():
        with calls(before):
            job()

    assert in_child(work_until_ninth) == -signal.SIGKILL
    (half,) = work.glob("*partial/*")
    finished = {p.name: p.stat().st_ino for p in half.iterdir() if not p.name.endswith(".part")}
    assert len(finished) == 8
    job(resume=True)
    assert tree(work / "dst") == tree(work / "whole")
    after = {p.name: p.stat().st_ino for p in (work / "dst").iterdir()}
    assert all(after[name] == inode for name, inode in finished.items())


def test_resume_of_another_job_starts_afresh(work):
    write(work / "src")
    assert killed_at(30, lambda: reshard(work))
    zero1ckpt.reshard(work / "src", work / "other", to_dp=2, bucket_size=1)
    zero1ckpt.reshard(work / "src", work / "dst", to_dp=2, bucket_size=1, resume=True)
    assert tree(work / "dst") == tree(work / "other") and only(work, "src", "dst", "other")


def test_resume_with_nothing_to_resume_and_of_what_is_done(work):
    write(work / "src")
    reshard(work, resume=True)
    before = tree(work)
    reshard(work, resume=True)
    assert tree(work) == before
    with pytest.raises(zero1ckpt.Zero1CkptError) as caught:
        zero1ckpt.reshard(work / "src", work / "dst", to_dp=3, resume=True)
    assert caught.value.exit_code == 6 and tree(work) == before


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "no-exchange"])
def test_overwrite_leaves_the_old_or_the_new(work, exchange, monkeypatch):
    if not exchange:
        monkeypatch.setattr(staging, "_exchange", lambda a, b: False)
    write(work / "src")
    reshard(work, "whole")
    write(work / "old", OLD)
    new, old = tree(work / "whole"), tree(work / "old")
    seen = []

    def prepare():
        write(work / "dst", OLD, overwrite=True)
        assert only(work, "src", "whole", "old", "dst")

    def check(moment):
        dst = work / "dst"
        for leftover in find_leftovers(dst):
            assert leftover.owner is None
            if not exchange and not dst.exists():
                remove_leftover(leftover)
        there = tree(dst)
        assert there in (old, new), f"killed at call {moment}"
        seen.append(there == new)
        reshard(work, resume=True, overwrite=True)
        assert tree(dst) == new and only(work, "src", "whole", "old", "dst")

    every_moment(prepare, lambda: reshard(work, overwrite=True), check)
    assert True in seen and False in seen and seen == sorted(seen)


def test_without_exchange_the_next_writer_puts_the_old_one_back(work, monkeypatch):
    """Killed between the two renames: a writer that then fails must not have lost the old checkpoint."""
    monkeypatch.setattr(staging, "_exchange", lambda a, b: False)
    write(work / "dst", OLD)
    old = tree(work / "dst")
    moment = 0
    while True:
        if not killed_at(moment, lambda: write(work / "dst", overwrite=True)):
            pytest.fail("never killed between the renames")
        if not (work / "dst").exists():
            break
        moment += 1
    with pytest.raises(zero1ckpt.Zero1CkptError):
        write(work / "dst")  # not told to overwrite
    assert tree(work / "dst") == old and only(work, "dst")


@pytest.mark.parametrize("workers", [1, 4])
def test_kill_at_any_time(work, workers):
    write(work / "src", small_state(3), dp=5)
    start = time.monotonic()
    zero1ckpt.reshard(work / "src", work / "whole", to_dp=7, workers=workers)
    took = time.monotonic() - start
    whole = tree(work / "whole")
    job = lambda **keywords: zero1ckpt.reshard(work / "src", work / "dst", to_dp=7, workers=workers, **keywords)  # noqa: E731
    chance = random.Random(workers)
    states = set()

    for _ in range(40):
        code = in_child(job, kill_after=chance.uniform(0, 1.5 * took))
        assert code in (0, -signal.SIGKILL)
        states.add((work / "dst").exists())
        if (work / "dst").exists():
            assert tree(work / "dst") == whole
        if chance.random() < 0.5:
            job(resume=True)
            assert tree(work / "dst") == whole and only(work, "src", "whole", "dst")
        shutil.rmtree(work / "dst", ignore_errors=True)
    job(resume=True)
    assert tree(work / "dst") == whole and only(work, "src", "whole", "dst")


def test_resume_knows_a_finished_one_by_everything_in_it(work):
    """A scalar that is not a number equals itself; another extra tensor is another checkpoint."""
    state = {name: {**slots, "step": torch.tensor(float("nan"))} for name, slots in NEW.items()}
    for name, value in (("src", 1.0), ("other", 2.0)):
        zero1ckpt.write(work / name, state, dp_size=3, workers=1, extra={"t": torch.tensor([value])})
    zero1ckpt.reshard(work / "src", work / "dst", to_dp=2)
    before = tree(work)
    zero1ckpt.reshard(work / "src", work / "dst", to_dp=2, resume=True)
    with pytest.raises(zero1ckpt.Zero1CkptError, match="not what this command makes"):
        zero1ckpt.reshard(work / "other", work / "dst", to_dp=2, resume=True)
    assert tree(work) == before

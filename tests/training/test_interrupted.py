"""A save that is killed, fails or meets another: the old or a complete new checkpoint, and no rank waits for ever."""

import os
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from inspect import getfile

import pytest
import torch

import zero1ckpt
from tests import faults
from tests.engine import harness
from tests.engine.harness import run_ranks
from tests.training.scenario import make, train
from zero1ckpt.core.errors import OutputError, Zero1CkptError
from zero1ckpt.engine import waiting
from zero1ckpt.storage.staging import find_leftovers, remove_leftover

TIMEOUT = 4.0
"""Seconds that a rank waits for another; far above what a save of these sizes takes."""


def endings(size, fn, *args, timeout=60.0):
    """Like ``run_ranks``, for ranks that may die: what each returned, or minus the signal that ended it."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        workers = []
        for rank in range(size):
            here, there = harness._CONTEXT.Pipe(duplex=False)
            store = os.path.join(folder, "store")
            job = (there, rank, size, store, getfile(fn), fn.__name__, harness._pack(args))
            process = harness._CONTEXT.Process(target=harness._rank_main, args=job, daemon=True)
            process.start()
            there.close()
            workers.append((process, here))
        try:
            return [_ending(process, here, deadline) for process, here in workers]
        finally:
            for process, here in workers:
                process.kill()
                process.join()
                here.close()


def _ending(process, here, deadline):
    assert here.poll(max(0.0, deadline - time.monotonic())), "a rank waits for ever"
    try:
        ok, payload = here.recv()
    except EOFError:
        process.join()
        return process.exitcode
    assert ok, payload
    return harness._unpack(payload)


def check(work, path, old, new):
    """What the rule allows; then cleans up and saves again."""
    if path.exists() and any(path.iterdir()):
        assert not zero1ckpt.verify(path, deep=True).findings
        assert zero1ckpt.open(path).digest in (old, new)
    else:
        assert old is None
    for leftover in find_leftovers(path):
        assert leftover.owner is None
        remove_leftover(leftover)
    assert {p.name for p in work.iterdir()} <= {path.name}
    return path.exists() and zero1ckpt.open(path).digest == new


# --------------------------------------------------------------------------------------------- one rank, every moment


@pytest.mark.parametrize("overwrite", [False, True])
def test_killed_at_every_call_of_a_save(work, overwrite):
    """One rank takes every step that changes files; it is killed before each of them in turn."""
    model, optimizer = make(bucket_size="none")
    optimizer.save(work / "keep")
    old = zero1ckpt.open(work / "keep").digest if overwrite else None
    train(model, optimizer, 1)
    optimizer.save(work / "probe")
    new = zero1ckpt.open(work / "probe").digest
    (work / "run").mkdir()

    def save():
        optimizer.save(work / "run" / "c", extra={"t": torch.ones(3)}, rank_extra={"r": 1}, overwrite=overwrite)

    committed = []
    for moment in range(1000):
        if overwrite:
            zero1ckpt.reshard(work / "keep", work / "run" / "c", to_dp=1, overwrite=True)
        killed = faults.killed_at(moment, save)
        committed.append(check(work / "run", work / "run" / "c", old, new))
        if not killed:
            break
        if (work / "run" / "c").exists() and not overwrite:
            zero1ckpt.open(work / "run" / "c")
            for file in (work / "run" / "c").iterdir():
                file.unlink()
            (work / "run" / "c").rmdir()
    assert len(committed) > 20 and committed[-1]
    assert committed == sorted(committed)  # once it is there it stays there


# ------------------------------------------------------------------------------------------------------- several ranks


def save_and_die(rank, dp, work, who, moment):
    """The calls of this rank's save, counted; ranks of ``who`` die before call ``moment``."""
    model, optimizer = make(bucket_size=600)
    train(model, optimizer, 1, 0, rank, dp)
    optimizer.control.timeout = timedelta(seconds=TIMEOUT)
    waiting.GRACE = timedelta(seconds=1)
    calls = 0

    def before(name, args):
        nonlocal calls
        if rank in who and calls == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        calls += 1

    start = time.monotonic()
    with faults.calls(before):
        try:
            optimizer.save(f"{work}/c", overwrite=True)
        except Zero1CkptError as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - start
    return None, calls


def start_and_new(work):
    """The old checkpoint, and what the new one will be; how many calls each rank makes."""
    _, optimizer = make()
    optimizer.save(work / "c")
    old = zero1ckpt.open(work / "c").digest
    (work / "other").mkdir()
    counted = run_ranks(3, save_and_die, 3, str(work / "other"), (), -1)
    new = zero1ckpt.open(work / "other" / "c").digest
    remove(work / "other")
    return old, new, [calls for _, calls in counted]


def remove(path):
    for inside in path.iterdir():
        remove(inside) if inside.is_dir() else inside.unlink()
    path.rmdir()


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("who", [(0,), (2,), (0, 1, 2)], ids=["first rank", "another rank", "all ranks"])
def test_kill_during_a_save_of_three_ranks(work, who):
    """At moments all over the save; the ranks that live end with an error, which names who is missing."""
    old, new, calls = start_and_new(work)
    last = min(calls[rank] for rank in who)
    for moment in sorted({round(k * (last - 1) / 4) for k in range(5)}):
        ends = endings(3, save_and_die, 3, str(work), who, moment)
        for rank, end in enumerate(ends):
            if rank in who and end == -signal.SIGKILL:
                continue
            told, took = end
            if told is None:
                assert zero1ckpt.open(work / "c").digest == new
                continue
            assert took < TIMEOUT + 1 + 5
            assert "rank 0 is missing" in told if 0 in who else "Ranks 2 failed" in told or "Connection closed" in told
        check(work, work / "c", old, new)
        again = endings(3, save_and_die, 3, str(work), (), -1)
        assert [told for told, _ in again] == [None] * 3
        check(work, work / "c", new, new)
        remove(work / "c")
        _, optimizer = make()
        optimizer.save(work / "c")


def save_with_a_fault(rank, dp, work, where, kind, overwrite):
    model, optimizer = make(bucket_size=600)
    train(model, optimizer, 1, 0, rank, dp)
    optimizer.control.timeout = timedelta(seconds=30)
    seen = 0

    def before(name, args):
        nonlocal seen
        if rank == where and name == "pwrite":
            seen += 1
            if seen == 3:
                raise kind

    with faults.calls(before):
        try:
            optimizer.save(f"{work}/sub/c", overwrite=overwrite)
        except BaseException as error:
            told = type(error).__name__, str(error)
        else:
            told = None
    train(model, optimizer, 1, 1, rank, dp)  # the run goes on
    optimizer.save(f"{work}/next")
    return told


@pytest.mark.dist
@pytest.mark.parametrize("where", [0, 2])
def test_disk_full_on_one_rank(work, where):
    full = OSError(28, "No space left on device")
    ends = run_ranks(3, save_with_a_fault, 3, str(work), where, full, False)
    for rank, (kind, line) in enumerate(ends):
        assert kind == "OutputError" and "No space left on device" in line and f"rank-{where:05d}" in line
        assert "free some space" in line and "\n" not in line
        assert ("rank 2: " in line) == (where == 2 and rank != 2)
    assert [p.name for p in work.iterdir()] == ["next"]  # not even the parent that was made


@pytest.mark.dist
@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("kind", [KeyboardInterrupt(), MemoryError("no more"), RuntimeError("odd")], ids=type)
def test_any_other_end_of_one_rank_ends_all(work, where, kind):
    """An interrupt or a lack of memory keeps nobody waiting, and the next save finds all ranks in step."""
    ends = run_ranks(3, save_with_a_fault, 3, str(work), where, kind, False)
    name = type(kind).__name__
    for rank, (told, line) in enumerate(ends):
        if rank == where:
            assert told == name
        else:
            assert name in line and told in ("Zero1CkptError", "InterruptedRunError")
    for leftover in find_leftovers(work / "sub" / "c"):
        assert leftover.owner is None
    assert zero1ckpt.open(work / "next").step == 2


# --------------------------------------------------------------------------------------------------- other savers


def test_destinations(work):
    model, optimizer = make()
    (work / "empty").mkdir()
    optimizer.save(work / "empty")
    assert optimizer.save(work / "a" / "b" / "c").wait() == work / "a" / "b" / "c"
    train(model, optimizer, 1)
    with pytest.raises(OutputError, match="not empty") as caught:
        optimizer.save(work / "empty")
    assert caught.value.exit_code == 6
    assert zero1ckpt.open(work / "empty").step == 0
    optimizer.save(work / "empty", overwrite=True)
    assert zero1ckpt.open(work / "empty").step == 1

    (work / "mine").mkdir()
    (work / "mine" / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(OutputError) as caught:
            optimizer.save(work / "mine", overwrite=overwrite)
        assert caught.value.exit_code == 6
    (work / "empty" / "thesis.txt").write_text("years of work")
    with pytest.raises(OutputError, match=r"thesis\.txt"):
        optimizer.save(work / "empty", overwrite=True)
    assert (work / "mine" / "thesis.txt").exists() and (work / "empty" / "thesis.txt").exists()
    (work / "file").write_text("x")
    with pytest.raises(OutputError, match="not a folder"):
        optimizer.save(work / "file")
    assert {p.name for p in work.iterdir()} == {"empty", "a", "mine", "file"}


def test_read_only_folder(work):
    _, optimizer = make()
    work.chmod(0o755)
    (work / "locked").mkdir(mode=0o555)

    def save():
        if os.geteuid() == 0:
            os.seteuid(65534)  # root may write anywhere
        with pytest.raises(OutputError, match="choose a folder that you may write to"):
            optimizer.save(work / "locked" / "c")

    assert faults.in_child(save) == 0
    assert not any((work / "locked").iterdir())


def save_slowly(rank, dp, work, number):
    """Holds the lock until the other saver has been refused, told by a file."""
    _, optimizer = make()
    second = os.path.join(work, "refused")

    def before(name, args):
        if number == 0 and rank == 0 and name == "pwrite":
            open(os.path.join(work, "locked"), "w").close()
            for _ in range(2000):
                if os.path.exists(second):
                    break
                time.sleep(0.01)

    if number == 1:
        while not os.path.exists(os.path.join(work, "locked")):
            time.sleep(0.01)
    try:
        with faults.calls(before):
            optimizer.save(f"{work}/run/c")
    except OutputError as error:
        open(second, "w").close()
        return str(error)


@pytest.mark.dist
def test_two_saves_to_one_path(work):
    """The second is refused at once and names the first; the first goes on."""
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run_ranks, 2, save_slowly, 2, str(work), number) for number in (0, 1)]
        first, second = (run.result() for run in runs)
    assert first == [None, None]
    assert all("another writer is at work here: process" in told for told in second)
    assert not zero1ckpt.verify(work / "run" / "c", deep=True).findings
    assert [p.name for p in (work / "run").iterdir()] == ["c"]

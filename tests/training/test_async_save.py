"""Saves in the background: the bytes of the moment of the call, whatever training does meanwhile."""

import threading
import weakref
from contextlib import contextmanager

import pytest
import torch

import zero1ckpt
from tests.engine.harness import run_ranks
from tests.training.scenario import make, same_state, train
from zero1ckpt.core.errors import OutputError, UsageError, Zero1CkptError
from zero1ckpt.engine import snapshot
from zero1ckpt.training import async_save, saving

LIMIT = 60


def files_of(path):
    return {file.relative_to(path): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


@contextmanager
def held(owner, name):
    """Calls of ``owner.name`` in threads that save wait for the event that is yielded."""
    real, gate = getattr(owner, name), threading.Event()

    def wait(*args, **keywords):
        if threading.current_thread() is not threading.main_thread():
            assert gate.wait(LIMIT)
        return real(*args, **keywords)

    setattr(owner, name, wait)
    try:
        yield gate
    finally:
        gate.set()
        setattr(owner, name, real)


def bytes_of_the_moment(rank, dp, work, dtype, options):
    """Saved with and without ``asynchronous`` at one moment; the former is written two steps later."""
    model, optimizer = make(dtype=dtype, bucket_size=300, **options)
    train(model, optimizer, 2, 0, rank, dp)
    extra = {"t": torch.arange(5.0), "deep": {"list": [1, torch.ones(2)]}}
    state = {"r": torch.full((3,), rank), "n": rank}
    optimizer.save(work / "now", extra=extra, rank_extra=state, model=model)
    with held(saving, "_write") as gate:
        handle = optimizer.save(work / "later", extra=extra, rank_extra=state, model=model, asynchronous=True)
        assert not handle.done()
        extra["t"].zero_()
        extra["deep"]["list"][1].zero_()
        extra["deep"]["list"][0] = 2
        state["r"].zero_()
        state["n"] = -1
        optimizer.param_groups[0]["lr"] *= 2
        with torch.no_grad():
            model.frozen.zero_()
        train(model, optimizer, 2, 2, rank, dp)
        assert not (work / "later").exists() and not handle.done()
        gate.set()
        assert handle.wait() == work / "later" and handle.done()
    assert optimizer.applied_steps == 4
    optimizer.wait_for_params()
    torch.distributed.barrier()  # no rank ends while others still send
    return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_of_the_moment(work, dtype):
    assert all(run_ranks(2, bytes_of_the_moment, 2, work, dtype, {"overlap_param_gather": True}))
    assert files_of(work / "later") == files_of(work / "now")
    assert zero1ckpt.open(work / "later").step == 2


def other_format(rank, dp, work):
    model, optimizer = make(bucket_size=300)
    train(model, optimizer, 1, 0, rank, dp)
    choice = {"format": "fully_reshardable", "container": "zarr"}
    optimizer.save(work / "now", **choice)
    handle = optimizer.save(work / "later", asynchronous=True, **choice)
    train(model, optimizer, 1, 1, rank, dp)
    handle.wait()
    return handle.sent_bytes


@pytest.mark.dist
def test_ranks_that_send_each_other_parts(work):
    """While training sends gradients: the messages of the save go over a group of its own."""
    assert sum(run_ranks(2, other_format, 2, work)) > 0
    assert files_of(work / "later") == files_of(work / "now")


def several_optimizers(rank, work):
    """Rank 1 is in one group more than rank 0; two optimizers are two parts, saved twice in a row."""
    if rank:
        torch.distributed.new_group([1], use_local_synchronization=True)
    pairs = {name: make(bucket_size=300) for name in ("gen", "dis")}
    optimizers = {name: optimizer for name, (_, optimizer) in pairs.items()}
    for step in range(2):
        for model, optimizer in pairs.values():
            train(model, optimizer, 1, step, rank, 2)
        zero1ckpt.save(work / f"now-{step}", optimizers)
        handle = zero1ckpt.save(work / f"later-{step}", optimizers, asynchronous=True)
    handle.wait()
    return True


@pytest.mark.dist
def test_parts_and_ranks_in_different_numbers_of_groups(work):
    run_ranks(2, several_optimizers, work)
    for step in range(2):
        assert files_of(work / f"later-{step}") == files_of(work / f"now-{step}")


def test_step_waits_for_what_is_not_copied(work):
    """The copies are held back in the thread; the step makes those that nobody has begun, and waits for the rest."""
    model, optimizer = make(dtype=torch.bfloat16, bucket_size=300)
    train(model, optimizer, 2)
    optimizer.save(work / "now")
    real, begun, gate = snapshot.np.copyto, threading.Event(), threading.Event()

    class Slow:
        @staticmethod
        def copyto(out, data):
            if threading.current_thread() is not threading.main_thread():
                begun.set()
                assert gate.wait(LIMIT)
            real(out, data)

    snapshot.np = Slow
    try:
        handle = optimizer.save(work / "later", asynchronous=True)
        assert begun.wait(LIMIT)
        timer = threading.Timer(0.3, gate.set)
        timer.start()
        train(model, optimizer, 1, 2)
        assert gate.is_set()
    finally:
        snapshot.np = __import__("numpy")
        gate.set()
    handle.wait()
    assert files_of(work / "later") == files_of(work / "now")


def test_load_and_reload_wait_too(work):
    model, optimizer = make(bucket_size=300)
    optimizer.save(work / "old")
    train(model, optimizer, 1)
    optimizer.save(work / "now")
    handle = optimizer.save(work / "later", asynchronous=True)
    optimizer.load(work / "old")
    with torch.no_grad():
        model.gain.fill_(3)
    optimizer.reload_model_params()
    handle.wait()
    assert files_of(work / "later") == files_of(work / "now")


def test_a_second_save_waits_for_the_first(work):
    model, optimizer = make(bucket_size=300)
    ends = []
    handles = []
    for step in range(4):
        train(model, optimizer, 1, step)
        handles.append(optimizer.save(work / f"step-{step}", asynchronous=True))
        ends.append([handle.done() for handle in handles[:-1]])
    assert all(all(row) for row in ends)
    optimizer.save(work / "last")
    assert handles[-1].done()
    assert [zero1ckpt.open(work / f"step-{step}").step for step in range(4)] == [1, 2, 3, 4]
    same_state(work / "step-3", work / "last")
    assert len({zero1ckpt.open(work / f"step-{step}").digest for step in range(4)}) == 4


def test_writing_to_state_by_hand_is_an_error_not_a_wrong_value(work):
    model, optimizer = make(dtype=torch.bfloat16, bucket_size=300)
    train(model, optimizer, 1)
    with held(snapshot._HostCopies, "_copy_one") as gate:
        handle = optimizer.save(work / "a", asynchronous=True)
        next(iter(optimizer.state.values()))["exp_avg"].add_(1)
        gate.set()
        with pytest.raises(UsageError, match="written to while a save was copying"):
            handle.wait()
    assert not (work / "a").exists()


def test_params_of_the_model_may_be_written_to_at_once(work):
    """An average of weights that is swapped in for an evaluation, in float32: no copy of the state is made by it."""
    model, optimizer = make(bucket_size=300)
    train(model, optimizer, 1)
    optimizer.save(work / "now")
    with held(snapshot.Snapshot, "finish") as gate:
        handle = optimizer.save(work / "later", asynchronous=True)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        gate.set()
        handle.wait()
    assert files_of(work / "later") == files_of(work / "now")


# --------------------------------------------------------------------------------------------------------------- errors


class BrokenError(Exception):
    pass


def fail(*args, **keywords):
    raise BrokenError("no more space")


def one_fails(rank, dp, work):
    model, optimizer = make(bucket_size=300)
    train(model, optimizer, 1, 0, rank, dp)
    real = saving.copy_part
    if rank == 1:
        saving.copy_part = fail
    told = []
    for tell in ("wait", "save"):
        handle = optimizer.save(work / "a", asynchronous=True)
        train(model, optimizer, 1, 1, rank, dp)
        try:
            handle.wait() if tell == "wait" else optimizer.save(work / "b")
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    saving.copy_part = real
    optimizer.save(work / "c", asynchronous=True).wait()
    return told


@pytest.mark.dist
def test_an_error_of_one_rank_reaches_all_at_wait_or_at_the_next_save(work):
    told = run_ranks(2, one_fails, 2, work)
    assert [len(row) for row in told] == [2, 2]
    assert all("no more space" in line for row in told for line in row), told
    assert "before this one failed" in told[0][1]
    assert {path.name for path in work.iterdir()} == {"c"}


def test_an_error_is_told_once(work, monkeypatch):
    _, optimizer = make(bucket_size=300)
    with monkeypatch.context() as patch:
        patch.setattr(saving, "copy_part", fail)
        handle = optimizer.save(work / "a", asynchronous=True)
        with pytest.raises(BrokenError):
            handle.wait()
    with pytest.raises(BrokenError):
        handle.wait()
    optimizer.save(work / "b")
    assert not async_save._UNTOLD


def test_arguments_are_refused_in_the_call(work):
    _, optimizer = make(bucket_size=300)
    (work / "taken").mkdir()
    (work / "taken" / "file").touch()
    with pytest.raises(OutputError, match="not empty"):
        optimizer.save(work / "taken", asynchronous=True)
    for bad in (0, -1, True, 1.5):
        with pytest.raises(UsageError, match="keep"):
            optimizer.save(work / "a", keep=bad)
    with pytest.raises(UsageError, match="pointer"):
        optimizer.save(work / "latest", latest=True)
    assert {path.name for path in work.iterdir()} == {"taken"}


def test_wait_has_a_limit(work):
    _, optimizer = make(bucket_size=300)
    with held(saving, "_write"):
        handle = optimizer.save(work / "a", asynchronous=True)
        with pytest.raises(Zero1CkptError, match="still going on"):
            handle.wait(timeout=0.05)
    handle.wait()


# --------------------------------------------------------------------------------------------------------------- memory


def test_nothing_is_kept_after_a_save(work, monkeypatch):
    """Neither after one that succeeded nor after one that failed, whose error is still held."""
    made = []
    real = snapshot._carve

    def carve(live, memory):
        made.append(real(live, memory))
        kept.append(weakref.ref(made[-1][0].untyped_storage()))
        return made.pop()

    kept = []
    monkeypatch.setattr(snapshot, "_carve", carve)
    _, optimizer = make(bucket_size=300)
    handle = optimizer.save(work / "a", asynchronous=True)
    handle.wait()
    assert [ref() for ref in kept] == [None]
    monkeypatch.setattr(saving, "copy_part", fail)
    failed = optimizer.save(work / "b", asynchronous=True)
    with pytest.raises(BrokenError) as caught:
        failed.wait()
    assert [ref() for ref in kept] == [None, None], caught

"""A folder appears whole or not at all; one writer at a time; nothing is left behind."""

import errno
import fcntl
import os
import signal

import pytest

from tests.faults import CALLS, calls, count_calls, in_child
from tests.strategies import tree
from zero1ckpt.core.errors import OutputError
from zero1ckpt.storage import staging as staging_module
from zero1ckpt.storage.staging import (
    Area,
    Staging,
    find_leftovers,
    partial_path,
    refuse_existing,
    remove_leftover,
    staged,
)

JOB = {"command": "test"}


def publish(dst, content=b"new", **keywords):
    with staged(Staging(dst, JOB, **keywords)) as area:
        area.path("data").write_bytes(content)
        area.path("deep/er/data").write_bytes(content)
        area.publish("manifest.json", b"{}")


def wanted(content=b"new"):
    return {"data": content, "deep": None, "deep/er": None, "deep/er/data": content, "manifest.json": b"{}"}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_publish(work):
    publish(work / "a" / "b" / "dst")
    assert tree(work / "a" / "b" / "dst") == wanted()
    assert names(work / "a" / "b") == ["dst"]


def test_nothing_is_visible_before_publish(work):
    area = Staging(work / "dst", JOB)
    area.path("data").write_bytes(b"x")
    assert not (work / "dst").exists()
    area.abandon()
    assert names(work) == []


def test_abandon_removes_made_parents_only(work):
    (work / "there").mkdir()
    with pytest.raises(RuntimeError), staged(Staging(work / "there" / "new" / "er" / "dst", JOB)) as area:
        area.path("data").write_bytes(b"x")
        raise RuntimeError
    assert names(work) == ["there"] and names(work / "there") == []


def test_a_rank_that_is_late_does_not_bring_an_abandoned_folder_back(work):
    staging = Staging(work / "dst", JOB)
    late = Area(staging.root)
    staging.abandon()
    with pytest.raises(OutputError):
        late.path("deep/er/data")
    with pytest.raises(OSError):
        late.path("data").write_bytes(b"x")
    assert names(work) == []


@pytest.mark.parametrize("resume", [False, True])
def test_processes_of_a_dead_writer_write_into_nothing(work, resume):
    """Rank 0 was killed, its other ranks go on: neither what they begin nor what they have open is the next one's."""
    dead = Staging(work / "dst", JOB)
    dead.path("deep/done").write_bytes(b"done")
    late = Area(dead.root)
    begun = late.path("data.part")
    with begun.open("wb") as file:
        file.write(b"x")
        file.flush()
        dead.leave()
        area = Staging(work / "dst", JOB if resume else {"command": "another"}, resume=resume)
        assert area.resumed == resume and (area.root / "deep" / "done").exists() == resume
        area.path("data.part").write_bytes(b"wanted")
        file.write(b"yyyyyyyyyy")
    with pytest.raises(OutputError):
        late.path("deep/er/data")
    with pytest.raises(OSError):
        late.path("other").write_bytes(b"x")
    with pytest.raises(OSError):
        begun.rename(late.path("data"))
    assert tree(area.root) == {**({"deep": None, "deep/done": b"done"} if resume else {}), "data.part": b"wanted"}
    area.abandon()
    assert names(work) == []


def test_interrupt_leaves_for_a_resume(work):
    with pytest.raises(KeyboardInterrupt), staged(Staging(work / "dst", JOB)) as area:
        area.path("data").write_bytes(b"x")
        raise KeyboardInterrupt
    assert [leftover.owner for leftover in find_leftovers(work / "dst")] == [None]
    area = Staging(work / "dst", JOB, resume=True)
    assert area.resumed and (area.root / "data").read_bytes() == b"x"
    area.leave()
    area = Staging(work / "dst", {"command": "another"}, resume=True)
    assert not area.resumed and not (area.root / "data").exists()
    area.leave()
    area = Staging(work / "dst", {"command": "another"})
    assert not area.resumed
    area.abandon()
    assert names(work) == []


@pytest.mark.parametrize("existing", ["file", "folder"])
def test_existing_is_refused(work, existing):
    if existing == "file":
        (work / "dst").write_text("mine")
    else:
        (work / "dst").mkdir()
        (work / "dst" / "mine").write_text("mine")
    before = tree(work)
    for overwrite in {False, existing == "file"}:
        with pytest.raises(OutputError, match="exists and is not") as caught:
            publish(work / "dst", overwrite=overwrite)
        assert caught.value.exit_code == 6 and str(work / "dst") in str(caught.value)
    assert tree(work) == before


def test_empty_folder_is_filled(work):
    (work / "dst").mkdir()
    publish(work / "dst")
    assert tree(work / "dst") == wanted()


@pytest.mark.parametrize("exchange", [True, False])
def test_overwrite(work, exchange, monkeypatch):
    if not exchange:
        monkeypatch.setattr(staging_module, "_exchange", lambda a, b: False)
    publish(work / "dst", b"old")
    publish(work / "dst", overwrite=True)
    assert tree(work / "dst") == wanted() and names(work) == ["dst"]


def test_overwrite_is_one_exchange_where_there_is_one(work):
    publish(work / "dst", b"old")
    done = count_calls(lambda: publish(work / "dst", overwrite=True))
    assert "exchange" in done
    renames = done[done.index("exchange") :].count("rename")
    assert renames == 0, "a rename after it would be a moment without DST"


def test_what_came_meanwhile_is_not_replaced(work):
    area = Staging(work / "dst", JOB)
    (work / "dst").mkdir()
    (work / "dst" / "theirs").write_text("x")
    with pytest.raises(OutputError, match="not empty"), staged(area):
        area.publish("manifest.json", b"{}")
    assert names(work) == ["dst"] and names(work / "dst") == ["theirs"]


# ------------------------------------------------------------------------------------------------------- two writers


def test_second_writer_fails_fast_and_names_the_first(work):
    area = Staging(work / "dst", JOB)
    area.path("data").write_bytes(b"first")
    before = tree(work)
    for resume in (False, True):
        with pytest.raises(OutputError, match=f"another writer is at work here: process {os.getpid()} on") as caught:
            Staging(work / "dst", JOB, resume=resume, overwrite=resume)
        assert caught.value.exit_code == 6 and str(work / "dst") in str(caught.value)
    assert tree(work) == before
    owners = [leftover.owner for leftover in find_leftovers(work / "dst")]
    assert len(owners) == 1 and f"process {os.getpid()} on" in owners[0]
    area.publish("manifest.json", b"{}")
    assert (work / "dst" / "data").read_bytes() == b"first"
    assert names(work) == ["dst"]


def test_second_writer_leaves_the_parents_that_the_first_made(work):
    area = Staging(work / "new" / "dst", JOB)
    with pytest.raises(OutputError):
        Staging(work / "new" / "dst", JOB)
    area.publish("manifest.json", b"{}")
    assert names(work / "new") == ["dst"]


def test_dead_owner_is_taken_over(work):
    def die():
        area = Staging(work / "dst", JOB)
        area.path("data").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(die) == -signal.SIGKILL
    (leftover,) = find_leftovers(work / "dst")
    assert leftover.owner is None and len(leftover.paths) == 2
    publish(work / "dst")
    assert tree(work / "dst") == wanted() and names(work) == ["dst"]


def test_lock_of_a_record_that_cannot_be_read_is_taken_over(work):
    (work / ".dst.zero1ckpt-lock").write_bytes(b'{"owner": {"pi')
    publish(work / "dst", resume=True)
    assert names(work) == ["dst"]


def test_a_lock_that_was_removed_between_open_and_lock_is_no_lock(work, monkeypatch):
    """Its last owner removes the file when it ends: who opened it before must not hold what nobody else can see."""
    real, first = fcntl.flock, []

    def flock(fd, how):
        if not first:
            first.append(fd)
            os.unlink(work / ".dst.zero1ckpt-lock")
        return real(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    area = Staging(work / "dst", JOB)
    with pytest.raises(OutputError, match="another writer"):
        Staging(work / "dst", JOB)
    area.abandon()
    assert names(work) == []


# --------------------------------------------------------------------------------------------------------- leftovers


def test_leftovers_are_found_beside_and_below_and_removed(work):
    for name in ("one", "two"):
        area = Staging(work / name, JOB)
        area.path("data").write_bytes(b"x")
        area.leave()
    (work / "mine.zero1ckpt-partial").mkdir()
    (work / ".zero1ckpt-partial").mkdir()
    (work / ".hidden").mkdir()
    assert [leftover.dst.name for leftover in find_leftovers(work)] == ["one", "two"]
    assert [leftover.dst.name for leftover in find_leftovers(work / "two")] == ["two"]
    for leftover in find_leftovers(work):
        remove_leftover(leftover)
    assert names(work) == [".hidden", ".zero1ckpt-partial", "mine.zero1ckpt-partial"]


def test_a_published_folder_is_no_leftover(work):
    publish(work / "dst")
    assert find_leftovers(work / "dst") == [] == find_leftovers(work)


def test_replaced_folder_is_put_back_and_never_removed_as_a_leftover(work):
    """Without an atomic exchange a kill can leave the old folder aside and no DST: the old one is the checkpoint."""
    publish(work / "dst", b"old")
    os.rename(work / "dst", work / ".dst.zero1ckpt-old.zero1ckpt-partial")
    partial_path(work / "dst").mkdir()
    (leftover,) = find_leftovers(work / "dst")
    remove_leftover(leftover)
    assert tree(work / "dst") == wanted(b"old") and names(work) == ["dst"]


# ---------------------------------------------------------------------------------------------------------- durability


def test_order_of_write_flush_rename_flush(work):
    """Every file is flushed before it gets its name, every folder before the whole appears, its parent after."""
    log = []

    def path_of(fd):
        return os.readlink(f"/proc/self/fd/{fd}")

    def before(name, args):
        if name == "fsync":
            log.append(("fsync", path_of(args[0])))
        elif name in ("rename", "exchange"):
            log.append(("rename", str(args[0]), str(args[1])))
        elif name == "open" and "w" in str(args[1:2]):
            log.append(("open", str(args[0])))

    with calls(before):
        publish(work / "new" / "er" / "dst")
    work = work / "new" / "er"
    ((moved, part),) = [(i, e[1]) for i, e in enumerate(log) if e[0] == "rename" and e[2] == str(work / "dst")]
    assert os.path.dirname(part) == str(partial_path(work / "dst"))
    last = log.index(("rename", f"{part}/.manifest.json.part", f"{part}/manifest.json"))
    assert log.index(("fsync", f"{part}/.manifest.json.part")) < last < moved
    for folder in (part, f"{part}/deep", f"{part}/deep/er"):
        assert last < log.index(("fsync", folder)) < moved
    for folder in (work, work.parent, work.parent.parent):  # those that were made are entries of theirs
        assert ("fsync", str(folder)) in log[moved:]


# ----------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT, errno.EIO])
def test_any_failing_call_is_an_output_error_and_leaves_nothing(work, code):
    publish(work / "other" / "dst")
    total = len(count_calls(lambda: publish(work / "probe" / "dst")))
    changing = {*CALLS, "exchange"} - {"close", "unlink", "rmdir"}
    failed = 0
    for moment in range(total):
        target = work / f"made{moment}" / "dst"
        left = [moment]
        hit = []

        def before(name, args, left=left, hit=hit):
            if left[0] == 0 and name in changing and not hit:
                hit.append(name)
                raise OSError(code, os.strerror(code))
            left[0] = max(left[0] - 1, 0)

        try:
            with calls(before):
                publish(target)
        except OutputError as error:
            failed += 1
            assert error.exit_code == 6 and "dst" in str(error) and "\n" not in str(error)
            if target.exists():  # the last flush of the parent failed: it is whole
                assert tree(target) == wanted()
                assert names(target.parent) == ["dst"]
            else:
                assert not target.parent.exists(), names(target.parent)
        except OSError as error:  # the test's own writes into the area
            assert error.errno == code and not target.parent.exists()
        else:
            assert tree(target) == wanted(), f"{hit} failed unnoticed"
    assert failed > 10


def test_refuse_existing(work):
    refuse_existing(work / "nothing", False)
    (work / "link").symlink_to(work / "nowhere")
    with pytest.raises(OutputError, match="not a folder"):
        refuse_existing(work / "link", True)

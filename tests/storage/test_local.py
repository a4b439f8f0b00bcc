"""Files by relative path: errors that name the file, descriptors that are given back."""

import errno
import gc
import os
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import zero1ckpt
from tests.faults import calls
from tests.strategies import small_state
from zero1ckpt.core.errors import CorruptError, MissingError, OutputError
from zero1ckpt.storage import local
from zero1ckpt.storage.local import LocalStore, OutputFile, writing


def descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@given(st.lists(st.integers(0, 40), max_size=9), st.integers(0, 30))
def test_vectored_read_fills_every_buffer(work, sizes, offset):
    data = bytes(range(256)) * 2
    (work / "x").write_bytes(data)
    buffers = [memoryview(bytearray(size)) for size in sizes]
    store = LocalStore(work)
    store.readv_into("x", offset, buffers)
    assert b"".join(buffers) == data[offset : offset + sum(sizes)]
    store.close()


def test_more_buffers_than_one_call_takes(work):
    data = os.urandom(5000)
    (work / "x").write_bytes(data)
    buffers = [memoryview(bytearray(1)) for _ in range(4999)]
    LocalStore(work).readv_into("x", 1, buffers)
    assert b"".join(buffers) == data[1:]


def test_short_reads_and_writes_are_continued(work, monkeypatch):
    preadv, pwrite = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:3]], at))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:7], at))
    data = os.urandom(100)
    file = OutputFile(work / "x", 100)
    file.write(50, memoryview(data)[50:])
    file.write(0, memoryview(data)[:50])
    file.sync_and_close()
    buffers = [memoryview(bytearray(n)) for n in (10, 0, 41, 49)]
    LocalStore(work).readv_into("x", 0, buffers)
    assert b"".join(buffers) == data


def test_end_of_file_says_where(work):
    (work / "x").write_bytes(b"12345")
    with pytest.raises(
        CorruptError, match=r"truncated \(found end at byte 5, expected data through byte 9\)"
    ) as caught:
        LocalStore(work).readv_into("x", 3, [memoryview(bytearray(6))])
    assert str(work / "x") in str(caught.value)


def test_missing(work):
    store = LocalStore(work)
    for call in (lambda: store.size("a/b"), lambda: store.read("a/b")):
        with pytest.raises(MissingError, match="a/b"):
            call()
    (work / "a").write_text("a file, not a folder")
    with pytest.raises(MissingError, match="a/b"):
        store.size("a/b")


def test_keys(work):
    (work / "d" / "e").mkdir(parents=True)
    (work / "d" / "e" / "x").write_text("")
    (work / "a").write_text("")
    assert LocalStore(work).keys() == ["a", "d/e/x"]


def test_more_files_than_are_kept_open(work):
    for i in range(150):
        (work / str(i)).write_bytes(bytes([i]))
    before = descriptors()
    store = LocalStore(work)
    assert [store.read(str(i)) for i in [*range(150), *range(150)]] == [bytes([i]) for i in range(150)] * 2
    assert descriptors() - before <= local._MAX_OPEN
    store.close()
    assert descriptors() == before
    assert store.read("3") == b"\3", "it opens again"


def test_many_threads_and_few_descriptors(work, monkeypatch):
    """A descriptor is not closed while a thread reads from it, nor its number reused under it."""
    monkeypatch.setattr(local, "_MAX_OPEN", 2)
    for i in range(16):
        (work / str(i)).write_bytes(bytes([i]) * 1000)
    store = LocalStore(work)
    bad = []

    def read(seed):
        for k in range(300):
            i = (seed * 7 + k * 5) % 16
            if store.read(str(i)) != bytes([i]) * 1000:
                bad.append(i)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not bad


def test_a_dropped_checkpoint_keeps_no_descriptor(work):
    """Verifying and loading at every step of a long run must not end at the limit of open files."""
    zero1ckpt.write(work / "a", small_state(1), dp_size=12, extra={"t": torch.ones(2)})

    def use(i):
        checkpoint = zero1ckpt.open(work / "a")
        checkpoint.read("layers.0.weight", "exp_avg")
        assert len(checkpoint.extra) == 1
        assert zero1ckpt.verify(work / "a", deep=True)
        zero1ckpt.reshard(work / "a", work / f"b{i}", to_dp=3)

    use(0)
    before = descriptors()
    for i in range(1, 5):
        use(i)
    assert descriptors() <= before


def test_a_failed_write_keeps_no_descriptor(work):
    zero1ckpt.write(work / "a", small_state(1), dp_size=12)

    def fail(name, args):
        if name == "fsync":
            raise OSError(errno.EIO, "no")

    def attempt():
        try:
            with calls(fail):
                zero1ckpt.reshard(work / "a", work / "b", to_dp=3)
        except OutputError:
            return
        pytest.fail("it did not fail")

    attempt()
    before = descriptors()
    for _ in range(5):
        attempt()
    assert descriptors() <= before


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.ENAMETOOLONG])
def test_writing_turns_system_errors_into_one_line(code):
    with pytest.raises(OutputError, match=f"^a/b: cannot be written: {os.strerror(code)}") as caught, writing("a/b"):
        raise OSError(code, os.strerror(code))
    assert caught.value.exit_code == 6 and caught.value.__cause__.errno == code


def test_space_is_reserved_before_a_byte_is_written(work, monkeypatch):
    file = OutputFile(work / "x", 10_000)
    assert (work / "x").stat().st_size == 10_000
    file.close()

    def unsupported(fd, at, size):
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    file = OutputFile(work / "y", 10_000)
    assert (work / "y").stat().st_size == 10_000
    file.sync_and_close()


def test_a_small_file_is_replaced_as_a_whole_or_not_at_all(work):
    local.replace_file(work / "x.json", b"one")
    local.replace_file(work / "x.json", b"two")
    assert [p.name for p in work.iterdir()] == ["x.json"] and (work / "x.json").read_bytes() == b"two"

    def fail(name, args):
        if name == "fsync":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OutputError, match=r"x\.json: cannot be written"), calls(fail):
        local.replace_file(work / "x.json", b"three")
    assert [p.name for p in work.iterdir()] == ["x.json"] and (work / "x.json").read_bytes() == b"two"

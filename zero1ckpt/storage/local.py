"""Checkpoint files on a local or shared file system."""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..core.errors import CorruptError, MissingError, OutputError

__all__ = ["LocalStore", "OutputFile", "fsync_folder", "replace_file", "writing"]

_MAX_OPEN = 64
"""Descriptors kept open: a DP 4,096 checkpoint has more files than a process may open."""
WRITE_BYTES = 2**20
"""Bytes a write call: larger ones make the page cache allocate large folios, which took three times as long."""
_IOV_MAX = min(os.sysconf("SC_IOV_MAX"), 1024)
_OPEN_READ = os.O_RDONLY | os.O_CLOEXEC


class LocalStore:
    """Files below a folder, by relative path. Thread-safe.

    Raises ``MissingError`` for a key without a file, ``CorruptError`` for one that ends early.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._open: OrderedDict[str, _Handle] = OrderedDict()
        self._lock = threading.Lock()

    def label(self, key: str) -> str:
        return str(self.root / key)

    def keys(self) -> list[str]:
        """All files below the folder, sorted."""
        found = []
        for folder, _, files in os.walk(self.root):
            inside = Path(folder).relative_to(self.root)
            found += [(inside / name).as_posix() for name in files]
        return sorted(found)

    def size(self, key: str) -> int:
        path = self.root / key
        try:
            return path.stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            raise MissingError(
                "a file of the checkpoint is missing", file=path, hint="restore it from a copy"
            ) from None
        except OSError as error:
            raise MissingError(f"cannot be opened: {error.strerror}", file=path) from error

    def check_inside(self, keys: Iterable[str]) -> None:
        """Raises ``CorruptError`` for the first of ``keys`` that a link leads out of the folder; it may itself be one.

        Whoever forges a checkpoint could name any file of the reader's so, and have it copied.
        """
        home = ""
        for place in dict.fromkeys(step for key in keys for step in _steps(key)):
            path = f"{self.root}/{place}"
            if not os.path.islink(path):
                continue
            home = home or os.path.realpath(self.root)
            target = os.path.realpath(path)
            if os.path.commonpath([home, target]) != home:
                raise CorruptError(
                    "a link that leads out of the checkpoint",
                    file=path,
                    found=target,
                    expected=f"a place in {home}",
                    hint="put the file itself there, if you trust it",
                )

    def read(self, key: str) -> bytes:
        """The whole file."""
        data = bytearray(self.size(key))
        self.readv_into(key, 0, [memoryview(data)])
        return bytes(data)

    def readv_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        with self._handle(key) as fd:
            for start in range(0, len(buffers), _IOV_MAX):
                offset = self._fill(fd, key, offset, list(buffers[start : start + _IOV_MAX]))

    def close(self) -> None:
        with self._lock:
            for handle in self._open.values():
                handle.release()
            self._open.clear()

    def __del__(self) -> None:  # dropped checkpoints keep no descriptors: verify and load are called often
        self.close()

    def _fill(self, fd: int, key: str, offset: int, buffers: list[memoryview]) -> int:
        wanted = sum(b.nbytes for b in buffers)
        end = offset + wanted
        while wanted:
            try:
                got = os.preadv(fd, buffers, offset)
            except OSError as error:
                raise CorruptError(
                    f"cannot be read at byte {offset}: {error.strerror}", file=self.label(key)
                ) from error
            if got == 0:
                raise CorruptError(
                    "the file is truncated",
                    file=self.label(key),
                    found=f"end at byte {offset}",
                    expected=f"data through byte {end}",
                    hint="restore it from a copy",
                )
            offset, wanted = offset + got, wanted - got
            while buffers and got >= buffers[0].nbytes:
                got -= buffers.pop(0).nbytes
            if got:
                buffers[0] = buffers[0][got:]
        return end

    @contextmanager
    def _handle(self, key: str) -> Iterator[int]:
        with self._lock:
            handle = self._open.get(key)
            if handle is None:
                handle = _Handle(self._descriptor(key))
                self._open[key] = handle
                if len(self._open) > _MAX_OPEN:
                    self._open.popitem(last=False)[1].release()
            else:
                self._open.move_to_end(key)
            handle.users += 1
        try:
            yield handle.fd
        finally:
            with self._lock:
                handle.release()

    def _descriptor(self, key: str) -> int:
        self.size(key)
        try:
            return os.open(self.root / key, _OPEN_READ)
        except OSError as error:
            raise MissingError(f"cannot be opened: {error.strerror}", file=self.label(key)) from error


def _steps(key: str) -> Iterator[str]:
    """A key and the folders on its way: ``a``, ``a/b``, ``a/b/c``."""
    at = key.find("/")
    while at >= 0:
        yield key[:at]
        at = key.find("/", at + 1)
    yield key


class _Handle:
    """A descriptor shared by the cache and the reads in flight; closed when the last lets go."""

    __slots__ = ("fd", "users")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 1

    def release(self) -> None:
        self.users -= 1
        if self.users == 0:
            os.close(self.fd)


@contextmanager
def writing(path: object) -> Iterator[None]:
    """Turns an ``OSError`` of the output into an ``OutputError`` that names the file and says what to do."""
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        hints = {
            errno.ENOSPC: "free some space or choose another place",
            errno.EDQUOT: "free some of your quota or choose another place",
            errno.EACCES: "choose a folder that you may write to",
            errno.EPERM: "choose a folder that you may write to",
            errno.EROFS: "choose a file system that is not read-only",
        }
        raise OutputError(
            f"cannot be written: {error.strerror or error}", file=path, hint=hints.get(error.errno or 0)
        ) from error


class OutputFile:
    """A file of known size that is written in windows, in any order, by several threads, and then made durable.

    Space is reserved at once, so that a full disk is found before a byte is copied. With ``create=False`` it is another
    process's file, of which this one writes a part.
    """

    def __init__(self, path: Path, nbytes: int, *, create: bool = True) -> None:
        self.path = path
        self._fd = -1
        with writing(path):
            flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_TRUNC if create else 0)
            self._fd = os.open(path, flags, 0o666)
            try:
                if create:
                    _reserve(self._fd, nbytes)
            except OSError:
                self.close()
                raise

    def write(self, offset: int, data: memoryview) -> None:
        with writing(self.path):
            while data.nbytes:
                done = os.pwrite(self._fd, data[:WRITE_BYTES], offset)
                offset, data = offset + done, data[done:]

    def sync_and_close(self) -> None:
        with writing(self.path):
            try:
                os.fsync(self._fd)
            finally:
                self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:  # left open by an error
        self.close()


def _reserve(fd: int, nbytes: int) -> None:
    if not nbytes:
        return
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(fd, nbytes)  # a file system without reservation finds a full disk while writing


def replace_file(path: Path, data: bytes) -> None:
    """Writes a small file: all of it, or what stood there stays. Raises ``OutputError``."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with writing(path):
        try:
            with aside.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise
        fsync_folder(path.parent)


def fsync_folder(path: Path) -> None:
    """Makes renames inside a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

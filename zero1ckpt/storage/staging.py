"""A folder appears whole or not at all.

A writer of ``DST`` works in a folder of its own in ``.DST.zero1ckpt-partial`` beside it and holds
``.DST.zero1ckpt-lock``. The folder, whose name no other writer has or had, is renamed to ``DST`` when its manifest is
in it and everything is durable; to replace an existing ``DST`` the two folders change places in one system call, so a
kill at any moment leaves the old or the new one. The kernel drops the lock with its owner, so leftovers of a dead
writer are told from the work of a live one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import LostRankError, OutputError
from .local import fsync_folder, writing

__all__ = [
    "RANKS_SUFFIX",
    "Area",
    "Leftover",
    "Staging",
    "find_leftovers",
    "partial_path",
    "refuse_existing",
    "refuse_live_writer",
    "remove_leftover",
    "remove_whole",
    "staged",
]

_PARTIAL = ".zero1ckpt-partial"
_LOCK = ".zero1ckpt-lock"
RANKS_SUFFIX = ".zero1ckpt-ranks"
"""Folder in which the ranks of one job meet (``storage.rendezvous``)."""
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def partial_path(dst: Path) -> Path:
    return dst.parent / f".{dst.name}{_PARTIAL}"


def lock_path(dst: Path) -> Path:
    return dst.parent / f".{dst.name}{_LOCK}"


def _aside_path(dst: Path) -> Path:
    """Where a folder that is replaced waits, where the system cannot exchange two folders at once."""
    return dst.parent / f".{dst.name}.zero1ckpt-old{_PARTIAL}"


class Area:
    """A folder that blobs are written to. ``resumed``: it may hold finished blobs of an interrupted run of the job."""

    def __init__(self, root: Path, *, resumed: bool = False) -> None:
        self.root = root
        self.resumed = resumed

    def path(self, key: str) -> Path:
        """Where a file of the folder is written; parents are made.

        Never the folder itself: where its owner has removed it after an error, other ranks must not bring it back.
        """
        path = self.root / key
        with writing(path):
            for folder in reversed(path.relative_to(self.root).parents[:-1]):
                (self.root / folder).mkdir(exist_ok=True)
        return path


class Staging(Area):
    """The half-made ``dst``. One writer at a time; use ``publish`` or ``abandon``, or leave it for a resume.

    ``job`` says what is being written; with ``resume`` what a dead writer of the same job left is kept, otherwise
    leftovers of dead writers are removed. Raises ``OutputError`` where ``dst`` exists and is not ``overwrite``d, where
    another live writer is at work, or where the folder may not be written.
    """

    def __init__(self, dst: Path, job: dict[str, Any], *, overwrite: bool = False, resume: bool = False) -> None:
        self._partial = partial_path(dst)
        super().__init__(self._partial / secrets.token_hex(4))
        self.dst = dst
        self.overwrite = overwrite
        self._lock_fd = -1
        self._published = False
        self._made: list[Path] = []
        with writing(dst):
            refuse_existing(dst, overwrite)
            try:
                self._make_parents()
                self._lock_fd = _take_lock(dst)
                _put_back(dst)
                refuse_existing(dst, overwrite)
                self._make_root(_left_area(self._partial) if resume and self._left_job() == job else None)
                self._write_job(job)
            except BaseException:
                if self._lock_fd >= 0 and not self.resumed:
                    shutil.rmtree(self._partial, ignore_errors=True)
                self._unlock(remove=not self.resumed)
                self._remove_made()
                raise

    def publish(self, name: str, data: bytes) -> None:
        """Writes the last file, makes all durable and moves the folder into place."""
        with writing(self.dst):
            last = self.root / name
            aside = self.root / f".{name}.part"
            with aside.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            aside.rename(last)
            for folder, _, _ in os.walk(self.root):
                fsync_folder(Path(folder))
            refuse_existing(self.dst, self.overwrite)
            self._move_into_place()
            self._published = True
            for parent in (self.dst.parent, *(made.parent for made in reversed(self._made))):
                fsync_folder(parent)
            shutil.rmtree(self._partial, ignore_errors=True)  # what was replaced
            self._unlock(remove=True)

    def abandon(self) -> None:
        """Removes everything that was made, the missing parents included; what was published already stays whole."""
        shutil.rmtree(self._partial, ignore_errors=True)  # when published, what was replaced, if anything
        self._unlock(remove=True)
        if not self._published:
            self._remove_made()

    def leave(self) -> None:
        """Leaves what was made for a later resume."""
        self._unlock()

    def _left_job(self) -> Any:
        """What the last writer that held the lock was writing."""
        return _read_lock(self._lock_fd).get("job")

    def _make_root(self, left: Path | None) -> None:
        """Makes the folder, or takes over what is ``left``, under a new name.

        Processes of a dead writer may still be at work: their paths lead nowhere now, and what they have open is no
        file of the folder any more.
        """
        self.resumed = left is not None
        if left is None:
            if self._partial.exists():
                shutil.rmtree(self._partial)
            self._partial.mkdir()
            self.root.mkdir()
            return
        left.rename(self.root)
        for path in self.root.rglob("*.part"):
            if path.is_file():  # a param may be called so
                path.unlink()

    def _move_into_place(self) -> None:
        if not self.overwrite or not self.dst.exists() or not any(self.dst.iterdir()):
            os.rename(self.root, self.dst)  # refuses a folder that was filled meanwhile
        elif not _exchange(self.root, self.dst):
            # Without an atomic exchange there is a moment without DST. Both folders exist throughout, and whoever comes
            # after a kill in that moment puts the old one back (_put_back).
            aside = _aside_path(self.dst)
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(self.dst, aside)
            os.rename(self.root, self.dst)
            shutil.rmtree(aside, ignore_errors=True)

    def _make_parents(self) -> None:
        missing = []
        folder = self.dst.parent
        while not folder.exists():
            missing.append(folder)
            folder = folder.parent
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                self._made.append(path)

    def _write_job(self, job: dict[str, Any]) -> None:
        record = {"owner": {"pid": os.getpid(), "host": socket.gethostname()}, "job": job}
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, json.dumps(record).encode(), 0)
        os.fsync(self._lock_fd)

    def _unlock(self, *, remove: bool = False) -> None:
        if self._lock_fd >= 0:
            if remove:
                with contextlib.suppress(OSError):
                    os.unlink(lock_path(self.dst))
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _remove_made(self) -> None:
        for folder in reversed(self._made):
            with contextlib.suppress(OSError):
                folder.rmdir()


def _left_area(partial: Path) -> Path | None:
    """The folder in which a dead writer worked, if it left one."""
    try:
        left = list(partial.iterdir())
    except FileNotFoundError:
        return None
    return left[0] if len(left) == 1 and left[0].is_dir() else None


@dataclass(frozen=True, slots=True)
class Leftover:
    """What a writer of ``dst`` left. ``owner`` is set while a live writer holds it."""

    dst: Path
    paths: tuple[Path, ...]
    owner: str | None


def find_leftovers(path: Path) -> list[Leftover]:
    """Leftovers of writers of ``path`` itself, and of everything directly in it."""
    targets: dict[Path, None] = {}
    for folder, only in ((path.parent, path.name), (path, None)):
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                dst = _target_of(name)
                if dst is not None and only in (None, dst):
                    targets[folder / dst] = None
    return [leftover for dst in sorted(targets) if (leftover := _leftover(dst)).paths]


def remove_leftover(leftover: Leftover) -> None:
    """Removes what a dead writer left; a folder that it had moved aside to replace it goes back to its place.

    Raises ``OutputError`` when it may not be removed, or when a live writer is at work there.
    """
    with writing(leftover.dst):
        fd = _take_lock(leftover.dst)
        try:
            _put_back(leftover.dst)
            for path in leftover.paths:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(lock_path(leftover.dst))
            os.close(fd)


def remove_whole(dst: Path) -> None:
    """Removes a folder. It leaves its place in one step: a kill leaves all of it, or a leftover of this tool beside it.

    Raises ``OutputError`` when it may not be removed, or when a live writer is at work there.
    """
    with writing(dst):
        fd = _take_lock(dst)
        try:
            aside = partial_path(dst)
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(dst, aside)
            fsync_folder(dst.parent)
            shutil.rmtree(aside)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(lock_path(dst))
            os.close(fd)


def refuse_live_writer(dst: Path) -> None:
    """Raises ``OutputError`` where a live writer is at work at ``dst``."""
    owner = _live_owner(lock_path(dst))
    if owner is not None:
        raise _other_writer(dst, owner)


def _other_writer(dst: Path, owner: str) -> OutputError:
    return OutputError(f"another writer is at work here: {owner}", file=dst, hint="wait for it or choose another place")


def refuse_existing(dst: Path, overwrite: bool) -> None:
    """Raises ``OutputError`` where ``dst`` holds something, unless it is to be overwritten and is a folder."""
    if not os.path.lexists(dst):
        return
    if not dst.is_dir():
        raise OutputError("exists and is not a folder", file=dst, hint="choose another place")
    if any(dst.iterdir()) and not overwrite:
        raise OutputError("exists and is not empty", file=dst, hint="choose another place or pass overwrite")


def _take_lock(dst: Path) -> int:
    """The descriptor that holds the lock of ``dst``'s writer. Raises ``OutputError`` where a live writer has it."""
    path = lock_path(dst)
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = _owner_of(fd)
            os.close(fd)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise _other_writer(dst, owner) from None
        try:
            current = os.stat(path).st_ino
        except FileNotFoundError:
            current = -1
        if os.fstat(fd).st_ino == current:
            return fd
        os.close(fd)  # its last owner has just removed the file: try again with the new one


def _put_back(dst: Path) -> None:
    """Ends a replacement that was killed between its two renames. Only for the owner of the lock."""
    aside = _aside_path(dst)
    if not aside.is_dir():
        return
    if os.path.lexists(dst):
        shutil.rmtree(aside)
    else:
        os.rename(aside, dst)
        fsync_folder(dst.parent)


def _target_of(name: str) -> str | None:
    for end in (f".zero1ckpt-old{_PARTIAL}", _PARTIAL, RANKS_SUFFIX, _LOCK):
        if name.startswith(".") and name.endswith(end) and len(name) > len(end) + 1:
            return name[1 : -len(end)]
    return None


def _leftover(dst: Path) -> Leftover:
    names = [partial_path(dst), _aside_path(dst), dst.parent / f".{dst.name}{RANKS_SUFFIX}", lock_path(dst)]
    paths = tuple(path for path in names if os.path.lexists(path))
    return Leftover(dst, paths, _live_owner(lock_path(dst)))


def _live_owner(path: Path) -> str | None:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return _owner_of(fd)
    finally:
        os.close(fd)
    return None


def _owner_of(fd: int) -> str:
    owner = _read_lock(fd).get("owner")
    known: dict[str, Any] = owner if isinstance(owner, dict) else {}
    return f"process {known.get('pid')} on {known.get('host')}"


def _read_lock(fd: int) -> dict[str, Any]:
    try:
        record = json.loads(os.pread(fd, 1 << 20, 0) or b"{}")
    except ValueError:  # its owner died while it wrote it
        return {}
    return record if isinstance(record, dict) else {}


def _exchange(a: Path, b: Path) -> bool:
    """Swaps two folders in one step (renameat2, Linux 3.15 on); False where the system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(b))


@contextlib.contextmanager
def staged(staging: Staging) -> Iterator[Staging]:
    """Abandons on an error; leaves what was made for a resume on an interrupt."""
    try:
        yield staging
    except LostRankError:
        staging.leave()
        raise
    except Exception:
        staging.abandon()
        raise
    except BaseException:
        staging.leave()
        raise

"""Saves that go on while training does: a thread each, with messages of their own.

Over one process group there is one such save at a time, so that checkpoints are committed in the order of the calls.
Its messages go over a second gloo group of the same ranks, made with the first asynchronous save: no message of
training can come between them.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..core.errors import UsageError, Zero1CkptError
from ..engine.control import ControlPlane
from ..engine.snapshot import Snapshot

__all__ = ["Flight", "Lane", "SaveHandle", "lane_of", "settle"]


class Flight:
    """One save in its thread. ``work`` returns the bytes that it has sent; ``snapshots`` are dropped at its end.

    The interpreter does not end before the thread has, and an error that nobody was told is written to stderr then.
    """

    def __init__(self, path: Path, work: Callable[[], int], snapshots: Sequence[Snapshot]) -> None:
        self.path = path
        self.sent_bytes = 0
        self.error: BaseException | None = None
        self._work: Callable[[], int] | None = work
        self._snapshots = tuple(snapshots)
        self._over = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name=f"zero1ckpt save {path.name}", daemon=False)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        assert self._work is not None
        try:
            for snapshot in self._snapshots:
                snapshot.finish()
            self.sent_bytes = self._work()
        except BaseException as error:
            self._fail(error)
        finally:
            for snapshot in self._snapshots:
                snapshot.release()
            self._work, self._snapshots = None, ()
            self._over.set()

    def _fail(self, error: BaseException) -> None:
        cause: BaseException | None = error
        while cause is not None:  # frames keep what was to be saved
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__
        self.error = error
        _UNTOLD[id(self)] = self

    @property
    def elsewhere(self) -> bool:
        """It belongs to the process that this one was forked from."""
        return os.getpid() != self._pid

    def done(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Returns when the checkpoint is committed; raises what went wrong, or ``Zero1CkptError`` after ``timeout``."""
        self.end(timeout)
        if self.error is not None:
            self.tell()
            raise self.error

    def end(self, timeout: float | None = None) -> None:
        """Returns when the save is over, however it ended."""
        if self.elsewhere:
            raise UsageError(
                "the save belongs to another process", file=self.path, found=os.getpid(), expected=self._pid
            )
        if not self._over.wait(timeout):
            raise Zero1CkptError("the save is still going on", file=self.path, found=f"{timeout:g} s have passed")
        self._thread.join()

    @property
    def untold(self) -> BaseException | None:
        """An error that has not been raised yet."""
        return self.error if id(self) in _UNTOLD else None

    def tell(self) -> None:
        _UNTOLD.pop(id(self), None)


_UNTOLD: dict[int, Flight] = {}
"""Failed saves whose error was not raised yet."""


def _report_untold() -> None:
    for flight in _UNTOLD.values():
        if not flight.elsewhere:
            sys.stderr.write(f"zero1ckpt: the asynchronous save of {flight.path} failed: {flight.error}\n")


atexit.register(_report_untold)


class SaveHandle:
    """A save that has ended, or goes on in the background. ``path`` is the checkpoint."""

    def __init__(self, path: Path, sent_bytes: int = 0, flight: Flight | None = None) -> None:
        self.path = path
        self._sent_bytes = sent_bytes
        self._flight = flight

    def wait(self, timeout: float | None = None) -> Path:
        """Returns when the checkpoint is committed.

        Raises what the save has failed with, ``Zero1CkptError`` where it goes on after ``timeout`` seconds. To be
        called before the process group is destroyed.
        """
        if self._flight is not None:
            self._flight.wait(timeout)
        return self.path

    def done(self) -> bool:
        """Has it ended? ``wait`` tells how."""
        return self._flight is None or self._flight.done()

    @property
    def sent_bytes(self) -> int:
        """Bytes of tensors that the ranks have sent each other."""
        return self._sent_bytes if self._flight is None else self._flight.sent_bytes


class Lane:
    """The asynchronous saves over one process group: the last one, the group of their messages, memory to use again."""

    def __init__(self) -> None:
        self.flight: Flight | None = None
        self.memory: dict[str, torch.Tensor] = {}
        self._plane: ControlPlane | None = None

    def plane(self, group: dist.ProcessGroup | None, control: ControlPlane) -> ControlPlane:
        """Messages of saves in the background; made by all ranks of ``group`` at the first call."""
        if self._plane is None:
            alone = group is None or control.size == 1
            self._plane = ControlPlane(None if alone or group is None else _second_group(group, control))
        self._plane.timeout = control.timeout
        return self._plane


_LANES: MutableMapping[dist.ProcessGroup, Lane] = WeakKeyDictionary()
_ALONE = Lane()


def lane_of(group: dist.ProcessGroup | None) -> Lane:
    return _ALONE if group is None else _LANES.setdefault(group, Lane())


def settle(lanes: Iterable[Lane]) -> None:
    """Waits for the saves in flight; raises the first error among them that was not raised yet."""
    flights = [lane.flight for lane in lanes if lane.flight is not None and not lane.flight.elsewhere]
    for flight in flights:
        flight.end()
    for flight in flights:
        error = flight.untold
        if error is not None:
            flight.tell()
            kind = type(error) if isinstance(error, Zero1CkptError) else Zero1CkptError
            raise kind(f"the save of {flight.path} before this one failed: {error}") from error


def _second_group(group: dist.ProcessGroup, control: ControlPlane) -> dist.ProcessGroup:
    """A gloo group of the same ranks.

    Its name is made of the number of groups that a process is in, which must be the same on all ranks: those that are
    in fewer make some of one rank.
    """
    count = len(distributed_c10d._world.pg_names)
    for _ in range(count, max(control.all_gather(count, "groups of asynchronous saves"))):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    ranks = dist.get_process_group_ranks(group)
    made = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made

"""Who is missing: ranks that a collective waited for in vain are named, not only that it has failed.

Every rank counts its collectives. A rank whose wait fails (its timeout has passed, or a connection broke) writes its
count to the group's store; the failure reaches all ranks that wait, and they do the same. Whoever has not written after
a while, or stands at a smaller count, is what the others wait for. In the ordinary case nothing is written.
"""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_process_group_store

from ..core.errors import UsageError, Zero1CkptError

__all__ = ["Arrivals", "group_timeout", "read_timeout"]

DEFAULT = timedelta(minutes=30)
GRACE = timedelta(seconds=5)
"""How long a rank that failed waits for the others to say where they are."""


class Arrivals:
    """Counts this rank's collectives on one group, and explains failed waits. Without a store it explains nothing."""

    def __init__(self, store: Store | None, rank: int, size: int, timeout: timedelta | None = None) -> None:
        self._store, self._rank, self._size = store, rank, size
        self.timeout = timeout
        self._count = 0

    @classmethod
    def of_group(cls, group: dist.ProcessGroup, timeout: timedelta | None) -> Arrivals:
        """``timeout``: None waits as long as the backend does. All ranks of ``group`` make theirs in the same order."""
        store = _get_process_group_store(group)
        made = _MADE.get(group, 0)
        _MADE[group] = made + 1
        own = PrefixStore(f"zero1ckpt/arrivals/{made}", store)
        return cls(own, dist.get_rank(group), dist.get_world_size(group), timeout)

    def next(self) -> int:
        """The number of a collective that is being started."""
        self._count += 1
        return self._count

    def wait(self, work: Any, number: int, what: str) -> None:
        """Wait for ``work``; where that fails or takes too long, ``Zero1CkptError`` that names the missing ranks."""
        try:
            if self.timeout is None:
                work.wait()
            else:
                work.wait(self.timeout)
        except RuntimeError as error:
            raise self.explain(number, what, error) from error

    def explain(self, number: int, what: str, error: Exception) -> Zero1CkptError:
        """The error to raise where collective ``number`` has failed on this rank; may take as long as ``GRACE``."""
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        standing = self._standings(number)
        if standing is None:
            return Zero1CkptError(f"{what} {number} failed", found=cause, hint="the store of the group is gone too")
        late = {rank: at for rank, at in standing.items() if at is None or at < number}
        names = ", ".join(f"rank {r}" + ("" if at is None else f" (at {at})") for r, at in late.items())
        limit = "" if self.timeout is None else f" within {self.timeout.total_seconds():g} s"
        return Zero1CkptError(
            f"{what} {number} did not finish{limit}",
            found=f"{names or 'no rank'} missing: {cause}",
            hint="a rank failed, is too slow, or did not make the same calls",
        )

    def by_first_rank(self, number: int, cause: str) -> str:
        """Why barrier ``number`` has failed. In a barrier of gloo only rank 0 learns who is missing, and the others
        that rank 0 broke off; so it writes what it knows, and they read it, for up to ``GRACE``.
        """
        if self._store is None:
            return cause
        key = f"barrier/{number}"
        try:
            if self._rank == 0:
                self._store.set(key, cause)
                return cause
            deadline = time.monotonic() + GRACE.total_seconds()
            while not self._store.check([key]):
                if time.monotonic() > deadline:
                    return f"[Rank {self._rank}]: rank 0 is missing: {cause}"
                time.sleep(0.05)
            return str(self._store.get(key).decode())
        except RuntimeError:
            return cause

    def _standings(self, number: int) -> dict[int, int | None] | None:
        """Where each other rank says that it is; None for those that say nothing."""
        if self._store is None:
            return {}
        others = [rank for rank in range(self._size) if rank != self._rank]
        try:
            self._store.set(str(self._rank), str(number))
            deadline = time.monotonic() + GRACE.total_seconds()
            while time.monotonic() < deadline and not self._store.check([str(rank) for rank in others]):
                time.sleep(0.05)
            return {r: int(self._store.get(str(r))) if self._store.check([str(r)]) else None for r in others}
        except RuntimeError:
            return None


_MADE: MutableMapping[dist.ProcessGroup, int] = WeakKeyDictionary()
"""Instances by group: each gets keys of its own."""


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """How long the collectives of ``group`` may take."""
    for device in ("cpu", "cuda"):
        try:
            limit: timedelta = group._get_backend(torch.device(device)).options._timeout
            return limit
        except (RuntimeError, AttributeError):
            continue
    return DEFAULT


def read_timeout(given: Any) -> timedelta | None:
    """From the keyword ``timeout``: seconds or a timedelta. Raises ``UsageError`` for none of them or not above 0."""
    if given is None:
        return None
    if isinstance(given, int | float) and not isinstance(given, bool):
        given = timedelta(seconds=given)
    if not isinstance(given, timedelta) or given <= timedelta(0):
        raise UsageError("timeout", found=repr(given), expected="seconds above 0, a timedelta, or None")
    return given

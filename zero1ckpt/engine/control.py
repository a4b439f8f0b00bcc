"""The control plane: small Python objects between the CPUs of one data-parallel group.

Used at construction, saving and loading; tensor bytes go over it only in ``exchange``. It goes over the data group
itself where that has a gloo backend for CPU tensors, else over a gloo group of the same ranks. Every call of all ranks
starts with a barrier that names the ranks that did not come in time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..core.digest import crc64
from ..core.errors import LostRankError, UsageError, Zero1CkptError
from .waiting import Arrivals, group_timeout

__all__ = ["ControlPlane"]

TIMEOUT = timedelta(minutes=10)
Message = tuple[int, torch.Tensor, int]
"""The rank at the other end, a tensor of the CPU, and a tag."""


class ControlPlane:
    """Gathers, broadcasts and compares. ``rank`` and ``size`` count within the group; one rank sends nothing.

    All ranks of the group make it, and call its methods, in the same order.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta | None = None) -> None:
        self.timeout = timeout or TIMEOUT
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self._group: dist.ProcessGroup | None = None
        if group is not None and self.size > 1:
            self._group = group if _has_gloo(group) else _gloo_beside(group)
            self._arrivals = Arrivals.of_group(self._group, timeout or min(TIMEOUT, group_timeout(self._group)))

    def barrier(self, what: str = "control plane") -> None:
        """Wait for all ranks. Raises ``Zero1CkptError`` that names the missing ones after ``timeout``."""
        if self._group is None:
            return
        number = self._arrivals.next()
        try:
            dist.monitored_barrier(self._group, self.timeout, wait_all_ranks=True)
        except RuntimeError as error:
            raise Zero1CkptError(
                f"{what}: not all ranks arrived within {self.timeout.total_seconds():g} s",
                found=self._arrivals.by_first_rank(number, _first_line(error)),
                hint="a rank failed, is too slow, or did not make the same call",
            ) from error

    @contextmanager
    def _message(self, what: str) -> Iterator[None]:
        """A rank that dies after the barrier and before its message breaks a connection."""
        try:
            yield
        except RuntimeError as error:
            raise Zero1CkptError(
                f"{what}: the message of a rank did not arrive", found=_first_line(error), hint="a rank failed"
            ) from error

    def gather(self, obj: Any, what: str = "gather") -> list[Any] | None:
        """Every rank's object in rank order on rank 0, None elsewhere."""
        if self._group is None:
            return [obj]
        self.barrier(what)
        out: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with self._message(what):
            dist.gather_object(obj, out, dst=self._root, group=self._group)
        return out

    def all_gather(self, obj: Any, what: str = "all_gather") -> list[Any]:
        """Every rank's object in rank order, on every rank."""
        if self._group is None:
            return [obj]
        self.barrier(what)
        out: list[Any] = [None] * self.size
        with self._message(what):
            dist.all_gather_object(out, obj, group=self._group)
        return out

    def broadcast(self, obj: Any, what: str = "broadcast") -> Any:
        """Rank 0's object, on every rank."""
        if self._group is None:
            return obj
        self.barrier(what)
        box = [obj if self.rank == 0 else None]
        with self._message(what):
            dist.broadcast_object_list(box, src=self._root, group=self._group)
        return box[0]

    def agree(self, rows: Sequence[tuple[str, str]], what: str) -> None:
        """Check that all ranks have the same ``rows`` of (name, description), in order; one digest is compared.

        Raises ``UsageError`` on every rank; it names the first rank that differs from rank 0, and the first row.
        """
        if self._group is None:
            return
        digests = self.all_gather(crc64(repr(list(rows)).encode()), what)
        if len(set(digests)) == 1:
            return
        table = self.all_gather(list(rows), what)
        rank = next(k for k, digest in enumerate(digests) if digest != digests[0])
        at = _first_difference(table[0], table[rank])
        expected = _row_at(table[0], at)
        found = _row_at(table[rank], at)
        raise UsageError(
            f"{what} differ between rank 0 and rank {rank}, first at position {at}",
            param=found[0] or expected[0],
            found=" ".join(found).strip() or "nothing",
            expected=" ".join(expected).strip() or "nothing",
            hint="all ranks must build the same model with the same options",
        )

    def raise_together(self, error: Zero1CkptError | None, what: str = "check", told: Any = None) -> list[Any]:
        """Raise this rank's ``error``, or the first other rank's with its rank named.

        Where all are None, returns what the ranks have ``told``, which goes in the same message.
        """
        report = None if error is None else (type(error), str(error))
        reports = [(report, told)] if self._group is None else self.all_gather((report, told), what)
        if error is not None:
            raise error
        for rank, (other, _) in enumerate(reports):
            if other is not None:
                raise other[0](f"rank {rank}: {other[1]}")
        return [own for _, own in reports]

    def begin_any_of(self, flags: Sequence[bool]) -> Callable[[], list[bool]]:
        """Element by element: does any rank have True? One message without a barrier; the answer is got by a call."""
        if self._group is None:
            own = list(flags)
            return lambda: own
        tensor = torch.tensor(flags, dtype=torch.uint8)
        work: Any = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group, async_op=True)
        number = self._arrivals.next()

        def wait() -> list[bool]:
            self._arrivals.wait(work, number, "step")
            return [bool(flag) for flag in tensor.tolist()]

        return wait

    def exchange(self, sends: Sequence[Message], takes: Sequence[Message], what: str) -> None:
        """Point to point, all at once: sends tensors, and fills others with what ranks send under the same tag.

        Raises ``LostRankError`` that names a rank whose part has not come within ``timeout``.
        """
        if self._group is None:
            return
        works = []
        for post, messages in ((dist.isend, sends), (dist.irecv, takes)):
            for rank, data, tag in messages:
                with self._lost(what, rank):
                    works.append((rank, post(data, dist.get_global_rank(self._group, rank), self._group, tag)))
        for rank, work in works:
            with self._lost(what, rank):
                if work is not None:
                    work.wait(self.timeout)

    @contextmanager
    def _lost(self, what: str, rank: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise LostRankError(
                f"{what}: rank {rank} does not answer (limit {self.timeout.total_seconds():g} s)",
                found=_first_line(error),
                hint="a rank failed or is too slow",
            ) from error

    @property
    def _root(self) -> int:
        assert self._group is not None
        return dist.get_global_rank(self._group, 0)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _has_gloo(group: dist.ProcessGroup) -> bool:
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return False
    return isinstance(backend, dist.ProcessGroupGloo)


def _gloo_beside(group: dist.ProcessGroup) -> dist.ProcessGroup:
    ranks = dist.get_process_group_ranks(group)
    made = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


def _first_difference(a: list[tuple[str, str]], b: list[tuple[str, str]]) -> int:
    for at, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return at
    return min(len(a), len(b))


def _row_at(rows: list[tuple[str, str]], at: int) -> tuple[str, str]:
    return rows[at] if at < len(rows) else ("", "")

"""Several instances of one sharded optimizer: state is sharded inside an instance and replicated across instances.

``num_distributed_optimizer_instances=k`` cuts a data-parallel group of ``n`` ranks into k runs of ``m = n / k``
consecutive ranks, as Megatron does: rank ``r`` has place ``r % m`` in instance ``r // m``. The dp size of the layout
is ``m``, so that params are gathered over short ways; a rank keeps k times the state.

Gradients are averaged over all ``n`` ranks. A rank's shard of a bucket is cut into k pieces; piece ``i`` of all ranks
goes to the owner in instance ``i``, who sums it in the rank order of the whole group; then the k owners of a shard
exchange their pieces. That is what Megatron's reduce-scatter inside and all-reduce across instances puts on the wire
too, ``(1 + (k - 2) / n) x`` the bucket, but with one order for every sum: the result is bit-identical to that of
k = 1. Where the backend chooses the order anyway (``reduce="mean"`` and ``"prescaled"`` on CUDA), it is Megatron's
way, which sends less of it from one instance to another.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ..core.errors import UsageError
from .collectives import (
    Communicator,
    NativeCommunicator,
    Pending,
    PointToPointCommunicator,
    make_communicator,
)
from .reductions import REDUCTIONS
from .waiting import Arrivals, group_timeout

__all__ = ["InstancesCommunicator", "NativeInstances", "UnevenCommunicator", "instance_size", "make_instances"]


def instance_size(ranks: int, instances: Any) -> int:
    """Ranks of one instance. Raises ``UsageError`` where ``instances`` does not divide ``ranks``."""
    if isinstance(instances, bool) or not isinstance(instances, int) or instances < 1 or ranks % instances:
        raise UsageError(
            "num_distributed_optimizer_instances",
            found=repr(instances),
            expected=f"a number that divides {ranks} ranks",
        )
    return ranks // instances


class UnevenCommunicator(PointToPointCommunicator):
    """Rank ``i * columns + j`` owns piece ``i`` of slice ``j`` of a bucket of ``columns`` equal slices."""

    def __init__(self, group: dist.ProcessGroup, columns: int, reduce: str, arrivals: Arrivals) -> None:
        super().__init__(group, REDUCTIONS[reduce], arrivals)
        self._columns = columns

    def slice_of(self, bucket: torch.Tensor, rank: int) -> torch.Tensor:
        row, column = divmod(rank, self._columns)
        rows, width = self.size // self._columns, bucket.numel() // self._columns
        start = column * width
        return bucket[start + row * width // rows : start + (row + 1) * width // rows]


class _Instances(Communicator):
    """What both kinds have in common: ``inside`` an instance, ``whole`` group. ``rank`` and ``size``: in the instance.

    ``gather_rows`` is inside too: other instances hold the same rows.
    """

    def __init__(self, inside: Communicator, whole: Communicator) -> None:
        super().__init__(None, whole.reduction, whole.arrivals)
        self.rank, self.size, self.divisor = inside.rank, inside.size, whole.divisor
        self.leads = whole.rank == 0
        self._inside, self._whole = inside, whole
        inside.traffic = whole.traffic = self.traffic

    @property
    def scratch_bytes(self) -> int:
        return self._inside.scratch_bytes + self._whole.scratch_bytes

    def begin_all_gather(self, bucket: torch.Tensor) -> Pending:
        return self._inside.begin_all_gather(bucket)

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._whole.broadcast(tensor)

    def gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        return self._inside.gather_rows(row)


class InstancesCommunicator(_Instances):
    """Sums in the rank order of the whole group. ``across``: the owners of one shard, one an instance."""

    def __init__(self, inside: Communicator, whole: UnevenCommunicator, across: UnevenCommunicator) -> None:
        super().__init__(inside, whole)
        self._across = across
        across.traffic = self.traffic

    def begin_reduce_scatter(self, bucket: torch.Tensor, out: torch.Tensor, *, ahead: bool = False) -> Pending:
        piece = self._across.own(out)
        return _ThenExchange(self._whole.begin_reduce_scatter(bucket, piece, ahead=ahead), self._across, out)


class _ThenExchange:
    """A piece of a shard that is being summed; the others' pieces of it come once it is."""

    def __init__(self, first: Pending, across: Communicator, out: torch.Tensor) -> None:
        self._first, self._across, self._out = first, across, out

    def wait(self) -> None:
        self._first.wait()
        self._across.all_gather(self._out)


class NativeInstances(_Instances):
    """Reduce-scatter inside an instance, all-reduce across: the order of the sums is the backend's."""

    def __init__(self, inside: Communicator, whole: Communicator, across: dist.ProcessGroup) -> None:
        super().__init__(inside, whole)
        self._across = across

    def begin_reduce_scatter(self, bucket: torch.Tensor, out: torch.Tensor, *, ahead: bool = False) -> Pending:
        return self._then(self._inside.begin_reduce_scatter(bucket, out, ahead=ahead), out)

    def begin_reduce_scatters(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *, ahead: bool = False
    ) -> list[Pending]:
        works = self._inside.begin_reduce_scatters(pairs, ahead=ahead)
        return [self._then(work, out) for work, (_, out) in zip(works, pairs, strict=True)]

    def _then(self, first: Pending, out: torch.Tensor) -> Pending:
        size = dist.get_world_size(self._across)
        self.traffic.add(1, 2 * (size - 1) * out.numel() // size, out.element_size())
        return _ThenAllReduce(first, self._across, out)


class _ThenAllReduce:
    """A mean over one instance that becomes the mean over all."""

    def __init__(self, first: Pending, across: dist.ProcessGroup, out: torch.Tensor) -> None:
        self._first, self._across, self._out = first, across, out

    def wait(self) -> None:
        self._first.wait()
        if self._out.numel():
            dist.all_reduce(self._out, group=self._across)
            self._out.div_(dist.get_world_size(self._across))


def make_instances(
    group: dist.ProcessGroup | None,
    size: int,
    device: torch.device,
    reduce: str = "mean",
    timeout: timedelta | None = None,
) -> Communicator:
    """The communicator of ``group`` in instances of ``size`` ranks; see ``make_communicator``."""
    ranks = 1 if group is None else dist.get_world_size(group)
    if group is None or ranks == size:
        return make_communicator(group, device, reduce, timeout)
    inside_group, across = _groups(group, size)
    inside = make_communicator(inside_group, device, reduce, timeout)
    if device.type != "cpu" and not REDUCTIONS[reduce].fixed:
        whole = NativeCommunicator(group, REDUCTIONS[reduce], Arrivals.of_group(group, None))
        return NativeInstances(inside, whole, across)
    limit = timeout or group_timeout(group) if device.type == "cpu" else None
    return InstancesCommunicator(
        inside,
        UnevenCommunicator(group, size, reduce, Arrivals.of_group(group, limit)),
        UnevenCommunicator(across, 1, reduce, Arrivals.of_group(across, limit)),
    )


_MADE: MutableMapping[dist.ProcessGroup, dict[int, tuple[dist.ProcessGroup | None, dist.ProcessGroup]]] = (
    WeakKeyDictionary()
)
"""Groups inside and across instances of a size, by the group that they are cut from: made once."""


def _groups(group: dist.ProcessGroup, size: int) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup]:
    made = _MADE.setdefault(group, {})
    if size not in made:
        ranks = dist.get_process_group_ranks(group)
        instance, place = divmod(dist.get_rank(group), size)
        inside = _subgroup(group, ranks[instance * size : (instance + 1) * size]) if size > 1 else None
        made[size] = (inside, _subgroup(group, ranks[place::size]))
    return made[size]


def _subgroup(group: dist.ProcessGroup, ranks: list[int]) -> dist.ProcessGroup:
    """Made by its own ranks only."""
    made = dist.new_group(
        ranks, timeout=group_timeout(group), backend=dist.get_backend_config(group), use_local_synchronization=True
    )
    assert isinstance(made, dist.ProcessGroup)
    return made

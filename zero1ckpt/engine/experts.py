"""Expert params (``allreduce=False``): buffers of their own, reduced and sharded over an expert data-parallel group.

With expert parallelism the data-parallel ranks hold different experts under the same names; only the ranks of one
``expert_group`` hold the same. The expert groups are as large as each other and tile the data-parallel group; an
expert group is numbered by its first rank, which is its rank in the expert-parallel group.

An expert's gradient is summed over its group and divided by the size of the whole data-parallel group, as in Megatron:
the backward pass of the exchange of tokens has brought the gradients of the losses of all ranks to their experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from ..core.errors import UnsupportedError, UsageError, Zero1CkptError
from ..core.layout import Layout, LayoutRules, layout_params
from ..model.state import ParamSpec
from .collectives import Communicator, Pending, make_communicator
from .control import ControlPlane
from .replicas import verify_replicas

__all__ = [
    "ArrivalFlags",
    "ExpertCommunicator",
    "Experts",
    "expert_layout",
    "expert_size",
    "find_experts",
    "verify_all",
]


def expert_size(expert: Any, data: dist.ProcessGroup | None, instances: int) -> int | None:
    """Ranks of the expert group, None without one. Raises ``UsageError`` for a group outside of the data-parallel one
    or without this rank, ``UnsupportedError`` beside several instances.
    """
    if expert is None:
        return None
    stranger: Any = dist.GroupMember.NON_GROUP_MEMBER  # what new_group gives to those that are not in it
    if not isinstance(expert, dist.ProcessGroup) and expert is not stranger:
        raise UsageError("expert_group", found=type(expert).__name__, expected="a process group")
    if expert is stranger or dist.get_rank(expert) < 0:
        raise UsageError("this rank is not in expert_group", found=f"global rank {dist.get_rank()}")
    if instances != 1:
        raise UnsupportedError(
            "expert_group beside several optimizer instances",
            found=f"num_distributed_optimizer_instances={instances}",
            expected="1",
        )
    ranks = dist.get_process_group_ranks(expert)
    outside = sorted(set(ranks) - set(() if data is None else dist.get_process_group_ranks(data)))
    if outside:
        raise UsageError("expert_group is not a part of process_group", found=f"ranks {outside} besides")
    return dist.get_world_size(expert)


def expert_layout(dense: Layout, specs: Sequence[ParamSpec], size: int) -> Layout:
    """``dense`` with the expert buffers laid out for ``size`` ranks. Pure."""
    rules = dense.rules
    own = layout_params(specs, LayoutRules(size, rules.bucket_size, rules.param_align, rules.bucket_align))
    rows = zip(dense.buffers, own.buffers, strict=True)
    return Layout(rules, tuple(theirs if theirs.key.expert else ours for ours, theirs in rows), dense.param_count)


@dataclass(frozen=True)
class Experts:
    """This rank's expert group: number ``index`` of ``count``."""

    index: int
    count: int
    group: dist.ProcessGroup
    control: ControlPlane
    ranks: tuple[int, ...]
    """Ranks of the data-parallel group that are in it."""

    def join(
        self, dense: Communicator, layout: Layout, device: torch.device, reduce: str, timeout: timedelta | None
    ) -> ExpertCommunicator:
        """The communicator of all buffers of ``layout``."""
        own = make_communicator(self.group, device, reduce, timeout)
        own.divisor = dense.divisor
        own.traffic = dense.traffic
        return ExpertCommunicator(dense, own, sum(not buffer.key.expert for buffer in layout.buffers))


def find_experts(control: ControlPlane, group: dist.ProcessGroup | None, timeout: timedelta | None) -> Experts | None:
    """To be called by all ranks of ``control``, with groups of one size or none.

    Raises ``UsageError`` where the groups do not tile the ranks.
    """
    if group is None:
        return None
    own = tuple(dist.get_process_group_ranks(group))
    told = control.all_gather(own, "the expert groups")
    groups = sorted(set(told))
    members = [rank for ranks in groups for rank in ranks]
    if len(members) != control.size or len(set(members)) != control.size:
        raise UsageError(
            "the expert groups do not tile process_group",
            found=f"groups {', '.join(str(list(ranks)) for ranks in groups)}",
            expected="each rank in one group, on all of its ranks",
        )
    ranks = tuple(rank for rank, theirs in enumerate(told) if theirs == own)
    return Experts(groups.index(own), len(groups), group, ControlPlane(group, timeout), ranks)


class ExpertCommunicator(Communicator):
    """The dense group's, and that of the expert group for all buffers from ``first`` on."""

    def __init__(self, dense: Communicator, expert: Communicator, first: int) -> None:
        super().__init__(None, dense.reduction, dense.arrivals)
        self.rank, self.size, self.divisor, self.leads = dense.rank, dense.size, dense.divisor, dense.leads
        self.traffic = dense.traffic
        self._dense, self._expert, self._first = dense, expert, first

    def of(self, buffer: int) -> Communicator:
        return self._dense if buffer < self._first else self._expert

    def begin_buckets(
        self, launches: Sequence[tuple[int, torch.Tensor, torch.Tensor]], *, ahead: bool = False
    ) -> list[Pending]:
        works: list[Pending] = []
        for expert, run in groupby(launches, lambda launch: launch[0] >= self._first):
            pairs = [(bucket, out) for _, bucket, out in run]
            works += (self._expert if expert else self._dense).begin_reduce_scatters(pairs, ahead=ahead)
        return works

    @property
    def scratch_bytes(self) -> int:
        return self._dense.scratch_bytes + self._expert.scratch_bytes

    def begin_reduce_scatter(self, bucket: torch.Tensor, out: torch.Tensor, *, ahead: bool = False) -> Pending:
        return self._dense.begin_reduce_scatter(bucket, out, ahead=ahead)

    def begin_all_gather(self, bucket: torch.Tensor) -> Pending:
        return self._dense.begin_all_gather(bucket)

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._dense.broadcast(tensor)

    def gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        return self._dense.gather_rows(row)


class ArrivalFlags:
    """Flags of params, or-ed over the ranks that hold the same ones. Expert params have one row an expert group."""

    def __init__(self, specs: Sequence[ParamSpec], experts: Experts | None) -> None:
        self._total = len(specs)
        self._own = [i for i, spec in enumerate(specs) if spec.expert] if experts is not None else []
        self._index, self._count = (0, 0) if experts is None else (experts.index, experts.count)

    @property
    def size(self) -> int:
        return self._total + self._count * len(self._own)

    def spread(self, flags: Sequence[bool]) -> list[bool]:
        """What to send: all flags, then those of the experts in their group's row."""
        rows = [[at == self._index and flags[i] for i in self._own] for at in range(self._count)]
        return [*flags, *(flag for row in rows for flag in row)]

    def collect(self, flags: Sequence[bool]) -> list[bool]:
        """By param, from the answer to what ``spread`` has made."""
        made = list(flags[: self._total])
        start = self._total + self._index * len(self._own)
        for at, i in enumerate(self._own):
            made[i] = flags[start + at]
        return made


def verify_all(
    control: ControlPlane, experts: Experts | None, tensors: Sequence[torch.Tensor], specs: Sequence[ParamSpec]
) -> None:
    """``verify_replicas`` of dense params over ``control``'s ranks, and of experts over their group; all raise if one
    does.
    """
    own = [i for i, spec in enumerate(specs) if spec.expert and experts is not None]
    rest = sorted(set(range(len(specs))) - set(own))
    verify_replicas(control, [tensors[i] for i in rest], [specs[i].name for i in rest])
    if experts is None:
        return
    error: Zero1CkptError | None = None
    try:
        verify_replicas(experts.control, [tensors[i] for i in own], [specs[i].name for i in own])
    except Zero1CkptError as found:
        error = found
    control.raise_together(error, "verify_replicas")

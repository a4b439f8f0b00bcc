"""Which process groups an optimizer works over, and what each is for.

``data``: replicas of the model; gradients are averaged over it. ``model_parallel``: ranks that hold other parts of one
replica, tensor-parallel pieces or pipeline stages; norms are summed and overflows agreed over it. ``tensor_parallel``:
the ranks of it that hold pieces of the same params. A param without ``tensor_model_parallel = True`` is held whole by
each of those, and counts in norms on their first rank only. A param with ``shared = True`` (the last pipeline stage's
copy of the embedding) counts nowhere: the original does. These are Megatron's rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..core.errors import UsageError, Zero1CkptError
from .control import ControlPlane
from .params import ParamTable

__all__ = ["ParallelGroups", "data_group", "is_counted", "other_rank_refused", "read_together"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class ParallelGroups:
    """The groups besides the data-parallel one, None where there is no such parallelism."""

    model_parallel: dist.ProcessGroup | None = None
    tensor_parallel: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, model_parallel: Any, tensor_parallel: Any) -> ParallelGroups:
        """``model_parallel`` is ``tensor_parallel`` unless it is given.

        Raises ``UsageError`` where this rank is in none, or one of them is not a part of the other.
        """
        for name, group in (("model_parallel_group", model_parallel), ("tensor_parallel_group", tensor_parallel)):
            if group is not None and dist.get_rank(group) < 0:
                raise UsageError(f"this rank is not in {name}", found=f"global rank {dist.get_rank()}")
        if model_parallel is None or tensor_parallel is None:
            return cls(model_parallel or tensor_parallel, tensor_parallel)
        whole, part = (set(dist.get_process_group_ranks(g)) for g in (model_parallel, tensor_parallel))
        if not part <= whole:
            raise UsageError(
                "tensor_parallel_group is not a part of model_parallel_group",
                found=f"ranks {sorted(part)}",
                expected=f"some of ranks {sorted(whole)}",
            )
        return cls(model_parallel, tensor_parallel)

    @property
    def tensor_rank(self) -> int:
        return 0 if self.tensor_parallel is None else dist.get_rank(self.tensor_parallel)

    def check(self, table: ParamTable) -> None:
        """Raises ``UsageError`` for a tensor-parallel param where it is not known which others are duplicates."""
        if self.model_parallel is None or self.tensor_parallel is not None:
            return
        for tensor, spec in zip(table.tensors, table.specs, strict=True):
            if getattr(tensor, "tensor_model_parallel", False):
                raise UsageError(
                    "a tensor-parallel param needs tensor_parallel_group=, or its whole params count more than once",
                    param=spec.name,
                )

    def counted(self, tensors: Sequence[torch.Tensor]) -> tuple[bool, ...]:
        """Which params count in norms on this rank."""
        return tuple(is_counted(tensor, self.tensor_rank) for tensor in tensors)


def is_counted(tensor: torch.Tensor, tensor_rank: int) -> bool:
    """Megatron's rule: not shared, and either cut over the tensor-parallel ranks or on the first of them."""
    if getattr(tensor, "shared", False):
        return False
    return tensor_rank == 0 or bool(getattr(tensor, "tensor_model_parallel", False))


def data_group(given: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The given group, the default one, or None where nothing is initialised. ``UsageError`` for a stranger to it."""
    if given is None:
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if dist.get_rank(given) < 0:
        raise UsageError("this rank is not in process_group", found=f"global rank {dist.get_rank()}")
    return given


def read_together(control: ControlPlane, read: Callable[[], _T]) -> _T:
    """The result of ``read`` on this rank; every rank raises when one does."""
    error: Zero1CkptError | None = None
    made: _T | None = None
    try:
        made = read()
    except Zero1CkptError as found:
        error = found
    control.raise_together(error, "construction of the optimizer")
    assert made is not None
    return made


def other_rank_refused() -> UsageError:
    return UsageError("another rank refuses the step", hint="see the error of that rank")

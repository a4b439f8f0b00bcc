"""What the model, its gradients and its optimizer take on each card, by DDP and by ZeRO-1, 2 and 3. Pure.

Rule: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5 and figure 1
(bytes) and section 7 (communication); Megatron-Core's table of bytes a param for its distributed optimizer. Activations
and what an allocator adds are not in it.

``temporary_main_grads``: the inner optimizer steps main params in their own dtype. Where gradients are narrower, a copy
of those that the rank steps is made for the step: of all of them under DDP, of 1/DP where the optimizer is sharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from fractions import Fraction

from .dtypes import itemsize
from .layout import Layout

__all__ = [
    "BufferSize",
    "Memory",
    "Recipe",
    "Stage",
    "buffer_sizes",
    "memory_by_kind",
    "sharded_memory",
    "smallest_dp",
    "wire_bytes",
]


class Stage(Enum):
    """What is cut into 1/DP a rank: nothing; the optimizer's state; gradients too; params too."""

    DDP = "ddp"
    ZERO_1 = "zero-1"
    ZERO_2 = "zero-2"
    ZERO_3 = "zero-3"

    @property
    def title(self) -> str:
        return "DDP" if self is Stage.DDP else self.value.replace("zero", "ZeRO")


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the optimizer keeps for each element: the main param, and ``states`` by their dtypes."""

    main_dtype: str = "float32"
    states: tuple[str, ...] = ("float32", "float32")

    @property
    def state_bytes(self) -> int:
        """Bytes an element of all states."""
        return sum(itemsize(dtype) for dtype in self.states)


@dataclass(frozen=True, slots=True)
class BufferSize:
    """Elements of the params of one (param dtype, grad dtype): as they are, and padded for ``dp_size`` ranks."""

    param_dtype: str
    grad_dtype: str
    numel: int
    padded: int
    buckets: int = 1
    dp_size: int = 1

    @property
    def shard(self) -> int:
        """Padded elements that one rank owns."""
        return -(-self.padded // self.dp_size)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one rank, by kind."""

    params: int = 0
    grads: int = 0
    main_params: int = 0
    states: int = 0
    temporary_main_grads: int = 0

    @property
    def optimizer(self) -> int:
        """What the optimizer adds: main params and states."""
        return self.main_params + self.states

    @property
    def total(self) -> int:
        """What is there between two steps."""
        return self.params + self.grads + self.main_params + self.states

    @property
    def peak(self) -> int:
        """What is there during the step."""
        return self.total + self.temporary_main_grads

    def __add__(self, other: Memory) -> Memory:
        return Memory(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def buffer_sizes(layout: Layout) -> list[BufferSize]:
    """The sizes of a layout's buffers. Pure."""
    return [
        BufferSize(
            buffer.key.param_dtype,
            buffer.key.grad_dtype,
            int((buffer.end - buffer.start).sum()),
            buffer.numel,
            buffer.bucket_count,
            layout.rules.dp_size,
        )
        for buffer in layout.buffers
    ]


def memory_by_kind(buffer: BufferSize, recipe: Recipe, *, params: int, grads: int, owned: int) -> Memory:
    """Bytes of the elements that a rank holds of a buffer: of its params, its grads, and of what it steps. Pure.

    Params of the main dtype are their own main params.
    """
    main = owned * itemsize(recipe.main_dtype)
    return Memory(
        params * itemsize(buffer.param_dtype),
        grads * itemsize(buffer.grad_dtype),
        0 if buffer.param_dtype == recipe.main_dtype else main,
        owned * recipe.state_bytes,
        0 if buffer.grad_dtype == recipe.main_dtype else main,
    )


def sharded_memory(stage: Stage, buffers: Iterable[BufferSize], recipe: Recipe) -> Memory:
    """Bytes on the rank that has most, for all buffers. Pure."""
    total = Memory()
    for buffer in buffers:
        shard = buffer.shard
        held = buffer.numel if stage is Stage.DDP else buffer.padded
        total += memory_by_kind(
            buffer,
            recipe,
            params=shard if stage is Stage.ZERO_3 else held,
            grads=shard if stage in (Stage.ZERO_2, Stage.ZERO_3) else held,
            owned=held if stage is Stage.DDP else shard,
        )
    return total


def wire_bytes(stage: Stage, buffers: Iterable[BufferSize]) -> int:
    """Bytes that each rank sends in one step of one micro-batch, by rings. Pure.

    DDP all-reduces gradients; ZeRO-1 and 2 reduce-scatter gradients and gather params; ZeRO-3 gathers params twice, for
    the forward and for the backward pass. ZeRO-2 and 3 send gradients again for every further micro-batch.
    """
    total = Fraction(0)
    for buffer in buffers:
        grad, param = itemsize(buffer.grad_dtype), itemsize(buffer.param_dtype)
        share = Fraction(buffer.dp_size - 1, buffer.dp_size)
        if stage is Stage.DDP:
            total += share * buffer.numel * 2 * grad
        else:
            total += share * buffer.padded * (grad + param * (2 if stage is Stage.ZERO_3 else 1))
    return round(total)


def smallest_dp(buffers: Sequence[BufferSize], recipe: Recipe, limit: int, stage: Stage, bound: int) -> int | None:
    """The smallest dp size, up to ``bound``, at which a rank needs at most ``limit`` bytes, padding aside. Pure."""

    def peak(dp_size: int) -> int:
        plain = [BufferSize(b.param_dtype, b.grad_dtype, b.numel, b.numel, b.buckets, dp_size) for b in buffers]
        return sharded_memory(stage, plain, recipe).peak

    low, high = 1, bound
    if peak(high) > limit:
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if peak(middle) <= limit else (middle + 1, high)
    return low

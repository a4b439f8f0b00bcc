"""The numerical choices of a gradient reduction, keyword ``reduce``, and the ordered sums that they are made of. Pure.

``g_r`` is rank r's gradient, summed over its micro-batches in the grad dtype; ``n`` is the dp size; sums are taken in
the dtype of the main params (float32), whatever the grad dtype.

=============  ===================================  ======================  ==========================================
``reduce``     result                               on the wire             when
=============  ===================================  ======================  ==========================================
``mean``       ``((g_0 + g_1) + g_2 ...) / n``      the grad dtype          the default. On CUDA the order of the sum is
                                                                            NCCL's
``ordered``    ``((g_0 + g_1) + g_2 ...) / n``      the grad dtype,         bit-identical across bucket sizes on CUDA
                                                    all-to-all on CUDA      too; on CPU the same as ``mean``
``prescaled``  ``g_0 * (1/n) + g_1 * (1/n) ...``    the grad dtype          the sum cannot overflow where each gradient
                                                                            does not (float16 gradients); as Megatron
``bf16``       ``(b(g_0) + b(g_1) ...) / n``, b:    bfloat16, all-to-all    half the bytes of float32; one rounding of
               rounding to bfloat16                                         each rank's gradient, none of the sum
``tree``       pairs of micro-batches, then pairs   float32, all-to-all     bit-identical for every split of the same
               of pairs ..., ``/ n``                on CUDA                 micro-batches over ranks and accumulation
=============  ===================================  ======================  ==========================================

``tree``: with k micro-batches a rank, micro-batch j of rank r is number ``m = r * k + j``. Complete blocks of 2, 4, 8
and so on consecutive numbers are summed as a balanced binary tree; what is left over at the end (where their count is
no power of two) is added from the right. Where k is a power of two, a rank's own micro-batches are whole subtrees, so
that 4 ranks x 1, 2 x 2 and 1 x 4 add the same pairs; any other k has an order that is fixed, but its own. All ranks
must run the same number of backward passes a step, and each loss must be divided by k as ever, which is exact for
powers of two. It keeps up to ``log2(k)`` further copies of the grad buffers, and needs float32 gradients (float64 for
float64 models).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["REDUCTIONS", "Reduction", "fixed_sum", "ordered_sum", "tree_sum"]


@dataclass(frozen=True, slots=True)
class Reduction:
    """One row of the table. ``fixed``: the order of the sum is part of the promise, on every backend."""

    prescale: bool = False
    wire: torch.dtype | None = None
    tree: bool = False
    fixed: bool = True


REDUCTIONS = {
    "mean": Reduction(fixed=False),
    "ordered": Reduction(),
    "prescaled": Reduction(prescale=True, fixed=False),
    "bf16": Reduction(wire=torch.bfloat16),
    "tree": Reduction(tree=True),
}


def fixed_sum(reduction: Reduction, parts: Sequence[torch.Tensor], own: int, out: torch.Tensor) -> None:
    """``out``: the sum of all ranks' ``parts`` in the order of ``reduction``. See ``ordered_sum`` for what is spent."""
    if reduction.tree:
        tree_sum(parts, out)
    else:
        ordered_sum(parts, own, out)


def ordered_sum(parts: Sequence[torch.Tensor], own: int, out: torch.Tensor) -> None:
    """``out = ((parts[0] + parts[1]) + parts[2]) + ...`` in ``out``'s dtype.

    ``out`` may be ``parts[own]``; the parts before ``own`` are overwritten then (partial sums).
    """
    if out.dtype != parts[0].dtype:
        out.copy_(parts[0])
        for part in parts[1:]:
            out.add_(part)
        return
    running = parts[0]
    for k, part in enumerate(parts[1:], 1):
        target = out if k >= own else running
        torch.add(running, part, out=target)
        running = target


def tree_sum(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """``out``: the sum of ``parts``, all of ``out``'s dtype, as a binary counter adds them. Overwrites all parts."""
    blocks: list[tuple[int, torch.Tensor]] = []
    for part in parts:
        size, total = 1, part
        while blocks and blocks[-1][0] == size:
            total = blocks.pop()[1].add_(total)
            size *= 2
        blocks.append((size, total))
    total = blocks.pop()[1]
    while blocks:
        total = blocks.pop()[1].add_(total)
    if total.data_ptr() != out.data_ptr():
        out.copy_(total)

"""The global gradient norm and clipping by it, over shards that tile the gradient."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from .collectives import Communicator

__all__ = ["clip_by_norm", "count_zeros", "global_norm"]

CHUNK = 1 << 18
"""Elements that are squared in float64 at a time: the float64 copy stays this small."""
EPSILON = 1e-6
"""Added to the norm before the division, as ``torch.nn.utils.clip_grad_norm_`` does."""


def global_norm(shards: Iterable[torch.Tensor], scopes: Sequence[Communicator], device: torch.device) -> torch.Tensor:
    """2-norm over the shards (1-D each) of all ranks of ``scopes`` as a 0-d float64 tensor on ``device``.

    Each element counts once: shards are disjoint and padding is zero. Squares are summed in float64, ranks in rank
    order: every rank gets the same bits. Nothing is read back to the host.
    """
    total = torch.zeros(1, dtype=torch.float64, device=device)
    for shard in shards:
        for chunk in torch.split(shard, CHUNK):
            wide = chunk.double()
            total += torch.dot(wide, wide)
    return _sum_of_ranks(total, scopes).sqrt().squeeze(0)


def count_zeros(pieces: Iterable[torch.Tensor], scopes: Sequence[Communicator], device: torch.device) -> int:
    """Elements that are zero of all ranks' ``pieces`` (disjoint, without padding). Reads one number back."""
    total = torch.zeros(1, dtype=torch.int64, device=device)
    for piece in pieces:
        total += piece.numel() - torch.count_nonzero(piece)
    return int(_sum_of_ranks(total, scopes))


def _sum_of_ranks(row: torch.Tensor, scopes: Sequence[Communicator]) -> torch.Tensor:
    """Over the ranks of each scope in rank order, one scope after the other: the same bits on every rank."""
    for comm in scopes:
        rows = comm.gather_rows(row)
        row = rows[0]
        for other in rows[1:]:
            row = row + other
    return row


def clip_by_norm(shards: Iterable[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Multiply every shard by ``min(1, max_norm / (norm + 1e-6))``, in place."""
    factor = (max_norm / (norm + EPSILON)).clamp(max=1.0)
    if factor.device.type == "cpu" and float(factor) == 1.0:
        return
    for shard in shards:
        shard.mul_(factor.to(shard.dtype))

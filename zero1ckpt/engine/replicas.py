"""Do all ranks hold the same params? Digests of them are compared, not the params."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from ..core.digest import crc64
from ..core.errors import VerificationError
from .control import ControlPlane

__all__ = ["verify_replicas"]


def verify_replicas(control: ControlPlane, tensors: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """Raises ``VerificationError`` on every rank where one rank's param differs by a bit; it names rank and param."""
    digests = [_digest(tensor) for tensor in tensors]
    rows = control.all_gather(digests, "verify_replicas")
    for index, name in enumerate(names):
        seen = [row[index] for row in rows]
        if len(set(seen)) > 1:
            usual = Counter(seen).most_common(1)[0][0]
            odd = [rank for rank, digest in enumerate(seen) if digest != usual]
            raise VerificationError(
                f"param differs on rank {', '.join(map(str, odd))} from rank {seen.index(usual)}",
                param=name,
                found=f"digest {seen[odd[0]]:016x}",
                expected=f"{usual:016x}",
                hint="load a checkpoint, or broadcast the params and call reload_model_params()",
            )


def _digest(tensor: torch.Tensor) -> int:
    flat = tensor.detach().reshape(-1).contiguous().cpu()
    return crc64(flat.view(torch.uint8).numpy().data) if flat.numel() else 0

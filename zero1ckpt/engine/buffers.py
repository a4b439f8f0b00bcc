"""Contiguous memory for params and gradients: one pair of 1-D tensors a ``BufferLayout``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..core.layout import BufferLayout, Layout
from .params import dtype_of

__all__ = ["ParamGradBuffer", "alias", "make_buffers"]


class ParamGradBuffer:
    """Memory of one buffer: ``params`` and ``grads``, 1-D, ``layout.numel`` elements, padding zero.

    The model's params lie in ``params`` (their values are kept), and ``param.main_grad`` in ``grads``: see ``alias``.
    """

    def __init__(self, layout: BufferLayout, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        self.layout = layout
        self.params = torch.zeros(layout.numel, dtype=dtype_of(layout.key.param_dtype), device=device)
        self.grads = torch.zeros(layout.numel, dtype=dtype_of(layout.key.grad_dtype), device=device)
        self.main_grads: dict[int, torch.Tensor] = {}
        """Alias of ``grads`` in the param's shape, by param index."""
        for placement in layout.placements:
            tensor = tensors[placement.param]
            low, high = placement.world.start, placement.world.end
            home = alias(self.params[low:high].view(tensor.shape))
            home.copy_(tensor.detach())
            tensor.data = home
            self.main_grads[placement.param] = alias(self.grads[low:high].view(tensor.shape))
            tensor.main_grad = self.main_grads[placement.param]  # type: ignore[attr-defined]  # Megatron's attribute

    def bucket_of_params(self, bucket: int) -> torch.Tensor:
        """The bucket's slice of ``params``, padding included."""
        return self.slice(self.params, bucket)

    def bucket_of_grads(self, bucket: int) -> torch.Tensor:
        """The bucket's slice of ``grads``, padding included."""
        return self.slice(self.grads, bucket)

    def slice(self, memory: torch.Tensor, bucket: int) -> torch.Tensor:
        """The bucket's slice of a 1-D tensor that is laid out as this buffer."""
        low = int(self.layout.bucket_offset[bucket])
        return memory[low : low + int(self.layout.bucket_numel[bucket])]


def alias(view: torch.Tensor) -> torch.Tensor:
    """The same memory as ``view``, with a storage of exactly its bytes and a version counter of its own.

    ``torch.save`` writes whole storages: one layer's ``state_dict()`` would bring the buffer along if params were views
    of it (measured: 4 KB of params took the buffer's 2 MB). The counter tells which param something wrote to. The
    memory lives as long as any alias of it.
    """
    made: torch.Tensor = torch.from_dlpack(view)  # type: ignore[attr-defined]  # missing in its stubs
    return made


def make_buffers(layout: Layout, tensors: Sequence[torch.Tensor], device: torch.device) -> tuple[ParamGradBuffer, ...]:
    """Move ``tensors`` (registration order) into buffers."""
    with torch.no_grad():
        return tuple(ParamGradBuffer(buffer, tensors, device) for buffer in layout.buffers)

"""Contiguous memory for params and gradients: one pair of 1-D tensors a ``BufferLayout``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..core.layout import BufferLayout, Layout
from .params import dtype_of

__all__ = ["ParamGradBuffer", "make_buffers"]


class ParamGradBuffer:
    """Memory of one buffer: ``params`` and ``grads``, 1-D, ``layout.numel`` elements, padding zero.

    The model's params become views of ``params`` (their values are kept), and ``param.main_grad`` views of ``grads``.
    """

    def __init__(self, layout: BufferLayout, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        self.layout = layout
        self.params = torch.zeros(layout.numel, dtype=dtype_of(layout.key.param_dtype), device=device)
        self.grads = torch.zeros(layout.numel, dtype=dtype_of(layout.key.grad_dtype), device=device)
        self.main_grads: dict[int, torch.Tensor] = {}
        """View of ``grads`` in the param's shape, by param index."""
        for placement in layout.placements:
            tensor = tensors[placement.param]
            low, high = placement.world.start, placement.world.end
            view = self.params[low:high].view(tensor.shape)
            view.copy_(tensor.detach())
            tensor.data = view
            self.main_grads[placement.param] = self.grads[low:high].view(tensor.shape)
            tensor.main_grad = self.main_grads[placement.param]  # type: ignore[attr-defined]  # Megatron's attribute

    def bucket_of_params(self, bucket: int) -> torch.Tensor:
        """The bucket's slice of ``params``, padding included."""
        return self._bucket(self.params, bucket)

    def bucket_of_grads(self, bucket: int) -> torch.Tensor:
        """The bucket's slice of ``grads``, padding included."""
        return self._bucket(self.grads, bucket)

    def _bucket(self, memory: torch.Tensor, bucket: int) -> torch.Tensor:
        low = int(self.layout.bucket_offset[bucket])
        return memory[low : low + int(self.layout.bucket_numel[bucket])]


def make_buffers(layout: Layout, tensors: Sequence[torch.Tensor], device: torch.device) -> tuple[ParamGradBuffer, ...]:
    """Move ``tensors`` (registration order) into buffers."""
    with torch.no_grad():
        return tuple(ParamGradBuffer(buffer, tensors, device) for buffer in layout.buffers)

"""The model's own tensors beside the optimizer state: persistent buffers and frozen params, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..api.tensors import dtype_name, tensor_bytes
from ..core.errors import UnsupportedError, UsageError
from ..encodings.tensor_file import TensorData
from ..engine.naming import strip_wrappers

if TYPE_CHECKING:
    from ..engine.zero1 import Zero1Optimizer as Engine

__all__ = ["check_model_tensors", "collect_model_tensors", "restore_model_tensors"]


def collect_model_tensors(model: nn.Module, optimizers: Iterable[Engine]) -> list[tuple[str, TensorData]]:
    """(kind, tensor) of every persistent buffer and of every param that none of ``optimizers`` trains."""
    trained = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    return [
        (kind, (name, dtype_name(tensor.dtype), tuple(tensor.shape), tensor_bytes(tensor)))
        for kind, name, tensor in _tensors(model)
        if id(tensor) not in trained
    ]


def check_model_tensors(model: nn.Module, stored: Mapping[str, torch.Tensor], *, strict: bool) -> None:
    """Raises ``UnsupportedError`` that names the first stored tensor whose shape or dtype is not the model's, and, if
    ``strict``, ``UsageError`` for one that the model has not.
    """
    present = {name: tensor for _, name, tensor in _tensors(model)}
    for name, value in stored.items():
        tensor = present.get(name)
        if tensor is None:
            if strict:
                raise UsageError(
                    "the checkpoint has a buffer or frozen param that the model has not",
                    param=name,
                    hint='pass unexpected="drop" to leave it out',
                )
        elif (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
            raise UnsupportedError(
                "a buffer or frozen param is stored in another shape or dtype",
                param=name,
                found=f"{dtype_name(value.dtype)}{list(value.shape)}",
                expected=f"{dtype_name(tensor.dtype)}{list(tensor.shape)}",
            )


@torch.no_grad()
def restore_model_tensors(model: nn.Module, stored: Mapping[str, torch.Tensor]) -> None:
    """Writes stored buffers and params into the model, in place, by name, as ``check_model_tensors`` has let them."""
    present = {name: tensor for _, name, tensor in _tensors(model)}
    for name, value in stored.items():
        if name in present:
            present[name].copy_(value)


def _tensors(model: nn.Module) -> list[tuple[str, str, torch.Tensor]]:
    """(kind, name, tensor) of persistent buffers and params, each tensor once, under its first name."""
    kept = set(model.state_dict(keep_vars=True))
    found = [("buffer", name, tensor) for name, tensor in model.named_buffers() if name in kept]
    found += [("frozen", name, tensor) for name, tensor in model.named_parameters()]
    names = strip_wrappers([name for _, name, _ in found])
    return [(kind, name, tensor) for (kind, _, tensor), name in zip(found, names, strict=True)]

"""Between torch tensors and bytes. torch is imported when a tensor is, not before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core.dtypes import DTYPE_NAMES
from ..core.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["dtype_name", "from_bytes", "new_tensor", "stored_dtype", "tensor_bytes", "torch_dtype"]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def stored_dtype(tensor: torch.Tensor, place: str) -> str:
    """The name of a tensor's dtype. Raises ``UnsupportedError`` that names the place where no container can hold it."""
    name = dtype_name(tensor.dtype)
    if name not in DTYPE_NAMES:
        raise UnsupportedError(
            "element type is not supported", param=place, found=name, expected=f"one of {', '.join(DTYPE_NAMES)}"
        )
    return name


def torch_dtype(name: str) -> torch.dtype:
    """Raises ``UsageError`` for a name that torch has not."""
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError("torch has no such dtype", found=name)
    return dtype


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The values' bytes, row-major; a view of the tensor's memory where it is a contiguous one on the CPU."""
    import torch

    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    if not flat.numel():
        return memoryview(b"")
    view: Any = flat.view(torch.uint8).numpy()
    return memoryview(view)


def new_tensor(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """An uninitialised CPU tensor."""
    import torch

    return torch.empty(shape, dtype=torch_dtype(dtype))


def from_bytes(data: bytearray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor over ``data``, row-major; it keeps the memory."""
    import torch

    if not data:
        return torch.empty(shape, dtype=torch_dtype(dtype))
    return torch.frombuffer(data, dtype=torch_dtype(dtype)).reshape(shape)

"""What an optimizer is asked to train: its params in registration order, their specs, and the groups they stand in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..core.errors import UnsupportedError, UsageError
from ..model.state import ParamSpec
from .naming import strip_wrappers

__all__ = ["GroupInput", "ModelChunks", "ParamTable", "collect_params", "dtype_name", "dtype_of"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class GroupInput:
    """One param group as given: positions of its params in the table, in the group's order, and its own options."""

    members: tuple[int, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class ParamTable:
    """Trained params in registration order. ``tensors[i]`` is the model's own param, ``specs[i]`` describes it.

    ``chunks``: the model, where it was given in several.
    """

    tensors: tuple[torch.Tensor, ...] = field(repr=False)
    specs: tuple[ParamSpec, ...]
    groups: tuple[GroupInput, ...]
    device: torch.device
    chunks: ModelChunks | None = field(default=None, repr=False)

    @property
    def main_dtype(self) -> torch.dtype:
        """Of the main params: float32, or float64 where the model is float64."""
        return torch.float64 if self.specs[0].dtype == "float64" else torch.float32

    def rows(self) -> list[tuple[str, str]]:
        """(name, everything that all ranks must agree on), one a param."""
        return [
            (
                s.name,
                f"shape {s.shape} {s.dtype} grads {s.grad_dtype} group {s.group} shared {s.shared_embedding}"
                f" expert {s.expert}",
            )
            for s in self.specs
        ]


class ModelChunks(nn.Module):
    """Several modules as one model: the chunks that a pipeline stage runs (virtual pipeline), in their order.

    Params keep the names that they have in their chunk, unless two of them have the same: then every name gets the
    chunk's number, ``model0.``, ``model1.``, as in Megatron.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.chunks = nn.ModuleList(chunks)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        rows = [list(chunk.named_parameters()) for chunk in self.chunks]
        names = [strip_wrappers([name for name, _ in row]) for row in rows]
        known: dict[str, nn.Parameter] = {}
        alone = all(
            known.setdefault(name, param) is param
            for row, own in zip(rows, names, strict=True)
            for name, (_, param) in zip(own, row, strict=True)
        )
        seen: set[nn.Parameter] = set()
        for at, (row, own) in enumerate(zip(rows, names, strict=True)):
            for name, (_, param) in zip(own, row, strict=True):
                if param not in seen or not remove_duplicate:
                    seen.add(param)
                    yield prefix + (name if alone else f"model{at}.{name}"), param


@dataclass
class _Entry:
    tensor: torch.Tensor
    name: str | None
    group: int


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Inverse of ``dtype_name``."""
    dtype = getattr(torch, name, None)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def collect_params(
    source: Any,
    given: nn.Module | Sequence[nn.Module] | None,
    grad_dtype: torch.dtype | str | None,
    *,
    experts: bool = False,
) -> ParamTable:
    """Read ``source`` (a model, tensors, (name, tensor) pairs, or group dicts of either), leaving frozen params out.

    A model may be a list of chunks. A tensor that stands under several names is one param under its first name.
    ``experts``: expert params (``allreduce=False``) are allowed. Raises ``UsageError`` for no trainable params, a param
    in two groups, a name given twice and a tensor that is not in ``model``; ``UnsupportedError`` for params on several
    devices or on meta, dtypes that are not real floating point of 16 to 64 bits, modules that make sparse gradients,
    and a model that something else reduces the gradients of.
    """
    source, model = _chunked(source), _chunked(given)
    if isinstance(source, nn.Module):
        model, source = source, list(source.parameters())
    if model is not None:
        _refuse_wrapped(model)
    groups = _groups(source)
    entries = _entries(groups)
    names = _names([e for e in entries if e.tensor.requires_grad], model)
    trained = [e for e in entries if e.tensor.requires_grad]
    if not trained:
        raise UsageError("no params to train", found=f"{len(entries)} params, none with requires_grad=True")
    order = _registration_order(trained, model)
    trained = [trained[i] for i in order]
    names = [names[i] for i in order]
    _check_names(names)
    _check_tensors(trained, names)
    if not experts:
        _refuse_experts(trained, names)
    if model is not None:
        _refuse_sparse(model, {id(e.tensor): name for e, name in zip(trained, names, strict=True)})
    specs = tuple(_spec(e, name, grad_dtype) for e, name in zip(trained, names, strict=True))
    position = {id(e.tensor): i for i, e in enumerate(trained)}
    inputs = tuple(
        GroupInput(
            tuple(position[id(e.tensor)] for e in entries if e.group == i and id(e.tensor) in position),
            {key: value for key, value in group.items() if key not in ("params", "param_names")},
        )
        for i, group in enumerate(groups)
    )
    chunks = model if isinstance(model, ModelChunks) else None
    return ParamTable(tuple(e.tensor for e in trained), specs, inputs, trained[0].tensor.device, chunks)


def _chunked(given: Any) -> Any:
    """A list of modules as one model; anything else as it is."""
    if isinstance(given, list | tuple) and given and all(isinstance(item, nn.Module) for item in given):
        return ModelChunks(given)
    return given


def _groups(source: Any) -> list[dict[str, Any]]:
    if isinstance(source, torch.Tensor | set | str) or not isinstance(source, Iterable):
        raise UsageError(
            "params have no order",
            found=type(source).__name__,
            expected="a model, params, (name, param) pairs or groups",
        )
    items = list(source)
    if not items:
        raise UsageError("no params to train", found="an empty list")
    if any(isinstance(item, nn.Module) for item in items):
        raise UsageError("a model among params", hint="pass one model, a list of chunks, or params")
    if not isinstance(items[0], dict):
        return [{"params": items}]
    for at, group in enumerate(items):
        if not isinstance(group, dict) or "params" not in group:
            raise UsageError(
                f"param group {at} is malformed", found=type(group).__name__, expected="a dict with 'params'"
            )
    return items


def _entries(groups: list[dict[str, Any]]) -> list[_Entry]:
    """One entry a distinct tensor, in the order of the groups."""
    seen: dict[int, _Entry] = {}
    for at, group in enumerate(groups):
        members = group["params"]
        if isinstance(members, set):
            raise UsageError(f"param group {at} has no order", found="a set", expected="a list of params")
        for item in [members] if isinstance(members, torch.Tensor) else list(members):
            name, tensor = item if isinstance(item, tuple) else (None, item)
            if not isinstance(tensor, torch.Tensor):
                raise UsageError(f"param group {at} holds what is no param", found=type(tensor).__name__)
            first = seen.setdefault(id(tensor), _Entry(tensor, name, at))
            if first.group != at:
                raise UsageError(
                    f"param is in groups {first.group} and {at}",
                    param=name or first.name,
                    found=f"shape {tuple(tensor.shape)}",
                )
    return list(seen.values())


def _names(entries: list[_Entry], model: nn.Module | None) -> list[str]:
    known: dict[int, str] = {}
    if model is not None:
        named = list(model.named_parameters())
        known = dict(zip((id(p) for _, p in named), strip_wrappers([name for name, _ in named]), strict=True))
    given = [e.name for e in entries]
    stripped = iter(strip_wrappers([name for name in given if name is not None]))
    names = []
    for at, entry in enumerate(entries):
        if entry.name is not None:
            names.append(next(stripped))
        elif model is None:
            names.append(f"params.{at}")
        elif id(entry.tensor) in known:
            names.append(known[id(entry.tensor)])
        else:
            raise UsageError(
                f"param {at} of the groups is not in the model", found=f"shape {tuple(entry.tensor.shape)}"
            )
    return names


def _registration_order(entries: list[_Entry], model: nn.Module | None) -> list[int]:
    """Positions of ``entries`` in the model's registration order; what the model does not know comes last."""
    if model is None:
        return list(range(len(entries)))
    place = {id(p): i for i, p in enumerate(model.parameters())}
    return sorted(range(len(entries)), key=lambda i: place.get(id(entries[i].tensor), len(place)))


def _check_names(names: list[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise UsageError("two params have this name", param=name)
        seen.add(name)


def _check_tensors(entries: list[_Entry], names: list[str]) -> None:
    device = entries[0].tensor.device
    float64 = entries[0].tensor.dtype == torch.float64
    for entry, name in zip(entries, names, strict=True):
        tensor = entry.tensor
        if is_lazy(tensor):
            raise UsageError("param has no shape yet", param=name, hint="run the lazy module once first")
        if tensor.device.type == "meta":
            raise UnsupportedError("param is on the meta device", param=name, hint="materialise the model first")
        if tensor.device != device:
            raise UnsupportedError("params are on several devices", param=name, found=tensor.device, expected=device)
        if tensor.layout != torch.strided or tensor.is_quantized or _wraps_others(tensor):
            raise UnsupportedError("param is no plain dense tensor", param=name, found=type(tensor).__name__)
        if tensor.dtype not in _DTYPES:
            expected = ", ".join(map(dtype_name, _DTYPES))
            raise UnsupportedError("param dtype", param=name, found=dtype_name(tensor.dtype), expected=expected)
        if (tensor.dtype == torch.float64) != float64:
            raise UnsupportedError("float64 params among others", param=name, found=dtype_name(tensor.dtype))
        if not tensor.is_leaf:
            raise UsageError("param is not a leaf tensor", param=name)


def _is_expert(tensor: torch.Tensor) -> bool:
    return getattr(tensor, "allreduce", True) is False


def _refuse_experts(entries: list[_Entry], names: list[str]) -> None:
    for entry, name in zip(entries, names, strict=True):
        if _is_expert(entry.tensor):
            raise UnsupportedError("expert params (allreduce=False) need an expert_group", param=name)


def _refuse_wrapped(model: nn.Module) -> None:
    """Gradients would be reduced twice, or the params are not whole."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            raise UsageError(
                "the model is wrapped by DistributedDataParallel, which reduces the gradients too",
                hint="pass model.module, and run that: this optimizer reduces the gradients itself",
            )
        if type(module).__name__ == "FullyShardedDataParallel":
            raise UnsupportedError("the model is wrapped by FullyShardedDataParallel, which shards the params itself")


def _refuse_sparse(model: nn.Module, names: Mapping[int, str]) -> None:
    for module in model.modules():
        if getattr(module, "sparse", False) is not True:
            continue
        for param in module.parameters(recurse=False):
            if id(param) in names:
                raise UnsupportedError(
                    f"{type(module).__name__}(sparse=True) makes sparse gradients",
                    param=names[id(param)],
                    hint="use sparse=False",
                )


def _wraps_others(tensor: torch.Tensor) -> bool:
    """True for DTensor, quantised tensors and the like."""
    return bool(is_traceable_wrapper_subclass(tensor))


def _spec(entry: _Entry, name: str, grad_dtype: torch.dtype | str | None) -> ParamSpec:
    tensor = entry.tensor
    dtype = dtype_name(tensor.dtype)
    grads = _grad_dtype(dtype, grad_dtype)
    shared = bool(getattr(tensor, "shared_embedding", False))
    return ParamSpec(name, tuple(tensor.shape), dtype, grads, entry.group, _is_expert(tensor), shared)


def _grad_dtype(dtype: str, wanted: torch.dtype | str | None) -> str:
    """float32 for 16-bit params and the param's own for others, unless told; float64 params have float64 grads."""
    if wanted is None:
        return "float64" if dtype == "float64" else "float32"
    name = dtype_name(wanted) if isinstance(wanted, torch.dtype) else wanted
    allowed = ("float64",) if dtype == "float64" else ("float32", "bfloat16", "float16")
    if name not in allowed:
        raise UsageError(f"grad_dtype for {dtype} params", found=name, expected=" or ".join(allowed))
    return name

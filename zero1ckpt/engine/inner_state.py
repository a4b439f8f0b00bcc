"""What state an inner optimizer keeps, found by one step on scratch params; and where that state is known to start.

torch's optimizers make their state in the first step. Where the values before that step are known to make it come out
bit for bit the same, state is allocated at once; all other state is made by the real first step and then moved into
the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..core.errors import UnsupportedError, UsageError, Zero1CkptError
from ..model.state import Scalar
from .adamw import AdamW
from .params import dtype_name, dtype_of
from .probe import check_elementwise, needs_dimensions

__all__ = ["GroupTemplate", "InnerFactory", "InnerTemplate", "known_start", "probe_inner", "scalar_of", "value_of"]

InnerFactory = Callable[..., torch.optim.Optimizer]
SCRATCH_NUMEL = 6
"""Of a scratch param: no optimizer's state has this size by chance."""


@dataclass(frozen=True)
class GroupTemplate:
    """State of a param of one group after a step: elementwise slots with their dtypes, scalars with sample values.

    ``at_construction``: the slots of both kinds that stand there before any step, each with its value where that is
    one number whatever the param, else with None.
    """

    slots: Mapping[str, torch.dtype] = field(default_factory=dict)
    scalars: Mapping[str, Any] = field(default_factory=dict)
    at_construction: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class InnerTemplate:
    """One ``GroupTemplate`` a param group, and the class that they hold for."""

    name: str
    groups: tuple[GroupTemplate, ...]

    @property
    def slots(self) -> dict[str, torch.dtype]:
        """Elementwise slots of any group, in the order in which the optimizer makes them."""
        return {slot: dtype for group in self.groups for slot, dtype in group.slots.items()}


_ZERO_MOMENTS = {"step": 0.0, "exp_avg": 0.0, "exp_avg_sq": 0.0, "max_exp_avg_sq": 0.0}
_STARTS: dict[type[torch.optim.Optimizer], Mapping[str, float]] = {
    torch.optim.Adam: _ZERO_MOMENTS,
    torch.optim.AdamW: _ZERO_MOMENTS,
    AdamW: _ZERO_MOMENTS,
    torch.optim.RAdam: _ZERO_MOMENTS,
    torch.optim.NAdam: {**_ZERO_MOMENTS, "mu_product": 1.0},
    torch.optim.Adamax: {"step": 0.0, "exp_avg": 0.0, "exp_inf": 0.0},
    torch.optim.RMSprop: {"step": 0.0, "square_avg": 0.0, "momentum_buffer": 0.0, "grad_avg": 0.0},
    torch.optim.Adadelta: {"step": 0.0, "square_avg": 0.0, "acc_delta": 0.0},
    # SGD's first step copies the gradient. momentum * -0.0 + g is g for every g, and keeps the sign of a zero.
    torch.optim.SGD: {"momentum_buffer": -0.0},
}
"""Values before the first step, for exactly these classes. ASGD and Rprop start from the lr of their first step."""


def keeps_state_by_param(inner: torch.optim.Optimizer) -> bool:
    """Whether a step of some params leaves others, and what a later step does with them, as they are."""
    return type(inner) in _STARTS


def known_start(inner: torch.optim.Optimizer, at: int, template: GroupTemplate) -> dict[str, float]:
    """Start values of all slots of a param in group ``at``; empty where one of them is not known to be exact."""
    if inner.param_groups[at].get("dampening"):  # SGD: later steps scale the gradient, the first does not
        return {}
    known = {**_STARTS.get(type(inner), {}), **template.at_construction}
    values = {slot: known.get(slot) for slot in (*template.slots, *template.scalars)}
    exact = {slot: value for slot, value in values.items() if value is not None}
    return exact if len(exact) == len(values) else {}


def probe_inner(
    factory: InnerFactory,
    groups: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    like: torch.Tensor,
    *,
    elementwise: bool = False,
) -> InnerTemplate:
    """Build the optimizer over one scratch param a group (dtype and device of ``like``) and let it take one step.

    Random state is left as it was. Raises ``UsageError`` for options that the optimizer refuses, ``UnsupportedError``
    for one that cannot step flat tensors, keeps state that is neither of the param's shape nor scalar, or is not
    elementwise (``elementwise``: taken for granted).
    """
    template = _one_step(factory, groups, options, like)
    if not elementwise:
        check_elementwise(lambda params: _construct(factory, params, groups, options), len(groups), like)
    return template


def _one_step(
    factory: InnerFactory, groups: Sequence[Mapping[str, Any]], options: Mapping[str, Any], like: torch.Tensor
) -> InnerTemplate:
    scratch = [nn.Parameter(torch.linspace(0.5, 1.0, SCRATCH_NUMEL).to(like)) for _ in groups]
    devices = [like.device] if like.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        inner = _construct(factory, scratch, groups, options)
        name = type(inner).__name__
        early = [{k: _constant(v) for k, v in inner.state.get(p, {}).items()} for p in scratch]
        for param in scratch:
            param.grad = torch.full_like(param, 0.125)
        try:
            inner.step()
        except Exception as error:
            raise UnsupportedError(
                f"{name} cannot step a flat tensor",
                found=f"{type(error).__name__}: {error}",
                expected="an elementwise optimizer",
            ) from error
        states = [inner.state.get(p, {}) for p in scratch]
        return InnerTemplate(name, tuple(_template(name, s, e) for s, e in zip(states, early, strict=True)))


def _construct(
    factory: InnerFactory,
    scratch: Sequence[nn.Parameter],
    groups: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
) -> torch.optim.Optimizer:
    if not callable(factory):
        raise UsageError("inner optimizer", found=type(factory).__name__, expected="a class such as torch.optim.AdamW")
    try:
        inner = factory([{**g, "params": [p]} for g, p in zip(groups, scratch, strict=True)], **options)
    except Zero1CkptError:
        raise
    except (TypeError, ValueError) as error:
        if scratch[0].dim() == 1 and _takes_matrices(factory, groups, options, scratch[0]):
            raise UnsupportedError(
                f"{_name_of(factory)} is not elementwise: it takes no flat params", found=str(error)
            ) from error
        raise UsageError(f"{_name_of(factory)} refuses its options", found=str(error)) from error
    if not isinstance(inner, torch.optim.Optimizer):
        raise UsageError("inner optimizer", found=type(inner).__name__, expected="a torch.optim.Optimizer")
    return inner


def _name_of(factory: InnerFactory) -> str:
    return str(getattr(factory, "__name__", factory))


def _takes_matrices(
    factory: InnerFactory, groups: Sequence[Mapping[str, Any]], options: Mapping[str, Any], like: torch.Tensor
) -> bool:
    """Would one param of two dimensions be taken where a flat one is refused?"""
    return needs_dimensions(lambda params: factory([{**groups[0], "params": list(params)}], **options), like)


def _constant(value: Any) -> float | None:
    """The one number that all elements of ``value`` are, if they are."""
    if isinstance(value, torch.Tensor):
        first = value.flatten()[0].item() if value.numel() else None
        return first if first is not None and bool((value == first).all()) else None
    return value if isinstance(value, int | float) else None


def _template(name: str, state: Mapping[str, Any], early: Mapping[str, float | None]) -> GroupTemplate:
    slots: dict[str, torch.dtype] = {}
    scalars: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            if value.shape != (SCRATCH_NUMEL,):
                raise UnsupportedError(
                    f"{name} is not elementwise: its state {key!r} has another shape than the param",
                    found=tuple(value.shape),
                    expected=(SCRATCH_NUMEL,),
                )
            slots[key] = value.dtype
        elif value is not None:
            scalar_of(key, value)
            scalars[key] = value
    return GroupTemplate(slots, scalars, early)


def scalar_of(slot: str, value: Any) -> Scalar:
    """A 0-d tensor or Python number as a ``Scalar`` (Python's int, float and bool as int64, float64 and bool)."""
    if isinstance(value, torch.Tensor):
        return Scalar(dtype_name(value.dtype), value.item())
    for kind, dtype in ((bool, "bool"), (int, "int64"), (float, "float64")):
        if isinstance(value, kind):
            return Scalar(dtype, value)
    raise UnsupportedError(f"state {slot!r} is neither tensor nor number", found=type(value).__name__)


def value_of(scalar: Scalar, sample: Any) -> Any:
    """The inverse of ``scalar_of``: of the type, dtype and device of ``sample``, or a 0-d CPU tensor without one.

    Raises ``UnsupportedError`` where the sample's type cannot hold the value exactly.
    """
    if isinstance(sample, torch.Tensor) or sample is None:
        dtype = dtype_of(scalar.dtype) if sample is None else sample.dtype
        device = None if sample is None else sample.device
        made: Any = torch.tensor(scalar.value, dtype=dtype, device=device)
        back = made.item()
    else:
        made = back = type(sample)(scalar.value)
    if back != scalar.value and back == back:
        raise UnsupportedError(
            "scalar state does not fit", found=scalar.value, expected=f"a value of {type(sample).__name__}"
        )
    return made

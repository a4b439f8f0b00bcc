"""AdamW whose moments may be kept in fewer bits than the main params.

torch's AdamW refuses moments of another dtype than the param, and casts them when a state dict is loaded. Here the
arithmetic is that of the param's dtype, moments are rounded when they are stored, and a load changes neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ..core.errors import UnsupportedError, UsageError

__all__ = ["AdamW"]

CHUNK = 1 << 20
"""Elements whose moments are widened at a time: the temporaries stay this small."""
_MOMENTS = {"exp_avg": "exp_avg_dtype", "exp_avg_sq": "exp_avg_sq_dtype"}


class AdamW(torch.optim.Optimizer):
    """AdamW with ``exp_avg_dtype`` and ``exp_avg_sq_dtype`` (None: the param's dtype).

    With moments of the param's dtype every bit equals ``torch.optim.AdamW(foreach=False)``. The update takes the
    moments before they are rounded. A bfloat16 ``exp_avg_sq`` has 8 bits of precision and decays by at least half a
    unit in the last place only with ``beta2`` below 0.996: keep it in float32 with the usual 0.999.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        exp_avg_dtype: torch.dtype | None = None,
        exp_avg_sq_dtype: torch.dtype | None = None,
    ) -> None:
        for name, value, low, high in (
            ("lr", lr, 0.0, float("inf")),
            ("betas[0]", betas[0], 0.0, 1.0),
            ("betas[1]", betas[1], 0.0, 1.0),
            ("eps", eps, 0.0, float("inf")),
            ("weight_decay", weight_decay, 0.0, float("inf")),
        ):
            if not low <= value < high:
                raise UsageError(f"AdamW: {name}", found=value, expected=f"from {low:g}, below {high:g}")
        for dtype in (exp_avg_dtype, exp_avg_sq_dtype):
            if dtype is not None and not dtype.is_floating_point:
                raise UsageError("AdamW: dtype of a moment", found=dtype, expected="a floating-point dtype")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "exp_avg_dtype": exp_avg_dtype,
            "exp_avg_sq_dtype": exp_avg_sq_dtype,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every param that has a gradient. Returns the closure's loss, or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)
        return loss

    def _update(self, param: torch.Tensor, group: Mapping[str, Any]) -> None:
        if param.grad is None or param.grad.is_sparse or param.is_complex():
            raise UnsupportedError("AdamW takes dense real params and gradients", found=tuple(param.shape))
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for moment, key in _MOMENTS.items():
                state[moment] = torch.zeros_like(param, dtype=group[key] or param.dtype)
        state["step"] += 1
        factors = _Factors(group, float(state["step"]))
        narrow = any(state[moment].dtype != param.dtype for moment in _MOMENTS)
        tensors = (param, param.grad, state["exp_avg"], state["exp_avg_sq"])
        for pieces in _chunks(tensors) if narrow else [tensors]:
            _adamw(*pieces, factors=factors)

    def load_state_dict(self, state_dict: Any) -> None:
        """As torch's, but moments keep the dtype that they have in ``state_dict``, and must fit this optimizer's."""
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = [(param, group) for group in self.param_groups for param in group["params"]]
        for index, (param, group) in zip(saved, params, strict=True):
            given = state_dict["state"].get(index, {})
            for slot, value in given.items():
                if slot in _MOMENTS:
                    _check_dtype(slot, value.dtype, group[_MOMENTS[slot]] or param.dtype)
                device = param.device if slot in _MOMENTS else value.device
                self.state[param][slot] = value.detach().clone().to(device)


def _check_dtype(moment: str, found: torch.dtype, expected: torch.dtype) -> None:
    if found != expected:
        raise UnsupportedError(f"AdamW: {moment} would be cast", found=found, expected=expected)


class _Factors:
    """The numbers of one update, in Python's floats and in torch's order of operations."""

    def __init__(self, group: Mapping[str, Any], step: float) -> None:
        beta1, beta2 = group["betas"]
        lr = float(group["lr"])
        self.beta1, self.beta2, self.eps = beta1, beta2, group["eps"]
        self.weight_decay = group["weight_decay"]
        self.keep = 1 - lr * self.weight_decay
        self.step_size = lr / (1 - beta1**step)
        self.root = (1 - beta2**step) ** 0.5


def _adamw(*tensors: torch.Tensor, factors: _Factors) -> None:
    param, grad, m, v = tensors
    dtype = param.dtype
    first, second = m.to(dtype), v.to(dtype)  # themselves where they have that dtype
    if factors.weight_decay != 0:
        param.mul_(factors.keep)
    first.lerp_(grad, 1 - factors.beta1)
    second.mul_(factors.beta2).addcmul_(grad, grad, value=1 - factors.beta2)
    denominator = (second.sqrt() / factors.root).add_(factors.eps)
    param.addcdiv_(first, denominator, value=-factors.step_size)
    for kept, wide in ((m, first), (v, second)):
        if kept is not wide:
            kept.copy_(wide)


def _chunks(tensors: tuple[torch.Tensor, ...]) -> Iterable[tuple[torch.Tensor, ...]]:
    """The same pieces of all tensors, as views."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return zip(*(torch.split(tensor.view(-1), CHUNK) for tensor in tensors), strict=True)
    return [tensors]

"""Is an optimizer elementwise? Tried, not looked up: a scratch tensor and its two halves must end with equal bits.

Sharding cuts params anywhere, and each rank's optimizer sees its own parts only. So the whole is stepped by one
instance, and each half by an instance of its own, as two ranks would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..core.errors import UnsupportedError

__all__ = ["check_elementwise", "needs_dimensions"]

HALF = 256
"""Elements of a half: a multiple of every vector width, so that fused kernels have no tails that round otherwise."""
STEPS = 4
_SIZES = (1.0, 1e-3)
"""Of the gradients in each half: norms, means and maxima of the halves differ from those of the whole."""

Build = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def check_elementwise(build: Build, groups: int, like: torch.Tensor) -> None:
    """``build`` makes an optimizer over one param for each of ``groups`` groups. ``like``: dtype and device.

    Raises ``UnsupportedError`` that names the optimizer and what differs. Random state is left as it was.
    """
    whole = _run(build, groups, like, 0, 2 * HALF)
    halves = [_run(build, groups, like, low, low + HALF) for low in (0, HALF)]
    for group in range(groups):
        problem = _difference(whole.results[group], [half.results[group] for half in halves])
        if problem is not None:
            raise UnsupportedError(
                f"{whole.name} is not elementwise: {problem} depends on how a param is cut",
                found="other bits for a tensor than for its two halves",
                expected="an optimizer such as AdamW, Adam, SGD or Lion",
                hint="pass elementwise=True to shard it nevertheless: each rank then sees its own parts only",
            )


def needs_dimensions(build: Build, like: torch.Tensor) -> bool:
    """Does the optimizer, which has refused a flat param, take one of two dimensions?"""
    try:
        build([nn.Parameter(torch.ones(4, 4).to(like))])
    except Exception:
        return False
    return True


class _Run:
    def __init__(self, name: str, results: list[dict[str, Any]]) -> None:
        self.name, self.results = name, results


def _run(build: Build, groups: int, like: torch.Tensor, low: int, high: int) -> _Run:
    """What ``STEPS`` steps make of elements ``[low, high)``: the param and its state, one mapping a group."""
    devices = [like.device] if like.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(0)
        params = [nn.Parameter(_values(0, low, high).to(like)) for _ in range(groups)]
        optimizer = build(params)
        for step in range(STEPS):
            for param in params:
                param.grad = _values(step + 1, low, high).to(like)
            optimizer.step()
        results = [
            {"the param": param.detach(), **optimizer.state.get(param, {}), **_numbers(group)}
            for param, group in zip(params, optimizer.param_groups, strict=True)
        ]
        return _Run(type(optimizer).__name__, results)


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers that the optimizer keeps in its group, such as an estimate of the distance to the solution."""
    return {f"group value {key!r}": value for key, value in group.items() if isinstance(value, int | float)}


def _values(step: int, low: int, high: int) -> torch.Tensor:
    """The same elements whatever the cut; each half of another size, and another mean."""
    generator = torch.Generator().manual_seed(100 + step)
    whole = torch.randn(2 * HALF, generator=generator, dtype=torch.float64)
    for nth, size in enumerate(_SIZES):
        part = whole[nth * HALF : (nth + 1) * HALF]
        part.add_(nth).mul_(size if step else 1.0)
    return whole[low:high].clone()


def _difference(whole: Mapping[str, Any], halves: Sequence[Mapping[str, Any]]) -> str | None:
    """The first entry that is not the halves' laid end to end, or that they do not share if it is one number."""
    for key, value in whole.items():
        parts = [half.get(key) for half in halves]
        if isinstance(value, torch.Tensor) and value.shape == (2 * HALF,):
            flat = [part for part in parts if isinstance(part, torch.Tensor) and part.shape == (HALF,)]
            same = len(flat) == len(parts) and _same_bits(value, torch.cat(flat))
        elif isinstance(value, torch.Tensor):
            same = all(isinstance(part, torch.Tensor) and _same_bits(value, part) for part in parts)
        else:
            same = all(repr(part) == repr(value) for part in parts)
        if not same:
            return key if key.startswith(("the ", "group ")) else f"state {key!r}"
    return None


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.detach().contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))

"""Loss scales, constant and dynamic, and the one pass that unscales gradients and finds infinities.

A 16-bit float with 5 bits of exponent (float16) loses small gradients; a loss multiplied by a large factor keeps them,
and overflow says that the factor is too large. Such a step is left out on all ranks together, and the factor shrinks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch

from ..core.errors import UsageError
from ..model.state import LossScale
from .collectives import Communicator

__all__ = ["ConstantScaler", "DynamicScale", "DynamicScaler", "Scaler", "any_rank", "make_scaler", "unscale"]


@dataclass(frozen=True, slots=True)
class DynamicScale:
    """How a dynamic loss scale moves. ``loss_scale="dynamic"`` takes these defaults, which are those of torch.amp.

    After ``growth_interval`` finite steps in a row the scale is multiplied by ``growth_factor``. Every step that
    overflows uses up one of ``hysteresis`` chances; once none is left the scale is multiplied by ``backoff_factor``, at
    each further overflow too, down to ``minimum``; the chances come back when the scale grows.
    """

    initial: float = 65536.0
    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    hysteresis: int = 1
    minimum: float = 1.0

    def __post_init__(self) -> None:
        _check(self.minimum > 0, "minimum", self.minimum, "above 0")
        _check(isfinite(self.initial) and self.initial >= self.minimum, "initial", self.initial, "at least minimum")
        _check(self.growth_interval >= 1, "growth_interval", self.growth_interval, "at least 1")
        _check(self.growth_factor >= 1, "growth_factor", self.growth_factor, "at least 1")
        _check(0 < self.backoff_factor < 1, "backoff_factor", self.backoff_factor, "between 0 and 1")
        _check(self.hysteresis >= 1, "hysteresis", self.hysteresis, "at least 1")


def _check(good: bool, name: str, found: object, expected: str) -> None:
    if not good:
        raise UsageError(f"loss_scale: {name}", found=found, expected=expected)


class Scaler:
    """No loss scale: gradients are not looked at, and nothing is left out."""

    scale = 1.0
    checks = False
    """Whether every step looks for infinities, which reads one number back from the device."""

    def update(self, found_inf: bool) -> None:
        """To be called once for each step, by all ranks alike."""

    def state(self) -> LossScale | None:
        """What a checkpoint must hold for the scale to go on as if there had been no interruption."""
        return None

    def load(self, state: LossScale | None) -> None:
        """Takes up ``state``; None starts afresh."""


class ConstantScaler(Scaler):
    """The same factor in every step; a step that overflows is left out. It has no state."""

    checks = True

    def __init__(self, scale: float) -> None:
        self.scale = scale


class DynamicScaler(Scaler):
    """See ``DynamicScale``. All ranks move alike, since they see the same ``found_inf``."""

    checks = True

    def __init__(self, rule: DynamicScale) -> None:
        self.rule = rule
        self._finite_steps = 0
        self._chances = rule.hysteresis
        self.scale = rule.initial

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self._finite_steps = 0
            self._chances -= 1
            if self._chances <= 0:
                self.scale = max(self.scale * self.rule.backoff_factor, self.rule.minimum)
            return
        self._finite_steps += 1
        if self._finite_steps == self.rule.growth_interval:
            self._finite_steps = 0
            self._chances = self.rule.hysteresis
            grown = self.scale * self.rule.growth_factor
            self.scale = grown if grown <= torch.finfo(torch.float32).max else self.scale

    def state(self) -> LossScale:
        return LossScale(self.scale, self._finite_steps, max(self._chances, 0))

    def load(self, state: LossScale | None) -> None:
        start = LossScale(self.rule.initial, 0, self.rule.hysteresis) if state is None else state
        self.scale = start.scale
        self._finite_steps = start.finite_steps
        self._chances = start.hysteresis_left


def make_scaler(wanted: Any) -> Scaler:
    """From the keyword ``loss_scale``. Raises ``UsageError`` for what is no scale."""
    if wanted is None:
        return Scaler()
    if wanted == "dynamic":
        return DynamicScaler(DynamicScale())
    if isinstance(wanted, DynamicScale):
        return DynamicScaler(wanted)
    number = isinstance(wanted, int | float) and not isinstance(wanted, bool)
    if not number or not isfinite(wanted) or wanted <= 0:
        raise UsageError("loss_scale", found=repr(wanted), expected="None, a number above 0, 'dynamic' or DynamicScale")
    return ConstantScaler(float(wanted))


def unscale(shards: Iterable[torch.Tensor], scale: float, device: torch.device) -> torch.Tensor:
    """Multiply every shard by ``1 / scale`` in place, in its own dtype; 1.0 on ``device`` if an element is not finite.

    One pass, which reads nothing back to the host. A scale that is a power of two changes no bit of a gradient.
    """
    found = torch.zeros(1, dtype=torch.float32, device=device)
    inverse = torch.full((), 1.0 / scale, dtype=torch.float64).to(device=device, dtype=torch.float32)
    rows = [shard for shard in shards if shard.numel()]
    if rows:
        torch._amp_foreach_non_finite_check_and_unscale_(rows, found, inverse)
    return found


def any_rank(found: torch.Tensor, scopes: Sequence[Communicator]) -> list[int]:
    """Ranks whose ``found`` is not zero. Waits for the device: all ranks must know before they step.

    They are numbered as if the ranks of one scope after the other stood in a row.
    """
    for comm in scopes:
        found = comm.gather_rows(found).flatten()
    return [rank for rank, value in enumerate(found.tolist()) if value]

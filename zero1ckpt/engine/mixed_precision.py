"""The mixed-precision layer: owns ``step()``; main params and gradients may have another dtype than the model's.

Order of a step: gradients are made ready (``collect_main_grads``: copied to the main dtype, and unscaled), clipped by
the global norm, the inner optimizer updates the main params, and ``copy_main_to_model`` puts them into the model.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..core.errors import UsageError
from .base import OptimizerBase, StepReport
from .collectives import Communicator
from .grad_norm import clip_by_norm, global_norm

__all__ = ["MixedPrecisionOptimizer"]


class MixedPrecisionOptimizer(OptimizerBase):
    """``step()`` over three hooks: ``copy_grads_to_main``, ``main_grad_shards`` and ``copy_main_to_model``."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        public_params: Sequence[Sequence[torch.Tensor]],
        trained: Mapping[torch.Tensor, torch.Tensor],
        *,
        comm: Communicator,
        device: torch.device,
        max_grad_norm: float | None,
    ) -> None:
        self.comm = comm
        self.device = device
        self.max_grad_norm = None if max_grad_norm is None else _norm_limit(max_grad_norm)
        self.applied_steps = 0
        self._grads_ready = False
        self._norm: torch.Tensor | None = None
        super().__init__(inner, public_params, trained)

    # ------------------------------------------------------------------------------------------ what subclasses supply

    @abstractmethod
    def copy_grads_to_main(self) -> None:
        """Bring the model's gradients, reduced over ranks, to the tensors of ``main_grad_shards``."""

    @abstractmethod
    def copy_main_to_model(self) -> None:
        """Cast the main params into the model's params, on all ranks."""

    @abstractmethod
    def update_main_params(self) -> None:
        """Let the inner optimizer step the main params with the main gradients."""

    @abstractmethod
    def drop_grads(self) -> None:
        """Gradients are spent: the next backward starts from zero."""

    @abstractmethod
    def unused_names(self) -> tuple[str, ...]:
        """Params that got no gradient on any rank; known once gradients are ready."""

    # ------------------------------------------------------------------------------------------------------- the step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce, unscale, clip, update, gather. Returns the closure's loss, or None. ``last`` tells what happened."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            found_inf = self.prepare_grads()
            if found_inf:
                self.last = StepReport(None, True, True, self.unused_names())
            else:
                if self.max_grad_norm is not None:
                    self._clip(self.max_grad_norm)
                self.last = StepReport(self._norm, False, False, self.unused_names())
                self.step_with_ready_grads()
            self._forget_grads()
        return loss

    def prepare_grads(self) -> bool:
        """Once a step: reduce and copy. Finding infinities belongs to a loss scale, which is not set here."""
        if not self._grads_ready:
            self.copy_grads_to_main()
            self._grads_ready = True
        return False

    def step_with_ready_grads(self) -> None:
        """Update the main params, then the model's; counts as an applied step."""
        self.push_hyper_parameters()
        self.update_main_params()
        self.pull_hyper_parameters()
        self.applied_steps += 1
        self.copy_main_to_model()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients. ``step()`` has already done so; ``set_to_none`` makes no difference."""
        self._forget_grads()

    def get_loss_scale(self) -> float:
        return 1.0

    # ---------------------------------------------------------------------------------------------------------- norms

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Reduce, then scale the gradients so that their global 2-norm is at most ``max_norm``; the norm before that
        (0-d float64). To be called by all ranks, after the last backward of the step.
        """
        limit = _norm_limit(max_norm)
        self.prepare_grads()
        return self._clip(limit)

    @torch.no_grad()
    def get_grad_norm(self) -> float:
        """Global 2-norm of the reduced gradient. To be called by all ranks, after the last backward of the step."""
        self.prepare_grads()
        self._norm = global_norm(self.main_grad_shards(), self.comm, self.device)
        return float(self._norm)

    def _clip(self, max_norm: float) -> torch.Tensor:
        self._norm = global_norm(self.main_grad_shards(), self.comm, self.device)
        clip_by_norm(self.main_grad_shards(), self._norm, max_norm)
        return self._norm

    def _forget_grads(self) -> None:
        self.drop_grads()
        self._grads_ready = False
        self._norm = None


def _norm_limit(value: float) -> float:
    if not float(value) > 0:
        raise UsageError("max_grad_norm", found=value, expected="a number above 0, or None")
    return float(value)

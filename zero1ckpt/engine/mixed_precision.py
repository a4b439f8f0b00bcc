"""The mixed-precision layer: owns ``step()``; main params and gradients may have another dtype than the model's.

Order of a step: gradients are made ready (``copy_grads_to_main``, then unscaled in place where ``main_grad_shards``
says they are), clipped by the global norm, the inner optimizer updates the main params, and ``copy_main_to_model`` puts
them into the model.

With a loss scale, a step whose gradients are not finite on any rank is left out on all of them. It does not count as a
step, and a schedule should not move::

    optimizer.scale(loss).backward()
    optimizer.step()
    if not optimizer.last.skipped:
        scheduler.step()

A scheduler that is stepped nevertheless is ahead of the updates by ``optimizer.skipped_steps``; torch's warns only
where ``optimizer.step()`` was not called at all.
"""

from __future__ import annotations

import sys
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..core.errors import UnsupportedError, UsageError
from .base import OptimizerBase, StepReport
from .collectives import Communicator
from .grad_norm import clip_by_norm, count_zeros, global_norm
from .grad_scaler import Scaler, any_rank, unscale

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
        scaler: Scaler | None = None,
        model_parallel: Communicator | None = None,
    ) -> None:
        self.comm = comm
        self.scopes = (comm,) if model_parallel is None else (comm, model_parallel)
        """What norms are summed and overflows agreed over, one after the other: all ranks that hold gradients."""
        self.device = device
        self.max_grad_norm = None if max_grad_norm is None else _norm_limit(max_grad_norm)
        self.scaler = scaler or Scaler()
        self.applied_steps = 0
        self.skipped_steps = 0
        """Steps that were left out by this process because a gradient was not finite."""
        self._grads_ready = False
        self._not_finite: list[int] = []
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
    def main_grad_pieces(self) -> Sequence[torch.Tensor]:
        """As ``main_grad_shards``, without padding: one flat tensor for each part of a param that this rank owns."""

    @abstractmethod
    def counted_grads(self, *, padded: bool) -> Sequence[torch.Tensor]:
        """Of ``main_grad_shards`` (``padded``) or ``main_grad_pieces``, what no other rank of ``scopes`` counts too."""

    @abstractmethod
    def drop_grads(self) -> None:
        """Gradients are spent: the next backward starts from zero."""

    @abstractmethod
    def unused_names(self) -> tuple[str, ...]:
        """Params that got no gradient on any rank; known once gradients are ready."""

    # ------------------------------------------------------------------------------------------------------- the step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce, unscale, clip, update, gather. Returns the closure's loss, or None. ``last`` tells what happened."""
        self.check_steppable()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            found_inf = self.prepare_grads()
            if found_inf:
                self._leave_out()
            else:
                if self.max_grad_norm is not None:
                    self._clip(self.max_grad_norm)
                self.last = StepReport(self._norm, False, False, self.unused_names())
                self.step_with_ready_grads()
            self.scaler.update(found_inf)
            self._forget_grads()
        return loss

    def check_steppable(self) -> None:
        """Raises where the state does not allow a step. To be extended."""

    def prepare_grads(self) -> bool:
        """Once a step: reduce, copy, unscale. True where there is a loss scale and a rank has an element that is not
        finite: all ranks get the same answer.
        """
        if not self._grads_ready:
            self.copy_grads_to_main()
            self._grads_ready = True
            if self.scaler.checks:
                found = unscale(self.main_grad_shards(), self.scaler.scale, self.device)
                self._not_finite = any_rank(found, self.scopes)
        return bool(self._not_finite)

    def _leave_out(self) -> None:
        """No update. The first time in this process rank 0 says so; the rest are counted."""
        self.skipped_steps += 1
        self.last = StepReport(None, True, True, self.unused_names())
        if self.skipped_steps == 1 and all(comm.leads for comm in self.scopes):
            warnings.warn(
                f"gradients were not finite in the shards of ranks {self._not_finite} at loss scale"
                f" {self.scaler.scale:g}: the step was left out on all ranks. Further ones are counted in"
                " optimizer.skipped_steps; step schedulers only if not optimizer.last.skipped",
                RuntimeWarning,
                stacklevel=_callers_level(),
            )

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
        return self.scaler.scale

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """torch.amp.GradScaler asks for this before it unscales ``param.grad``, which is not where gradients are."""
        raise UnsupportedError(
            "torch.amp.GradScaler cannot drive this optimizer: the gradients are in its buffers",
            hint='construct it with loss_scale="dynamic" and call optimizer.scale(loss).backward(); optimizer.step()',
        )

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
        """Global 2-norm of the reduced gradient, over all parts of the model. To be called by all ranks, also those of
        the model-parallel group, after the last backward of the step.
        """
        self.prepare_grads()
        self._norm = global_norm(self.counted_grads(padded=True), self.scopes, self.device)
        return float(self._norm)

    @torch.no_grad()
    def count_zeros(self) -> int:
        """Elements of the reduced gradient that are zero. To be called by all ranks, after the last backward."""
        self.prepare_grads()
        return count_zeros(self.counted_grads(padded=False), self.scopes, self.device)

    def _clip(self, max_norm: float) -> torch.Tensor:
        self._norm = global_norm(self.counted_grads(padded=True), self.scopes, self.device)
        clip_by_norm(self.main_grad_shards(), self._norm, max_norm)
        return self._norm

    def _forget_grads(self) -> None:
        self.drop_grads()
        self._grads_ready = False
        self._not_finite = []
        self._norm = None


def _callers_level() -> int:
    """``stacklevel`` of a warning by this function's caller: the first frame outside of this package and torch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("zero1ckpt", "torch"):
        level, frame = level + 1, frame.f_back
    return level


def _norm_limit(value: float) -> float:
    if not float(value) > 0:
        raise UsageError("max_grad_norm", found=value, expected="a number above 0, or None")
    return float(value)
